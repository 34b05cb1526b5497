//! The kubelet API's paths as one table, and the pure function that reads it.
//!
//! The same table as `pkg/kubelet/server/server.go` of Kubernetes 1.36, less what
//! this node has no answer for.

use http::Method;

/// What a request asks for, with the parameters of its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Route {
    Healthz {
        check: Option<String>,
    },
    Pods,
    RunningPods,
    StatsSummary,
    Metrics,
    ResourceMetrics,
    CadvisorMetrics,
    SliMetrics,
    Configz,
    Statusz,
    Flagz,
    ContainerLogs(ContainerRef),
    Exec(ContainerRef),
    Attach(ContainerRef),
    Run(ContainerRef),
    PortForward(PodRef),
    Checkpoint(ContainerRef),
    /// An endpoint that exists and is switched off for good; the text says so.
    Disabled(&'static str),
}

impl Route {
    /// Whether the answer depends on which pods there are.
    pub(super) fn is_about_pods(&self) -> bool {
        !matches!(
            self,
            Self::Healthz { .. }
                | Self::Metrics
                | Self::SliMetrics
                | Self::Configz
                | Self::Statusz
                | Self::Flagz
                | Self::Disabled(_)
        )
    }
}

/// The pod that a path names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PodRef {
    pub(super) namespace: String,
    pub(super) name: String,
    /// Of the `/{uid}` variants: the pod must be this very one.
    pub(super) uid: Option<String>,
}

/// The container that a path names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ContainerRef {
    pub(super) pod: PodRef,
    pub(super) container: String,
}

/// Why a request has no route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoRoute {
    NotFound,
    /// The path exists for these methods.
    MethodNotAllowed(&'static str),
    /// `enableDebuggingHandlers` is off.
    DebuggingDisabled,
}

/// First segments whose handlers are debugging handlers in the kubelet's words:
/// with `enableDebuggingHandlers: false` they answer 405 instead of acting.
const DEBUGGING: &[&str] = &[
    "attach",
    "containerLogs",
    "debug",
    "exec",
    "logs",
    "portForward",
    "run",
    "runningpods",
];

const GET: &str = "GET";
const POST: &str = "POST";
const GET_POST: &str = "GET, POST";
const ANY: &str = "";

struct Entry {
    /// Segments below the root. `{}` takes one segment that is not empty, a last
    /// `*` takes the rest.
    path: &'static [&'static str],
    /// As the Allow header spells them; empty for any.
    methods: &'static str,
    build: fn(&[&str]) -> Route,
}

const TABLE: &[Entry] = &[
    Entry {
        path: &["healthz"],
        methods: ANY,
        build: |_| Route::Healthz { check: None },
    },
    Entry {
        path: &["healthz", "{}"],
        methods: ANY,
        build: |parts| Route::Healthz {
            check: Some(parts[0].to_owned()),
        },
    },
    Entry {
        path: &["pods"],
        methods: GET,
        build: |_| Route::Pods,
    },
    Entry {
        path: &["runningpods"],
        methods: GET,
        build: |_| Route::RunningPods,
    },
    Entry {
        path: &["stats", "summary"],
        methods: GET_POST,
        build: |_| Route::StatsSummary,
    },
    Entry {
        path: &["metrics"],
        methods: ANY,
        build: |_| Route::Metrics,
    },
    Entry {
        path: &["metrics", "resource"],
        methods: ANY,
        build: |_| Route::ResourceMetrics,
    },
    Entry {
        path: &["metrics", "cadvisor"],
        methods: ANY,
        build: |_| Route::CadvisorMetrics,
    },
    Entry {
        path: &["metrics", "slis"],
        methods: ANY,
        build: |_| Route::SliMetrics,
    },
    Entry {
        path: &["metrics", "probes"],
        methods: ANY,
        build: |_| {
            Route::Disabled(
                "probes are counted by the hosts that run them: see sandman_host_probes_total there.",
            )
        },
    },
    Entry {
        path: &["configz"],
        methods: ANY,
        build: |_| Route::Configz,
    },
    Entry {
        path: &["statusz"],
        methods: GET,
        build: |_| Route::Statusz,
    },
    Entry {
        path: &["flagz"],
        methods: GET,
        build: |_| Route::Flagz,
    },
    Entry {
        path: &["containerLogs", "{}", "{}", "{}"],
        methods: GET,
        build: |parts| Route::ContainerLogs(container(parts)),
    },
    Entry {
        path: &["exec", "{}", "{}", "{}"],
        methods: GET_POST,
        build: |parts| Route::Exec(container(parts)),
    },
    Entry {
        path: &["exec", "{}", "{}", "{}", "{}"],
        methods: GET_POST,
        build: |parts| Route::Exec(container(parts)),
    },
    Entry {
        path: &["attach", "{}", "{}", "{}"],
        methods: GET_POST,
        build: |parts| Route::Attach(container(parts)),
    },
    Entry {
        path: &["attach", "{}", "{}", "{}", "{}"],
        methods: GET_POST,
        build: |parts| Route::Attach(container(parts)),
    },
    Entry {
        path: &["run", "{}", "{}", "{}"],
        methods: POST,
        build: |parts| Route::Run(container(parts)),
    },
    Entry {
        path: &["run", "{}", "{}", "{}", "{}"],
        methods: POST,
        build: |parts| Route::Run(container(parts)),
    },
    Entry {
        path: &["portForward", "{}", "{}"],
        methods: GET_POST,
        build: |parts| Route::PortForward(pod(parts)),
    },
    Entry {
        path: &["portForward", "{}", "{}", "{}"],
        methods: GET_POST,
        build: |parts| Route::PortForward(pod(parts)),
    },
    Entry {
        path: &["checkpoint", "{}", "{}", "{}"],
        methods: POST,
        build: |parts| Route::Checkpoint(container(parts)),
    },
    Entry {
        path: &["logs", "*"],
        methods: ANY,
        build: |_| Route::Disabled("logs endpoint is disabled."),
    },
    Entry {
        path: &["debug", "pprof", "*"],
        methods: ANY,
        build: |_| Route::Disabled("profiling endpoint is disabled."),
    },
    Entry {
        path: &["debug", "flags", "v"],
        methods: ANY,
        build: |_| Route::Disabled("flags endpoint is disabled."),
    },
];

/// Finds the route of a decoded path. `debugging` is the node's
/// `enableDebuggingHandlers`.
pub(super) fn find(method: &Method, path: &str, debugging: bool) -> Result<Route, NoRoute> {
    // One slash at the end makes no difference, as in the kubelet's router.
    let path = path.strip_prefix('/').unwrap_or(path);
    let path = path.strip_suffix('/').unwrap_or(path);
    let segments: Vec<&str> = path.split('/').collect();
    if !debugging && DEBUGGING.contains(&segments[0]) {
        return Err(NoRoute::DebuggingDisabled);
    }
    for entry in TABLE {
        if let Some(parameters) = capture(entry.path, &segments) {
            let allowed = entry.methods.is_empty()
                || entry
                    .methods
                    .split(", ")
                    .any(|name| name == method.as_str());
            return if allowed {
                Ok((entry.build)(&parameters))
            } else {
                Err(NoRoute::MethodNotAllowed(entry.methods))
            };
        }
    }
    Err(NoRoute::NotFound)
}

/// Paths without parameters, for people.
pub(super) fn pages() -> Vec<String> {
    let plain = TABLE.iter().filter(|entry| {
        !entry
            .path
            .iter()
            .any(|segment| ["{}", "*"].contains(segment))
    });
    plain
        .map(|entry| format!("/{}", entry.path.join("/")))
        .collect()
}

/// A name for metrics: the first segment, or the first two below `metrics`, and
/// `other` for everything a client made up.
pub(super) fn label(path: &str) -> &'static str {
    let path = path.trim_start_matches('/');
    for known in ["metrics/resource", "metrics/cadvisor"] {
        if path == known {
            return known;
        }
    }
    let root = path.split('/').next().unwrap_or_default();
    TABLE
        .iter()
        .map(|entry| entry.path[0])
        .find(|name| *name == root)
        .unwrap_or("other")
}

fn capture<'a>(pattern: &[&str], segments: &[&'a str]) -> Option<Vec<&'a str>> {
    let (pattern, open) = match pattern.split_last() {
        Some((&"*", head)) => (head, true),
        _ => (pattern, false),
    };
    if segments.len() < pattern.len() || (!open && segments.len() > pattern.len()) {
        return None;
    }
    let mut parameters = Vec::new();
    for (want, have) in pattern.iter().zip(segments) {
        match *want {
            "{}" if have.is_empty() => return None,
            "{}" => parameters.push(*have),
            literal if literal == *have => {}
            _ => return None,
        }
    }
    Some(parameters)
}

/// `{namespace}/{pod}[/{uid}]/{container}`; the table sets the count.
fn container(parts: &[&str]) -> ContainerRef {
    let (name, head) = parts.split_last().unwrap_or((&"", parts));
    ContainerRef {
        pod: pod(head),
        container: (*name).to_owned(),
    }
}

/// `{namespace}/{pod}[/{uid}]`; the table sets the count.
fn pod(parts: &[&str]) -> PodRef {
    PodRef {
        namespace: parts[0].to_owned(),
        name: parts[1].to_owned(),
        uid: parts.get(2).map(|uid| (*uid).to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(path: &str) -> Result<Route, NoRoute> {
        find(&Method::GET, path, true)
    }

    fn reference(uid: Option<&str>) -> ContainerRef {
        ContainerRef {
            pod: PodRef {
                namespace: "ns".into(),
                name: "pod".into(),
                uid: uid.map(Into::into),
            },
            container: "c".into(),
        }
    }

    #[test]
    fn every_path_of_the_table() {
        let healthz = |check: &str| {
            Ok(Route::Healthz {
                check: Some(check.into()),
            })
        };
        for (path, want) in [
            ("/healthz", Ok(Route::Healthz { check: None })),
            ("/healthz/ping", healthz("ping")),
            ("/healthz/syncloop", healthz("syncloop")),
            ("/pods", Ok(Route::Pods)),
            ("/pods/", Ok(Route::Pods)),
            ("/runningpods/", Ok(Route::RunningPods)),
            ("/stats/summary", Ok(Route::StatsSummary)),
            ("/metrics", Ok(Route::Metrics)),
            ("/metrics/resource", Ok(Route::ResourceMetrics)),
            ("/configz", Ok(Route::Configz)),
            (
                "/containerLogs/ns/pod/c",
                Ok(Route::ContainerLogs(reference(None))),
            ),
            ("/exec/ns/pod/c", Ok(Route::Exec(reference(None)))),
            (
                "/exec/ns/pod/u-1/c",
                Ok(Route::Exec(reference(Some("u-1")))),
            ),
            ("/attach/ns/pod/c", Ok(Route::Attach(reference(None)))),
            (
                "/attach/ns/pod/u-1/c",
                Ok(Route::Attach(reference(Some("u-1")))),
            ),
            (
                "/portForward/ns/pod",
                Ok(Route::PortForward(reference(None).pod)),
            ),
            (
                "/portForward/ns/pod/u-1",
                Ok(Route::PortForward(reference(Some("u-1")).pod)),
            ),
            ("/logs/", Ok(Route::Disabled("logs endpoint is disabled."))),
            (
                "/logs/syslog",
                Ok(Route::Disabled("logs endpoint is disabled.")),
            ),
            (
                "/debug/pprof/heap",
                Ok(Route::Disabled("profiling endpoint is disabled.")),
            ),
            ("/", Err(NoRoute::NotFound)),
            ("/exec", Err(NoRoute::NotFound)),
            ("/exec/ns/pod", Err(NoRoute::NotFound)),
            ("/exec/ns//c", Err(NoRoute::NotFound)),
            ("/exec/ns/pod/u/c/more", Err(NoRoute::NotFound)),
            ("/metrics/cadvisor", Ok(Route::CadvisorMetrics)),
            ("/metrics/slis", Ok(Route::SliMetrics)),
            ("/statusz", Ok(Route::Statusz)),
            ("/flagz", Ok(Route::Flagz)),
            ("//exec/ns/pod/c", Err(NoRoute::NotFound)),
            ("/metrics/../exec/ns/pod/c", Err(NoRoute::NotFound)),
            ("/Exec/ns/pod/c", Err(NoRoute::NotFound)),
        ] {
            assert_eq!(get(path), want, "{path}");
        }
    }

    #[test]
    fn methods_are_part_of_the_table() {
        for (method, path, want) in [
            (Method::POST, "/exec/ns/pod/c", Ok(())),
            (Method::PUT, "/exec/ns/pod/c", Err("GET, POST")),
            (Method::POST, "/run/ns/pod/c", Ok(())),
            (Method::GET, "/run/ns/pod/c", Err("POST")),
            (Method::POST, "/checkpoint/ns/pod/c", Ok(())),
            (Method::GET, "/checkpoint/ns/pod/c", Err("POST")),
            (Method::POST, "/pods", Err("GET")),
            (Method::POST, "/stats/summary", Ok(())),
            (Method::DELETE, "/containerLogs/ns/pod/c", Err("GET")),
        ] {
            let found = find(&method, path, true);
            match want {
                Ok(()) => assert!(found.is_ok(), "{method} {path}"),
                Err(allow) => assert_eq!(
                    found,
                    Err(NoRoute::MethodNotAllowed(allow)),
                    "{method} {path}"
                ),
            }
        }
    }

    #[test]
    fn debugging_handlers_can_be_switched_off() {
        for path in [
            "/exec/ns/pod/c",
            "/run/x",
            "/runningpods/",
            "/logs/",
            "/debug/pprof/",
            "/containerLogs/a/b/c",
        ] {
            assert_eq!(
                find(&Method::GET, path, false),
                Err(NoRoute::DebuggingDisabled),
                "{path}"
            );
        }
        assert_eq!(find(&Method::GET, "/pods", false), Ok(Route::Pods));
    }

    #[test]
    fn metric_labels_are_bounded() {
        assert_eq!(label("/exec/ns/pod/c"), "exec");
        assert_eq!(label("/metrics/resource"), "metrics/resource");
        assert_eq!(label("/metrics/cadvisor"), "metrics/cadvisor");
        assert_eq!(label("/metrics/elsewhere"), "metrics");
        assert_eq!(label("/wp-login.php"), "other");
        assert_eq!(label("/"), "other");
    }
}
