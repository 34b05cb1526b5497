//! Finds the two streams of a forwarded connection: the client opens an error and a
//! data stream with the same request id.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use crate::spdy::HeaderBlock;

/// Longest request id kept.
const MAX_REQUEST_ID: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Error,
    Data,
}

/// What the headers of a new stream say.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Announced {
    pub(super) kind: Kind,
    pub(super) port: u16,
    request: String,
}

impl Announced {
    /// `None` if the headers are not those of a forwarded connection.
    pub(super) fn parse(stream: u32, headers: &HeaderBlock) -> Option<Self> {
        let port = headers.get("port")?.parse().ok().filter(|port| *port > 0)?;
        let kind = match headers.get("streamtype")? {
            "error" => Kind::Error,
            "data" => Kind::Data,
            _ => return None,
        };
        let request = match headers.get("requestid").filter(|id| !id.is_empty()) {
            Some(id) if id.len() <= MAX_REQUEST_ID => id.to_owned(),
            Some(_) => return None,
            // Clients older than request ids open the data stream right after the error stream.
            None => {
                let error = if kind == Kind::Error {
                    stream
                } else {
                    stream.checked_sub(2)?
                };
                format!("stream {error}")
            }
        };
        Some(Self {
            kind,
            port,
            request,
        })
    }
}

/// Streams whose counterpart has not come yet.
pub(super) struct Pairs {
    pending: HashMap<String, Pending>,
    patience: Duration,
}

struct Pending {
    kind: Kind,
    stream: u32,
    deadline: Instant,
}

/// What became of a new stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Paired {
    Complete {
        error: u32,
        data: u32,
    },
    Waiting,
    /// The request has a stream of this kind already.
    Duplicate,
}

impl Pairs {
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            pending: HashMap::new(),
            patience,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.pending.len()
    }

    pub(super) fn add(&mut self, stream: u32, announced: &Announced) -> Paired {
        match self.pending.get(&announced.request) {
            None => {
                let deadline = Instant::now() + self.patience;
                let pending = Pending {
                    kind: announced.kind,
                    stream,
                    deadline,
                };
                self.pending.insert(announced.request.clone(), pending);
                Paired::Waiting
            }
            Some(first) if first.kind == announced.kind => Paired::Duplicate,
            Some(first) => {
                let first = first.stream;
                self.pending.remove(&announced.request);
                match announced.kind {
                    Kind::Data => Paired::Complete {
                        error: first,
                        data: stream,
                    },
                    Kind::Error => Paired::Complete {
                        error: stream,
                        data: first,
                    },
                }
            }
        }
    }

    /// The client dropped a stream.
    pub(super) fn forget(&mut self, stream: u32) {
        self.pending.retain(|_, pending| pending.stream != stream);
    }

    /// When the next pair is given up.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.pending.values().map(|pending| pending.deadline).min()
    }

    /// Takes the streams that waited too long.
    pub(super) fn expired(&mut self, now: Instant) -> Vec<u32> {
        self.pending
            .extract_if(|_, pending| pending.deadline <= now)
            .map(|(_, pending)| pending.stream)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(&str, &str)]) -> HeaderBlock {
        HeaderBlock::from_fields(fields)
    }

    #[test]
    fn headers_of_a_forwarded_connection() {
        let complete = [("streamtype", "data"), ("port", "80"), ("requestid", "7")];
        let announced = Announced::parse(3, &headers(&complete)).unwrap();
        assert_eq!((announced.kind, announced.port), (Kind::Data, 80));
        for (at, value) in [
            (0, "stdin"),
            (1, "0"),
            (1, "65536"),
            (1, ""),
            (2, &"x".repeat(65)),
        ] {
            let mut bad = complete;
            bad[at].1 = value;
            assert_eq!(Announced::parse(3, &headers(&bad)), None, "{bad:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn pairs_by_request_or_by_stream_id() {
        let patience = Duration::from_secs(30);
        let mut pairs = Pairs::new(patience);
        let mut add = |stream, kind, request: Option<&str>| {
            let mut fields = vec![("streamtype", kind), ("port", "80")];
            fields.extend(request.map(|id| ("requestid", id)));
            pairs.add(
                stream,
                &Announced::parse(stream, &headers(&fields)).unwrap(),
            )
        };
        assert_eq!(add(1, "error", Some("a")), Paired::Waiting);
        assert_eq!(add(3, "error", Some("b")), Paired::Waiting);
        assert_eq!(add(5, "error", Some("b")), Paired::Duplicate);
        assert_eq!(
            add(7, "data", Some("b")),
            Paired::Complete { error: 3, data: 7 }
        );
        assert_eq!(add(9, "error", None), Paired::Waiting);
        assert_eq!(
            add(11, "data", None),
            Paired::Complete { error: 9, data: 11 }
        );
        assert!(pairs.expired(Instant::now()).is_empty());
        assert_eq!(pairs.expired(Instant::now() + patience), [1]);
        assert_eq!(pairs.len(), 0);
    }
}
