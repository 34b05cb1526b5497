//! Pushes the images of a layout to a registry.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use http::HeaderValue;
use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use oci_spec::image::Descriptor;
use tokio_util::io::ReaderStream;

use crate::layout::{Layout, REF_NAME, annotation};

/// How long a registry may be silent.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Size of the pieces in which a blob is sent.
const PIECE: usize = 256 * 1024;

/// A registry and how to talk to it.
pub(crate) struct Registry {
    address: String,
    client: Client,
    auth: RegistryAuth,
}

impl Registry {
    /// `login` is a name and a password.
    pub(crate) fn new(address: String, plain_http: bool, login: Option<(String, String)>) -> Self {
        let protocol = if plain_http {
            ClientProtocol::Http
        } else {
            ClientProtocol::Https
        };
        let client = Client::new(ClientConfig {
            protocol,
            // One request a blob: each is read from a file once.
            use_monolithic_push: true,
            read_timeout: Some(TIMEOUT),
            connect_timeout: Some(TIMEOUT),
            ..ClientConfig::default()
        });
        let auth = match login {
            Some((user, password)) => RegistryAuth::Basic(user, password),
            None => RegistryAuth::Anonymous,
        };
        Self {
            address,
            client,
            auth,
        }
    }
}

impl fmt::Display for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}

/// Pushes every image of the layout at `from`; blobs that are there are skipped.
pub(crate) async fn run(from: &Path, registry: &Registry) -> anyhow::Result<()> {
    if !from.join("index.json").is_file() {
        bail!(
            "{} is no image layout: run `sandman-images build` first",
            from.display()
        );
    }
    let layout = Layout::open(from)?;
    for descriptor in layout.index()?.manifests() {
        let name = annotation(descriptor, REF_NAME).context("an image without a name")?;
        push(&layout, descriptor, name, registry)
            .await
            .with_context(|| name.to_owned())?;
    }
    Ok(())
}

async fn push(
    layout: &Layout,
    descriptor: &Descriptor,
    name: &str,
    registry: &Registry,
) -> anyhow::Result<()> {
    let reference: Reference = format!("{registry}/{name}").parse()?;
    let client = &registry.client;
    client
        .auth(&reference, &registry.auth, RegistryOperation::Push)
        .await?;
    let manifest = layout.manifest(descriptor)?;
    let mut sent = 0;
    // The manifest comes last: a registry refuses one whose blobs it lacks.
    for blob in manifest.layers().iter().chain([manifest.config()]) {
        let digest = blob.digest().to_string();
        if client.blob_exists(&reference, &digest).await? {
            continue;
        }
        let file = tokio::fs::File::open(layout.blob(blob)).await?;
        let stream = ReaderStream::with_capacity(file, PIECE);
        let stream = tokio_stream::StreamExt::map(stream, |piece| piece.map_err(Into::into));
        client
            .push_blob_stream(&reference, stream, &digest, Some(blob.size()))
            .await?;
        sent += blob.size();
    }
    // The bytes themselves, not a new encoding of them: the digest must stay.
    let bytes = tokio::fs::read(layout.blob(descriptor)).await?;
    let media_type = HeaderValue::from_str(descriptor.media_type().as_ref())?;
    client
        .push_manifest_raw(&reference, bytes, media_type)
        .await?;
    tracing::info!(image = %reference, digest = %descriptor.digest(), sent_bytes = sent, "pushed");
    Ok(())
}
