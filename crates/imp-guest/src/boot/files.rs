//! The files of the workload's root that carry its identity: hostname, hosts, resolv.conf.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

/// `/etc/hosts` for a host of that name; `address` is empty without a network.
pub(crate) fn hosts(hostname: &str, address: Option<IpAddr>) -> String {
    let mut text = String::from(
        "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n",
    );
    if hostname.is_empty() {
        return text;
    }
    // Debian's convention for a host without a fixed address.
    let address = address.map_or_else(|| "127.0.1.1".to_owned(), |a| a.to_string());
    // Writing to a String can't fail.
    let _ = match hostname.split_once('.') {
        Some((short, _)) => writeln!(text, "{address}\t{hostname} {short}"),
        None => writeln!(text, "{address}\t{hostname}"),
    };
    text
}

/// `/etc/resolv.conf`, or nothing when there are no servers: then the image's own file stays.
///
/// # Errors
/// For a server that is no IP address or is the loopback: that would be the host's resolver, which is not here.
pub(crate) fn resolv_conf(servers: &[String], search: &[String]) -> Result<Option<String>> {
    if servers.is_empty() {
        return Ok(None);
    }
    let mut text = String::new();
    for server in servers {
        let address: IpAddr =
            server.parse().with_context(|| format!("the DNS server {server:?} is not an IP address"))?;
        ensure!(
            !address.to_canonical().is_loopback(),
            "the DNS server {server} is a loopback address, where nothing listens in a VM: give the network real servers"
        );
        let _ = writeln!(text, "nameserver {address}");
    }
    if !search.is_empty() {
        ensure!(
            search
                .iter()
                .all(|s| !s.is_empty() && !s.contains(|c: char| c.is_whitespace() || c.is_control())),
            "a DNS search domain is empty or has spaces: {search:?}"
        );
        let _ = writeln!(text, "search {}", search.join(" "));
    }
    Ok(Some(text))
}

/// Whether `name` can be a host's name: RFC 1123, at most 64 bytes (Linux, `__NEW_UTS_LEN`).
pub(crate) fn check_hostname(name: &str) -> Result<()> {
    let label = |l: &str| {
        !l.is_empty()
            && l.len() <= 63
            && !l.starts_with('-')
            && !l.ends_with('-')
            && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    ensure!(name.len() <= 64 && name.split('.').all(label), "{name:?} is not a host name");
    Ok(())
}

/// Puts a regular file with `text` at `path`, whatever the image has there: a symbolic link is replaced and not
/// followed, a directory gives way (kept beside it when it holds something).
pub(crate) fn replace(path: &Path, text: &str) -> Result<()> {
    let dir = path.parent().context("a file has a directory")?;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(dir)
        .with_context(|| format!("make {}", dir.display()))?;
    let new = path.with_extension("imp-new");
    remove_file(&new)?;
    let mut file = fs::File::options()
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(&new)
        .with_context(|| format!("create {}", new.display()))?;
    io::Write::write_all(&mut file, text.as_bytes()).with_context(|| format!("write {}", new.display()))?;
    if fs::symlink_metadata(path).is_ok_and(|m| m.is_dir()) && fs::remove_dir(path).is_err() {
        let kept = path.with_extension("imp-image");
        fs::rename(path, &kept).with_context(|| format!("move the directory {} aside", path.display()))?;
    }
    fs::rename(&new, path).with_context(|| format!("write {}", path.display()))
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(|s| (*s).to_owned()).collect()
    }

    #[test]
    fn hosts_names_the_vm_by_its_address() {
        let text = hosts("web-0.pool", Some("10.0.0.7".parse().unwrap()));
        assert!(text.contains("127.0.0.1\tlocalhost\n"));
        assert!(text.ends_with("10.0.0.7\tweb-0.pool web-0\n"), "{text}");
        assert!(hosts("alone", None).ends_with("127.0.1.1\talone\n"));
        assert!(!hosts("", None).contains("127.0.1.1"));
    }

    #[test]
    fn fr10_a_loopback_name_server_is_refused() {
        for server in ["127.0.0.53", "127.1.2.3", "::1", "::ffff:127.0.0.1"] {
            let error = resolv_conf(&strings(&["10.0.0.1", server]), &[]).unwrap_err().to_string();
            assert!(error.contains("loopback"), "{error}");
        }
        let text = resolv_conf(&strings(&["10.0.0.1", "fd00::53"]), &strings(&["svc.local", "local"]))
            .unwrap()
            .unwrap();
        assert_eq!(text, "nameserver 10.0.0.1\nnameserver fd00::53\nsearch svc.local local\n");
    }

    #[test]
    fn fr12_no_servers_is_no_error() {
        assert_eq!(resolv_conf(&[], &strings(&["local"])).unwrap(), None);
    }

    #[test]
    fn search_domains_can_not_smuggle_lines() {
        assert!(resolv_conf(&strings(&["10.0.0.1"]), &strings(&["a\nnameserver 6.6.6.6"])).is_err());
    }

    #[test]
    fn fr11_links_and_directories_give_way_to_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        fs::write(&outside, "untouched").unwrap();
        let etc = dir.path().join("etc");
        let path = etc.join("resolv.conf");
        replace(&path, "made\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "made\n");

        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&outside, &path).unwrap();
        replace(&path, "link\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "link\n");
        assert_eq!(fs::read_to_string(&outside).unwrap(), "untouched");

        for content in [None, Some("inside")] {
            fs::remove_file(&path).unwrap();
            fs::create_dir(&path).unwrap();
            if let Some(name) = content {
                fs::write(path.join(name), "").unwrap();
            }
            replace(&path, "dir\n").unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "dir\n");
        }
        assert!(etc.join("resolv.imp-image/inside").exists());
        replace(&path, "again\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "again\n");
    }

    #[test]
    fn host_names_follow_rfc_1123() {
        for good in ["a", "web-0", "web-0.pool.example", "0x"] {
            check_hostname(good).unwrap();
        }
        for bad in ["", "-a", "a-", "a..b", "a b", "a\nb", "ä", &"x".repeat(65)] {
            assert!(check_hostname(bad).is_err(), "{bad}");
        }
    }
}
