//! The name servers that a node uses and a guest can reach.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

/// Where the resolver library looks (resolv.conf(5)), and where systemd-resolved keeps the servers that it asks when the
/// former names only its own stub on the loopback (systemd-resolved.service(8)).
const FILES: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];

/// The node's IPv4 name servers and search domains, for guests whose network names none.
///
/// A loopback address means the node itself and never goes to a guest, so the result may be empty: then say so.
#[must_use]
pub fn host_resolvers() -> (Vec<Ipv4Addr>, Vec<String>) {
    resolvers_from(&FILES.map(Path::new))
}

/// As [`host_resolvers`], of the first of `files` that names a usable server.
///
/// The search domains are that file's, or else those of the first file that has any. Missing files are passed over.
#[must_use]
pub fn resolvers_from(files: &[&Path]) -> (Vec<Ipv4Addr>, Vec<String>) {
    let mut search = Vec::new();
    for file in files {
        let text = match fs::read(file) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) => {
                if error.kind() != ErrorKind::NotFound {
                    tracing::warn!(file = %file.display(), %error, "can't read the node's name servers");
                }
                continue;
            }
        };
        let (servers, domains) = parse(&text);
        if !domains.is_empty() && (search.is_empty() || !servers.is_empty()) {
            search = domains;
        }
        if !servers.is_empty() {
            return (servers, search);
        }
    }
    (Vec::new(), search)
}

/// Servers and search domains of a resolv.conf(5). The last `search` or `domain` line counts.
fn parse(text: &str) -> (Vec<Ipv4Addr>, Vec<String>) {
    let mut servers = Vec::new();
    let mut search = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("nameserver") => {
                // The guest's network is IPv4; a server that is only reachable over IPv6 would not help it.
                if let Some(Ok(IpAddr::V4(server))) = words.next().map(str::parse)
                    && !server.is_loopback()
                    && !server.is_unspecified()
                    && !servers.contains(&server)
                {
                    servers.push(server);
                }
            }
            Some("search" | "domain") => {
                search = words.filter(|word| *word != ".").map(str::to_owned).collect();
            }
            _ => {}
        }
    }
    (servers, search)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(directory: &Path, name: &str, text: &str) -> std::path::PathBuf {
        let path = directory.join(name);
        fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn servers_and_last_search_line_are_read() {
        let text = "# comment\ndomain old.example\nnameserver 10.0.0.53\nnameserver 10.0.0.53\n\
                    nameserver fd00::53\nsearch a.example b.example .\noptions ndots:5\nnameserver nonsense\n";
        let (servers, search) = parse(text);
        assert_eq!(servers, [Ipv4Addr::new(10, 0, 0, 53)]);
        assert_eq!(search, ["a.example", "b.example"]);
    }

    #[test]
    fn fr10_loopback_servers_never_reach_a_guest() {
        let directory = tempfile::tempdir().unwrap();
        let stub = file(directory.path(), "stub", "nameserver 127.0.0.53\nsearch stub.example\n");
        let real = file(directory.path(), "real", "nameserver 192.0.2.53\n");
        let (servers, search) = resolvers_from(&[&stub, &real]);
        assert_eq!(servers, [Ipv4Addr::new(192, 0, 2, 53)]);
        assert_eq!(search, ["stub.example"]);

        let (servers, _) = resolvers_from(&[&stub, &directory.path().join("absent")]);
        assert!(servers.is_empty(), "{servers:?}");
    }

    #[test]
    fn a_usable_first_file_is_final() {
        let directory = tempfile::tempdir().unwrap();
        let first = file(directory.path(), "first", "nameserver 127.0.0.1\nnameserver 192.0.2.1\n");
        let second = file(directory.path(), "second", "nameserver 192.0.2.2\nsearch second.example\n");
        assert_eq!(resolvers_from(&[&first, &second]), (vec![Ipv4Addr::new(192, 0, 2, 1)], Vec::new()));
    }
}
