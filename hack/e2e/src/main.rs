//! Judges a node of the dev cluster by Kubernetes' own end-to-end tests: builds them, makes the
//! images that they need, runs a selection, and compares the outcome with what is expected.
#![allow(
    clippy::print_stdout,
    reason = "a command line program speaks on standard output"
)]

mod cli;
mod dev;
mod expected;
mod images;
mod node;
mod progress;
mod report;
mod run;
mod selection;
mod suite;
mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

use self::cli::Cli;
use self::dev::{Dev, Variables};
use self::expected::Expected;
use self::node::Node;
use self::progress::Progress;
use self::run::{Outcome, Run};
use self::suite::Suite;

/// Tests that do not pass, relative to the checkout.
const EXPECTED: &str = "tests/conformance/expected.txt";

#[tokio::main]
async fn main() -> ExitCode {
    match run(&Cli::parse()).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all is as expected.
async fn run(cli: &Cli) -> anyhow::Result<bool> {
    let progress = Progress::start();
    let repo = cli.repo.canonicalize()?;
    let expected = repo.join(EXPECTED);
    let expected = fs::read_to_string(&expected)
        .with_context(|| format!("cannot read {}", expected.display()))
        .and_then(|text| Expected::parse(&text))
        .context(EXPECTED)?;
    let suite = suite::ensure(&repo, progress)?;
    let dev = Dev::new(&repo, cli.state_dir.as_deref());
    let own = !cli.no_build && !dev.exists().await?;
    if !cli.no_build {
        dev.run(&["up"]).await?;
    }
    let judged = Judge {
        cli,
        dev: &dev,
        suite: &suite,
        progress,
    }
    .judge(&expected)
    .await;
    let ended = match own && !cli.keep {
        true => dev.run(&["down"]).await.map(drop),
        false => Ok(()),
    };
    let (as_expected, counts) = judged?;
    ended?;
    println!("{counts}");
    Ok(as_expected)
}

/// The judgement of one cluster.
struct Judge<'a> {
    cli: &'a Cli,
    dev: &'a Dev,
    suite: &'a Suite,
    progress: Progress,
}

impl Judge<'_> {
    /// Prints tables and differences; gives the verdict and the closing line.
    async fn judge(&self, expected: &Expected) -> anyhow::Result<(bool, String)> {
        let variables = self.dev.variables().await?;
        images::ensure(&variables, self.suite, self.progress).await?;
        let (ours, kubelet) = (Node::virtual_node(&variables)?, Node::kubelet());
        let outcome = self.run(&variables, &ours, kubelet.taint_key()).await?;
        print!("{}", table::of(ours.label, &outcome.report, outcome.wall));
        if self.cli.peer.is_some() {
            let peer = self.run(&variables, &kubelet, ours.taint_key()).await?;
            print!("{}", table::of(kubelet.label, &peer.report, peer.wall));
            let (only_ours, only_theirs) = table::beside(&outcome.report, &peer.report);
            for (node, names) in [(ours.label, only_ours), (kubelet.label, only_theirs)] {
                println!("{} passed on {node} only", names.len());
                for name in names {
                    println!("  {name}");
                }
            }
        }
        for spec in outcome.report.flaky() {
            println!("flaky: {} ({} attempts)", spec.name, spec.attempts);
        }
        let difference = expected.compare(&outcome.report);
        if difference.is_empty() {
            println!("all as {EXPECTED} has it");
        } else {
            print!("{difference}");
        }
        Ok((difference.is_empty(), table::counts(&outcome.report)))
    }

    /// Runs the tests on one node, and leaves it as it was.
    async fn run(
        &self,
        variables: &Variables,
        node: &Node,
        other_taints: &str,
    ) -> anyhow::Result<Outcome> {
        let filter = selection::filter(self.cli.mode())?;
        let out = self.reports(variables, node)?;
        let repositories = images::repositories(variables)?;
        let run = Run {
            suite: self.suite,
            filter: &filter,
            procs: self.cli.procs.get(),
            attempts: self.cli.attempts.get(),
            kubeconfig: variables.get("KUBECONFIG")?,
            kube_dev: variables.get("SANDMAN_KUBE_DEV")?,
            repositories: &repositories,
            other_taints,
            out: &out,
            progress: self.progress,
        };
        self.progress.say(format_args!(
            "testing {}; reports in {}",
            node.label,
            out.display()
        ));
        let outcome = match node.open(self.dev).await {
            Ok(()) => run.run().await,
            Err(error) => Err(error),
        };
        // What went wrong first is what matters, but the node is closed in any case.
        let closed = self.clean_up(node).await;
        let outcome = outcome?;
        closed?;
        Ok(outcome)
    }

    async fn clean_up(&self, node: &Node) -> anyhow::Result<()> {
        if !self.cli.keep {
            // Left by a run that was stopped, or by tests that failed in the middle. Nobody waits
            // for their end, and no other run shares the cluster.
            let delete = [
                "kubectl",
                "delete",
                "namespace",
                "-l",
                "e2e-run",
                "--wait=false",
            ];
            self.dev.run(&delete).await?;
        }
        node.close(self.dev).await
    }

    fn reports(&self, variables: &Variables, node: &Node) -> anyhow::Result<PathBuf> {
        let state = Path::new(variables.get("SANDMAN_STATE_DIR")?);
        Ok(state.join("conformance").join(node.label))
    }
}
