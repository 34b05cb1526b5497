//! What is sent: bytes that say where they belong, so that nothing lost, doubled or swapped goes
//! unseen. Pure.

use anyhow::bail;

/// 2^20 bytes.
pub(super) const MIB: u64 = 1 << 20;
/// Where the pod keeps what it was sent.
pub(super) const DIR: &str = "/data";
/// Lines of the log. A kubelet shows what it has not rotated, 10 MiB with the time of each line.
const LINES: usize = 50_000;
/// Digits of a line.
const DIGITS: usize = 127;

/// A MiB: its number, then words that depend on it and their place.
pub(super) fn block(number: u64) -> Vec<u8> {
    let mut block = Vec::with_capacity(1 << 20);
    let mut word = number;
    while block.len() < 1 << 20 {
        block.extend_from_slice(&word.to_le_bytes());
        // A full cycle of 64-bit words (Knuth's MMIX generator).
        word = word
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
    }
    block
}

/// Compares a stream, piece by piece, with blocks from number 0.
#[derive(Debug)]
pub(super) struct Comparison {
    blocks: u64,
    number: u64,
    block: Vec<u8>,
    /// Bytes of the block that have been seen.
    seen: usize,
}

impl Comparison {
    pub(super) fn new(blocks: u64) -> Self {
        Self {
            blocks,
            number: 0,
            block: block(0),
            seen: 0,
        }
    }

    /// Takes the next bytes.
    pub(super) fn take(&mut self, mut bytes: &[u8]) -> anyhow::Result<()> {
        while !bytes.is_empty() {
            if self.is_complete() {
                bail!("{} bytes more than were sent", bytes.len());
            }
            let expected = &self.block[self.seen..];
            let (now, later) = bytes.split_at(bytes.len().min(expected.len()));
            if now != &expected[..now.len()] {
                bail!(
                    "other bytes than were sent, near {}",
                    self.number * MIB + self.seen as u64
                );
            }
            self.seen += now.len();
            bytes = later;
            if self.seen == self.block.len() {
                self.number += 1;
                self.block = block(self.number);
                self.seen = 0;
            }
        }
        Ok(())
    }

    /// Whether all has come.
    pub(super) fn is_complete(&self) -> bool {
        self.number >= self.blocks
    }

    /// What to say of a stream that ended here.
    pub(super) fn end(&self) -> anyhow::Result<()> {
        if !self.is_complete() {
            bail!(
                "ended after {} of {} bytes",
                self.number * MIB + self.seen as u64,
                self.blocks * MIB
            );
        }
        Ok(())
    }
}

/// Writes [`log_text`], then sleeps.
pub(super) fn log_script() -> String {
    format!(
        "awk 'BEGIN {{ for (i = 0; i < {LINES}; i++) printf \"%0{DIGITS}d\\n\", i }}'; \
         exec sleep 2147483647"
    )
}

/// What the log must say.
pub(super) fn log_text() -> String {
    (0..LINES)
        .map(|line| format!("{line:0DIGITS$}\n"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent() -> Vec<u8> {
        [block(0), block(1)].concat()
    }

    #[test]
    fn what_was_sent_is_what_came_in_pieces_of_any_size() {
        for size in [1 << 20, 65_537, 1 << 21] {
            let mut comparison = Comparison::new(2);
            for piece in sent().chunks(size) {
                comparison.take(piece).unwrap();
            }
            comparison.end().unwrap();
        }
    }

    #[test]
    fn a_stream_that_ends_early_or_late_is_told() {
        let mut comparison = Comparison::new(2);
        comparison.take(&sent()[..MIB as usize + 5]).unwrap();
        let error = comparison.end().unwrap_err().to_string();
        assert!(error.contains("1048581 of 2097152"), "{error}");
        comparison.take(&sent()[MIB as usize + 5..]).unwrap();
        assert!(comparison.take(b"x").is_err());
    }

    #[test]
    fn bytes_that_changed_place_are_told() {
        let swapped = [block(1), block(0)].concat();
        assert!(Comparison::new(2).take(&swapped).is_err());
        let mut flipped = sent();
        flipped[1_500_000] ^= 1;
        assert!(Comparison::new(2).take(&flipped).is_err());
    }

    #[test]
    fn the_log_stays_below_the_size_at_which_nodes_rotate() {
        // Each line has a time, a stream and a tag before it: "2026-01-02T03:04:05.123456789Z ...".
        let prefix = "2026-01-02T03:04:05.123456789+00:00 stdout F ".len();
        assert!(log_text().len() + LINES * prefix < 10 << 20);
    }
}
