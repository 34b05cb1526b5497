//! The same OCI bundle by `io.containerd.sandman.v1` and by `io.containerd.runc.v2`, through a real
//! containerd: what the process inside sees and what containerd reports must be the same, but for
//! the differences that a case names with their reason.
//!
//! Needs root, containerd, runc and busybox-static:
//!
//! ```text
//! cargo build -p sandman-containerd-shim && cargo test -p sandman-runtime-tests -- --ignored
//! ```
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cases;
mod harness;

use harness::compare;

macro_rules! groups {
    ($($group:ident),* $(,)?) => {
        $(
            #[test]
            #[ignore = "needs root, containerd, runc and the built shim"]
            fn $group() {
                compare(cases::$group::cases());
            }
        )*

        /// Cases of all groups.
        fn all() -> Vec<harness::Case> {
            let mut cases = Vec::new();
            $(cases.extend(cases::$group::cases());)*
            cases
        }
    };
}

groups!(
    identity, filesystem, kernel, resources, lifecycle, streams, execs, errors, survival
);

#[test]
fn names_are_unique_and_cases_are_many() {
    let cases = all();
    let names: std::collections::BTreeSet<_> = cases.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), cases.len());
    assert!(cases.len() >= 80, "{} cases", cases.len());
}
