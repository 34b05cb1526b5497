//! Encoding of nf_tables netlink messages: headers, nested attributes and the
//! expressions that Sandman's rules use. Numbers are those of the kernel's
//! `linux/netfilter/nf_tables.h`. Pure.

/// `NFPROTO_INET`: IPv4 and IPv6 in one table.
const FAMILY_INET: u8 = 1;
const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NEW_TABLE: u16 = 0;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const DELETE_CHAIN: u16 = 5;
const NEW_RULE: u16 = 6;
const DELETE_RULE: u16 = 8;

const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_APPEND: u16 = 0x800;
const NLA_F_NESTED: u16 = 0x8000;
/// Offset of the flags in a netlink header.
const FLAGS: usize = 6;

const REGISTER_VERDICT: u32 = 0;
const REGISTER_1: u32 = 1;
const REGISTER_2: u32 = 2;
const NFPROTO_IPV4: u32 = 2;

/// Where a chain sees packets, `NF_INET_*`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Hook {
    Prerouting = 0,
    LocalIn = 1,
    Forward = 2,
    LocalOut = 3,
    Postrouting = 4,
}

/// What happens to a packet.
#[derive(Clone, Copy, Debug)]
pub(super) enum Verdict {
    /// `NF_DROP`
    Drop = 0,
    /// `NF_ACCEPT`, in this base chain; those after it still decide.
    Accept = 1,
    /// `NFT_RETURN`
    Return = -5,
}

/// A register, `NFT_REG32_*`: 4 bytes. What is longer goes on in those that follow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Register(pub(super) u8);

/// A base chain.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain {
    pub(super) name: &'static str,
    /// `filter` or `nat`.
    pub(super) kind: &'static str,
    pub(super) hook: Hook,
    pub(super) priority: i32,
}

/// A field of the packet or of its way.
#[derive(Clone, Copy, Debug)]
pub(super) enum Field {
    /// Name of the incoming link.
    IncomingLink,
    OutgoingLink,
    /// `NFPROTO_*`, one byte.
    NetworkProtocol,
    /// `IPPROTO_*`, one byte.
    TransportProtocol,
    Ipv4Source,
    Ipv4Destination,
    /// Of TCP or UDP.
    DestinationPort,
    /// What the destination is to this host, `RTN_*`.
    DestinationKind,
    /// Link that leads back to the source, 0 if it is not the incoming one.
    ReversePathLink,
}

/// One request for objects of nf_tables, outside of a batch.
pub(super) fn request(kind: u16, sequence: u32, fill: impl FnOnce(&mut Attributes<'_>)) -> Vec<u8> {
    let mut batch = Batch {
        bytes: Vec::new(),
        sequence,
        last: 0,
    };
    batch.table_message(kind, NLM_F_DUMP, fill);
    batch.bytes
}

/// A growing netlink batch, one transaction of nf_tables.
pub(super) struct Batch {
    bytes: Vec<u8>,
    sequence: u32,
    /// Where the last message begins.
    last: usize,
}

impl Batch {
    /// Numbers the batch's messages from `sequence` on.
    pub(super) fn begin(sequence: u32) -> Self {
        let mut batch = Self {
            bytes: Vec::new(),
            sequence,
            last: 0,
        };
        batch.message(BATCH_BEGIN, NLM_F_REQUEST, 0, SUBSYSTEM, |_| {});
        batch
    }

    pub(super) fn new_table(&mut self, table: &str) {
        self.table_message(NEW_TABLE, NLM_F_CREATE, |attributes| {
            attributes.text(1, table)
        });
    }

    pub(super) fn delete_table(&mut self, table: &str) {
        self.table_message(DELETE_TABLE, 0, |attributes| attributes.text(1, table));
    }

    /// A base chain that accepts what no rule decides.
    pub(super) fn new_chain(&mut self, table: &str, chain: &Chain) {
        self.table_message(NEW_CHAIN, NLM_F_CREATE, |attributes| {
            attributes.text(1, table);
            attributes.text(3, chain.name);
            attributes.nest(4, |hook| {
                hook.number(1, chain.hook as u32);
                hook.bytes(2, &chain.priority.to_be_bytes());
            });
            attributes.text(7, chain.kind);
        });
    }

    /// A chain that packets only come to from others.
    pub(super) fn new_inner_chain(&mut self, table: &str, chain: &str) {
        self.table_message(NEW_CHAIN, NLM_F_CREATE, |attributes| {
            attributes.text(1, table);
            attributes.text(3, chain);
        });
    }

    /// Removes the rules of a chain.
    pub(super) fn clear_chain(&mut self, table: &str, chain: &str) {
        self.table_message(DELETE_RULE, 0, |attributes| {
            attributes.text(1, table);
            attributes.text(2, chain);
        });
    }

    /// Removes a chain that has no rules, and that none leads to.
    pub(super) fn delete_chain(&mut self, table: &str, chain: &str) {
        self.table_message(DELETE_CHAIN, 0, |attributes| {
            attributes.text(1, table);
            attributes.text(3, chain);
        });
    }

    pub(super) fn new_rule(
        &mut self,
        table: &str,
        chain: &Chain,
        expressions: impl FnOnce(&mut Expressions<'_>),
    ) {
        self.new_rule_in(table, chain.name, expressions);
    }

    pub(super) fn new_rule_in(
        &mut self,
        table: &str,
        chain: &str,
        expressions: impl FnOnce(&mut Expressions<'_>),
    ) {
        self.table_message(NEW_RULE, NLM_F_CREATE | NLM_F_APPEND, |attributes| {
            attributes.text(1, table);
            attributes.text(2, chain);
            attributes.nest(4, |list| {
                expressions(&mut Expressions {
                    list: Attributes { bytes: list.bytes },
                });
            });
        });
    }

    /// The finished datagram and the number of its last message, the only one that is acknowledged:
    /// thousands of answers would not fit the socket. Errors are told of each.
    pub(super) fn end(mut self) -> (Vec<u8>, u32) {
        let last = self.sequence.wrapping_sub(1);
        let flags = self.last + FLAGS;
        let acknowledged = NLM_F_ACK
            | self.bytes[flags..]
                .first_chunk()
                .map_or(0, |bytes| u16::from_ne_bytes(*bytes));
        self.bytes[flags..flags + 2].copy_from_slice(&acknowledged.to_ne_bytes());
        self.message(BATCH_END, NLM_F_REQUEST, 0, SUBSYSTEM, |_| {});
        (self.bytes, last)
    }

    pub(super) fn table_message(
        &mut self,
        kind: u16,
        flags: u16,
        fill: impl FnOnce(&mut Attributes<'_>),
    ) {
        let kind = SUBSYSTEM << 8 | kind;
        self.message(kind, flags | NLM_F_REQUEST, FAMILY_INET, 0, fill);
    }

    fn message(
        &mut self,
        kind: u16,
        flags: u16,
        family: u8,
        resource: u16,
        fill: impl FnOnce(&mut Attributes<'_>),
    ) {
        let start = self.bytes.len();
        self.last = start;
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&flags.to_ne_bytes());
        self.bytes.extend_from_slice(&self.sequence.to_ne_bytes());
        self.bytes.extend_from_slice(&[0; 4]);
        // nfgenmsg: family, version, resource id in network order.
        self.bytes.extend_from_slice(&[family, 0]);
        self.bytes.extend_from_slice(&resource.to_be_bytes());
        fill(&mut Attributes {
            bytes: &mut self.bytes,
        });
        // Messages are far below 4 GiB.
        let length = u32::try_from(self.bytes.len() - start).unwrap_or(u32::MAX);
        self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
        self.sequence = self.sequence.wrapping_add(1);
    }
}

/// Attributes of one message or of one nested attribute.
pub(super) struct Attributes<'a> {
    bytes: &'a mut Vec<u8>,
}

impl Attributes<'_> {
    pub(super) fn bytes(&mut self, kind: u16, value: &[u8]) {
        self.attribute(kind, |bytes| bytes.extend_from_slice(value));
    }

    /// nf_tables numbers are in network order.
    pub(super) fn number(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_be_bytes());
    }

    pub(super) fn text(&mut self, kind: u16, value: &str) {
        self.attribute(kind, |bytes| {
            bytes.extend_from_slice(value.as_bytes());
            bytes.push(0);
        });
    }

    pub(super) fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Attributes<'_>)) {
        self.attribute(kind | NLA_F_NESTED, |bytes| fill(&mut Attributes { bytes }));
    }

    fn attribute(&mut self, kind: u16, fill: impl FnOnce(&mut Vec<u8>)) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        fill(self.bytes);
        // A rule's expressions stay well below 64 KiB.
        let length = u16::try_from(self.bytes.len() - start).unwrap_or(u16::MAX);
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// The expressions of a rule: each narrows down which packets go on to the next.
pub(super) struct Expressions<'a> {
    list: Attributes<'a>,
}

impl Expressions<'_> {
    /// Goes on if the field begins with these bytes.
    pub(super) fn equals(&mut self, field: Field, value: &[u8]) {
        self.load(field);
        self.compare(value);
    }

    /// Goes on if the address is within the range.
    pub(super) fn within(&mut self, field: Field, range: super::Ipv4Cidr) {
        self.load(field);
        if range.prefix() < 32 {
            self.expression("bitwise", |data| {
                data.number(1, REGISTER_1);
                data.number(2, REGISTER_1);
                data.number(3, 4);
                data.nest(4, |mask| mask.bytes(1, &range.netmask().octets()));
                data.nest(5, |xor| xor.bytes(1, &[0; 4]));
            });
        }
        self.compare(&range.network().octets());
    }

    /// Goes on if the field is at least the one and at most the other.
    pub(super) fn between(&mut self, field: Field, first: &[u8], last: &[u8]) {
        self.load(field);
        self.compare_by(5, first); // NFT_CMP_GTE
        self.compare_by(3, last); // NFT_CMP_LTE
    }

    /// Goes on with packets of a connection that was let through before, or that belong to one.
    pub(super) fn is_reply(&mut self) {
        // NF_CT_STATE_BIT of IP_CT_ESTABLISHED and IP_CT_RELATED
        let states = (1_u32 << 1 | 1 << 2).to_ne_bytes();
        self.expression("ct", |data| {
            data.number(1, REGISTER_1);
            data.number(2, 0); // NFT_CT_STATE
        });
        self.expression("bitwise", |data| {
            data.number(1, REGISTER_1);
            data.number(2, REGISTER_1);
            data.number(3, 4);
            data.nest(4, |mask| mask.bytes(1, &states));
            data.nest(5, |xor| xor.bytes(1, &[0; 4]));
        });
        self.compare_by(1, &[0; 4]); // NFT_CMP_NEQ
    }

    pub(super) fn verdict(&mut self, verdict: Verdict) {
        self.expression("immediate", |data| {
            data.number(1, REGISTER_VERDICT);
            data.nest(2, |value| {
                value.nest(2, |code| code.bytes(1, &(verdict as i32).to_be_bytes()));
            });
        });
    }

    /// Refuses the packet as a closed port does.
    pub(super) fn reject(&mut self) {
        self.expression("reject", |data| {
            data.number(1, 2); // NFT_REJECT_ICMPX_UNREACH
            data.bytes(2, &[1]); // NFT_REJECT_ICMPX_PORT_UNREACH
        });
    }

    /// Replaces the source by the outgoing link's address.
    pub(super) fn masquerade(&mut self) {
        self.expression("masq", |_| {});
    }

    /// Sends the packet to another address and port.
    pub(super) fn destination(&mut self, address: std::net::Ipv4Addr, port: u16) {
        for (register, value) in [
            (REGISTER_1, &address.octets()[..]),
            (REGISTER_2, &port.to_be_bytes()),
        ] {
            self.expression("immediate", |data| {
                data.number(1, register);
                data.nest(2, |data| data.bytes(1, value));
            });
        }
        self.nat(REGISTER_1, REGISTER_2);
    }

    /// Sends the packet to the address and port in two registers.
    pub(super) fn destination_in(&mut self, address: Register, port: Register) {
        self.nat(address.number(), port.number());
    }

    fn nat(&mut self, address: u32, port: u32) {
        self.expression("nat", |data| {
            data.number(1, 1); // NFT_NAT_DNAT
            data.number(2, NFPROTO_IPV4);
            data.number(3, address); // NFTA_NAT_REG_ADDR_MIN
            data.number(5, port); // NFTA_NAT_REG_PROTO_MIN
        });
    }

    fn load(&mut self, field: Field) {
        self.load_to(field, REGISTER_1);
    }

    /// Loads fields into registers that follow each other, 4 bytes each.
    pub(super) fn load_all(&mut self, fields: &[Field], first: Register) {
        for (field, register) in fields.iter().zip(first.0..) {
            self.load_to(*field, Register(register).number());
        }
    }

    fn load_to(&mut self, field: Field, register: u32) {
        match field {
            Field::IncomingLink => self.load_meta(6, register),
            Field::OutgoingLink => self.load_meta(7, register),
            Field::NetworkProtocol => self.load_meta(15, register),
            Field::TransportProtocol => self.load_meta(16, register),
            // Base 1 is the network header, base 2 the transport header.
            Field::Ipv4Source => self.load_payload(1, 12, 4, register),
            Field::Ipv4Destination => self.load_payload(1, 16, 4, register),
            Field::DestinationPort => self.load_payload(2, 2, 2, register),
            Field::DestinationKind => self.expression("fib", |data| {
                data.number(1, register);
                data.number(2, 3); // NFT_FIB_RESULT_ADDRTYPE
                data.number(3, 1 << 1); // NFTA_FIB_F_DADDR
            }),
            Field::ReversePathLink => self.expression("fib", |data| {
                data.number(1, register);
                data.number(2, 1); // NFT_FIB_RESULT_OIF
                data.number(3, 1 | 1 << 3); // NFTA_FIB_F_SADDR | NFTA_FIB_F_IIF
            }),
        }
    }

    fn load_meta(&mut self, key: u32, register: u32) {
        self.expression("meta", |data| {
            data.number(1, register);
            data.number(2, key);
        });
    }

    fn load_payload(&mut self, base: u32, offset: u32, length: u32, register: u32) {
        self.expression("payload", |data| {
            data.number(1, register);
            data.number(2, base);
            data.number(3, offset);
            data.number(4, length);
        });
    }

    fn compare(&mut self, value: &[u8]) {
        self.compare_by(0, value); // NFT_CMP_EQ
    }

    fn compare_by(&mut self, how: u32, value: &[u8]) {
        self.expression("cmp", |data| {
            data.number(1, REGISTER_1);
            data.number(2, how);
            data.nest(3, |operand| operand.bytes(1, value));
        });
    }

    pub(super) fn expression(&mut self, name: &str, fill: impl FnOnce(&mut Attributes<'_>)) {
        self.list.nest(1, |element| {
            element.text(1, name);
            element.nest(2, fill);
        });
    }
}

// === impl Register ===

impl Register {
    pub(super) fn number(self) -> u32 {
        // NFT_REG32_00
        8 + u32::from(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn encodes_a_batch_as_the_kernel_reads_it() {
        let mut batch = Batch::begin(7);
        batch.new_table("t");
        let (bytes, last) = batch.end();
        let expected = concat!(
            "14000000", "1000", "0100", "07000000", "00000000", "0000", "000a", "1c000000", "000a",
            "0504", "08000000", "00000000", "0100", "0000", "0600", "0100", "74000000", "14000000",
            "1100", "0100", "09000000", "00000000", "0000", "000a",
        );
        assert_eq!(hex::encode(bytes), expected);
        assert_eq!(last, 8);
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn encodes_nested_expressions() {
        let mut bytes = Vec::new();
        let list = Attributes { bytes: &mut bytes };
        Expressions { list }.verdict(Verdict::Drop);
        let expected = concat!(
            "3000",
            "0180",
            "0e00",
            "0100",
            "696d6d65646961746500",
            "0000",
            "1c00",
            "0280",
            "0800",
            "0100",
            "00000000",
            "1000",
            "0280",
            "0c00",
            "0280",
            "0800",
            "0100",
            "00000000",
        );
        assert_eq!(hex::encode(bytes), expected);
    }
}
