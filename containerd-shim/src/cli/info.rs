//! `-info` and `-v`.

use containerd_shim_protos::protobuf::{Message, MessageField};
use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};

use super::print;

/// What containerd knows this runtime by.
const RUNTIME: &str = "io.containerd.sandman.v1";

pub(super) fn info() -> anyhow::Result<()> {
    let info = RuntimeInfo {
        name: RUNTIME.to_owned(),
        version: MessageField::some(RuntimeVersion {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        }),
        ..Default::default()
    };
    print(&info.write_to_bytes()?)
}

pub(super) fn version() -> anyhow::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    print(format!("containerd-shim-sandman-v1 {version}\n").as_bytes())
}
