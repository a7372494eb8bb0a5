//! `imp`: one VM without a cluster; as `kubectl-imp`: into the VMs of a cluster.

mod exit;
mod local;
mod remote;
mod terminal;

use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = imp_image::converter::run_if_asked() {
        return code;
    }
    let arguments: Vec<String> = std::env::args().collect();
    let result = if remote::is_remote(&arguments) { remote::main(arguments) } else { local::main(arguments) };
    exit::report(result)
}
