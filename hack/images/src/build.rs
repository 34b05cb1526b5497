//! Follows the recipes.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use oci_spec::image::{
    Arch, Config, ConfigBuilder, HistoryBuilder, ImageConfigurationBuilder, ImageManifestBuilder,
    MediaType, Os, PlatformBuilder, RootFsBuilder,
};
use tempfile::TempDir;

use crate::debian::{self, Debian};
use crate::layer::{self, Built};
use crate::layout::Layout;
use crate::recipe::{self, Part, Recipe};
use crate::supplies::Supplies;
use crate::tree::{EPOCH_TEXT, Tree};
use crate::{program, repository};

/// Builds those of `recipes` that are not in the layout at `out` yet; only the
/// images in `only` (last part of the name, without tag) unless that is empty.
pub(crate) fn run(
    recipes: &[Recipe],
    out: &Path,
    only: &[String],
    supplies: &Supplies,
) -> anyhow::Result<()> {
    let short = |recipe: &Recipe| {
        recipe
            .name
            .rsplit('/')
            .next()
            .unwrap_or(recipe.name)
            .to_owned()
    };
    if let Some(unknown) = only
        .iter()
        .find(|name| recipes.iter().all(|r| short(r) != **name))
    {
        let known: Vec<String> = recipes.iter().map(short).collect();
        bail!(
            "--only {unknown}: no such image; there are {}",
            known.join(", ")
        );
    }
    let layout = Layout::open(out)?;
    // On the same disk as the result: packages and trees are large.
    let work = tempfile::Builder::new().prefix(".work-").tempdir_in(out)?;
    for recipe in recipes
        .iter()
        .filter(|r| only.is_empty() || only.contains(&short(r)))
    {
        let (reference, hash) = (recipe.reference(), recipe.hash(supplies)?);
        if layout.holds(&reference, &hash)? {
            tracing::info!(image = reference, "unchanged");
            continue;
        }
        tracing::info!(image = reference, "building");
        let work = tempfile::tempdir_in(&work)?;
        let debian = Debian::new(&work.path().join("packages"))?;
        let mut builder = Builder {
            debian,
            work,
            supplies,
        };
        builder
            .build(recipe, &hash, &layout)
            .with_context(|| reference)?;
    }
    layout.collect_garbage()
}

/// What one recipe is followed with.
struct Builder<'a> {
    debian: Debian,
    work: TempDir,
    supplies: &'a Supplies,
}

impl Builder<'_> {
    fn build(&mut self, recipe: &Recipe, hash: &str, layout: &Layout) -> anyhow::Result<()> {
        let mut layers: Vec<Built> = Vec::new();
        for layer in &recipe.layers {
            let mut tree = Tree::default();
            for part in &layer.parts {
                self.put(part, &mut tree)
                    .with_context(|| layer.created_by)?;
            }
            let built = layer::write(&tree, layout)?;
            tracing::info!(
                layer = layer.created_by,
                compressed_bytes = built.descriptor.size(),
                "built"
            );
            layers.push(built);
        }
        let architecture = architecture()?;
        let configuration = ImageConfigurationBuilder::default()
            .created(EPOCH_TEXT)
            .architecture(architecture.clone())
            .os(Os::Linux)
            .config(config(&recipe.config)?)
            .rootfs(
                RootFsBuilder::default()
                    .typ("layers")
                    .diff_ids(layers.iter().map(|l| l.diff_id.clone()).collect::<Vec<_>>())
                    .build()?,
            )
            .history(
                recipe
                    .layers
                    .iter()
                    .map(|layer| {
                        HistoryBuilder::default()
                            .created(EPOCH_TEXT)
                            .created_by(layer.created_by)
                            .build()
                    })
                    .collect::<Result<Vec<_>, _>>()?,
            )
            .build()?;
        let configuration = layout.put_json(&configuration, MediaType::ImageConfig)?;
        let manifest = ImageManifestBuilder::default()
            .schema_version(2_u32)
            .media_type(MediaType::ImageManifest)
            .config(configuration)
            .layers(layers.into_iter().map(|l| l.descriptor).collect::<Vec<_>>())
            .build()?;
        let mut manifest = layout.put_json(&manifest, MediaType::ImageManifest)?;
        let platform = PlatformBuilder::default()
            .architecture(architecture)
            .os(Os::Linux)
            .build()?;
        manifest.set_platform(Some(platform));
        layout.set(&recipe.reference(), hash, manifest)
    }

    fn put(&mut self, part: &Part, tree: &mut Tree) -> anyhow::Result<()> {
        match *part {
            Part::Packages(packages) => {
                for file in self.debian.fetch(packages)? {
                    debian::unpack(&file, tree)?;
                }
            }
            Part::Directory { path, mode, owner } => tree.directory(path, mode, owner),
            Part::File {
                path,
                mode,
                content,
            } => tree.file(path, mode, content.into()),
            Part::Symlink { path, target } => tree.symlink(path, target),
            Part::Applets { busybox } => self.applets(busybox, tree)?,
            Part::Program { path, mode, source } => {
                let folder = self.folder()?;
                tree.file(path, mode, program::compile(source, folder.path())?);
            }
            Part::Supplied { path, name } => {
                tree.file(path, 0o755, self.supplies.get(name)?.to_vec());
            }
            Part::Repository { path, commits } => {
                let folder = self.folder()?;
                repository::put(path, commits, folder.path(), tree)?;
            }
        }
        Ok(())
    }

    /// Links every command of the busybox in `tree` to it.
    fn applets(&self, busybox: &str, tree: &mut Tree) -> anyhow::Result<()> {
        let folder = self.folder()?;
        let program = folder.path().join("busybox");
        fs::write(
            &program,
            tree.content(busybox).context("no busybox in this layer")?,
        )?;
        for applet in program::lines(&program, &["--list"])? {
            let path = format!("usr/bin/{applet}");
            if path != busybox {
                tree.symlink(&path, "busybox");
            }
        }
        Ok(())
    }

    fn folder(&self) -> anyhow::Result<TempDir> {
        Ok(tempfile::tempdir_in(&self.work)?)
    }
}

/// The machine's architecture: packages and programs are its own.
fn architecture() -> anyhow::Result<Arch> {
    match std::env::consts::ARCH {
        "x86_64" => Ok(Arch::Amd64),
        "aarch64" => Ok(Arch::ARM64),
        other => bail!("test images are not made for {other}"),
    }
}

fn config(config: &recipe::Config) -> anyhow::Result<Config> {
    let words = |words: &[&str]| {
        words
            .iter()
            .map(|&word| word.to_owned())
            .collect::<Vec<_>>()
    };
    let mut builder = ConfigBuilder::default();
    if !config.user.is_empty() {
        builder = builder.user(config.user);
    }
    if !config.env.is_empty() {
        builder = builder.env(words(config.env));
    }
    if !config.entrypoint.is_empty() {
        builder = builder.entrypoint(words(config.entrypoint));
    }
    if !config.cmd.is_empty() {
        builder = builder.cmd(words(config.cmd));
    }
    if !config.working_dir.is_empty() {
        builder = builder.working_dir(config.working_dir);
    }
    Ok(builder.build()?)
}
