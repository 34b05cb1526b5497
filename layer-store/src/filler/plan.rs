//! Which span is fetched next, and whose question it answers. Pure.
//!
//! What a reader waits for goes first, then what a trace says will be read, then the rest of layers
//! that are worth completing. A span is fetched by one worker at a time, whoever wants it.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::ops::Range;

use super::spans::SpanSet;

/// A layer of which this part is there, in percent, is completed in the background.
const COMPLETE_FROM_PERCENT: u64 = 25;
/// So is one of which this many spans were wanted one after the other.
const COMPLETE_AFTER_RUN: u32 = 8;

/// Why a span is fetched, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// A reader waits.
    Demand,
    /// A reader will come.
    Trace,
    /// The layer is to be complete.
    Background,
}

/// A span to be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job<L> {
    /// Of this layer.
    pub layer: L,
    /// Its number.
    pub span: u32,
    /// Why.
    pub urgency: Urgency,
}

#[derive(Debug)]
struct Layer<E> {
    filled: SpanSet,
    /// Being fetched.
    running: HashSet<u32>,
    /// Wanted by these questions.
    waiting: BTreeMap<u32, Vec<E>>,
    last_wanted: Option<u32>,
    run: u32,
    complete: bool,
    /// Where the search for background work goes on.
    next: u32,
}

/// Work of all layers `L`, for questions `E`.
#[derive(Debug)]
pub struct Plan<L, E> {
    layers: HashMap<L, Layer<E>>,
    /// How many spans each question still waits for.
    open: HashMap<E, usize>,
    demand: VecDeque<(L, u32)>,
    trace: VecDeque<(L, u32)>,
    background: VecDeque<L>,
}

impl<L, E> Default for Plan<L, E> {
    fn default() -> Self {
        Self {
            layers: HashMap::new(),
            open: HashMap::new(),
            demand: VecDeque::new(),
            trace: VecDeque::new(),
            background: VecDeque::new(),
        }
    }
}

impl<L: Copy + Eq + Hash, E: Copy + Eq + Hash> Plan<L, E> {
    /// Takes a layer in, of which `filled` is there. One that is known stays as it is.
    pub fn add(&mut self, layer: L, filled: SpanSet) {
        self.layers.entry(layer).or_insert_with(|| Layer {
            filled,
            running: HashSet::new(),
            waiting: BTreeMap::new(),
            last_wanted: None,
            run: 0,
            complete: false,
            next: 0,
        });
        self.consider(layer);
    }

    /// Forgets a layer. The questions that were open about it are returned; they will not be
    /// answered by anything that comes later.
    pub fn remove(&mut self, layer: L) -> Vec<E> {
        let Some(gone) = self.layers.remove(&layer) else {
            return Vec::new();
        };
        let mut questions = Vec::new();
        for event in gone.waiting.into_values().flatten() {
            if self.open.remove(&event).is_some() {
                questions.push(event);
            }
        }
        questions
    }

    /// Whether a layer is known.
    #[must_use]
    pub fn knows(&self, layer: L) -> bool {
        self.layers.contains_key(&layer)
    }

    /// What is there of a layer.
    #[must_use]
    pub fn filled(&self, layer: L) -> Option<&SpanSet> {
        self.layers.get(&layer).map(|layer| &layer.filled)
    }

    /// A reader wants `spans`. Whether all of them are there already, so that it need not wait.
    pub fn ask(&mut self, event: E, layer: L, spans: Range<u32>) -> bool {
        let Some(known) = self.layers.get_mut(&layer) else {
            return false;
        };
        let mut missing = 0;
        for span in spans.clone().filter(|span| *span < known.filled.count()) {
            if known.filled.contains(span) {
                continue;
            }
            missing += 1;
            known.waiting.entry(span).or_default().push(event);
            if !known.running.contains(&span) {
                self.demand.push_back((layer, span));
            }
        }
        known.wanted(&spans);
        if missing > 0 {
            self.open.insert(event, missing);
        }
        self.consider(layer);
        missing == 0
    }

    /// Readers are expected to want these spans, in this order.
    pub fn expect(&mut self, layer: L, spans: impl IntoIterator<Item = u32>) {
        self.trace
            .extend(spans.into_iter().map(|span| (layer, span)));
    }

    /// The layer is to be complete.
    pub fn complete(&mut self, layer: L) {
        if let Some(known) = self.layers.get_mut(&layer)
            && !known.complete
        {
            known.complete = true;
            self.background.push_back(layer);
        }
    }

    fn consider(&mut self, layer: L) {
        let worth = self.layers.get(&layer).is_some_and(|known| {
            let there = u64::from(known.filled.members()) * 100;
            known.run >= COMPLETE_AFTER_RUN
                || there > u64::from(known.filled.count()) * COMPLETE_FROM_PERCENT
        });
        if worth {
            self.complete(layer);
        }
    }

    /// The next span to fetch, no less urgent than `least`. Its worker calls [`Self::done`] or
    /// [`Self::failed`] or [`Self::put_back`].
    pub fn next(&mut self, least: Urgency) -> Option<Job<L>> {
        let queues = [
            (Urgency::Demand, &mut self.demand),
            (Urgency::Trace, &mut self.trace),
        ];
        for (urgency, queue) in queues {
            if urgency > least {
                return None;
            }
            while let Some((layer, span)) = queue.pop_front() {
                let Some(known) = self.layers.get_mut(&layer) else {
                    continue;
                };
                // A question may have ended, or another worker may have been first.
                let wanted = urgency != Urgency::Demand || known.waiting.contains_key(&span);
                if wanted && known.start(span) {
                    return Some(Job {
                        layer,
                        span,
                        urgency,
                    });
                }
            }
        }
        if least < Urgency::Background {
            return None;
        }
        // Each layer in its turn.
        for _ in 0..self.background.len() {
            let layer = self.background.pop_front()?;
            let Some(known) = self.layers.get_mut(&layer) else {
                continue;
            };
            match known.start_next() {
                Some(span) => {
                    self.background.push_back(layer);
                    return Some(Job {
                        layer,
                        span,
                        urgency: Urgency::Background,
                    });
                }
                None if known.filled.is_full() => {}
                // What is missing is being fetched, and may fail.
                None => self.background.push_back(layer),
            }
        }
        None
    }

    /// Whether a reader waits for a span.
    #[must_use]
    pub fn is_wanted(&self, layer: L, span: u32) -> bool {
        self.layers
            .get(&layer)
            .is_some_and(|known| known.waiting.contains_key(&span))
    }

    /// A span is in the blob. Returns the questions that are answered by it, and whether the layer
    /// is complete now.
    pub fn done(&mut self, layer: L, span: u32) -> (Vec<E>, bool) {
        let Some(known) = self.layers.get_mut(&layer) else {
            return (Vec::new(), false);
        };
        known.running.remove(&span);
        let new = known.filled.insert(span);
        let full = new && known.filled.is_full();
        let mut answered = Vec::new();
        for event in known.waiting.remove(&span).unwrap_or_default() {
            if let Some(left) = self.open.get_mut(&event) {
                *left -= 1;
                if *left == 0 {
                    self.open.remove(&event);
                    answered.push(event);
                }
            }
        }
        self.consider(layer);
        (answered, full)
    }

    /// A span cannot be had. Returns the questions that end with an error.
    pub fn failed(&mut self, layer: L, span: u32) -> Vec<E> {
        let Some(known) = self.layers.get_mut(&layer) else {
            return Vec::new();
        };
        known.running.remove(&span);
        known.next = known.next.min(span);
        let waiting = known.waiting.remove(&span).unwrap_or_default();
        // Whoever waits for this span and others waits no longer.
        waiting
            .into_iter()
            .filter(|event| self.open.remove(event).is_some())
            .collect()
    }

    /// Nobody fetches a span any more, but it is still wanted as much as before.
    pub fn put_back(&mut self, job: Job<L>) {
        let Some(known) = self.layers.get_mut(&job.layer) else {
            return;
        };
        known.running.remove(&job.span);
        known.next = known.next.min(job.span);
        if known.waiting.contains_key(&job.span) {
            self.demand.push_back((job.layer, job.span));
        }
    }

    /// The connection on which the questions came is gone. They come again on the next.
    pub fn forget_questions(&mut self) {
        self.open.clear();
        self.demand.clear();
        for layer in self.layers.values_mut() {
            layer.waiting.clear();
        }
    }
}

impl<E> Layer<E> {
    fn start(&mut self, span: u32) -> bool {
        span < self.filled.count() && !self.filled.contains(span) && self.running.insert(span)
    }

    fn start_next(&mut self) -> Option<u32> {
        let mut from = self.next;
        while let Some(span) = self.filled.first_missing(from) {
            if self.running.insert(span) {
                self.next = span + 1;
                return Some(span);
            }
            from = span + 1;
        }
        None
    }

    /// Notices readers that go from one span to the next.
    fn wanted(&mut self, spans: &Range<u32>) {
        let (Some(last), first) = (spans.end.checked_sub(1), spans.start) else {
            return;
        };
        match self.last_wanted {
            Some(before) if last == before => {}
            Some(before) if first <= before + 1 && last > before => self.run += last - before,
            _ => self.run = 0,
        }
        self.last_wanted = Some(last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type TestPlan = Plan<&'static str, u32>;

    fn plan(count: u32) -> TestPlan {
        let mut plan = TestPlan::default();
        plan.add("a", SpanSet::none(count));
        plan
    }

    fn next(plan: &mut TestPlan) -> Option<(&'static str, u32, Urgency)> {
        let job = plan.next(Urgency::Background)?;
        Some((job.layer, job.span, job.urgency))
    }

    #[test]
    fn demand_goes_before_trace_before_background() {
        let mut plan = plan(100);
        plan.complete("a");
        plan.expect("a", [50, 51]);
        assert!(!plan.ask(1, "a", 70..71));
        assert_eq!(next(&mut plan), Some(("a", 70, Urgency::Demand)));
        assert_eq!(next(&mut plan), Some(("a", 50, Urgency::Trace)));
        assert!(!plan.ask(2, "a", 71..72));
        assert_eq!(next(&mut plan), Some(("a", 71, Urgency::Demand)));
        assert_eq!(plan.next(Urgency::Demand), None);
        assert_eq!(next(&mut plan), Some(("a", 51, Urgency::Trace)));
        assert_eq!(plan.next(Urgency::Trace), None);
        assert_eq!(next(&mut plan), Some(("a", 0, Urgency::Background)));
        assert_eq!(next(&mut plan), Some(("a", 1, Urgency::Background)));
    }

    #[test]
    fn one_fetch_answers_everybody() {
        let mut plan = plan(100);
        assert!(!plan.ask(1, "a", 3..4));
        assert!(!plan.ask(2, "a", 3..5));
        assert_eq!(next(&mut plan), Some(("a", 3, Urgency::Demand)));
        assert!(!plan.ask(3, "a", 3..4));
        assert_eq!(next(&mut plan), Some(("a", 4, Urgency::Demand)));
        assert_eq!(next(&mut plan), None, "single flight");
        assert_eq!(plan.done("a", 3), (vec![1, 3], false));
        assert_eq!(plan.done("a", 4), (vec![2], false));
        assert!(plan.ask(4, "a", 3..5), "there already");
    }

    #[test]
    fn a_span_that_cannot_be_had_ends_its_questions_only() {
        let mut plan = plan(100);
        plan.ask(1, "a", 0..2);
        plan.ask(2, "a", 1..2);
        next(&mut plan);
        next(&mut plan);
        assert_eq!(plan.failed("a", 0), [1]);
        assert_eq!(plan.done("a", 1), (vec![2], false), "1 has ended");
        assert!(!plan.ask(3, "a", 0..1));
        assert_eq!(
            next(&mut plan),
            Some(("a", 0, Urgency::Demand)),
            "tried again"
        );
    }

    #[test]
    fn questions_of_a_lost_connection_are_forgotten() {
        let mut plan = plan(100);
        plan.ask(1, "a", 0..1);
        plan.ask(2, "a", 5..6);
        next(&mut plan);
        plan.forget_questions();
        assert_eq!(next(&mut plan), None);
        assert_eq!(plan.done("a", 0), (vec![], false));
        assert!(plan.ask(1, "a", 0..1));
    }

    #[test]
    fn what_is_put_back_is_fetched_again() {
        let mut plan = plan(100);
        plan.ask(1, "a", 7..8);
        let job = plan.next(Urgency::Demand).unwrap();
        plan.put_back(job);
        assert_eq!(plan.next(Urgency::Demand), Some(job));
        plan.complete("a");
        let job = plan.next(Urgency::Background).unwrap();
        plan.put_back(job);
        assert_eq!(plan.next(Urgency::Background), Some(job));
    }

    #[test]
    fn a_layer_read_in_order_is_completed() {
        let mut plan = plan(1000);
        for n in 0..9 {
            plan.ask(n, "a", n..n + 1);
        }
        (0..9).for_each(|_| assert!(plan.next(Urgency::Demand).is_some()));
        assert_eq!(next(&mut plan), Some(("a", 9, Urgency::Background)));
    }

    #[test]
    fn a_layer_read_here_and_there_is_not() {
        let mut plan = plan(1000);
        for n in 0..100 {
            plan.ask(n, "a", n * 7 % 1000..n * 7 % 1000 + 1);
            assert_eq!(next(&mut plan).unwrap().2, Urgency::Demand);
            plan.done("a", n * 7 % 1000);
        }
        assert_eq!(next(&mut plan), None);
    }

    #[test]
    fn a_layer_that_is_there_to_a_quarter_is_completed() {
        let mut plan = plan(8);
        for (n, span) in [6, 0, 3].into_iter().enumerate() {
            plan.ask(u32::try_from(n).unwrap(), "a", span..span + 1);
            next(&mut plan);
            plan.done("a", span);
        }
        let rest: Vec<_> = std::iter::from_fn(|| next(&mut plan))
            .map(|(_, n, _)| n)
            .collect();
        assert_eq!(rest, [1, 2, 4, 5, 7]);
        for span in &rest[..4] {
            assert_eq!(plan.done("a", *span), (vec![], false));
        }
        assert_eq!(plan.done("a", 7), (vec![], true));
        assert_eq!(plan.done("a", 7), (vec![], false), "once");
    }

    #[test]
    fn layers_take_turns() {
        let mut plan = plan(4);
        plan.add("b", SpanSet::none(4));
        plan.complete("a");
        plan.complete("b");
        let order: Vec<_> = (0..4)
            .filter_map(|_| next(&mut plan))
            .map(|(l, ..)| l)
            .collect();
        assert_eq!(order, ["a", "b", "a", "b"]);
    }

    #[test]
    fn a_layer_that_is_gone_leaves_no_work() {
        let mut plan = plan(4);
        plan.ask(1, "a", 0..3);
        plan.complete("a");
        assert_eq!(plan.remove("a"), [1]);
        assert_eq!(next(&mut plan), None);
        assert_eq!(plan.done("a", 0), (vec![], false));
        assert!(!plan.ask(2, "a", 0..1));
    }
}
