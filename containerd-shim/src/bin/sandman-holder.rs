//! Parent of a shim's sandboxes; see the `holder` module. Also the zygote, when started by itself.
//!
//! `sandman-holder DIRECTORY` returns once the socket in DIRECTORY accepts clients and leaves a
//! daemon behind; `sandman-holder --foreground DIRECTORY` stays, for a service manager.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::process::ExitCode;

use sandman_containerd_shim::sys::memfd;
use sandman_containerd_shim::sys::process::{self, Side};
use sandman_containerd_shim::{holder, zygote};

const USAGE: &str = "usage: sandman-holder [--foreground] DIRECTORY";

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let words: Vec<Option<&str>> = args.iter().map(|arg| arg.to_str()).collect();
    let result = match (words.as_slice(), args.last()) {
        ([Some(holder::ZYGOTE)], _) => zygote::run(),
        ([Some("--version")], _) => {
            return say(concat!("sandman-holder ", env!("CARGO_PKG_VERSION")));
        }
        ([Some(word)], _) if word.starts_with('-') => return complain(USAGE),
        ([Some("--foreground"), _], Some(directory)) => run(Path::new(directory), true),
        ([_], Some(directory)) => run(Path::new(directory), false),
        _ => return complain(USAGE),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(&format!("sandman-holder: {error}")),
    }
}

fn run(directory: &Path, foreground: bool) -> io::Result<()> {
    let program = sealed_program()?;
    if foreground {
        return holder::serve(directory, program, || Ok(()));
    }
    let (ready, tell) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
    // SAFETY: this process has one thread.
    #[expect(unsafe_code, reason = "becoming a daemon")]
    let side = unsafe { process::clone(0, None) }?;
    match side {
        Side::Parent(_) => {
            drop(tell);
            match nix::unistd::read(&ready, &mut [0])? {
                0 => Err(io::Error::other(
                    "the daemon did not start; it has said why",
                )),
                _ => Ok(()),
            }
        }
        Side::Child => {
            drop(ready);
            nix::unistd::setsid()?;
            std::env::set_current_dir("/")?;
            let null = File::options().read(true).write(true).open("/dev/null")?;
            nix::unistd::dup2_stdin(null.as_fd())?;
            holder::serve(directory, program, move || {
                nix::unistd::write(&tell, b".")?;
                Ok(())
            })
        }
    }
}

/// This program as a file that nobody can change.
///
/// Sandboxes start as copies of it, and root inside a container may reach what `/proc/<pid>/exe`
/// leads to (CVE-2019-5736). So it runs from a sealed copy: unless it does, it starts again as one.
fn sealed_program() -> io::Result<File> {
    let mut program = File::open("/proc/self/exe")?;
    if memfd::is_sealed(&program) {
        return Ok(program);
    }
    let copy = memfd::with_program(c"sandman-holder", &mut program)?;
    let strings = |words: Vec<OsString>| -> io::Result<Vec<CString>> {
        words
            .into_iter()
            .map(|word| Ok(CString::new(word.into_vec())?))
            .collect()
    };
    let args = strings(std::env::args_os().collect())?;
    let env = strings(
        std::env::vars_os()
            .map(|(mut name, value)| {
                name.push("=");
                name.push(value);
                name
            })
            .collect(),
    )?;
    match process::exec_file(copy.as_fd(), &args, &env)? {}
}

fn say(text: &str) -> ExitCode {
    ExitCode::from(u8::from(writeln!(io::stdout(), "{text}").is_err()))
}

fn complain(text: &str) -> ExitCode {
    // Nobody may be listening, which is no reason to panic.
    let _ = writeln!(io::stderr(), "{text}");
    ExitCode::FAILURE
}
