//! SIGKILL for operator and agent at each of their points (`imp_killpoint`). The runtime's are killed in suite node.

use crate::world::{PATIENCE, World, phase};
use anyhow::Result;
use camino::{Utf8Path, Utf8PathBuf};
use imp_api::{ClusterImpNodeProfile, ImpVM, names};
use imp_killpoint::{AGENT, OPERATOR, arm, armed};
use imp_testkit::wait::wait_for;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::json;
use std::{cell::RefCell, collections::BTreeSet, fs};

/// Directories of the programs, named as `up --light` names them.
const PROGRAMS: [(&str, &[&str]); 2] = [("imp-operator", OPERATOR), ("n1-imp-agent", AGENT)];
const OPERATOR_START: [&str; 5] =
    ["ca-made", "lease-taken", "ca-published", "api-service-told", "certificate-signed"];
const AGENT_START: [&str; 2] = ["certificate-got", "heartbeat-written"];
/// A VM's life comes to these, pair by pair.
const LIFE: [(&str, &str); 6] = [
    ("finalizer-added", "secrets-got"),
    ("status-decided", "vm-put"),
    ("status-written", "status-decided"),
    ("event-recorded", "status-written"),
    ("secrets-answered", "event-recorded"),
    ("finalizer-removed", "delete-asked"),
];
const BOOTS: &str = "echo x >> /boots; sync; echo boots: $(wc -l < /boots); ";

/// Which program dies where.
pub struct Kills {
    dir: tempfile::TempDir,
    tried: RefCell<BTreeSet<(usize, &'static str)>>,
}

impl Kills {
    pub fn new() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        for (program, _) in PROGRAMS {
            fs::create_dir(dir.path().join(program))?;
        }
        Ok(Self { dir, tried: RefCell::default() })
    }

    pub fn dir(&self) -> &Utf8Path {
        Utf8Path::from_path(self.dir.path()).unwrap()
    }

    fn program(&self, program: usize) -> Utf8PathBuf {
        self.dir().join(PROGRAMS[program].0)
    }

    fn operator(&self, point: &'static str, times: u32) {
        self.arm(0, point, times);
    }

    fn agent(&self, point: &'static str, times: u32) {
        self.arm(1, point, times);
    }

    fn arm(&self, program: usize, point: &'static str, times: u32) {
        assert!(PROGRAMS[program].1.contains(&point), "{} has no point {point}", PROGRAMS[program].0);
        arm(self.program(program).as_std_path(), point, times).unwrap();
        self.tried.borrow_mut().insert((program, point));
    }

    /// Waits until the program has died at a point at least once, and lets it live on there.
    async fn died(&self, program: usize, point: &'static str, times: u32) {
        let dir = self.program(program);
        wait_for(PATIENCE, &format!("{} to die at {point}", PROGRAMS[program].0), async || {
            match armed(dir.as_std_path(), point) {
                Ok(left) if left < times => Ok(()),
                left => Err(format!("{left:?} of {times} are left")),
            }
        })
        .await
        .unwrap();
        let _ = fs::remove_file(dir.join(point));
    }

    pub fn at_start(&self) {
        for point in OPERATOR_START {
            self.operator(point, 2);
        }
        for point in AGENT_START {
            self.agent(point, 2);
        }
    }

    /// The cluster came up nevertheless, and its VM answers.
    pub async fn taken_at_start(&self, world: &World) {
        for point in OPERATOR_START {
            self.died(0, point, 2).await;
        }
        for point in AGENT_START {
            self.died(1, point, 2).await;
        }
        world.life("hello").await.unwrap();
    }

    /// Whole lives: one boot each, an end with nothing left, whoever died where.
    pub async fn lives(&self, world: &World) {
        for (i, (operator, agent)) in LIFE.into_iter().enumerate() {
            self.operator(operator, 2);
            self.agent(agent, 2);
            let name = format!("life-{i}");
            let uid = world
                .shell(&name, &format!("{BOOTS} sleep 1000"), json!({}))
                .await
                .unwrap()
                .metadata
                .uid
                .unwrap();
            world.phase(&name, "Running").await.unwrap();
            let log = world.said(&name, "boots: ").await.unwrap();
            assert_eq!(log, "boots: 1\n", "{name} booted more than once, killed at {operator} and {agent}");
            world.delete(&name).await.unwrap();
            self.died(0, operator, 2).await;
            self.died(1, agent, 2).await;
            let left =
                world.on_node(1, &format!("ls -d /run/imp/vms/{uid} /var/lib/imp/vms/{uid}; true")).unwrap();
            assert_eq!(left, "", "killed at {operator} and {agent}");
        }
    }

    /// A VM whose VMM dies is started again once, and counted once.
    pub async fn restart(&self, world: &World) {
        let more = json!({"lifecycle": "persistent", "restartPolicy": {"backoff": {"initialDelay": "1s"}}});
        world.shell("again", &format!("{BOOTS} sleep 1000"), more).await.unwrap();
        let vm = world.phase("again", "Running").await.unwrap();
        world.said("again", "boots: 1").await.unwrap();
        let points = ["status-decided", "status-written"];
        for point in points {
            self.operator(point, 1);
        }
        for point in points {
            self.agent(point, 1);
        }
        world.on_node(1, &format!("kill -9 {}", vm.status.unwrap().runtime_pid.unwrap())).unwrap();
        for point in points {
            self.died(0, point, 1).await;
            self.died(1, point, 1).await;
        }
        world.said("again", "boots: 2").await.unwrap();
        let runs = |vm: &ImpVM| phase(vm) == "Running" && restarts(vm) == 1;
        world.until("again", "to run again", runs).await.unwrap();
        world.delete("again").await.unwrap();
    }

    /// Who asks for one more try gets one, not two.
    pub async fn reset(&self, world: &World) {
        world.shell("failed", "exit 1", json!({})).await.unwrap();
        world.phase("failed", "Failed").await.unwrap();
        self.operator("reset-taken", 2);
        let patch = json!({"metadata": {"annotations": {names::annotation::RESET_RETRIES: "true"}}});
        world.vms().patch("failed", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
        self.died(0, "reset-taken", 2).await;
        let over = |vm: &ImpVM| phase(vm) == "Failed" && restarts(vm) == 1;
        let vm = world.until("failed", "to fail a second time", over).await.unwrap();
        assert!(!vm.metadata.annotations.unwrap_or_default().contains_key(names::annotation::RESET_RETRIES));
        world.delete("failed").await.unwrap();
    }

    /// An object that somebody tore out, finalizer and all: the node's VM goes too.
    pub async fn orphan(&self, world: &World) {
        let vm = world.shell("torn", "sleep 1000", json!({})).await.unwrap();
        world.phase("torn", "Running").await.unwrap();
        self.agent("orphan-deleted", 2);
        // Nobody on the node shall see the deletion before the object is gone.
        assert!(world.dev.kill("imp-agent").unwrap());
        world.vms().delete("torn", &DeleteParams::default()).await.unwrap();
        let patch = json!({"metadata": {"finalizers": null}});
        world.vms().patch("torn", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
        world.gone("torn").await.unwrap();
        self.died(1, "orphan-deleted", 2).await;
        let uid = vm.metadata.uid.unwrap();
        wait_for(PATIENCE, "the VM to go", async || {
            let left = world.on_node(1, &format!("ls -d /run/imp/vms/{uid} /var/lib/imp/vms/{uid}; true"));
            match left.map_err(|e| format!("{e:#}"))? {
                none if none.is_empty() => Ok(()),
                left => Err(left),
            }
        })
        .await
        .unwrap();
    }

    /// A VM that is to go a minute after it first ran, the shortest that the API takes.
    pub async fn expires_begin(&self, world: &World) -> String {
        self.operator("expired-deleted", 2);
        world.shell("brief", "sleep 1000", json!({"expireAfter": "60s"})).await.unwrap();
        "brief".to_owned()
    }

    pub async fn expires_end(&self, world: &World, name: &str) {
        world.gone(name).await.unwrap();
        self.died(0, "expired-deleted", 2).await;
    }

    /// A profile that somebody deletes is made again.
    pub async fn profile(&self, world: &World) {
        let profiles = Api::<ClusterImpNodeProfile>::all(world.client.clone());
        let points = ["profile-made", "profile-written"];
        for point in points {
            self.agent(point, 2);
        }
        profiles.delete("n1", &DeleteParams::default()).await.unwrap();
        for point in points {
            self.died(1, point, 2).await;
        }
        wait_for(PATIENCE, "the profile to be whole", async || {
            let profile = profiles.get("n1").await.map_err(|e| e.to_string())?;
            let ready = profile.status.is_some_and(|s| s.conditions.iter().any(|c| c.status == "True"));
            ready.then_some(()).ok_or_else(|| "it has no status".to_owned())
        })
        .await
        .unwrap();
    }

    pub fn every_point_was_tried(&self) {
        for (program, (name, points)) in PROGRAMS.into_iter().enumerate() {
            for point in points {
                assert!(self.tried.borrow().contains(&(program, point)), "{name} was not killed at {point}");
            }
        }
    }
}

fn restarts(vm: &ImpVM) -> i32 {
    vm.status.as_ref().and_then(|s| s.restart_count).unwrap_or(0)
}
