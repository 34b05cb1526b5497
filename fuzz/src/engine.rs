//! Makes new inputs out of known ones, keeps those that lead somewhere new, and stops at the first
//! that breaks something. No instrumentation, so it runs on a stable compiler; the numbers that
//! targets answer with take its place.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::Target;

/// Longest input, in bytes: enough for some frames or a whole pod.
const MAX_LENGTH: usize = 16 * 1024;
/// Most inputs that are kept.
const MAX_POOL: usize = 10_000;
/// One run that takes longer is a finding.
const TOO_SLOW: Duration = Duration::from_secs(5);

/// What came of a search.
#[derive(Debug)]
pub struct Found {
    /// Inputs that were tried.
    pub runs: u64,
    /// Inputs that led somewhere new.
    pub ways: usize,
    /// An input that broke something, and what it said.
    pub finding: Option<(Vec<u8>, String)>,
}

/// The folder of a target's corpus.
#[must_use]
pub fn corpus_of(target: &Target) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(target.name)
}

/// All inputs of a corpus, in a fixed order.
///
/// # Errors
/// The folder or a file is unreadable.
pub fn read_corpus(folder: &Path) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut inputs = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let bytes = fs::read(&path)?;
        inputs.push((path, bytes));
    }
    inputs.sort();
    Ok(inputs)
}

/// Writes an input down under the digest of its contents.
///
/// # Errors
/// It cannot be written.
pub fn keep(folder: &Path, input: &[u8]) -> io::Result<PathBuf> {
    let name = &hex::encode(Sha256::digest(input))[..16];
    let path = folder.join(name);
    fs::write(&path, input)?;
    Ok(path)
}

/// Runs a target once.
///
/// # Errors
/// What it panicked with, or that it took too long.
pub fn run(target: &Target, input: &[u8]) -> Result<u64, String> {
    let begin = Instant::now();
    let result = panic::catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    let way = result.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        text.unwrap_or_else(|| "panicked".to_owned())
    })?;
    if begin.elapsed() > TOO_SLOW {
        return Err(format!("took {:?}", begin.elapsed()));
    }
    Ok(way)
}

/// Looks for findings for so long.
#[must_use]
pub fn search(target: &Target, corpus: Vec<Vec<u8>>, seed: u64, limit: Duration) -> Found {
    let end = Instant::now() + limit;
    let mut random = Random(seed | 1);
    let mut ways = HashSet::new();
    let mut pool: Vec<Vec<u8>> = Vec::new();
    let mut runs = 0;
    let mut corpus = corpus.into_iter();
    while Instant::now() < end {
        let (input, known) = match corpus.next() {
            Some(input) => (input, true),
            None => (mutate(&pool, target.words, &mut random), false),
        };
        runs += 1;
        match run(target, &input) {
            Ok(way) => {
                if (ways.insert(way) || known) && pool.len() < MAX_POOL {
                    pool.push(input);
                }
            }
            Err(text) => {
                let finding = Some((input, text));
                return Found {
                    runs,
                    ways: ways.len(),
                    finding,
                };
            }
        }
    }
    Found {
        runs,
        ways: ways.len(),
        finding: None,
    }
}

/// xorshift64*: a seed gives the same inputs again.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Below `bound`, or 0.
    fn below(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).unwrap_or(u64::MAX).max(1);
        usize::try_from((self.next() >> 16) % bound).unwrap_or(0)
    }

    fn byte(&mut self) -> u8 {
        self.next().to_be_bytes()[0]
    }
}

fn mutate(pool: &[Vec<u8>], words: &[&[u8]], random: &mut Random) -> Vec<u8> {
    let pick = |random: &mut Random| pool.get(random.below(pool.len())).cloned();
    let mut input = pick(random).unwrap_or_default();
    for _ in 0..=random.below(4) {
        let at = random.below(input.len() + 1);
        let end = (at + random.below(32)).min(input.len());
        match random.below(8) {
            0 => {
                if let Some(byte) = input.get_mut(at) {
                    *byte ^= 1 << random.below(8);
                }
            }
            1 => {
                if let Some(byte) = input.get_mut(at) {
                    *byte = random.byte();
                }
            }
            2 => {
                input.drain(at..end);
            }
            3 => {
                let copy = input[at..end].to_vec();
                let to = random.below(input.len() + 1);
                input.splice(to..to, copy);
            }
            4 => {
                let byte = random.byte();
                input.insert(at, byte);
            }
            5 => {
                // The end of another one.
                let other = pick(random).unwrap_or_default();
                let from = random.below(other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            6 => {
                if let Some(word) = words.get(random.below(words.len())) {
                    input.splice(at..at, word.iter().copied());
                }
            }
            _ => {
                if let Some(word) = words.get(random.below(words.len())) {
                    let end = (at + word.len()).min(input.len());
                    input.splice(at..end, word.iter().copied());
                }
            }
        }
    }
    input.truncate(MAX_LENGTH);
    input
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fragile(input: &[u8]) -> u64 {
        assert!(!input.windows(2).any(|pair| pair == b"xy"), "found it");
        u64::from(input.contains(&b'x'))
    }

    #[test]
    fn what_breaks_is_found_and_told() {
        let target = Target {
            name: "fragile",
            run: fragile,
            words: &[b"x", b"y"],
        };
        let found = search(&target, vec![b"seed".to_vec()], 1, Duration::from_secs(60));
        let (input, text) = found.finding.unwrap();
        assert!(input.windows(2).any(|pair| pair == b"xy"));
        assert_eq!(text, "found it");
        assert!(found.ways >= 1 && found.runs > 1);
    }
}
