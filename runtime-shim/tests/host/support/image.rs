//! A small real image made of the static busybox of this machine.

use std::collections::BTreeMap;
use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::json;
use sha2::{Digest, Sha256};

/// Blobs of an image and its manifest's digest.
pub(crate) struct TestImage {
    pub(crate) manifest: String,
    pub(crate) blobs: BTreeMap<String, Vec<u8>>,
}

const APPLETS: &[&str] = &[
    "cat", "dd", "echo", "env", "false", "head", "hostname", "httpd", "id", "kill", "ls", "md5sum",
    "mkdir", "mount", "mv", "nc", "ps", "rm", "seq", "sh", "sleep", "stty", "tail", "test",
    "touch", "tr", "true", "unshare", "wc", "yes",
];

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

fn layer() -> Vec<u8> {
    let mut tar = tar::Builder::new(vec![]);
    let mut add = |path: &str, mode: u32, data: &[u8]| {
        let mut header = tar::Header::new_ustar();
        header.set_size(data.len() as u64);
        header.set_mode(mode);
        header.set_mtime(0);
        tar.append_data(&mut header, path, data).unwrap();
    };
    add(
        "bin/busybox",
        0o755,
        &std::fs::read("/bin/busybox").unwrap(),
    );
    add(
        "etc/passwd",
        0o644,
        b"root:x:0:0::/root:/bin/sh\napp:x:1000:1001::/:/bin/sh\n",
    );
    add(
        "etc/group",
        0o644,
        b"root:x:0:\napp:x:1001:\nextra:x:50:app\n",
    );
    for applet in APPLETS {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o777);
        header.set_mtime(0);
        tar.append_link(&mut header, format!("bin/{applet}"), "busybox")
            .unwrap();
    }
    tar.into_inner().unwrap()
}

impl TestImage {
    /// busybox with a few applets, a user `app`, and no tar.
    pub(crate) fn busybox() -> Self {
        let layer = layer();
        let mut gzip = GzEncoder::new(vec![], Compression::fast());
        gzip.write_all(&layer).unwrap();
        let zipped = gzip.finish().unwrap();
        let config = serde_json::to_vec(&json!({
            "architecture": "amd64",
            "os": "linux",
            "config": { "Cmd": ["sh"], "Env": ["PATH=/bin", "FROM_IMAGE=yes"] },
            "rootfs": { "type": "layers", "diff_ids": [digest(&layer)] },
        }))
        .unwrap();
        let descriptor = |kind: &str, bytes: &[u8]| json!({ "mediaType": kind, "digest": digest(bytes), "size": bytes.len() });
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": super::registry::MANIFEST,
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar+gzip", &zipped)],
        }))
        .unwrap();
        let name = digest(&manifest);
        let blobs = [zipped, config, manifest]
            .into_iter()
            .map(|b| (digest(&b), b))
            .collect();
        Self {
            manifest: name,
            blobs,
        }
    }
}
