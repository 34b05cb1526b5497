//! The command line of `containerd-shim-sandman-v1`, as containerd calls it.
//!
//! | call | does |
//! |---|---|
//! | `start` | prints the address of the one shim of this containerd namespace, started if need be |
//! | `delete` | removes what is left of a container whose shim does not answer |
//! | `serve` | is the shim; by `start`, or as a service with a fixed `--socket` |
//! | `-info`, `-v` | say what this is |

mod args;
mod bootstrap;
mod delete;
mod group;
mod info;
mod log;
mod serve;
mod start;

use std::io::{self, Write};
use std::process::ExitCode;

use args::{Args, Verb};

const USAGE: &str = "\
usage: containerd-shim-sandman-v1 [FLAGS] start|delete
       containerd-shim-sandman-v1 [FLAGS] serve --socket PATH
       containerd-shim-sandman-v1 -info | -v

containerd calls the first form in a bundle's folder. The second is a service for containerd 2.0 and
later: give tasks the option task_api_address=ttrpc+unix://PATH with task_api_version=3.

  --namespace NAME    containerd's namespace
  --address PATH      containerd's socket
  --id ID             the container (start, delete)
  --bundle PATH       its folder, if not the working directory
  --state-dir PATH    where shims keep their state
                      [default: $SANDMAN_SHIM_STATE_DIR, or /run/sandman-shim]
  --socket PATH       where to serve the task API (serve)
  --debug             log more
  --publish-binary PATH   accepted and not needed: events go over ttrpc";

/// Runs the program.
#[must_use]
pub fn main() -> ExitCode {
    let args = match Args::parse(std::env::args_os().skip(1)) {
        Ok(args) => args,
        Err(error) => return fail(format_args!("{error}\n{USAGE}"), 2),
    };
    let done = match args.verb {
        Verb::Start => start::run(&args),
        Verb::Delete => delete::run(&args),
        Verb::Serve => serve::run(&args),
        Verb::Info => info::info(),
        Verb::Version => info::version(),
        Verb::Help => print(format!("{USAGE}\n").as_bytes()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(format_args!("{error:#}"), 1),
    }
}

fn fail(error: impl std::fmt::Display, code: u8) -> ExitCode {
    // containerd shows stderr to its user.
    drop(writeln!(
        io::stderr(),
        "containerd-shim-sandman-v1: {error}"
    ));
    ExitCode::from(code)
}

fn print(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes)?;
    stdout.flush()?;
    Ok(())
}
