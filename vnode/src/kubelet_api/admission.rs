//! Keeps places free for callers that are allowed something. Sandboxes run code
//! of strangers and may reach this port: without a bound, one of them could hold
//! every connection and so stop exec and logs for all.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Connections of strangers, all together and of one address.
const MAX_STRANGERS: usize = 1024;
const MAX_STRANGERS_PER_ADDRESS: usize = 64;
/// An address from which an authorized request came is no stranger for this long.
const REMEMBERED: Duration = Duration::from_secs(10 * 60);
/// Addresses that are remembered: API servers and scrapers are few.
const MAX_REMEMBERED: usize = 1024;

/// Counts the connections that have not had an authorized request yet.
#[derive(Debug, Default)]
pub(super) struct Admission(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    strangers: usize,
    by_address: HashMap<IpAddr, usize>,
    known: HashMap<IpAddr, Instant>,
}

/// A connection's place. A stranger's counts until it is trusted or dropped.
#[derive(Debug)]
pub(super) struct Place {
    admission: Arc<Admission>,
    address: IpAddr,
    stranger: Mutex<bool>,
}

impl Admission {
    /// A place for a new connection, unless there are too many strangers.
    pub(super) fn admit(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let address = address.to_canonical();
        let mut state = self.lock();
        let known = state
            .known
            .get(&address)
            .is_some_and(|seen| seen.elapsed() < REMEMBERED);
        if !known {
            let here = state.by_address.get(&address).copied().unwrap_or(0);
            if state.strangers >= MAX_STRANGERS || here >= MAX_STRANGERS_PER_ADDRESS {
                return None;
            }
            state.strangers += 1;
            *state.by_address.entry(address).or_default() += 1;
        }
        Some(Place {
            admission: Arc::clone(self),
            address,
            stranger: Mutex::new(!known),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Notes that a request of this connection was authorized. Being recognised
    /// is not enough: every pod may hold a token that says who it is.
    pub(super) fn trust(&self) {
        self.release();
        let mut state = self.admission.lock();
        if state.known.len() >= MAX_REMEMBERED && !state.known.contains_key(&self.address) {
            state.known.retain(|_, seen| seen.elapsed() < REMEMBERED);
        }
        if state.known.len() < MAX_REMEMBERED || state.known.contains_key(&self.address) {
            state.known.insert(self.address, Instant::now());
        }
    }

    /// Gives a stranger's place back, once.
    fn release(&self) {
        let mut stranger = self.stranger.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::take(&mut *stranger) {
            return;
        }
        let mut state = self.admission.lock();
        state.strangers -= 1;
        if let Some(here) = state.by_address.get_mut(&self.address) {
            *here -= 1;
            if *here == 0 {
                state.by_address.remove(&self.address);
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn address(n: u32) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from_bits(n))
    }

    #[test]
    fn one_address_cannot_take_all_places() {
        let admission = Arc::new(Admission::default());
        let mut places: Vec<Place> = (0..MAX_STRANGERS_PER_ADDRESS)
            .map(|_| admission.admit(address(1)).expect("a place"))
            .collect();
        assert!(admission.admit(address(1)).is_none());
        assert!(admission.admit(address(2)).is_some());
        places.pop();
        assert!(admission.admit(address(1)).is_some());
    }

    #[test]
    fn many_strangers_do_not_keep_a_known_caller_out() {
        let admission = Arc::new(Admission::default());
        let trusted = admission.admit(address(0)).expect("a place");
        trusted.trust();
        let strangers: Vec<Place> = (1..).map_while(|n| admission.admit(address(n))).collect();
        assert_eq!(strangers.len(), MAX_STRANGERS);
        let more: Vec<Place> = (0..2 * MAX_STRANGERS_PER_ADDRESS)
            .map_while(|_| admission.admit(address(0)))
            .collect();
        assert_eq!(more.len(), 2 * MAX_STRANGERS_PER_ADDRESS);
        drop((trusted, strangers, more));
        let state = admission.lock();
        assert_eq!((state.strangers, state.by_address.len()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn trust_fades() {
        let admission = Arc::new(Admission::default());
        admission.admit(address(0)).expect("a place").trust();
        tokio::time::advance(REMEMBERED).await;
        let places: Vec<Place> = (0..2 * MAX_STRANGERS_PER_ADDRESS)
            .map_while(|_| admission.admit(address(0)))
            .collect();
        assert_eq!(places.len(), MAX_STRANGERS_PER_ADDRESS);
    }
}
