//! `sandman-fuzz [TARGET...]`: looks for inputs that break something.

use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Parser;
use sandman_fuzz::engine::{corpus_of, keep, read_corpus, search};
use sandman_fuzz::{TARGETS, Target};

/// Feeds mutations of the corpus to each target for a while. What breaks one is added to its corpus,
/// where an ordinary test finds it again.
#[derive(Debug, Parser)]
#[command(name = "sandman-fuzz", version)]
struct Args {
    /// Targets: spdy, websocket, logs, pod. All of them without any.
    targets: Vec<String>,
    /// Time for each target.
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// Another number makes other inputs.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let named = |name: &String| -> anyhow::Result<Target> {
        let found = TARGETS.iter().find(|target| target.name == name);
        found
            .copied()
            .with_context(|| format!("no target {name:?}"))
    };
    let targets = match args.targets.as_slice() {
        [] => TARGETS.to_vec(),
        names => names.iter().map(named).collect::<Result<_, _>>()?,
    };
    let mut broken = Vec::new();
    let mut out = std::io::stdout();
    for target in targets {
        let folder = corpus_of(&target);
        let corpus = read_corpus(&folder).with_context(|| format!("read {}", folder.display()))?;
        let corpus: Vec<_> = corpus.into_iter().map(|(_, bytes)| bytes).collect();
        let limit = Duration::from_secs(args.seconds);
        let found = search(&target, corpus, args.seed, limit);
        writeln!(
            out,
            "{}: {} runs, {} ways",
            target.name, found.runs, found.ways
        )?;
        if let Some((input, text)) = found.finding {
            let path = keep(&folder, &input)?;
            writeln!(out, "{}: {text}\n  kept as {}", target.name, path.display())?;
            broken.push(target.name);
        }
    }
    if !broken.is_empty() {
        bail!("findings in: {}", broken.join(", "));
    }
    Ok(())
}
