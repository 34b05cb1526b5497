//! The command line of `hack/dev`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use nix::sys::signal::Signal;

use crate::net::Member;
use crate::net::forward::Forward;
use crate::settings::{ContainerdVersion, DefaultRuntime, Layers};
use crate::supervise::Launch;

/// Runs a Sandman dev cluster on this machine: a real control plane, registry, virtual node and
/// hosts, each in a network namespace of its own.
#[derive(Debug, Parser)]
#[command(name = "hack/dev", version)]
pub(crate) struct Cli {
    /// Folder of the cluster; each one is a cluster of its own [default: .dev in the checkout].
    #[arg(long, global = true, env = "SANDMAN_STATE_DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// The checkout to build from.
    #[arg(long, global = true, env = "SANDMAN_REPO", hide = true,
          default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))]
    pub(crate) repo: PathBuf,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// How to bring a cluster up.
#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Number of hosts; 0 starts the control plane and the registries only [default: as before,
    /// or 1].
    #[arg(long)]
    pub(crate) hosts: Option<u8>,
    /// Whether the node declares that it takes WebSockets; if not, the API server speaks SPDY to
    /// it [default: as before, or true].
    #[arg(long)]
    pub(crate) websockets: Option<bool>,
    /// The containerd of the hosts; 1.6 is Debian's [default: as before, or 2.4].
    #[arg(long)]
    pub(crate) containerd: Option<ContainerdVersion>,
    /// Who keeps the layers of images: the layer store, or containerd's snapshotter [default: as
    /// before, or containerd].
    #[arg(long)]
    pub(crate) layers: Option<Layers>,
    /// The runtime of pods that ask for none [default: as before, or sandman].
    #[arg(long)]
    pub(crate) runtime: Option<DefaultRuntime>,
    /// Use what was built last.
    #[arg(long)]
    pub(crate) no_build: bool,
    /// Cargo profile of the workspace's binaries.
    #[arg(long, env = "SANDMAN_PROFILE", default_value = "release")]
    pub(crate) profile: String,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start what does not run; returns when the node is Ready.
    Up(UpArgs),
    /// `up`, then a sandbox, exec, cp and logs with kubectl.
    Demo(UpArgs),
    /// End the cluster and check that nothing of it remains.
    Down {
        /// Remove the registry's store and the logs too.
        #[arg(long)]
        purge: bool,
    },
    /// Show components and nodes; fails unless all is well.
    Status {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Run kubectl as administrator of the cluster.
    #[command(disable_help_flag = true)]
    Kubectl {
        /// Arguments of kubectl.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Print the log of a component.
    Logs {
        /// As `status` names it.
        component: String,
        /// Go on as it grows.
        #[arg(short, long)]
        follow: bool,
    },
    /// Print variables for scripts: `eval "$(hack/dev env)"`.
    Env {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Start one component.
    Start {
        /// As `status` names it, vnode-null, or kubelet-peer: a node to compare with.
        component: String,
    },
    /// End one component.
    Stop {
        /// As for `start`.
        component: String,
    },
    /// End and start one component.
    Restart {
        /// As for `start`.
        component: String,
    },
    /// Send a signal to a component; after KILL, wait until it is gone.
    Kill {
        /// As `status` names it.
        component: String,
        /// Name of the signal.
        #[arg(long, default_value = "KILL", value_parser = parse_signal)]
        signal: Signal,
    },
    /// Run a command inside a network namespace of the cluster.
    RunIn {
        /// control, vnode, registry, host-0, ...
        namespace: Member,
        /// The command.
        #[arg(last = true, required = true)]
        argv: Vec<OsString>,
    },
    /// Serve loopback ports.
    #[command(hide = true)]
    Forward {
        /// LISTEN=NAMESPACE_FILE=TO
        #[arg(required = true)]
        forwards: Vec<Forward>,
    },
    /// Become a component.
    #[command(hide = true)]
    Launch(Launch),
}

fn parse_signal(name: &str) -> Result<Signal, String> {
    let name = name.trim_start_matches("SIG").to_ascii_uppercase();
    format!("SIG{name}")
        .parse()
        .map_err(|_| "not the name of a signal, such as KILL".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn kubectl_gets_all_that_follows() {
        let cli = Cli::parse_from(["dev", "kubectl", "get", "pod", "-A", "--help"]);
        let Command::Kubectl { arguments } = cli.command else {
            panic!("{:?}", cli.command)
        };
        assert_eq!(arguments, ["get", "pod", "-A", "--help"]);
    }

    #[test]
    fn signals_are_named_as_for_kill() {
        assert_eq!(parse_signal("KILL"), Ok(Signal::SIGKILL));
        assert_eq!(parse_signal("sigstop").map_err(drop), Err(()));
        assert_eq!(parse_signal("SIGSTOP"), Ok(Signal::SIGSTOP));
        assert!(parse_signal("9").is_err());
    }
}
