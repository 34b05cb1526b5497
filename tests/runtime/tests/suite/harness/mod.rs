//! Runs cases on both runtimes and compares.

mod case;
mod host;
mod parts;
mod session;
mod spec;

use std::time::Duration;

pub(crate) use case::{Case, Lines, run, scenario};
pub(crate) use parts::Part;
pub(crate) use session::Session;
pub(crate) use spec::base;

use host::Host;

/// Ours, and the one it is measured by.
const RUNTIMES: [&str; 2] = ["io.containerd.sandman.v1", "io.containerd.runc.v2"];

/// How long one case may take on one runtime.
const DEADLINE: Duration = Duration::from_secs(60);

/// Runs every case on a host of its own and fails with all differences.
pub(crate) fn compare(cases: Vec<Case>) {
    let only = std::env::var("SANDMAN_CASE").ok();
    host::isolate();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let mut problems = Vec::new();
    runtime.block_on(async {
        let host = Host::start().await;
        for case in &cases {
            if only.as_deref().is_some_and(|only| only != case.name) {
                continue;
            }
            if let Some(problem) = one(&host, case).await {
                eprintln!("{}: DIFFERS", case.name);
                problems.push(problem);
            } else {
                eprintln!("{}: same", case.name);
            }
        }
        problems.extend(host.leftovers());
    });
    assert!(
        problems.is_empty(),
        "{} problems:\n\n{}",
        problems.len(),
        problems.join("\n\n")
    );
}

async fn one(host: &Host, case: &Case) -> Option<String> {
    let mut seen = Vec::new();
    for runtime in RUNTIMES {
        let session = Session::new(host, runtime, case.name);
        let lines = match tokio::time::timeout(DEADLINE, (case.body)(session.clone())).await {
            Ok(lines) => lines,
            Err(_) => vec!["not done in time".to_owned()],
        };
        session.clean().await;
        seen.push(lines);
    }
    let [ours, theirs] = &seen[..] else {
        unreachable!("two runtimes")
    };
    let ours_text = ours.join("\n");
    // A case in which both fail alike proves nothing.
    let missing: Vec<_> = case
        .must
        .iter()
        .filter(|text| !theirs.join("\n").contains(*text))
        .collect();
    if !missing.is_empty() {
        let theirs = theirs.join("\n");
        return Some(format!(
            "## {}\nrunc does not show {missing:?}:\n{theirs}",
            case.name
        ));
    }
    match case.differs {
        None if ours == theirs => None,
        // Named with its reason in the case; what must show has to all the same.
        Some(_) if case.must.iter().all(|text| ours_text.contains(text)) => None,
        _ => Some(format!(
            "## {}\n-- ours --\n{ours_text}\n-- runc --\n{}",
            case.name,
            theirs.join("\n")
        )),
    }
}
