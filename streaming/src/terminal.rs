//! Terminal sizes: parsed from the resize stream, queued for the handler.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use tokio::sync::Notify;

/// Size of a terminal in characters, both at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    /// Columns.
    pub width: u16,
    /// Rows.
    pub height: u16,
}

/// Sizes that wait for a slow handler. The oldest go first: only the last matters, but
/// a client that attaches sends two different ones in a row to force a redraw.
const MAX_QUEUED: usize = 8;

/// Bytes of an unfinished JSON object after which the stream is given up.
const MAX_UNPARSED: usize = 1024;

/// Makes the queue of one session.
pub(crate) fn resize_queue() -> (ResizeFeed, ResizeEvents) {
    let shared = Arc::new(Shared::default());
    let feed = ResizeFeed {
        shared: Arc::clone(&shared),
        unparsed: Vec::new(),
    };
    (feed, ResizeEvents { shared })
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    sizes: VecDeque<TerminalSize>,
    ended: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Terminal sizes as the client reports them.
pub struct ResizeEvents {
    shared: Arc<Shared>,
}

impl ResizeEvents {
    /// The next size; `None` once the client sends no more. Cancel safe.
    ///
    /// A client with a terminal sends its size at once: waiting a quarter of a second
    /// for it before the process starts spares the process a wrong first size.
    pub async fn next(&mut self) -> Option<TerminalSize> {
        loop {
            let changed = self.shared.changed.notified();
            {
                let mut state = self.shared.lock();
                if let Some(size) = state.sizes.pop_front() {
                    return Some(size);
                }
                if state.ended {
                    return None;
                }
            }
            changed.await;
        }
    }
}

/// The connection's end: parses the concatenated JSON objects `{"Width":W,"Height":H}`.
pub(crate) struct ResizeFeed {
    shared: Arc<Shared>,
    unparsed: Vec<u8>,
}

impl ResizeFeed {
    /// Takes the next bytes of the stream. What is no size ends it, as in upstream's
    /// decoder; the session goes on.
    pub(crate) fn push(&mut self, piece: &[u8]) {
        if self.shared.lock().ended {
            return;
        }
        for part in piece.chunks(MAX_UNPARSED) {
            self.unparsed.extend_from_slice(part);
            if !self.parse() || self.unparsed.len() > MAX_UNPARSED {
                self.end();
                return;
            }
        }
    }

    /// Whether all that was parsed were sizes.
    fn parse(&mut self) -> bool {
        let mut stream =
            serde_json::Deserializer::from_slice(&self.unparsed).into_iter::<Reported>();
        let well_formed = loop {
            match stream.next() {
                Some(Ok(Reported { width, height })) => {
                    if width > 0 && height > 0 {
                        self.queue(TerminalSize { width, height });
                    }
                }
                Some(Err(error)) => break error.is_eof(),
                None => break true,
            }
        };
        let parsed = stream.byte_offset();
        self.unparsed.drain(..parsed);
        well_formed
    }

    fn queue(&self, size: TerminalSize) {
        let mut state = self.shared.lock();
        if state.sizes.len() >= MAX_QUEUED {
            state.sizes.pop_front();
        }
        state.sizes.push_back(size);
        drop(state);
        self.shared.changed.notify_one();
    }

    pub(crate) fn end(&mut self) {
        self.unparsed = Vec::new();
        self.shared.lock().ended = true;
        self.shared.changed.notify_one();
    }
}

impl Drop for ResizeFeed {
    fn drop(&mut self) {
        self.end();
    }
}

/// A size as sent. Go matches field names without regard to case, so clients may send any.
struct Reported {
    width: u16,
    height: u16,
}

impl<'de> Deserialize<'de> for Reported {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;

        impl<'de> Visitor<'de> for Fields {
            type Value = Reported;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object with Width and Height")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Reported, A::Error> {
                let mut size = Reported {
                    width: 0,
                    height: 0,
                };
                while let Some(name) = map.next_key::<String>()? {
                    if name.eq_ignore_ascii_case("width") {
                        size.width = map.next_value()?;
                    } else if name.eq_ignore_ascii_case("height") {
                        size.height = map.next_value()?;
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(size)
            }
        }

        deserializer.deserialize_map(Fields)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    async fn sizes(pieces: &[&[u8]]) -> Vec<(u16, u16)> {
        let (mut feed, mut events) = resize_queue();
        for piece in pieces {
            feed.push(piece);
        }
        drop(feed);
        let mut sizes = Vec::new();
        while let Some(TerminalSize { width, height }) = events.next().await {
            sizes.push((width, height));
        }
        sizes
    }

    #[tokio::test]
    async fn objects_may_be_joined_split_and_spelled_freely() {
        assert_eq!(
            sizes(&[
                br#"{"Width":80,"Height":24}{"wid"#,
                br#"th":81,"HEIGHT":25}"#,
                b"\n{\"Width\":1,\"Height\":2,\"Depth\":[3]}\n"
            ])
            .await,
            [(80, 24), (81, 25), (1, 2)]
        );
    }

    #[tokio::test]
    async fn nonsense_ends_the_stream_and_zero_is_no_size() {
        let good = br#"{"Width":1,"Height":2}"#;
        assert_eq!(sizes(&[br#"{"Width":0,"Height":2}"#, good]).await, [(1, 2)]);
        assert_eq!(sizes(&[good, b"nonsense", good]).await, [(1, 2)]);
        assert_eq!(sizes(&[br#"{"Width":65536,"Height":1}"#, good]).await, []);
        let endless = [b"{\"".as_slice(), &[b'x'; 5000]].concat();
        assert_eq!(sizes(&[&endless, good]).await, []);
    }

    #[tokio::test]
    async fn a_slow_handler_gets_the_last_sizes() {
        let many: String = (1..=20)
            .map(|n| format!(r#"{{"Width":{n},"Height":1}}"#))
            .collect();
        let got = sizes(&[many.as_bytes()]).await;
        assert_eq!(got.len(), MAX_QUEUED);
        assert_eq!(got.last(), Some(&(20, 1)));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..50), 0..10)) {
            let (mut feed, _events) = resize_queue();
            for piece in pieces {
                feed.push(&piece);
                prop_assert!(feed.unparsed.len() <= MAX_UNPARSED);
            }
        }
    }
}
