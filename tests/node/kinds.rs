//! Images as people have them, each doing in a VM what it is for.

use crate::harness::{Node, PATIENCE, vm, workload};
use imp_proto::v1 as pb;
use imp_testkit::images::{self, Compression, ImageBuilder, LayerBuilder, Layout};
use imp_testkit::wait::wait_for;
use serde_json::json;

fn of(image: &Layout, memory_mib: u64) -> pb::VmSpec {
    let mut spec = vm(&image.reference(), &[]);
    spec.resources.as_mut().unwrap().memory_mib = memory_mib;
    spec
}

/// Asks in the VM until it answers as wanted.
async fn answers(node: &Node, spec: &pb::VmSpec, question: &[&str], wanted: &str) {
    wait_for(PATIENCE, &format!("{question:?} to give {wanted:?}"), async || {
        let executed = node.exec(spec, question).await.map_err(|e| format!("{e:#}"))?;
        let text = executed.text();
        if text.contains(wanted) {
            Ok(())
        } else {
            Err(format!("{text} {}", String::from_utf8_lossy(&executed.stderr)))
        }
    })
    .await
    .unwrap();
}

/// Stops the VM and starts it again on its disk.
async fn again(node: &Node, spec: &mut pb::VmSpec) {
    spec.run_state = pb::RunState::Stopped.into();
    spec.generation += 1;
    node.put(spec).await.unwrap();
    node.ended(spec).await.unwrap();
    spec.run_state = pb::RunState::Running.into();
    spec.generation += 1;
    spec.attempt += 1;
    node.put(spec).await.unwrap();
    node.running(spec).await.unwrap();
}

#[tokio::test]
async fn python_runs_with_its_modules() {
    let image = images::debian_with("python", &["python3"], &json!({"Cmd": ["python3"]})).unwrap();
    let node = Node::start("python").await.unwrap();
    let mut spec = of(&image, 192);
    let script = "import json, sqlite3, threading, socket, tempfile\n\
        db = sqlite3.connect(tempfile.mkstemp()[1]); db.execute('create table t(x)'); db.execute('insert into t values (41)')\n\
        t = threading.Thread(target=lambda: db and print('thread')); t.start(); t.join()\n\
        print(json.dumps({'x': db.execute('select x + 1 from t').fetchone()[0], 'host': socket.gethostname()}))";
    workload(&mut spec).command = ["python3", "-c", script].map(str::to_owned).to_vec();
    node.put(&spec).await.unwrap();
    node.ended(&spec).await.unwrap();
    let hostname = spec.workload.as_ref().unwrap().hostname.clone();
    let log = node.logs(&spec).await.unwrap();
    assert_eq!(log, format!("thread\n{{\"x\": 42, \"host\": \"{hostname}\"}}\n"));
}

#[tokio::test]
async fn nginx_serves_and_stops_by_its_own_signal() {
    let config = json!({"Cmd": ["nginx", "-g", "daemon off;"], "StopSignal": "SIGQUIT"});
    let image = images::debian_with("nginx", &["nginx-light"], &config).unwrap();
    let node = Node::start("nginx").await.unwrap();
    let mut spec = of(&image, 128);
    let address = spec.network.as_ref().unwrap().address.trim_end_matches("/24").to_owned();
    node.put(&spec).await.unwrap();
    let url = format!("http://{address}/");
    wait_for(PATIENCE, "nginx to answer its node", async || {
        let page = node.output("busybox", &["wget", "-qO-", &url]);
        if page.contains("Welcome to nginx") { Ok(()) } else { Err(page) }
    })
    .await
    .unwrap();
    spec.run_state = pb::RunState::Stopped.into();
    spec.generation += 1;
    node.put(&spec).await.unwrap();
    let status = node.ended(&spec).await.unwrap();
    // SIGQUIT is nginx' graceful end; by SIGTERM it would be 0 too, by SIGKILL not.
    assert_eq!(status.exit.and_then(|e| e.status).map(|s| s.code), Some(0), "{:?}", status.failure);
}

#[tokio::test]
async fn redis_keeps_its_data_over_a_restart() {
    let config = json!({
        "Cmd": ["redis-server", "--appendonly", "yes", "--appendfsync", "always"],
        "User": "redis", "WorkingDir": "/var/lib/redis"
    });
    let image = images::debian_with("redis", &["redis-server"], &config).unwrap();
    let node = Node::start("redis").await.unwrap();
    let mut spec = of(&image, 192);
    node.put(&spec).await.unwrap();
    node.running(&spec).await.unwrap();
    answers(&node, &spec, &["redis-cli", "set", "key", "kept"], "OK").await;
    again(&node, &mut spec).await;
    answers(&node, &spec, &["redis-cli", "get", "key"], "kept").await;
    answers(&node, &spec, &["stat", "-c", "%U", "/var/lib/redis"], "redis").await;
}

#[tokio::test]
async fn postgresql_keeps_its_tables_over_a_restart() {
    let main = "/var/lib/postgresql/15/main";
    let config = json!({
        "Cmd": ["/usr/lib/postgresql/15/bin/postgres", "-D", main, "-c", "config_file=/etc/postgresql/15/main/postgresql.conf"],
        "User": "postgres", "StopSignal": "SIGINT"
    });
    let image = images::debian_with("postgresql", &["postgresql-15"], &config).unwrap();
    let node = Node::start("postgresql").await.unwrap();
    let mut spec = of(&image, 384);
    node.put(&spec).await.unwrap();
    node.running(&spec).await.unwrap();
    // A command runs as the workload's user, which is the database's owner.
    let ask = |sql: &'static str| ["psql", "-Atc", sql];
    answers(&node, &spec, &ask("create table t (x int); insert into t values (42); select 1"), "1").await;
    again(&node, &mut spec).await;
    answers(&node, &spec, &ask("select x from t"), "42").await;
}

/// As images of tools that add a layer for each step are: 120 of them, each over the last.
#[tokio::test]
async fn an_image_of_120_layers_is_the_sum_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = camino::Utf8Path::from_path(dir.path()).unwrap();
    let mut base = LayerBuilder::new();
    base.file("busybox", 0o755, &std::fs::read("/bin/busybox").unwrap()).directory("steps", 0o755);
    let mut image = ImageBuilder::new().layer(base.finish(), Compression::Gzip);
    for step in 1..120 {
        let mut layer = LayerBuilder::new();
        layer.file("last", 0o644, step.to_string().as_bytes());
        layer.file(&format!("steps/{step}"), 0o644, b"");
        if step > 60 {
            layer.whiteout(&format!("steps/.wh.{}", step - 60));
        }
        image = image.layer(layer.finish(), Compression::Zstd);
    }
    image.write(path, "t").unwrap();
    let node = Node::start("layers").await.unwrap();
    let script = "/busybox cat /last; /busybox echo; /busybox ls /steps | /busybox wc -l; /busybox ls /steps | /busybox sort -n | /busybox head -1";
    let mut spec = vm(&format!("oci:{path}:t"), &["/busybox", "sh", "-c", script]);
    workload(&mut spec).user = "1000:1000".into();
    node.put(&spec).await.unwrap();
    node.ended(&spec).await.unwrap();
    assert_eq!(node.logs(&spec).await.unwrap(), "119\n60\n60\n");
}

/// A program that is reached through links alone, as in a Nix store, and found by a PATH that the image sets.
#[tokio::test]
async fn a_tree_of_links_leads_to_its_program() {
    let dir = tempfile::tempdir().unwrap();
    let path = camino::Utf8Path::from_path(dir.path()).unwrap();
    let mut store = LayerBuilder::new();
    store.file("nix/store/aaa-busybox/bin/busybox", 0o555, &std::fs::read("/bin/busybox").unwrap());
    store.symlink("nix/store/bbb-profile/bin", "../../store/ccc-env/bin");
    store.symlink("nix/store/ccc-env/bin", "/nix/store/aaa-busybox/links");
    store.symlink("nix/store/aaa-busybox/links/hello", "../bin/busybox");
    store.symlink("nix/store/aaa-busybox/links/echo", "/nix/store/aaa-busybox/bin/busybox");
    store.symlink("nix/var/profile", "../store/bbb-profile");
    let config = json!({"Env": ["PATH=/nix/var/profile/bin"], "Entrypoint": ["echo"], "Cmd": ["found"], "User": "65534"});
    ImageBuilder::new().config(config).layer(store.finish(), Compression::None).write(path, "t").unwrap();
    let node = Node::start("links").await.unwrap();
    let spec = vm(&format!("oci:{path}:t"), &[]);
    node.put(&spec).await.unwrap();
    let status = node.ended(&spec).await.unwrap();
    assert_eq!(node.logs(&spec).await.unwrap(), "found\n", "{status:?}");
}

#[tokio::test]
async fn a_read_only_root_takes_no_byte_as_under_docker() {
    let node = Node::start("readonly").await.unwrap();
    let script = "echo x > /etc/x || echo refused; echo x > /tmp/x || echo too; echo x > /run/x && echo x > /dev/shm/x && echo fine";
    let mut spec = crate::harness::shell(script).unwrap();
    spec.root_disk.as_mut().unwrap().read_only = true;
    node.put(&spec).await.unwrap();
    let status = node.ended(&spec).await.unwrap();
    let log = node.logs(&spec).await.unwrap();
    assert!(["refused\n", "too\n", "fine\n"].iter().all(|word| log.contains(word)), "{log} {status:?}");
}

/// Docker's HEALTHCHECK is the readiness probe of a VM that has none.
#[tokio::test]
async fn an_images_healthcheck_says_whether_it_is_ready() {
    let dir = tempfile::tempdir().unwrap();
    let path = camino::Utf8Path::from_path(dir.path()).unwrap();
    let mut layer = LayerBuilder::new();
    layer.file("bin/busybox", 0o755, &std::fs::read("/bin/busybox").unwrap());
    layer.symlink("bin/sh", "busybox").symlink("bin/test", "busybox").symlink("bin/sleep", "busybox");
    let check = json!({"Test": ["CMD-SHELL", "test -e /ready"], "Interval": 1_000_000_000, "Retries": 2});
    let config = json!({"Cmd": ["sleep", "1000"], "Healthcheck": check});
    ImageBuilder::new().config(config).layer(layer.finish(), Compression::Gzip).write(path, "t").unwrap();
    let node = Node::start("health").await.unwrap();
    let spec = vm(&format!("oci:{path}:t"), &[]);
    let readiness = |status: &pb::VmStatus| status.probes.clone().and_then(|probes| probes.readiness);
    node.put(&spec).await.unwrap();
    let running = node.running(&spec).await.unwrap();
    assert!(!readiness(&running).is_some_and(|result| result.success));
    let not_yet = |status: &pb::VmStatus| readiness(status).is_some_and(|result| !result.success);
    node.until(&spec, "not to be ready", not_yet).await.unwrap();
    assert_eq!(node.exec(&spec, &["/bin/busybox", "touch", "/ready"]).await.unwrap().exit.code, 0);
    node.until(&spec, "to be ready", |status| readiness(status).is_some_and(|result| result.success))
        .await
        .unwrap();
    // A VM with a probe of its own is not asked by the image's.
    let mut own = vm(&format!("oci:{path}:t"), &[]);
    let exec = pb::ExecCheck { command: vec!["/bin/busybox".into(), "true".into()] };
    let probe =
        pb::Probe { check: Some(pb::probe::Check::Exec(exec)), period_seconds: 1, ..Default::default() };
    own.probes = Some(pb::Probes { readiness: Some(probe), ..Default::default() });
    node.put(&own).await.unwrap();
    node.until(&own, "to be ready", |status| readiness(status).is_some_and(|result| result.success))
        .await
        .unwrap();
}
