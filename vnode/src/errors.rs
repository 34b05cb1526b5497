//! Errors as one line for logs and events.

use std::error::Error;

/// What an error says, with its causes. An API server's refusal prints its whole
/// `Status` otherwise, of which the message is all that helps a reader.
pub(crate) fn brief(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(kube::Error::Api(status)) = error.downcast_ref::<kube::Error>() {
            append(&mut text, &format!("{} ({})", status.message, status.code));
            break;
        }
        append(&mut text, &error.to_string());
        next = error.source();
    }
    text
}

fn append(text: &mut String, cause: &str) {
    // Many errors repeat their cause in their own text.
    if text.ends_with(cause) {
        return;
    }
    if !text.is_empty() {
        text.push_str(": ");
    }
    text.push_str(cause);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_api_servers_refusal_is_its_message() {
        let status =
            kube::core::Status::failure("pods \"a\" is forbidden", "Forbidden").with_code(403);
        let error = kube::Error::Api(Box::new(status));
        assert_eq!(brief(&error), "pods \"a\" is forbidden (403)");
    }

    #[test]
    fn causes_are_said_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot connect: {0}")]
        struct Outer(#[source] std::io::Error);
        let error = Outer(std::io::Error::other("refused"));
        assert_eq!(brief(&error), "cannot connect: refused");
    }
}
