//! Manifests, indexes and image configurations: bounded parsing of what a
//! registry sends, choice of platform, chain ids. Pure.

use oci_spec::image::{Descriptor, ImageConfiguration, ImageIndex, ImageManifest, MediaType};
use sha2::{Digest as _, Sha256};

use super::error::PullError;

/// Largest manifest or index that is read, the limit registries set themselves.
pub(super) const MAX_MANIFEST_BYTES: u64 = 4 << 20;
/// Largest image configuration.
pub(super) const MAX_CONFIG_BYTES: u64 = 8 << 20;
/// More than overlayfs mounts in one page of options.
const MAX_LAYERS: usize = 256;
/// Compressed size of one whole image.
const MAX_IMAGE_BYTES: u64 = 128 << 30;

/// Media types asked for, in the order of preference.
pub(super) const ACCEPT: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json, */*;q=0.1";

const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";

/// What a manifest URL leads to.
#[derive(Debug)]
pub(super) enum Document {
    /// Manifests for several platforms.
    Index(Box<ImageIndex>),
    /// One image.
    Manifest(Box<ImageManifest>),
}

/// Reads a document. The media type of the document itself wins over the
/// transport's, which a proxy may have changed.
pub(super) fn parse(bytes: &[u8], media_type: &str) -> Result<Document, PullError> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Probe {
        media_type: Option<String>,
        #[serde(default)]
        manifests: Option<serde::de::IgnoredAny>,
        #[serde(default)]
        layers: Option<serde::de::IgnoredAny>,
    }
    let malformed = |error: &dyn std::fmt::Display| {
        PullError::Malformed(format!("the registry sent an unreadable manifest: {error}"))
    };
    let probe: Probe = serde_json::from_slice(bytes).map_err(|error| malformed(&error))?;
    // A document that is both could be read as either: refused, see CVE-2021-41190.
    if probe.manifests.is_some() && probe.layers.is_some() {
        return Err(malformed(&"it has both manifests and layers"));
    }
    let media_type = probe.media_type.as_deref().unwrap_or(media_type);
    if media_type == DOCKER_LIST || media_type == MediaType::ImageIndex.as_ref() {
        let index = ImageIndex::from_reader(bytes).map_err(|error| malformed(&error))?;
        Ok(Document::Index(Box::new(index)))
    } else if media_type == DOCKER_MANIFEST || media_type == MediaType::ImageManifest.as_ref() {
        let manifest = ImageManifest::from_reader(bytes).map_err(|error| malformed(&error))?;
        Ok(Document::Manifest(Box::new(manifest)))
    } else {
        Err(PullError::Malformed(format!(
            "media type {media_type:?} is not supported; push the image as OCI or Docker schema 2"
        )))
    }
}

/// The media type under which containerd keeps a document.
pub(super) fn media_type(document: &Document) -> String {
    let (declared, default) = match document {
        Document::Index(index) => (index.media_type(), MediaType::ImageIndex),
        Document::Manifest(manifest) => (manifest.media_type(), MediaType::ImageManifest),
    };
    declared.clone().unwrap_or(default).to_string()
}

/// OCI name of this machine's processor.
pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The manifest for linux on `architecture`.
pub(super) fn choose(index: &ImageIndex, architecture: &str) -> Result<Descriptor, PullError> {
    let fits = |descriptor: &&Descriptor| {
        let Some(platform) = descriptor.platform() else {
            return false;
        };
        platform.os().to_string() == "linux" && platform.architecture().to_string() == architecture
    };
    // arm64 images name their variant v8 or none; any other needs a newer processor.
    let plain = |descriptor: &&Descriptor| {
        let variant = descriptor
            .platform()
            .as_ref()
            .and_then(|platform| platform.variant().as_ref());
        variant.is_none_or(|variant| matches!(variant.as_str(), "" | "v1" | "v8"))
    };
    let manifests = index.manifests();
    let chosen = manifests.iter().filter(fits).find(plain);
    // An index of one entry without a platform is what some build tools make.
    let chosen = chosen.or_else(|| match manifests.as_slice() {
        [only] if only.platform().is_none() => Some(only),
        _ => None,
    });
    chosen.cloned().ok_or_else(|| {
        PullError::Malformed(format!(
            "no match for platform linux/{architecture} in manifest"
        ))
    })
}

/// Checks what a manifest promises before anything of it is fetched.
pub(super) fn check(manifest: &ImageManifest) -> Result<(), PullError> {
    let malformed = |text: String| Err(PullError::Malformed(text));
    if manifest.config().size() > MAX_CONFIG_BYTES {
        return malformed(format!(
            "image configuration is larger than {MAX_CONFIG_BYTES} bytes"
        ));
    }
    if manifest.layers().len() > MAX_LAYERS {
        return malformed(format!(
            "image has {} layers, at most {MAX_LAYERS} are supported",
            manifest.layers().len()
        ));
    }
    for descriptor in manifest.layers().iter().chain([manifest.config()]) {
        if !is_sha256(descriptor.digest().as_ref()) {
            return malformed(format!("digest {} is not supported", descriptor.digest()));
        }
    }
    for layer in manifest.layers() {
        let media_type = layer.media_type().to_string();
        if !media_type.contains(".tar") && !media_type.contains("rootfs.diff") {
            return malformed(format!(
                "layer media type {media_type:?} is not a file system; this is no container image"
            ));
        }
    }
    if size(manifest) > MAX_IMAGE_BYTES {
        return malformed(format!("image is larger than {MAX_IMAGE_BYTES} bytes"));
    }
    Ok(())
}

/// Bytes of configuration and layers as they are transferred.
pub(super) fn size(manifest: &ImageManifest) -> u64 {
    let layers = manifest.layers().iter().map(Descriptor::size);
    layers.fold(manifest.config().size(), u64::saturating_add)
}

/// Reads the configuration and checks it against its manifest and this machine.
pub(super) fn configuration(
    bytes: &[u8],
    manifest: &ImageManifest,
) -> Result<ImageConfiguration, PullError> {
    let config = ImageConfiguration::from_reader(bytes).map_err(|error| {
        PullError::Malformed(format!("the image's configuration is unreadable: {error}"))
    })?;
    if config.rootfs().diff_ids().len() != manifest.layers().len() {
        return Err(PullError::Malformed(format!(
            "the image's configuration names {} layers, its manifest {}",
            config.rootfs().diff_ids().len(),
            manifest.layers().len()
        )));
    }
    if !config
        .rootfs()
        .diff_ids()
        .iter()
        .all(|diff_id| is_sha256(diff_id))
    {
        return Err(PullError::Malformed(
            "the image's configuration has a diff id that is no sha256 digest".to_owned(),
        ));
    }
    if config.architecture().to_string() != architecture() {
        return Err(PullError::Malformed(format!(
            "no match for platform linux/{}: the image is for {}",
            architecture(),
            config.architecture()
        )));
    }
    Ok(config)
}

/// Names of the snapshots of a stack of layers, lowest first, as the OCI image
/// specification defines chain ids.
pub(super) fn chain_ids(diff_ids: &[String]) -> Vec<String> {
    let mut chain: Vec<String> = Vec::with_capacity(diff_ids.len());
    for diff_id in diff_ids {
        let next = match chain.last() {
            None => diff_id.clone(),
            Some(parent) => digest(format!("{parent} {diff_id}").as_bytes()),
        };
        chain.push(next);
    }
    chain
}

/// `sha256:<hex>` of some bytes.
pub(super) fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

pub(super) fn is_sha256(digest: &str) -> bool {
    digest.strip_prefix("sha256:").is_some_and(|hex| {
        hex.len() == 64
            && hex
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(nibble: char) -> String {
        format!("sha256:{}", nibble.to_string().repeat(64))
    }

    fn index(platforms: &[(&str, &str, Option<&str>)]) -> ImageIndex {
        let manifests: Vec<_> = platforms
            .iter()
            .zip("0123456789abcdef".chars())
            .map(|((os, architecture, variant), nibble)| {
                serde_json::json!({
                    "mediaType": "application/vnd.oci.image.manifest.v1+json",
                    "digest": hash(nibble), "size": 1,
                    "platform": {"os": os, "architecture": architecture, "variant": variant},
                })
            })
            .collect();
        serde_json::from_value(serde_json::json!({"schemaVersion": 2, "manifests": manifests}))
            .unwrap()
    }

    #[test]
    fn chooses_this_platform() {
        let index = index(&[
            ("windows", "amd64", None),
            ("linux", "amd64", Some("v3")),
            ("linux", "amd64", None),
            ("linux", "arm64", Some("v8")),
        ]);
        assert_eq!(
            choose(&index, "amd64").unwrap().digest().to_string(),
            hash('2')
        );
        assert_eq!(
            choose(&index, "arm64").unwrap().digest().to_string(),
            hash('3')
        );
        assert_eq!(
            choose(&index, "riscv64").unwrap_err().to_string(),
            "no match for platform linux/riscv64 in manifest"
        );
    }

    #[test]
    fn a_document_cannot_be_two_things() {
        let both = br#"{"schemaVersion":2,"manifests":[],"layers":[]}"#;
        assert!(parse(both, "application/vnd.oci.image.index.v1+json").is_err());
        assert!(parse(b"<html>", "text/html").is_err());
        let schema1 = parse(
            br#"{"schemaVersion":1}"#,
            "application/vnd.docker.distribution.manifest.v1+json",
        );
        assert!(schema1.unwrap_err().to_string().contains("not supported"));
    }

    #[test]
    fn refuses_layers_that_are_no_file_systems() {
        let manifest: ImageManifest = serde_json::from_value(serde_json::json!({
            "schemaVersion": 2,
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": hash('1'), "size": 2},
            "layers": [{"mediaType": "application/wasm", "digest": hash('2'), "size": 3}],
        }))
        .unwrap();
        assert!(
            check(&manifest)
                .unwrap_err()
                .to_string()
                .contains("no container image")
        );
        assert_eq!(size(&manifest), 5);
    }

    #[test]
    fn chain_ids_follow_the_image_specification() {
        let ids = [hash('a'), hash('b')];
        let chain = chain_ids(&ids);
        assert_eq!(chain[0], ids[0]);
        assert_eq!(
            chain[1],
            digest(format!("{} {}", ids[0], ids[1]).as_bytes())
        );
        assert!(is_sha256(&chain[1]));
        assert!(chain_ids(&[]).is_empty());
    }
}
