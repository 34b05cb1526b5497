//! tar's command line: bundled old style (`cf -`), short and long options.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use crate::tar::below;

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// `-c`
    Create,
    /// `-x`
    Extract,
    /// `--version`
    Version,
    /// `--help`
    Help,
}

/// A file operand, with the directory that `-C` had set when it was given.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Operand {
    /// Empty for the working directory.
    pub(super) dir: PathBuf,
    /// As given.
    pub(super) name: OsString,
}

/// A parsed command line.
#[derive(Debug)]
pub(super) struct Options {
    pub(super) mode: Mode,
    /// `None` for a standard stream.
    pub(super) archive: Option<PathBuf>,
    pub(super) operands: Vec<Operand>,
    /// Where to extract; empty for the working directory.
    pub(super) directory: PathBuf,
    /// List members on stderr.
    pub(super) verbose: bool,
    /// Follow symbolic links when creating.
    pub(super) dereference: bool,
    /// Leave modification times alone when extracting.
    pub(super) touch: bool,
    /// Take modes as they are, not through the umask. `None`: if root.
    pub(super) same_permissions: Option<bool>,
    /// Take owners over. `None`: if root.
    pub(super) same_owner: Option<bool>,
}

/// Parses the arguments after `tar`.
///
/// # Errors
/// A message for the user that names the option.
pub(super) fn parse(args: Vec<OsString>) -> Result<Options, String> {
    let mut parser = Parser::default();
    let mut args = args.into_iter();
    let mut only_operands = false;
    let mut first = true;
    while let Some(arg) = args.next() {
        let bytes = arg.as_bytes();
        match bytes {
            _ if only_operands => parser.operand(arg),
            b"--" => only_operands = true,
            [b'-', b'-', long @ ..] => parser.long(long, &mut args)?,
            [b'-', letters @ ..] if !letters.is_empty() => parser.short(letters, &mut args)?,
            // Old style: values follow in the order of their letters.
            letters if first && !letters.is_empty() => parser.old_style(letters, &mut args)?,
            _ => parser.operand(arg),
        }
        first = false;
    }
    parser.finish()
}

/// An option, whichever way it was spelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flag {
    Mode(Mode),
    File,
    Directory,
    Verbose,
    Dereference,
    Touch,
    SamePermissions(bool),
    SameOwner(bool),
}

impl Flag {
    fn takes_value(self) -> bool {
        matches!(self, Self::File | Self::Directory)
    }

    fn from_letter(letter: u8) -> Result<Self, String> {
        Ok(match letter {
            b'c' => Self::Mode(Mode::Create),
            b'x' => Self::Mode(Mode::Extract),
            b'f' => Self::File,
            b'C' => Self::Directory,
            b'v' => Self::Verbose,
            b'h' => Self::Dereference,
            b'm' => Self::Touch,
            b'p' => Self::SamePermissions(true),
            b'o' => Self::SameOwner(false),
            b'z' | b'j' | b'J' | b'a' | b'Z' => {
                return Err(format!(
                    "option '-{}': compressed archives are not supported",
                    letter as char
                ));
            }
            _ => return Err(format!("invalid option -- '{}'", letter.escape_ascii())),
        })
    }

    fn from_name(name: &[u8]) -> Result<Self, String> {
        Ok(match name {
            b"create" => Self::Mode(Mode::Create),
            b"extract" | b"get" => Self::Mode(Mode::Extract),
            b"version" => Self::Mode(Mode::Version),
            b"help" | b"usage" => Self::Mode(Mode::Help),
            b"file" => Self::File,
            b"directory" => Self::Directory,
            b"verbose" => Self::Verbose,
            b"dereference" => Self::Dereference,
            b"touch" => Self::Touch,
            b"preserve-permissions" | b"same-permissions" => Self::SamePermissions(true),
            b"no-same-permissions" => Self::SamePermissions(false),
            b"same-owner" => Self::SameOwner(true),
            b"no-same-owner" => Self::SameOwner(false),
            _ => return Err(format!("unrecognized option '--{}'", name.escape_ascii())),
        })
    }
}

#[derive(Debug, Default)]
struct Parser {
    mode: Option<Mode>,
    archive: Option<PathBuf>,
    operands: Vec<Operand>,
    directory: PathBuf,
    verbose: bool,
    dereference: bool,
    touch: bool,
    same_permissions: Option<bool>,
    same_owner: Option<bool>,
}

impl Parser {
    fn operand(&mut self, name: OsString) {
        self.operands.push(Operand {
            dir: self.directory.clone(),
            name,
        });
    }

    fn long(
        &mut self,
        long: &[u8],
        args: &mut dyn Iterator<Item = OsString>,
    ) -> Result<(), String> {
        let (name, value) = match long.iter().position(|&b| b == b'=') {
            Some(at) => (
                &long[..at],
                Some(OsStr::from_bytes(&long[at + 1..]).to_owned()),
            ),
            None => (long, None),
        };
        let flag = Flag::from_name(name)?;
        let shown = name.escape_ascii();
        if !flag.takes_value() {
            return match value {
                Some(_) => Err(format!("option '--{shown}' doesn't allow an argument")),
                None => self.set(flag),
            };
        }
        let value = value.or_else(|| args.next());
        let value = value.ok_or_else(|| format!("option '--{shown}' requires an argument"))?;
        self.set_value(flag, value);
        Ok(())
    }

    fn short(
        &mut self,
        letters: &[u8],
        args: &mut dyn Iterator<Item = OsString>,
    ) -> Result<(), String> {
        for (at, &letter) in letters.iter().enumerate() {
            let flag = Flag::from_letter(letter)?;
            if !flag.takes_value() {
                self.set(flag)?;
                continue;
            }
            let attached = &letters[at + 1..];
            let value = if attached.is_empty() {
                args.next()
            } else {
                Some(OsString::from_vec(attached.to_vec()))
            };
            self.set_value(flag, value.ok_or_else(|| missing_value(letter))?);
            break;
        }
        Ok(())
    }

    fn old_style(
        &mut self,
        letters: &[u8],
        args: &mut dyn Iterator<Item = OsString>,
    ) -> Result<(), String> {
        for &letter in letters {
            let flag = Flag::from_letter(letter)?;
            if flag.takes_value() {
                let value = args.next().ok_or_else(|| missing_value(letter))?;
                self.set_value(flag, value);
            } else {
                self.set(flag)?;
            }
        }
        Ok(())
    }

    fn set_value(&mut self, flag: Flag, value: OsString) {
        if flag == Flag::Directory {
            // Each -C is relative to the one before it.
            self.directory = below(&self.directory, value.as_ref());
        } else {
            self.archive = (value != "-").then(|| value.into());
        }
    }

    fn set(&mut self, flag: Flag) -> Result<(), String> {
        match flag {
            Flag::Mode(mode) => match self.mode {
                Some(other) if other != mode => {
                    return Err("You may not specify more than one '-cx' option".to_owned());
                }
                _ => self.mode = Some(mode),
            },
            Flag::Verbose => self.verbose = true,
            Flag::Dereference => self.dereference = true,
            Flag::Touch => self.touch = true,
            Flag::SamePermissions(on) => self.same_permissions = Some(on),
            Flag::SameOwner(on) => self.same_owner = Some(on),
            // Both are set with their value.
            Flag::File | Flag::Directory => {}
        }
        Ok(())
    }

    fn finish(self) -> Result<Options, String> {
        let mode = self
            .mode
            .ok_or("You must specify one of the '-cx' options")?;
        if mode == Mode::Create && self.operands.is_empty() {
            return Err("Cowardly refusing to create an empty archive".to_owned());
        }
        Ok(Options {
            mode,
            archive: self.archive,
            operands: self.operands,
            directory: self.directory,
            verbose: self.verbose,
            dereference: self.dereference,
            touch: self.touch,
            same_permissions: self.same_permissions,
            same_owner: self.same_owner,
        })
    }
}

fn missing_value(letter: u8) -> String {
    format!("option requires an argument -- '{}'", letter as char)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Mode, Options, parse};

    fn parsed(line: &str) -> Options {
        parse(line.split_whitespace().map(Into::into).collect()).unwrap()
    }

    fn refused(line: &str) -> String {
        parse(line.split_whitespace().map(Into::into).collect()).unwrap_err()
    }

    fn operands(options: &Options) -> Vec<(&str, &str)> {
        let text = |s: &'_ std::ffi::OsStr| -> &'static str {
            String::leak(s.to_str().unwrap().to_owned())
        };
        options
            .operands
            .iter()
            .map(|o| (text(o.dir.as_os_str()), text(&o.name)))
            .collect()
    }

    #[test]
    fn takes_the_lines_of_kubectl_cp() {
        let options = parsed("cf - /var/log/x");
        assert_eq!(
            (options.mode, options.archive.as_deref()),
            (Mode::Create, None)
        );
        assert_eq!(operands(&options), [("", "/var/log/x")]);

        let options = parsed("-xmf - -C /tmp");
        assert_eq!((options.mode, options.touch), (Mode::Extract, true));
        assert_eq!(options.directory, Path::new("/tmp"));
        assert!(options.operands.is_empty());

        let options = parsed("--no-same-permissions --no-same-owner -xmf - -C .");
        assert_eq!(
            (options.same_permissions, options.same_owner),
            (Some(false), Some(false))
        );
    }

    #[test]
    fn spells_options_every_way() {
        for line in [
            "cfC a.tar d x",
            "-c -f a.tar -C d x",
            "-cfa.tar -Cd x",
            "--create --file=a.tar --directory d x",
        ] {
            let options = parsed(line);
            assert_eq!(
                options.archive.as_deref(),
                Some(Path::new("a.tar")),
                "{line}"
            );
            assert_eq!(operands(&options), [("d", "x")], "{line}");
        }
        assert_eq!(
            operands(&parsed("cf - a -C d b -C e c -C /f -- -g")),
            [("", "a"), ("d", "b"), ("d/e", "c"), ("/f", "-g"),]
        );
        assert_eq!(parsed("--version").mode, Mode::Version);
    }

    #[test]
    fn refuses_by_name() {
        for (line, part) in [
            ("-czf - x", "'-z'"),
            ("-xq", "'q'"),
            ("--exclude=a -cf - x", "'--exclude'"),
            ("--verbose=1 -cf - x", "'--verbose'"),
            ("-cf", "'f'"),
            ("--file", "'--file'"),
            ("-c -x", "more than one"),
            ("cf -", "empty archive"),
            ("-v", "'-cx'"),
            ("", "'-cx'"),
        ] {
            assert!(refused(line).contains(part), "{line}: {}", refused(line));
        }
    }
}
