//! What a workload finds: environment, user, directory, names, network.

use crate::harness::{Node, shell, vm, workload};
use imp_proto::v1 as pb;
use imp_testkit::images;

fn variable(name: &str, value: &str) -> pb::EnvVar {
    pb::EnvVar { name: name.into(), value: value.into() }
}

#[tokio::test]
async fn fr6_fr7_environment_user_and_directory_are_as_asked() {
    let node = Node::start("environment").await.unwrap();
    let mut spec = shell(
        "echo \"$A|$B|$HOME\"; pwd; id -u; id -g; id -G; cat /etc/hostname; hostname; umask; touch here && ls -l here | awk '{print $3}'",
    )
    .unwrap();
    let w = workload(&mut spec);
    w.env = vec![variable("A", "one"), variable("B", "two words"), variable("A", "the last wins")];
    w.user = "imp".into();
    w.working_dir = "/tmp".into();
    node.put(&spec).await.unwrap();
    node.ended(&spec).await.unwrap();
    let hostname = spec.workload.as_ref().unwrap().hostname.clone();
    let expected = format!(
        "the last wins|two words|/home/imp\n/tmp\n1000\n1000\n1000 4\n{hostname}\n{hostname}\n0022\nimp\n"
    );
    assert_eq!(node.logs(&spec).await.unwrap(), expected);
}

#[tokio::test]
async fn fr6_an_image_of_one_program_needs_nothing_else() {
    let node = Node::start("scratch").await.unwrap();
    let image = images::scratch_static().unwrap().reference();
    let mut spec = vm(&image, &[]);
    workload(&mut spec).args = vec!["exit:7".into()];
    workload(&mut spec).user = "12345:678".into();
    node.put(&spec).await.unwrap();
    let status = node.ended(&spec).await.unwrap();
    let code = status.exit.and_then(|e| e.status).map(|s| s.code);
    assert_eq!(code, Some(7), "{:?}", status.failure);
    let log = node.logs(&spec).await.unwrap();
    assert!(log.contains("12345") && log.contains("678"), "{log}");
}

#[tokio::test]
async fn a_vm_has_its_address_its_route_and_its_nodes_ear() {
    let node = Node::start("network").await.unwrap();
    let mut spec = shell(
        "ip -4 -o addr show dev eth0 | awk '{print $4}'; ip route | awk '/default/ {print $3}'; cat /sys/class/net/eth0/address; cat /etc/resolv.conf; ping -c 1 -W 10 192.168.77.1 > /dev/null && echo reached; httpd -f -p 80 -h /etc",
    )
    .unwrap();
    let network = spec.network.as_mut().unwrap();
    network.dns = vec!["192.168.77.1".into()];
    network.search = vec!["default.svc.cluster.local".into()];
    let (address, mac) = (network.address.clone(), network.mac.clone());
    node.put(&spec).await.unwrap();
    let log = node.said(&spec, "reached").await.unwrap();
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(lines[..3], [address.as_str(), "192.168.77.1", mac.as_str()], "{log}");
    assert!(
        log.contains("nameserver 192.168.77.1") && log.contains("search default.svc.cluster.local"),
        "{log}"
    );
    let url = format!("http://{}/hostname", address.trim_end_matches("/24"));
    let hostname = &spec.workload.as_ref().unwrap().hostname;
    let answer =
        imp_testkit::wait::wait_for(crate::harness::PATIENCE, "the guest's web server", async || {
            let answer = node.output("busybox", &["wget", "-qO-", &url]);
            if answer.is_empty() { Err("nothing") } else { Ok(answer) }
        });
    assert_eq!(answer.await.unwrap().trim(), hostname, "reached from its node");
}

#[tokio::test]
async fn two_vms_of_an_image_share_no_writable_byte() {
    let node = Node::start("shared").await.unwrap();
    let script = "cat /mark 2>/dev/null; echo $HOSTNAME > /mark; echo $HOSTNAME > /bin/sh.mark; sync; echo ready; sleep 1000";
    let (one, two) = (shell(script).unwrap(), shell(script).unwrap());
    for spec in [&one, &two] {
        node.put(spec).await.unwrap();
        assert_eq!(node.said(spec, "ready").await.unwrap(), "ready\n");
    }
    let images: Vec<_> = node.path("state").join("images").read_dir_utf8().unwrap().flatten().collect();
    assert!(!images.is_empty());
    for spec in [&one, &two] {
        let read = node.exec(spec, &["cat", "/mark"]).await.unwrap().text();
        let own = node.exec(spec, &["hostname"]).await.unwrap().text();
        assert_eq!(read, own, "each has its own file");
    }
    let list = node.client().await.unwrap().list_images(pb::ListImagesRequest {}).await.unwrap().into_inner();
    assert_eq!(list.images.len(), 1, "one disk for both: {list:?}");
    assert!(list.images[0].in_use);
}

#[tokio::test]
async fn a_debian_runs_as_it_is() {
    let node = Node::start("debian").await.unwrap();
    let script = ". /etc/os-release; echo $ID $VERSION_ID; dpkg -s dash | grep Status; id -un; \
         perl -e 'print \"perl too\\n\"'; stat -c '%a %U' /usr/bin/passwd /tmp; touch /etc/mine && echo writable";
    let mut spec = vm(&images::debian().unwrap().reference(), &["bash", "-c", script]);
    spec.resources = Some(pb::Resources { vcpus: 1, memory_mib: 256, disk_gib: 2 });
    node.put(&spec).await.unwrap();
    node.ended(&spec).await.unwrap();
    let expected =
        "debian 12\nStatus: install ok installed\nroot\nperl too\n4755 root\n1777 root\nwritable\n";
    assert_eq!(node.logs(&spec).await.unwrap(), expected);
}
