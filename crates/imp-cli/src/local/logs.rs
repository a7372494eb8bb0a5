//! `imp logs`.

use super::{
    args::{LogsArgs, Paths},
    client,
};
use imp_proto::v1 as pb;
use tokio::io::AsyncWriteExt as _;

/// Prints the workload's output, each stream on our own.
pub(super) async fn logs(paths: &Paths, args: &LogsArgs) -> anyhow::Result<u8> {
    let mut client = client::connect(paths).await?;
    let vm = client::find(&mut client, &args.name).await?;
    let request = pb::LogsRequest {
        vm: Some(vm.vm_ref()),
        follow: args.follow,
        tail_lines: args.tail,
        since: None,
        limit_bytes: None,
    };
    let mut chunks = client.logs(request).await.map_err(client::failure)?.into_inner();
    let (mut out, mut err) = (tokio::io::stdout(), tokio::io::stderr());
    let mut at_line_start = true;
    while let Some(chunk) = chunks.message().await.map_err(client::failure)? {
        let data = if args.timestamps { stamped(&chunk, &mut at_line_start) } else { chunk.data.to_vec() };
        if chunk.stream() == pb::OutputStream::Stderr {
            err.write_all(&data).await?;
            err.flush().await?;
        } else {
            out.write_all(&data).await?;
            out.flush().await?;
        }
    }
    Ok(0)
}

/// Puts the chunk's time before each line that begins in it.
fn stamped(chunk: &pb::LogsResponse, at_line_start: &mut bool) -> Vec<u8> {
    let time = chunk.time.map(|t| t.to_string()).unwrap_or_default();
    let mut out = Vec::with_capacity(chunk.data.len() + time.len() + 1);
    for line in chunk.data.split_inclusive(|b| *b == b'\n') {
        if *at_line_start {
            out.extend_from_slice(time.as_bytes());
            out.push(b' ');
        }
        out.extend_from_slice(line);
        *at_line_start = line.ends_with(b"\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_in_two_chunks_has_one_time() {
        let chunk = |data: &'static [u8]| pb::LogsResponse {
            data: data.into(),
            time: Some(prost_types::Timestamp { seconds: 0, nanos: 0 }),
            ..Default::default()
        };
        let mut start = true;
        let mut out = stamped(&chunk(b"a\nb"), &mut start);
        out.extend(stamped(&chunk(b"c\n"), &mut start));
        assert_eq!(out, b"1970-01-01T00:00:00Z a\n1970-01-01T00:00:00Z bc\n");
    }
}
