//! The few file tests that `kubectl cp` asks for.
//!
//! Before it copies into a container it runs `test -d DEST` there, and without
//! an answer it takes an existing directory for a file name.

use std::ffi::OsString;
use std::fs;

use crate::complain;

/// `test`'s exit code for an expression that it does not understand.
const EXIT_SYNTAX: u8 = 2;

/// Runs `test OPERATOR PATH`: 0 true, 1 false, 2 not understood.
pub(crate) fn run(args: &[OsString]) -> u8 {
    let [operator, path] = args else {
        complain("test: expected an operator (-d, -e or -f) and a path");
        return EXIT_SYNTAX;
    };
    // Like test(1), symbolic links are followed.
    let metadata = fs::metadata(path);
    let holds = match operator.to_str() {
        Some("-d") => metadata.is_ok_and(|m| m.is_dir()),
        Some("-e") => metadata.is_ok(),
        Some("-f") => metadata.is_ok_and(|m| m.is_file()),
        _ => {
            complain(format_args!(
                "test: unknown operator {operator:?}: use -d, -e or -f"
            ));
            return EXIT_SYNTAX;
        }
    };
    u8::from(!holds)
}

#[cfg(test)]
mod tests {
    use super::run;

    #[test]
    fn answers_as_test_does() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        std::fs::write(&file, "").unwrap();
        let ask = |operator: &str, path: &std::path::Path| run(&[operator.into(), path.into()]);

        assert_eq!(ask("-d", dir.path()), 0);
        assert_eq!(ask("-d", &file), 1);
        assert_eq!(ask("-f", &file), 0);
        assert_eq!(ask("-e", &dir.path().join("absent")), 1);
        assert_eq!(ask("-z", &file), 2);
        assert_eq!(run(&["-d".into()]), 2);
    }
}
