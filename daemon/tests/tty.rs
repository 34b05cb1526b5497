//! PID 1 on a terminal: what is typed reaches the command and not PID 1.

#![allow(clippy::unwrap_used)] // helpers of tests may panic like tests

mod support;

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::libc::TIOCSWINSZ;
use nix::pty::{Winsize, openpty};
use nix::sched::CloneFlags;
use support::{Container, shell, spawn_as_pid1};

struct Terminal {
    container: Container,
    master: File,
}

/// Starts `command` as PID 1 and leader of a session with a terminal, the way
/// runc starts a container that asks for one.
fn on_terminal(mut command: Command) -> Terminal {
    let pty = openpty(None, None).unwrap();
    let copy = |fd: &OwnedFd| fd.try_clone().unwrap();
    command
        .stdin(copy(&pty.slave))
        .stdout(copy(&pty.slave))
        .stderr(pty.slave);
    // SAFETY: both calls are async-signal-safe and touch nothing of the parent.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(|| {
            nix::unistd::setsid()?;
            match nix::libc::ioctl(0, nix::libc::TIOCSCTTY, 0) {
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            }
        });
    }
    let child = spawn_as_pid1(&mut command, CloneFlags::empty());
    // The command holds the slave; without it the master sees the end.
    drop(command);
    let output = File::from(copy(&pty.master));
    Terminal {
        container: Container::adopt(child, output),
        master: File::from(pty.master),
    }
}

const TRAPS: &str = "stty -echo; for s in HUP INT QUIT CONT WINCH; do trap \"echo $s\" $s; done; ";

#[test]
fn keys_and_resizes_reach_the_command_once() {
    let script = format!("{TRAPS} echo ready; while :; do read -t 0.1 x && exit $x; done");
    let mut command = support::init(&["--", "bash", "-c"]);
    command.arg(script);
    let mut terminal = on_terminal(command);
    assert_eq!(terminal.container.line(), "ready");

    terminal.master.write_all(b"\x03").unwrap();
    assert_eq!(terminal.container.line(), "INT");
    terminal.master.write_all(b"\x1c").unwrap();
    assert_eq!(terminal.container.line(), "QUIT");

    let size = Winsize {
        ws_row: 33,
        ws_col: 99,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: the descriptor is open and `size` outlives the call.
    #[allow(unsafe_code)]
    let resized = unsafe { nix::libc::ioctl(terminal.master.as_raw_fd(), TIOCSWINSZ, &size) };
    assert_eq!(resized, 0);
    assert_eq!(terminal.container.line(), "WINCH");

    terminal.master.write_all(b"7\n").unwrap();
    assert_eq!(terminal.container.wait(), 7);
    // Neither a second copy through PID 1 nor the hang-up of the hand-over.
    assert!(terminal.container.rest().is_empty());
}

#[test]
fn the_command_leads_the_foreground() {
    let terminal = on_terminal(shell("echo ready; read x"));
    assert_eq!(terminal.container.line(), "ready");
    let foreground = nix::unistd::tcgetpgrp(terminal.master.as_fd()).unwrap();
    let children = terminal.container.children();
    assert_eq!(children.len(), 1);
    assert_eq!(foreground.as_raw(), children[0].0);
    let leader = nix::unistd::Pid::from_raw(children[0].0);
    assert_eq!(nix::unistd::getsid(Some(leader)).unwrap(), leader);
    assert_ne!(
        nix::unistd::getsid(Some(terminal.container.pid())).unwrap(),
        leader
    );
}
