//! What a container uses, from its cgroups.

mod cgroup;
pub(crate) mod oom;
mod v1;
mod v2;

use std::io;

use containerd_shim_protos::protobuf::well_known_types::any::Any;

use crate::task::convert::any;
use cgroup::Cgroups;

/// The metrics of the cgroups of `pid`, in the message that containerd has for their version.
///
/// # Errors
/// If the process is gone or its cgroups cannot be read.
pub(crate) fn read(pid: i32) -> io::Result<Any> {
    let cgroups = Cgroups::of(pid)?;
    Ok(match cgroups.unified() {
        Some(dir) => any("io.containerd.cgroups.v2.Metrics", &v2::read(dir)),
        None => any("io.containerd.cgroups.v1.Metrics", &v1::read(&cgroups)),
    })
}
