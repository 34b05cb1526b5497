//! The host's files, processes and network, and those of other sandboxes.

use anyhow::ensure;
use sandman_integration::{PodBuilder, Scope};

use crate::attack::{Attack, all_held};

const ATTACKS: &[Attack] = &[
    ("host_file", "cat $MARKER"),
    ("host_file_by_pid_1", "cat /proc/1/root$MARKER"),
    ("host_file_by_dots", "cat /../../../../../../../..$MARKER"),
    // CVE-2024-21626: a descriptor or working directory that was left open outside.
    (
        "left_open_folder",
        "for f in /proc/[0-9]*/fd/* /proc/[0-9]*/cwd; do cat $f/../../../../../..$MARKER && exit 0; done; exit 1",
    ),
    (
        "left_open_file",
        "for f in /proc/self/fd/*; do case $f in */[012]) ;; *) [ -e $f ] && exit 0 ;; esac; done; exit 1",
    ),
    ("namespace_of_pid_1", "nsenter -t 1 -m -- cat $MARKER"),
    (
        "host_processes",
        "cat /proc/[0-9]*/comm | grep -E '^(containerd|sandman-(runtim|holder|vnode)|kube|etcd)'",
    ),
    ("host_tasks", "[ $(ls -d /proc/[0-9]* | wc -l) -gt 20 ]"),
    ("parent", "[ $(awk '{print $4}' /proc/1/stat) != 0 ]"),
    (
        "sockets_in_files",
        "find / -path /proc -prune -o -type s -print | grep .",
    ),
    (
        "abstract_sockets",
        "grep -E '@.*(containerd|sandman)' /proc/net/unix",
    ),
    (
        "runtime_folders",
        "ls -d /run/containerd /var/lib/containerd /var/run/docker.sock /run/sandman /var/lib/sandman",
    ),
    (
        "writable_host_mounts",
        "grep -vE ' (overlay|proc|tmpfs|devpts|mqueue|sysfs|cgroup|cgroup2|erofs) ' /proc/mounts | grep -E '^[^ ]+ [^ ]+ [^ ]+ rw' | grep -vE ' /(data|etc/(hosts|hostname|resolv.conf)|dev/termination-log|var/run/secrets[^ ]*) '",
    ),
    ("interface", "ip link add dummy7 type dummy"),
    ("address", "ip addr add 198.51.100.7/32 dev lo"),
    ("route", "ip route add 198.51.100.0/24 dev lo"),
    ("host_name", "hostname $(hostname)"),
    ("kernel_log", "dmesg -c"),
    (
        "real_time",
        "chrt -f 1 true 2>/dev/null || ionice -c 1 -n 0 true",
    ),
    (
        "namespaces",
        "unshare -n true || unshare -i true || unshare -u true || unshare -p true",
    ),
];

#[test]
#[ignore = "needs a dev cluster: see main.rs"]
fn the_host_is_out_of_reach() {
    all_held(ATTACKS);
}

#[test]
#[ignore = "needs a dev cluster: see main.rs"]
fn neither_is_a_neighbour() {
    Scope::run(|scope| async move {
        let name = format!("secret-{}", uuid::Uuid::new_v4().simple());
        let script = format!("echo {name} >/dev/shm/f; echo {name} >/f; exec sleep 1000000");
        let main = sandman_integration::container(&scope.cluster, "main", &script);
        let victim = PodBuilder::new("victim").container(main).build();
        scope.ready_pod(&victim).await?;
        let attacker = PodBuilder::sleeper(&scope.cluster, "attacker").build();
        scope.ready_pod(&attacker).await?;
        // Its files and its shared memory; queues and segments that anybody has.
        let script = format!(
            "find / -path /proc -prune -o -type f -name f -exec grep -l {name} {{}} \\; ; \
             tail -qn +2 /proc/sysvipc/*; ls /dev/mqueue; true"
        );
        let exec = ["exec", "attacker", "--", "sh", "-c", &script];
        let found = scope.kubectl().run(&exec).await?.ok()?.text();
        ensure!(found.is_empty(), "{found}");
        let victims = scope
            .kubectl()
            .run(&["exec", "victim", "--", "cat", "/f"])
            .await?;
        ensure!(
            victims.ok()?.text().trim() == name,
            "the victim has its own"
        );
        Ok(())
    });
}

#[test]
#[ignore = "needs a dev cluster: see main.rs"]
fn the_hosts_device_files_are_out_of_reach() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::sleeper(&scope.cluster, "touch").build();
        scope.ready_pod(&pod).await?;
        // Owner and mode would go the same way, but a machine does without the time of a node.
        let nodes = [
            "/dev/null",
            "/dev/zero",
            "/dev/full",
            "/dev/urandom",
            "/dev/tty",
        ];
        let times = || {
            nodes.map(|node| {
                std::fs::metadata(node)
                    .and_then(|meta| meta.modified())
                    .ok()
            })
        };
        let before = times();
        // runc gives an exec without input the host's null device: see SECURITY.md.
        let own = sandman_integration::variable("SANDMAN_RUNTIME").is_ok_and(|it| it == "sandman");
        let stream = if own { "/proc/self/fd/0" } else { "" };
        let script = format!(
            "for f in {} /proc/keys /proc/1/fd/0 {stream}; do touch -d @86400 $f; done; true",
            nodes.join(" ")
        );
        let exec = ["exec", "touch", "--", "sh", "-c", &script];
        scope.kubectl().run(&exec).await?.ok()?;
        ensure!(times() == before, "{:?}, before {before:?}", times());
        Ok(())
    });
}
