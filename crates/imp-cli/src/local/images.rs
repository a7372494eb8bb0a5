//! `imp images`.

use super::{args::Paths, client};
use comfy_table::{Table, presets::NOTHING};
use imp_proto::v1 as pb;

/// Lists images.
pub(super) async fn images(paths: &Paths) -> anyhow::Result<u8> {
    let mut client = client::connect(paths).await?;
    let images =
        client.list_images(pb::ListImagesRequest {}).await.map_err(client::failure)?.into_inner().images;
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(["REFERENCE", "DIGEST", "DISK", "IN USE"]);
    for image in images {
        let short = image.digest.get(..19).unwrap_or(&image.digest).to_owned();
        let size = indicatif::HumanBytes(image.disk_bytes).to_string();
        let used = if image.in_use { "yes" } else { "" };
        table.add_row([image.references.join(", "), short, size, used.to_owned()]);
    }
    println!("{}", table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n"));
    Ok(0)
}
