//! The command's side.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;

use anyhow::{Context as _, bail};

use super::{Answer, Command, Row, socket_path};
use crate::config::Config;
use crate::layers::Mode;

/// Has the running service do it, and prints what it says.
///
/// # Errors
/// There is no service, or it could not.
pub fn run(config: &Config, command: &Command) -> anyhow::Result<()> {
    if config.layers.mode == Mode::Containerd {
        bail!("`layers.mode` is \"containerd\": `ctr -n sandman` shows images and snapshots");
    }
    let path = socket_path(&config.state_dir);
    let mut stream = UnixStream::connect(&path).with_context(|| {
        format!(
            "cannot reach the service at {}; does sandman-runtime-shim run?",
            path.display()
        )
    })?;
    let mut line = serde_json::to_vec(command)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let as_json = matches!(command, Command::Ls { json: true });
    let mut out = io::stdout().lock();
    if matches!(command, Command::Ls { json: false }) {
        writeln!(out, "{}", header())?;
    }
    for line in BufReader::new(stream).lines() {
        match serde_json::from_str(&line?)? {
            Answer::Layer(row) if as_json => writeln!(out, "{}", serde_json::to_string(&row)?)?,
            Answer::Layer(row) => writeln!(out, "{}", text(&row))?,
            Answer::Text(text) => writeln!(out, "{text}")?,
            Answer::Failed(why) => bail!(why),
            Answer::Done => return Ok(()),
        }
    }
    bail!("the service ended before it had answered")
}

fn header() -> String {
    format!(
        "{:<20}{:>10}  {:<10}{:<8}{:<7}IMAGES",
        "LAYER", "SIZE", "STATE", "USERS", "PINNED"
    )
}

fn text(row: &Row) -> String {
    let digest = row.digest.strip_prefix("sha256:").unwrap_or(&row.digest);
    let digest = digest.get(..12).unwrap_or(digest);
    let pinned = if row.pinned { "yes" } else { "" };
    let images = if row.images.is_empty() {
        "-".to_owned()
    } else {
        row.images.join(" ")
    };
    format!(
        "{:<20}{:>10}  {:<10}{:<8}{:<7}{images}",
        digest,
        size(row.bytes),
        row.state,
        row.users,
        pinned
    )
}

fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let (mut tenths, mut unit) = (bytes.saturating_mul(10) / 1024, 0);
    while tenths >= 10_240 && unit + 1 < UNITS.len() {
        tenths /= 1024;
        unit += 1;
    }
    let name = UNITS.get(unit).unwrap_or(&"");
    format!("{}.{}{name}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        for (bytes, text) in [
            (0, "0.0KiB"),
            (1536, "1.5KiB"),
            (10 << 20, "10.0MiB"),
            (3 << 30, "3.0GiB"),
            (5 << 50, "5120.0TiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn columns_line_up() {
        let row = Row {
            digest: format!("sha256:{}", "a".repeat(64)),
            bytes: 1 << 20,
            state: "complete".to_owned(),
            pinned: true,
            users: 2,
            last_used: 0,
            images: vec!["registry.example/app:1".to_owned()],
        };
        let (header, row) = (header(), text(&row));
        assert_eq!(header.find("IMAGES"), row.find("registry"));
        assert_eq!(header.find("USERS"), row.find('2'));
    }
}
