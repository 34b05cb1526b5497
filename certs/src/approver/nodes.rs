//! The nodes whose certificates may be approved, and the addresses that are theirs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::str::FromStr;

use crate::error::Error;
use crate::name::check_subdomain;

/// One node and what its certificate may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedNode {
    /// Name of the Node object.
    pub name: String,
    /// Addresses.
    pub ips: BTreeSet<IpAddr>,
    /// DNS names; the node's own name is always among them.
    pub dns: BTreeSet<String>,
}

impl FromStr for ExpectedNode {
    type Err = Error;

    /// Parses `NAME=IP|DNS[,IP|DNS...]`.
    fn from_str(text: &str) -> Result<Self, Error> {
        const FIELD: &str = "--node";
        let (name, addresses) = text.split_once('=').ok_or_else(|| Error::Invalid {
            field: FIELD,
            value: text.to_owned(),
            reason: "is not of the form NAME=ADDRESS[,ADDRESS...]".to_owned(),
        })?;
        check_subdomain(FIELD, name)?;
        let mut node = Self {
            name: name.to_owned(),
            ips: BTreeSet::new(),
            dns: BTreeSet::from([name.to_owned()]),
        };
        for address in addresses.split(',') {
            if let Ok(ip) = address.parse::<IpAddr>() {
                node.ips.insert(ip.to_canonical());
            } else {
                check_subdomain(FIELD, address)?;
                node.dns.insert(address.to_owned());
            }
        }
        Ok(node)
    }
}

/// All nodes of this approver, by name.
#[derive(Clone, Debug, Default)]
pub struct ExpectedNodes(BTreeMap<String, ExpectedNode>);

impl ExpectedNodes {
    /// The node of this name, if it is one of ours.
    pub fn get(&self, name: &str) -> Option<&ExpectedNode> {
        self.0.get(name)
    }
}

impl FromIterator<ExpectedNode> for ExpectedNodes {
    /// Addresses of a node given more than once add up.
    fn from_iter<I: IntoIterator<Item = ExpectedNode>>(nodes: I) -> Self {
        let mut all: BTreeMap<String, ExpectedNode> = BTreeMap::new();
        for node in nodes {
            if let Some(known) = all.get_mut(&node.name) {
                known.ips.extend(node.ips);
                known.dns.extend(node.dns);
            } else {
                all.insert(node.name.clone(), node);
            }
        }
        Self(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_names_are_told_apart() {
        let node: ExpectedNode = "sandman=10.1.0.5,fd00::5,vnode.example.org"
            .parse()
            .unwrap();
        assert_eq!(node.ips.len(), 2);
        assert_eq!(
            node.dns,
            ["sandman", "vnode.example.org"].map(str::to_owned).into()
        );
    }

    #[test]
    fn bad_forms_are_refused() {
        for bad in [
            "sandman",
            "=10.1.0.5",
            "sandman=",
            "sandman=10.1.0.5,",
            "sandman=*",
            "A=::1",
        ] {
            assert!(bad.parse::<ExpectedNode>().is_err(), "{bad:?} was accepted");
        }
    }

    #[test]
    fn a_node_given_twice_has_both_addresses() {
        let nodes: ExpectedNodes = ["a=10.0.0.1", "a=10.0.0.2"]
            .map(|text| text.parse().unwrap())
            .into_iter()
            .collect();
        assert_eq!(nodes.get("a").unwrap().ips.len(), 2);
    }
}
