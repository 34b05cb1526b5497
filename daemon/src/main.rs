//! Static in-sandbox agent: PID 1 of every container, usable in any image.
//!
//! The runtime binds this binary below `/dev` in each container, so it may rely
//! on nothing the image holds: no shell, no libc, no `/etc`, no writable path.

mod control;
mod init;
mod sys;
mod tar;
mod test;

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

const USAGE: &str = "\
usage: sandman-daemon init [--report FILE] [--] COMMAND [ARG...]
       sandman-daemon tar OPTIONS [FILE...]
       sandman-daemon test -d|-e|-f PATH
       sandman-daemon version";

/// Exit code of a wrong call, as most command-line tools use it.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let verb = args.next().unwrap_or_default();
    let rest: Vec<OsString> = args.collect();
    let code = match verb.to_str() {
        Some("init") => init::run(rest),
        Some("tar") => tar::run(rest),
        Some("test") => test::run(&rest),
        Some("version" | "--version") => {
            print(concat!("sandman-daemon ", env!("CARGO_PKG_VERSION"), "\n"))
        }
        Some("help" | "--help" | "-h") => print(&format!("{USAGE}\n")),
        _ => {
            complain(USAGE);
            EXIT_USAGE
        }
    };
    ExitCode::from(code)
}

/// Says `text` on stderr. Unlike `eprintln!` it does not panic when nobody reads
/// any more: a closed log must not end PID 1.
fn complain(text: impl Display) {
    drop(writeln!(io::stderr(), "{text}"));
}

/// Writes `text` to stdout; a reader that has gone away is a failure of the call.
fn print(text: &str) -> u8 {
    u8::from(io::stdout().write_all(text.as_bytes()).is_err())
}
