//! The part of tar(1) that `kubectl cp` needs, for images that have no tar.
//!
//! It speaks GNU tar's options, messages and exit codes as far as it goes, and
//! refuses the rest by name. It runs with the rights of whoever was allowed to
//! exec into the container; archives are not trusted all the same.

mod args;
mod create;
mod diagnostics;
mod extract;
mod names;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::sys::error_text;
use args::{Mode, Options};
use diagnostics::Diagnostics;

/// GNU tar's exit code for anything that went wrong.
const EXIT_FAILURE: u8 = 2;

const HELP: &str = "\
usage: tar -c [-vh] [-f ARCHIVE] [-C DIR] FILE...
       tar -x [-vmpo] [-f ARCHIVE] [-C DIR] [--same-owner|--no-same-owner]
              [--same-permissions|--no-same-permissions] [MEMBER...]
ARCHIVE is - (the default) for standard input or output. Archives are not
compressed.
";

/// What ends a run at once; everything smaller is told and passed over.
#[derive(Debug)]
struct Fatal(String);

impl Fatal {
    fn new(what: impl std::fmt::Display, action: &str, error: &io::Error) -> Self {
        Self(format!("{what}: {action}: {}", error_text(error)))
    }
}

/// Runs `tar` with `args` and returns its exit code.
pub(crate) fn run(args: Vec<OsString>) -> u8 {
    let options = match args::parse(args) {
        Ok(options) => options,
        Err(message) => {
            crate::complain(format_args!(
                "tar: {message}\nTry 'tar --help' for more information."
            ));
            return EXIT_FAILURE;
        }
    };
    let mut diagnostics = Diagnostics::default();
    let result = match options.mode {
        Mode::Version => {
            return crate::print(concat!(
                "tar (sandman-daemon) ",
                env!("CARGO_PKG_VERSION"),
                "\n"
            ));
        }
        Mode::Help => return crate::print(HELP),
        Mode::Create => create(&options, &mut diagnostics),
        Mode::Extract => extract(&options, &mut diagnostics),
    };
    if let Err(Fatal(message)) = result {
        diagnostics.fail(message);
        diagnostics.fail("Error is not recoverable: exiting now");
        return EXIT_FAILURE;
    }
    if diagnostics.failed() {
        diagnostics.fail("Exiting with failure status due to previous errors");
    }
    diagnostics.exit_code()
}

fn create(options: &Options, diagnostics: &mut Diagnostics) -> Result<(), Fatal> {
    let archive = match &options.archive {
        Some(path) => {
            File::create(path).map_err(|e| Fatal::new(path.display(), "Cannot open", &e))?
        }
        None => duplicate(io::stdout().as_fd())?,
    };
    create::run(archive, options, diagnostics)
}

fn extract(options: &Options, diagnostics: &mut Diagnostics) -> Result<(), Fatal> {
    let archive = match &options.archive {
        Some(path) => {
            File::open(path).map_err(|e| Fatal::new(path.display(), "Cannot open", &e))?
        }
        None => duplicate(io::stdin().as_fd())?,
    };
    extract::run(archive, options, diagnostics)
}

/// A plain file over a standard stream: std's own handles buffer by line.
fn duplicate(stream: std::os::fd::BorrowedFd<'_>) -> Result<File, Fatal> {
    let fd = stream
        .try_clone_to_owned()
        .map_err(|e| Fatal::new("standard stream", "Cannot duplicate", &e))?;
    Ok(File::from(fd))
}

/// `path` below `dir`, or `dir` itself for an empty `path`.
fn below(dir: &Path, path: &Path) -> PathBuf {
    if dir.as_os_str().is_empty() {
        path.to_owned()
    } else {
        dir.join(path)
    }
}
