//! Arguments of `sandman-certs` and their mapping to the library. Reports go to the writer given, one line a file.

use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use sandman_certs::approver::{self, ExpectedNode};
use sandman_certs::{
    Action, Authority, DevPki, DevPkiSpec, FleetAuthority, Member, PairPaths, RenewOptions, Report,
    Role, renew,
};
use time::OffsetDateTime;

/// Creates and renews the certificates of a Sandman fleet.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Cli {
    /// Print one JSON object a file instead of text.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Create the authority of a new fleet: DIR/ca.crt and DIR/ca.key.
    FleetCa {
        /// Where to put it.
        #[arg(long)]
        dir: PathBuf,
        /// Name of the fleet (DNS-1123).
        #[arg(long)]
        name: String,
        /// Life in days.
        #[arg(long, default_value_t = 3650, value_parser = days())]
        days: u16,
    },
    /// Issue the identity of a virtual node: OUT/tls.crt, OUT/tls.key, OUT/ca.crt.
    Vnode(MemberArgs),
    /// Issue the identity of a host: OUT/tls.crt, OUT/tls.key, OUT/ca.crt.
    Host(MemberArgs),
    /// Issue the identity of a host's layer store: OUT/tls.crt, OUT/tls.key, OUT/ca.crt.
    Peer(MemberArgs),
    /// Re-issue certificates that have used up 70 % of their life, with the same subject, names and length of life.
    Renew {
        /// Directory of the authority that issued them.
        #[arg(long)]
        ca: PathBuf,
        /// Re-issue those that are not due, too.
        #[arg(long)]
        force: bool,
        /// Make new keys. A process that loads a pair at the very moment of the swap may find a key and a certificate that differ and has to try again.
        #[arg(long)]
        new_key: bool,
        /// Directories with tls.crt and tls.key, or NAME.crt files with their NAME.key beside them.
        #[arg(required = true)]
        paths: Vec<PathBuf>,
    },
    /// Create the whole PKI of a development cluster, or verify the one that is there.
    DevPki(DevPkiArgs),
    /// Watch for serving-certificate requests of the given nodes and approve those that name only the node's own addresses.
    Approve {
        /// How to reach the API server; without it the pod's service account is used.
        #[arg(long)]
        kubeconfig: Option<PathBuf>,
        /// NAME=ADDRESS[,ADDRESS...] with IP addresses and DNS names; may be repeated.
        #[arg(long, required = true)]
        node: Vec<ExpectedNode>,
    },
}

#[derive(Debug, Args)]
struct MemberArgs {
    /// Directory of the fleet authority.
    #[arg(long)]
    ca: PathBuf,
    /// Name in the fleet (DNS-1123).
    #[arg(long)]
    name: String,
    /// Further DNS name; may be repeated.
    #[arg(long)]
    dns: Vec<String>,
    /// Address; may be repeated. Hosts and peers need at least one.
    #[arg(long)]
    ip: Vec<IpAddr>,
    /// Life in days.
    #[arg(long, default_value_t = 365, value_parser = days())]
    days: u16,
    /// Where to put the files.
    #[arg(long)]
    out: PathBuf,
}

#[derive(Debug, Args)]
struct DevPkiArgs {
    /// Where to put it.
    #[arg(long)]
    dir: PathBuf,
    /// URL of the API server in the kubeconfigs: https://ADDRESS:PORT.
    #[arg(long)]
    server: String,
    /// Address of the API server; may be repeated.
    #[arg(long, required = true)]
    apiserver_ip: Vec<IpAddr>,
    /// DNS name of the API server; may be repeated.
    #[arg(long)]
    apiserver_dns: Vec<String>,
    /// Address of the kubernetes Service.
    #[arg(long, default_value = "10.96.0.1")]
    service_ip: IpAddr,
    /// Address of etcd besides loopback; may be repeated.
    #[arg(long)]
    etcd_ip: Vec<IpAddr>,
    /// Kubernetes node that gets a client certificate and a kubeconfig; may be repeated.
    #[arg(long)]
    node: Vec<String>,
    /// Life in days.
    #[arg(long, default_value_t = 365, value_parser = days())]
    days: u16,
}

fn days() -> clap::builder::RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(1..=7300)
}

/// Executes one command.
pub(crate) fn run(cli: Cli, out: &mut impl Write) -> Result<()> {
    match cli.command {
        Command::FleetCa { dir, name, days } => {
            let fleet = FleetAuthority::create(&dir, &name, days)?;
            print(&fleet.reports(Action::Created), cli.json, out)
        }
        Command::Vnode(args) => print(&issue(Role::Vnode, args)?, cli.json, out),
        Command::Host(args) => print(&issue(Role::Host, args)?, cli.json, out),
        Command::Peer(args) => print(&issue(Role::Peer, args)?, cli.json, out),
        Command::Renew {
            ca,
            force,
            new_key,
            paths,
        } => {
            let now = OffsetDateTime::now_utc();
            let authority = Authority::load(&PairPaths::new(&ca, "ca"), now)?;
            // Printed one by one: what was renewed is known even if a later path fails.
            for path in paths {
                let options = RenewOptions { force, new_key };
                print(&renew(&authority, &path, options, now)?, cli.json, out)?;
            }
            Ok(())
        }
        Command::Approve { kubeconfig, node } => {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .context("cannot start the async runtime")?;
            let nodes = node.into_iter().collect();
            Ok(runtime.block_on(approver::run(kubeconfig.as_deref(), nodes))?)
        }
        Command::DevPki(args) => {
            let spec = DevPkiSpec {
                server: args.server,
                apiserver_ips: args.apiserver_ip,
                apiserver_dns: args.apiserver_dns,
                service_ip: args.service_ip,
                etcd_ips: args.etcd_ip,
                nodes: args.node,
                days: args.days,
            };
            print(DevPki::create(&args.dir, &spec)?.reports(), cli.json, out)
        }
    }
}

fn issue(role: Role, args: MemberArgs) -> Result<Vec<Report>> {
    let member = Member {
        role,
        name: args.name,
        dns: args.dns,
        ips: args.ip,
    };
    Ok(FleetAuthority::load(&args.ca)?.issue(&member, args.days, &args.out)?)
}

fn print(reports: &[Report], json: bool, out: &mut impl Write) -> Result<()> {
    for report in reports {
        if json {
            serde_json::to_writer(&mut *out, report).context("cannot encode a report")?;
            writeln!(out)
        } else {
            report.write_text(out)
        }
        .context("cannot write to standard output")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(line: &str) -> Result<String> {
        let cli = Cli::try_parse_from(line.split_whitespace())?;
        let mut out = Vec::new();
        run(cli, &mut out)?;
        Ok(String::from_utf8(out)?)
    }

    #[test]
    fn a_fleet_from_the_command_line() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path().display();
        let made = command(&format!("certs fleet-ca --dir {d}/ca --name dev")).unwrap();
        assert_eq!(made.lines().count(), 2, "{made}");
        let host =
            format!("certs host --ca {d}/ca --name host-1 --ip 10.0.0.2 --out {d}/host-1 --json");
        let made = command(&host).unwrap();
        let first: serde_json::Value = serde_json::from_str(made.lines().next().unwrap()).unwrap();
        assert_eq!(first["subject"], "CN=host-1");
        assert_eq!(
            first["names"][2],
            "URI:spiffe://sandman.dev/fleet/dev/host/host-1"
        );
        let again = command(&host).unwrap_err().to_string();
        assert!(
            again.contains("tls.crt exists and is not overwritten"),
            "{again}"
        );
        let kept = command(&format!("certs renew --ca {d}/ca {d}/host-1")).unwrap();
        assert!(kept.starts_with("kept"), "{kept}");
    }

    #[test]
    fn nothing_lives_forever() {
        assert!(command("certs fleet-ca --dir x --name dev --days 0").is_err());
        assert!(command("certs fleet-ca --dir x --name dev --days 9999").is_err());
    }
}
