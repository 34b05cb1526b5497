//! What an idle agent with a socket to the host costs, shared pages divided by those who share.
//!
//! Only the agent as it is shipped is worth measuring. Build it as `hack/test` does and name it:
//! `SANDMAN_DAEMON=FILE cargo test -p sandman-daemon --test memory -- --ignored --nocapture`

#![allow(clippy::unwrap_used)] // helpers of tests may panic like tests

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use sandman_agent_protocol::{Reply, Request, VERSION};

const COUNT: u64 = 200;
/// Most that one may cost in KiB.
const MOST: u64 = 70;

/// Ends with the test, whatever becomes of that.
struct Agent(Child, OwnedFd);

impl Drop for Agent {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn start(program: &str) -> Agent {
    let kind = SockType::SeqPacket;
    let (ours, theirs) =
        socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC).unwrap();
    let mut command = Command::new(program);
    command.args(["init", "sleep", "1000"]).stdin(Stdio::null());
    // As a container has it: what a test runner adds lies on the stack of each agent.
    command.env_clear().env("PATH", "/usr/bin:/bin");
    // SAFETY: the calls are async-signal-safe and touch nothing of the parent.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(move || {
            // Its command ends with it.
            libc::setpgid(0, 0);
            let high = libc::fcntl(theirs.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 100);
            match libc::dup2(high, 3) {
                3 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    let agent = Agent(command.spawn().unwrap(), ours);
    let hello = Request::Hello {
        version: VERSION,
        nonce: 1,
    };
    nix::unistd::write(&agent.1, &hello.encode(1).unwrap()).unwrap();
    let mut buffer = [0; 64];
    let length = nix::unistd::read(&agent.1, &mut buffer).unwrap();
    let (_, reply) = Reply::decode(&buffer[..length]).unwrap();
    assert!(matches!(reply, Reply::Hello { .. }));
    agent
}

#[test]
#[ignore = "needs the agent as it is shipped: see the top of this file"]
fn an_idle_agent_is_small() {
    let program = std::env::var("SANDMAN_DAEMON").expect("SANDMAN_DAEMON names the agent");
    let agents: Vec<_> = (0..COUNT).map(|_| start(&program)).collect();
    let pss = |agent: &Agent| -> u64 {
        let smaps = fs::read_to_string(format!("/proc/{}/smaps_rollup", agent.0.id())).unwrap();
        let line = smaps
            .lines()
            .find_map(|line| line.strip_prefix("Pss:"))
            .unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    let each = agents.iter().map(pss).sum::<u64>() / COUNT;
    println!("{each} KiB each of {COUNT} agents");
    for agent in &agents {
        let _ = nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(-agent.0.id().cast_signed()),
            nix::sys::signal::Signal::SIGKILL,
        );
    }
    assert!(each <= MOST, "at most {MOST} KiB");
}
