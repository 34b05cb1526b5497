//! Sets and maps of nf_tables: how they are made, filled and asked.

use std::collections::BTreeSet;
use std::io;
use std::net::Ipv4Addr;

use super::super::netlink::{Socket, attributes};
use super::message::{Attributes, Batch, Expressions, Register, request};

const NEW_SET: u16 = 9;
const DELETE_SET: u16 = 11;
const NEW_ELEMENT: u16 = 12;
const GET_ELEMENT: u16 = 13;
const DELETE_ELEMENT: u16 = 14;

const NLM_F_CREATE: u16 = 0x400;

/// Tells `nft` that the bytes of a key are in the order of the machine, as those of names are to it:
/// `NFTNL_UDATA_SET_KEYBYTEORDER`, its length, `BYTEORDER_HOST_ENDIAN`.
#[cfg(target_endian = "little")]
const NAMES: [u8; 6] = [0, 4, 1, 0, 0, 0];
#[cfg(target_endian = "big")]
const NAMES: [u8; 6] = [0, 4, 0, 0, 0, 1];
const SET_INTERVAL: u32 = 0x4;
const SET_MAP: u32 = 0x8;
const SET_TIMEOUT: u32 = 0x10;
/// Changed by packets.
const SET_EVAL: u32 = 0x20;

/// `NFT_DATA_VERDICT`
const DATA_VERDICT: u32 = 0xffff_ff00;
/// `NFT_SET_ELEM_INTERVAL_END`
const INTERVAL_END: u32 = 1;
const REGISTER_VERDICT: u32 = 0;
/// `NFT_GOTO`
const GOTO: i32 = -4;

/// A message's attribute of elements stays below 64 KiB.
const ELEMENTS_A_MESSAGE: usize = 400;

/// Types of `nft`, by which it prints what is in a set. The kernel does not look at them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Address = 7,
    Protocol = 12,
    Port = 13,
    Mark = 19,
    /// A name of 16 bytes; the others have 4.
    Link = 41,
}

/// What an element of a map leads to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Leads {
    /// It is a set: an element is in it or not.
    Nowhere,
    /// To a verdict.
    Verdict,
    /// To fields of 4 bytes each.
    Fields(&'static [Kind]),
}

/// A set or map.
#[derive(Clone, Copy, Debug)]
pub(super) struct Set<'a> {
    pub(super) name: &'a str,
    pub(super) key: &'static [Kind],
    pub(super) leads: Leads,
    /// Filled by rules rather than by us, up to this many elements.
    pub(super) learns: Option<u32>,
}

/// Data of an element.
#[derive(Clone, Copy, Debug)]
pub(super) enum Data<'a> {
    None,
    /// The packet goes on in a chain.
    Goto(&'a str),
    Bytes(&'a [u8]),
}

/// What a rule does to a set.
#[derive(Clone, Copy, Debug)]
pub(super) enum Learn {
    /// Adds the element if it is not there.
    Add = 0,
    /// The same, and begins its time anew.
    Renew = 1,
}

impl Socket {
    /// Reads the elements of a map: keys and what they lead to.
    pub(super) fn elements(
        &mut self,
        table: &str,
        map: &str,
        mut each: impl FnMut(&[u8], &[u8]),
    ) -> io::Result<()> {
        let sequence = self.next_sequence();
        let request = request(GET_ELEMENT, sequence, |attributes| {
            attributes.text(1, table);
            attributes.text(2, map);
        });
        // A torn list lacks what came or went meanwhile, and that is not what is looked for.
        self.dump(&request, sequence, |_, payload| {
            let list = attributes(payload.get(4..).unwrap_or_default());
            for (_, elements) in list.filter(|(kind, _)| *kind == 3) {
                for (_, element) in attributes(elements) {
                    if let (Some(key), Some(data)) = (value(element, 1), value(element, 2)) {
                        each(key, data);
                    }
                }
            }
            Ok(())
        })?;
        Ok(())
    }
}

/// `NFTA_DATA_VALUE` of a nested attribute.
fn value(element: &[u8], kind: u16) -> Option<&[u8]> {
    let (_, nested) = attributes(element).find(|(own, _)| *own == kind)?;
    let (_, value) = attributes(nested).find(|(own, _)| *own == 1)?;
    Some(value)
}

impl Batch {
    pub(super) fn new_set(&mut self, table: &str, set: &Set<'_>) {
        let (map, data_type, data_length) = match set.leads {
            Leads::Nowhere => (0, None, 0),
            Leads::Verdict => (SET_MAP, Some(DATA_VERDICT), 16),
            Leads::Fields(kinds) => (SET_MAP, Some(concatenated(kinds)), length(kinds)),
        };
        let learns = set.learns.map_or(0, |_| SET_TIMEOUT | SET_EVAL);
        self.table_message(NEW_SET, NLM_F_CREATE, |attributes| {
            attributes.text(1, table);
            attributes.text(2, set.name);
            attributes.number(3, map | learns);
            attributes.number(4, concatenated(set.key));
            attributes.number(5, length(set.key));
            if let Some(data_type) = data_type {
                attributes.number(6, data_type);
                attributes.number(7, data_length);
            }
            if let Some(size) = set.learns {
                attributes.nest(9, |description| description.number(1, size));
            }
            // Sets are referred to by name; the kernel wants a number as well.
            attributes.number(10, 1);
            if matches!(set.key, [Kind::Link]) {
                attributes.bytes(13, &NAMES);
            }
        });
    }

    pub(super) fn delete_set(&mut self, table: &str, name: &str) {
        self.table_message(DELETE_SET, 0, |attributes| {
            attributes.text(1, table);
            attributes.text(2, name);
        });
    }

    /// A set of ranges of addresses.
    pub(super) fn new_ranges(&mut self, table: &str, name: &str) {
        self.table_message(NEW_SET, NLM_F_CREATE, |attributes| {
            attributes.text(1, table);
            attributes.text(2, name);
            attributes.number(3, SET_INTERVAL);
            attributes.number(4, Kind::Address as u32);
            attributes.number(5, 4);
            attributes.number(10, 1);
        });
    }

    /// First and last addresses; they must not touch each other.
    pub(super) fn add_ranges(
        &mut self,
        table: &str,
        name: &str,
        ranges: &BTreeSet<(Ipv4Addr, Ipv4Addr)>,
    ) {
        let mut ranges = ranges.iter().peekable();
        while ranges.peek().is_some() {
            self.table_message(NEW_ELEMENT, NLM_F_CREATE, |attributes| {
                attributes.text(1, table);
                attributes.text(2, name);
                attributes.nest(3, |list| {
                    for (first, last) in ranges.by_ref().take(ELEMENTS_A_MESSAGE) {
                        list.nest(1, |element| {
                            element.nest(1, |value| value.bytes(1, &first.octets()));
                        });
                        // What reaches the last address there is has no end.
                        let Some(end) = last.to_bits().checked_add(1) else {
                            continue;
                        };
                        list.nest(1, |element| {
                            element.nest(1, |value| value.bytes(1, &end.to_be_bytes()));
                            element.number(3, INTERVAL_END);
                        });
                    }
                });
            });
        }
    }

    pub(super) fn add_elements<'a>(
        &mut self,
        table: &str,
        set: &Set<'_>,
        elements: impl IntoIterator<Item = (&'a [u8], Data<'a>)>,
    ) {
        self.elements(NEW_ELEMENT, NLM_F_CREATE, table, set, elements);
    }

    pub(super) fn delete_elements<'a>(
        &mut self,
        table: &str,
        set: &Set<'_>,
        keys: impl IntoIterator<Item = &'a [u8]>,
    ) {
        let elements = keys.into_iter().map(|key| (key, Data::None));
        self.elements(DELETE_ELEMENT, 0, table, set, elements);
    }

    fn elements<'a>(
        &mut self,
        kind: u16,
        flags: u16,
        table: &str,
        set: &Set<'_>,
        elements: impl IntoIterator<Item = (&'a [u8], Data<'a>)>,
    ) {
        let mut elements = elements.into_iter().peekable();
        while elements.peek().is_some() {
            self.table_message(kind, flags, |attributes| {
                attributes.text(1, table);
                attributes.text(2, set.name);
                attributes.nest(3, |list| {
                    for (key, data) in elements.by_ref().take(ELEMENTS_A_MESSAGE) {
                        list.nest(1, |element| {
                            element.nest(1, |value| value.bytes(1, key));
                            write_data(element, data);
                        });
                    }
                });
            });
        }
    }
}

fn write_data(element: &mut Attributes<'_>, data: Data<'_>) {
    match data {
        Data::None => {}
        Data::Bytes(bytes) => element.nest(2, |value| value.bytes(1, bytes)),
        Data::Goto(chain) => element.nest(2, |value| {
            value.nest(2, |verdict| {
                verdict.bytes(1, &GOTO.to_be_bytes());
                verdict.text(2, chain);
            });
        }),
    }
}

fn concatenated(kinds: &[Kind]) -> u32 {
    kinds.iter().fold(0, |all, &kind| all << 6 | kind as u32)
}

fn length(kinds: &[Kind]) -> u32 {
    let length = |kind: &Kind| match kind {
        Kind::Link => 16,
        Kind::Address | Kind::Protocol | Kind::Port | Kind::Mark => 4,
    };
    kinds.iter().map(length).sum()
}

impl Expressions<'_> {
    /// Goes on if the set has the key that begins in `key`.
    pub(super) fn is_in(&mut self, set: &Set<'_>, key: Register) {
        self.lookup(set, key, None);
    }

    /// Does as the map of verdicts says; goes on if it says nothing.
    pub(super) fn verdict_of(&mut self, map: &Set<'_>, key: Register) {
        self.lookup(map, key, Some(REGISTER_VERDICT));
    }

    /// Loads what the map has for the key; goes on only if it has something.
    pub(super) fn load_from(&mut self, map: &Set<'_>, key: Register, to: Register) {
        self.lookup(map, key, Some(to.number()));
    }

    fn lookup(&mut self, set: &Set<'_>, key: Register, to: Option<u32>) {
        self.expression("lookup", |data| {
            data.text(1, set.name);
            data.number(2, key.number());
            if let Some(to) = to {
                data.number(3, to);
            }
        });
    }

    /// Loads a random number below `bound`, in the byte order of the machine.
    pub(super) fn load_random(&mut self, bound: u32, to: Register) {
        self.expression("numgen", |data| {
            data.number(1, to.number());
            data.number(2, bound);
            data.number(3, 1); // NFT_NG_RANDOM
            data.number(4, 0);
        });
    }

    /// Changes a map that learns. `data` is what a new element leads to, for `milliseconds`.
    pub(super) fn learn(
        &mut self,
        set: &Set<'_>,
        how: Learn,
        key: Register,
        data: Register,
        milliseconds: u64,
    ) {
        self.expression("dynset", |attributes| {
            attributes.text(1, set.name);
            attributes.number(3, how as u32);
            attributes.number(4, key.number());
            attributes.number(5, data.number());
            if milliseconds > 0 {
                attributes.bytes(6, &milliseconds.to_be_bytes());
            }
        });
    }
}
