//! Whom a pod asks for names.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Pod, PodSpec};
use sandman_protocol::v1;

use crate::config::Config;

/// `GetPodDNS` of `pkg/kubelet/network/dns`.
pub(super) fn dns(config: &Config, pod: &Pod, spec: &PodSpec) -> v1::Dns {
    let mut dns = match spec.dns_policy.as_deref() {
        Some("None") => v1::Dns::default(),
        // Without a cluster DNS there is only the host's; nor does a pod in the host's network
        // ask the cluster's, unless it says so.
        policy
            if policy == Some("Default")
                || config.cluster_dns.is_empty()
                || (spec.host_network == Some(true)
                    && policy != Some("ClusterFirstWithHostNet")) =>
        {
            v1::Dns {
                from_host: true,
                ..v1::Dns::default()
            }
        }
        _ => {
            let domain = &config.cluster_domain;
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            v1::Dns {
                servers: config.cluster_dns.iter().map(ToString::to_string).collect(),
                searches: vec![
                    format!("{namespace}.svc.{domain}"),
                    format!("svc.{domain}"),
                    domain.clone(),
                ],
                options: vec!["ndots:5".to_owned()],
                from_host: false,
            }
        }
    };
    let Some(own) = &spec.dns_config else {
        return dns;
    };
    extend_unique(&mut dns.servers, own.nameservers.as_deref());
    extend_unique(&mut dns.searches, own.searches.as_deref());
    for option in own.options.iter().flatten() {
        let Some(name) = &option.name else { continue };
        dns.options
            .retain(|known| known.split(':').next() != Some(name));
        dns.options.push(match &option.value {
            Some(value) if !value.is_empty() => format!("{name}:{value}"),
            _ => name.clone(),
        });
    }
    dns
}

fn extend_unique(list: &mut Vec<String>, more: Option<&[String]>) {
    let mut seen: BTreeSet<String> = list.iter().cloned().collect();
    list.extend(
        more.into_iter()
            .flatten()
            .filter(|item| seen.insert((*item).clone()))
            .cloned(),
    );
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::pods::spec::tests::build;

    #[test]
    fn resolver_settings() {
        let dns = build(json!({"dnsPolicy": "ClusterFirst"})).dns.unwrap();
        assert_eq!(dns.servers, ["10.96.0.10"]);
        assert_eq!(
            dns.searches,
            ["ns.svc.cluster.local", "svc.cluster.local", "cluster.local"]
        );
        assert_eq!(dns.options, ["ndots:5"]);
        assert!(
            build(json!({"dnsPolicy": "Default"}))
                .dns
                .unwrap()
                .from_host
        );
        let of_host = |policy: &str| {
            let spec = json!({"hostNetwork": true, "dnsPolicy": policy});
            build(spec).dns.unwrap().from_host
        };
        assert!(of_host("ClusterFirst") && !of_host("ClusterFirstWithHostNet"));
        let own = json!({
            "nameservers": ["10.96.0.10", "1.1.1.1"],
            "searches": ["example.com", "cluster.local"],
            "options": [{"name": "ndots", "value": "1"}, {"name": "edns0"}],
        });
        let dns = build(json!({"dnsConfig": own})).dns.unwrap();
        assert_eq!(dns.servers, ["10.96.0.10", "1.1.1.1"]);
        assert_eq!(dns.searches.last().unwrap(), "example.com");
        assert_eq!(dns.options, ["ndots:1", "edns0"]);
        let none = build(json!({"dnsPolicy": "None", "dnsConfig": own}))
            .dns
            .unwrap();
        assert_eq!((none.servers.len(), none.searches.len()), (2, 2));
    }
}
