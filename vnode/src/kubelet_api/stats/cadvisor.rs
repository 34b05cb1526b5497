//! `/metrics/cadvisor`: the families of containers and their networks that
//! dashboards and alerts are built on, with cadvisor's names and labels.
//!
//! Families that only a physical node has an answer for (disk I/O, machine) are
//! left out, as cadvisor does for what a platform does not measure.

use jiff::Timestamp;
use sandman_protocol::v1::{NetworkUsage, Usage};

use super::text::{Seconds, Text};
use super::usage::{ContainerUsage, NodeUsage, PodUsage};

/// The kernel's default period of a CPU limit, in microseconds.
const CPU_PERIOD: u64 = 100_000;

/// The metrics as text; without a usage only the word that there is none.
pub(in crate::kubelet_api) fn render(usage: Option<&NodeUsage>) -> String {
    let mut text = Text::default();
    if let Some(usage) = usage {
        containers(&mut text, usage);
        networks(&mut text, &usage.pods);
    }
    let name = "container_scrape_error";
    let help = "1 if there was an error while getting container metrics, 0 otherwise";
    text.family(name, "gauge", help);
    text.sample(name, &[], if usage.is_some() { 0 } else { 1 }, None);
    text.0
}

/// What a sample is about; empty texts are written, as cadvisor does.
#[derive(Default)]
struct Labels<'a> {
    container: &'a str,
    id: String,
    image: &'a str,
    name: &'a str,
    namespace: &'a str,
    pod: &'a str,
}

impl<'a> Labels<'a> {
    fn container(pod: &'a PodUsage, container: &'a ContainerUsage) -> Self {
        Self {
            container: &container.name,
            id: format!("/pod{}/{}", pod.uid, container.id),
            image: &container.image,
            name: &container.id,
            namespace: &pod.namespace,
            pod: &pod.name,
        }
    }

    fn pod(pod: &'a PodUsage) -> Self {
        Self {
            id: format!("/pod{}", pod.uid),
            namespace: &pod.namespace,
            pod: &pod.name,
            ..Self::default()
        }
    }

    fn sample(
        &self,
        text: &mut Text,
        name: &str,
        extra: Option<(&str, &str)>,
        value: impl std::fmt::Display,
        at: Timestamp,
    ) {
        let mut labels = vec![
            ("container", self.container),
            ("id", &self.id),
            ("image", self.image),
            ("name", self.name),
            ("namespace", self.namespace),
            ("pod", self.pod),
        ];
        labels.extend(extra);
        labels.sort_unstable_by_key(|(name, _)| *name);
        text.sample(name, &labels, value, Some(at));
    }
}

type Extra = Option<(&'static str, &'static str)>;
type OfUsage = fn(&Usage) -> Option<String>;

/// Families of a cgroup: name, type, help, a further label, value.
const CGROUP: &[(&str, &str, &str, Extra, OfUsage)] = &[
    (
        "container_cpu_usage_seconds_total",
        "counter",
        "Cumulative cpu time consumed in seconds.",
        Some(("cpu", "total")),
        |usage| seconds(usage.cpu_nanos),
    ),
    (
        "container_cpu_user_seconds_total",
        "counter",
        "Cumulative user cpu time consumed in seconds.",
        None,
        |usage| seconds(usage.cpu_user_nanos),
    ),
    (
        "container_cpu_system_seconds_total",
        "counter",
        "Cumulative system cpu time consumed in seconds.",
        None,
        |usage| seconds(usage.cpu_system_nanos),
    ),
    (
        "container_cpu_cfs_periods_total",
        "counter",
        "Number of elapsed enforcement period intervals.",
        None,
        |usage| limited(usage, usage.cpu_periods.to_string()),
    ),
    (
        "container_cpu_cfs_throttled_periods_total",
        "counter",
        "Number of throttled period intervals.",
        None,
        |usage| limited(usage, usage.cpu_throttled_periods.to_string()),
    ),
    (
        "container_cpu_cfs_throttled_seconds_total",
        "counter",
        "Total time duration the container has been throttled.",
        None,
        |usage| limited(usage, Seconds(usage.cpu_throttled_nanos).to_string()),
    ),
    (
        "container_memory_usage_bytes",
        "gauge",
        "Current memory usage in bytes, including all memory regardless of when it was accessed",
        None,
        |usage| number(usage.memory_usage_bytes),
    ),
    (
        "container_memory_working_set_bytes",
        "gauge",
        "Current working set in bytes.",
        None,
        |usage| number(usage.memory_working_set_bytes),
    ),
    (
        "container_memory_rss",
        "gauge",
        "Size of RSS in bytes.",
        None,
        |usage| number(usage.memory_rss_bytes),
    ),
    (
        "container_memory_cache",
        "gauge",
        "Number of bytes of page cache memory.",
        None,
        |usage| number(usage.memory_cache_bytes),
    ),
    (
        "container_memory_swap",
        "gauge",
        "Container swap usage in bytes.",
        None,
        |usage| number(usage.swap_bytes),
    ),
    (
        "container_oom_events_total",
        "counter",
        "Count of out of memory events observed for the container",
        None,
        |usage| number(usage.oom_kills),
    ),
    (
        "container_processes",
        "gauge",
        "Number of processes running inside the container.",
        None,
        |usage| number(usage.processes),
    ),
];

type OfContainer = fn(&ContainerUsage) -> Option<String>;

/// Families of what a container was given.
const GIVEN: &[(&str, &str, OfContainer)] = &[
    (
        "container_start_time_seconds",
        "Start time of the container since unix epoch in seconds.",
        |container| Some(container.started?.as_second().to_string()),
    ),
    (
        "container_spec_cpu_period",
        "CPU period of the container.",
        |_| number(CPU_PERIOD),
    ),
    (
        "container_spec_cpu_quota",
        "CPU quota of the container.",
        |container| {
            let millis = container.cpu_limit_millis?;
            number(millis.saturating_mul(CPU_PERIOD / 1000))
        },
    ),
    (
        "container_spec_cpu_shares",
        "CPU share of the container.",
        // The kubelet's MilliCPUToShares.
        |container| number((container.cpu_request_millis.saturating_mul(1024) / 1000).max(2)),
    ),
    (
        "container_spec_memory_limit_bytes",
        "Memory limit for the container.",
        |container| number(container.memory_limit_bytes.unwrap_or(0)),
    ),
];

fn containers(text: &mut Text, usage: &NodeUsage) {
    let all = || {
        let pods = usage.pods.iter();
        pods.flat_map(|pod| pod.containers.iter().map(move |one| (pod, one)))
    };
    for (name, kind, help, extra, value) in CGROUP {
        let node = (*name == "container_cpu_usage_seconds_total")
            .then(|| Seconds(usage.cpu_nanos).to_string());
        let node = node.or_else(|| {
            let memory = name.starts_with("container_memory_");
            memory.then(|| value(&usage.memory)).flatten()
        });
        let samples = all().filter_map(|(pod, one)| Some((pod, one, value(&one.usage)?)));
        let mut samples = samples.peekable();
        if node.is_none() && samples.peek().is_none() {
            continue;
        }
        text.family(name, kind, help);
        if let Some(value) = node {
            let root = Labels {
                id: "/".to_owned(),
                ..Labels::default()
            };
            root.sample(text, name, *extra, value, usage.at);
        }
        for (pod, one, value) in samples {
            Labels::container(pod, one).sample(text, name, *extra, value, pod.at);
        }
    }
    faults(text, &usage.pods);
    for (name, help, value) in GIVEN {
        let samples = all().filter_map(|(pod, one)| Some((pod, one, value(one)?)));
        let mut samples = samples.peekable();
        if samples.peek().is_some() {
            text.family(name, "gauge", help);
        }
        for (pod, one, value) in samples {
            Labels::container(pod, one).sample(text, name, None, value, pod.at);
        }
    }
}

/// Page faults have two further labels.
fn faults(text: &mut Text, pods: &[PodUsage]) {
    let name = "container_memory_failures_total";
    if pods.is_empty() {
        return;
    }
    text.family(
        name,
        "counter",
        "Cumulative count of memory allocation failures.",
    );
    for pod in pods {
        for one in &pod.containers {
            let labels = Labels::container(pod, one);
            for (kind, value) in [
                ("pgfault", one.usage.page_faults),
                ("pgmajfault", one.usage.major_page_faults),
            ] {
                let labels = [
                    ("container", labels.container),
                    ("failure_type", kind),
                    ("id", &labels.id),
                    ("image", labels.image),
                    ("name", labels.name),
                    ("namespace", labels.namespace),
                    ("pod", labels.pod),
                    ("scope", "container"),
                ];
                text.sample(name, &labels, value, Some(pod.at));
            }
        }
    }
}

type OfNetwork = fn(&NetworkUsage) -> u64;

const NETWORK: &[(&str, &str, OfNetwork)] = &[
    (
        "container_network_receive_bytes_total",
        "Cumulative count of bytes received",
        |usage| usage.rx_bytes,
    ),
    (
        "container_network_receive_packets_total",
        "Cumulative count of packets received",
        |usage| usage.rx_packets,
    ),
    (
        "container_network_receive_errors_total",
        "Cumulative count of errors encountered while receiving",
        |usage| usage.rx_errors,
    ),
    (
        "container_network_receive_packets_dropped_total",
        "Cumulative count of packets dropped while receiving",
        |usage| usage.rx_dropped,
    ),
    (
        "container_network_transmit_bytes_total",
        "Cumulative count of bytes transmitted",
        |usage| usage.tx_bytes,
    ),
    (
        "container_network_transmit_packets_total",
        "Cumulative count of packets transmitted",
        |usage| usage.tx_packets,
    ),
    (
        "container_network_transmit_errors_total",
        "Cumulative count of errors encountered while transmitting",
        |usage| usage.tx_errors,
    ),
    (
        "container_network_transmit_packets_dropped_total",
        "Cumulative count of packets dropped while transmitting",
        |usage| usage.tx_dropped,
    ),
];

fn networks(text: &mut Text, pods: &[PodUsage]) {
    for (name, help, value) in NETWORK {
        let samples = pods.iter().filter_map(|pod| Some((pod, pod.network?)));
        let mut samples = samples.peekable();
        if samples.peek().is_some() {
            text.family(name, "counter", help);
        }
        for (pod, network) in samples {
            let extra = Some(("interface", "eth0"));
            Labels::pod(pod).sample(text, name, extra, value(&network), pod.at);
        }
    }
}

fn number(value: u64) -> Option<String> {
    Some(value.to_string())
}

fn seconds(nanos: u64) -> Option<String> {
    Some(Seconds(nanos).to_string())
}

/// Only a container with a CPU limit has periods.
fn limited(usage: &Usage, value: String) -> Option<String> {
    (usage.cpu_periods > 0).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::super::usage::tests::{now, report, sandbox, view};
    use super::super::{NodeCounter, join};
    use super::*;

    fn text() -> String {
        let mut one = sandbox("2", &[("x", 1_500_000_000, 4096)]);
        one.network = Some(NetworkUsage {
            rx_bytes: 10,
            tx_dropped: 3,
            ..NetworkUsage::default()
        });
        if let Some(usage) = &mut one.containers[0].usage {
            usage.cpu_periods = 4;
            usage.page_faults = 9;
        }
        let reports = [("b".into(), report(7, vec![one]))];
        render(join(&reports, &view(), &mut NodeCounter::default(), now()).as_ref())
    }

    #[test]
    fn samples_have_cadvisors_names_and_labels() {
        let text = text();
        for sample in [
            r#"container_cpu_usage_seconds_total{container="",cpu="total",id="/",image="",name="",namespace="",pod=""} 0.000000007 1795953600500"#,
            r#"container_cpu_usage_seconds_total{container="x",cpu="total",id="/pod2/c-x",image="i",name="c-x",namespace="ns",pod="pod-2"} 1.500000000 1795953600500"#,
            r#"container_cpu_cfs_periods_total{container="x",id="/pod2/c-x",image="i",name="c-x",namespace="ns",pod="pod-2"} 4 1795953600500"#,
            r#"container_memory_working_set_bytes{container="x",id="/pod2/c-x",image="i",name="c-x",namespace="ns",pod="pod-2"} 4096 1795953600500"#,
            r#"container_memory_failures_total{container="x",failure_type="pgfault",id="/pod2/c-x",image="i",name="c-x",namespace="ns",pod="pod-2",scope="container"} 9 1795953600500"#,
            r#"container_start_time_seconds{container="x",id="/pod2/c-x",image="i",name="c-x",namespace="ns",pod="pod-2"} 1700000000 1795953600500"#,
            r#"container_spec_cpu_quota{container="x",id="/pod2/c-x",image="i",name="c-x",namespace="ns",pod="pod-2"} 150000 1795953600500"#,
            r#"container_spec_cpu_shares{container="x",id="/pod2/c-x",image="i",name="c-x",namespace="ns",pod="pod-2"} 512 1795953600500"#,
            r#"container_spec_memory_limit_bytes{container="x",id="/pod2/c-x",image="i",name="c-x",namespace="ns",pod="pod-2"} 1048576 1795953600500"#,
            r#"container_network_receive_bytes_total{container="",id="/pod2",image="",interface="eth0",name="",namespace="ns",pod="pod-2"} 10 1795953600500"#,
            r#"container_network_transmit_packets_dropped_total{container="",id="/pod2",image="",interface="eth0",name="",namespace="ns",pod="pod-2"} 3 1795953600500"#,
            "container_scrape_error 0",
        ] {
            assert!(text.lines().any(|line| line == sample), "{sample}\n{text}");
        }
    }

    #[test]
    fn a_family_stands_together_and_once() {
        let text = text();
        let mut seen = Vec::new();
        for line in text.lines() {
            let name = match line.strip_prefix("# TYPE ") {
                Some(rest) => rest.split(' ').next(),
                None if line.starts_with('#') => continue,
                None => line.split(['{', ' ']).next(),
            }
            .expect("a name");
            if seen.last() != Some(&name) {
                assert!(!seen.contains(&name), "{name} stands twice");
                assert!(line.starts_with("# TYPE "), "{line} before its type");
                seen.push(name);
            }
        }
        assert!(seen.len() > 20, "{seen:?}");
    }

    #[test]
    fn no_usage_is_an_error() {
        assert!(render(None).ends_with("container_scrape_error 1\n"));
    }
}
