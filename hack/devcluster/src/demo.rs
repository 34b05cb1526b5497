//! A walk through what a user does: a pod from a real image, exec, cp, logs, all by kubectl. Each
//! command is shown before its output.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::runtime::conditions::is_pod_running;
use kube::runtime::wait::await_condition;

use crate::components::REGISTRY_PORT;
use crate::layout::Layout;
use crate::net::{Member, endpoint};
use crate::settings::Settings;
use crate::{kube_api, pki};

const POD: &str = "demo";
/// The image has some hundred megabytes and may be seen for the first time.
const RUNNING_WITHIN: Duration = Duration::from_secs(180);

/// Runs the demonstration on a cluster that is up. The pod stays for a look around.
pub(crate) async fn run(layout: &Layout) -> anyhow::Result<()> {
    let settings = Settings::require(layout)?;
    let demo = Demo {
        layout,
        settings: &settings,
    };
    let image = format!(
        "{}/sandman/python-swe:1",
        endpoint(Member::Registry, REGISTRY_PORT)
    );
    let manifest = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "runtimeClassName": "sandman",
            "containers": [{
                "name": "main",
                "image": image,
                "command": ["sh", "-c", "echo ready to work; exec sleep infinity"],
            }],
        },
    });

    // One of an earlier demonstration.
    demo.kubectl_quietly(&["delete", "pod", POD, "--ignore-not-found"])?;
    let shown = serde_yaml_ng::to_string(&manifest)?;
    println!("A sandbox from the Python image:\n\n{shown}");
    demo.kubectl_with_input(&["apply", "-f", "-"], &manifest.to_string())?;
    let client = kube_api::client(&pki::admin_kubeconfig_path(layout)).await?;
    let pods: Api<Pod> = Api::default_namespaced(client);
    let running = await_condition(pods, POD, is_pod_running());
    match tokio::time::timeout(RUNNING_WITHIN, running).await {
        Ok(done) => done.map(drop)?,
        Err(_) => {
            demo.kubectl(&["describe", "pod", POD])?;
            bail!("pod {POD} does not run after {RUNNING_WITHIN:?}");
        }
    }

    demo.kubectl(&["get", "node,pod", "-o", "wide"])?;
    let program = "import platform, sys; print(sys.version.split()[0], platform.node())";
    demo.kubectl(&["exec", POD, "--", "python3", "-c", program])?;
    demo.kubectl(&["exec", POD, "--", "python3", "-m", "pytest", "-q"])?;

    let scratch = layout.state_dir().join("demo");
    fs::create_dir_all(&scratch)?;
    let (sent, received) = (scratch.join("sent.txt"), scratch.join("received.txt"));
    fs::write(&sent, "carried in and out again\n")?;
    demo.copy(&sent, Path::new("demo:/tmp/file.txt"))?;
    demo.kubectl(&["exec", POD, "--", "sha256sum", "/tmp/file.txt"])?;
    demo.copy(Path::new("demo:/tmp/file.txt"), &received)?;
    if fs::read(&sent)? != fs::read(&received)? {
        bail!("the file came back changed");
    }
    println!("{}: as sent\n", received.display());
    demo.kubectl(&["logs", POD])?;
    fs::remove_dir_all(&scratch)?;
    println!(
        "The pod is yours: `hack/dev kubectl exec -it {POD} -- bash`. `hack/dev down` ends all."
    );
    Ok(())
}

struct Demo<'a> {
    layout: &'a Layout,
    settings: &'a Settings,
}

impl Demo<'_> {
    fn kubectl(&self, arguments: &[&str]) -> anyhow::Result<()> {
        self.kubectl_with_input(arguments, "")
    }

    fn copy(&self, from: &Path, to: &Path) -> anyhow::Result<()> {
        self.kubectl(&["cp", &from.to_string_lossy(), &to.to_string_lossy()])
    }

    fn kubectl_with_input(&self, arguments: &[&str], input: &str) -> anyhow::Result<()> {
        println!("$ kubectl {}", shown(arguments));
        let mut child = self.command(arguments).stdin(Stdio::piped()).spawn()?;
        // Closed at the end of the statement, as kubectl waits for.
        child
            .stdin
            .take()
            .context("kubectl has no input")?
            .write_all(input.as_bytes())?;
        let status = child.wait()?;
        println!();
        if !status.success() {
            bail!("kubectl {}: {status}", shown(arguments));
        }
        Ok(())
    }

    fn kubectl_quietly(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let output = self.command(arguments).output()?;
        if !output.status.success() {
            bail!(
                "kubectl {}: {}",
                shown(arguments),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(())
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.settings.artifacts.kube_dev);
        command.arg("kubectl").args(arguments);
        command.env("KUBECONFIG", pki::admin_kubeconfig_path(self.layout));
        command
    }
}

/// Arguments as one would type them.
fn shown(arguments: &[&str]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=".contains(c);
    let quote = |argument: &&str| {
        if argument.chars().all(plain) {
            (*argument).to_owned()
        } else {
            format!("'{argument}'")
        }
    };
    arguments.iter().map(quote).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_shown_as_typed() {
        assert_eq!(
            shown(&["exec", "demo", "--", "sh", "-c", "a b"]),
            "exec demo -- sh -c 'a b'"
        );
    }
}
