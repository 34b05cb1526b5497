//! The service's side.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use sandman_layer_store::LayerDigest;
use sandman_layer_store::cache::Entry;
use sandman_protocol::v1;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{Answer, Command, Row, socket_path};
use crate::images::{Image, ImageRequest, PullObserver};
use crate::layers::Layers;
use crate::sandbox::Host;

/// Longest command: a list of images.
const MAX_COMMAND: u64 = 1 << 20;

/// Listens in the state folder.
///
/// # Errors
/// The system's.
pub(crate) fn bind(state_dir: &Path) -> io::Result<UnixListener> {
    let path = socket_path(state_dir);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(path)
}

/// Answers commands until `shutdown`.
pub(crate) async fn serve(
    listener: UnixListener,
    host: Arc<Host>,
    layers: Arc<Layers>,
    shutdown: CancellationToken,
) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shutdown.cancelled() => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "cannot accept a cache command");
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                continue;
            }
        };
        let (host, layers) = (host.clone(), layers.clone());
        tokio::spawn(async move {
            // Who went away needs no answer.
            let _ = answer(stream, &host, &layers).await;
        });
    }
}

/// A caller, line by line.
struct Caller {
    stream: tokio::net::unix::OwnedWriteHalf,
}

impl Caller {
    async fn say(&mut self, answer: &Answer) -> io::Result<()> {
        let mut line = serde_json::to_vec(answer)?;
        line.push(b'\n');
        self.stream.write_all(&line).await
    }
}

async fn answer(stream: UnixStream, host: &Host, layers: &Arc<Layers>) -> io::Result<()> {
    let (input, output) = stream.into_split();
    let mut line = String::new();
    BufReader::new(input.take(MAX_COMMAND))
        .read_line(&mut line)
        .await?;
    let mut caller = Caller { stream: output };
    let command = match serde_json::from_str(&line) {
        Ok(command) => command,
        Err(error) => return caller.say(&Answer::Failed(error.to_string())).await,
    };
    info!(?command, "cache command");
    let last = match execute(&command, &mut caller, host, layers).await {
        Ok(()) => Answer::Done,
        Err(why) => Answer::Failed(why),
    };
    caller.say(&last).await
}

async fn execute(
    command: &Command,
    caller: &mut Caller,
    host: &Host,
    layers: &Arc<Layers>,
) -> Result<(), String> {
    match command {
        Command::Ls { .. } => {
            let images = images_by_layer(host).await?;
            let entries = blocking(layers, |layers| layers.store().cache().list()).await?;
            for entry in entries {
                let names = images.get(&entry.layer).cloned().unwrap_or_default();
                say(caller, &Answer::Layer(row(&entry, names))).await?;
            }
            Ok(())
        }
        Command::Status => {
            let taken = blocking(layers, |layers| layers.store().cache().taken()).await?;
            let max = layers.max_bytes();
            let text = format!("{} of at most {max} bytes are taken", taken.bytes);
            say(caller, &Answer::Text(text)).await?;
            match layers.store().is_doubly_held() {
                true => say(caller, &Answer::Text("the keeper serves".to_owned())).await,
                false => Err("the keeper is away; readers of incomplete layers wait".to_owned()),
            }
        }
        Command::Pin { image } => pin(host, layers, image, true).await,
        Command::Unpin { image } => pin(host, layers, image, false).await,
        Command::Prune { all } => {
            let all = *all;
            let pruned = blocking(layers, move |layers| layers.clear(all)).await?;
            let text = format!(
                "removed {} layers and the data of {} more: {} bytes",
                pruned.layers.len(),
                pruned.emptied.len(),
                pruned.bytes
            );
            say(caller, &Answer::Text(text)).await
        }
        Command::Prefetch { images } => {
            let mut failed = 0;
            for image in images {
                let text = match prefetch(host, layers, image).await {
                    Ok(image) => format!("{}: {} bytes", image.image_id, image.size),
                    Err(why) => {
                        failed += 1;
                        why
                    }
                };
                say(caller, &Answer::Text(text)).await?;
            }
            match failed {
                0 => Ok(()),
                failed => Err(format!("{failed} of {} images are not here", images.len())),
            }
        }
    }
}

async fn say(caller: &mut Caller, answer: &Answer) -> Result<(), String> {
    caller.say(answer).await.map_err(|error| error.to_string())
}

async fn blocking<T: Send + 'static>(
    layers: &Arc<Layers>,
    work: impl FnOnce(&Layers) -> io::Result<T> + Send + 'static,
) -> Result<T, String> {
    let layers = Arc::clone(layers);
    let done = tokio::task::spawn_blocking(move || work(&layers)).await;
    done.map_err(|error| error.to_string())?
        .map_err(|error| error.to_string())
}

fn row(entry: &Entry, images: Vec<String>) -> Row {
    let state = match entry {
        Entry { sealed: true, .. } => "complete",
        Entry { data: 0, .. } => "index",
        _ => "partial",
    };
    Row {
        digest: entry.layer.to_string(),
        bytes: entry.bytes,
        state: state.to_owned(),
        pinned: entry.pinned,
        users: entry.users,
        last_used: entry.last_used,
        images,
    }
}

async fn images_by_layer(host: &Host) -> Result<HashMap<LayerDigest, Vec<String>>, String> {
    let names = host
        .images
        .names()
        .await
        .map_err(|error| error.to_string())?;
    let mut found: HashMap<LayerDigest, Vec<String>> = HashMap::new();
    for name in names {
        let Ok(Some(image)) = host.images.local(&name).await else {
            continue;
        };
        for layer in image.layers.iter().flat_map(|set| &set.layers) {
            found.entry(layer.digest()).or_default().push(name.clone());
        }
    }
    for names in found.values_mut() {
        names.sort();
        // A name by digest says nothing beside a tag.
        if names.iter().any(|name| !name.contains('@')) {
            names.retain(|name| !name.contains('@'));
        }
    }
    Ok(found)
}

async fn pin(
    host: &Host,
    layers: &Arc<Layers>,
    reference: &str,
    pinned: bool,
) -> Result<(), String> {
    let image = host.images.local(reference).await;
    let image = image.map_err(|error| error.to_string())?;
    let absent = || format!("image {reference:?} is not on this host; `cache prefetch` it first");
    let set = image.ok_or_else(absent)?.layers;
    let unpacked = || format!("image {reference:?} is kept by containerd, not by the layer store");
    let set = set.ok_or_else(unpacked)?;
    blocking(layers, move |layers| {
        for layer in &set.layers {
            layers.store().cache().pin(layer.digest(), pinned)?;
        }
        Ok(())
    })
    .await
}

/// Nobody is told of a pull that no pod caused.
struct Silent;

impl PullObserver for Silent {
    fn pulling(&self) {}
}

async fn prefetch(host: &Host, layers: &Arc<Layers>, reference: &str) -> Result<Image, String> {
    let request = ImageRequest {
        reference: reference.to_owned(),
        policy: v1::PullPolicy::IfNotPresent,
        credentials: Vec::new(),
    };
    let image = host.images.ensure(&request, &Silent).await;
    let image = image.map_err(|error| error.to_string())?;
    if let Some(set) = image.layers.clone() {
        let origins = host.images.origins();
        blocking(layers, move |layers| {
            for layer in set
                .layers
                .iter()
                .filter(|layer| !layers.is_sealed(layer.digest()))
            {
                let origin = origins.of(&set.repository, layer.digest(), layer.size);
                layers
                    .mount(layer.digest(), origin)
                    .map_err(io::Error::other)?;
                layers.store().filler().complete(layer.digest());
            }
            Ok(())
        })
        .await?;
    }
    Ok(image)
}
