//! `tar -x`: unpacks an archive below one directory and nowhere else.
//!
//! Every member is reached from the descriptor of the target directory, one
//! component at a time, and no step follows a symbolic link, whether the archive
//! or somebody else has put it there. That also refuses a link which stays
//! inside; a copy that needs one can name the directory behind it.

use std::ffi::{CStr, CString, OsStr};
use std::fs::{File, FileTimes, Permissions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, fchown};
use std::time::{Duration, SystemTime};

use ::tar::{Archive, Entry, EntryType, Header};

use crate::sys::{at, error_text};
use crate::tar::Fatal;
use crate::tar::args::Options;
use crate::tar::diagnostics::Diagnostics;
use crate::tar::names::{self, Unsafe};

const BUFFER: usize = 64 * 1024;

/// Mode bits with set-user-id, set-group-id and sticky.
const MODE_ALL: u32 = 0o7777;
/// Mode bits that an archive may set on a file without `-p`.
const MODE_PLAIN: u32 = 0o777;

/// Extracts from `input` as `options` say.
pub(super) fn run(
    input: File,
    options: &Options,
    diagnostics: &mut Diagnostics,
) -> Result<(), Fatal> {
    let directory = if options.directory.as_os_str().is_empty() {
        OsStr::new(".")
    } else {
        options.directory.as_os_str()
    };
    // The one place where links are followed: the caller named it.
    let root = File::open(directory)
        .and_then(|file| match file.metadata()?.is_dir() {
            true => Ok(OwnedFd::from(file)),
            false => Err(io::Error::from_raw_os_error(libc::ENOTDIR)),
        })
        .map_err(|e| Fatal::new(directory.display(), "Cannot open", &e))?;
    let wanted = options
        .operands
        .iter()
        .map(|operand| Wanted {
            shown: &operand.name,
            components: names::components(operand.name.as_bytes()).unwrap_or_default(),
            found: false,
        })
        .collect();
    let root_user = at::effective_uid() == 0;
    let mut extractor = Extractor {
        root,
        wanted,
        directories: Vec::new(),
        umask: at::umask(),
        same_permissions: options.same_permissions.unwrap_or(root_user),
        same_owner: options.same_owner.unwrap_or(root_user),
        touch: options.touch,
        verbose: options.verbose,
        diagnostics,
    };
    let mut input = BufReader::with_capacity(BUFFER, input);
    if input.fill_buf().map_err(unreadable)?.is_empty() {
        return Err(Fatal("This does not look like a tar archive".to_owned()));
    }
    let mut archive = Archive::new(input);
    extractor.unpack(&mut archive)?;
    // A writer on the other side must not die of what is after the end mark.
    io::copy(&mut archive.into_inner(), &mut io::sink()).map_err(unreadable)?;
    extractor.finish_directories();
    extractor.report_missing();
    Ok(())
}

fn unreadable(error: io::Error) -> Fatal {
    Fatal::new("archive", "Cannot read", &error)
}

/// A member that was asked for by name.
struct Wanted<'a> {
    shown: &'a OsStr,
    components: Vec<CString>,
    found: bool,
}

/// A directory whose mode and time are set at the end: the mode may forbid
/// writing, and each file put into it changes the time.
struct Directory {
    components: Vec<CString>,
    metadata: Header,
}

struct Extractor<'a> {
    root: OwnedFd,
    wanted: Vec<Wanted<'a>>,
    directories: Vec<Directory>,
    umask: u32,
    same_permissions: bool,
    same_owner: bool,
    touch: bool,
    verbose: bool,
    diagnostics: &'a mut Diagnostics,
}

impl Extractor<'_> {
    fn unpack<R: Read>(&mut self, archive: &mut Archive<R>) -> Result<(), Fatal> {
        for entry in archive.entries().map_err(unreadable)? {
            self.member(&mut entry.map_err(unreadable)?)?;
        }
        Ok(())
    }

    /// Extracts one member. Errors of the member alone are told, not returned.
    fn member<R: Read>(&mut self, entry: &mut Entry<'_, R>) -> Result<(), Fatal> {
        // Defaults for all that follow, which this tar has no use for.
        if entry.header().entry_type() == EntryType::XGlobalHeader {
            return Ok(());
        }
        let name = entry.path_bytes().into_owned();
        let Some(components) = self.components(&name, "member names") else {
            return Ok(());
        };
        if !self.select(&components) {
            return Ok(());
        }
        if self.verbose {
            crate::complain(shown(&name));
        }
        match self.place(entry, &components) {
            Ok(()) => Ok(()),
            Err(Failure::Archive(fatal)) => Err(fatal),
            Err(Failure::Member(action, error)) => {
                self.fail(&name, action, &error);
                Ok(())
            }
        }
    }

    fn place<R: Read>(
        &mut self,
        entry: &mut Entry<'_, R>,
        components: &[CString],
    ) -> Result<(), Failure> {
        let kind = entry.header().entry_type();
        let Some((last, parents)) = components.split_last() else {
            if kind.is_dir() {
                self.remember_directory(components, entry.header());
                return Ok(());
            }
            return Err(failed("Cannot open", libc::EISDIR));
        };
        let parent = self.walk(parents, true)?;
        match kind {
            EntryType::Directory => {
                self.directory(parent.as_fd(), last)?;
                self.remember_directory(components, entry.header());
                Ok(())
            }
            EntryType::Symlink => {
                let target = link_target(entry)?;
                make_room(parent.as_fd(), last)?;
                at::symlink(&parent, last, &target).map_err(on("Cannot create symlink"))?;
                self.describe_name(parent.as_fd(), last, entry.header())
            }
            EntryType::Link => self.hard_link(entry, parent.as_fd(), last),
            EntryType::Char | EntryType::Block | EntryType::Fifo => {
                self.special(entry.header(), parent.as_fd(), last)
            }
            // Everything else is a file to every tar that does not know better.
            _ => self.file(entry, parent.as_fd(), last),
        }
    }

    /// Opens the directory `components`, from the target directory down; with
    /// `create` it makes what is missing.
    fn walk(&self, components: &[CString], create: bool) -> Result<OwnedFd, Failure> {
        let mut dir = self.root.try_clone().map_err(on("Cannot open"))?;
        for component in components {
            let next = match at::open_dir(&dir, component, false) {
                Err(error) if create && error.kind() == io::ErrorKind::NotFound => {
                    at::mkdir(&dir, component, 0o777).map_err(on("Cannot mkdir"))?;
                    at::open_dir(&dir, component, false)
                }
                other => other,
            };
            dir = next.map_err(on("Cannot open"))?;
        }
        Ok(dir)
    }

    fn directory(&self, parent: BorrowedFd<'_>, name: &CStr) -> Result<(), Failure> {
        match at::look(parent, name).map_err(on("Cannot stat"))? {
            Some(found) if found.is_dir => return Ok(()),
            Some(_) => at::unlink(parent, name).map_err(on("Cannot unlink"))?,
            None => {}
        }
        // Open to the owner until its content is in.
        at::mkdir(parent, name, 0o700).map_err(on("Cannot mkdir"))
    }

    fn file<R: Read>(
        &self,
        entry: &mut Entry<'_, R>,
        parent: BorrowedFd<'_>,
        name: &CStr,
    ) -> Result<(), Failure> {
        make_room(parent, name)?;
        let file = at::create_file(parent, name).map_err(on("Cannot open"))?;
        let size = entry.size();
        let mut writer = BufWriter::with_capacity(BUFFER, file);
        let mut buffer = vec![0; BUFFER];
        let mut copied = 0;
        loop {
            let got = match entry.read(&mut buffer) {
                Ok(0) => break,
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    return Err(Failure::Archive(Fatal::new(
                        "archive",
                        "Cannot read",
                        &error,
                    )));
                }
            };
            // A full disk skips this member; reading the archive can go on.
            writer
                .write_all(&buffer[..got])
                .map_err(on("Cannot write"))?;
            copied += got as u64;
        }
        if copied != size {
            return Err(Failure::Archive(Fatal(
                "Unexpected EOF in archive".to_owned(),
            )));
        }
        let file = writer
            .into_inner()
            .map_err(|e| on("Cannot write")(e.into_error()))?;
        self.describe_open(&file, entry.header())
    }

    fn hard_link<R: Read>(
        &mut self,
        entry: &Entry<'_, R>,
        parent: BorrowedFd<'_>,
        name: &CStr,
    ) -> Result<(), Failure> {
        let target = link_target(entry)?;
        let Some(components) = self.components(target.to_bytes(), "hard link targets") else {
            return Ok(());
        };
        let Some((last, parents)) = components.split_last() else {
            return Err(failed("Cannot hard link", libc::EISDIR));
        };
        let from = self.walk(parents, false)?;
        let source = at::look(&from, last).map_err(on("Cannot hard link"))?;
        let present = at::look(parent, name).map_err(on("Cannot hard link"))?;
        if let (Some(source), Some(present)) = (source, present)
            && source.identity == present.identity
        {
            return Ok(());
        }
        if source.is_some() {
            make_room(parent, name)?;
        }
        at::link(&from, last, parent, name).map_err(on("Cannot hard link"))
    }

    fn special(&self, header: &Header, parent: BorrowedFd<'_>, name: &CStr) -> Result<(), Failure> {
        let field =
            |number: io::Result<Option<u32>>| Ok(number.map_err(on("Bad header"))?.unwrap_or(0));
        let (kind, device) = match header.entry_type() {
            EntryType::Fifo => (libc::S_IFIFO, 0),
            other => {
                let kind = if other == EntryType::Char {
                    libc::S_IFCHR
                } else {
                    libc::S_IFBLK
                };
                let device =
                    libc::makedev(field(header.device_major())?, field(header.device_minor())?);
                (kind, device)
            }
        };
        make_room(parent, name)?;
        let mode = self.mode(header)? & MODE_PLAIN;
        at::mknod(parent, name, kind | mode, device).map_err(on("Cannot mknod"))?;
        self.describe_name(parent, name, header)
    }

    /// Sets owner, mode and time of an open file or directory, in this order:
    /// a change of owner clears set-user-id.
    fn describe_open(&self, file: &File, header: &Header) -> Result<(), Failure> {
        if self.same_owner {
            let (uid, gid) = owner(header)?;
            fchown(file, Some(uid), Some(gid)).map_err(on("Cannot change ownership"))?;
        }
        file.set_permissions(Permissions::from_mode(self.mode(header)?))
            .map_err(on("Cannot change mode"))?;
        if !self.touch {
            let time = SystemTime::UNIX_EPOCH
                .checked_add(Duration::from_secs(
                    header.mtime().map_err(on("Bad header"))?,
                ))
                .ok_or_else(|| failed("Bad header", libc::EOVERFLOW))?;
            file.set_times(FileTimes::new().set_modified(time))
                .map_err(on("Cannot utime"))?;
        }
        Ok(())
    }

    /// Sets owner and time of something that must not be opened; it has its mode.
    fn describe_name(
        &self,
        parent: BorrowedFd<'_>,
        name: &CStr,
        header: &Header,
    ) -> Result<(), Failure> {
        if self.same_owner {
            let (uid, gid) = owner(header)?;
            at::chown(parent, name, uid, gid).map_err(on("Cannot change ownership"))?;
        }
        if !self.touch {
            let seconds = header.mtime().map_err(on("Bad header"))?;
            let seconds =
                i64::try_from(seconds).map_err(|_| failed("Bad header", libc::EOVERFLOW))?;
            at::set_mtime(parent, name, seconds).map_err(on("Cannot utime"))?;
        }
        Ok(())
    }

    fn mode(&self, header: &Header) -> Result<u32, Failure> {
        let mode = header.mode().map_err(on("Bad header"))?;
        Ok(if self.same_permissions {
            mode & MODE_ALL
        } else {
            mode & MODE_PLAIN & !self.umask
        })
    }

    fn remember_directory(&mut self, components: &[CString], header: &Header) {
        self.directories.push(Directory {
            components: components.to_vec(),
            metadata: header.clone(),
        });
    }

    /// Children first, so that no parent is closed before them.
    fn finish_directories(&mut self) {
        while let Some(directory) = self.directories.pop() {
            if let Err(failure) = self.finish_directory(&directory) {
                let parts: Vec<&[u8]> = directory.components.iter().map(|c| c.to_bytes()).collect();
                let name = parts.join(&b'/');
                match failure {
                    Failure::Member(action, error) => self.fail(&name, action, &error),
                    Failure::Archive(Fatal(message)) => self.diagnostics.fail(message),
                }
            }
        }
    }

    fn finish_directory(&self, directory: &Directory) -> Result<(), Failure> {
        let file = match directory.components.split_last() {
            Some((last, parents)) => {
                let parent = self.walk(parents, false)?;
                File::from(at::open_dir(&parent, last, true).map_err(on("Cannot open"))?)
            }
            None => File::from(self.root.try_clone().map_err(on("Cannot open"))?),
        };
        self.describe_open(&file, &directory.metadata)
    }

    /// The path of a name in the archive, or `None` if it is not to be trusted.
    fn components(&mut self, name: &[u8], what: &str) -> Option<Vec<CString>> {
        match names::components(name) {
            Ok(components) => {
                if name.starts_with(b"/") {
                    self.diagnostics
                        .note_once(format!("Removing leading `/' from {what}"));
                }
                Some(components)
            }
            Err(Unsafe::DotDot) => {
                self.diagnostics
                    .fail(format_args!("{}: Member name contains '..'", shown(name)));
                None
            }
            Err(Unsafe::Nul) => {
                self.diagnostics
                    .fail(format_args!("{}: Member name has a NUL", shown(name)));
                None
            }
        }
    }

    fn select(&mut self, components: &[CString]) -> bool {
        let mut selected = self.wanted.is_empty();
        for wanted in &mut self.wanted {
            if names::selects(&wanted.components, components) {
                wanted.found = true;
                selected = true;
            }
        }
        selected
    }

    fn report_missing(&mut self) {
        for wanted in self.wanted.iter().filter(|w| !w.found) {
            self.diagnostics.fail(format_args!(
                "{}: Not found in archive",
                wanted.shown.display()
            ));
        }
    }

    fn fail(&mut self, name: &[u8], action: &str, error: &io::Error) {
        self.diagnostics.fail(format_args!(
            "{}: {action}: {}",
            shown(name),
            error_text(error)
        ));
    }
}

/// What keeps a member from being extracted.
enum Failure {
    /// This member only: what was tried, and why it failed.
    Member(&'static str, io::Error),
    /// The archive cannot be read on.
    Archive(Fatal),
}

fn on(action: &'static str) -> impl Fn(io::Error) -> Failure {
    move |error| Failure::Member(action, error)
}

fn failed(action: &'static str, errno: i32) -> Failure {
    Failure::Member(action, io::Error::from_raw_os_error(errno))
}

/// Takes an old file out of the way, so that a new one is made and nothing is
/// written through a link. A directory stays and makes the creation fail.
fn make_room(parent: BorrowedFd<'_>, name: &CStr) -> Result<(), Failure> {
    match at::look(parent, name).map_err(on("Cannot stat"))? {
        Some(found) if !found.is_dir => at::unlink(parent, name).map_err(on("Cannot unlink")),
        _ => Ok(()),
    }
}

fn link_target<R: Read>(entry: &Entry<'_, R>) -> Result<CString, Failure> {
    let target = entry.link_name_bytes().unwrap_or_default();
    CString::new(target).map_err(|_| failed("Bad link target", libc::EINVAL))
}

fn owner(header: &Header) -> Result<(u32, u32), Failure> {
    let id = |value: io::Result<u64>| {
        u32::try_from(value.map_err(on("Bad header"))?)
            .map_err(|_| failed("Bad header", libc::EOVERFLOW))
    };
    Ok((id(header.uid())?, id(header.gid())?))
}

fn shown(name: &[u8]) -> impl std::fmt::Display {
    OsStr::from_bytes(name).display()
}
