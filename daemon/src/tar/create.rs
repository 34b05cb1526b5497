//! `tar -c`: writes files in GNU format.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, FileType, Metadata, OpenOptions};
use std::io::{self, BufWriter, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use ::tar::{Builder, EntryType, Header};

use crate::sys::error_text;
use crate::tar::Fatal;
use crate::tar::args::Options;
use crate::tar::diagnostics::Diagnostics;
use crate::tar::{below, names};

/// Large enough that a pipe or a gRPC frame downstream is filled by one write.
const BUFFER: usize = 64 * 1024;

/// Writes the operands of `options` to `output`.
pub(super) fn run(
    output: File,
    options: &Options,
    diagnostics: &mut Diagnostics,
) -> Result<(), Fatal> {
    let archive = output
        .metadata()
        .ok()
        .filter(Metadata::is_file)
        .map(|m| (m.dev(), m.ino()));
    let mut creator = Creator {
        builder: Builder::new(BufWriter::with_capacity(BUFFER, output)),
        links: HashMap::new(),
        archive,
        verbose: options.verbose,
        dereference: options.dereference,
        diagnostics,
    };
    for operand in &options.operands {
        let name = operand.name.as_bytes();
        // "dir/" names the directory "dir", but "/" is not nothing.
        let end = name
            .iter()
            .rposition(|&b| b != b'/')
            .map_or(1, |last| last + 1);
        let trimmed = &name[..end.min(name.len())];
        // The slash itself stays on the path: "link/" means what it points to.
        let path = below(&operand.dir, Path::new(&operand.name));
        creator.add(&path, trimmed)?;
    }
    let buffer = creator.builder.into_inner().map_err(write_error)?;
    buffer
        .into_inner()
        .map_err(|e| write_error(e.into_error()))?;
    Ok(())
}

fn write_error(error: io::Error) -> Fatal {
    Fatal::new("archive", "Cannot write", &error)
}

struct Creator<'a> {
    builder: Builder<BufWriter<File>>,
    /// Member names of files that have more names, by device and inode.
    links: HashMap<(u64, u64), Vec<u8>>,
    /// The archive's own device and inode, if it is a file.
    archive: Option<(u64, u64)>,
    verbose: bool,
    dereference: bool,
    diagnostics: &'a mut Diagnostics,
}

impl Creator<'_> {
    /// Adds the file at `path` and all below it under `name`. Only a broken
    /// output ends the run; files that cannot be read are told and left out.
    fn add(&mut self, path: &Path, name: &[u8]) -> Result<(), Fatal> {
        let metadata = if self.dereference {
            fs::metadata(path)
        } else {
            fs::symlink_metadata(path)
        };
        let metadata = match metadata {
            Ok(metadata) => metadata,
            Err(error) => return self.pass_over(name, "Cannot stat", &error),
        };
        let kind = metadata.file_type();
        if kind.is_dir() {
            return self.add_directory(path, name, &metadata);
        }
        if kind.is_socket() {
            self.diagnostics
                .note(format_args!("{}: socket ignored", shown(name)));
            return Ok(());
        }
        let identity = (metadata.dev(), metadata.ino());
        if self.archive == Some(identity) {
            self.diagnostics.note(format_args!(
                "{}: file is the archive; not dumped",
                shown(name)
            ));
            return Ok(());
        }
        if metadata.nlink() > 1 {
            if let Some(first) = self.links.get(&identity).cloned() {
                return self.add_link(name, &metadata, EntryType::Link, &first);
            }
            let (_, member) = names::strip(name);
            self.links.insert(identity, member.to_owned());
        }
        if kind.is_file() {
            self.add_file(path, name)
        } else if kind.is_symlink() {
            match fs::read_link(path) {
                Ok(target) => {
                    let target = target.into_os_string().into_vec();
                    self.add_link(name, &metadata, EntryType::Symlink, &target)
                }
                Err(error) => self.pass_over(name, "Cannot readlink", &error),
            }
        } else {
            self.add_special(name, &metadata, kind)
        }
    }

    fn add_directory(
        &mut self,
        path: &Path,
        name: &[u8],
        metadata: &Metadata,
    ) -> Result<(), Fatal> {
        let mut member = self.member(name);
        if !member.ends_with(b"/") {
            member.push(b'/');
        }
        self.put(
            header(metadata, EntryType::Directory),
            &member,
            &mut io::empty(),
        )?;

        let listing = fs::read_dir(path).and_then(|entries| {
            entries
                .map(|e| Ok(e?.file_name()))
                .collect::<io::Result<Vec<_>>>()
        });
        let mut children = match listing {
            Ok(children) => children,
            Err(error) => return self.pass_over(name, "Cannot open", &error),
        };
        // The order of a directory is the file system's whim.
        children.sort_unstable();
        for child in children {
            let mut child_name = name.to_owned();
            if !child_name.ends_with(b"/") {
                child_name.push(b'/');
            }
            child_name.extend_from_slice(child.as_bytes());
            self.add(&path.join(&child), &child_name)?;
        }
        Ok(())
    }

    fn add_file(&mut self, path: &Path, name: &[u8]) -> Result<(), Fatal> {
        // What is opened may be something else by now, so it must neither be a
        // link nor block, and the header describes what was opened.
        let nofollow = if self.dereference {
            0
        } else {
            libc::O_NOFOLLOW
        };
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(nofollow | libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
            .and_then(|file| Ok((file.metadata()?, file)));
        let (metadata, file) = match opened {
            Ok((metadata, file)) if metadata.is_file() => (metadata, file),
            Ok(_) => {
                self.diagnostics.differ(format_args!(
                    "{}: File removed before we read it",
                    shown(name)
                ));
                return Ok(());
            }
            Err(error) => return self.pass_over(name, "Cannot open", &error),
        };
        let member = self.member(name);
        let mut content = Exactly {
            file,
            left: metadata.len(),
            padded: 0,
            error: None,
        };
        self.put(header(&metadata, EntryType::Regular), &member, &mut content)?;
        if let Some(error) = content.error {
            self.pass_over(name, "Read error", &error)?;
        } else if content.padded > 0 {
            self.diagnostics.differ(format_args!(
                "{}: File shrank by {} bytes; padding with zeros",
                shown(name),
                content.padded
            ));
        }
        Ok(())
    }

    fn add_link(
        &mut self,
        name: &[u8],
        metadata: &Metadata,
        kind: EntryType,
        target: &[u8],
    ) -> Result<(), Fatal> {
        let member = self.member(name);
        let mut header = header(metadata, kind);
        header.set_size(0);
        match header.as_gnu_mut() {
            Some(gnu) if target.len() <= gnu.linkname.len() => {
                gnu.linkname[..target.len()].copy_from_slice(target);
            }
            _ => self.put_long(EntryType::GNULongLink, target)?,
        }
        self.put(header, &member, &mut io::empty())
    }

    fn add_special(
        &mut self,
        name: &[u8],
        metadata: &Metadata,
        kind: FileType,
    ) -> Result<(), Fatal> {
        let entry_type = if kind.is_fifo() {
            EntryType::Fifo
        } else if kind.is_char_device() {
            EntryType::Char
        } else {
            EntryType::Block
        };
        let mut header = header(metadata, entry_type);
        header.set_size(0);
        if !kind.is_fifo() {
            let device = metadata.rdev();
            let numbers = header
                .set_device_major(libc::major(device))
                .and_then(|()| header.set_device_minor(libc::minor(device)));
            if let Err(error) = numbers {
                return self.pass_over(name, "Cannot describe", &error);
            }
        }
        let member = self.member(name);
        self.put(header, &member, &mut io::empty())
    }

    /// The member name for `name`, saying so once if it is a shortened one.
    fn member(&mut self, name: &[u8]) -> Vec<u8> {
        let (prefix, member) = names::strip(name);
        if !prefix.is_empty() {
            self.diagnostics.note_once(format!(
                "Removing leading `{}' from member names",
                shown(prefix)
            ));
        }
        member.to_owned()
    }

    /// Writes one member, with a long-name record before it if need be. The
    /// header takes the bytes of the name as they are: kubectl compares them.
    fn put(
        &mut self,
        mut header: Header,
        member: &[u8],
        content: &mut dyn Read,
    ) -> Result<(), Fatal> {
        if self.verbose {
            crate::complain(shown(member));
        }
        if let Some(gnu) = header.as_gnu_mut() {
            let fits = member.len().min(gnu.name.len());
            gnu.name[..fits].copy_from_slice(&member[..fits]);
            if fits < member.len() {
                self.put_long(EntryType::GNULongName, member)?;
            }
        }
        header.set_cksum();
        self.builder.append(&header, content).map_err(write_error)
    }

    /// Writes the GNU record that gives the next member a long name or target.
    fn put_long(&mut self, kind: EntryType, text: &[u8]) -> Result<(), Fatal> {
        let mut header = Header::new_gnu();
        if let Some(gnu) = header.as_gnu_mut() {
            let name = b"././@LongLink";
            gnu.name[..name.len()].copy_from_slice(name);
        }
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        // The terminating NUL counts.
        header.set_size(text.len() as u64 + 1);
        header.set_cksum();
        self.builder
            .append(&header, text.chain(&b"\0"[..]))
            .map_err(write_error)
    }

    fn pass_over(&mut self, name: &[u8], action: &str, error: &io::Error) -> Result<(), Fatal> {
        self.diagnostics.fail(format_args!(
            "{}: {action}: {}",
            shown(name),
            error_text(error)
        ));
        Ok(())
    }
}

fn header(metadata: &Metadata, kind: EntryType) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(metadata.mode() & 0o7777);
    header.set_uid(metadata.uid().into());
    header.set_gid(metadata.gid().into());
    // The format has no times before 1970 that every reader takes.
    header.set_mtime(u64::try_from(metadata.mtime()).unwrap_or(0));
    header.set_size(if kind == EntryType::Regular {
        metadata.len()
    } else {
        0
    });
    header
}

fn shown(name: &[u8]) -> impl std::fmt::Display {
    OsStr::from_bytes(name).display()
}

/// Reads exactly as many bytes as the header promised, whatever the file does
/// meanwhile: anything else would shift all members after it.
struct Exactly {
    file: File,
    left: u64,
    padded: u64,
    error: Option<io::Error>,
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let want = buffer
            .len()
            .min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if want == 0 {
            return Ok(0);
        }
        let buffer = &mut buffer[..want];
        let mut got = 0;
        if self.padded == 0 {
            got = match self.file.read(buffer) {
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err(error),
                Err(error) => {
                    self.error = Some(error);
                    0
                }
            };
        }
        if got == 0 {
            buffer.fill(0);
            got = want;
            self.padded += want as u64;
        }
        self.left -= got as u64;
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::Exactly;

    #[test]
    fn content_has_the_length_of_the_header() {
        for (length, padded) in [(2, 0), (4, 0), (9, 5)] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(b"abcd").unwrap();
            std::io::Seek::rewind(&mut file).unwrap();
            let mut content = Exactly {
                file,
                left: length,
                padded: 0,
                error: None,
            };
            let mut bytes = Vec::new();
            content.read_to_end(&mut bytes).unwrap();
            let expected: Vec<u8> = b"abcd"
                .iter()
                .copied()
                .chain([0; 5])
                .take(length as usize)
                .collect();
            assert_eq!((bytes, content.padded), (expected, padded));
        }
    }
}
