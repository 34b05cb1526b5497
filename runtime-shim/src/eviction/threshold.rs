//! When the host is short of something, and which conditions that makes. Pure.
//!
//! Signals, default thresholds and their order are the kubelet's (`pkg/kubelet/eviction`).

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use sandman_protocol::v1;
use serde::Deserialize;
use v1::host_condition::Kind;

/// Section `[eviction]` of the configuration. A threshold of 0 is never met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Thresholds {
    /// Memory that must be available, in bytes.
    pub memory_available_bytes: u64,
    /// Part of `data_dir`'s file system that must be free, in percent.
    pub disk_available_percent: u8,
    /// Part of its inodes, in percent.
    pub disk_inodes_free_percent: u8,
    /// Part of the file system of containerd's snapshots, where it is another one, in percent.
    pub image_available_percent: u8,
    /// Part of its inodes, in percent.
    pub image_inodes_free_percent: u8,
    /// Part of the process ids, in percent.
    pub pids_available_percent: u8,
    /// How long a condition stays after its cause was seen last, in seconds.
    pub pressure_transition_seconds: u32,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            memory_available_bytes: 100 << 20,
            disk_available_percent: 10,
            disk_inodes_free_percent: 5,
            image_available_percent: 15,
            image_inodes_free_percent: 5,
            // The kubelet has no default for this one, and such a host cannot fork.
            pids_available_percent: 10,
            pressure_transition_seconds: 300,
        }
    }
}

/// What a host can be short of, the first to be fought first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Signal {
    /// Memory of the host.
    Memory,
    /// Space of `data_dir`'s file system.
    Disk,
    /// Inodes of `data_dir`'s file system.
    DiskInodes,
    /// Space of the snapshots' file system.
    Image,
    /// Inodes of the snapshots' file system.
    ImageInodes,
    /// Process ids.
    Pids,
}

/// How much there is of something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    /// Left.
    pub available: u64,
    /// In all.
    pub capacity: u64,
}

/// What was measured; what could not be measured is missing.
pub(super) type Levels = BTreeMap<Signal, Level>;

/// A threshold that is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// What is short.
    pub signal: Signal,
    /// How much should be left.
    pub wanted: u64,
    /// How much is left.
    pub available: u64,
}

impl Thresholds {
    /// Checks the section; the error begins with the key within it.
    ///
    /// # Errors
    /// More than 100 percent.
    pub fn check(&self) -> Result<(), String> {
        for (key, percent) in [
            ("disk_available_percent", self.disk_available_percent),
            ("disk_inodes_free_percent", self.disk_inodes_free_percent),
            ("image_available_percent", self.image_available_percent),
            ("image_inodes_free_percent", self.image_inodes_free_percent),
            ("pids_available_percent", self.pids_available_percent),
        ] {
            if percent > 100 {
                return Err(format!("{key}: {percent} is more than 100"));
            }
        }
        Ok(())
    }

    /// What the host is short of, the worst first.
    #[must_use]
    pub fn shortages(&self, levels: &Levels) -> Vec<Shortage> {
        let short = |(signal, level): (&Signal, &Level)| {
            let percent = |percent: u8| {
                let share = u128::from(level.capacity) * u128::from(percent) / 100;
                u64::try_from(share).unwrap_or(u64::MAX)
            };
            let wanted = match signal {
                Signal::Memory => self.memory_available_bytes,
                Signal::Disk => percent(self.disk_available_percent),
                Signal::DiskInodes => percent(self.disk_inodes_free_percent),
                Signal::Image => percent(self.image_available_percent),
                Signal::ImageInodes => percent(self.image_inodes_free_percent),
                Signal::Pids => percent(self.pids_available_percent),
            };
            (level.available < wanted).then_some(Shortage {
                signal: *signal,
                wanted,
                available: level.available,
            })
        };
        levels.iter().filter_map(short).collect()
    }
}

impl Signal {
    /// The condition that it makes.
    #[must_use]
    pub fn condition(self) -> Kind {
        match self {
            Self::Memory => Kind::MemoryPressure,
            Self::Disk | Self::DiskInodes | Self::Image | Self::ImageInodes => Kind::DiskPressure,
            Self::Pids => Kind::PidPressure,
        }
    }

    fn describe(self) -> &'static str {
        match self {
            Self::Memory => "bytes of memory are available",
            Self::Disk => "bytes of the data file system are free",
            Self::DiskInodes => "inodes of the data file system are free",
            Self::Image => "bytes of the snapshots' file system are free",
            Self::ImageInodes => "inodes of the snapshots' file system are free",
            Self::Pids => "process ids are free",
        }
    }
}

/// The conditions, each kept for a while after its cause is gone, so that pods do not come back
/// to a host that is only just well.
#[derive(Clone, Debug, Default)]
pub(super) struct Conditions {
    seen: BTreeMap<i32, (Timestamp, String)>,
}

impl Conditions {
    /// Takes in what is short now and says what to report.
    #[must_use]
    pub(super) fn update(
        &mut self,
        shortages: &[Shortage],
        transition: SignedDuration,
        now: Timestamp,
    ) -> Vec<v1::HostCondition> {
        for shortage in shortages {
            let kind = shortage.signal.condition() as i32;
            // The threshold and not the level: figures that change would look like news.
            let text = format!(
                "fewer than {} {}",
                shortage.wanted,
                shortage.signal.describe()
            );
            match self.seen.get_mut(&kind) {
                // The first reason stays while there is any.
                Some((at, _)) => *at = now,
                None => {
                    self.seen.insert(kind, (now, text));
                }
            }
        }
        self.seen
            .retain(|_, (at, _)| now.duration_since(*at) <= transition);
        [Kind::MemoryPressure, Kind::DiskPressure, Kind::PidPressure]
            .into_iter()
            .map(|kind| {
                let seen = self.seen.get(&(kind as i32));
                v1::HostCondition {
                    kind: kind as i32,
                    active: seen.is_some(),
                    message: seen.map(|(_, text)| text.clone()).unwrap_or_default(),
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn levels(list: &[(Signal, u64, u64)]) -> Levels {
        let level = |(signal, available, capacity): &(Signal, u64, u64)| {
            let (available, capacity) = (*available, *capacity);
            (
                *signal,
                Level {
                    available,
                    capacity,
                },
            )
        };
        list.iter().map(level).collect()
    }

    #[test]
    fn defaults_are_the_kubelets() {
        let short = |list: &[(Signal, u64, u64)]| -> Vec<Signal> {
            let found = Thresholds::default().shortages(&levels(list));
            found.iter().map(|shortage| shortage.signal).collect()
        };
        assert_eq!(short(&[]), []);
        assert_eq!(short(&[(Signal::Memory, 100 << 20, 1 << 34)]), []);
        let all = [
            (Signal::Pids, 9, 100),
            (Signal::ImageInodes, 4, 100),
            (Signal::Image, 14, 100),
            (Signal::DiskInodes, 4, 100),
            (Signal::Disk, 9, 100),
            (Signal::Memory, (100 << 20) - 1, 1 << 34),
        ];
        let mut reversed: Vec<_> = all.iter().map(|(signal, ..)| *signal).collect();
        reversed.reverse();
        assert_eq!(short(&all), reversed);
        assert_eq!(
            short(&[(Signal::Disk, 10, 100), (Signal::Image, 15, 100)]),
            []
        );
    }

    #[test]
    fn zero_is_never_short_and_too_much_is_refused() {
        let off = Thresholds {
            disk_available_percent: 0,
            ..Thresholds::default()
        };
        assert!(off.shortages(&levels(&[(Signal::Disk, 0, 100)])).is_empty());
        let wrong = Thresholds {
            pids_available_percent: 101,
            ..off
        };
        assert!(
            wrong
                .check()
                .unwrap_err()
                .starts_with("pids_available_percent")
        );
        off.check().unwrap();
    }

    #[test]
    fn a_condition_outlasts_its_cause() {
        let transition = SignedDuration::from_secs(300);
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        let mut conditions = Conditions::default();
        let active = |list: &[v1::HostCondition]| -> Vec<Kind> {
            let active = list.iter().filter(|condition| condition.active);
            active.map(v1::HostCondition::kind).collect()
        };
        let shortage = |signal| Shortage {
            signal,
            wanted: 10,
            available: 9,
        };
        let now = conditions.update(&[], transition, at(0));
        assert_eq!((active(&now), now.len()), (vec![], 3));
        let now = conditions.update(&[shortage(Signal::Image)], transition, at(10));
        assert_eq!(active(&now), [Kind::DiskPressure]);
        let first = now[1].message.clone();
        assert_eq!(
            first,
            "fewer than 10 bytes of the snapshots' file system are free"
        );
        let now = conditions.update(&[shortage(Signal::Disk)], transition, at(20));
        assert_eq!(now[1].message, first);
        assert_eq!(
            active(&conditions.update(&[], transition, at(320))),
            [Kind::DiskPressure]
        );
        assert_eq!(active(&conditions.update(&[], transition, at(321))), []);
    }
}
