//! Paces the making of sandboxes: a bounded number at once, fair between namespaces, so that a
//! burst waits instead of failing and one tenant's burst does not hold up the others.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Hands out permits to make something.
#[derive(Clone, Debug)]
pub struct CreationQueue(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    free: usize,
    /// Namespaces that wait, each once, in the order of their turn.
    turns: VecDeque<String>,
    waiting: HashMap<String, VecDeque<oneshot::Sender<Permit>>>,
}

/// The right to make something; passed on when dropped. Without a queue it is nobody's.
#[derive(Debug)]
pub struct Permit(Option<Arc<Mutex<State>>>);

impl CreationQueue {
    /// Lets `width` at once.
    #[must_use]
    pub fn new(width: usize) -> Self {
        let state = State {
            free: width.max(1),
            turns: VecDeque::new(),
            waiting: HashMap::new(),
        };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Waits for this namespace's turn.
    pub async fn acquire(&self, namespace: &str) -> Permit {
        let turn = {
            let mut state = lock(&self.0);
            if state.free > 0 {
                state.free -= 1;
                return Permit(Some(self.0.clone()));
            }
            let (sender, receiver) = oneshot::channel();
            let line = state.waiting.entry(namespace.to_owned()).or_default();
            line.push_back(sender);
            if line.len() == 1 {
                state.turns.push_back(namespace.to_owned());
            }
            receiver
        };
        // A sender is only dropped after it was used, so there is always a permit; if not, going on
        // unpaced is better than never.
        turn.await.unwrap_or(Permit(None))
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        lock(&self.0).waiting.values().map(VecDeque::len).sum()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let Some(queue) = self.0.take() else {
            return;
        };
        // Those who gave up are passed over here, one after the other: a permit that came back
        // from each would be dropped within this drop, as deep as the queue is long.
        loop {
            let next = {
                let mut state = lock(&queue);
                let next = next_in_turn(&mut state);
                if next.is_none() {
                    state.free += 1;
                }
                next
            };
            let Some(next) = next else {
                return;
            };
            match next.send(Permit(Some(queue.clone()))) {
                Ok(()) => return,
                Err(mut refused) => refused.0 = None,
            }
        }
    }
}

fn next_in_turn(state: &mut State) -> Option<oneshot::Sender<Permit>> {
    let namespace = state.turns.pop_front()?;
    let line = state.waiting.get_mut(&namespace)?;
    let next = line.pop_front();
    if line.is_empty() {
        state.waiting.remove(&namespace);
    } else {
        state.turns.push_back(namespace);
    }
    next
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn namespaces_take_turns() {
        let queue = CreationQueue::new(1);
        let first = queue.acquire("a").await;
        let mut order = vec![];
        let mut waiters: Vec<_> = ["a1", "a2", "a3", "b1", "b2"]
            .into_iter()
            .map(|name| (name, Box::pin(queue.acquire(&name[..1]))))
            .collect();
        for (_, waiter) in &mut waiters {
            assert!(waiter.now_or_never().is_none());
        }
        assert_eq!(queue.waiting(), 5);
        let mut held = Some(first);
        while !waiters.is_empty() {
            drop(held.take());
            let index = waiters
                .iter_mut()
                .position(|(_, waiter)| {
                    held = waiter.now_or_never();
                    held.is_some()
                })
                .unwrap();
            order.push(waiters.remove(index).0);
        }
        assert_eq!(order, ["a1", "b1", "a2", "b2", "a3"]);
    }

    #[tokio::test]
    async fn however_many_gave_up_the_stack_stays_flat() {
        let queue = CreationQueue::new(1);
        let first = queue.acquire("a").await;
        let mut gone: Vec<_> = (0..100_000).map(|_| Box::pin(queue.acquire("a"))).collect();
        for waiter in &mut gone {
            assert!(waiter.now_or_never().is_none());
        }
        drop(gone);
        drop(first);
        assert_eq!(queue.waiting(), 0);
        assert!(queue.acquire("b").now_or_never().is_some());
    }

    #[tokio::test]
    async fn those_who_gave_up_are_passed_over() {
        let queue = CreationQueue::new(1);
        let first = queue.acquire("a").await;
        let mut gone = Box::pin(queue.acquire("a"));
        assert!((&mut gone).now_or_never().is_none());
        let mut stays = Box::pin(queue.acquire("b"));
        assert!((&mut stays).now_or_never().is_none());
        drop(gone);
        drop(first);
        assert!((&mut stays).now_or_never().is_some());
        drop(stays);
        assert!(queue.acquire("c").now_or_never().is_some());
    }
}
