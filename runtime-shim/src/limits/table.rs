//! What a host needs of its kernel for a number of sandboxes, and how many a value has room for.
//! Pure: values come from outside.

/// What is asked of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Sandboxes that it shall hold.
    pub pods: u64,
    /// Processes and threads of one tiny sandbox, those that watch over it included.
    pub tasks_each: u64,
}

/// Threads of a containerd shim in Go (12 were counted on an idle one), the agent, and what the
/// image runs.
pub(super) const TASKS_WITH_OWN_SHIM: u64 = 16;
/// The agent and what the image runs, twice over.
pub(super) const TASKS_WITH_GROUPED_SHIM: u64 = 4;
/// Processes and threads left to the host itself.
const TASKS_OF_HOST: u64 = 8192;
/// The kernel takes no more (`PID_MAX_LIMIT` of 64-bit machines).
const PID_MAX_LIMIT: u64 = 4_194_304;
/// Namespaces of a kind that a sandbox has: containers of a pod have some of their own.
const NAMESPACES_EACH: u64 = 2;
/// Namespaces of a kind left to the host itself.
const NAMESPACES_OF_HOST: u64 = 1024;
/// Descriptors left to a daemon for everything but sandboxes.
const FILES_OF_DAEMON: u64 = 1024;
/// Descriptors that containerd, and that this service, holds for a container: its log's pipes,
/// and the socket to its shim or the log's file.
const FILES_EACH: u64 = 3;

/// One value of the kernel.
#[derive(Debug)]
pub(super) struct Knob {
    /// As `sysctl` names it.
    pub(super) name: &'static str,
    /// What a demand needs.
    pub(super) needs: fn(Demand) -> u64,
    /// Sandboxes for which a value has room; none if it only makes them slow or refuses some of
    /// what they do.
    pub(super) room: Option<fn(Demand, u64) -> u64>,
    /// What happens where it is too small.
    pub(super) effect: &'static str,
}

/// All of them. Neighbour entries of pods are permanent, which the thresholds do not count; the
/// thresholds are for what pods themselves talk to.
pub(super) const KNOBS: &[Knob] = &[
    Knob {
        name: "kernel.pid_max",
        needs: |demand| tasks(demand).min(PID_MAX_LIMIT),
        room: Some(room_for_tasks),
        effect: "no further process can be started on the host",
    },
    Knob {
        name: "kernel.threads-max",
        needs: tasks,
        room: Some(room_for_tasks),
        effect: "no further process can be started on the host",
    },
    Knob {
        name: "user.max_net_namespaces",
        needs: namespaces,
        room: Some(room_for_namespaces),
        effect: "no further sandbox can be made",
    },
    Knob {
        name: "user.max_mnt_namespaces",
        needs: namespaces,
        room: Some(room_for_namespaces),
        effect: "no further sandbox can be made",
    },
    Knob {
        name: "user.max_pid_namespaces",
        needs: namespaces,
        room: Some(room_for_namespaces),
        effect: "no further sandbox can be made",
    },
    Knob {
        name: "fs.inotify.max_user_instances",
        needs: |demand| demand.pods.saturating_add(1024),
        room: None,
        effect: "file watchers in sandboxes fail with \"too many open files\": all sandboxes \
                 without a user namespace share this number",
    },
    Knob {
        name: "kernel.pty.max",
        needs: |demand| demand.pods.saturating_add(4096),
        room: None,
        effect: "execs with a terminal fail with \"no space left on device\"",
    },
    Knob {
        name: "net.ipv4.neigh.default.gc_thresh3",
        needs: |demand| demand.pods.saturating_mul(2).max(65_536),
        room: None,
        effect: "connections fail with \"neighbour table overflow\" in the kernel's log",
    },
    Knob {
        name: "net.ipv4.neigh.default.gc_thresh2",
        needs: |demand| demand.pods.max(32_768),
        room: None,
        effect: "addresses of neighbours are looked up again and again",
    },
    Knob {
        name: "net.netfilter.nf_conntrack_max",
        needs: |demand| demand.pods.saturating_mul(32).max(262_144),
        room: None,
        effect: "new connections are dropped with \"table full\" in the kernel's log",
    },
];

fn tasks(demand: Demand) -> u64 {
    // Room for what sandboxes do besides sleeping.
    let each = demand.tasks_each.saturating_mul(4);
    demand
        .pods
        .saturating_mul(each)
        .saturating_add(TASKS_OF_HOST)
}

fn room_for_tasks(demand: Demand, value: u64) -> u64 {
    value.saturating_sub(TASKS_OF_HOST) / demand.tasks_each.max(1)
}

fn namespaces(demand: Demand) -> u64 {
    let sandboxes = demand.pods.saturating_mul(NAMESPACES_EACH);
    sandboxes.saturating_add(NAMESPACES_OF_HOST)
}

fn room_for_namespaces(_: Demand, value: u64) -> u64 {
    value.saturating_sub(NAMESPACES_OF_HOST) / NAMESPACES_EACH
}

/// Descriptors that one daemon needs.
pub(super) fn files(demand: Demand) -> u64 {
    let sandboxes = demand.pods.saturating_mul(FILES_EACH);
    sandboxes.saturating_add(FILES_OF_DAEMON)
}

/// Sandboxes for which a daemon's limit of descriptors has room.
pub(super) fn room_for_files(value: u64) -> u64 {
    value.saturating_sub(FILES_OF_DAEMON) / FILES_EACH
}

/// The larger number of a process's limit of open files, from `/proc/PID/limits`.
pub(super) fn hard_nofile(limits: &str) -> Option<u64> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    match line.split_whitespace().nth(1)? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMAND: Demand = Demand {
        pods: 12_000,
        tasks_each: TASKS_WITH_GROUPED_SHIM,
    };

    fn knob(name: &str) -> &'static Knob {
        KNOBS.iter().find(|knob| knob.name == name).unwrap()
    }

    #[test]
    fn what_is_needed_has_room_for_what_was_asked() {
        for pods in [1, 100, 12_000, 25_000] {
            for tasks_each in [TASKS_WITH_GROUPED_SHIM, TASKS_WITH_OWN_SHIM] {
                let demand = Demand { pods, tasks_each };
                for knob in KNOBS {
                    let Some(room) = knob.room else { continue };
                    let held = room(demand, (knob.needs)(demand));
                    assert!(held >= pods, "{}: {held} of {pods}", knob.name);
                }
                assert!(room_for_files(files(demand)) >= pods);
            }
        }
    }

    #[test]
    fn the_usual_pid_max_does_not_hold_shims_of_their_own() {
        let room = knob("kernel.pid_max").room.unwrap();
        let own = Demand {
            tasks_each: TASKS_WITH_OWN_SHIM,
            ..DEMAND
        };
        assert_eq!(room(own, 32_768), 1536);
        assert_eq!(room(DEMAND, 32_768), 6144);
        assert_eq!(room(DEMAND, 100), 0);
    }

    #[test]
    fn no_more_is_asked_than_the_kernel_takes() {
        let huge = Demand {
            pods: u64::MAX,
            tasks_each: TASKS_WITH_OWN_SHIM,
        };
        assert_eq!((knob("kernel.pid_max").needs)(huge), PID_MAX_LIMIT);
    }

    #[test]
    fn reads_the_hard_limit_of_a_process() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max processes             95000                95000                processes \n\
                    Max open files            1024                 20000                files     \n";
        assert_eq!(hard_nofile(text), Some(20_000));
        assert_eq!(room_for_files(20_000), 6325);
        assert_eq!(hard_nofile("Max open files"), None);
        let unlimited = "Max open files  unlimited  unlimited  files";
        assert_eq!(hard_nofile(unlimited), Some(u64::MAX));
    }
}
