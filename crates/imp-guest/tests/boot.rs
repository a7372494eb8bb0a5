//! The guest in real VMs: QEMU's emulation boots Debian's kernel and our initramfs, and the tests are the host.
#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

#[path = "boot/vm.rs"]
mod vm;

use std::time::Duration;

use imp_proto::v1::guest_client::GuestClient;
use imp_proto::v1::{
    ConfigureRequest, CopyFromRequest, CopyToRequest, ExecCheckRequest, ExecRequest, ExecResponse, ExecStart,
    ExitStatus, FailureReason, GuestWatchRequest, HttpCheckRequest, OutputRequest, PowerOffRequest,
    StopRequest, TerminalSize, UsageRequest, configure_response, exec_request, exec_response,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Streaming};
use vm::{Disks, Image, Vm, request};

type Client = GuestClient<Channel>;

/// Runs one test against the clock.
fn test<F: Future<Output = ()>>(body: F) {
    // May build the guest first, which takes what it takes.
    vm::boot_files();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(90), body).await.expect("the test hangs");
    });
}

async fn configure(client: &mut Client, request: ConfigureRequest) -> i32 {
    match client.configure(request).await.unwrap().into_inner().result {
        Some(configure_response::Result::Started(pid)) => pid,
        other => panic!("not started: {other:?}"),
    }
}

/// Output from `from` up to and including `wanted`; returns it and the position behind it.
async fn output_until(client: &mut Client, from: u64, wanted: &str) -> (String, u64) {
    let mut chunks = client.output(OutputRequest { from_sequence: from }).await.unwrap().into_inner();
    let (mut text, mut position) = (String::new(), from);
    while let Some(chunk) = chunks.message().await.unwrap() {
        assert_eq!(chunk.sequence, position, "no gap");
        position += chunk.data.len() as u64;
        text.push_str(std::str::from_utf8(&chunk.data).unwrap());
        if text.contains(wanted) {
            return (text, position);
        }
        assert!(!chunk.end, "{wanted:?} never came: {text:?}");
    }
    panic!("the stream ended without `end`");
}

/// A running exec.
struct Running {
    requests: mpsc::Sender<ExecRequest>,
    responses: Streaming<ExecResponse>,
}

impl Running {
    async fn start(client: &mut Client, start: ExecStart) -> Self {
        let (requests, receiver) = mpsc::channel(4);
        requests.send(ExecRequest { message: Some(exec_request::Message::Start(start)) }).await.unwrap();
        let responses = client.exec(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        Self { requests, responses }
    }

    async fn send(&self, message: exec_request::Message) {
        self.requests.send(ExecRequest { message: Some(message) }).await.unwrap();
    }

    async fn next(&mut self) -> exec_response::Message {
        self.responses.message().await.unwrap().expect("a message").message.unwrap()
    }

    /// Reads stdout until it holds `wanted`.
    async fn until(&mut self, wanted: &str) -> String {
        let mut text = String::new();
        while !text.contains(wanted) {
            match self.next().await {
                exec_response::Message::Stdout(data) => text.push_str(std::str::from_utf8(&data).unwrap()),
                exec_response::Message::Started(()) => {}
                other => panic!("{wanted:?} never came: {text:?}, then {other:?}"),
            }
        }
        text
    }

    /// Everything to the end: stdout, stderr, status.
    async fn finish(mut self) -> (String, String, ExitStatus) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        loop {
            match self.next().await {
                exec_response::Message::Started(()) => {}
                exec_response::Message::Stdout(data) => out.extend_from_slice(&data),
                exec_response::Message::Stderr(data) => err.extend_from_slice(&data),
                exec_response::Message::Exit(status) => {
                    assert!(self.responses.message().await.unwrap().is_none(), "exit is the last message");
                    return (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap(), status);
                }
            }
        }
    }
}

fn command(argv: &[&str]) -> ExecStart {
    ExecStart {
        argv: argv.iter().map(|a| (*a).to_owned()).collect(),
        stdout: true,
        stderr: true,
        ..ExecStart::default()
    }
}

async fn shell(client: &mut Client, script: &str) -> String {
    let (out, err, status) = Running::start(client, command(&["sh", "-c", script])).await.finish().await;
    assert_eq!(status.code, 0, "{script}: {err}");
    out
}

/// Prints, serves, waits, and ends with 42 at SIGUSR1.
const SERVICE: &str = r#"
echo "$0:$FOO:$HOSTNAME:$PWD"; echo "on stderr" >&2
httpd -p 8080 -h /var/www
trap 'echo bye; exit 42' USR1
echo ready
while :; do sleep 1000 & wait $!; done
"#;

#[test]
fn a_service_runs_from_configure_to_power_off() {
    test(async {
        let disks = Disks::new(&Image::distribution());
        let mut vm = Vm::boot(&disks, 256);
        let mut client = vm.connect().await;
        let refused = client.output(OutputRequest { from_sequence: 0 }).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);

        let mut wanted = request(&["sh", "-c", SERVICE, "a b"]);
        let workload = wanted.workload.as_mut().unwrap();
        workload.stop_signal = "SIGUSR1".into();
        workload.working_dir = "/not/there yet".into();
        let pid = configure(&mut client, wanted.clone()).await;
        // A repeat finds the first answer, another attempt none.
        assert_eq!(configure(&mut client, wanted.clone()).await, pid);
        wanted.attempt_id = "uid-1/1".into();
        assert_eq!(client.configure(wanted).await.unwrap_err().code(), Code::FailedPrecondition);

        let (text, position) = output_until(&mut client, 0, "ready\n").await;
        assert!(text.contains("a b:from the image:web-0:/not/there yet\n"), "{text}");
        assert!(text.contains("on stderr\n"));

        println!("identity_is_set");
        identity_is_set(&mut client).await;
        println!("exec_has_its_shapes");
        exec_has_its_shapes(&mut client).await;
        println!("exec_as_users");
        exec_as_users(&mut client).await;
        println!("exec_on_a_terminal");
        exec_on_a_terminal(&mut client).await;
        println!("checks_and_usage");
        checks_and_usage(&mut client).await;
        println!("files_go_in_and_out");
        files_go_in_and_out(&mut client).await;
        println!("the_channel_comes_back");
        client = the_channel_comes_back(&vm, client, position).await;

        let stopped = client.stop(StopRequest { grace_milliseconds: 10_000 }).await.unwrap().into_inner();
        let status = stopped.exit.unwrap().status.unwrap();
        assert_eq!((status.code, status.signal), (42, 0));
        // What the workload left behind (httpd) ended with it, and the output is complete.
        let (text, _) = output_until(&mut client, position, "bye\n").await;
        assert!(text.ends_with("bye\n"));
        let mut rest = client.output(OutputRequest { from_sequence: u64::MAX }).await.unwrap().into_inner();
        assert!(rest.message().await.unwrap().unwrap().end);

        client.power_off(PowerOffRequest {}).await.unwrap();
        vm.ended().await;
        drop(vm);
        // The disk is clean, and what was written is on it in the next boot.
        let check = std::process::Command::new("dumpe2fs")
            .args(["-h", disks.path("disk").as_str()])
            .output()
            .unwrap();
        let header = String::from_utf8_lossy(&check.stdout).into_owned();
        assert!(header.contains("state:         clean"), "{header}");
        memory_runs_out(&disks).await;
    });
}

async fn identity_is_set(client: &mut Client) {
    assert_eq!(shell(client, "hostname; cat /etc/hostname").await, "web-0\nweb-0\n");
    // fr11: a directory in the image's way of resolv.conf, a link in that of hosts.
    assert_eq!(shell(client, "cat /etc/resolv.conf").await, "nameserver 10.0.2.3\nsearch svc.test\n");
    assert!(shell(client, "cat /etc/hosts").await.contains("10.0.2.15\tweb-0\n"));
    assert_eq!(shell(client, "ls /etc/elsewhere 2>/dev/null || echo none").await, "none\n");
    let network = shell(client, "ip addr; ip route; ping -c 1 -W 5 10.0.2.2").await;
    assert!(network.contains("mtu 1400") && network.contains("inet 10.0.2.15/24"), "{network}");
    assert!(network.contains("default via 10.0.2.2"), "{network}");
    assert_eq!(
        shell(client, "stat -c '%a' /run/app; mount | grep -c ' on /run type tmpfs'").await,
        "1770\n1\n"
    );
    let year: u32 = shell(client, "date +%Y").await.trim().parse().unwrap();
    assert!(year > 2020);
    // The agent is not to be found among the workload's files, and the workload is no prisoner of a chroot.
    assert_eq!(
        shell(client, "ls /init 2>/dev/null || echo none; unshare -U true && echo free").await,
        "none\nfree\n"
    );
}

async fn exec_has_its_shapes(client: &mut Client) {
    let (out, err, status) =
        Running::start(client, command(&["sh", "-c", "echo out; echo err >&2; exit 7"])).await.finish().await;
    assert_eq!((out.as_str(), err.as_str(), status.code), ("out\n", "err\n", 7));
    let (_, _, status) = Running::start(client, command(&["nothing-here"])).await.finish().await;
    assert_eq!(status.code, 127);
    assert!(status.message.contains("no such program in the image's PATH"), "{}", status.message);
    let (_, _, status) = Running::start(client, command(&["/etc/not-executable"])).await.finish().await;
    assert_eq!(status.code, 126, "{}", status.message);

    // Input and its end.
    let running = Running::start(client, ExecStart { stdin: true, ..command(&["wc", "-c"]) }).await;
    for _ in 0..10 {
        running.send(exec_request::Message::Stdin(vec![b'x'; 30_000].into())).await;
    }
    running.send(exec_request::Message::CloseStdin(())).await;
    assert_eq!(running.finish().await.0.trim(), "300000");

    // A signal.
    let mut running = Running::start(client, command(&["sh", "-c", "echo up; exec sleep 1000"])).await;
    running.until("up\n").await;
    running.send(exec_request::Message::Signal(15)).await;
    let (_, _, status) = running.finish().await;
    assert_eq!((status.code, status.signal), (143, 15));

    // A process left behind that keeps the pipe open does not keep the exec open.
    let (out, _, status) =
        Running::start(client, command(&["sh", "-c", "sleep 1000 & echo done"])).await.finish().await;
    assert_eq!((out.as_str(), status.code), ("done\n", 0));

    // Much output arrives whole.
    let (out, _, _) = Running::start(client, command(&["seq", "1", "200000"])).await.finish().await;
    assert_eq!(out.lines().count(), 200_000);
    assert!(out.ends_with("\n200000\n"));
}

async fn exec_as_users(client: &mut Client) {
    let id = async |client: &mut Client, user: &str| {
        let start =
            ExecStart { user: user.into(), ..command(&["sh", "-c", "id -u; id -g; id -G; echo $HOME"]) };
        let (out, _, status) = Running::start(client, start).await.finish().await;
        (out.replace('\n', " "), status)
    };
    assert_eq!(id(client, "").await.0, "0 0 0 /root ");
    assert_eq!(id(client, "alice").await.0, "1000 1001 1001 29 /home/alice ");
    assert_eq!(id(client, "4000:29").await.0, "4000 29 29 / ");
    let (_, status) = id(client, "bob").await;
    assert_eq!(status.code, 125);
    assert!(status.message.contains("no user \"bob\""), "{}", status.message);
    let start = ExecStart { user: "alice".into(), ..command(&["sh", "-c", "echo by name > /dev/stdout"]) };
    assert_eq!(Running::start(client, start).await.finish().await.0, "by name\n");
}

async fn exec_on_a_terminal(client: &mut Client) {
    let size = |width, height| Some(TerminalSize { width, height });
    let start = ExecStart { tty: true, stdin: true, size: size(80, 24), ..command(&["sh"]) };
    let mut running = Running::start(client, start).await;
    running.send(exec_request::Message::Stdin("stty size; tty; echo $TERM\n".into())).await;
    let text = running.until("xterm\r\n").await;
    assert!(text.contains("24 80\r\n") && text.contains("/dev/pts/"), "{text}");
    running.send(exec_request::Message::Resize(size(132, 50).unwrap())).await;
    running.send(exec_request::Message::Stdin("stty size\n".into())).await;
    running.until("50 132\r\n").await;
    // Ctrl-C ends the foreground job, not the shell.
    let job = "sh -c 'echo in $((41 + 1)); exec sleep 1000'\n";
    running.send(exec_request::Message::Stdin(job.into())).await;
    // Said by the job itself: the shell has handed the terminal on by then.
    running.until("in 42\r\n").await;
    running.send(exec_request::Message::Stdin("\x03".into())).await;
    running.send(exec_request::Message::Stdin("exit 9\n".into())).await;
    assert_eq!(running.finish().await.2.code, 9);
}

async fn checks_and_usage(client: &mut Client) {
    let mut check = async |script: &str, timeout_milliseconds| {
        let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
        client.exec_check(ExecCheckRequest { argv, timeout_milliseconds }).await.unwrap().into_inner()
    };
    // fr6: checks see the image's environment.
    assert!(check("test \"$FOO\" = 'from the image'", 10_000).await.success);
    let failed = check("echo broken; exit 3", 10_000).await;
    assert_eq!((failed.success, failed.message.as_str()), (false, "exit code 3: broken"));
    let late = check("sleep 1000", 300).await;
    assert!(!late.success && late.message.contains("did not end"), "{}", late.message);

    let mut get = async |port, path: &str| {
        let request = HttpCheckRequest { port, path: path.into(), timeout_milliseconds: 10_000 };
        client.http_check(request).await.unwrap().into_inner()
    };
    let found = get(8080, "/index.html").await;
    assert!(found.success, "{}", found.message);
    assert!(!get(8080, "/absent").await.success);
    let refused = get(8081, "/").await;
    assert!(!refused.success && refused.message.contains("port 8081"), "{}", refused.message);

    let usage = client.usage(UsageRequest {}).await.unwrap().into_inner().usage.unwrap();
    assert!(usage.cpu_nanoseconds > 0 && usage.network_transmit_bytes > 0, "{usage:?}");
    assert!(usage.memory_used_bytes > 0 && usage.memory_used_bytes < usage.memory_total_bytes, "{usage:?}");
    assert!(
        usage.disk_used_bytes < usage.disk_total_bytes && usage.disk_total_bytes > 200 << 20,
        "{usage:?}"
    );
}

async fn files_go_in_and_out(client: &mut Client) {
    // A link to the root of all: inside, it leads to the workload's root.
    shell(client, "mkdir -p /data/in; ln -s / /data/in/top").await;
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    let content = vec![b'z'; 100_000];
    header.set_size(content.len() as u64);
    header.set_mode(0o640);
    header.set_uid(1000);
    header.set_gid(29);
    builder.append_data(&mut header, "file", &content[..]).unwrap();
    let archive = builder.into_inner().unwrap();
    let first = CopyToRequest { directory: "/data/in/top/data/in".into(), data: bytes::Bytes::new() };
    let parts: Vec<_> = archive
        .chunks(10_000)
        .map(|c| CopyToRequest { directory: String::new(), data: bytes::Bytes::copy_from_slice(c) })
        .collect();
    client.copy_to(tokio_stream::iter(std::iter::once(first).chain(parts))).await.unwrap();
    assert_eq!(shell(client, "stat -c '%a %u %g %s' /data/in/file").await, "640 1000 29 100000\n");
    let absent = CopyToRequest { directory: "/absent".into(), data: archive.into() };
    let error = client.copy_to(tokio_stream::iter([absent])).await.unwrap_err();
    assert!(error.message().contains("/absent"), "{error}");

    let mut chunks = client.copy_from(CopyFromRequest { path: "/data".into() }).await.unwrap().into_inner();
    let mut archive = Vec::new();
    while let Some(chunk) = chunks.message().await.unwrap() {
        archive.extend_from_slice(&chunk.data);
    }
    let mut entries: Vec<String> = tar::Archive::new(&archive[..])
        .entries()
        .unwrap()
        .map(|e| e.unwrap().path().unwrap().to_string_lossy().into_owned())
        .collect();
    entries.sort();
    assert_eq!(entries, ["data", "data/in", "data/in/file", "data/in/top"]);
    let mut absent = client.copy_from(CopyFromRequest { path: "/absent".into() }).await.unwrap().into_inner();
    assert!(absent.message().await.unwrap_err().message().contains("/absent"));
}

/// Connections are dropped in mid-stream; the next one begins clean and finds everything as it was.
async fn the_channel_comes_back(vm: &Vm, mut client: Client, position: u64) -> Client {
    for round in 0..5 {
        let mut busy =
            Running::start(&mut client, command(&["sh", "-c", "while :; do seq 1 1000; done"])).await;
        busy.until("1000\n").await;
        drop((busy, client));
        client = vm.connect().await;
        let mut events = client.watch(GuestWatchRequest {}).await.unwrap().into_inner();
        let event = events.message().await.unwrap().unwrap();
        assert!(event.running && event.attempt_id == "uid-1/0", "{event:?}");
        assert_eq!(shell(&mut client, &format!("echo round {round}")).await, format!("round {round}\n"));
    }
    // Whoever ran the commands hung up, and so did they.
    let count =
        "for i in $(seq 1 100); do pgrep seq >/dev/null || break; usleep 100000; done; pgrep seq | wc -l";
    assert_eq!(shell(&mut client, count).await.trim(), "0");
    let (text, _) = output_until(&mut client, 0, "ready\n").await;
    assert!(text.len() as u64 <= position);
    client
}

/// Another boot of the same disk; the workload takes more memory than there is.
async fn memory_runs_out(disks: &Disks) {
    let vm = Vm::boot(disks, 128);
    let mut client = vm.connect().await;
    let mut wanted = request(&["sh", "-c", "wc -c < /data/in/file; exec tail /dev/zero"]);
    wanted.attempt_id = "uid-1/1".into();
    configure(&mut client, wanted).await;
    let (text, _) = output_until(&mut client, 0, "\n").await;
    assert_eq!(text, "100000\n");
    let mut events = client.watch(GuestWatchRequest {}).await.unwrap().into_inner();
    let exit = loop {
        if let Some(exit) = events.message().await.unwrap().unwrap().exit {
            break exit;
        }
    };
    let status = exit.status.unwrap();
    assert!(status.oom_killed && status.signal == 9 && status.code == 137, "{status:?}");
    assert!(status.message.contains("out of memory"));
    assert!(exit.finished_at.unwrap().seconds >= exit.started_at.unwrap().seconds);
}

/// fr5, fr7: no shell, no /etc, no mountpoints; a read-only root; a terminal; a workload that ignores its stop signal.
#[test]
fn fr5_a_bare_image_runs_read_only_on_a_terminal() {
    test(async {
        let disks = Disks::new(&Image::scratch());
        let vm = Vm::boot(&disks, 256);
        let mut client = vm.connect().await;
        let script = "trap '' TERM; read line; echo \"got $line\"; touch /file || echo read-only; ls /; exec /busybox sleep 1000";
        let mut wanted = request(&["/busybox", "sh", "-c", script]);
        wanted.root.as_mut().unwrap().read_only = true;
        let workload = wanted.workload.as_mut().unwrap();
        workload.tty = true;
        workload.stdin = true;
        workload.user = "1000:2000".into();
        workload.size = Some(TerminalSize { width: 100, height: 30 });
        workload.env.push(imp_proto::v1::EnvVar { name: "PATH".into(), value: "/".into() });
        configure(&mut client, wanted).await;

        let (requests, receiver) = mpsc::channel(4);
        let start = ExecStart { stdin: true, stdout: true, ..ExecStart::default() };
        for message in [exec_request::Message::Start(start), exec_request::Message::Stdin("a line\n".into())]
        {
            requests.send(ExecRequest { message: Some(message) }).await.unwrap();
        }
        let responses = client.attach(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        let mut attached = Running { requests, responses };
        attached.until("got a line\r\n").await;

        let (text, _) = output_until(&mut client, 0, "proc").await;
        assert!(text.contains("ead-only") && text.contains("busybox"), "{text}");
        let started = std::time::Instant::now();
        let stopped = client.stop(StopRequest { grace_milliseconds: 500 }).await.unwrap().into_inner();
        assert!(started.elapsed() >= Duration::from_millis(500), "it had its grace period");
        let status = stopped.exit.unwrap().status.unwrap();
        assert_eq!((status.code, status.signal, status.oom_killed), (137, 9, false));
        assert_eq!(attached.finish().await.2.code, 137);
    });
}

/// A guest that can't start its workload says so, and stays to be asked.
#[test]
fn a_missing_program_is_told() {
    test(async {
        let disks = Disks::new(&Image::scratch());
        let mut vm = Vm::boot(&disks, 256);
        let mut client = vm.connect().await;
        let mut wanted = request(&["/bin/server", "--port", "80"]);
        wanted.network = None;
        let response = client.configure(wanted).await.unwrap().into_inner();
        let Some(configure_response::Result::Failed(failure)) = response.result else {
            panic!("{response:?}")
        };
        assert_eq!(failure.reason(), FailureReason::WorkloadStartFailed);
        assert!(
            failure.message.starts_with("run /bin/server: no such file in the image"),
            "{}",
            failure.message
        );
        let mut events = client.watch(GuestWatchRequest {}).await.unwrap().into_inner();
        loop {
            let event = events.message().await.unwrap().unwrap();
            if let Some(seen) = event.failed {
                assert_eq!(seen, failure);
                break;
            }
        }
        client.power_off(PowerOffRequest {}).await.unwrap();
        vm.ended().await;
    });
}
