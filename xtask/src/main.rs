//! The project's own commands: `cargo xtask help`.

mod cli;
mod oci;
mod progress;
mod up;
mod workspace;

fn main() -> std::process::ExitCode {
    cli::main()
}
