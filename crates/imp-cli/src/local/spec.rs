//! From docker's flags to a [`pb::VmSpec`].

use super::args::{Pull, RunArgs};
use anyhow::Context as _;
use camino::Utf8PathBuf;
use imp_image::ImageSource;
use imp_proto::v1 as pb;

/// Smallest VM that boots Debian's kernel, in MiB; the class's minimum as well.
const MIN_MEMORY_MIB: u64 = 128;

/// The wanted VM of `imp run`.
///
/// # Errors
/// When a flag makes no sense.
pub(super) fn build(
    args: &RunArgs,
    vm: pb::VmRef,
    network: pb::Network,
    environment: &dyn Fn(&str) -> Option<String>,
) -> anyhow::Result<pb::VmSpec> {
    let mut env = Vec::new();
    for file in &args.env_file {
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read --env-file {file}"))?;
        env.extend(text.lines().filter(|l| !l.trim().is_empty() && !l.starts_with('#')).map(str::to_owned));
    }
    env.extend(args.env.iter().cloned());
    let hostname = vm.name.clone();
    Ok(pb::VmSpec {
        vm: Some(vm),
        generation: 1,
        attempt: 0,
        run_state: pb::RunState::Running.into(),
        resources: Some(pb::Resources { vcpus: args.cpus, memory_mib: args.memory, disk_gib: args.disk }),
        image: Some(pb::ImageSpec {
            reference: absolute(&args.image)?,
            pull_policy: pull_policy(args.pull).into(),
            architecture: String::new(),
        }),
        root_disk: Some(pb::RootDisk::default()),
        workload: Some(pb::Workload {
            command: args.entrypoint.iter().cloned().collect(),
            args: args.args.clone(),
            working_dir: args.workdir.clone().unwrap_or_default(),
            user: args.user.clone().unwrap_or_default(),
            env: environment_of(&env, environment)?,
            stdin: args.interactive,
            tty: args.tty,
            size: crate::terminal::size().map(|(width, height)| pb::TerminalSize { width, height }),
            termination_grace_seconds: args.stop_timeout,
            hostname,
        }),
        network: Some(network),
        probes: None,
        needs_secrets: false,
        guest_agent: true,
        persistent: true,
    })
}

/// The reference with a path as seen from everywhere: the runtime has another working directory.
fn absolute(image: &str) -> anyhow::Result<String> {
    let full = |path: &Utf8PathBuf| -> anyhow::Result<Utf8PathBuf> {
        let full = std::path::absolute(path).with_context(|| format!("cannot resolve {path}"))?;
        Utf8PathBuf::from_path_buf(full).map_err(|path| anyhow::anyhow!("{} is not UTF-8", path.display()))
    };
    Ok(match image.parse()? {
        ImageSource::Registry(_) => image.to_owned(),
        ImageSource::OciLayout(path, tag) => ImageSource::OciLayout(full(&path)?, tag).to_string(),
        ImageSource::OciArchive(path, tag) => ImageSource::OciArchive(full(&path)?, tag).to_string(),
        ImageSource::DockerArchive(path, tag) => ImageSource::DockerArchive(full(&path)?, tag).to_string(),
    })
}

fn pull_policy(pull: Pull) -> pb::PullPolicy {
    match pull {
        Pull::Always => pb::PullPolicy::Always,
        Pull::Missing => pb::PullPolicy::IfNotPresent,
        Pull::Never => pb::PullPolicy::Never,
    }
}

/// `NAME=VALUE`, or `NAME` to take the value from our own environment (and nothing where it is not set, as docker does).
///
/// # Errors
/// When a name is empty.
pub(super) fn environment_of(
    lines: &[String],
    ours: &dyn Fn(&str) -> Option<String>,
) -> anyhow::Result<Vec<pb::EnvVar>> {
    let mut env = Vec::new();
    for line in lines {
        let (name, value) = match line.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (line.as_str(), ours(line)),
        };
        anyhow::ensure!(!name.is_empty(), "environment {line:?} has no name: write NAME=VALUE");
        if let Some(value) = value {
            env.push(pb::EnvVar { name: name.to_owned(), value });
        }
    }
    Ok(env)
}

/// Memory as docker writes it (`512m`, `2g`, bytes), in MiB rounded up.
pub(super) fn parse_memory_mib(text: &str) -> Result<u64, String> {
    let lower = text.to_ascii_lowercase();
    let lower = lower.strip_suffix("ib").or_else(|| lower.strip_suffix('b')).unwrap_or(&lower);
    let (digits, unit) = match lower.as_bytes().last() {
        Some(b'k') => (&lower[..lower.len() - 1], 1u64 << 10),
        Some(b'm') => (&lower[..lower.len() - 1], 1 << 20),
        Some(b'g') => (&lower[..lower.len() - 1], 1 << 30),
        _ => (lower, 1),
    };
    let bytes = digits
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(unit))
        .ok_or_else(|| format!("{text:?} is no size: write for example 512m or 2g"))?;
    let mib = bytes.div_ceil(1 << 20);
    if mib < MIN_MEMORY_MIB {
        return Err(format!("{text:?} is less than {MIN_MEMORY_MIB}m, which no guest boots in"));
    }
    Ok(mib)
}

/// A port as docker writes it: `[IP:]HOST:GUEST[/tcp|/udp]`.
pub(super) fn parse_port(text: &str) -> Result<pb::PortForward, String> {
    let hint = || format!("{text:?} is no port mapping: write [IP:]HOST:GUEST, for example 8080:80");
    let (ports, protocol) = match text.rsplit_once('/') {
        None | Some((_, "tcp")) => (text.trim_end_matches("/tcp"), pb::Protocol::Tcp),
        Some((ports, "udp")) => (ports, pb::Protocol::Udp),
        Some((_, other)) => return Err(format!("{other:?} is no protocol: tcp or udp")),
    };
    let (rest, guest) = ports.rsplit_once(':').ok_or_else(hint)?;
    let (ip, host) = rest.rsplit_once(':').map_or(("", rest), |(ip, host)| (ip, host));
    if !ip.is_empty() && ip.parse::<std::net::Ipv4Addr>().is_err() {
        return Err(format!("{ip:?} in {text:?} is no IPv4 address"));
    }
    let port = |p: &str| p.parse::<u16>().ok().filter(|p| *p > 0).map(u32::from).ok_or_else(hint);
    Ok(pb::PortForward {
        host_ip: ip.to_owned(),
        host_port: port(host)?,
        guest_port: port(guest)?,
        protocol: protocol.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_written_as_docker_does() {
        assert_eq!(parse_memory_mib("512m"), Ok(512));
        assert_eq!(parse_memory_mib("2g"), Ok(2048));
        assert_eq!(parse_memory_mib("1GiB"), Ok(1024));
        assert_eq!(parse_memory_mib("268435456"), Ok(256));
        assert!(parse_memory_mib("64m").unwrap_err().contains("128m"));
        assert!(parse_memory_mib("lots").unwrap_err().contains("512m or 2g"));
        assert!(parse_memory_mib("99999999999g").is_err());
    }

    #[test]
    fn a_path_is_seen_from_everywhere() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(absolute("oci:a/b:tag").unwrap(), format!("oci:{}/a/b:tag", here.display()));
        assert_eq!(absolute("oci:oci:oci").unwrap(), format!("oci:{}/oci:oci", here.display()));
        assert_eq!(absolute("docker-archive:/x.tar").unwrap(), "docker-archive:/x.tar");
        assert_eq!(absolute("busybox").unwrap(), "busybox");
    }

    #[test]
    fn ports_are_written_as_docker_does() {
        let port = parse_port("127.0.0.1:8080:80/udp").unwrap();
        assert_eq!((port.host_ip.as_str(), port.host_port, port.guest_port), ("127.0.0.1", 8080, 80));
        assert_eq!(port.protocol(), pb::Protocol::Udp);
        assert_eq!(parse_port("8080:80/tcp").unwrap().host_port, 8080);
        for wrong in ["80", "0:80", "8080:70000", "x:8080:80", "8080:80/sctp"] {
            assert!(parse_port(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_environment_name_alone_takes_our_value() {
        let ours = |name: &str| (name == "SET").then(|| "here".to_owned());
        let lines = ["A=1=2".to_owned(), "SET".to_owned(), "UNSET".to_owned()];
        let env = environment_of(&lines, &ours).unwrap();
        let pairs: Vec<_> = env.iter().map(|e| (e.name.as_str(), e.value.as_str())).collect();
        assert_eq!(pairs, [("A", "1=2"), ("SET", "here")]);
        assert!(environment_of(&["=x".to_owned()], &ours).is_err());
    }
}
