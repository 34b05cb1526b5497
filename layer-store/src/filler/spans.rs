//! A set of spans, as bits. Pure.

/// Which of `count` spans are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanSet {
    bits: Vec<u8>,
    count: u32,
    members: u32,
}

impl SpanSet {
    /// None of `count`.
    #[must_use]
    pub fn none(count: u32) -> Self {
        Self {
            bits: vec![0; count.div_ceil(8) as usize],
            count,
            members: 0,
        }
    }

    /// Those whose bit is set, if `bits` is as long as it must be.
    #[must_use]
    pub fn from_bits(count: u32, bits: &[u8]) -> Option<Self> {
        let mut set = Self::none(count);
        if bits.len() != set.bits.len() {
            return None;
        }
        for span in 0..count {
            if bits[span as usize / 8] & (1 << (span % 8)) != 0 {
                set.insert(span);
            }
        }
        Some(set)
    }

    /// Number of spans of the layer.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Number of spans that are there.
    #[must_use]
    pub fn members(&self) -> u32 {
        self.members
    }

    /// Whether all are there.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.members == self.count
    }

    /// Whether one is there.
    #[must_use]
    pub fn contains(&self, span: u32) -> bool {
        span < self.count && self.bits[span as usize / 8] & (1 << (span % 8)) != 0
    }

    /// Adds one. Whether it is new.
    pub fn insert(&mut self, span: u32) -> bool {
        if span >= self.count || self.contains(span) {
            return false;
        }
        self.bits[span as usize / 8] |= 1 << (span % 8);
        self.members += 1;
        true
    }

    /// The byte in which a span's bit is, and where.
    #[must_use]
    pub fn byte_of(&self, span: u32) -> Option<(u64, u8)> {
        let at = span as usize / 8;
        self.bits.get(at).map(|byte| (at as u64, *byte))
    }

    /// All bytes.
    #[must_use]
    pub fn bits(&self) -> &[u8] {
        &self.bits
    }

    /// The first from `start` on that is not there.
    #[must_use]
    pub fn first_missing(&self, start: u32) -> Option<u32> {
        (start..self.count).find(|span| !self.contains(*span))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_kept_and_read_again() {
        let mut set = SpanSet::none(11);
        assert!(set.insert(0) && set.insert(10) && !set.insert(10) && !set.insert(11));
        assert_eq!((set.members(), set.first_missing(0)), (2, Some(1)));
        assert!(set.contains(10) && !set.contains(9) && !set.contains(99));
        assert_eq!(SpanSet::from_bits(11, set.bits()), Some(set.clone()));
        assert_eq!(SpanSet::from_bits(17, set.bits()), None);
        for span in 0..11 {
            set.insert(span);
        }
        assert!(set.is_full());
        assert_eq!(set.first_missing(0), None);
        // Bits beyond the last span are nobody's.
        assert_eq!(SpanSet::from_bits(3, &[0xff]).unwrap().members(), 3);
    }

    #[test]
    fn a_layer_without_spans_is_full() {
        assert!(SpanSet::none(0).is_full());
    }
}
