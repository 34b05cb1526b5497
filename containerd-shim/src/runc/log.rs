//! The error in runc's JSON log.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use serde::Deserialize;

/// Most that is read from the end of a log. A container's own name and command are in the messages.
const MAX_LOG: u64 = 256 << 10;

#[derive(Deserialize)]
struct Line {
    #[serde(default)]
    level: String,
    #[serde(default)]
    msg: String,
}

/// The message of the last error in `path`, if there is one.
pub(super) fn last_error(path: &Path) -> Option<String> {
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(MAX_LOG)))
        .ok()?;
    let mut bytes = Vec::new();
    file.take(MAX_LOG).read_to_end(&mut bytes).ok()?;
    last_error_in(&String::from_utf8_lossy(&bytes))
}

fn last_error_in(log: &str) -> Option<String> {
    log.lines()
        .rev()
        .filter_map(|line| serde_json::from_str::<Line>(line).ok())
        .find(|line| matches!(line.level.as_str(), "error" | "fatal" | "panic"))
        .map(|line| line.msg.trim().to_owned())
        .filter(|message| !message.is_empty())
}

#[cfg(test)]
mod tests {
    use super::last_error_in;

    #[test]
    fn the_last_error_counts() {
        let log = concat!(
            r#"{"level":"error","msg":"first","time":"x"}"#,
            "\n",
            r#"{"level":"error","msg":"second \"quoted\"\n","time":"x"}"#,
            "\n",
            r#"{"level":"warning","msg":"third","time":"x"}"#,
            "\nnot json\n",
            r#"{"level":"error","msg":"cut o"#,
        );
        assert_eq!(last_error_in(log).as_deref(), Some("second \"quoted\""));
        assert_eq!(last_error_in(""), None);
        assert_eq!(last_error_in(r#"{"level":"info","msg":"x"}"#), None);
    }
}
