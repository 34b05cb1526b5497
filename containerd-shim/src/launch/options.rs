//! Mount options of fstab's language, as OCI specs have them.

use crate::sys::mount::Attributes;

/// What a list of options asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// A bind mount, with what is mounted below it if `Some(true)`.
    pub bind: Option<bool>,
    /// Of this mount.
    pub attributes: Attributes,
    /// Of this mount and all below it (`rro`, `rnosuid`, ...).
    pub recursive: Attributes,
    /// `MS_PRIVATE`, `MS_SLAVE`, ..., and whether it is meant for all mounts below.
    pub propagation: Option<(u64, bool)>,
    /// For the file system itself: `size=64k`, or a bare word.
    pub data: Vec<(String, Option<String>)>,
}

enum Word {
    Set(u64),
    Clear(u64),
    AccessTime(u64),
    Propagation(u64, bool),
    Bind(bool),
    Nothing,
    Data,
    Unknown,
}

/// What [`MOUNT_ATTR_NOSYMFOLLOW`] is; missing in libc (linux/mount.h).
const NOSYMFOLLOW: u64 = 0x0020_0000;

fn attribute(word: &str) -> Word {
    match word {
        "ro" => Word::Set(libc::MOUNT_ATTR_RDONLY),
        "rw" => Word::Clear(libc::MOUNT_ATTR_RDONLY),
        "nosuid" => Word::Set(libc::MOUNT_ATTR_NOSUID),
        "suid" => Word::Clear(libc::MOUNT_ATTR_NOSUID),
        "nodev" => Word::Set(libc::MOUNT_ATTR_NODEV),
        "dev" => Word::Clear(libc::MOUNT_ATTR_NODEV),
        "noexec" => Word::Set(libc::MOUNT_ATTR_NOEXEC),
        "exec" => Word::Clear(libc::MOUNT_ATTR_NOEXEC),
        "nosymfollow" => Word::Set(NOSYMFOLLOW),
        "symfollow" => Word::Clear(NOSYMFOLLOW),
        "nodiratime" => Word::Set(libc::MOUNT_ATTR_NODIRATIME),
        "diratime" => Word::Clear(libc::MOUNT_ATTR_NODIRATIME),
        "relatime" => Word::AccessTime(libc::MOUNT_ATTR_RELATIME),
        "noatime" => Word::AccessTime(libc::MOUNT_ATTR_NOATIME),
        "strictatime" => Word::AccessTime(libc::MOUNT_ATTR_STRICTATIME),
        _ => Word::Unknown,
    }
}

fn classify(word: &str) -> Word {
    let propagation = |name: &str, recursive| match name {
        "private" => Some(Word::Propagation(libc::MS_PRIVATE, recursive)),
        "slave" => Some(Word::Propagation(libc::MS_SLAVE, recursive)),
        "shared" => Some(Word::Propagation(libc::MS_SHARED, recursive)),
        "unbindable" => Some(Word::Propagation(libc::MS_UNBINDABLE, recursive)),
        _ => None,
    };
    if let Some(word) = propagation(word, false) {
        return word;
    }
    if let Some(word) = word
        .strip_prefix('r')
        .and_then(|rest| propagation(rest, true))
    {
        return word;
    }
    match word {
        "bind" => Word::Bind(false),
        "rbind" => Word::Bind(true),
        // What every mount is without being asked.
        "defaults" | "async" | "loud" | "nomand" | "noiversion" | "nolazytime" | "norelatime"
        | "nostrictatime" | "atime" => Word::Nothing,
        "newinstance" => Word::Data,
        _ => match attribute(word) {
            Word::Unknown if word.contains('=') => Word::Data,
            other => other,
        },
    }
}

/// Reads a list of options; the first word that we do not know is the error.
///
/// # Errors
/// The unknown word.
pub fn parse(words: &[String]) -> Result<Options, String> {
    let mut options = Options::default();
    for word in words {
        match classify(word) {
            Word::Nothing => {}
            Word::Bind(recursive) => options.bind = Some(recursive),
            Word::Propagation(kind, recursive) => options.propagation = Some((kind, recursive)),
            Word::Data => options.data.push(match word.split_once('=') {
                Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
                None => (word.clone(), None),
            }),
            Word::Unknown => match word.strip_prefix('r').map(attribute) {
                Some(Word::Unknown | Word::Data | Word::Nothing) | None => {
                    return Err(word.clone());
                }
                Some(inner) => apply(&mut options.recursive, &inner),
            },
            other => apply(&mut options.attributes, &other),
        }
    }
    Ok(options)
}

/// Later words win over earlier ones.
fn apply(attributes: &mut Attributes, word: &Word) {
    match word {
        Word::Set(bit) => {
            attributes.set |= bit;
            attributes.clear &= !bit;
        }
        Word::Clear(bit) => {
            attributes.clear |= bit;
            attributes.set &= !bit;
        }
        Word::AccessTime(kind) => {
            // One field of several bits: it has to be cleared as a whole.
            attributes.set = (attributes.set & !libc::MOUNT_ATTR__ATIME) | kind;
            attributes.clear |= libc::MOUNT_ATTR__ATIME;
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> Result<Options, String> {
        parse(
            &text
                .split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>(),
        )
    }

    #[test]
    fn words_become_attributes() {
        let ro = libc::MOUNT_ATTR_RDONLY;
        let nosuid = libc::MOUNT_ATTR_NOSUID;
        for (text, set, clear) in [
            ("", 0, 0),
            ("ro nosuid", ro | nosuid, 0),
            ("ro rw", 0, ro),
            ("rw ro", ro, 0),
            ("suid", 0, nosuid),
            (
                "strictatime",
                libc::MOUNT_ATTR_STRICTATIME,
                libc::MOUNT_ATTR__ATIME,
            ),
            ("noatime relatime", 0, libc::MOUNT_ATTR__ATIME),
            ("defaults async", 0, 0),
        ] {
            let got = options(text).unwrap();
            assert_eq!(
                (got.attributes.set, got.attributes.clear),
                (set, clear),
                "{text}"
            );
            assert_eq!(got.recursive, Attributes::default(), "{text}");
        }
        let got = options("rro rnosuid relatime").unwrap();
        assert_eq!(got.recursive.set, ro | nosuid);
        assert_eq!(got.attributes.set, 0);
    }

    #[test]
    fn binds_propagation_and_data() {
        let got = options("rbind rprivate nodev mode=755 newinstance").unwrap();
        assert_eq!(got.bind, Some(true));
        assert_eq!(got.propagation, Some((libc::MS_PRIVATE, true)));
        assert_eq!(
            got.data,
            [
                ("mode".to_owned(), Some("755".to_owned())),
                ("newinstance".to_owned(), None)
            ]
        );
        assert_eq!(
            options("bind slave").unwrap().propagation,
            Some((libc::MS_SLAVE, false))
        );
    }

    #[test]
    fn unknown_words_are_named() {
        for word in [
            "tmpcopyup",
            "idmap",
            "ridmap",
            "mand",
            "remount",
            "rfoo",
            "r",
            "sync",
        ] {
            assert_eq!(options(word), Err(word.to_owned()));
        }
    }
}
