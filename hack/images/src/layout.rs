//! An OCI image layout: blobs by digest and an index of named manifests.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Context;
use oci_spec::image::{
    Descriptor, ImageIndex, ImageIndexBuilder, ImageManifest, MediaType, Sha256Digest,
};
use serde::Serialize;
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

/// Names a manifest in the index.
pub(crate) const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// The hash of the recipe that a manifest was made by.
const RECIPE: &str = "dev.sandman.image.recipe";

/// An open layout.
#[derive(Debug)]
pub(crate) struct Layout {
    folder: PathBuf,
    /// Locked while open, against a second builder.
    _lock: File,
}

impl Layout {
    /// Opens the layout in `folder` and makes what is missing. Waits for another
    /// process that has it open.
    pub(crate) fn open(folder: &Path) -> anyhow::Result<Self> {
        let blobs = folder.join("blobs/sha256");
        fs::create_dir_all(&blobs).with_context(|| format!("cannot make {}", blobs.display()))?;
        let lock = File::create(folder.join(".lock"))?;
        lock.lock()?;
        let layout = Self {
            folder: folder.to_owned(),
            _lock: lock,
        };
        layout.replace("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        Ok(layout)
    }

    /// The index; an empty one if there is none yet.
    pub(crate) fn index(&self) -> anyhow::Result<ImageIndex> {
        let path = self.folder.join("index.json");
        match fs::read(&path) {
            Ok(bytes) => {
                serde_json::from_slice(&bytes).with_context(|| format!("{}", path.display()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok(ImageIndexBuilder::default()
                    .schema_version(2_u32)
                    .media_type(MediaType::ImageIndex)
                    .manifests(Vec::new())
                    .build()?)
            }
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Whether `name` was made by `recipe` and all its blobs are there.
    pub(crate) fn holds(&self, name: &str, recipe: &str) -> anyhow::Result<bool> {
        let index = self.index()?;
        let Some(descriptor) = index.manifests().iter().find(|d| {
            annotation(d, REF_NAME) == Some(name) && annotation(d, RECIPE) == Some(recipe)
        }) else {
            return Ok(false);
        };
        let Ok(manifest) = self.manifest(descriptor) else {
            return Ok(false);
        };
        Ok(manifest
            .layers()
            .iter()
            .chain([manifest.config()])
            .all(|blob| {
                fs::metadata(self.blob(blob)).is_ok_and(|metadata| metadata.len() == blob.size())
            }))
    }

    /// Reads the manifest that `descriptor` names.
    pub(crate) fn manifest(&self, descriptor: &Descriptor) -> anyhow::Result<ImageManifest> {
        let path = self.blob(descriptor);
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&bytes).with_context(|| format!("{}", path.display()))
    }

    /// Where the blob of `descriptor` is.
    pub(crate) fn blob(&self, descriptor: &Descriptor) -> PathBuf {
        self.blobs().join(descriptor.digest().digest())
    }

    fn blobs(&self) -> PathBuf {
        self.folder.join("blobs/sha256")
    }

    /// Starts a blob, which appears under its digest once it is finished.
    pub(crate) fn new_blob(&self) -> anyhow::Result<Blob> {
        Ok(Blob {
            file: NamedTempFile::with_prefix_in(".new-", &self.folder)?,
            hasher: Sha256::new(),
            size: 0,
            blobs: self.blobs(),
        })
    }

    /// Writes `value` as a JSON blob.
    pub(crate) fn put_json(
        &self,
        value: &impl Serialize,
        media_type: MediaType,
    ) -> anyhow::Result<Descriptor> {
        let mut blob = self.new_blob()?;
        blob.write_all(&serde_json::to_vec(value)?)?;
        blob.finish(media_type)
    }

    /// Names `manifest` in the index, instead of any other of that name.
    pub(crate) fn set(
        &self,
        name: &str,
        recipe: &str,
        mut manifest: Descriptor,
    ) -> anyhow::Result<()> {
        let annotations = [(REF_NAME, name), (RECIPE, recipe)];
        manifest.set_annotations(Some(HashMap::from(
            annotations.map(|(key, value)| (key.to_owned(), value.to_owned())),
        )));
        let mut index = self.index()?;
        let mut manifests = index.manifests().clone();
        manifests.retain(|other| annotation(other, REF_NAME) != Some(name));
        manifests.push(manifest);
        manifests.sort_by(|a, b| annotation(a, REF_NAME).cmp(&annotation(b, REF_NAME)));
        index.set_manifests(manifests);
        self.replace("index.json", &serde_json::to_vec_pretty(&index)?)
    }

    /// Deletes blobs that no image refers to any more.
    pub(crate) fn collect_garbage(&self) -> anyhow::Result<()> {
        let mut used = BTreeSet::new();
        for descriptor in self.index()?.manifests() {
            let manifest = self.manifest(descriptor)?;
            for blob in manifest
                .layers()
                .iter()
                .chain([manifest.config(), descriptor])
            {
                used.insert(blob.digest().digest().to_owned());
            }
        }
        for entry in fs::read_dir(self.blobs())? {
            let entry = entry?;
            if entry
                .file_name()
                .to_str()
                .is_none_or(|name| !used.contains(name))
            {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    fn replace(&self, name: &str, content: &[u8]) -> anyhow::Result<()> {
        let mut file = NamedTempFile::with_prefix_in(".new-", &self.folder)?;
        file.write_all(content)?;
        publish(file, &self.folder.join(name))
    }
}

/// The value of an annotation of `descriptor`.
pub(crate) fn annotation<'a>(descriptor: &'a Descriptor, key: &str) -> Option<&'a str> {
    descriptor
        .annotations()
        .as_ref()?
        .get(key)
        .map(String::as_str)
}

/// A blob while it is written.
#[derive(Debug)]
pub(crate) struct Blob {
    file: NamedTempFile,
    hasher: Sha256,
    size: u64,
    blobs: PathBuf,
}

impl Blob {
    /// Puts the blob into its place.
    pub(crate) fn finish(self, media_type: MediaType) -> anyhow::Result<Descriptor> {
        let digest = hex::encode(self.hasher.finalize());
        publish(self.file, &self.blobs.join(&digest))?;
        Ok(Descriptor::new(
            media_type,
            self.size,
            Sha256Digest::from_str(&digest)?,
        ))
    }
}

impl Write for Blob {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.size += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Moves a finished file to `path`, readable like any other file: temporary ones
/// are their owner's only.
fn publish(file: NamedTempFile, path: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt;

    file.as_file()
        .set_permissions(fs::Permissions::from_mode(0o644))?;
    file.persist(path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use oci_spec::image::{ImageManifestBuilder, MediaType};

    use super::Layout;

    fn image(layout: &Layout, text: &str) -> oci_spec::image::Descriptor {
        let config = layout.put_json(&text, MediaType::ImageConfig).unwrap();
        let manifest = ImageManifestBuilder::default()
            .schema_version(2_u32)
            .config(config)
            .layers(Vec::new())
            .build()
            .unwrap();
        layout
            .put_json(&manifest, MediaType::ImageManifest)
            .unwrap()
    }

    #[test]
    fn holds_only_whole_images_of_the_same_recipe() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::open(folder.path()).unwrap();
        assert!(!layout.holds("a:1", "r1").unwrap());
        let manifest = image(&layout, "config");
        layout.set("a:1", "r1", manifest.clone()).unwrap();
        assert!(layout.holds("a:1", "r1").unwrap());
        assert!(!layout.holds("a:1", "r2").unwrap());
        assert!(!layout.holds("b:1", "r1").unwrap());

        let config = layout.manifest(&manifest).unwrap().config().clone();
        fs::write(layout.blob(&config), "short").unwrap();
        assert!(!layout.holds("a:1", "r1").unwrap());
    }

    #[test]
    fn a_newer_image_replaces_the_older_and_its_blobs() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::open(folder.path()).unwrap();
        let (old, new, other) = (
            image(&layout, "old"),
            image(&layout, "new"),
            image(&layout, "other"),
        );
        for (name, manifest) in [("b:1", &other), ("a:1", &old), ("a:1", &new)] {
            layout.set(name, "r", manifest.clone()).unwrap();
        }
        layout.collect_garbage().unwrap();
        assert!(!layout.blob(&old).exists());
        assert!(layout.holds("a:1", "r").unwrap() && layout.holds("b:1", "r").unwrap());
        assert_eq!(layout.index().unwrap().manifests().len(), 2);
        assert_eq!(
            fs::read_dir(folder.path().join("blobs/sha256"))
                .unwrap()
                .count(),
            4
        );
    }
}
