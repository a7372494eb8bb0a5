//! A TCP relay from this network namespace into another: how a person's kubectl reaches a control plane that lives in one
//! of its own.

use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::fd::AsFd as _;

use anyhow::{Context as _, Result};
use camino::Utf8Path;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::net::{TcpListener, TcpStream};

/// Listens on `listen` here, then moves into the network namespace of the file `netns` and passes every connection on to
/// `target` there. Runs until the process ends.
///
/// Must be called before any other thread is started: the namespace is a property of a thread, and later threads inherit it.
///
/// # Errors
/// When the address is taken or the namespace can't be entered.
pub fn run(listen: SocketAddr, netns: &Utf8Path, target: SocketAddr) -> Result<()> {
    let listener = StdListener::bind(listen).with_context(|| format!("listen on {listen}"))?;
    listener.set_nonblocking(true).context("make the listener non-blocking")?;
    let namespace = std::fs::File::open(netns).with_context(|| format!("open {netns}"))?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .with_context(|| format!("enter network namespace {netns}"))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::from_std(listener).context("register the listener")?;
        serve(listener, target).await
    })
}

/// Passes connections on, each in a task of its own.
async fn serve(listener: TcpListener, target: SocketAddr) -> Result<()> {
    loop {
        let (mut near, _) = listener.accept().await.context("accept a connection")?;
        tokio::spawn(async move {
            // Either side may go at any time; the other then sees its connection end, which is all there is to say.
            if let Ok(mut far) = TcpStream::connect(target).await {
                let _ = near.set_nodelay(true);
                let _ = far.set_nodelay(true);
                let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            }
        });
    }
}
