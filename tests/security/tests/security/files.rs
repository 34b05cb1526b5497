//! Kernel interfaces, mounts, devices and the agent's file.

use crate::attack::{Attack, all_held};

const KERNEL: &[Attack] = &[
    // The classic ways from a file to a program that the kernel runs as root of the machine.
    ("core_pattern", "rewrite /proc/sys/kernel/core_pattern"),
    ("modprobe", "rewrite /proc/sys/kernel/modprobe"),
    (
        "hotplug",
        "[ -e /sys/kernel/uevent_helper ] && echo >/sys/kernel/uevent_helper",
    ),
    ("binfmt_misc", "echo -1 >/proc/sys/fs/binfmt_misc/status"),
    ("sysrq", "echo h >/proc/sysrq-trigger"),
    ("sysctl_kernel", "rewrite /proc/sys/kernel/panic"),
    ("sysctl_vm", "rewrite /proc/sys/vm/overcommit_memory"),
    ("sysctl_fs", "rewrite /proc/sys/fs/file-max"),
    ("sysctl_net", "rewrite /proc/sys/net/core/somaxconn"),
    ("irq", "rewrite /proc/irq/default_smp_affinity"),
    ("own_oom_protection", "echo -1000 >/proc/self/oom_score_adj"),
    // What is masked stays so.
    ("kcore", "reads /proc/kcore"),
    ("keys", "reads /proc/keys"),
    ("timer_list", "reads /proc/timer_list"),
    (
        "sched_debug",
        "reads /proc/sched_debug || reads /sys/kernel/debug/sched/debug",
    ),
    ("firmware", "ls /sys/firmware | grep ."),
    ("scsi", "ls /proc/scsi | grep ."),
    ("acpi", "ls /proc/acpi | grep ."),
    ("unmask_file", "umount /proc/kcore && reads /proc/kcore"),
    ("unmask_folder", "umount /proc/scsi || umount /sys/firmware"),
    ("remount_sys", "mount -o remount,rw /proc/sys"),
    ("remount_proc", "mount -o remount,rw /proc"),
    ("second_proc", "mount -t proc proc /tmp/m"),
    (
        "second_proc_as_user_root",
        "unshare -Urmpf sh -c 'mount -t proc proc /tmp/m && dd if=/tmp/m/kcore bs=1 count=1 | grep -q .'",
    ),
    (
        "by_a_dot",
        "reads /proc/./kcore || reads /proc/1/root/proc/kcore || reads /proc/self/root/proc/kcore",
    ),
    ("sysfs", "mount -t sysfs sysfs /tmp/m"),
    ("tmpfs", "mount -t tmpfs tmpfs /tmp/m"),
    ("bind", "mount -o bind / /tmp/m"),
    ("debugfs", "mount -t debugfs debugfs /tmp/m"),
    ("devtmpfs", "mount -t devtmpfs devtmpfs /tmp/m"),
    (
        "overlay",
        "mkdir -p /tmp/u /tmp/w; mount -t overlay -o lowerdir=/etc,upperdir=/tmp/u,workdir=/tmp/w o /tmp/m",
    ),
    ("pivot_root", "pivot_root / /tmp/m"),
    ("mount_namespace", "unshare -m true"),
    // The release_agent of a cgroup, and the limits of this one.
    (
        "cgroup_mount",
        "mount -t cgroup -o pids cgroup /tmp/m || mount -t cgroup2 cgroup2 /tmp/m",
    ),
    (
        "cgroup_folder",
        "for d in /sys/fs/cgroup /sys/fs/cgroup/*; do mkdir $d/more; [ -e $d/more/cgroup.procs ] && exit 0; done; exit 1",
    ),
    (
        "release_agent",
        "for f in $(find /sys/fs/cgroup -name release_agent -o -name notify_on_release); do rewrite $f && exit 0; done; exit 1",
    ),
    (
        "cgroup_limits",
        "for f in $(find /sys/fs/cgroup -name memory.limit_in_bytes -o -name memory.max -o -name pids.max -o -name cpu.max -o -name cpu.cfs_quota_us); do rewrite $f && exit 0; done; exit 1",
    ),
    (
        "leave_cgroup",
        "for f in $(find /sys/fs/cgroup -name cgroup.procs); do echo $$ >$f && exit 0; done; exit 1",
    ),
    (
        "devices_allow",
        "for f in $(find /sys/fs/cgroup -name devices.allow); do echo a >$f && exit 0; done; exit 1",
    ),
];

const DEVICES: &[Attack] = &[
    ("disk_in_root", "opens /tmp b $DISK"),
    ("disk_in_dev", "opens /dev b $DISK"),
    ("disk_in_shm", "opens /dev/shm b $DISK"),
    ("disk_in_volume", "opens /data b $DISK"),
    ("mem", "opens /tmp c 1 1"),
    ("port", "opens /tmp c 1 4"),
    ("kmsg", "opens /tmp c 1 11"),
    ("kmsg_in_volume", "opens /data c 1 11"),
    (
        "loop_control",
        "opens /tmp c 10 237 || opens /data c 10 237",
    ),
    ("fuse", "opens /tmp c 10 229 || opens /dev c 10 229"),
    ("kvm", "opens /tmp c 10 232"),
    ("console", "opens /tmp c 4 1"),
    ("given_disks", "ls -l /dev | grep '^b'"),
    (
        "given_devices",
        "ls /dev | grep -E '^(mem|kmem|kmsg|port|fuse|kvm|loop.*|vd.*|sd.*|snapshot|vhost.*|net)$'",
    ),
    (
        "loop",
        "mknod /tmp/loop0 b 7 0; losetup /tmp/loop0 /etc/passwd",
    ),
    (
        "swap",
        "dd if=/dev/zero of=/tmp/swap bs=4k count=16; mkswap /tmp/swap; swapon /tmp/swap",
    ),
];

const AGENT: &[Attack] = &[
    ("write", ": >>/dev/sandman/daemon"),
    ("truncate", "truncate -s 0 /dev/sandman/daemon"),
    ("mode", "chmod 777 /dev/sandman/daemon"),
    ("owner", "chown 1000 /dev/sandman/daemon"),
    ("time", "touch /dev/sandman/daemon"),
    ("remove", "rm /dev/sandman/daemon"),
    ("rename", "mv /dev/sandman/daemon /dev/sandman/other"),
    (
        "replace",
        "cp /bin/busybox /tmp/fake && mv -f /tmp/fake /dev/sandman/daemon",
    ),
    ("link", "ln /dev/sandman/daemon /dev/shm/daemon"),
    ("unmount", "umount /dev/sandman/daemon"),
    ("cover", "mount -o bind /bin/busybox /dev/sandman/daemon"),
    ("remount", "mount -o remount,rw,bind /dev/sandman/daemon"),
    // CVE-2019-5736: the file of a program that the host starts inside.
    ("own_file_of_pid_1", ": >>/proc/1/exe"),
    (
        "mapped_file_of_pid_1",
        "for f in /proc/1/map_files/*; do (: >>$f) && exit 0; done; exit 1",
    ),
    // The host's socket has no name by which it could be opened.
    ("socket_by_number", "(: >/proc/1/fd/3) || (: </proc/1/fd/3)"),
    (
        "socket_inherited",
        "readlink /proc/self/fd/* | grep socket:",
    ),
];

#[test]
#[ignore = "needs a dev cluster: see main.rs"]
fn kernel_interfaces_hold() {
    all_held(KERNEL);
}

#[test]
#[ignore = "needs a dev cluster: see main.rs"]
fn devices_hold() {
    all_held(DEVICES);
}

#[test]
#[ignore = "needs a dev cluster: see main.rs"]
fn the_agents_file_holds() {
    all_held(AGENT);
}
