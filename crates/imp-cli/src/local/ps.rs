//! `imp ps`.

use super::{
    args::{Paths, PsArgs},
    client,
};
use comfy_table::{Table, presets::NOTHING};
use imp_proto::v1 as pb;
use std::time::{Duration, SystemTime};

/// Lists VMs.
pub(super) async fn ps(paths: &Paths, args: &PsArgs) -> anyhow::Result<u8> {
    let mut client = client::connect(paths).await?;
    let vms = client::list(&mut client).await?;
    let shown: Vec<_> = vms.iter().filter(|vm| args.all || !vm.ended()).collect();
    if args.quiet {
        shown.iter().for_each(|vm| println!("{}", vm.name()));
        return Ok(0);
    }
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(["NAME", "IMAGE", "STATUS", "AGE", "ADDRESS", "PORTS"]);
    let now = SystemTime::now();
    for vm in shown {
        table.add_row([
            vm.name().to_owned(),
            vm.spec.image.as_ref().map(|i| i.reference.clone()).unwrap_or_default(),
            status_text(&vm.status),
            vm.status.timings.as_ref().and_then(|t| t.accepted).map(|t| age(t, now)).unwrap_or_default(),
            vm.spec
                .network
                .as_ref()
                .map(|n| n.address.split('/').next().unwrap_or_default().to_owned())
                .unwrap_or_default(),
            vm.spec.network.iter().flat_map(|n| &n.ports).map(port_text).collect::<Vec<_>>().join(", "),
        ]);
    }
    println!("{}", table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n"));
    Ok(0)
}

fn status_text(status: &pb::VmStatus) -> String {
    match status.state() {
        pb::VmState::Running => "Running".to_owned(),
        pb::VmState::Stopped => {
            let exit = status.exit.as_ref().and_then(|e| e.status.as_ref());
            exit.map_or_else(|| "Stopped".to_owned(), |e| format!("Exited ({})", crate::exit::code(e)))
        }
        pb::VmState::Failed => {
            let reason = status.failure.as_ref().map(|f| f.reason().as_str_name()).unwrap_or_default();
            format!(
                "Failed ({})",
                reason.trim_start_matches("FAILURE_REASON_").to_lowercase().replace('_', " ")
            )
        }
        other => {
            let name = other.as_str_name().trim_start_matches("VM_STATE_").to_lowercase();
            name[..1].to_uppercase() + &name[1..]
        }
    }
}

fn port_text(port: &pb::PortForward) -> String {
    let ip = if port.host_ip.is_empty() { "0.0.0.0" } else { &port.host_ip };
    let protocol = if port.protocol() == pb::Protocol::Udp { "udp" } else { "tcp" };
    format!("{ip}:{}->{}/{protocol}", port.host_port, port.guest_port)
}

/// As kubectl writes ages: the largest unit that fits.
fn age(then: prost_types::Timestamp, now: SystemTime) -> String {
    let Ok(then) = SystemTime::try_from(then) else { return String::new() };
    let seconds = now.duration_since(then).unwrap_or(Duration::ZERO).as_secs();
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86400),
    }
}
