//! What is measured: Sandman or one of its peers, each a node of the same cluster.

use clap::ValueEnum;
use serde::Serialize;

/// One node under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Subject {
    /// The virtual node with its hosts.
    #[value(skip)]
    Sandman,
    /// The virtual node with hosts that do no work: the rate that the control plane allows.
    Null,
    /// A kubelet with containerd and runc.
    Kubelet,
    /// containerd's own runc shim on a host of Sandman's, without a kubelet.
    #[value(skip)]
    Containerd,
}

impl Subject {
    /// As it is written in results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sandman => "sandman",
            Self::Null => "null",
            Self::Kubelet => "kubelet",
            Self::Containerd => "containerd",
        }
    }

    /// What `hack/dev start` calls a peer; Sandman itself is part of every dev cluster.
    pub(crate) fn component(self) -> Option<&'static str> {
        match self {
            Self::Sandman | Self::Containerd => None,
            Self::Null => Some("vnode-null"),
            Self::Kubelet => Some("kubelet-peer"),
        }
    }

    /// Name of its Node object.
    pub(crate) fn node(self) -> &'static str {
        match self {
            Self::Sandman | Self::Containerd => "sandman",
            Self::Null => "sandman-null",
            Self::Kubelet => "peer-0",
        }
    }
}

/// The subjects of a comparison, each once, Sandman first unless it is left out.
pub(crate) fn subjects(peers: &[Subject], peers_only: bool) -> Vec<Subject> {
    let mut all = Vec::new();
    if !peers_only {
        all.push(Subject::Sandman);
    }
    for &peer in peers {
        if !all.contains(&peer) {
            all.push(peer);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_subject_is_measured_once() {
        let peers = [Subject::Kubelet, Subject::Null, Subject::Kubelet];
        assert_eq!(
            subjects(&peers, false),
            [Subject::Sandman, Subject::Kubelet, Subject::Null]
        );
        assert_eq!(subjects(&peers, true), [Subject::Kubelet, Subject::Null]);
    }

    #[test]
    fn names_are_those_of_the_command_line() {
        for peer in Subject::value_variants() {
            let name = peer.to_possible_value().unwrap();
            assert_eq!(name.get_name(), peer.name());
            assert!(peer.component().is_some());
        }
    }
}
