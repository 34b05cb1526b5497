//! Times and sizes that bound a session.

use std::time::Duration;

/// Bounds of one session; the defaults are the kubelet's where it has them.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Ends a session on which no data moved for this long; pings do not count.
    /// `None` never does. Default 4 h, the kubelet's `streamingConnectionIdleTimeout`.
    pub idle: Option<Duration>,
    /// Longest wait for a SPDY client to open its streams. Default 30 s, as in CRI servers.
    pub stream_creation: Duration,
    /// Longest wait for the client to close after the last byte. Closing earlier would
    /// reset the connection if input is unread, and cost the client its last output.
    /// Default 10 s.
    pub linger: Duration,
    /// How long a client's departure is kept from the handler, and its Close unanswered.
    /// Clients that write a file, close and go on wait up to 3 s for the answer, which
    /// then tells them that the process is done. Default 2.5 s.
    pub close_barrier: Duration,
    /// Interval of signs of life while reading is paused by a process that reads no
    /// input, so that pings cannot be seen. Default 10 s; Go clients give up after 61 s.
    pub keepalive: Duration,
    /// Silence after which a WebSocket client is pinged, for the proxies in between.
    /// `None` never does. Default 25 s.
    pub ping: Option<Duration>,
    /// Bytes of input that wait for a process before reading is paused. Default 256 KiB.
    pub input_buffer: usize,
    /// Bytes of output that wait for the client before the process is. Default 256 KiB.
    pub output_buffer: usize,
    /// An empty message on the stdin channel ends stdin, for WebSocket clients older
    /// than v5 that have no other way. Default off: some send empty messages by habit.
    pub empty_message_ends_stdin: bool,
    /// Most connections forwarded at a time over one port-forward session. Default 512.
    pub forwarded_connections: usize,
    /// How long one forwarded connection that takes no input may hold up the others of
    /// its session before it is reset. Default 30 s.
    pub forward_stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            idle: Some(Duration::from_secs(4 * 60 * 60)),
            stream_creation: Duration::from_secs(30),
            linger: Duration::from_secs(10),
            close_barrier: Duration::from_millis(2500),
            keepalive: Duration::from_secs(10),
            ping: Some(Duration::from_secs(25)),
            input_buffer: 256 * 1024,
            output_buffer: 256 * 1024,
            empty_message_ends_stdin: false,
            forwarded_connections: 512,
            forward_stall: Duration::from_secs(30),
        }
    }
}
