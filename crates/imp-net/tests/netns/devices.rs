//! What is made, what is left, and what happens when a step fails.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use imp_net::{Attachment, NetError, Network, NetworkOptions};

use crate::attachment;
use crate::world::World;

/// A stand-in for nft(8).
fn script(directory: &tempfile::TempDir, body: &str) -> NetworkOptions {
    let path = directory.path().join("nft");
    std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    NetworkOptions { nft: path.to_str().unwrap().to_owned(), step_timeout: Duration::from_secs(1) }
}

#[test]
fn attach_makes_everything_once_and_detach_leaves_nothing() {
    let world = World::new();
    let (a, b) = (Attachment { tap_owner: 4242, ..attachment(1, 2) }, attachment(1, 3));
    let all = [a.clone(), b.clone()];
    let first = world.attach(&a, &all[..1]).unwrap();
    let second = world.attach(&b, &all).unwrap();
    assert_eq!(first.bridge, second.bridge);
    assert_eq!(first.mtu, 1450, "the uplink's");
    assert_eq!(world.attach(&a, &all).unwrap(), first);

    let wanted: BTreeSet<_> = [&first.bridge, &first.tap, &second.tap].into_iter().cloned().collect();
    assert_eq!(world.devices().into_iter().collect::<BTreeSet<_>>(), wanted);
    let tap = world.tool("ip", &["-d", "link", "show", &first.tap]);
    for part in
        ["mtu 1450", "type tap", "pi off", "vnet_hdr on", "persist on", "user 4242", &a.vm, &first.bridge]
    {
        assert!(tap.contains(part), "no {part:?} in {tap}");
    }
    let bridge = world.tool("ip", &["addr", "show", &first.bridge]);
    assert!(bridge.contains("inet 10.1.0.1/24") && !bridge.contains("inet6"), "{bridge}");
    assert_eq!(world.tool("sysctl", &["-n", "net.ipv4.ip_forward"]).trim(), "1");

    world.detach(&a, &all[1..]).unwrap();
    assert_eq!(world.devices().len(), 2, "the network's other VM stays");
    assert!(!world.rules().contains(&a.mac) && world.rules().contains(&b.mac));
    for _ in 0..2 {
        world.detach(&b, &[]).unwrap();
        assert_eq!(world.devices(), [""; 0]);
        assert!(!world.rules().contains("elements"), "{}", world.rules());
    }
}

#[test]
fn what_can_not_be_made_is_refused_before_anything_is_touched() {
    let world = World::new();
    let a = attachment(1, 2);
    let twin = Attachment { vm: "twin".into(), ..a.clone() };
    let error = world.attach(&twin, &[a.clone(), twin.clone()]).unwrap_err();
    assert!(
        matches!(&error, NetError::Conflict { vm, other, .. } if vm == "twin" && *other == a.vm),
        "{error}"
    );
    let error = world.attach(&Attachment { mtu: 1, ..a }, &[]).unwrap_err();
    assert!(matches!(error, NetError::Invalid { field: "mtu", .. }), "{error}");
    assert_eq!((world.devices().len(), world.rules().as_str()), (0, ""));
}

#[test]
fn fr50_rules_are_identical_after_a_restart_and_after_a_flush() {
    let world = World::new();
    let (a, b) = (attachment(1, 2), attachment(2, 2));
    let all = [a.clone(), b.clone()];
    world.attach(&a, &all[..1]).unwrap();
    world.attach(&b, &all).unwrap();
    let (rules, devices) = (world.rules(), world.devices());
    assert!(rules.contains(&a.mac) && rules.contains(&b.mac));

    let restarted = Network::new(NetworkOptions::default());
    world.run(async |_| restarted.reconcile(&all).await).unwrap();
    assert_eq!((world.rules(), world.devices()), (rules.clone(), devices.clone()));

    world.tool("nft", &["flush", "ruleset"]);
    let bridge = devices.iter().find(|name| name.starts_with("imp-")).unwrap();
    world.node.0.ip(&[&format!("addr flush dev {bridge}")]).unwrap();
    world.reconcile(&all).unwrap();
    assert_eq!((world.rules(), world.devices()), (rules, devices.clone()));
    assert!(world.tool("ip", &["addr", "show", bridge]).contains("inet 10."));
}

#[test]
fn fr19_devices_that_belong_to_nobody_are_removed_and_others_stay() {
    let world = World::new();
    let (kept, lost) = (attachment(1, 2), attachment(2, 2));
    let both = [kept.clone(), lost.clone()];
    let stays = world.attach(&kept, &both[..1]).unwrap();
    world.attach(&lost, &both).unwrap();
    // One that was cut off before it was marked, one of another program, one whose name only looks like ours.
    world
        .node
        .0
        .ip(&[
            "tuntap add dev imt-0123456789 mode tap",
            "link add imp-0123456789 type bridge",
            "link set imp-0123456789 alias somebody",
            "link add imp-br type bridge",
        ])
        .unwrap();
    world.reconcile(&both[..1]).unwrap();
    let left: BTreeSet<_> = world.devices().into_iter().collect();
    assert_eq!(left, BTreeSet::from([stays.tap, stays.bridge, "imp-0123456789".into(), "imp-br".into()]));
}

#[test]
fn fr21_a_failed_attach_leaves_nothing_however_often() {
    let directory = tempfile::tempdir().unwrap();
    let world = World::with(script(&directory, "cat >/dev/null; echo 'no such kernel module' >&2; exit 1"));
    let a = attachment(1, 2);
    for _ in 0..20 {
        let error = world.attach(&a, std::slice::from_ref(&a)).unwrap_err();
        assert!(
            matches!(&error, NetError::Nft { message, .. } if message == "no such kernel module"),
            "{error}"
        );
        assert_eq!(world.devices(), [""; 0]);
    }
    // Positive control: the retry with a working program makes each thing once.
    let repaired = Network::new(NetworkOptions::default());
    world.run(async |_| repaired.attach(&a, std::slice::from_ref(&a)).await).unwrap();
    assert_eq!(world.devices().len(), 2);
}

#[test]
fn fr21_a_failure_after_the_rules_takes_back_rules_and_bridge() {
    let world = World::new();
    let (a, b) = (attachment(1, 2), attachment(2, 2));
    let all = [a.clone(), b.clone()];
    world.attach(&a, &all[..1]).unwrap();
    let (rules, devices) = (world.rules(), world.devices());

    // No user has that number, so the kernel refuses it.
    let nobody = Attachment { tap_owner: u32::MAX, ..b.clone() };
    let error = world.attach(&nobody, &[a.clone(), nobody.clone()]).unwrap_err();
    assert!(matches!(error, NetError::Io { .. }), "{error}");
    assert_eq!((world.rules(), world.devices()), (rules.clone(), devices.clone()));

    let tap = world.attach(&b, &all).unwrap().tap;
    world.detach(&b, &all[..1]).unwrap();
    world.node.0.ip(&[&format!("link add {tap} type veth peer name other0")]).unwrap();
    let error = world.attach(&b, &all).unwrap_err();
    assert!(matches!(&error, NetError::NameTaken { device, .. } if *device == tap), "{error}");
    assert!(world.devices().contains(&tap), "another's device stays");
    world.node.0.ip(&[&format!("link del {tap}")]).unwrap();
    assert_eq!((world.rules(), world.devices()), (rules, devices));
}

#[test]
fn a_device_that_is_marked_as_anothers_is_neither_taken_nor_removed() {
    let world = World::new();
    let a = attachment(1, 2);
    let made = world.attach(&a, std::slice::from_ref(&a)).unwrap();
    world.node.0.ip(&[&format!("link set {} alias \"imp vm another\"", made.tap)]).unwrap();
    let error = world.attach(&a, std::slice::from_ref(&a)).unwrap_err();
    assert!(matches!(&error, NetError::NameTaken { owner, .. } if owner.contains("another")), "{error}");
    world.detach(&a, &[]).unwrap();
    assert_eq!(world.devices(), [made.tap]);
}

#[test]
fn fr25_a_hanging_nft_is_given_up_in_time_and_ended_with_its_children() {
    let directory = tempfile::tempdir().unwrap();
    let pids = directory.path().join("pids");
    let body = format!("sleep 600 & echo $$ $! >{}; wait", pids.display());
    let world = World::with(script(&directory, &body));
    let a = attachment(1, 2);
    let started = Instant::now();
    let error = world.attach(&a, std::slice::from_ref(&a)).unwrap_err();
    assert!(matches!(error, NetError::Timeout { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert_eq!(world.devices(), [""; 0]);
    let pids = std::fs::read_to_string(pids).unwrap();
    for pid in pids.split_whitespace() {
        let gone = || match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat.contains(") Z "),
            Err(_) => true,
        };
        wait_until(&format!("process {pid} to end"), gone);
    }
}

#[test]
fn fr16_a_held_tap_is_waited_for_and_then_its_holder_named() {
    let options = NetworkOptions { step_timeout: Duration::from_secs(1), ..NetworkOptions::default() };
    let world = World::with(options);
    let a = attachment(1, 2);
    let made = world.attach(&a, std::slice::from_ref(&a)).unwrap();

    let mut holder = Holder::start(&world, &made.tap);
    let error = world.attach(&a, std::slice::from_ref(&a)).unwrap_err();
    let expected = format!("process {} (socat)", holder.0.id());
    assert!(matches!(&error, NetError::TapBusy { holder, .. } if *holder == expected), "{error}");
    assert_eq!(world.devices().len(), 2, "what was there before stays");

    holder.end();
    assert_eq!(world.attach(&a, std::slice::from_ref(&a)).unwrap(), made);

    // Detaching asks no holder.
    let _holder = Holder::start(&world, &made.tap);
    world.detach(&a, &[]).unwrap();
    assert_eq!(world.devices(), [""; 0]);
}

#[test]
fn fr16_a_tap_whose_holder_is_just_ending_is_taken() {
    let world = World::new();
    let a = attachment(1, 2);
    let made = world.attach(&a, std::slice::from_ref(&a)).unwrap();
    let mut holder = Holder::start(&world, &made.tap);
    std::thread::scope(|scope| {
        let attach = scope.spawn(|| world.attach(&a, std::slice::from_ref(&a)));
        holder.end();
        assert_eq!(attach.join().unwrap().unwrap(), made);
    });
}

/// A process that has a tap open.
struct Holder(Child);

impl Holder {
    fn start(world: &World, tap: &str) -> Self {
        let mut command = world.node.0.command("socat");
        command.args([&format!("TUN,tun-name={tap},tun-type=tap,iff-no-pi"), "-"]);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let holder = Self(child);
        wait_until("socat to have the tap", || holder.has(tap));
        holder
    }

    fn has(&self, tap: &str) -> bool {
        let Ok(entries) = std::fs::read_dir(format!("/proc/{}/fdinfo", self.0.id())) else { return false };
        entries
            .flatten()
            .filter_map(|entry| std::fs::read_to_string(entry.path()).ok())
            .any(|info| info.contains(&format!("iff:\t{tap}")))
    }

    fn end(&mut self) {
        // It may be gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.end();
    }
}

#[track_caller]
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "waited 10 s for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
