//! Between this crate's types and the messages of the task service.

use std::time::{SystemTime, UNIX_EPOCH};

use containerd_shim_protos::api::Status;
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::well_known_types::timestamp::Timestamp;

use super::process::Phase;

/// `time` as a message; what is before 1970 becomes 1970.
pub(crate) fn timestamp(time: SystemTime) -> Timestamp {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since.subsec_nanos()).unwrap_or_default(),
        ..Default::default()
    }
}

/// The word of the task service for `phase`.
pub(crate) fn status(phase: Phase) -> Status {
    match phase {
        Phase::Added | Phase::Created => Status::CREATED,
        Phase::Running => Status::RUNNING,
        Phase::Paused => Status::PAUSED,
        Phase::Stopped(_) => Status::STOPPED,
    }
}

/// `message` under `type_url`.
pub(crate) fn any(type_url: &str, message: &impl Message) -> Any {
    Any {
        type_url: type_url.to_owned(),
        // Writing to memory cannot fail.
        value: message.write_to_bytes().unwrap_or_default(),
        ..Default::default()
    }
}
