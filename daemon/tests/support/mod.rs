//! Runs the real binary as PID 1 of a PID namespace, as a container runtime does.
#![allow(dead_code)] // each test binary uses a part of this

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long anything may take before a test gives up on it.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// The binary under test.
pub(crate) fn daemon() -> Command {
    Command::new(env!("CARGO_BIN_EXE_sandman-daemon"))
}

/// `sandman-daemon init ARGS...`
pub(crate) fn init(args: &[&str]) -> Command {
    let mut command = daemon();
    command.arg("init").args(args);
    command
}

/// `sandman-daemon init -- sh -c SCRIPT`
pub(crate) fn shell(script: &str) -> Command {
    init(&["--", "sh", "-c", script])
}

/// Starts `command` as PID 1 of a new PID namespace (and of others in `more`).
/// Needs root. The namespace is set on a thread of its own: it takes effect for
/// the children of that thread only.
pub(crate) fn spawn_as_pid1(command: &mut Command, more: CloneFlags) -> Child {
    thread::scope(|scope| {
        scope
            .spawn(|| {
                unshare(CloneFlags::CLONE_NEWPID | more).expect("needs root for a PID namespace");
                command.spawn().unwrap()
            })
            .join()
            .unwrap()
    })
}

/// A running PID 1, killed with its whole namespace when dropped.
pub(crate) struct Container {
    child: Child,
    lines: Receiver<String>,
}

impl Container {
    /// Starts `command` with its stdout read line by line and stdin held open.
    pub(crate) fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = spawn_as_pid1(&mut command, CloneFlags::empty());
        let lines = read_lines(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Takes over a child whose output is read from elsewhere.
    pub(crate) fn adopt(child: Child, output: impl Read + Send + 'static) -> Self {
        Self {
            child,
            lines: read_lines(output),
        }
    }

    /// PID 1's pid as this namespace sees it.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    pub(crate) fn line(&self) -> String {
        self.lines
            .recv_timeout(DEADLINE)
            .expect("no line of output in time")
    }

    /// Lines up to the end of the output: everybody who could write is gone.
    pub(crate) fn rest(&self) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            match self.lines.recv_timeout(DEADLINE) {
                Ok(line) => lines.push(line),
                Err(mpsc::RecvTimeoutError::Disconnected) => return lines,
                Err(mpsc::RecvTimeoutError::Timeout) => panic!("output stays open"),
            }
        }
    }

    pub(crate) fn send(&self, signal: i32) {
        // SAFETY: plain numbers; nix has no type for real-time signals.
        #[allow(unsafe_code)]
        let result = unsafe { nix::libc::kill(self.pid().as_raw(), signal) };
        assert_eq!(result, 0, "cannot send {signal}");
    }

    /// Closes stdin and waits for the end.
    pub(crate) fn wait(&mut self) -> i32 {
        drop(self.child.stdin.take());
        code(wait_for_end(&mut self.child))
    }

    /// Pids and states of PID 1's children, as this namespace sees them.
    pub(crate) fn children(&self) -> Vec<(i32, char)> {
        let pid = self.pid();
        let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        let state = |child: &str| {
            let stat = fs::read_to_string(format!("/proc/{child}/stat")).ok()?;
            stat.rsplit(") ").next()?.chars().next()
        };
        list.split_whitespace()
            .filter_map(|c| Some((c.parse().ok()?, state(c)?)))
            .collect()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = kill(self.pid(), Signal::SIGKILL);
        drop(self.child.wait());
    }
}

fn read_lines(output: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if sender.send(line.trim_end_matches('\r').to_owned()).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Runs `command` as PID 1 to its end: exit code, stdout, stderr.
pub(crate) fn run(mut command: Command) -> (i32, String, String) {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = spawn_as_pid1(&mut command, CloneFlags::empty());
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        code(output.status),
        text(output.stdout),
        text(output.stderr),
    )
}

fn code(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| panic!("PID 1 itself was killed: {status}"))
}

fn wait_for_end(child: &mut Child) -> ExitStatus {
    eventually("PID 1 to end", || child.try_wait().unwrap())
}

/// Asks `probe` until it has an answer, up to the deadline.
pub(crate) fn eventually<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = probe() {
            return answer;
        }
        assert!(start.elapsed() < DEADLINE, "gave up waiting for {what}");
        thread::sleep(Duration::from_millis(2));
    }
}
