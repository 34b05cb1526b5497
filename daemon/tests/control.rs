//! PID 1 with a socket to the host: what it starts, signals and tells, and what it survives.

#![allow(clippy::unwrap_used)] // helpers of tests may panic like tests

mod support;

use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::libc;
use nix::sched::CloneFlags;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg,
    sendmsg, setsockopt, socketpair, sockopt,
};
use nix::sys::time::TimeVal;
use sandman_agent_protocol::{
    Capabilities, Ended, Kind, Limit, MAX_MESSAGE, MAX_REPLY, Reply, Request, Size, Start, VERSION,
};
use support::{Container, DEADLINE, eventually, shell, spawn_as_pid1};

/// The agent as PID 1, and the host's end of its socket.
struct Agent {
    container: Container,
    socket: OwnedFd,
    number: u32,
    /// Told without a request, not yet asked for.
    told: Vec<(Reply, Option<OwnedFd>)>,
}

fn pair() -> (OwnedFd, OwnedFd) {
    let kind = SockType::SeqPacket;
    let (ours, theirs) =
        socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC).unwrap();
    let deadline = TimeVal::new(DEADLINE.as_secs().cast_signed(), 0);
    setsockopt(&ours, sockopt::ReceiveTimeout, &deadline).unwrap();
    setsockopt(&ours, sockopt::SendTimeout, &deadline).unwrap();
    (ours, theirs)
}

/// Has `command` start with `socket` as its descriptor 3.
fn with_socket(command: &mut Command, socket: OwnedFd) {
    // SAFETY: all calls are async-signal-safe and touch nothing of the parent.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(move || {
            // The same number twice would keep it closed on exec.
            let high = libc::fcntl(socket.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 100);
            match libc::dup2(high, 3) {
                3 => {}
                _ => return Err(std::io::Error::last_os_error()),
            }
            // Whatever started this test may have left more open.
            libc::syscall(
                libc::SYS_close_range,
                4,
                u32::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            );
            Ok(())
        });
    }
}

impl Agent {
    fn start(script: &str) -> Self {
        let (socket, theirs) = pair();
        // With a /proc of its own, as a container has it.
        let proc = "mount --make-rprivate / && mount -t proc proc /proc; ";
        let mut command = shell(&format!("{proc}{script}"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        with_socket(&mut command, theirs);
        let mut child = spawn_as_pid1(&mut command, CloneFlags::CLONE_NEWNS);
        // It holds the other end of the socket, too.
        drop(command);
        let output = child.stdout.take().unwrap();
        Self {
            container: Container::adopt(child, output),
            socket,
            number: 0,
            told: Vec::new(),
        }
    }

    /// One that waits until its input ends.
    fn idle() -> Self {
        let agent = Self::start("echo ready; read x; exit 4");
        assert_eq!(agent.container.line(), "ready");
        agent
    }

    fn send(&self, bytes: &[u8], fds: &[RawFd]) {
        let rights = [ControlMessage::ScmRights(fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights };
        let flags = MsgFlags::MSG_NOSIGNAL;
        sendmsg::<()>(
            self.socket.as_raw_fd(),
            &[IoSlice::new(bytes)],
            control,
            flags,
            None,
        )
        .unwrap();
    }

    fn receive(&self) -> (u32, Reply, Option<OwnedFd>) {
        let mut buffer = [0; MAX_REPLY];
        let mut space = nix::cmsg_space!([RawFd; 1]);
        let mut parts = [IoSliceMut::new(&mut buffer)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let got = recvmsg::<()>(self.socket.as_raw_fd(), &mut parts, Some(&mut space), flags)
            .expect("a message in time");
        let length = got.bytes;
        assert_ne!(length, 0, "the agent has closed the socket");
        let fd = got.cmsgs().unwrap().find_map(|control| match control {
            #[allow(unsafe_code)]
            ControlMessageOwned::ScmRights(fds) => {
                // SAFETY: the kernel has just installed it for us.
                Some(unsafe { OwnedFd::from_raw_fd(*fds.first()?) })
            }
            _ => None,
        });
        let (number, reply) = Reply::decode(&buffer[..length]).unwrap();
        (number, reply, fd)
    }

    fn ask_with(&mut self, request: &Request<'_>, fds: &[RawFd]) -> (Reply, Option<OwnedFd>) {
        self.number += 1;
        self.send(&request.encode(self.number).unwrap(), fds);
        loop {
            let (number, reply, fd) = self.receive();
            if number == self.number {
                return (reply, fd);
            }
            assert_eq!(number, 0, "{reply:?}");
            self.told.push((reply, fd));
        }
    }

    fn ask(&mut self, request: &Request<'_>) -> Reply {
        self.ask_with(request, &[]).0
    }

    fn hello(&mut self, nonce: u64) {
        let version = VERSION;
        let reply = self.ask(&Request::Hello { version, nonce });
        assert_eq!(reply, Reply::Hello { version, nonce });
    }

    /// Starts it with its output in a pipe.
    fn run(&mut self, start: &Start<'_>) -> Result<File, (Kind, String)> {
        let (reader, writer) = std::io::pipe().unwrap();
        let null = File::open("/dev/null").unwrap();
        let fds = [null.as_raw_fd(), writer.as_raw_fd(), writer.as_raw_fd()];
        match self.ask_with(&Request::Start(start.clone()), &fds).0 {
            Reply::Started { exec } => assert_eq!(exec, start.exec),
            Reply::Refused { kind, text } => return Err((kind, text)),
            other => panic!("{other:?}"),
        }
        Ok(File::from(OwnedFd::from(reader)))
    }

    /// Runs it to its end: code and output.
    fn output(&mut self, start: &Start<'_>) -> (u8, String) {
        let mut reader = self.run(start).unwrap();
        let mut output = String::new();
        reader.read_to_string(&mut output).unwrap();
        (self.end_of(start.exec).code(), output)
    }

    fn end_of(&mut self, exec: u64) -> Ended {
        loop {
            while let Some((reply, _)) = self.told.pop() {
                if let Reply::Exited { exec: id, ended } = reply
                    && id == exec
                {
                    return ended;
                }
            }
            let (number, reply, fd) = self.receive();
            assert_eq!(number, 0);
            self.told.push((reply, fd));
        }
    }

    fn refused(&mut self, start: &Start<'_>) -> (Kind, String) {
        self.run(start).unwrap_err()
    }
}

/// All capabilities of this process, as a container with all of the host's has them.
fn all() -> Capabilities {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let set = |name: &str| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    };
    Capabilities {
        bounding: set("CapBnd:"),
        effective: set("CapPrm:"),
        permitted: set("CapPrm:"),
        inheritable: set("CapInh:"),
        ambient: set("CapAmb:"),
    }
}

fn words<'a>(exec: u64, args: &[&'a str]) -> Start<'a> {
    Start {
        exec,
        args: args.iter().map(|arg| arg.as_bytes()).collect(),
        env: vec![b"PATH=/usr/bin:/bin"],
        cwd: b"/",
        capabilities: all(),
        ..Start::default()
    }
}

fn script(exec: u64, script: &str) -> Start<'_> {
    words(exec, &["sh", "-c", script])
}

#[test]
fn a_process_runs_and_its_end_is_told() {
    let mut agent = Agent::idle();
    agent.hello(5);
    let mut start = script(1, "echo $A; pwd; umask; exit 7");
    start.env.push(b"A=b c");
    start.cwd = b"/tmp";
    start.umask = Some(0o27);
    assert_eq!(agent.output(&start), (7, "b c\n/tmp\n0027\n".into()));
    assert_eq!(agent.ask(&Request::Forget { exec: 1 }), Reply::Done);
    assert_eq!(
        agent.output(&script(1, "umask; kill -9 $$")),
        (137, "0022\n".into())
    );
    // And the container's own command is as before.
    assert_eq!(agent.container.wait(), 4);
}

#[test]
fn it_has_no_descriptor_but_its_streams() {
    let mut agent = Agent::idle();
    // Another one is becoming a process at the same time.
    let (code, list) = agent.output(&script(1, "ls /proc/self/fd | tr '\\n' ' '"));
    // ls itself opens the folder, as number 3.
    assert_eq!((code, list.as_str()), (0, "0 1 2 3 "));
    let (_, target) = agent.output(&words(2, &["readlink", "/proc/self/fd/3"]));
    assert_eq!(target, "");
    // Nor has the command.
    let agent = Agent::start("ls /proc/$$/fd | tr '\\n' ' '; echo");
    assert_eq!(agent.container.line(), "0 1 2 ");
}

#[test]
fn it_has_the_rights_that_were_asked_for() {
    let mut agent = Agent::idle();
    let status = "grep -E '^(Uid|Gid|Groups|Cap...|NoNewPrivs|Sig(Blk|Ign)):' /proc/self/status";
    let mut start = words(1, &["sh", "-c", status]);
    start.uid = 1000;
    start.gid = 1001;
    start.groups = vec![7, 5];
    start.no_new_privileges = true;
    start.capabilities = Capabilities {
        bounding: 0b1011,
        effective: 0b0011,
        permitted: 0b0011,
        inheritable: 0b0001,
        ambient: 0b0001,
    };
    let (code, status) = agent.output(&start);
    assert_eq!(code, 0);
    let line = |name: &str| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("Uid:"), "1000 1000 1000 1000");
    assert_eq!(line("Gid:"), "1001 1001 1001 1001");
    assert_eq!(line("Groups:"), "5 7");
    for (set, value) in [
        ("Bnd", "b"),
        ("Prm", "1"),
        ("Eff", "1"),
        ("Inh", "1"),
        ("Amb", "1"),
    ] {
        let got = line(&format!("Cap{set}:"));
        assert_eq!(got.trim_start_matches('0'), value, "{set}");
    }
    assert_eq!(line("NoNewPrivs:"), "1");
    assert_eq!(line("SigBlk:"), "0000000000000000");
    assert_eq!(line("SigIgn:"), "0000000000000000");

    let mut start = script(2, "ulimit -Sn; ulimit -Hn");
    start.limits = vec![Limit {
        resource: 7,
        soft: 100,
        hard: 200,
    }];
    assert_eq!(agent.output(&start), (0, "100\n200\n".into()));
}

#[test]
fn what_the_agent_has_no_right_to_is_left_to_the_host() {
    let (socket, theirs) = pair();
    let mut command = Command::new("setpriv");
    command.args([
        "--bounding-set=-sys_admin",
        "--reuid=1000",
        "--regid=1000",
        "--clear-groups",
    ]);
    command.args([
        env!("CARGO_BIN_EXE_sandman-daemon"),
        "init",
        "sh",
        "-c",
        "read x",
    ]);
    with_socket(&mut command, theirs);
    let mut agent = Agent {
        container: Container::start(command),
        socket,
        number: 0,
        told: Vec::new(),
    };
    let own = |exec| {
        let mut start = script(exec, "id -u");
        start.uid = 1000;
        start.gid = 1000;
        start.capabilities.bounding &= !(1 << 21);
        start
    };
    assert_eq!(agent.output(&own(1)), (0, "1000\n".into()));
    let mut more = own(2);
    more.capabilities.bounding |= 1 << 21;
    let mut other = own(3);
    other.uid = 0;
    let mut groups = own(4);
    groups.groups = vec![9];
    let mut less = own(5);
    less.capabilities.bounding = 0;
    let mut ambient = own(6);
    ambient.capabilities.ambient = 1;
    for start in [more, other, groups, less, ambient] {
        let (kind, text) = agent.refused(&start);
        assert_eq!(kind, Kind::Unable, "{}: {text}", start.exec);
    }
}

#[test]
fn mistakes_are_named_as_runc_names_them() {
    let mut agent = Agent::idle();
    for (exec, command, message) in [
        (
            1,
            "nope",
            "exec: \"nope\": executable file not found in $PATH",
        ),
        (
            2,
            "/nope",
            "exec: \"/nope\": stat /nope: no such file or directory",
        ),
        (3, "/etc/passwd", "exec: \"/etc/passwd\": permission denied"),
        (4, "/tmp", "exec: \"/tmp\": is a directory"),
        (5, "", "exec: \"\": no command"),
    ] {
        let refused = agent.refused(&words(exec, &[command]));
        assert_eq!(refused, (Kind::Failed, message.into()));
    }
    let mut start = script(6, "");
    start.cwd = b"/nowhere";
    let message =
        "chdir to cwd (\"/nowhere\") set in config.json failed: no such file or directory";
    assert_eq!(agent.refused(&start), (Kind::Failed, message.into()));
    // Nothing is kept of them: the names are free again.
    assert_eq!(agent.output(&script(1, "echo on")), (0, "on\n".into()));
}

#[test]
fn signals_reach_the_process_or_all_that_comes_from_it() {
    let mut agent = Agent::idle();
    let mut out = agent
        .run(&script(
            1,
            "trap 'echo term; exit 3' TERM; echo up; while :; do sleep 0.02; done",
        ))
        .unwrap();
    let mut up = [0; 3];
    out.read_exact(&mut up).unwrap();
    let signal = |exec, signal, tree| Request::Signal { exec, signal, tree };
    assert_eq!(agent.ask(&signal(1, 15, false)), Reply::Done);
    assert_eq!(agent.end_of(1), Ended::Exited(3));
    let gone = agent.ask(&signal(1, 15, false));
    assert!(
        matches!(
            gone,
            Reply::Refused {
                kind: Kind::Gone,
                ..
            }
        ),
        "{gone:?}"
    );

    // A child, one with a session of its own, and an orphan.
    let family = "sleep 1000 & setsid sleep 1000 & (sleep 1000 &); echo up; wait";
    let mut out = agent.run(&script(2, family)).unwrap();
    out.read_exact(&mut up).unwrap();
    assert_eq!(agent.ask(&signal(2, 9, true)), Reply::Done);
    assert_eq!(agent.end_of(2), Ended::Signaled(9));
    // Everybody who could write is gone.
    assert_eq!(out.read(&mut up).unwrap(), 0);
}

#[test]
fn what_a_process_leaves_running_stays() {
    let mut agent = Agent::idle();
    let (reader, writer) = std::io::pipe().unwrap();
    let null = File::open("/dev/null").unwrap();
    let fds = [null.as_raw_fd(), writer.as_raw_fd(), writer.as_raw_fd()];
    let start = script(1, "(sleep 0.2; echo later) & exit 0");
    let started = agent.ask_with(&Request::Start(start), &fds).0;
    assert_eq!(started, Reply::Started { exec: 1 });
    drop(writer);
    assert_eq!(agent.end_of(1), Ended::Exited(0));
    let mut rest = String::new();
    File::from(OwnedFd::from(reader))
        .read_to_string(&mut rest)
        .unwrap();
    assert_eq!(rest, "later\n");
}

#[test]
fn a_terminal_is_opened_inside_and_handed_over() {
    let mut agent = Agent::idle();
    let mut start = script(
        1,
        "stty size; read x; echo got $x; tty >/dev/null && exit 5",
    );
    start.terminal = Some(Size {
        width: 99,
        height: 33,
    });
    let (reply, master) = agent.ask_with(&Request::Start(start), &[]);
    assert_eq!(reply, Reply::Started { exec: 1 });
    let mut master = File::from(master.expect("a terminal"));
    let read = |master: &mut File, what: &str| {
        let mut text = String::new();
        eventually(what, || {
            let mut buffer = [0; 256];
            if let Ok(length) = master.read(&mut buffer) {
                text.push_str(std::str::from_utf8(&buffer[..length]).unwrap());
            }
            text.contains(what).then_some(())
        });
    };
    read(&mut master, "33 99");
    master.write_all(b"word\n").unwrap();
    read(&mut master, "got word");
    assert_eq!(agent.end_of(1), Ended::Exited(5));
}

#[test]
fn a_new_host_hears_of_everything() {
    let mut agent = Agent::idle();
    agent.run(&script(1, "sleep 1000")).unwrap();
    assert_eq!(agent.output(&script(2, "exit 6")).0, 6);
    // It is another process now, and has lost what it had read.
    agent.told.clear();
    agent.hello(77);
    let mut told: Vec<_> = (0..3).map(|_| agent.receive().1).collect();
    told.sort_by_key(|reply| format!("{reply:?}"));
    let ended = Ended::Exited(6);
    assert_eq!(
        told,
        [
            Reply::Exited { exec: 2, ended },
            Reply::Started { exec: 1 },
            Reply::Started { exec: 2 },
        ]
    );
}

#[test]
fn a_host_that_does_not_read_is_survived() {
    let mut agent = Agent::start(
        "trap 'echo usr' USR1; trap 'exit 4' TERM; echo ready; while :; do sleep 0.02; done",
    );
    assert_eq!(agent.container.line(), "ready");
    // More questions than its socket has room for answers, until it reads no more of them.
    let request = Request::Forget { exec: 1 }.encode(1).unwrap();
    let flags = MsgFlags::MSG_DONTWAIT;
    let flood = || {
        let part = [IoSlice::new(&request)];
        sendmsg::<()>(agent.socket.as_raw_fd(), &part, &[], flags, None).is_ok()
    };
    let mut sent = 0_u32;
    eventually("the socket to stay full", || {
        let before = sent;
        while flood() {
            sent += 1;
        }
        std::thread::sleep(Duration::from_millis(20));
        (sent > 0 && sent == before).then_some(())
    });
    // It still does its duty.
    agent.container.send(10);
    assert_eq!(agent.container.line(), "usr");
    // And nothing was lost.
    for _ in 0..sent {
        assert_eq!(agent.receive().1, Reply::Done);
    }
    agent.number = 1;
    agent.hello(3);
    agent.container.send(15);
    assert_eq!(agent.container.wait(), 4);
}

#[test]
fn a_host_that_goes_away_is_survived() {
    let mut agent = Agent::start("trap 'exit 9' TERM; echo ready; while :; do sleep 0.02; done");
    assert_eq!(agent.container.line(), "ready");
    agent.run(&script(1, "sleep 1000")).unwrap();
    drop(std::mem::replace(
        &mut agent.socket,
        File::open("/dev/null").unwrap().into(),
    ));
    // It waits without the socket, not in a loop about its end.
    eventually("PID 1 to sleep", || {
        let line = std::fs::read_to_string(format!("/proc/{}/syscall", agent.container.pid()));
        line.unwrap()
            .starts_with(&format!("{} ", libc::SYS_epoll_wait))
            .then_some(())
    });
    agent.container.send(15);
    assert_eq!(agent.container.wait(), 9);
}

#[test]
fn nonsense_is_refused_and_survived() {
    let mut agent = Agent::idle();
    let invalid = |reply: &Reply| {
        matches!(
            reply,
            Reply::Refused {
                kind: Kind::Invalid,
                ..
            }
        )
    };
    for message in [
        &b"x"[..],
        b"\x01\0\0\0",
        b"\x01\0\0\0\xff",
        b"\x01\0\0\0\x01\0",
    ] {
        agent.send(message, &[]);
        let (_, reply, _) = agent.receive();
        assert!(invalid(&reply), "{reply:?}");
    }
    agent.send(&vec![0; MAX_MESSAGE + 1], &[]);
    assert!(invalid(&agent.receive().1));
    // Descriptors where none belong, too few, too many.
    let null = File::open("/dev/null").unwrap();
    let fd = null.as_raw_fd();
    let start = Request::Start(script(1, ""));
    for fds in [&[][..], &[fd], &[fd; 2]] {
        assert!(invalid(&agent.ask_with(&start, fds).0));
    }
    agent.number += 1;
    agent.send(&start.encode(agent.number).unwrap(), &[fd; 20]);
    assert!(invalid(&agent.receive().1));
    let forget = Request::Forget { exec: 9 };
    assert_eq!(agent.ask_with(&forget, &[fd; 3]).0, Reply::Done);
    // The name of what runs is taken, and it cannot be forgotten.
    agent.run(&script(2, "sleep 1000")).unwrap();
    assert_eq!(agent.refused(&script(2, "")).0, Kind::Invalid);
    assert!(invalid(&agent.ask(&Request::Forget { exec: 2 })));
    // None of it stays open.
    let open = std::fs::read_dir(format!("/proc/{}/fd", agent.container.pid()))
        .unwrap()
        .count();
    assert_eq!(open, 6, "streams, socket, events, signals");
}

#[test]
fn many_at_once_are_all_told() {
    let mut agent = Agent::idle();
    for exec in 1..=100 {
        agent.run(&script(exec, "exit $(($$ % 100))")).unwrap();
    }
    for exec in 1..=100 {
        agent.hello(exec);
        agent.end_of(exec);
        assert_eq!(agent.ask(&Request::Forget { exec }), Reply::Done);
    }
}

#[test]
fn another_descriptor_3_is_none_of_ours() {
    let kind = SockType::Stream;
    let (_ours, theirs) =
        socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC).unwrap();
    let (reader, _writer) = std::io::pipe().unwrap();
    for fd in [theirs, OwnedFd::from(reader)] {
        // As the runtime passes it on without us (LISTEN_FDS); ls itself opens one more.
        let mut command = shell("ls /proc/self/fd | tr '\\n' ' '; echo");
        with_socket(&mut command, fd);
        let container = Container::start(command);
        assert_eq!(container.line(), "0 1 2 3 4 ");
    }
}
