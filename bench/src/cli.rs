//! The command line.

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::subject::{Subject, subjects};

/// Measures Sandman, and its peers on the same cluster, in turn.
#[derive(Debug, Parser)]
#[command(name = "sandman-bench", version)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) dev: DevArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Which dev cluster to use.
#[derive(Debug, Args)]
pub(crate) struct DevArgs {
    /// Folder of the dev cluster [default: that of `hack/dev`].
    #[arg(long, global = true, env = "SANDMAN_STATE_DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Hosts of the cluster, if none runs and one must be started [default: that of `hack/dev`].
    #[arg(long, global = true)]
    pub(crate) hosts: Option<u8>,
    /// The program that runs the dev cluster.
    #[arg(long, global = true, hide = true,
          default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../hack/dev"))]
    pub(crate) dev: PathBuf,
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create many pods at once: time from create to Ready, and pods a second.
    Burst(BurstArgs),
    /// Run `true` in a running pod again and again: time from request to exit status.
    Exec(ExecArgs),
    /// Hold many pods at once: all Ready, what each costs, and nothing left when they are gone.
    Density(DensityArgs),
    /// Create sandboxes through one host's containerd, and run commands over its API: how long
    /// either takes with few and with many there.
    Host(HostArgs),
    /// Pods that come and go for long: whether the last take longer than the first, and what is
    /// left behind.
    Soak(SoakArgs),
    /// Move bytes through one pod's exec, port-forward and log: MB a second, each byte compared.
    Stream(StreamArgs),
    /// Count requests to the API server: of an idle node, and for the lives of pods.
    ApiCost(ApiCostArgs),
}

/// Arguments of `stream`.
#[derive(Debug, Args)]
pub(crate) struct StreamArgs {
    /// MiB moved each time, but for logs. They are in the pod's memory, twice.
    #[arg(long, default_value = "256", value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub(crate) mib: u64,
    #[command(flatten)]
    pub(crate) comparison: Comparison,
}

/// Arguments of `api-cost`.
#[derive(Debug, Args)]
pub(crate) struct ApiCostArgs {
    /// Pods created, watched until Ready, and removed in each round.
    #[arg(long, default_value = "20")]
    pub(crate) pods: NonZeroUsize,
    /// Seconds of each round in which the nodes have no pods.
    #[arg(long, default_value = "120", value_parser = seconds)]
    pub(crate) idle: Duration,
    /// Seconds in which all pods of a round must be Ready, and again gone.
    #[arg(long, default_value = "600", value_parser = seconds)]
    pub(crate) deadline: Duration,
    #[command(flatten)]
    pub(crate) comparison: Comparison,
}

/// Arguments of `burst`.
#[derive(Debug, Args)]
pub(crate) struct BurstArgs {
    /// Pods created in each round.
    #[arg(long, default_value = "200")]
    pub(crate) pods: NonZeroUsize,
    /// Create requests under way at once.
    #[arg(long, default_value = "100")]
    pub(crate) concurrency: NonZeroUsize,
    /// Seconds in which all pods of a round must be Ready, and again gone.
    #[arg(long, default_value = "600", value_parser = seconds)]
    pub(crate) deadline: Duration,
    #[command(flatten)]
    pub(crate) comparison: Comparison,
}

/// Arguments of `exec`.
#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// Commands run in each round, one after the other.
    #[arg(long, default_value = "200")]
    pub(crate) count: NonZeroUsize,
    #[command(flatten)]
    pub(crate) comparison: Comparison,
}

/// Arguments of `density`.
#[derive(Debug, Args)]
pub(crate) struct DensityArgs {
    /// Pods at once.
    #[arg(long, default_value = "1000")]
    pub(crate) count: NonZeroUsize,
    /// Pods with a memory limit of their own at once, afterwards; 0 for none.
    #[arg(long, default_value = "500")]
    pub(crate) limited: usize,
    /// Pods requested and not yet Ready at once.
    #[arg(long, default_value = "32")]
    pub(crate) window: NonZeroUsize,
    /// Pods picked at random in which a command is run.
    #[arg(long, default_value = "200")]
    pub(crate) execs: usize,
    /// Seconds in which all pods must be Ready, and again gone.
    #[arg(long, default_value = "7200", value_parser = seconds)]
    pub(crate) deadline: Duration,
    /// Peers to measure beside Sandman.
    #[arg(long = "peer", value_enum, value_delimiter = ',')]
    pub(crate) peers: Vec<Subject>,
    /// Pods at once on a peer, which holds fewer.
    #[arg(long, default_value = "100")]
    pub(crate) peer_count: NonZeroUsize,
}

/// Arguments of `host`.
#[derive(Debug, Args)]
pub(crate) struct HostArgs {
    /// Sandboxes there when the first are measured.
    #[arg(long, default_value = "100")]
    pub(crate) few: NonZeroUsize,
    /// Sandboxes there when the last are measured.
    #[arg(long, default_value = "6000")]
    pub(crate) many: NonZeroUsize,
    /// Sandboxes whose creation is measured, at either number.
    #[arg(long, default_value = "200")]
    pub(crate) samples: NonZeroUsize,
    /// Creations a second while they are measured, whether or not earlier ones have ended.
    #[arg(long, default_value = "50")]
    pub(crate) rate: NonZeroU32,
    /// Commands run, one after the other, at either number.
    #[arg(long, default_value = "200")]
    pub(crate) execs: NonZeroUsize,
    /// Containers of containerd's own runc shim measured beside; 0 for none.
    #[arg(long, default_value = "50")]
    pub(crate) peer_count: usize,
    /// Their creations a second.
    #[arg(long, default_value = "2")]
    pub(crate) peer_rate: NonZeroU32,
    /// Seconds in which the few pods that are the model must be Ready, and again gone.
    #[arg(long, default_value = "300", value_parser = seconds)]
    pub(crate) deadline: Duration,
}

/// Arguments of `soak`.
#[derive(Debug, Args)]
pub(crate) struct SoakArgs {
    /// Pods created in all.
    #[arg(long, default_value = "1000")]
    pub(crate) creates: NonZeroUsize,
    /// Pods that are on their way, there, or on their way out at once.
    #[arg(long, default_value = "32")]
    pub(crate) window: NonZeroUsize,
    /// Seconds in which each pod must be Ready, and again gone.
    #[arg(long, default_value = "300", value_parser = seconds)]
    pub(crate) deadline: Duration,
    /// File that progress is kept in: with the same file and cluster, the next run goes on where
    /// this one was stopped.
    #[arg(long)]
    pub(crate) progress: Option<PathBuf>,
}

/// Whom to measure, and how often.
#[derive(Debug, Args)]
pub(crate) struct Comparison {
    /// Peers to measure beside Sandman: `kubelet`, with containerd and runc, and for `burst` also
    /// `null`, the virtual node whose host does no work.
    #[arg(long = "peer", value_enum, value_delimiter = ',')]
    peers: Vec<Subject>,
    /// Measure the peers alone.
    #[arg(long, requires = "peers")]
    peers_only: bool,
    /// Rounds; each subject has its turn in each, and the medians count.
    #[arg(long, default_value = "3")]
    pub(crate) rounds: NonZeroUsize,
}

impl Comparison {
    /// The subjects, each once, Sandman first.
    pub(crate) fn subjects(&self) -> Vec<Subject> {
        subjects(&self.peers, self.peers_only)
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(seconds) => Ok(Duration::from_secs(seconds)),
        Err(error) => Err(format!("not a number of seconds: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    fn burst(line: &str) -> Result<BurstArgs, clap::Error> {
        let words = ["sandman-bench", "burst"]
            .into_iter()
            .chain(line.split_whitespace());
        let Command::Burst(arguments) = Cli::try_parse_from(words)?.command else {
            panic!("not a burst")
        };
        Ok(arguments)
    }

    #[test]
    fn peers_are_a_list() {
        let arguments = burst("--pods 5 --peer null,kubelet").unwrap();
        assert_eq!(
            arguments.comparison.subjects(),
            [Subject::Sandman, Subject::Null, Subject::Kubelet]
        );
        assert!(burst("--peer sandman").is_err());
    }

    #[test]
    fn nothing_is_measured_zero_times() {
        for line in [
            "--pods 0",
            "--rounds 0",
            "--concurrency 0",
            "--deadline 0",
            "--peers-only",
        ] {
            assert!(burst(line).is_err(), "{line}");
        }
    }
}
