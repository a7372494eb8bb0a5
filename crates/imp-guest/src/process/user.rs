//! Who a process runs as: the image's USER, looked up in the image's passwd and group.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::fs::OFlags;

/// Largest passwd or group that is read: a few ten thousand entries.
const MAX_DATABASE: u64 = 4 << 20;
/// Linux, `NGROUPS_MAX`.
const MAX_GROUPS: usize = 65536;

/// Whom a process runs as.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups.
    pub(crate) groups: Vec<u32>,
    /// Home directory; `/` where passwd knows none.
    pub(crate) home: String,
}

/// Reads a database of the image. Runs inside the root. A missing one is empty: images need no /etc.
///
/// # Errors
/// When it is no regular file, too large, or can't be read.
pub(crate) fn read_database(path: &str) -> Result<String> {
    // A device or a FIFO of that name must not hang us.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits();
    let file = match File::options().read(true).custom_flags(flags.cast_signed()).open(path) {
        Ok(file) => file,
        Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {
            return Ok(String::new());
        }
        Err(e) => return Err(e).with_context(|| format!("open the image's {path}")),
    };
    ensure!(file.metadata().is_ok_and(|m| m.is_file()), "the image's {path} is not a regular file");
    let mut bytes = Vec::new();
    file.take(MAX_DATABASE + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("read the image's {path}"))?;
    ensure!(bytes.len() as u64 <= MAX_DATABASE, "the image's {path} is larger than {MAX_DATABASE} bytes");
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// `name:password:uid:gid:comment:home:shell` (passwd(5)).
struct PasswdEntry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

fn passwd_entries(text: &str) -> impl Iterator<Item = PasswdEntry<'_>> {
    text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, _, uid, gid) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let home = fields.nth(1).unwrap_or("");
        if name.is_empty() || name.starts_with('#') {
            return None;
        }
        Some(PasswdEntry { name, uid: uid.trim().parse().ok()?, gid: gid.trim().parse().ok()?, home })
    })
}

/// `name:password:gid:member,member` (group(5)).
struct GroupEntry<'a> {
    name: &'a str,
    gid: u32,
    members: &'a str,
}

fn group_entries(text: &str) -> impl Iterator<Item = GroupEntry<'_>> {
    text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, _, gid) = (fields.next()?, fields.next()?, fields.next()?);
        if name.is_empty() || name.starts_with('#') {
            return None;
        }
        Some(GroupEntry { name, gid: gid.trim().parse().ok()?, members: fields.next().unwrap_or("").trim() })
    })
}

/// Resolves `user`, `uid`, `user:group`, `uid:gid` and the mixed forms (OCI image specification, config.md, `User`).
/// Empty is root. A name has to exist; a number need not. Supplementary groups are the user's by the group file unless
/// a group is given.
///
/// # Errors
/// For a name that the image does not know, or a malformed specification.
pub(crate) fn resolve(specification: &str, passwd: &str, group: &str) -> Result<User> {
    let (user, explicit_group) = match specification.split_once(':') {
        Some((_, "")) | None => (specification.trim_end_matches(':'), None),
        Some((user, group)) => (user, Some(group)),
    };
    let user = if user.is_empty() { "0" } else { user };
    let number = user.parse::<u32>().ok();
    let entry = passwd_entries(passwd)
        .find(|e| e.name == user)
        .or_else(|| passwd_entries(passwd).find(|e| Some(e.uid) == number));
    let (uid, mut gid, name, home) = match (&entry, number) {
        (Some(e), _) => (e.uid, e.gid, Some(e.name), e.home),
        (None, Some(uid)) => (uid, 0, None, ""),
        // Every system has it, also one without passwd.
        (None, None) if user == "root" => (0, 0, Some("root"), "/root"),
        (None, None) => {
            bail!("the image's /etc/passwd has no user {user:?} (user specification {specification:?})")
        }
    };
    // -1 means "leave as it is" to the system calls.
    ensure!(uid != u32::MAX && gid != u32::MAX, "the user id of {specification:?} is out of range");
    let mut groups = Vec::new();
    match explicit_group {
        Some(wanted) => gid = resolve_group(wanted, group)?,
        None => {
            if let Some(name) = name {
                groups.extend(
                    group_entries(group)
                        .filter(|e| e.members.split(',').any(|m| m.trim() == name))
                        .map(|e| e.gid),
                );
            }
            groups.sort_unstable();
            groups.dedup();
            groups.truncate(MAX_GROUPS);
        }
    }
    let home = if home.starts_with('/') { home } else { "/" };
    Ok(User { uid, gid, groups, home: home.to_owned() })
}

fn resolve_group(wanted: &str, group: &str) -> Result<u32> {
    let gid = match group_entries(group).find(|e| e.name == wanted) {
        Some(entry) => entry.gid,
        None => match wanted.parse() {
            Ok(gid) => gid,
            Err(_) if wanted == "root" => 0,
            Err(_) => bail!("the image's /etc/group has no group {wanted:?}"),
        },
    };
    ensure!(gid != u32::MAX, "the group id {wanted:?} is out of range");
    Ok(gid)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\n# a comment\nbroken line\nweb:x:33:33:www:/var/www:/sbin/nologin\n\
                          1000:x:5:5::/odd:\nalice:x:1000:1001::/home/alice:/bin/sh\nnohome:x:7:7\n";
    const GROUP: &str = "root:x:0:\nwww:x:33:\naudio:x:29:alice,web\nvideo:x:44: alice \nstaff:x:50:alicex\n";

    fn user(specification: &str) -> User {
        resolve(specification, PASSWD, GROUP).unwrap()
    }

    #[test]
    fn fr7_names_numbers_and_groups() {
        assert_eq!(user(""), User { uid: 0, gid: 0, groups: vec![], home: "/root".into() });
        assert_eq!(
            user("alice"),
            User { uid: 1000, gid: 1001, groups: vec![29, 44], home: "/home/alice".into() }
        );
        assert_eq!(user("33"), User { uid: 33, gid: 33, groups: vec![29], home: "/var/www".into() });
        assert_eq!(user("web:audio"), User { uid: 33, gid: 29, groups: vec![], home: "/var/www".into() });
        assert_eq!(user("4000:2000"), User { uid: 4000, gid: 2000, groups: vec![], home: "/".into() });
        assert_eq!(user("4000"), User { uid: 4000, gid: 0, groups: vec![], home: "/".into() });
        assert_eq!(user("nohome").home, "/");
        assert_eq!(user("alice:").groups, [29, 44]);
        assert_eq!(user(":audio").gid, 29);
    }

    #[test]
    fn a_name_wins_over_a_number() {
        assert_eq!(user("1000").uid, 5);
    }

    #[test]
    fn unknown_names_are_told() {
        assert!(resolve("bob", PASSWD, GROUP).unwrap_err().to_string().contains("no user \"bob\""));
        assert!(resolve("alice:bobs", PASSWD, GROUP).unwrap_err().to_string().contains("no group \"bobs\""));
        assert!(resolve("4294967295", PASSWD, GROUP).is_err());
        assert!(resolve("0:4294967295", PASSWD, GROUP).is_err());
        assert!(resolve("-1", PASSWD, GROUP).is_err());
    }

    #[test]
    fn an_image_without_etc_has_root_and_numbers() {
        assert_eq!(resolve("root", "", "").unwrap().uid, 0);
        assert_eq!(resolve("1000:2000", "", "").unwrap().gid, 2000);
        assert!(resolve("web", "", "").is_err());
    }

    #[test]
    fn a_database_that_is_no_file_is_refused_and_a_missing_one_empty() {
        assert_eq!(read_database("/nonexistent/passwd").unwrap(), "");
        assert!(read_database("/dev/zero").is_err());
    }

    proptest! {
        #[test]
        fn any_files_and_any_specification_end_in_a_user_or_an_error(
            specification in "[a-z0-9:]{0,12}|.{0,12}",
            passwd in "([a-z0-9:#/]{0,30}\n){0,6}|.{0,80}",
            group in "([a-z0-9:,]{0,30}\n){0,6}|.{0,80}",
        ) {
            if let Ok(user) = resolve(&specification, &passwd, &group) {
                prop_assert!(user.uid != u32::MAX && user.gid != u32::MAX);
                prop_assert!(user.home.starts_with('/'));
            }
        }

        #[test]
        fn a_pair_of_numbers_means_itself(uid in 0u32..u32::MAX, gid in 0u32..u32::MAX) {
            let user = resolve(&format!("{uid}:{gid}"), "", "").unwrap();
            prop_assert_eq!((user.uid, user.gid), (uid, gid));
        }
    }
}
