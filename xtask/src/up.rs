//! `up` and `down`.

use std::fs;

use anyhow::{Context as _, Result};
use camino::Utf8PathBuf;
use imp_testkit::cluster::layout::Layout;
use imp_testkit::cluster::{self, Cluster, ClusterConfig, Programs};

use crate::cli::UpArgs;
use crate::oci::{ImageFile, ImageSpec, write_archive};
use crate::progress::Progress;
use crate::workspace;

fn layout() -> Layout {
    let dir = std::env::var("IMP_DEV_DIR").unwrap_or_else(|_| "/var/tmp/imp-dev".to_owned());
    let name = std::env::var("IMP_DEV_NAME").unwrap_or_else(|_| "imp-dev".to_owned());
    Layout { name, dir: dir.into() }
}

pub(crate) fn up(args: &UpArgs) -> Result<()> {
    let progress = Progress::new();
    let layout = layout();
    let cache = Utf8PathBuf::from("/root/.cache/imp/go");
    let images = layout.dir.join("images");
    fs::create_dir_all(&images)?;
    let pause = images.join("pause.tar");
    write_archive(
        &ImageSpec {
            name: imp_testkit::node::PAUSE_IMAGE.into(),
            files: vec![ImageFile { path: "bin/busybox".into(), source: "/bin/busybox".into(), mode: 0o755 }],
            links: vec![("bin/sh".into(), "busybox".into())],
            entrypoint: vec!["/bin/busybox".into(), "sleep".into(), "2147483647".into()],
            user: "65535:65535".into(),
        },
        &pause,
    )?;
    let config = ClusterConfig {
        layout,
        nodes: args.nodes,
        light: args.light,
        server: ([127, 0, 0, 1], 26443).into(),
        programs: Programs {
            etcd: cache.join("etcd-24e19fb4e1d5c6ef/server"),
            kubernetes: cache.join("kubernetes-3e0836806f076ee0"),
            helm: cache.join("helm-19cd594b3b3bb863/helm"),
        },
        self_program: workspace::self_program()?,
        images: vec![pause],
    };
    let runtime = tokio::runtime::Runtime::new().context("start the async runtime")?;
    runtime.block_on(async {
        let mut cluster = progress.step("start etcd and API server", || Cluster::create(config))?;
        progress.step("start the nodes", || cluster.start_nodes())?;
        let client = progress.wait("API server ready", cluster.wait_api()).await?;
        progress.step("start controller-manager and scheduler", || cluster.start_controllers())?;
        let dev = workspace::dev();
        fs::create_dir_all(dev.join("bin"))?;
        cluster::pki::write_private(&dev.join("kubeconfig"), &cluster.kubeconfig()?)?;
        progress.wait("controllers work", cluster.wait_controllers(&client)).await?;
        progress.wait("nodes Ready", cluster.wait_nodes_ready(&client)).await?;
        cluster.complete()?;
        eprintln!("up in {:.1} s", progress.total());
        Ok(())
    })
}

pub(crate) fn down() -> Result<()> {
    cluster::remove(&layout())
}
