//! Finding the last lines of a log from its end, across rotated files, reading
//! no more than those lines.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

const BLOCK: u64 = 64 << 10;

/// Where the last `lines` whole lines of `files`, oldest first, begin: index of
/// the file and offset in it. An incomplete last line is not counted.
pub(super) fn start(files: &[File], lines: u64) -> io::Result<(usize, u64)> {
    let mut missing = lines;
    for (index, file) in files.iter().enumerate().rev() {
        match start_in(file, &mut missing)? {
            Some(offset) => return Ok((index, offset)),
            None => continue,
        }
    }
    Ok((0, 0))
}

/// `None` when all lines of the file are wanted and more are missing.
fn start_in(file: &File, missing: &mut u64) -> io::Result<Option<u64>> {
    let mut end = file.metadata()?.len();
    // The newline that ends the last line wanted so far; lines begin behind one.
    let mut newlines_wanted = missing.saturating_add(1);
    let mut block = Vec::new();
    while end > 0 {
        let start = end.saturating_sub(BLOCK);
        block.resize(usize::try_from(end - start).unwrap_or(usize::MAX), 0);
        file.read_exact_at(&mut block, start)?;
        for (position, byte) in block.iter().enumerate().rev() {
            if *byte == b'\n' {
                newlines_wanted -= 1;
                if newlines_wanted == 0 {
                    return Ok(Some(start + position as u64 + 1));
                }
            }
        }
        end = start;
    }
    // Every newline found ends one whole line of this file.
    *missing = newlines_wanted - 1;
    Ok((*missing == 0).then_some(0))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn files(contents: &[&str]) -> Vec<File> {
        let make = |content: &&str| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(content.as_bytes()).unwrap();
            file
        };
        contents.iter().map(make).collect()
    }

    #[test]
    fn counts_back_over_files() {
        let files = files(&["a\nb\n", "", "c\nd\n"]);
        for (lines, expected) in [
            (0, (2, 4)),
            (1, (2, 2)),
            (2, (2, 0)),
            (3, (0, 2)),
            (4, (0, 0)),
            (9, (0, 0)),
        ] {
            assert_eq!(start(&files, lines).unwrap(), expected, "{lines}");
        }
        assert_eq!(start(&[], 3).unwrap(), (0, 0));
    }

    #[test]
    fn an_incomplete_last_line_is_not_counted() {
        let files = files(&["a\nb\nc"]);
        assert_eq!(start(&files, 1).unwrap(), (0, 2));
        assert_eq!(start(&files, 0).unwrap(), (0, 4));
    }

    #[test]
    fn lines_may_be_longer_than_a_block() {
        let long = "x".repeat(3 * BLOCK as usize);
        let files = files(&[&format!("first\n{long}\n")]);
        assert_eq!(start(&files, 1).unwrap(), (0, 6));
        assert_eq!(start(&files, 2).unwrap(), (0, 0));
    }
}
