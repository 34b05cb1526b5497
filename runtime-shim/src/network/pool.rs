//! Addresses of this host's pods: a bitmap over the pod CIDR. Pure; what the
//! kernel already uses is taught to it at start.

use std::collections::HashMap;
use std::net::Ipv4Addr;

use super::Ipv4Cidr;

/// Which pod has which address.
#[derive(Debug)]
pub(super) struct AddressPool {
    cidr: Ipv4Cidr,
    taken: Vec<u64>,
    by_uid: HashMap<String, Ipv4Addr>,
    // Goes round the range, so that a freed address rests before its next use
    // and no peer's stale connection meets a stranger.
    next: u64,
}

impl AddressPool {
    /// The first and last address of the range are kept out of use, since
    /// much software takes them for network and broadcast.
    pub(super) fn new(cidr: Ipv4Cidr) -> Self {
        let words = usize::try_from(cidr.size().div_ceil(64)).unwrap_or(usize::MAX);
        let mut pool = Self {
            cidr,
            taken: vec![0; words],
            by_uid: HashMap::new(),
            next: 0,
        };
        if cidr.prefix() < 31 {
            pool.set(0, true);
            pool.set(cidr.size() - 1, true);
        }
        pool
    }

    /// The pod's address; a new one on the first call. `None` when all are taken.
    pub(super) fn allocate(&mut self, uid: &str) -> Option<Ipv4Addr> {
        if let Some(address) = self.by_uid.get(uid) {
            return Some(*address);
        }
        let index = self.find_free()?;
        self.set(index, true);
        self.next = (index + 1) % self.cidr.size();
        let address = self.address(index);
        self.by_uid.insert(uid.to_owned(), address);
        Some(address)
    }

    /// Records an address that a pod holds already, be it of an earlier range. False if it is
    /// another pod's, or the pod has another.
    pub(super) fn learn(&mut self, uid: &str, address: Ipv4Addr) -> bool {
        if let Some(known) = self.by_uid.get(uid) {
            return *known == address;
        }
        if let Some(index) = self.index(address) {
            if self.is_taken(index) {
                return false;
            }
            self.set(index, true);
        }
        self.by_uid.insert(uid.to_owned(), address);
        true
    }

    /// Frees the pod's address, if it has one.
    pub(super) fn release(&mut self, uid: &str) {
        if let Some(address) = self.by_uid.remove(uid)
            && let Some(index) = self.index(address)
        {
            self.set(index, false);
        }
    }

    /// The pod's address.
    pub(super) fn get(&self, uid: &str) -> Option<Ipv4Addr> {
        self.by_uid.get(uid).copied()
    }

    fn find_free(&self) -> Option<u64> {
        let size = self.cidr.size();
        let after = (self.next..size).find(|index| !self.is_taken(*index));
        after.or_else(|| (0..self.next.min(size)).find(|index| !self.is_taken(*index)))
    }

    fn is_taken(&self, index: u64) -> bool {
        let word = usize::try_from(index / 64)
            .ok()
            .and_then(|word| self.taken.get(word));
        word.is_none_or(|word| word >> (index % 64) & 1 == 1)
    }

    fn set(&mut self, index: u64, taken: bool) {
        let word = usize::try_from(index / 64)
            .ok()
            .and_then(|word| self.taken.get_mut(word));
        if let Some(word) = word {
            let bit = 1 << (index % 64);
            *word = if taken { *word | bit } else { *word & !bit };
        }
    }

    fn index(&self, address: Ipv4Addr) -> Option<u64> {
        let offset = u64::from(address.to_bits()).checked_sub(self.cidr.network().to_bits().into());
        offset.filter(|offset| *offset < self.cidr.size())
    }

    fn address(&self, index: u64) -> Ipv4Addr {
        // The index is below the size of the range, which fits the address space.
        let offset = u32::try_from(index).unwrap_or(u32::MAX);
        Ipv4Addr::from_bits(self.cidr.network().to_bits().wrapping_add(offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(cidr: &str) -> AddressPool {
        AddressPool::new(cidr.parse().unwrap())
    }

    #[test]
    fn gives_each_pod_one_address_until_none_is_left() {
        let mut pool = pool("10.64.0.0/29");
        let mut seen = Vec::new();
        for uid in ["a", "b", "c", "d", "e", "f"] {
            let address = pool.allocate(uid).unwrap();
            assert_eq!(pool.allocate(uid), Some(address));
            seen.push(address.octets()[3]);
        }
        assert_eq!(seen, [1, 2, 3, 4, 5, 6]);
        assert_eq!(pool.allocate("g"), None);
        pool.release("c");
        assert_eq!(pool.allocate("g"), Some(Ipv4Addr::new(10, 64, 0, 3)));
    }

    #[test]
    fn a_freed_address_rests() {
        let mut pool = pool("10.64.0.0/24");
        let first = pool.allocate("a").unwrap();
        pool.release("a");
        assert_ne!(pool.allocate("b"), Some(first));
    }

    #[test]
    fn keeps_off_learnt_addresses() {
        let mut pool = pool("10.64.0.0/30");
        assert!(pool.learn("old", Ipv4Addr::new(10, 64, 0, 1)));
        assert!(pool.learn("old", Ipv4Addr::new(10, 64, 0, 1)));
        assert!(!pool.learn("old", Ipv4Addr::new(10, 64, 0, 2)));
        assert!(!pool.learn("other", Ipv4Addr::new(10, 64, 0, 1)));
        // The range was another when this one began.
        assert!(pool.learn("stranger", Ipv4Addr::new(10, 65, 0, 1)));
        assert_eq!(pool.allocate("old"), Some(Ipv4Addr::new(10, 64, 0, 1)));
        assert_eq!(pool.allocate("new"), Some(Ipv4Addr::new(10, 64, 0, 2)));
        assert_eq!(pool.get("other"), None);
        assert_eq!(pool.get("stranger"), Some(Ipv4Addr::new(10, 65, 0, 1)));
        assert_eq!(pool.allocate("more"), None);
    }

    #[test]
    fn ranges_of_one_and_two_addresses_are_used_whole() {
        assert_eq!(
            pool("10.0.0.9/32").allocate("a"),
            Some(Ipv4Addr::new(10, 0, 0, 9))
        );
        let mut pair = pool("10.0.0.8/31");
        assert!(pair.allocate("a").is_some() && pair.allocate("b").is_some());
        assert_eq!(pair.allocate("c"), None);
    }
}
