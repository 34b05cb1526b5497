//! From a copy of PID 1 to the process that the host asked for, with exactly the rights that runc
//! would give it.
//!
//! PID 1 has the container's own rights and not more, so some processes are beyond it: then it
//! says so, and the host starts the process by the sandbox's namespaces.

use std::ffi::{CString, OsStr};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;

use sandman_agent_protocol::{Capabilities, Kind, MAX_TEXT, Start};

use super::table::Refusal;
use crate::init::lookup;
use crate::init::spawn::lower;
use crate::sys::process;
use crate::sys::rights::{self, CapSets};
use crate::sys::terminal;

type Step<T> = Result<T, (Kind, String)>;

/// Exit code of a child that did not become its program; the record says why.
const EXIT_FAILED: i32 = 127;

/// Becomes the process, or says to `tell` why not.
pub(super) fn run(start: &Start<'_>, streams: [BorrowedFd<'_>; 3], tell: BorrowedFd<'_>) -> ! {
    let Err((kind, text)) = become_process(start, streams);
    if let Ok(tell) = tell.try_clone_to_owned() {
        // If PID 1 is gone, nobody is left to tell.
        drop(std::fs::File::from(tell).write_all(&record(kind, &text)));
    }
    process::leave(EXIT_FAILED)
}

/// What a child writes when it fails. Less than a pipe takes at once.
pub(super) fn record(kind: Kind, text: &str) -> Vec<u8> {
    let text = &text.as_bytes()[..text.floor_char_boundary(MAX_TEXT)];
    [&[u8::from(kind == Kind::Failed)], text].concat()
}

/// Reads that.
pub(super) fn read_record(record: &[u8]) -> (Kind, String) {
    match record.split_first() {
        Some((1, text)) => (Kind::Failed, String::from_utf8_lossy(text).into_owned()),
        Some((_, text)) => (Kind::Unable, String::from_utf8_lossy(text).into_owned()),
        None => (Kind::Unable, String::new()),
    }
}

fn unable<T>(result: io::Result<T>, what: &str) -> Step<T> {
    result.map_err(|error| (Kind::Unable, format!("{what}: {}", lower(&error))))
}

fn become_process(
    start: &Start<'_>,
    streams: [BorrowedFd<'_>; 3],
) -> Step<std::convert::Infallible> {
    process::new_session();
    if start.terminal.is_some() {
        unable(terminal::control(streams[0]), "take the terminal")?;
    }
    let null = terminal::open_null();
    let mut streams = streams;
    for stream in &mut streams {
        if terminal::is_null(*stream).unwrap_or(false) {
            // The host's own would be the host's to change by whoever holds it open; as runc's
            // reOpenDevNull.
            *stream = match &null {
                Ok(null) => null.as_fd(),
                Err(error) => {
                    let text = format!("open /dev/null: {}", lower(error));
                    return Err((Kind::Unable, text));
                }
            };
            continue;
        }
        // So that `/dev/stdout` can be opened again. Not possible for all kinds of files, and
        // then not needed; as runc's fixStdioPermissions.
        drop(terminal::give(*stream, start.uid));
    }
    rights::set_umask(start.umask.unwrap_or(0o22));
    // A folder may be closed to root (an NFS export) or to the user.
    let entered = change_folder(start);
    let wanted = become_user(start)?;
    if entered.is_err() {
        change_folder(start)?;
    }
    // A working directory outside of the root would be a way out of it (CVE-2024-21626).
    if !std::env::current_dir().is_ok_and(|folder| folder.is_absolute()) {
        return Err((
            Kind::Unable,
            "the working directory is outside of the root".into(),
        ));
    }
    let (program, args, env) = program(start)?;
    if start.no_new_privileges {
        unable(rights::no_new_privileges(), "set no_new_privs")?;
    }
    take_rights(wanted)?;
    let error = process::become_program(&program, &args, &env, streams);
    Err((
        Kind::Failed,
        format!("exec {}: {}", program.to_string_lossy(), lower(&error)),
    ))
}

fn change_folder(start: &Start<'_>) -> Step<()> {
    std::env::set_current_dir(OsStr::from_bytes(start.cwd)).map_err(|error| {
        let text = format!(
            "chdir to cwd ({:?}) set in config.json failed: {}",
            String::from_utf8_lossy(start.cwd),
            lower(&error)
        );
        (Kind::Failed, text)
    })
}

fn program(start: &Start<'_>) -> Step<(CString, Vec<CString>, Vec<CString>)> {
    let name = start.args.first().copied().unwrap_or_default();
    if name.is_empty() {
        return Err((Kind::Failed, "exec: \"\": no command".into()));
    }
    let path = start
        .env
        .iter()
        .find_map(|variable| variable.strip_prefix(b"PATH="));
    let path = OsStr::from_bytes(path.unwrap_or_default());
    let program = lookup::find(OsStr::from_bytes(name), Some(path))
        .map_err(|error| (Kind::Failed, error.message))?;
    let strings = |strings: &[&[u8]]| -> Step<Vec<CString>> {
        // The protocol has no NUL bytes: this is for the type system.
        let strings = strings
            .iter()
            .map(|string| CString::new(*string).map_err(io::Error::from));
        unable(strings.collect(), "arguments")
    };
    Ok((program, strings(&start.args)?, strings(&start.env)?))
}

/// Limits, bounding set, groups, ids. What is permitted is kept for [`take_rights`].
fn become_user(start: &Start<'_>) -> Step<Capabilities> {
    for limit in &start.limits {
        let set = rights::set_limit(limit.resource, limit.soft, limit.hard);
        unable(set, "set a resource limit")?;
    }
    let wanted = start.capabilities;
    let known = (0..64).map_while(|capability| Some((capability, rights::bounded(capability)?)));
    for (capability, has) in known {
        let wants = wanted.bounding & (1 << capability) != 0;
        match (wants, has) {
            (true, false) => return Err(beyond("bounding", capability)),
            (false, true) => unable(
                rights::unbound(capability),
                "limit the bounding set of capabilities",
            )?,
            _ => {}
        }
    }
    let held = unable(rights::capabilities(), "read the capabilities")?;
    unable(rights::keep_capabilities(true), "keep capabilities")?;
    let mut groups = unable(rights::groups(), "read the groups")?;
    let mut asked = start.groups.clone();
    groups.sort_unstable();
    asked.sort_unstable();
    if groups != asked {
        unable(rights::set_groups(&start.groups), "set the groups")?;
    }
    unable(rights::set_user(start.uid, start.gid), "become the user")?;
    unable(rights::keep_capabilities(false), "keep capabilities")?;
    Ok(available(wanted, held.permitted))
}

/// Permitted and effective capabilities do not outlive the exec as such: those of root come from
/// the bounding set, those of others from the ambient and the inheritable one. The latter two are
/// set exactly, or not at all.
fn take_rights(wanted: Capabilities) -> Step<()> {
    let sets = CapSets {
        effective: wanted.effective,
        permitted: wanted.permitted,
        inheritable: wanted.inheritable,
    };
    unable(rights::set_capabilities(sets), "set the capabilities")?;
    unable(
        rights::set_ambient(wanted.ambient),
        "set ambient capabilities",
    )
}

fn available(wanted: Capabilities, held: u64) -> Capabilities {
    let permitted = wanted.permitted & held;
    Capabilities {
        permitted,
        effective: wanted.effective & permitted,
        ..wanted
    }
}

fn beyond(set: &str, capability: u32) -> (Kind, String) {
    let text = format!("capability {capability} is not in the {set} set of the container");
    (Kind::Unable, text)
}

impl From<(Kind, String)> for Refusal {
    fn from((kind, text): (Kind, String)) -> Self {
        Self::new(kind, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back() {
        for kind in [Kind::Failed, Kind::Unable] {
            let (got, text) = read_record(&record(kind, "exec: \"ü\""));
            assert_eq!((got, text.as_str()), (kind, "exec: \"ü\""));
        }
        let (_, text) = read_record(&record(Kind::Failed, &"ü".repeat(MAX_TEXT)));
        assert_eq!(text, "ü".repeat(MAX_TEXT / 2));
        assert_eq!(read_record(&[]).0, Kind::Unable);
    }

    #[test]
    fn what_exec_takes_away_anyway_is_not_asked_for() {
        let wanted = Capabilities {
            bounding: 0b1111,
            effective: 0b0111,
            permitted: 0b0111,
            inheritable: 0b0010,
            ambient: 0b0010,
        };
        let got = available(wanted, 0b0011);
        assert_eq!((got.permitted, got.effective), (0b0011, 0b0011));
        assert_eq!((got.inheritable, got.ambient), (0b0010, 0b0010));
    }
}
