//! Two hundred sandboxes at once: what they cost, and that nothing stays.

use std::fs;

use serde_json::json;

use crate::support::{Host, children, gone, key, within, zygote};

/// Proportional set size in KiB.
fn pss(pid: i32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = text.lines().find(|line| line.starts_with("Pss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn mounts() -> usize {
    fs::read_to_string("/proc/self/mountinfo")
        .unwrap()
        .lines()
        .count()
}

fn descriptors(pid: i32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn two_hundred_sandboxes() {
    const COUNT: usize = 200;
    let mut host = Host::start().await;
    let holder = i32::try_from(host.holder.id()).unwrap();
    let (mounts_before, fds_before) = (mounts(), descriptors(holder));
    let out = tempfile::tempfile().unwrap();
    let mut pids = Vec::new();
    let mut made = Vec::new();
    for number in 0..COUNT {
        let k = key(&format!("box-{number}"));
        let mut spec = host.spec("exec sleep 100000");
        spec["linux"]["cgroupsPath"] = json!(host.cgroup.join(number.to_string()));
        spec["mounts"][1]["options"] = json!(["nosuid", "ro", "mode=755"]);
        let created = host.create(&k, spec, &out).await.unwrap();
        within(created.gate.start()).await.unwrap();
        within(host.client.drop_slot(&k, 0)).await.unwrap();
        pids.push(created.pid);
        made.push((k, created.cgroup.unwrap()));
    }
    let zygote = zygote(host.holder.id());
    let each = pids.iter().map(|pid| pss(*pid)).sum::<u64>() / COUNT as u64;
    println!(
        "PSS in KiB: {each} a sandbox (busybox sleep), zygote {}, holder {}",
        pss(zygote),
        pss(holder)
    );
    assert!(pss(zygote) < 1024, "the zygote has {} KiB", pss(zygote));
    assert!(
        descriptors(zygote) < 10,
        "the zygote holds descriptors of sandboxes"
    );
    assert_eq!(
        descriptors(holder),
        fds_before,
        "the holder keeps only what it was given"
    );
    assert_eq!(mounts(), mounts_before, "nothing is mounted on the host");

    for (k, _) in &made {
        within(host.client.signal(k, 9)).await.unwrap();
    }
    let mut left = COUNT;
    while left > 0 {
        let exited = within(host.exits.recv()).await.unwrap();
        assert_eq!(exited.exit.code, 137);
        within(host.client.forget(&exited.key)).await.unwrap();
        left -= 1;
    }
    gone(&pids).await;
    for (_, cgroup) in made {
        cgroup.remove().unwrap();
    }
    host.launcher
        .cgroup(&host.cgroup, None)
        .unwrap()
        .remove()
        .unwrap();
    // The anchor and the zygote.
    assert_eq!(children(host.holder.id()).len(), 2);
    assert_eq!(mounts(), mounts_before);
    assert_eq!(descriptors(holder), fds_before);
}
