//! `sandman-layer-keeper --root FOLDER --socket PATH`: see the library's `keeper`.
//!
//! Runs as root. Give its unit `KillMode=process` and no memory limit: a keeper that is killed
//! makes readers wait for its successor.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use sandman_layer_store::keeper::Server;

/// Where the kernel looks when it must kill somebody for memory: not here.
const OOM_SCORE: &str = "-1000";

fn main() -> ExitCode {
    let Some((root, socket)) = arguments(std::env::args_os().skip(1)) else {
        eprintln!("usage: sandman-layer-keeper --root FOLDER --socket PATH");
        return ExitCode::from(2);
    };
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        eprintln!("sandman-layer-keeper: cannot set oom_score_adj: {error}");
    }
    raise_descriptor_limit();
    let Err((what, error)) = Server::new(&root, &socket).and_then(|mut server| {
        // For who started us. Nobody needs to listen.
        let _ = std::io::stdout().write_all(b"ready\n");
        server.run()
    });
    eprintln!("sandman-layer-keeper: could not {what}: {error}");
    ExitCode::FAILURE
}

/// Each waiting reader takes a descriptor, each layer one or two.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: maximum,
        maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        eprintln!("sandman-layer-keeper: cannot raise the limit of descriptors: {error}");
    }
}

fn arguments(mut given: impl Iterator<Item = std::ffi::OsString>) -> Option<(PathBuf, PathBuf)> {
    let (mut root, mut socket) = (None, None);
    while let Some(name) = given.next() {
        let value = PathBuf::from(given.next()?);
        match name.to_str()? {
            "--root" => root = Some(value),
            "--socket" => socket = Some(value),
            _ => return None,
        }
    }
    Some((root?, socket?))
}
