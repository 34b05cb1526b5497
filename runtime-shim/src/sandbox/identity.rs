//! What a container's record in containerd says about it, so that it can be recognised without
//! any state of our own.

use std::collections::HashMap;

use sandman_protocol::v1;
use sha2::{Digest, Sha256};

const POD_UID: &str = "sandman.dev/pod-uid";
const POD_NAMESPACE: &str = "sandman.dev/pod-namespace";
const POD_NAME: &str = "sandman.dev/pod-name";
const CONTAINER: &str = "sandman.dev/container";
const ATTEMPT: &str = "sandman.dev/attempt";
const KIND: &str = "sandman.dev/kind";
const SPEC_HASH: &str = "sandman.dev/spec-hash";
const IMAGE: &str = "sandman.dev/image";
const IMAGE_ID: &str = "sandman.dev/image-id";
const STOP_SIGNAL: &str = "sandman.dev/stop-signal";

/// containerd refuses longer identifiers (pkg/identifiers).
const MAX_ID: usize = 76;

/// Place of a container in its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Runs before the others, or beside them as a sidecar.
    Init,
    /// One of `containers`.
    Regular,
    /// Added later, for debugging.
    Ephemeral,
}

/// Identity of one attempt of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Pod UID.
    pub uid: String,
    /// Pod namespace.
    pub namespace: String,
    /// Pod name.
    pub pod: String,
    /// Container name.
    pub container: String,
    /// Counts from 0 over restarts.
    pub attempt: u32,
    /// Init or regular.
    pub kind: Kind,
    /// See [`spec_hash`].
    pub spec_hash: String,
    /// Image as the pod names it.
    pub image: String,
    /// Digest reference of the image.
    pub image_id: String,
    /// Signal that asks the process to end.
    pub stop_signal: u32,
}

impl Identity {
    /// The containerd id of this attempt.
    #[must_use]
    pub fn container_id(&self) -> String {
        container_id(&self.uid, &self.container, self.attempt)
    }

    /// Labels of the containerd record.
    #[must_use]
    pub fn labels(&self) -> HashMap<String, String> {
        let kind = match self.kind {
            Kind::Init => "init",
            Kind::Regular => "regular",
            Kind::Ephemeral => "ephemeral",
        };
        [
            (POD_UID, self.uid.clone()),
            (POD_NAMESPACE, self.namespace.clone()),
            (POD_NAME, self.pod.clone()),
            (CONTAINER, self.container.clone()),
            (ATTEMPT, self.attempt.to_string()),
            (KIND, kind.to_owned()),
            (SPEC_HASH, self.spec_hash.clone()),
            (IMAGE, self.image.clone()),
            (IMAGE_ID, self.image_id.clone()),
            (STOP_SIGNAL, self.stop_signal.to_string()),
        ]
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
    }

    /// Reads labels back; `None` if the container is not one of ours.
    #[must_use]
    pub fn from_labels(labels: &HashMap<String, String>) -> Option<Self> {
        let text = |key: &str| labels.get(key).cloned();
        Some(Self {
            uid: text(POD_UID)?,
            namespace: text(POD_NAMESPACE)?,
            pod: text(POD_NAME)?,
            container: text(CONTAINER)?,
            attempt: text(ATTEMPT)?.parse().ok()?,
            kind: match text(KIND)?.as_str() {
                "init" => Kind::Init,
                "regular" => Kind::Regular,
                "ephemeral" => Kind::Ephemeral,
                _ => return None,
            },
            spec_hash: text(SPEC_HASH).unwrap_or_default(),
            image: text(IMAGE).unwrap_or_default(),
            image_id: text(IMAGE_ID).unwrap_or_default(),
            stop_signal: text(STOP_SIGNAL)
                .and_then(|signal| signal.parse().ok())
                .unwrap_or(libc::SIGTERM as u32),
        })
    }
}

/// `<uid>-<container>-<attempt>`; a name that containerd would not take is replaced by a hash.
#[must_use]
pub fn container_id(uid: &str, container: &str, attempt: u32) -> String {
    let id = format!("{uid}-{container}-{attempt}");
    // Kubernetes allows 63 characters and doubled dashes, containerd's identifiers do not.
    if id.len() <= MAX_ID && !id.contains("--") {
        return id;
    }
    let hash = hex::encode(Sha256::digest(container));
    format!("{uid}-{}-{attempt}", &hash[..16])
}

/// Changes when the container must be made anew for a changed pod. The only such change that
/// Kubernetes allows is the image.
#[must_use]
pub fn spec_hash(container: &v1::Container) -> String {
    let mut hash = Sha256::new();
    hash.update(&container.name);
    hash.update([0]);
    hash.update(&container.image);
    hex::encode(&hash.finalize()[..8])
}

/// Number of a signal as image configurations write it; unknown ones are SIGTERM.
#[must_use]
pub fn signal_number(text: &str) -> u32 {
    let default = libc::SIGTERM as u32;
    if let Ok(number) = text.parse::<u32>() {
        return if (1..=64).contains(&number) {
            number
        } else {
            default
        };
    }
    let upper = text.to_ascii_uppercase();
    let bare = upper.strip_prefix("SIG").unwrap_or(&upper);
    if let Some(offset) = bare.strip_prefix("RTMIN") {
        let offset = offset
            .strip_prefix('+')
            .unwrap_or("0")
            .parse::<u32>()
            .unwrap_or(0);
        return if offset <= 30 { 34 + offset } else { default };
    }
    format!("SIG{bare}")
        .parse::<nix::sys::signal::Signal>()
        .map_or(default, |s| s as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0b1d4f7e-6a37-4a53-9f0e-0d9a3c1f2b4c";

    #[test]
    fn labels_round_trip() {
        let identity = Identity {
            uid: UID.into(),
            namespace: "ns".into(),
            pod: "pod".into(),
            container: "c".into(),
            attempt: 3,
            kind: Kind::Init,
            spec_hash: "abc".into(),
            image: "busybox".into(),
            image_id: "busybox@sha256:1".into(),
            stop_signal: 2,
        };
        assert_eq!(Identity::from_labels(&identity.labels()), Some(identity));
        assert_eq!(Identity::from_labels(&HashMap::new()), None);
    }

    #[test]
    fn ids_are_what_containerd_takes() {
        assert_eq!(container_id(UID, "main", 0), format!("{UID}-main-0"));
        for name in ["a--b", &"x".repeat(63)] {
            let id = container_id(UID, name, 12);
            assert!(id.len() <= MAX_ID && !id.contains("--"), "{id}");
        }
        assert_ne!(container_id(UID, "a--b", 0), container_id(UID, "a--c", 0));
    }

    #[test]
    fn stop_signals_in_all_spellings() {
        for (text, number) in [
            ("SIGINT", 2),
            ("quit", 3),
            ("9", 9),
            ("SIGRTMIN+3", 37),
            ("RTMIN", 34),
            ("", 15),
            ("SIGFOO", 15),
            ("99", 15),
        ] {
            assert_eq!(signal_number(text), number, "{text}");
        }
    }
}
