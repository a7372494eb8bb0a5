//! A real VM for the tests: QEMU without KVM, images made on the spot, the host's side of the channel.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use camino::{Utf8Path, Utf8PathBuf};
use hyper_util::rt::TokioIo;
use imp_proto::channel;
use imp_proto::v1::guest_client::GuestClient;
use imp_proto::v1::{ConfigureRequest, EnvVar, GuestNetwork, GuestRoot, GuestWorkload};
use imp_testkit::boot::{self, BootFiles};
use rustix::time::{ClockId, clock_gettime};
use tempfile::TempDir;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

/// Emulation on a busy machine is slow; nothing here is expected to take that long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);
pub(crate) const MAC: &str = "52:54:00:12:34:56";

/// Emulated machines share the host's few cores badly; one runs at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The guest program as it is shipped, and what boots it.
pub(crate) fn boot_files() -> &'static BootFiles {
    static FILES: OnceLock<BootFiles> = OnceLock::new();
    FILES.get_or_init(|| boot::of_checkout().unwrap())
}

/// The guest's TSC runs at the host's rate; telling the kernel spares it a calibration that fails on a busy host.
fn tsc_khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(|| {
        let now = || {
            #[expect(unsafe_code, reason = "reading the time-stamp counter has no safe function")]
            // SAFETY: every x86-64 CPU has the instruction.
            let ticks = unsafe { core::arch::x86_64::_rdtsc() };
            let time = clock_gettime(ClockId::MonotonicRaw);
            (ticks, Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).unwrap()))
        };
        let (start, first) = now();
        loop {
            let (ticks, time) = now();
            if time - first >= Duration::from_millis(200) {
                return (ticks - start) * 1000 / u64::try_from((time - first).as_micros()).unwrap();
            }
        }
    })
}

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap_or_else(|e| panic!("run {program}: {e}"));
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

/// An image's tree, made into a disk.
pub(crate) struct Image {
    dir: TempDir,
}

impl Image {
    /// Only `/busybox`.
    pub(crate) fn scratch() -> Self {
        let image = Self { dir: tempfile::tempdir().unwrap() };
        std::fs::copy("/bin/busybox", image.path("busybox")).expect("Debian package busybox-static");
        image
    }

    /// A small distribution: busybox under all its names, users, groups, awkward files.
    pub(crate) fn distribution() -> Self {
        let image = Self { dir: tempfile::tempdir().unwrap() };
        for dir in ["bin", "etc", "etc/resolv.conf", "home/alice", "root", "run/app", "var/www"] {
            std::fs::create_dir_all(image.path(dir)).unwrap();
        }
        std::fs::copy("/bin/busybox", image.path("bin/busybox")).expect("Debian package busybox-static");
        let list = Command::new("/bin/busybox").arg("--list").output().unwrap().stdout;
        for name in String::from_utf8(list).unwrap().lines().filter(|n| *n != "busybox") {
            symlink("busybox", image.path(&format!("bin/{name}"))).unwrap();
        }
        image.file("etc/passwd", "root:x:0:0::/root:/bin/sh\nalice:x:1000:1001::/home/alice:/bin/sh\n");
        image.file("etc/group", "root:x:0:\nalice:x:1001:\naudio:x:29:alice\n");
        image.file("etc/not-executable", "text");
        image.file("var/www/index.html", "hello");
        symlink("/etc/elsewhere", image.path("etc/hosts")).unwrap();
        std::fs::set_permissions(image.path("run/app"), std::fs::Permissions::from_mode(0o1770)).unwrap();
        image
    }

    fn path(&self, name: &str) -> Utf8PathBuf {
        Utf8Path::from_path(self.dir.path()).unwrap().join(name)
    }

    fn file(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }
}

/// The disks of one VM; they outlive its boots.
pub(crate) struct Disks {
    dir: TempDir,
}

impl Disks {
    pub(crate) fn new(image: &Image) -> Self {
        let disks = Self { dir: tempfile::tempdir().unwrap() };
        let tree = image.path("");
        run("mkfs.erofs", &["--quiet", "--all-root", disks.path("base").as_str(), tree.as_str()]);
        let disk = disks.path("disk");
        File::create_new(&disk).unwrap().set_len(256 << 20).unwrap();
        run("mke2fs", &["-q", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=1", disk.as_str()]);
        disks
    }

    pub(crate) fn path(&self, name: &str) -> Utf8PathBuf {
        Utf8Path::from_path(self.dir.path()).unwrap().join(name)
    }
}

/// A running QEMU; killed when dropped.
pub(crate) struct Vm {
    qemu: Child,
    dir: TempDir,
    started: Instant,
    _alone: MutexGuard<'static, ()>,
}

impl Vm {
    /// Starts a VM with `memory` MiB.
    pub(crate) fn boot(disks: &Disks, memory: u32) -> Self {
        let files = boot_files();
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let started = Instant::now();
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-M", "microvm,accel=tcg,acpi=on,rtc=on", "-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-cpu", "Nehalem", "-no-reboot", "-m", &memory.to_string()])
            .args(["-kernel", files.kernel.as_str(), "-initrd", files.initrd.as_str()])
            .args(["-append", &format!(
                "console=ttyS0 quiet panic=-1 tsc_early_khz={} mitigations=off cryptomgr.notests no_timer_check",
                tsc_khz()
            )])
            .args(["-serial", &format!("file:{}", path("console"))])
            .args(["-drive", &format!("id=a,if=none,format=raw,readonly=on,file={}", disks.path("base"))])
            .args(["-drive", &format!("id=b,if=none,format=raw,file={}", disks.path("disk"))]);
        // The last device becomes the first of its kind: QEMU hands out its slots from the top.
        command
            .args(["-device", "virtio-blk-device,drive=a", "-device", "virtio-blk-device,drive=b"])
            .args(["-netdev", "user,id=n,restrict=on"])
            .args(["-device", &format!("virtio-net-device,netdev=n,mac={MAC}")])
            .args(["-device", "virtio-serial-device"])
            .args(["-chardev", &format!("socket,id=g,server=on,wait=off,path={}", path("guest"))])
            .args(["-device", "virtserialport,chardev=g,name=imp.guest.0"]);
        let qemu = command.spawn().expect("Debian package qemu-system-x86");
        Self { qemu, dir, started, _alone: alone }
    }

    /// Connects to the guest: waits for QEMU's socket and the guest's hello.
    pub(crate) async fn connect(&self) -> GuestClient<Channel> {
        let mut nonce = [0; channel::NONCE_LEN];
        File::open("/dev/urandom").unwrap().read_exact(&mut nonce).unwrap();
        let socket = self.dir.path().join("guest");
        let connect = async {
            let mut stream = loop {
                match UnixStream::connect(&socket).await {
                    Ok(stream) => break stream,
                    Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
                }
            };
            channel::client_hello(&mut stream, nonce).await.unwrap();
            stream
        };
        let stream = tokio::time::timeout(DEADLINE, connect)
            .await
            .unwrap_or_else(|_| panic!("no hello from the guest; its console:\n{}", self.console()));
        println!("hello {:?} after the start of QEMU", self.started.elapsed());
        let mut stream = Some(TokioIo::new(stream));
        let connector = tower::service_fn(move |_| {
            let stream = stream.take();
            async move { stream.ok_or_else(|| std::io::Error::other("the one connection has ended")) }
        });
        GuestClient::new(
            Endpoint::from_static("http://guest").connect_with_connector(connector).await.unwrap(),
        )
    }

    /// The serial console so far.
    pub(crate) fn console(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.dir.path().join("console")).unwrap_or_default())
            .into_owned()
    }

    /// Waits until QEMU has ended by itself.
    pub(crate) async fn ended(&mut self) {
        let end = Instant::now() + DEADLINE;
        while self.qemu.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "QEMU runs on; the console:\n{}", self.console());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("console of the VM:\n{}", self.console());
        }
        // It may have ended by itself.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// What the host would send for a VM that runs `argv`.
pub(crate) fn request(argv: &[&str]) -> ConfigureRequest {
    ConfigureRequest {
        attempt_id: "uid-1/0".into(),
        hostname: "web-0".into(),
        time: Some(std::time::SystemTime::now().into()),
        entropy: vec![7u8; 64].into(),
        network: Some(GuestNetwork {
            mac: MAC.into(),
            address: "10.0.2.15/24".into(),
            gateway: "10.0.2.2".into(),
            dns: vec!["10.0.2.3".into()],
            search: vec!["svc.test".into()],
            mtu: 1400,
        }),
        mounts: vec![],
        workload: Some(GuestWorkload {
            argv: argv.iter().map(|a| (*a).to_owned()).collect(),
            env: vec![EnvVar { name: "FOO".into(), value: "from the image".into() }],
            ..GuestWorkload::default()
        }),
        root: Some(GuestRoot { base_fs_type: "erofs".into(), overlay: true, read_only: false }),
    }
}
