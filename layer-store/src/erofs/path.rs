//! Paths of an archive's entries, as names below the root.

/// Longest name of one file, here as in EROFS.
pub(super) const MAX_NAME: usize = 255;

/// The names of a path. It is always below the root: an absolute path is, and `..` ends there.
pub(super) fn clean(path: &[u8]) -> Vec<&[u8]> {
    let mut names = Vec::new();
    for name in parts(path) {
        if name == b".." {
            names.pop();
        } else {
            names.push(name);
        }
    }
    names
}

/// The parts of a path that mean something, `..` among them.
pub(super) fn parts(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/')
        .filter(|name| !matches!(*name, b"" | b"."))
}

/// What the last name of a path says in a layer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meaning<'a> {
    /// There is a file of this name.
    File,
    /// There is none; one in a layer below is hidden.
    Whiteout(&'a [u8]),
    /// Nothing of this directory in the layers below is seen.
    Opaque,
    /// Bookkeeping of AUFS, from which the notation comes.
    Ignored,
    /// Hides nothing that could exist.
    Nonsense,
}

/// See the OCI image specification, layer.md, "Whiteouts".
pub(super) fn meaning(name: &[u8]) -> Meaning<'_> {
    if name == b".wh..wh..opq" {
        return Meaning::Opaque;
    }
    if name.starts_with(b".wh..wh.") {
        return Meaning::Ignored;
    }
    match name.strip_prefix(b".wh.") {
        None => Meaning::File,
        Some(b"" | b"." | b"..") => Meaning::Nonsense,
        Some(hidden) => Meaning::Whiteout(hidden),
    }
}
