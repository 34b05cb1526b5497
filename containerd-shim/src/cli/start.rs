//! `start`: the address of this namespace's shim.

use std::env;
use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Context;

use super::args::Args;
use super::bootstrap;
use super::group::Group;
use super::print;
use crate::task::{check_id, sys};

/// Longest input from containerd.
const MAX_INPUT: u64 = 1 << 20;

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    // It names a file here.
    check_id("-id", &args.id)?;
    let mut input = Vec::new();
    std::io::stdin()
        .take(MAX_INPUT)
        .read_to_end(&mut input)
        .context("reading what containerd sends")?;
    let group = Group::new(&args.state_dir, &args.namespace, &args.address);
    group
        .make()
        .with_context(|| format!("making {}", group.dir().display()))?;
    let address = {
        let _lock = group.lock().context("taking the lock")?;
        group.announce(&args.id).context("announcing the task")?;
        let socket = group.socket();
        if UnixStream::connect(&socket).is_err() {
            launch(args, &group, &socket)?;
        }
        format!("unix://{}", socket.display())
    };
    let version = env::var("MAX_SHIM_VERSION")
        .ok()
        .and_then(|version| version.parse::<u32>().ok());
    // containerd 1.x finds the shim again by this file after its own restart.
    fs::write("address", &address).context("writing the bundle's address file")?;
    print(&bootstrap::answer(args, &input, &address, version)?)
}

/// Starts `serve` with a socket that listens already: whoever is given its address can connect.
fn launch(args: &Args, group: &Group, socket: &Path) -> anyhow::Result<()> {
    // Nobody answers there: what is left is of a shim that died.
    drop(fs::remove_file(socket));
    let listener =
        UnixListener::bind(socket).with_context(|| format!("listening at {}", socket.display()))?;
    let log = super::log::open(&group.log())?;
    let mut command = Command::new(env::current_exe().context("finding this program")?);
    command
        .arg("serve")
        .args(["--namespace", &args.namespace, "--address", &args.address])
        .arg("--state-dir")
        .arg(&args.state_dir)
        .arg("--inherited")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    if args.debug {
        command.arg("--debug");
    }
    sys::pass_from_3(&mut command, vec![OwnedFd::from(listener)]);
    // Not waited for: it is to outlive this process.
    command.spawn().context("starting the shim")?;
    Ok(())
}
