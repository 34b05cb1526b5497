//! Generates the gRPC types of `sandman.host.v1`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tonic_prost_build::configure()
        // Large byte fields (exec streams, logs) stay reference counted.
        .bytes(".sandman.host.v1.ExecRequest")
        .bytes(".sandman.host.v1.ExecResponse")
        .bytes(".sandman.host.v1.LogsResponse")
        .bytes(".sandman.host.v1.PortForwardRequest")
        .bytes(".sandman.host.v1.PortForwardResponse")
        .compile_protos(&["proto/sandman/host/v1/host.proto"], &["proto"])?;
    Ok(())
}
