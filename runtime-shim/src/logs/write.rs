//! The writing end: cuts output into entries, writes them in batches, rotates.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::sync::Arc;

use jiff::Timestamp;
use tokio::sync::watch;

use super::LogLimits;
use super::entry::{self, MAX_TEXT, Stream};
use super::files::Files;

/// One attempt's open log.
pub(super) struct Writer {
    files: Files,
    limits: LogLimits,
    bell: Arc<watch::Sender<()>>,
    file: File,
    size: u64,
    /// A line without its end, by stream; never longer than an entry.
    unfinished: [Vec<u8>; 2],
    batch: Vec<u8>,
}

impl Writer {
    pub(super) fn open(
        files: Files,
        limits: LogLimits,
        bell: Arc<watch::Sender<()>>,
    ) -> io::Result<Self> {
        let (file, size) = open_current(&files)?;
        let unfinished = [Vec::new(), Vec::new()];
        Ok(Self {
            files,
            limits,
            bell,
            file,
            size,
            unfinished,
            batch: Vec::new(),
        })
    }

    /// Where the output goes now.
    pub(super) fn path(&self) -> std::path::PathBuf {
        self.files.current()
    }

    /// Takes output as it came from one read.
    pub(super) fn output(&mut self, stream: Stream, mut data: &[u8]) -> io::Result<()> {
        let time = entry::format_time(Timestamp::now());
        let unfinished = &mut self.unfinished[stream as usize];
        while !data.is_empty() {
            let room = MAX_TEXT - unfinished.len();
            let newline = data.iter().take(room + 1).position(|byte| *byte == b'\n');
            if let Some(end) = newline {
                unfinished.extend_from_slice(&data[..end]);
                entry::append(&mut self.batch, &time, stream, false, unfinished);
                unfinished.clear();
                data = &data[end + 1..];
            } else if data.len() > room {
                unfinished.extend_from_slice(&data[..room]);
                entry::append(&mut self.batch, &time, stream, true, unfinished);
                unfinished.clear();
                data = &data[room..];
            } else {
                unfinished.extend_from_slice(data);
                data = &[];
            }
        }
        self.flush()
    }

    /// Takes the end of a stream. A last line without newline is written as
    /// partial, as containerd's CRI does, so that readers add none.
    pub(super) fn end(&mut self, stream: Stream) -> io::Result<()> {
        let unfinished = std::mem::take(&mut self.unfinished[stream as usize]);
        if !unfinished.is_empty() {
            let time = entry::format_time(Timestamp::now());
            entry::append(&mut self.batch, &time, stream, true, &unfinished);
        }
        self.flush()
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.batch.is_empty() {
            return Ok(());
        }
        // A batch is at most one read long; it is not split over files.
        if self.size > 0 && self.size + self.batch.len() as u64 > self.limits.max_bytes {
            self.rotate()?;
        }
        let written = self.file.write_all(&self.batch);
        self.size += self.batch.len() as u64;
        self.batch.clear();
        if written.is_err() {
            // How much of it arrived is unknown; what follows begins a new line.
            (self.file, self.size) = open_current(&self.files)?;
        }
        self.bell.send_replace(());
        written
    }

    fn rotate(&mut self) -> io::Result<()> {
        let keep = self.limits.max_files.max(2) as usize - 1;
        self.files.rotate(keep)?;
        (self.file, self.size) = open_current(&self.files)?;
        Ok(())
    }
}

/// Opens the current file for appending, behind its last whole line: a crash
/// or a full disk may have left a torn one, which must not swallow the next.
fn open_current(files: &Files) -> io::Result<(File, u64)> {
    let mut file = OpenOptions::new()
        .create(true)
        .read(true)
        .append(true)
        .open(files.current())?;
    let mut size = file.metadata()?.len();
    if size > 0 {
        let mut last = [0];
        file.seek(SeekFrom::Start(size - 1))?;
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            file.write_all(b"\n")?;
            size += 1;
        }
    }
    Ok((file, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(folder: &std::path::Path, max_bytes: u64) -> Writer {
        let files = Files::new(folder.to_owned(), 0);
        let limits = LogLimits {
            max_bytes,
            max_files: 3,
        };
        Writer::open(files, limits, Arc::new(watch::Sender::new(()))).unwrap()
    }

    /// Tag and text of each entry, over all files.
    fn entries(writer: &Writer) -> Vec<(bool, Vec<u8>)> {
        let mut all = Vec::new();
        for mut file in writer.files.open_all().unwrap() {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).unwrap();
            for line in bytes.split(|byte| *byte == b'\n') {
                all.extend(entry::parse(line).map(|entry| (entry.partial, entry.text.to_vec())));
            }
        }
        all
    }

    #[test]
    fn cuts_lines_wherever_reads_end() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = writer(folder.path(), 1 << 20);
        for data in [&b"one\ntw"[..], b"o", b"\n\nthree"] {
            writer.output(Stream::Stdout, data).unwrap();
        }
        writer.end(Stream::Stdout).unwrap();
        let want = [(false, "one"), (false, "two"), (false, ""), (true, "three")]
            .map(|(partial, text)| (partial, text.as_bytes().to_vec()));
        assert_eq!(entries(&writer), want);
    }

    #[test]
    fn cuts_long_lines_into_partial_entries() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = writer(folder.path(), 1 << 20);
        let mut line = vec![b'x'; 2 * MAX_TEXT];
        line.extend_from_slice(b"\nshort\n");
        for chunk in line.chunks(5000) {
            writer.output(Stream::Stdout, chunk).unwrap();
        }
        let shape: Vec<_> = entries(&writer)
            .into_iter()
            .map(|(partial, text)| (partial, text.len()))
            .collect();
        assert_eq!(shape, [(true, MAX_TEXT), (false, MAX_TEXT), (false, 5)]);
    }

    #[test]
    fn mends_a_torn_last_line() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::new(folder.path().to_owned(), 0);
        std::fs::write(files.current(), "2026-11-29T12:00:00Z stdout F to").unwrap();
        let mut writer = writer(folder.path(), 1 << 20);
        writer.output(Stream::Stdout, b"next\n").unwrap();
        assert_eq!(
            entries(&writer),
            [(false, b"to".to_vec()), (false, b"next".to_vec())]
        );
    }

    #[test]
    fn rotates_between_entries_and_bounds_the_total() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = writer(folder.path(), 200);
        for number in 0..100 {
            writer
                .output(Stream::Stderr, format!("line {number}\n").as_bytes())
                .unwrap();
        }
        let entries = entries(&writer);
        assert_eq!(entries.last().unwrap().1, b"line 99");
        assert!(
            entries.len() >= 8 && entries.len() <= 15,
            "{}",
            entries.len()
        );
        assert_eq!(writer.files.open_all().unwrap().len(), 3);
    }
}
