//! WebSocket (RFC 6455) as a server, below the level of frames: payload is handed out
//! as it arrives, so a message of any length costs a constant amount of memory.
//!
//! Also the Kubernetes channel format inside the messages. No extension is ever
//! negotiated, so every reserved bit is an error.

mod base64;
mod channels;
mod decoder;
mod encoder;

pub use self::{
    channels::{ChannelDecoder, ChannelEvent, ChannelFormat},
    decoder::{Decoder, Frame},
    encoder::{binary_head, close, ping, pong, text_head},
};

/// Close codes of RFC 6455 section 7.4.1 that a server uses.
pub mod close_code {
    /// The session ended as it should.
    pub const NORMAL: u16 = 1000;
    /// This node is going away.
    pub const GOING_AWAY: u16 = 1001;
    /// The client broke the protocol.
    pub const PROTOCOL_ERROR: u16 = 1002;
    /// A message does not hold what its type says, for example bad base64.
    pub const INVALID_PAYLOAD: u16 = 1007;
}

/// What makes a byte stream no WebSocket, or a message no channel message; the
/// connection is closed after any of these.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// A reserved bit is set although no extension was negotiated.
    #[error("frame has reserved bits set")]
    ReservedBits,
    /// A client must mask what it sends.
    #[error("client frame is not masked")]
    Unmasked,
    /// An opcode that RFC 6455 reserves.
    #[error("frame has the reserved opcode {0}")]
    Opcode(u8),
    /// A control frame in pieces or above 125 bytes.
    #[error("control frame is fragmented or too long")]
    ControlFrame,
    /// A length with the highest bit set.
    #[error("frame length exceeds 63 bits")]
    Length,
    /// A continuation without a message, or a new message inside of one.
    #[error("frames of a message are out of order")]
    Continuation,
    /// `[255, channel]` is exactly two bytes.
    #[error("stream close signal is not followed by exactly one channel")]
    CloseSignal,
    /// A message of a base64 protocol holds something else.
    #[error("message is not base64")]
    Base64,
}

impl Error {
    /// Code for the Close frame that answers this error.
    pub fn close_code(&self) -> u16 {
        match self {
            Self::Base64 => close_code::INVALID_PAYLOAD,
            _ => close_code::PROTOCOL_ERROR,
        }
    }
}
