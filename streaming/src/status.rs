//! The status that ends an exec or attach session, in each protocol's form.
//!
//! Upstream: `k8s.io/cri-streaming/pkg/streaming/remotecommand/{exec,status}.go`. A
//! client that gets none counts the command as successful, so one is always sent.

use serde::Serialize;

/// How a session ended, as the handler tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The process ended with this code, 128 + n for signal n. An attach that ended
    /// as it should is `Exited(0)`.
    Exited(u8),
    /// The process could not be run or watched; the client shows the message.
    Failed {
        /// For example `error executing command in container: ...`.
        message: String,
    },
}

/// How the status is written to the error stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StatusFormat {
    /// `metav1.Status` as JSON: v4 and later.
    Json,
    /// The plain message, and nothing at all on success: before v4.
    Text,
}

/// Longest message that is sent. A handler's error may quote what a container said.
const MAX_MESSAGE: usize = 4096;

impl Outcome {
    /// Bytes for the error stream.
    pub(crate) fn encode(&self, format: StatusFormat) -> Vec<u8> {
        let status = self.status();
        match format {
            StatusFormat::Text => status.message.unwrap_or_default().into_bytes(),
            // Strings and numbers only: this cannot fail; an empty status would mean success.
            StatusFormat::Json => serde_json::to_vec(&status)
                .unwrap_or_else(|_| br#"{"status":"Failure","reason":"InternalError"}"#.to_vec()),
        }
    }

    fn status(&self) -> Status {
        match self {
            Self::Exited(0) => Status::new("Success"),
            Self::Exited(code) => Status {
                message: Some(format!(
                    "command terminated with non-zero exit code: {code}"
                )),
                reason: Some("NonZeroExitCode"),
                details: Some(Details {
                    causes: [Cause {
                        reason: "ExitCode",
                        message: code.to_string(),
                    }],
                }),
                ..Status::new("Failure")
            },
            Self::Failed { message } => Status {
                message: Some(format!("Internal error occurred: {}", cut(message))),
                reason: Some("InternalError"),
                code: Some(500),
                ..Status::new("Failure")
            },
        }
    }
}

fn cut(message: &str) -> &str {
    &message[..message.floor_char_boundary(MAX_MESSAGE)]
}

#[derive(Serialize)]
struct Status {
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Details>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<u16>,
}

impl Status {
    fn new(status: &'static str) -> Self {
        Self {
            status,
            message: None,
            reason: None,
            details: None,
            code: None,
        }
    }
}

#[derive(Serialize)]
struct Details {
    causes: [Cause; 1],
}

#[derive(Serialize)]
struct Cause {
    reason: &'static str,
    message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_what_clients_parse() {
        let cases = [
            (Outcome::Exited(0), r#"{"status":"Success"}"#),
            (
                Outcome::Exited(3),
                r#"{"status":"Failure","message":"command terminated with non-zero exit code: 3","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"3"}]}}"#,
            ),
            (
                Outcome::Failed {
                    message: "no \"sh\"".to_owned(),
                },
                r#"{"status":"Failure","message":"Internal error occurred: no \"sh\"","reason":"InternalError","code":500}"#,
            ),
        ];
        for (outcome, json) in cases {
            assert_eq!(
                String::from_utf8(outcome.encode(StatusFormat::Json)).unwrap(),
                json
            );
        }
    }

    #[test]
    fn text_is_silent_about_success() {
        assert_eq!(Outcome::Exited(0).encode(StatusFormat::Text), b"");
        assert!(
            Outcome::Exited(7)
                .encode(StatusFormat::Text)
                .ends_with(b": 7")
        );
    }

    #[test]
    fn long_messages_are_cut_between_characters() {
        let message = "ä".repeat(MAX_MESSAGE);
        let text = Outcome::Failed { message }.encode(StatusFormat::Text);
        assert!(text.len() < MAX_MESSAGE + 64);
        assert!(String::from_utf8(text).is_ok());
    }
}
