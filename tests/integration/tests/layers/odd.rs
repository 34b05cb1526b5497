//! Images that nobody would make by hand: of very many layers, and of every kind of entry.

use anyhow::{Context as _, Result};
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest as _, Sha256};
use std::io::Write as _;
use tar::{Builder, EntryType, Header};

/// Layers of the tall image: the most that Docker made.
const TALL: usize = 127;

/// A layer that is being written.
struct Layer(Builder<Vec<u8>>);

impl Layer {
    fn new() -> Self {
        Self(Builder::new(Vec::new()))
    }

    fn entry(
        mut self,
        kind: EntryType,
        path: &str,
        mode: u32,
        more: impl FnOnce(&mut Header),
    ) -> Self {
        self.add(kind, path, mode, more, &[]);
        self
    }

    fn file(mut self, path: &str, mode: u32, content: &[u8]) -> Self {
        self.add(EntryType::Regular, path, mode, |_| {}, content);
        self
    }

    fn link(mut self, kind: EntryType, path: &str, target: &str) -> Self {
        let mut header = header(kind, 0o777);
        self.0.append_link(&mut header, path, target).unwrap();
        self
    }

    fn attributes(mut self, all: &[(&str, &[u8])]) -> Self {
        let named: Vec<_> = all
            .iter()
            .map(|(name, value)| (format!("SCHILY.xattr.{name}"), *value))
            .collect();
        let pairs = named.iter().map(|(name, value)| (name.as_str(), *value));
        self.0.append_pax_extensions(pairs).unwrap();
        self
    }

    fn add(
        &mut self,
        kind: EntryType,
        path: &str,
        mode: u32,
        more: impl FnOnce(&mut Header),
        content: &[u8],
    ) {
        let mut header = header(kind, mode);
        header.set_size(content.len() as u64);
        more(&mut header);
        self.0.append_data(&mut header, path, content).unwrap();
    }

    fn finish(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

fn header(kind: EntryType, mode: u32) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    header.set_mtime(1_700_000_000);
    header
}

/// Every kind of entry, names of every length, and what upper layers do to lower ones.
fn odd() -> Vec<Vec<u8>> {
    use EntryType::{Block, Char, Directory, Fifo, Link, Symlink};
    let long = format!("long/{}/{}", "d".repeat(150), "n".repeat(250));
    let device = |header: &mut Header| {
        header.set_device_major(1).unwrap();
        header.set_device_minor(3).unwrap();
    };
    // CAP_NET_RAW, effective and permitted, revision 2.
    let mut capability = vec![1, 0, 0, 2, 0, 32, 0, 0];
    capability.resize(20, 0);
    let large: Vec<u8> = (0..3_000_000_u32).map(|n| (n * 7 / 5) as u8).collect();
    let below = Layer::new()
        .entry(Directory, "bin/", 0o755, |_| {})
        .file("bin/suid", 0o4755, b"#!")
        .entry(Directory, "tmp/", 0o1777, |_| {})
        .entry(Directory, "locked/", 0o000, |header| {
            header.set_uid(1000);
            header.set_gid(2_000_000);
        })
        .file("large", 0o644, &large)
        .file("empty", 0o600, b"")
        .link(Link, "second-name", "large")
        .link(Symlink, "absolute", "/nowhere/at/all")
        .link(Symlink, "up", "../../..")
        .entry(Char, "null", 0o666, device)
        .entry(Block, "block", 0o660, device)
        .entry(Fifo, "pipe", 0o622, |_| {})
        .file(&long, 0o644, b"long")
        .file("unicode-\u{e9}\u{4e16}", 0o644, b"name")
        .attributes(&[
            ("user.colour", b"green"),
            ("security.capability", &capability),
        ])
        .file("attributes", 0o755, b"x")
        .file("twice", 0o644, b"first")
        .file("twice", 0o600, b"second")
        .entry(Directory, "hidden/", 0o755, |_| {})
        .file("hidden/a", 0o644, b"a")
        .entry(Directory, "opaque/", 0o755, |_| {})
        .file("opaque/below", 0o644, b"b")
        .entry(Directory, "becomes-file/", 0o755, |_| {})
        .file("becomes-file/x", 0o644, b"x")
        .file("becomes-folder", 0o644, b"f")
        .file("removed", 0o644, b"r");
    let above = Layer::new()
        .file(".wh.removed", 0o644, b"")
        .file(".wh.hidden", 0o644, b"")
        .entry(Directory, "opaque/", 0o750, |_| {})
        .file("opaque/.wh..wh..opq", 0o644, b"")
        .file("opaque/above", 0o644, b"a")
        .file("becomes-file", 0o644, b"file now")
        .entry(Directory, "becomes-folder/", 0o711, |_| {})
        .file("becomes-folder/inside", 0o644, b"i")
        .file("empty", 0o640, b"not any more");
    vec![below.finish(), above.finish()]
}

fn tall() -> Vec<Vec<u8>> {
    let layer = |n: usize| {
        let own = format!("layer-{n}");
        Layer::new()
            .file(&own, 0o644, own.as_bytes())
            .file("last", 0o644, own.as_bytes())
            .finish()
    };
    (0..TALL).map(layer).collect()
}

/// Pushes the odd image and the tall one; their names as the hosts pull them.
pub(crate) async fn push(registry: &str, prefix: &str) -> Result<[String; 2]> {
    let mut names = Vec::new();
    for (name, layers) in [("odd", odd()), ("tall", tall())] {
        push_image(registry, &format!("layers/{name}"), &layers).await?;
        names.push(format!("{prefix}/layers/{name}:1"));
    }
    let [odd, tall] = names.try_into().ok().context("two images")?;
    Ok([odd, tall])
}

async fn push_image(registry: &str, repository: &str, layers: &[Vec<u8>]) -> Result<()> {
    let client = reqwest::Client::new();
    let blob = async |bytes: Vec<u8>| -> Result<(String, usize)> {
        let digest = format!("sha256:{}", hex::encode(Sha256::digest(&bytes)));
        let length = bytes.len();
        let begun = client
            .post(format!("{registry}/{repository}/blobs/uploads/"))
            .header("content-length", "0")
            .send()
            .await?
            .error_for_status()?;
        let place = begun.headers().get("location").context("no location")?;
        let mut place = begun.url().join(place.to_str()?)?;
        place.query_pairs_mut().append_pair("digest", &digest);
        client
            .put(place)
            .header("content-type", "application/octet-stream")
            .body(bytes)
            .send()
            .await?
            .error_for_status()?;
        Ok((digest, length))
    };
    let (mut descriptors, mut diff_ids) = (Vec::new(), Vec::new());
    for layer in layers {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(layer)?;
        let (digest, size) = blob(encoder.finish()?).await?;
        diff_ids.push(format!("sha256:{}", hex::encode(Sha256::digest(layer))));
        descriptors.push(serde_json::json!({
            "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
            "digest": digest,
            "size": size,
        }));
    }
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let config = serde_json::json!({
        "architecture": architecture,
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    });
    let (digest, size) = blob(serde_json::to_vec(&config)?).await?;
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": digest,
            "size": size,
        },
        "layers": descriptors,
    });
    client
        .put(format!("{registry}/{repository}/manifests/1"))
        .header("content-type", "application/vnd.oci.image.manifest.v1+json")
        .body(serde_json::to_vec(&manifest)?)
        .send()
        .await?
        .error_for_status()?;
    Ok(())
}
