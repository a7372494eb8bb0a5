//! The project's own commands: `cargo xtask help`.

mod bench;
mod cli;
mod crds;
mod fuzz;
mod images;
mod oci;
mod programs;
mod progress;
mod test;
mod up;
mod workspace;

fn main() -> std::process::ExitCode {
    cli::main()
}
