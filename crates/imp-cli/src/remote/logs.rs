//! `kubectl imp logs`.

use anyhow::Context as _;
use futures::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;

use super::args::LogsArgs;
use super::cluster::Cluster;

/// Shows the output of a VM's workload.
///
/// # Errors
/// When it cannot be read to its end.
pub(super) async fn run(cluster: &Cluster, args: LogsArgs) -> anyhow::Result<u8> {
    let mut options: Vec<(&str, String)> = Vec::new();
    options.extend(args.follow.then(|| ("follow", "true".to_owned())));
    options.extend(args.timestamps.then(|| ("timestamps", "true".to_owned())));
    options.extend(args.tail.map(|lines| ("tailLines", lines.to_string())));
    options.extend(args.since.map(|since| ("sinceSeconds", since.as_secs().max(1).to_string())));
    options.extend(args.since_time.map(|time| ("sinceTime", time)));
    options.extend(args.limit_bytes.map(|bytes| ("limitBytes", bytes.to_string())));
    let request = cluster.request(&args.name, "log", &options)?;
    let stream = cluster
        .client
        .request_stream(request)
        .await
        .map_err(|error| cluster.explain(error, &args.name, "read the log of"))?;
    let mut stream = std::pin::pin!(stream);
    let mut out = tokio::io::stdout();
    let mut buffer = vec![0; 32 << 10];
    loop {
        let count =
            stream.read(&mut buffer).await.context("the log broke off; what is shown is not all of it")?;
        if count == 0 {
            return Ok(0);
        }
        match out.write_all(&buffer[..count]).await {
            Ok(()) => out.flush().await?,
            // `kubectl imp logs a | head`: the reader has had enough.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(0),
            Err(error) => return Err(error.into()),
        }
    }
}
