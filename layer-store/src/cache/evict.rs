//! Which layers go when the store is too full. Pure.

use super::Taken;

/// How full the store may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Above this many bytes something goes.
    pub high_bytes: u64,
    /// Until no more than this many are left.
    pub low_bytes: u64,
    /// The same for files and folders, of which a file system may have fewer than bytes.
    pub high_inodes: u64,
    /// See `high_inodes`.
    pub low_inodes: u64,
}

/// What a layer would give, for this decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage<L> {
    /// Whose.
    pub layer: L,
    /// Bytes on disk, holes not counted.
    pub bytes: u64,
    /// Files and folders.
    pub inodes: u64,
    /// When it was last mounted or released, in seconds since the epoch.
    pub last_used: u64,
    /// Pinned by an operator, mounted, or without anything to give.
    pub stays: bool,
}

/// The layers to remove when this much is taken, the least recently used first. Fewer than enough
/// when the rest stays.
pub(super) fn choose<L: Copy + Ord>(limits: &Limits, taken: Taken, usage: &[Usage<L>]) -> Vec<L> {
    let Taken {
        mut bytes,
        mut inodes,
    } = taken;
    if bytes <= limits.high_bytes && inodes <= limits.high_inodes {
        return Vec::new();
    }
    let mut candidates: Vec<_> = usage.iter().filter(|layer| !layer.stays).collect();
    candidates.sort_by_key(|layer| (layer.last_used, layer.layer));
    let mut chosen = Vec::new();
    for layer in candidates {
        if bytes <= limits.low_bytes && inodes <= limits.low_inodes {
            break;
        }
        bytes = bytes.saturating_sub(layer.bytes);
        inodes = inodes.saturating_sub(layer.inodes);
        chosen.push(layer.layer);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose<L: Copy + Ord>(limits: &Limits, usage: &[Usage<L>]) -> Vec<L> {
        let taken = Taken {
            bytes: usage.iter().map(|layer| layer.bytes).sum(),
            inodes: usage.iter().map(|layer| layer.inodes).sum(),
        };
        super::choose(limits, taken, usage)
    }

    const LIMITS: Limits = Limits {
        high_bytes: 100,
        low_bytes: 50,
        high_inodes: 20,
        low_inodes: 10,
    };

    fn usage(layer: char, bytes: u64, last_used: u64) -> Usage<char> {
        Usage {
            layer,
            bytes,
            inodes: 1,
            last_used,
            stays: false,
        }
    }

    #[test]
    fn nothing_goes_below_the_mark() {
        assert_eq!(
            choose(&LIMITS, &[usage('a', 60, 1), usage('b', 40, 2)]),
            [' '; 0]
        );
    }

    #[test]
    fn the_least_recently_used_goes_first_and_no_more_than_needed() {
        let all = [
            usage('a', 30, 3),
            usage('b', 40, 1),
            usage('c', 40, 2),
            usage('d', 1, 4),
        ];
        assert_eq!(choose(&LIMITS, &all), ['b', 'c']);
    }

    #[test]
    fn what_stays_stays() {
        let mut all = [usage('a', 90, 1), usage('b', 40, 2), usage('c', 20, 3)];
        all[0].stays = true;
        assert_eq!(choose(&LIMITS, &all), ['b', 'c']);
        all.iter_mut().for_each(|layer| layer.stays = true);
        assert_eq!(choose(&LIMITS, &all), [' '; 0]);
    }

    #[test]
    fn inodes_count_too() {
        let all: Vec<_> = (0..25_u8)
            .map(|n| usage(char::from(b'a' + n), 0, n.into()))
            .collect();
        assert_eq!(choose(&LIMITS, &all).len(), 15);
    }
}
