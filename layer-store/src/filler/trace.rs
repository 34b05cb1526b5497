//! What an image's first reads were, to be fetched first the next time.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;

use crate::LayerDigest;

const MAGIC: &[u8; 8] = b"sandtrc1";
const ENTRY: usize = 36;
/// Longest trace: 64 MiB and more of an image are no start any more.
const MAX_SPANS: usize = 4096;

/// Spans in the order in which they were first wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    spans: Vec<(LayerDigest, u32)>,
}

impl Trace {
    /// The spans, in order.
    #[must_use]
    pub fn spans(&self) -> &[(LayerDigest, u32)] {
        &self.spans
    }

    /// Whether this one says more than `other`: a start over layers that were warm asks for little,
    /// and must not replace what a cold one showed.
    #[must_use]
    pub fn is_richer_than(&self, other: &Self) -> bool {
        self.spans.len() > other.spans.len()
    }

    /// Reads a trace. One that is missing, damaged or of another version is empty: it would only
    /// have saved time.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn load(path: &Path) -> io::Result<Self> {
        match std::fs::read(path) {
            Ok(bytes) => Ok(Self::decode(&bytes).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error),
        }
    }

    /// Writes a trace in place of the one that is there.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let draft = path.with_extension("new");
        std::fs::write(&draft, self.encode())?;
        std::fs::rename(draft, path)
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for (layer, span) in &self.spans {
            bytes.extend(layer.0);
            bytes.extend(span.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let entries = bytes.strip_prefix(MAGIC)?.chunks_exact(ENTRY);
        if !entries.remainder().is_empty() || entries.len() > MAX_SPANS {
            return None;
        }
        let spans = entries.map(|entry| {
            let (layer, span) = entry.split_first_chunk::<32>()?;
            let span = u32::from_le_bytes(span.try_into().ok()?);
            Some((LayerDigest(*layer), span))
        });
        Some(Self {
            spans: spans.collect::<Option<_>>()?,
        })
    }
}

/// Recordings that are going on.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    going: HashMap<u64, Going>,
    next: u64,
}

#[derive(Debug)]
struct Going {
    layers: HashSet<LayerDigest>,
    seen: HashSet<(LayerDigest, u32)>,
    trace: Trace,
}

impl Recorder {
    /// Begins to record what is wanted of `layers`.
    pub(super) fn begin(&mut self, layers: impl IntoIterator<Item = LayerDigest>) -> u64 {
        self.next += 1;
        let going = Going {
            layers: layers.into_iter().collect(),
            seen: HashSet::new(),
            trace: Trace::default(),
        };
        self.going.insert(self.next, going);
        self.next
    }

    /// A reader wants `spans`.
    pub(super) fn wanted(&mut self, layer: LayerDigest, spans: std::ops::Range<u32>) {
        for going in self
            .going
            .values_mut()
            .filter(|going| going.layers.contains(&layer))
        {
            for span in spans.clone() {
                let room = going.trace.spans.len() < MAX_SPANS;
                if room && going.seen.insert((layer, span)) {
                    going.trace.spans.push((layer, span));
                }
            }
        }
    }

    /// Ends a recording.
    pub(super) fn end(&mut self, recording: u64) -> Trace {
        self.going
            .remove(&recording)
            .map(|going| going.trace)
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: LayerDigest = LayerDigest([1; 32]);
    const B: LayerDigest = LayerDigest([2; 32]);

    #[test]
    fn first_reads_are_recorded_in_order() {
        let mut recorder = Recorder::default();
        recorder.wanted(A, 0..1);
        let (first, both) = (recorder.begin([A]), recorder.begin([A, B]));
        recorder.wanted(B, 7..8);
        recorder.wanted(A, 3..5);
        recorder.wanted(A, 4..6);
        assert_eq!(recorder.end(first).spans(), [(A, 3), (A, 4), (A, 5)]);
        recorder.wanted(B, 7..9);
        let trace = recorder.end(both);
        assert_eq!(trace.spans(), [(B, 7), (A, 3), (A, 4), (A, 5), (B, 8)]);
        assert_eq!(recorder.end(both), Trace::default(), "once");
    }

    #[test]
    fn a_recording_has_an_end() {
        let mut recorder = Recorder::default();
        let recording = recorder.begin([A]);
        recorder.wanted(A, 0..1_000_000);
        assert_eq!(recorder.end(recording).spans().len(), MAX_SPANS);
    }

    #[test]
    fn what_is_saved_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        assert_eq!(Trace::load(&path).unwrap(), Trace::default());
        let trace = Trace {
            spans: vec![(A, 9), (B, u32::MAX)],
        };
        trace.save(&path).unwrap();
        assert_eq!(Trace::load(&path).unwrap(), trace);
        assert!(trace.is_richer_than(&Trace::default()) && !trace.is_richer_than(&trace));
        let good = trace.encode();
        for cut in (0..good.len()).filter(|cut| (cut - 8.min(*cut)) % ENTRY != 0 || *cut < 8) {
            std::fs::write(&path, &good[..cut]).unwrap();
            assert_eq!(Trace::load(&path).unwrap(), Trace::default(), "{cut}");
        }
        std::fs::write(&path, [&good[..], &vec![0; ENTRY * MAX_SPANS]].concat()).unwrap();
        assert_eq!(Trace::load(&path).unwrap(), Trace::default(), "too long");
    }
}
