//! `/metrics/resource`: what metrics-server reads for `kubectl top` and the
//! horizontal autoscaler. The families of the kubelet's
//! `collectors/resource_metrics.go`, in the Prometheus text format.

use super::text::{Seconds, Text};
use super::usage::{ContainerUsage, NodeUsage, PodUsage};

/// The metrics as text; without a usage only the word that there is none.
pub(in crate::kubelet_api) fn render(usage: Option<&NodeUsage>) -> String {
    let mut text = Text::default();
    if let Some(usage) = usage {
        node(&mut text, usage);
        containers(&mut text, &usage.pods);
        pods(&mut text, &usage.pods);
    }
    let failed = if usage.is_some() { 0 } else { 1 };
    for name in ["resource_scrape_error", "scrape_error"] {
        text.family(
            name,
            "gauge",
            "1 if there was an error while getting container metrics, 0 otherwise",
        );
        text.sample(name, &[], failed, None);
    }
    text.0
}

fn node(text: &mut Text, usage: &NodeUsage) {
    let at = Some(usage.at);
    if usage.cpu_nanos > 0 {
        let name = "node_cpu_usage_seconds_total";
        text.family(
            name,
            "counter",
            "Cumulative cpu time consumed by the node in core-seconds",
        );
        text.sample(name, &[], Seconds(usage.cpu_nanos), at);
    }
    if usage.memory.memory_working_set_bytes > 0 {
        let name = "node_memory_working_set_bytes";
        text.family(name, "gauge", "Current working set of the node in bytes");
        text.sample(name, &[], usage.memory.memory_working_set_bytes, at);
    }
    if usage.memory.swap_bytes > 0 {
        let name = "node_swap_usage_bytes";
        text.family(name, "gauge", "Current swap usage of the node in bytes");
        text.sample(name, &[], usage.memory.swap_bytes, at);
    }
}

fn containers(text: &mut Text, pods: &[PodUsage]) {
    type Value = fn(&ContainerUsage) -> Option<String>;
    let families: [(&str, &str, &str, bool, Value); 4] = [
        (
            "container_cpu_usage_seconds_total",
            "counter",
            "Cumulative cpu time consumed by the container in core-seconds",
            true,
            |one| Some(Seconds(one.usage.cpu_nanos).to_string()),
        ),
        (
            "container_memory_working_set_bytes",
            "gauge",
            "Current working set of the container in bytes",
            true,
            |one| Some(one.usage.memory_working_set_bytes.to_string()),
        ),
        (
            "container_start_time_seconds",
            "gauge",
            "Start time of the container since unix epoch in seconds",
            false,
            |one| Some(one.started?.as_duration().as_secs_f64().to_string()),
        ),
        (
            "container_swap_usage_bytes",
            "gauge",
            "Current amount of the container swap usage in bytes",
            true,
            |one| (one.usage.swap_bytes > 0).then(|| one.usage.swap_bytes.to_string()),
        ),
    ];
    for (name, kind, help, timed, value) in families {
        let samples = pods
            .iter()
            .flat_map(|pod| pod.containers.iter().map(move |container| (pod, container)))
            .filter_map(|(pod, container)| Some((pod, container, value(container)?)));
        let mut samples = samples.peekable();
        if samples.peek().is_none() {
            continue;
        }
        text.family(name, kind, help);
        for (pod, container, value) in samples {
            let labels = [
                ("container", container.name.as_str()),
                ("namespace", pod.namespace.as_str()),
                ("pod", pod.name.as_str()),
            ];
            text.sample(name, &labels, value, timed.then_some(pod.at));
        }
    }
}

fn pods(text: &mut Text, pods: &[PodUsage]) {
    type Value = fn(&PodUsage) -> Option<String>;
    let families: [(&str, &str, &str, Value); 3] = [
        (
            "pod_cpu_usage_seconds_total",
            "counter",
            "Cumulative cpu time consumed by the pod in core-seconds",
            |pod| Some(Seconds(pod.total().cpu_nanos).to_string()),
        ),
        (
            "pod_memory_working_set_bytes",
            "gauge",
            "Current working set of the pod in bytes",
            |pod| Some(pod.total().memory_working_set_bytes.to_string()),
        ),
        (
            "pod_swap_usage_bytes",
            "gauge",
            "Current amount of the pod swap usage in bytes",
            |pod| Some(pod.total().swap_bytes.to_string()).filter(|bytes| bytes != "0"),
        ),
    ];
    for (name, kind, help, value) in families {
        let samples = pods.iter().filter_map(|pod| Some((pod, value(pod)?)));
        let mut samples = samples.peekable();
        if samples.peek().is_none() {
            continue;
        }
        text.family(name, kind, help);
        for (pod, value) in samples {
            let labels = [
                ("namespace", pod.namespace.as_str()),
                ("pod", pod.name.as_str()),
            ];
            text.sample(name, &labels, value, Some(pod.at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::usage::tests::{now, report, sandbox, view};
    use super::super::{NodeCounter, join};
    use super::*;

    #[test]
    fn families_and_samples() {
        let whole = sandbox("1", &[("x", 1_500_000_000, 4096), ("y", 250, 8192)]);
        let reports = [("a".into(), report(7_000_000_001, vec![whole]))];
        let usage = join(&reports, &view(), &mut NodeCounter::default(), now());
        let text = render(usage.as_ref());
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            samples,
            [
                "node_cpu_usage_seconds_total 7.000000001 1795953600500",
                "node_memory_working_set_bytes 1000 1795953600500",
                r#"container_cpu_usage_seconds_total{container="x",namespace="ns",pod="pod-1"} 1.500000000 1795953600500"#,
                r#"container_cpu_usage_seconds_total{container="y",namespace="ns",pod="pod-1"} 0.000000250 1795953600500"#,
                r#"container_memory_working_set_bytes{container="x",namespace="ns",pod="pod-1"} 4096 1795953600500"#,
                r#"container_memory_working_set_bytes{container="y",namespace="ns",pod="pod-1"} 8192 1795953600500"#,
                r#"container_start_time_seconds{container="x",namespace="ns",pod="pod-1"} 1700000000"#,
                r#"container_start_time_seconds{container="y",namespace="ns",pod="pod-1"} 1700000000"#,
                r#"pod_cpu_usage_seconds_total{namespace="ns",pod="pod-1"} 1.500000250 1795953600500"#,
                r#"pod_memory_working_set_bytes{namespace="ns",pod="pod-1"} 12288 1795953600500"#,
                "resource_scrape_error 0",
                "scrape_error 0",
            ]
        );
        for family in text.lines().filter(|line| line.starts_with("# TYPE")) {
            let name = family.split(' ').nth(2).expect("a name");
            assert!(text.contains(&format!("# HELP {name} ")), "{name}");
        }
    }

    #[test]
    fn no_usage_is_an_error_and_no_series() {
        let text = render(None);
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(samples, ["resource_scrape_error 1", "scrape_error 1"]);
    }
}
