//! Compiles the protos without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["imp/v1/guest.proto", "imp/v1/runtime.proto", "imp/v1/stream.proto"];
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure().bytes(".imp.v1").compile_fds(descriptors)?;
    Ok(())
}
