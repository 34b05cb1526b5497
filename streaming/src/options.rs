//! What the query string of a streaming request asks for.

use crate::negotiate::Refusal;

/// Streams of an exec or attach session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// The client sends input (`input=1`).
    pub stdin: bool,
    /// The client takes the output (`output=1`).
    pub stdout: bool,
    /// The client takes the error output apart (`error=1`); never with a terminal.
    pub stderr: bool,
    /// The process gets a terminal (`tty=1`).
    pub tty: bool,
}

impl StreamOptions {
    /// Reads the kubelet's parameters; one is set only if its value is `1`.
    ///
    /// # Errors
    /// 400 if no stream at all is asked for.
    pub fn from_query(query: &str) -> Result<Self, Refusal> {
        let set = |name| first(query, name).is_some_and(|value| value == "1");
        let tty = set("tty");
        let options = Self {
            stdin: set("input"),
            stdout: set("output"),
            // A terminal merges both outputs, there is nothing to send apart.
            stderr: set("error") && !tty,
            tty,
        };
        if !options.stdin && !options.stdout && !options.stderr {
            return Err(Refusal::bad_request(
                "you must specify at least 1 of stdin, stdout, stderr",
            ));
        }
        Ok(options)
    }
}

fn first(query: &str, name: &str) -> Option<String> {
    form_urlencoded::parse(query.as_bytes())
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.into_owned())
}

/// Most ports of a WebSocket channel session: two channels each, numbered in one byte.
const MAX_CHANNEL_PORTS: usize = 127;

/// Ports of a port-forward over WebSocket channels: `port=80,81&port=443`.
pub(crate) fn forwarded_ports(query: &str) -> Result<Vec<u16>, Refusal> {
    let mut ports = Vec::new();
    for (_, value) in form_urlencoded::parse(query.as_bytes()).filter(|(key, _)| key == "port") {
        for text in value.split(',') {
            match text.parse() {
                Ok(port) if port > 0 => ports.push(port),
                _ => {
                    return Err(Refusal::bad_request(format!(
                        "query parameter \"port\": {text:?} is not a port from 1 to 65535"
                    )));
                }
            }
        }
    }
    match ports.len() {
        0 => Err(Refusal::bad_request("query parameter \"port\" is required")),
        1..=MAX_CHANNEL_PORTS => Ok(ports),
        more => Err(Refusal::bad_request(format!(
            "query parameter \"port\" names {more} ports, at most {MAX_CHANNEL_PORTS} fit into one \
             session"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kubelets_parameters() {
        let all = StreamOptions::from_query("input=1&output=1&error=1&command=a%20b").unwrap();
        assert_eq!(
            all,
            StreamOptions {
                stdin: true,
                stdout: true,
                stderr: true,
                tty: false
            }
        );
        let tty = StreamOptions::from_query("output=1&error=1&tty=1").unwrap();
        assert_eq!(
            tty,
            StreamOptions {
                stdin: false,
                stdout: true,
                stderr: false,
                tty: true
            }
        );
        for query in [
            "",
            "tty=1",
            "error=1&tty=1",
            "input=true",
            "input=0&input=1",
        ] {
            let refusal = StreamOptions::from_query(query).unwrap_err();
            assert_eq!(refusal.status, http::StatusCode::BAD_REQUEST, "{query}");
        }
    }

    #[test]
    fn ports_come_in_lists_and_repeats() {
        assert_eq!(
            forwarded_ports("port=80%2C81&port=443").unwrap(),
            [80, 81, 443]
        );
        for query in [
            "",
            "port=",
            "port=0",
            "port=65536",
            "port=80,,81",
            "port=-1",
            "port=http",
        ] {
            assert!(forwarded_ports(query).is_err(), "{query}");
        }
        assert!(forwarded_ports(&"port=1&".repeat(128)).is_err());
    }
}
