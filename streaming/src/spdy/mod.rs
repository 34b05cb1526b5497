//! SPDY/3.1 as a Kubernetes server needs it: a decoder for what clients send and an
//! encoder for the few frames that a server answers with, both without I/O.
//!
//! The peer on the other end is nearly always `github.com/moby/spdystream`; where
//! the draft and that library differ, the comments say which one is followed.

mod decoder;
mod dictionary;
mod encoder;
mod headers;

pub use self::{
    decoder::{Decoder, Frame},
    encoder::Encoder,
    headers::HeaderBlock,
};

/// SPDY protocol version that every control frame carries.
const VERSION: u16 = 3;

/// Bytes of a frame's head: two words.
const FRAME_HEAD: usize = 8;

/// Largest control frame payload accepted. The only ones with a variable size are
/// header blocks, and a Kubernetes client sends well below 200 bytes in each.
const MAX_CONTROL_PAYLOAD: usize = 64 * 1024;

/// Largest header block accepted after decompression.
const MAX_HEADER_BLOCK: usize = 64 * 1024;

/// Most headers accepted in one block.
const MAX_HEADERS: u32 = 64;

/// Flag of SYN_STREAM, HEADERS and DATA: the sender is done with the stream.
const FLAG_FIN: u8 = 0x01;

mod frame_type {
    pub(super) const SYN_STREAM: u16 = 1;
    pub(super) const SYN_REPLY: u16 = 2;
    pub(super) const RST_STREAM: u16 = 3;
    pub(super) const SETTINGS: u16 = 4;
    pub(super) const PING: u16 = 6;
    pub(super) const GOAWAY: u16 = 7;
    pub(super) const HEADERS: u16 = 8;
}

/// Reason in a RST_STREAM frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ResetStatus {
    /// The peer broke a rule of the protocol on this stream.
    ProtocolError = 1,
    /// The stream was not begun, nothing of it was processed.
    RefusedStream = 3,
    /// The stream is no longer wanted.
    Cancel = 5,
    /// This end failed.
    InternalError = 6,
}

/// What makes a byte stream no SPDY; the connection cannot go on after any of these.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// A control frame of another protocol version.
    #[error("control frame has SPDY version {0}, only 3 is spoken here")]
    Version(u16),
    /// A control frame larger than any that a client has a reason to send.
    #[error(
        "control frame of type {frame_type} has {length} bytes, at most {MAX_CONTROL_PAYLOAD} are accepted"
    )]
    ControlFrameTooLong {
        /// Type field of the frame.
        frame_type: u16,
        /// Length field of the frame.
        length: u32,
    },
    /// A control frame whose payload does not hold its fixed fields.
    #[error("control frame of type {frame_type} is malformed")]
    MalformedControlFrame {
        /// Type field of the frame.
        frame_type: u16,
    },
    /// Stream 0 does not exist.
    #[error("frame names stream 0")]
    StreamZero,
    /// The zlib stream of the header blocks is broken or uses another dictionary.
    #[error("header block cannot be decompressed")]
    Compression,
    /// The header block is larger than the cap once decompressed.
    #[error("header block exceeds {MAX_HEADER_BLOCK} bytes")]
    HeaderBlockTooLong,
    /// The decompressed header block does not parse.
    #[error("header block is malformed")]
    MalformedHeaders,
    /// A header block came after the decoder was told that none will.
    #[error("stream opened after all streams of this session existed")]
    UnexpectedHeaders,
}
