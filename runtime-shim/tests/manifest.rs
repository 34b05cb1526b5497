//! The configuration that hosts are given is one that this service takes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use sandman_runtime_shim::config::Config;

#[test]
fn the_hosts_configuration_is_valid() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/host/runtime-shim.toml");
    let config = Config::load(&path).unwrap();
    for (handler, runtime) in [
        ("sandman", "io.containerd.sandman.v1"),
        ("runc", "io.containerd.runc.v2"),
    ] {
        assert_eq!(config.runtime_type(handler), Some(runtime));
    }
}
