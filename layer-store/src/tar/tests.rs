use proptest::prelude::*;

use super::*;
use crate::testing::{Archive, Fields, header, sum};

#[derive(Default)]
struct Seen(Vec<Entry>);

impl TarSink for Seen {
    type Error = TarError;

    fn entry(&mut self, entry: Entry) -> Result<(), TarError> {
        self.0.push(entry);
        Ok(())
    }
}

fn parse_in(archive: &[u8], piece: usize) -> Result<Vec<Entry>, TarError> {
    let mut parser = Parser::new();
    let mut seen = Seen::default();
    for piece in archive.chunks(piece) {
        parser.push(piece, &mut seen)?;
    }
    parser.finish()?;
    Ok(seen.0)
}

fn parse(archive: &[u8]) -> Result<Vec<Entry>, TarError> {
    parse_in(archive, archive.len().max(1))
}

fn one(archive: &mut Archive) -> Entry {
    let mut entries = parse(&archive.end()).unwrap();
    assert_eq!(entries.len(), 1);
    entries.remove(0)
}

fn refused(archive: &mut Archive, wanted: &str) {
    let error = parse(&archive.end()).unwrap_err().to_string();
    assert!(error.contains(wanted), "{error:?} does not say {wanted:?}");
}

/// A header changed by hand.
fn changed(fields: &Fields<'_>, change: impl FnOnce(&mut [u8; 512])) -> Archive {
    let mut block = header(fields);
    change(&mut block);
    sum(&mut block);
    let mut archive = Archive(block.to_vec());
    archive.data(fields.data);
    archive
}

#[test]
fn kinds() {
    let mut archive = Archive::default();
    archive
        .directory("d/", 0o1777)
        .file("d/f", &[7; 1000])
        .link(b'2', "d/s", "f");
    archive
        .link(b'1', "d/h", "d/f")
        .file("empty", b"")
        .link(b'6', "p", "");
    for (flag, path) in [(b'3', "c"), (b'4', "b")] {
        archive.entry(&Fields {
            path: path.as_bytes(),
            flag,
            device: (8, 300),
            ..Fields::default()
        });
    }
    archive.entry(&Fields {
        path: b"old directory/",
        flag: 0,
        ..Fields::default()
    });
    archive.entry(&Fields {
        path: b"old file",
        flag: 0,
        data: b"x",
        ..Fields::default()
    });
    let archive = archive.end();
    let entries = parse(&archive).unwrap();
    let kinds: Vec<_> = entries.iter().map(|entry| entry.kind.clone()).collect();
    let (major, minor) = (8, 300);
    let Kind::File { offset, size } = kinds[1] else {
        panic!("{:?}", kinds[1]);
    };
    assert_eq!((offset, size), (1024, 1000));
    assert_eq!(
        archive[offset as usize..][..1001],
        [vec![7; 1000], vec![0]].concat()
    );
    assert_eq!(kinds[0], Kind::Directory);
    assert_eq!(kinds[2], Kind::Symlink(b"f".to_vec()));
    assert_eq!(kinds[3], Kind::Hardlink(b"d/f".to_vec()));
    assert!(matches!(kinds[4], Kind::File { size: 0, .. }));
    assert_eq!(kinds[5], Kind::Fifo);
    assert_eq!(kinds[6], Kind::Character { major, minor });
    assert_eq!(kinds[7], Kind::Block { major, minor });
    assert_eq!(kinds[8], Kind::Directory);
    assert!(matches!(kinds[9], Kind::File { size: 1, .. }));
    assert_eq!(entries[0].meta.mode, 0o1777);
    for piece in [1, 100, 513] {
        assert_eq!(parse_in(&archive, piece).unwrap(), entries);
    }
}

#[test]
fn ustar_prefix() {
    let entry = one(&mut changed(&Fields::default(), |block| {
        block[..4].copy_from_slice(b"name");
        block[345..350].copy_from_slice(b"in/to");
    }));
    assert_eq!(entry.path, b"in/to/name");
}

#[test]
fn gnu_has_no_prefix() {
    let entry = one(&mut changed(&Fields::default(), |block| {
        block[..4].copy_from_slice(b"name");
        block[257..265].copy_from_slice(b"ustar  \0");
        block[345..350].copy_from_slice(b"12345");
    }));
    assert_eq!(entry.path, b"name");
}

#[test]
fn gnu_long_names() {
    let long = vec![b'n'; 300];
    let with_zero = [&long[..], b"\0"].concat();
    let mut archive = Archive::default();
    for (flag, data) in [(b'L', &with_zero), (b'K', &long)] {
        archive.entry(&Fields {
            path: b"././@LongLink",
            flag,
            data,
            ..Fields::default()
        });
    }
    archive.link(b'2', "short", "short");
    let entry = one(&mut archive);
    assert_eq!(entry.path, long);
    assert_eq!(entry.kind, Kind::Symlink(long));
}

#[test]
fn pax_overrides() {
    let mut archive = Archive::default();
    archive
        .pax(&[
            (b"path", "ünï/code".as_bytes()),
            (b"uid", b"3000000000"),
            (b"gid", b"4294967295"),
            (b"mtime", b"-1.25"),
            (b"size", b"3"),
            (b"SCHILY.xattr.user.a", b"first"),
            (b"SCHILY.xattr.user.a", b"\0=\n"),
            (b"SCHILY.xattr.user.b", b""),
            (b"comment", b"whatever"),
        ])
        .file("other", b"abc");
    let entry = one(&mut archive);
    assert_eq!(entry.path, "ünï/code".as_bytes());
    assert_eq!(entry.meta.uid, 3_000_000_000);
    assert_eq!(entry.meta.gid, u32::MAX);
    assert_eq!(
        (entry.meta.mtime, entry.meta.mtime_nanos),
        (-2, 750_000_000)
    );
    assert!(matches!(entry.kind, Kind::File { size: 3, .. }));
    let xattrs = [
        (b"user.a".to_vec(), b"\0=\n".to_vec()),
        (b"user.b".to_vec(), Vec::new()),
    ];
    assert_eq!(entry.xattrs, xattrs);
}

#[test]
fn pax_is_for_one_entry() {
    let mut archive = Archive::default();
    archive
        .pax(&[(b"path", b"long"), (b"uid", b"7")])
        .file("a", b"")
        .file("b", b"");
    let entries = parse(&archive.end()).unwrap();
    assert_eq!((&*entries[1].path, entries[1].meta.uid), (&b"b"[..], 0));
}

#[test]
fn of_two_extended_headers_the_later_counts() {
    let mut archive = Archive::default();
    archive.pax(&[(b"path", b"first"), (b"uid", b"7")]);
    archive.pax(&[(b"gid", b"8")]).file("own", b"");
    let entry = one(&mut archive);
    assert_eq!(entry.path, b"own");
    assert_eq!((entry.meta.uid, entry.meta.gid), (0, 8));
}

#[test]
fn gnu_names_go_before_pax_names() {
    let mut archive = Archive::default();
    archive.entry(&Fields {
        path: b"././@LongLink",
        flag: b'L',
        data: b"gnu",
        ..Fields::default()
    });
    archive.pax(&[(b"path", b"pax")]).file("own", b"");
    assert_eq!(one(&mut archive).path, b"gnu");
}

#[test]
fn pax_times() {
    for (written, read) in [
        ("0", (0, 0)),
        ("1.5", (1, 500_000_000)),
        ("1.", (1, 0)),
        ("12.0000000019", (12, 1)),
        ("-3", (-3, 0)),
    ] {
        let mut archive = Archive::default();
        archive
            .pax(&[(b"mtime", written.as_bytes())])
            .file("a", b"");
        let meta = one(&mut archive).meta;
        assert_eq!((meta.mtime, meta.mtime_nanos), read, "{written}");
    }
}

#[test]
fn global_headers_are_ignored() {
    let mut archive = Archive::default();
    archive.entry(&Fields {
        path: b"pax_global_header",
        flag: b'g',
        data: b"20 comment=whatever\n",
        ..Fields::default()
    });
    archive.file("a", b"");
    assert_eq!(one(&mut archive).path, b"a");
}

#[test]
fn binary_numbers() {
    let entry = one(&mut changed(&Fields::default(), |block| {
        block[0] = b'f';
        block[108..116].copy_from_slice(&[0x80, 0, 0, 0, 0x80, 0, 0, 1]);
        block[136..148].copy_from_slice(&[0xff; 12]);
    }));
    assert_eq!((entry.meta.uid, entry.meta.mtime), (0x8000_0001, -1));
}

#[test]
fn ends() {
    let mut archive = Archive::default();
    archive.file("a", b"data");
    let body = archive.0.clone();
    assert_eq!(parse(b"").unwrap(), []);
    assert_eq!(parse(&[0; 1024]).unwrap(), []);
    assert_eq!(parse(&body).unwrap().len(), 1);
    assert_eq!(parse(&[&body[..], &[0; 512]].concat()).unwrap().len(), 1);
    let trailing = [&body[..], &[0; 1024], b"whatever follows"].concat();
    assert_eq!(parse(&trailing).unwrap().len(), 1);
    for end in (1..body.len()).filter(|end| *end != 0) {
        assert_eq!(
            parse(&body[..end]),
            Err(TarError::Truncated { at: end as u64 })
        );
    }
    let single = [&[0; 512], &body[..]].concat();
    assert!(
        parse(&single)
            .unwrap_err()
            .to_string()
            .contains("single block")
    );
}

#[test]
fn refusals() {
    let pax = |records: &[(&[u8], &[u8])]| {
        let mut archive = Archive::default();
        archive.pax(records).file("a", b"");
        archive
    };
    refused(&mut pax(&[(b"GNU.sparse.major", b"1")]), "sparse");
    refused(&mut pax(&[(b"path", b"a\0b")]), "zero byte");
    refused(&mut pax(&[(b"path", &[b'a'; MAX_PATH + 1])]), "longer");
    refused(&mut pax(&[(b"uid", b"4294967296")]), "owner");
    refused(&mut pax(&[(b"uid", b"-1")]), "owner");
    refused(&mut pax(&[(b"size", b"-1")]), "negative");
    refused(&mut pax(&[(b"size", b"9223372036854775807")]), "too large");
    refused(&mut pax(&[(b"mtime", b"1.x")]), "time");
    refused(&mut pax(&[(b"mtime", b"soon")]), "number");
    for data in [
        &b"5 a=b\n"[..],
        b"6 a=b",
        b"x",
        b"99999999999999999999 a=b\n",
        b"6 aab\n",
        b"5 =b\n",
    ] {
        let mut archive = Archive::default();
        archive.entry(&Fields {
            flag: b'x',
            data,
            ..Fields::default()
        });
        archive.file("a", b"");
        refused(&mut archive, "extended header");
    }
    let mut lonely = Archive::default();
    refused(lonely.pax(&[(b"path", b"a")]), "without an entry");
    let flag = |flag| Fields {
        path: b"a",
        flag,
        ..Fields::default()
    };
    refused(Archive::default().entry(&flag(b'S')), "sparse");
    refused(Archive::default().entry(&flag(b'V')), "unknown type");
    refused(
        &mut changed(&flag(b'x'), |block| {
            block[124..135].copy_from_slice(b"00010000000")
        }),
        "1 MiB",
    );
    refused(
        &mut changed(&flag(b'0'), |block| block[124] = b'9'),
        "octal",
    );
    refused(&mut changed(&flag(b'0'), |block| block[124] = 0xff), "");
    refused(
        &mut changed(&flag(b'3'), |block| block[329..336].fill(b'7')),
        "device",
    );
    let mut wrong = header(&flag(b'0'));
    wrong[0] = b'b';
    refused(&mut Archive(wrong.to_vec()), "checksum");
}

proptest! {
    /// Neither a panic nor more memory than the input has, whatever comes.
    #[test]
    fn any_bytes(
        blocks in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 0..40),
        piece in 1_usize..2000,
    ) {
        let mut archive = Archive::default();
        archive.pax(&[(b"path", b"a"), (b"SCHILY.xattr.user.a", b"b")]).file("x", &[1; 600]);
        archive.link(b'1', "b", "a").directory("d", 0o755);
        let mut archive = archive.end();
        for (at, byte, fix) in blocks {
            let at = at.index(archive.len());
            archive[at] = byte;
            let start = at / 512 * 512;
            if let (true, Some(block)) = (fix, archive[start..].first_chunk_mut()) {
                sum(block);
            }
        }
        let _ = parse_in(&archive, piece);
    }
}
