//! `imp` as a person uses it on one machine: the real program, real VMs, an own network namespace.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use camino::{Utf8Path, Utf8PathBuf};
use imp_testkit::{boot, images};
use std::{
    io::Write as _,
    os::fd::OwnedFd,
    process::{Command, Output, Stdio},
    sync::OnceLock,
};

/// A machine of its own: network namespace, state, sockets.
struct Machine {
    dir: tempfile::TempDir,
    netns: String,
    boot_dir: Utf8PathBuf,
}

fn boot_dir() -> &'static Utf8Path {
    static DIR: OnceLock<Utf8PathBuf> = OnceLock::new();
    DIR.get_or_init(|| boot::of_checkout().unwrap().kernel.parent().unwrap().to_owned())
}

fn ip(args: &[&str]) {
    assert!(Command::new("ip").args(args).status().unwrap().success(), "ip {args:?}");
}

impl Machine {
    fn new(name: &str) -> Self {
        let netns = format!("imp-cli-{name}-{}", std::process::id());
        ip(&["netns", "add", &netns]);
        ip(&["-n", &netns, "link", "set", "lo", "up"]);
        Self { dir: tempfile::tempdir().unwrap(), netns, boot_dir: boot_dir().to_owned() }
    }

    fn within(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.netns, program]);
        command
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.within(env!("CARGO_BIN_EXE_imp"));
        command
            .args(args)
            .env("IMP_LOCAL_STATE", self.dir.path().join("state"))
            .env("IMP_LOCAL_RUN", self.dir.path().join("run"))
            .env("IMP_BOOT_DIR", &self.boot_dir)
            .stdin(Stdio::null());
        command
    }

    fn imp(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Standard output of a command that must succeed.
    fn ok(&self, args: &[&str]) -> String {
        let output = self.imp(args);
        assert!(output.status.success(), "imp {args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn daemons(&self) -> Vec<i32> {
        let marker = self.dir.path().join("state").to_str().unwrap().to_owned();
        let listed = Command::new("pgrep").args(["-f", &marker]).output().unwrap();
        String::from_utf8_lossy(&listed.stdout).lines().filter_map(|l| l.parse().ok()).collect()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for name in String::from_utf8_lossy(&self.imp(&["ps", "-aq"]).stdout).lines() {
            self.imp(&["rm", "-f", name]);
        }
        for pid in self.daemons() {
            let _ = rustix::process::kill_process(
                rustix::process::Pid::from_raw(pid).unwrap(),
                rustix::process::Signal::TERM,
            );
        }
        ip(&["netns", "delete", &self.netns]);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn fr60_a_workloads_streams_and_exit_code_are_the_commands() {
    let machine = Machine::new("run");
    let image = images::busybox().unwrap().reference();
    let script = "echo out; echo err >&2; echo \"$GREETING $USER_ID $(pwd)\"; exit 42";
    let output = machine.imp(&[
        "run",
        "--rm",
        "-e",
        "GREETING=hi",
        "--workdir",
        "/srv/x",
        "--user",
        "1000:1000",
        &image,
        "--",
        "sh",
        "-c",
        script,
    ]);
    assert_eq!(output.status.code(), Some(42), "{output:?}");
    assert_eq!(text(&output.stdout), "out\nhi  /srv/x\n");
    assert_eq!(text(&output.stderr), "err\n");
    assert_eq!(machine.ok(&["ps", "-aq"]), "", "--rm leaves nothing");

    let missing = machine.imp(&["run", "--rm", "--entrypoint", "/no/such/program", &image]);
    assert_eq!(missing.status.code(), Some(127), "{missing:?}");
    assert!(text(&missing.stderr).contains("/no/such/program"), "{missing:?}");
    let passwd = machine.imp(&["run", "--rm", "--entrypoint", "/etc/passwd", &image]);
    assert_eq!(passwd.status.code(), Some(126), "{passwd:?}");
    let nowhere = machine.imp(&["run", "oci:/no/such/layout"]);
    assert_eq!(nowhere.status.code(), Some(125));
    assert!(text(&nowhere.stderr).contains("/no/such/layout"), "{nowhere:?}");
}

#[test]
fn standard_input_and_terminals_reach_the_workload() {
    let machine = Machine::new("tty");
    let image = images::busybox().unwrap().reference();
    let mut child = machine
        .command(&["run", "--rm", "-i", &image, "--", "sh", "-c", "wc -c; exit 3"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&vec![b'x'; 100_000]).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((text(&output.stdout).trim(), output.status.code()), ("100000", Some(3)), "{output:?}");

    // A pseudo terminal as standard input and output, as a person's terminal is.
    let pty = rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY).unwrap();
    rustix::pty::grantpt(&pty).unwrap();
    rustix::pty::unlockpt(&pty).unwrap();
    let name = rustix::pty::ptsname(&pty, Vec::new()).unwrap();
    let side = || -> OwnedFd {
        std::fs::File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap().into()
    };
    let mut child = machine
        .command(&[
            "run",
            "--rm",
            "-it",
            &image,
            "--",
            "sh",
            "-c",
            "tty; stty size; read line; echo got $line; exit 5",
        ])
        .stdin(side())
        .stdout(side())
        .spawn()
        .unwrap();
    let size = rustix::termios::Winsize { ws_row: 33, ws_col: 111, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(&pty, size).unwrap();
    let mut file = std::fs::File::from(pty);
    file.write_all(b"typed\r").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(5));
    let mut seen = Vec::new();
    let mut buffer = [0; 4096];
    // The other side is closed: what is there is read, then the read fails.
    while let Ok(n) = std::io::Read::read(&mut file, &mut buffer) {
        if n == 0 {
            break;
        }
        seen.extend_from_slice(&buffer[..n]);
    }
    let seen = text(&seen);
    assert!(seen.contains("/dev/pts/") && seen.contains("got typed"), "{seen:?}");
}

#[test]
fn a_vm_lives_on_its_own_and_is_listed_entered_reached_stopped_and_removed() {
    let machine = Machine::new("life");
    let image = images::busybox().unwrap().reference();
    let serve = "echo serving; mkdir /www; echo hello > /www/index.html; httpd -f -p 80 -h /www";
    let name = machine.ok(&["run", "-d", "--name", "web", "-p", "8080:80", &image, "--", "sh", "-c", serve]);
    assert_eq!(name, "web\n");
    let listed = machine.ok(&["ps"]);
    assert!(
        listed.contains("web") && listed.contains("Running") && listed.contains("8080->80/tcp"),
        "{listed}"
    );
    let twice = machine.imp(&["run", "--name", "web", &image]);
    assert!(text(&twice.stderr).contains("a VM called \"web\" is there already"), "{twice:?}");

    // The daemon dies; the VM does not.
    let uptime =
        || machine.ok(&["exec", "web", "cut", "-d.", "-f1", "/proc/uptime"]).trim().parse::<u64>().unwrap();
    let before = uptime();
    for pid in machine.daemons() {
        let cmdline = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if text(&cmdline).contains("daemon") {
            rustix::process::kill_process(
                rustix::process::Pid::from_raw(pid).unwrap(),
                rustix::process::Signal::KILL,
            )
            .unwrap();
        }
    }
    assert!(uptime() >= before, "fr47: the same guest answers");

    assert_eq!(machine.ok(&["exec", "web", "cat", "/www/index.html"]), "hello\n");
    let code = machine.imp(&["exec", "web", "sh", "-c", "exit 9"]).status.code();
    assert_eq!(code, Some(9));
    let fetch = machine.within("busybox").args(["wget", "-qO-", "http://127.0.0.1:8080/"]).output().unwrap();
    assert_eq!(text(&fetch.stdout), "hello\n", "{fetch:?}");
    assert_eq!(machine.ok(&["logs", "web"]), "serving\n");
    assert!(machine.ok(&["images"]).contains("sha256:"));

    let refused = machine.imp(&["rm", "web"]);
    assert!(text(&refused.stderr).contains("is running"), "{refused:?}");
    machine.ok(&["stop", "-t", "1", "web"]);
    assert_eq!(machine.ok(&["ps", "-q"]), "");
    assert!(
        machine.ok(&["ps", "-a"]).contains("Exited (137)")
            || machine.ok(&["ps", "-a"]).contains("Exited (143)")
    );
    assert_eq!(machine.ok(&["logs", "web"]), "serving\n", "the log outlives the workload");
    machine.ok(&["rm", "web"]);
    assert_eq!(machine.ok(&["ps", "-aq"]), "");
    let links = machine.within("ip").args(["-br", "link"]).output().unwrap();
    assert!(!text(&links.stdout).contains("im"), "no tap and no bridge is left: {links:?}");
}
