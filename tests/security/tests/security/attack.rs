//! Runs attacks in a pod, by its command and by exec, and reads how they ended.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, EnvVar, Pod, Volume, VolumeMount};
use sandman_integration::{PodBuilder, Scope, container, images, is_phase, wait_pod};

/// A name, and a script that ends with 0 if the attack succeeded.
pub(crate) type Attack = (&'static str, &'static str);

/// Runs pairs of arguments. What could not be tried is no defence: 126 and 127 are a shell's own.
const RUNNER: &str = r#"
# Writes what a file holds to it again.
rewrite() { v=$(cat "$1") && echo "$v" >"$1"; }
# Whether anything can be read of a file.
reads() { [ -n "$(dd if="$1" bs=8k count=1 2>/dev/null | head -c 1 | od -An -tx1)" ]; }
# Opens a device by a node of its own, in folder $1.
opens() {
    rm -f "$1/node"
    mknod "$1/node" "$2" "$3" "$4" || return 1
    (exec 9<"$1/node")
    opened=$?
    rm "$1/node"
    return $opened
}
mkdir -p /tmp/m
while [ $# -gt 1 ]; do
    (eval "$2") </dev/null >/tmp/said 2>&1
    case $? in
        0) echo "BROKEN $1" ;;
        126 | 127) echo "UNTRIED $1 $(head -n 1 /tmp/said)" ;;
        *) echo "held $1" ;;
    esac
    shift 2
done
"#;

/// A file of the host that no sandbox may find.
pub(crate) struct Marker(tempfile::NamedTempFile);

impl Marker {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(
            tempfile::Builder::new()
                .prefix("marker-")
                .tempfile_in("/var/tmp")?,
        ))
    }

    pub(crate) fn path(&self) -> Result<String> {
        Ok(self
            .0
            .path()
            .to_str()
            .context("a path in UTF-8")?
            .to_owned())
    }
}

/// A pod that runs `command` with the marker's path in its environment and a volume at `/data`.
pub(crate) fn pod(
    scope: &Scope,
    name: &str,
    image: &str,
    command: Vec<String>,
    marker: &Marker,
) -> Result<PodBuilder> {
    let mut main = container(&scope.cluster, "main", "");
    main.image = Some(image.to_owned());
    main.command = Some(command);
    let variable = |name: &str, value: String| EnvVar {
        name: name.to_owned(),
        value: Some(value),
        ..Default::default()
    };
    main.env = Some(vec![
        variable("MARKER", marker.path()?),
        variable("DISK", disk()?),
    ]);
    main.volume_mounts = Some(vec![VolumeMount {
        name: "data".to_owned(),
        mount_path: "/data".to_owned(),
        ..Default::default()
    }]);
    let volume = Volume {
        name: "data".to_owned(),
        empty_dir: Some(EmptyDirVolumeSource::default()),
        ..Default::default()
    };
    Ok(PodBuilder::new(name).container(main).volume(volume))
}

/// Numbers of a disk of this machine.
fn disk() -> Result<String> {
    for entry in std::fs::read_dir("/sys/block")? {
        let path = entry?.path();
        if path.join("device").exists() {
            let numbers = std::fs::read_to_string(path.join("dev"))?;
            return Ok(numbers.trim().replace(':', " "));
        }
    }
    // Without a disk, any number: the node must not be usable.
    Ok("8 0".to_owned())
}

/// Words for kubectl and for a container.
pub(crate) fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Makes all attacks twice: as a container's own command, and by exec into another one.
pub(crate) fn all_held(attacks: &'static [Attack]) {
    let mut command = vec!["sh", "-c", RUNNER, "attacks"];
    for (name, script) in attacks {
        command.extend([*name, *script]);
    }
    let names: Vec<_> = attacks.iter().map(|(name, _)| *name).collect();
    Scope::run(|scope| async move {
        let image = images::busybox(&scope.cluster);
        both_held(&scope, &image, &command, &names).await
    });
}

/// As [`all_held`], of a command that prints the verdicts by itself.
pub(crate) async fn both_held(
    scope: &Scope,
    image: &str,
    command: &[&str],
    names: &[&str],
) -> Result<()> {
    let marker = Marker::new()?;
    let own = pod(scope, "own", image, words(command), &marker)?;
    scope
        .create_pod(&own.restart_policy("Never").build())
        .await?;
    let idle = pod(scope, "idle", image, words(&["sleep", "1000000"]), &marker)?;
    scope.ready_pod(&idle.build()).await?;
    let kubectl = scope.kubectl();
    let exec = [&["exec", "idle", "--"], command].concat();
    let by_exec = kubectl.run(&exec).await?.ok()?.text();
    wait_pod(&scope.api(), "own", "at its end", |pod: &Pod| {
        is_phase(pod, "Succeeded") || is_phase(pod, "Failed")
    })
    .await?;
    let by_command = kubectl.run(&["logs", "own"]).await?.ok()?.text();
    for (how, said) in [("exec", by_exec), ("command", by_command)] {
        let expected: String = names.iter().map(|name| format!("held {name}\n")).collect();
        ensure!(
            said == expected,
            "by {how}: {}",
            differences(&said, &expected)
        );
    }
    Ok(())
}

fn differences(said: &str, expected: &str) -> String {
    let lines: Vec<_> = said
        .lines()
        .filter(|line| !line.starts_with("held "))
        .collect();
    let missing: Vec<_> = expected
        .lines()
        .filter(|line| {
            let name = line.trim_start_matches("held ");
            !said
                .lines()
                .any(|said| said.split(' ').nth(1) == Some(name))
        })
        .collect();
    format!("{lines:#?}, no word of {missing:#?}")
}
