//! What a file is called in an archive, and where a member goes on disk.

use std::ffi::CString;

/// Splits `name` into the part that GNU tar removes (through the last `..` and
/// any slashes after it) and the member name, which is never empty.
pub(super) fn strip(name: &[u8]) -> (&[u8], &[u8]) {
    let mut start = 0;
    let mut component = 0;
    for end in (0..=name.len()).filter(|&i| name.get(i).is_none_or(|&b| b == b'/')) {
        if &name[component..end] == b".." {
            start = end;
        }
        component = end + 1;
    }
    while name.get(start) == Some(&b'/') {
        start += 1;
    }
    let (prefix, rest) = name.split_at(start);
    (prefix, if rest.is_empty() { b"." } else { rest })
}

/// Why a member name is not taken.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unsafe {
    /// It climbs out with `..`.
    DotDot,
    /// It has a NUL byte in it, so the system could only take a part of it.
    Nul,
}

/// The path components of a member name below the target directory, without
/// leading slashes, empty parts and `.`; empty for the directory itself.
pub(super) fn components(name: &[u8]) -> Result<Vec<CString>, Unsafe> {
    name.split(|&b| b == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
        .map(|part| {
            if part == b".." {
                return Err(Unsafe::DotDot);
            }
            CString::new(part).map_err(|_| Unsafe::Nul)
        })
        .collect()
}

/// Whether `member` is `wanted` or lies below it.
pub(super) fn selects(wanted: &[CString], member: &[CString]) -> bool {
    member.starts_with(wanted)
}

#[cfg(test)]
mod tests {
    use super::{Unsafe, components, strip};

    #[test]
    fn strips_what_leads_out() {
        let cases: [(&str, &str, &str); 11] = [
            ("a/b", "", "a/b"),
            ("./a", "", "./a"),
            (".", "", "."),
            ("/etc/x", "/", "etc/x"),
            ("//etc", "//", "etc"),
            ("../x", "../", "x"),
            ("a/../b", "a/../", "b"),
            ("../../", "../../", "."),
            ("..", "..", "."),
            ("/", "/", "."),
            ("..a/b..", "", "..a/b.."),
        ];
        for (name, prefix, rest) in cases {
            assert_eq!(
                strip(name.as_bytes()),
                (prefix.as_bytes(), rest.as_bytes()),
                "{name}"
            );
        }
    }

    #[test]
    fn components_stay_below() {
        let parts = |name: &str| {
            components(name.as_bytes()).map(|c| {
                c.iter()
                    .map(|p| p.to_str().unwrap().to_owned())
                    .collect::<Vec<_>>()
            })
        };
        assert_eq!(parts("/a//./b/").unwrap(), ["a", "b"]);
        assert!(parts("./").unwrap().is_empty());
        assert_eq!(parts("...").unwrap(), ["..."]);
        for name in ["..", "../x", "a/../../x", "/..", "a/.."] {
            assert_eq!(parts(name), Err(Unsafe::DotDot), "{name}");
        }
        assert_eq!(parts("a\0b"), Err(Unsafe::Nul));
    }
}
