//! Who of the fleet fetches a span from the registry. Pure.
//!
//! Every host ranks all hosts for a span by a hash of both, without asking anybody. As long as they
//! know the same hosts, they agree on who is first: he asks the registry, the others ask him. A host
//! that comes or goes moves only the spans that are his.

use crate::LayerDigest;

/// The host that comes first for a span, of those given; none of none.
#[must_use]
pub fn first<'h>(
    layer: LayerDigest,
    span: u32,
    hosts: impl IntoIterator<Item = &'h str>,
) -> Option<&'h str> {
    // Equal weights need equal names.
    hosts
        .into_iter()
        .max_by_key(|host| (weight(layer, span, host), *host))
}

fn weight(layer: LayerDigest, span: u32, host: &str) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&layer.0);
    hasher.update(&span.to_le_bytes());
    hasher.update(host.as_bytes());
    let mut weight = [0; 8];
    weight.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(weight)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const LAYER: LayerDigest = LayerDigest([3; 32]);
    const HOSTS: [&str; 5] = ["a", "b", "c", "d", "e"];

    #[test]
    fn all_hosts_agree_whatever_their_order() {
        let mut turned = HOSTS;
        turned.reverse();
        for span in 0..100 {
            assert_eq!(first(LAYER, span, HOSTS), first(LAYER, span, turned));
        }
        assert_eq!(first(LAYER, 0, []), None);
    }

    #[test]
    fn spans_are_spread() {
        let mut counts = HashMap::new();
        for span in 0..1000 {
            *counts.entry(first(LAYER, span, HOSTS)).or_insert(0) += 1;
        }
        assert!(
            counts.values().all(|count| (130..270).contains(count)),
            "{counts:?}"
        );
    }

    #[test]
    fn a_host_that_goes_moves_only_its_own_spans() {
        for span in 0..200 {
            let before = first(LAYER, span, HOSTS);
            let after = first(LAYER, span, HOSTS.into_iter().filter(|host| *host != "c"));
            assert!(before == after || before == Some("c"), "{span}");
        }
    }
}
