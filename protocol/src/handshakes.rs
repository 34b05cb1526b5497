//! Counts connections that have not yet proved who they are, so that whoever
//! can reach the port cannot keep the fleet out by opening connections and
//! saying nothing.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// Strangers allowed at once, in all and from one address.
const ALL: usize = 512;
const PER_ADDRESS: usize = 8;

/// The connections in their handshake.
#[derive(Clone, Debug, Default)]
pub(crate) struct Handshakes(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// One of them; over when dropped.
#[derive(Debug)]
pub(crate) struct Pending {
    all: Handshakes,
    address: IpAddr,
}

impl Handshakes {
    /// A place for one more from this address, if there is one.
    pub(crate) fn begin(&self, address: IpAddr) -> Option<Pending> {
        let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pending.values().sum::<usize>() >= ALL {
            return None;
        }
        let count = pending.entry(address).or_default();
        if *count >= PER_ADDRESS {
            return None;
        }
        *count += 1;
        Some(Pending {
            all: self.clone(),
            address,
        })
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let mut pending = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = pending.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                pending.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_cannot_take_all_places() {
        let handshakes = Handshakes::default();
        let silent = IpAddr::from([127, 0, 0, 1]);
        let held: Vec<_> = (0..PER_ADDRESS)
            .map(|_| handshakes.begin(silent).unwrap())
            .collect();
        assert!(handshakes.begin(silent).is_none());
        assert!(handshakes.begin(IpAddr::from([127, 0, 0, 2])).is_some());
        drop(held);
        assert!(handshakes.begin(silent).is_some());
        assert!(handshakes.0.lock().unwrap().is_empty());
    }
}
