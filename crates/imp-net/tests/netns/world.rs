//! A node, the outside and guests, each a network namespace.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use imp_net::{Attached, Attachment, NetError, Network, NetworkOptions};
use imp_testkit::netns::{NetNs, output};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// How long a connection may take before it counts as refused by silence.
const SILENCE: Duration = Duration::from_millis(1500);

/// The node's address on the wire to the outside.
pub(crate) const NODE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
/// The outside's address, which is also the node's default gateway.
pub(crate) const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
/// Where clouds have their metadata service.
pub(crate) const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);

/// Runs `work` on a thread of its own inside a namespace.
pub(crate) fn inside<T: Send>(ns: &NetNs, work: impl FnOnce() -> T + Send) -> T {
    let file = std::fs::File::open(ns.path()).unwrap();
    thread::scope(|scope| {
        scope
            .spawn(|| {
                use std::os::fd::AsFd as _;
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                work()
            })
            .join()
            .unwrap()
    })
}

/// A namespace that goes with its value.
pub(crate) struct Space(pub(crate) NetNs);

impl Space {
    pub(crate) fn new(label: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let ns = NetNs::named(format!("impnet-{}-{number}-{label}", std::process::id()));
        ns.create().unwrap();
        Self(ns)
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        if let Err(error) = self.0.delete() {
            eprintln!("{error:#}");
        }
    }
}

/// A node with a wire (MTU 1450) to the outside, which knows no way to the guests' addresses.
pub(crate) struct World {
    pub(crate) node: Space,
    pub(crate) outside: Space,
    pub(crate) network: Network,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(NetworkOptions::default())
    }

    pub(crate) fn with(options: NetworkOptions) -> Self {
        let (node, outside) = (Space::new("node"), Space::new("out"));
        node.0
            .ip(&[
                &format!("link add up0 type veth peer name out0 netns {}", outside.0.name()),
                &format!("addr add {NODE}/24 dev up0"),
                "link set up0 mtu 1450 up",
            ])
            .unwrap();
        outside
            .0
            .ip(&[
                &format!("addr add {OUTSIDE}/24 dev out0"),
                &format!("addr add {METADATA}/32 dev out0"),
                "link set out0 mtu 1450 up",
            ])
            .unwrap();
        node.0.ip(&[&format!("route add default via {OUTSIDE}")]).unwrap();
        Self { node, outside, network: Network::new(options) }
    }

    /// Runs a future of the network's on the node.
    pub(crate) fn run<T: Send>(&self, work: impl AsyncFnOnce(&Network) -> T + Send) -> T {
        inside(&self.node.0, || {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
                .block_on(work(&self.network))
        })
    }

    pub(crate) fn attach(&self, attachment: &Attachment, all: &[Attachment]) -> Result<Attached, NetError> {
        self.run(async |network| network.attach(attachment, all).await)
    }

    pub(crate) fn detach(&self, attachment: &Attachment, remaining: &[Attachment]) -> Result<(), NetError> {
        self.run(async |network| network.detach(&attachment.vm, &attachment.network, remaining).await)
    }

    pub(crate) fn reconcile(&self, all: &[Attachment]) -> Result<(), NetError> {
        self.run(async |network| network.reconcile(all).await)
    }

    /// What a tool of the node says.
    pub(crate) fn tool(&self, program: &str, args: &[&str]) -> String {
        output(self.node.0.command(program).args(args)).unwrap()
    }

    /// Names of the node's devices that are ours.
    pub(crate) fn devices(&self) -> Vec<String> {
        let listing = self.tool("ip", &["-o", "link"]);
        let names = listing.lines().filter_map(|line| line.split(": ").nth(1));
        names
            .filter(|name| name.starts_with("imp-") || name.starts_with("imt-"))
            .map(|name| name.split('@').next().unwrap_or(name).to_owned())
            .collect()
    }

    pub(crate) fn rules(&self) -> String {
        self.tool("nft", &["list", "ruleset"])
    }

    /// Loads the rules in force less those lines that `dropped` picks: how things are without them.
    pub(crate) fn weaken(&self, dropped: impl Fn(&str) -> bool) {
        let before = self.rules();
        let kept: Vec<&str> = before.lines().filter(|line| !dropped(line.trim())).collect();
        assert!(kept.len() < before.lines().count(), "nothing to leave out of\n{before}");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("flush ruleset\n{}\n", kept.join("\n"))).unwrap();
        self.tool("nft", &["-f", file.path().to_str().unwrap()]);
    }

    /// Attaches `attachment` and puts a guest of those addresses in the place of its tap.
    pub(crate) fn guest(&self, attachment: &Attachment, all: &[Attachment]) -> Space {
        let Attached { tap, bridge, mtu } = self.attach(attachment, all).unwrap();
        let guest = Space::new("guest");
        self.node
            .0
            .ip(&[
                &format!("link del {tap}"),
                &format!("link add {tap} type veth peer name eth0 netns {}", guest.0.name()),
                &format!("link set {tap} alias \"imp vm {}\"", attachment.vm),
                &format!("link set {tap} master {bridge} mtu {mtu} up"),
            ])
            .unwrap();
        guest
            .0
            .ip(&[
                &format!("link set eth0 address {} mtu {mtu} up", attachment.mac),
                &format!("addr add {} dev eth0", attachment.address),
                &format!("route add default via {}", attachment.gateway),
            ])
            .unwrap();
        guest
    }
}

/// A server that tells each client by which address it came.
pub(crate) struct Server {
    listener: TcpListener,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start(space: &Space, address: Ipv4Addr, port: u16) -> Self {
        let listener = inside(&space.0, || TcpListener::bind((address, port)).unwrap());
        let accepting = listener.try_clone().unwrap();
        let thread = thread::spawn(move || {
            while let Ok((mut client, peer)) = accepting.accept() {
                // A client that went away is its own test's matter.
                let _ = client.write_all(peer.ip().to_string().as_bytes());
            }
        });
        Self { listener, thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Wakes the accepting thread.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Connects from `space` and returns the address that the server saw.
pub(crate) fn seen_as(space: &Space, to: Ipv4Addr, port: u16) -> io::Result<Ipv4Addr> {
    inside(&space.0, || {
        let mut stream = TcpStream::connect_timeout(&SocketAddr::V4(SocketAddrV4::new(to, port)), SILENCE)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.shutdown(Shutdown::Write)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        answer.parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, format!("answer {answer:?}")))
    })
}

/// Fails unless the connection died in silence, as a dropped packet makes it.
#[track_caller]
pub(crate) fn assert_dropped(space: &Space, to: Ipv4Addr, port: u16) {
    let outcome = seen_as(space, to, port);
    let silent = matches!(&outcome, Err(error) if error.kind() == io::ErrorKind::TimedOut);
    assert!(silent, "{to}:{port}: {outcome:?}");
}

/// Whether one echo request is answered.
pub(crate) fn pings(space: &Space, to: Ipv4Addr) -> bool {
    let mut ping = space.0.command("busybox");
    ping.args(["ping", "-c", "1", "-W", "2", &to.to_string()]);
    ping.output().unwrap().status.success()
}
