//! Flags in Go's manner: one dash or two, `-name value` or `-name=value`, before the verb or after.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Start,
    Delete,
    Serve,
    Info,
    Version,
    Help,
}

/// A command line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Args {
    pub(super) verb: Verb,
    pub(super) namespace: String,
    pub(super) address: String,
    pub(super) id: String,
    pub(super) bundle: Option<PathBuf>,
    pub(super) state_dir: PathBuf,
    pub(super) socket: Option<PathBuf>,
    /// The listening socket is descriptor 3: `start` made it.
    pub(super) inherited: bool,
    /// The holder has the listening socket: it started this.
    pub(super) revived: bool,
    pub(super) debug: bool,
}

/// Below it each shim has a folder, unless a flag or the variable says otherwise.
const STATE_DIR: &str = "/run/sandman-shim";
/// containerd has no flag for it, but passes on its own environment.
const STATE_VARIABLE: &str = "SANDMAN_SHIM_STATE_DIR";

impl Args {
    pub(super) fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Self, String> {
        let mut args = Self {
            verb: Verb::Help,
            namespace: String::new(),
            address: String::new(),
            id: String::new(),
            bundle: None,
            state_dir: std::env::var_os(STATE_VARIABLE)
                .filter(|dir| !dir.is_empty())
                .map_or_else(|| STATE_DIR.into(), PathBuf::from),
            socket: None,
            inherited: false,
            revived: false,
            debug: false,
        };
        let mut verb = None;
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let Some(flag) = flag(&word) else {
                let named = match word.to_str() {
                    Some("start") => Verb::Start,
                    Some("delete") => Verb::Delete,
                    Some("serve") => Verb::Serve,
                    _ => return Err(format!("unknown command {}", word.to_string_lossy())),
                };
                verb = verb.or(Some(named));
                continue;
            };
            let (name, inline) = flag;
            match name.as_str() {
                "debug" => args.debug = true,
                "inherited" => args.inherited = true,
                "revived" => args.revived = true,
                "info" => verb = Some(Verb::Info),
                "v" | "version" => verb = Some(Verb::Version),
                "h" | "help" => verb = Some(Verb::Help),
                _ => {
                    let value = inline
                        .or_else(|| words.next())
                        .ok_or_else(|| format!("-{name} wants a value"))?;
                    args.set(&name, value)?;
                }
            }
        }
        args.verb = verb.ok_or("no command")?;
        args.check()?;
        Ok(args)
    }

    fn set(&mut self, name: &str, value: OsString) -> Result<(), String> {
        let text = |value: OsString| {
            value
                .into_string()
                .map_err(|_| format!("-{name}: not UTF-8"))
        };
        match name {
            "namespace" => self.namespace = text(value)?,
            "address" => self.address = text(value)?,
            "id" => self.id = text(value)?,
            "bundle" => self.bundle = Some(value.into()),
            "state-dir" => self.state_dir = value.into(),
            "socket" => self.socket = Some(value.into()),
            // Of containerd's own shims.
            "publish-binary" => {}
            _ => return Err(format!("unknown flag -{name}")),
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        let needed: &[(&str, &str)] = match self.verb {
            Verb::Start | Verb::Delete => &[
                ("namespace", &self.namespace),
                ("address", &self.address),
                ("id", &self.id),
            ],
            Verb::Serve => &[("namespace", &self.namespace), ("address", &self.address)],
            Verb::Info | Verb::Version | Verb::Help => &[],
        };
        match needed.iter().find(|(_, value)| value.is_empty()) {
            Some((name, _)) => Err(format!("-{name} is missing")),
            None => Ok(()),
        }
    }
}

/// Name and inline value of a flag.
fn flag(word: &OsStr) -> Option<(String, Option<OsString>)> {
    let bytes = word.as_bytes();
    let name = bytes
        .strip_prefix(b"--")
        .or_else(|| bytes.strip_prefix(b"-"))
        .filter(|name| !name.is_empty())?;
    let (name, value) = match name.iter().position(|byte| *byte == b'=') {
        Some(at) => (
            &name[..at],
            Some(OsString::from_vec(name[at + 1..].to_vec())),
        ),
        None => (name, None),
    };
    Some((String::from_utf8_lossy(name).into_owned(), value))
}

#[cfg(test)]
mod tests {
    use super::{Args, Verb};

    fn parse(words: &str) -> Result<Args, String> {
        Args::parse(words.split_whitespace().map(Into::into))
    }

    #[test]
    fn as_containerd_calls() {
        let args = parse(
            "-namespace k8s.io -address /run/c.sock -publish-binary /usr/bin/containerd \
             -id abc -bundle /b -debug delete",
        )
        .unwrap();
        assert_eq!(args.verb, Verb::Delete);
        assert_eq!(
            (args.namespace.as_str(), args.id.as_str()),
            ("k8s.io", "abc")
        );
        assert_eq!(args.bundle.as_deref(), Some("/b".as_ref()));
        assert!(args.debug);
        let args = parse("--namespace=a --address=/x=y start --id i").unwrap();
        assert_eq!((args.verb, args.address.as_str()), (Verb::Start, "/x=y"));
        assert_eq!(parse("-info").unwrap().verb, Verb::Info);
        assert_eq!(parse("-v").unwrap().verb, Verb::Version);
    }

    #[test]
    fn wrong_calls_are_named() {
        for (words, part) in [
            ("", "no command"),
            ("-namespace a -address b start", "-id"),
            ("-nope x start", "-nope"),
            ("restart", "restart"),
            ("-id", "-id wants a value"),
        ] {
            let error = parse(words).unwrap_err();
            assert!(error.contains(part), "{words}: {error}");
        }
    }
}
