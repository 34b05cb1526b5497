//! The child's side: blob on standard input, archive to standard output, the rest to the error
//! output in pieces ([`super::frame`]).

use std::{
    fs::File,
    io::{self, Write},
    os::fd::AsFd,
    process::ExitCode,
};

use super::{
    ConvertError, Order, confine,
    frame::{Kind, PieceWriter},
    pass,
};

/// Converts by the order, given as JSON. Returns what the process is to end with.
pub fn run(order: &str) -> ExitCode {
    let outcome = serde_json::from_str(order)
        .map_err(|error| format!("the order is not understood: {error}"))
        .and_then(|order| confined(&order));
    match outcome {
        Ok(outcome) => {
            let Ok(text) = serde_json::to_vec(&outcome) else {
                return ExitCode::FAILURE;
            };
            let mut writer = piece_writer(Kind::Outcome);
            match writer.write_all(&text).and_then(|()| writer.flush()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            }
        }
        Err(text) => {
            // Read as text; nobody is left to tell if this fails.
            let _ = writeln!(io::stderr(), "{text}");
            ExitCode::FAILURE
        }
    }
}

fn confined(order: &Order) -> Result<Result<(), ConvertError>, String> {
    confine::close_inherited()?;
    let opened = |error: io::Error| format!("cannot use its standard streams: {error}");
    // Without the buffering and line counting of the standard ones.
    let blob: File = (io::stdin().as_fd().try_clone_to_owned())
        .map_err(opened)?
        .into();
    let tar: File = (io::stdout().as_fd().try_clone_to_owned())
        .map_err(opened)?
        .into();
    confine::enter(order.limits.tar_size)?;
    Ok(pass::convert(
        order,
        blob,
        tar,
        &mut piece_writer(Kind::Meta),
        &mut piece_writer(Kind::Index),
    ))
}

fn piece_writer(kind: Kind) -> PieceWriter<io::Stderr> {
    PieceWriter {
        inner: io::stderr(),
        kind,
    }
}
