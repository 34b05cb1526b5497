//! Extended attributes, which follow their inode.

/// Where a name's prefix is a number.
const PREFIXES: [(&[u8], u8); 5] = [
    (b"user.", 1),
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"trusted.", 4),
    (b"security.", 6),
];

/// Bytes of the header in front of the attributes.
const HEADER: usize = 12;

/// The attributes of one inode, as they lie on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Xattrs(Vec<u8>);

// === impl Xattrs ===

impl Xattrs {
    /// Encodes the attributes of an entry.
    ///
    /// Those that the kernel knows no namespace for are left out, as unpackers do which are told
    /// `ENOTSUP`. So are overlayfs' own: with them an image could have the kernel follow redirects
    /// of its choice.
    pub(super) fn new(xattrs: &[(Vec<u8>, Vec<u8>)]) -> Result<Self, &'static str> {
        let mut encoded = Self::default();
        for (name, value) in xattrs {
            if name.starts_with(b"trusted.overlay.") || name.starts_with(b"user.overlay.") {
                continue;
            }
            encoded.push(name, value)?;
        }
        Ok(encoded)
    }

    /// Marks a directory as opaque for overlayfs.
    pub(super) fn push_opaque(&mut self) -> Result<(), &'static str> {
        self.push(b"trusted.overlay.opaque", b"y")
    }

    fn push(&mut self, name: &[u8], value: &[u8]) -> Result<(), &'static str> {
        let Some((prefix, index)) = (PREFIXES.iter()).find(|(prefix, _)| name.starts_with(prefix))
        else {
            return Ok(());
        };
        let rest = &name[prefix.len()..];
        // ACLs are names by themselves, the others are namespaces.
        if rest.is_empty() == prefix.ends_with(b".") {
            return Ok(());
        }
        if name.len() > 255 {
            return Err("an extended attribute whose name is longer than 255 bytes");
        }
        let size =
            u16::try_from(value.len()).map_err(|_| "an extended attribute of 64 KiB or more")?;
        self.0.extend([rest.len() as u8, *index]);
        self.0.extend(size.to_le_bytes());
        self.0.extend(rest);
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        if self.count().is_none() {
            return Err("extended attributes of 256 KiB or more");
        }
        Ok(())
    }

    /// Bytes that they take behind their inode.
    pub(super) fn size(&self) -> u64 {
        if self.0.is_empty() {
            0
        } else {
            (HEADER + self.0.len()) as u64
        }
    }

    /// That size as the inode states it. None if it cannot.
    pub(super) fn count(&self) -> Option<u16> {
        if self.0.is_empty() {
            Some(0)
        } else {
            u16::try_from(1 + self.0.len() / 4).ok()
        }
    }

    /// The bytes behind the inode.
    pub(super) fn write(&self, out: &mut [u8]) {
        if !self.0.is_empty() {
            // The header is zero: no filter of names, no shared attributes.
            out[HEADER..HEADER + self.0.len()].copy_from_slice(&self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(name: &str, value: usize) -> Result<u64, &'static str> {
        let xattrs = [(name.as_bytes().to_vec(), vec![1; value])];
        Xattrs::new(&xattrs).map(|xattrs| xattrs.size())
    }

    #[test]
    fn namespaces() {
        assert_eq!(size("user.a", 3), Ok(12 + 8));
        assert_eq!(size("security.capability", 20), Ok(12 + 36));
        assert_eq!(size("system.posix_acl_access", 28), Ok(12 + 32));
        for left_out in [
            "user.",
            "user",
            "system.posix_acl_accessory",
            "com.apple.quarantine",
            "trusted.overlay.redirect",
            "user.overlay.opaque",
            "",
        ] {
            assert_eq!(size(left_out, 3), Ok(0), "{left_out}");
        }
    }

    #[test]
    fn limits() {
        assert!(size("user.a", 65_535).is_ok());
        assert!(size("user.a", 65_536).is_err());
        assert!(size(&format!("user.{}", "a".repeat(250)), 1).is_ok());
        assert!(size(&format!("user.{}", "a".repeat(251)), 1).is_err());
        let many = |count: usize| {
            let xattrs: Vec<_> = (0..count)
                .map(|n| (format!("user.{n}").into_bytes(), vec![0; 65_000]))
                .collect();
            Xattrs::new(&xattrs).map(|xattrs| xattrs.count())
        };
        assert!(many(4).is_ok());
        assert!(many(5).is_err());
    }
}
