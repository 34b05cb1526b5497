//! Ranges of addresses.

use std::net::IpAddr;

/// An address range, kept as the first address and the mask's length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cidr {
    base: u128,
    prefix: u32,
    bits: u32,
}

impl std::fmt::Display for Cidr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.address(0), self.prefix)
    }
}

impl Cidr {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = text.split_once('/')?;
        let (base, bits) = match address.parse().ok()? {
            IpAddr::V4(v4) => (u128::from(u32::from(v4)), 32),
            IpAddr::V6(v6) => (u128::from(v6), 128),
        };
        let prefix: u32 = prefix.parse().ok()?;
        let cidr = Self { base, prefix, bits };
        (prefix <= bits && cidr.network(prefix) == base).then_some(cidr)
    }

    /// Whether an address is in the range.
    pub fn contains(&self, address: IpAddr) -> bool {
        let (base, bits) = match address {
            IpAddr::V4(v4) => (u128::from(u32::from(v4)), 32),
            IpAddr::V6(v6) => (u128::from(v6), 128),
        };
        let other = Self {
            base,
            prefix: bits,
            bits,
        };
        self.overlaps(&other)
    }

    /// The address that many places after the first.
    pub fn address(&self, index: u128) -> IpAddr {
        let address = self.base.wrapping_add(index);
        if self.bits == 32 {
            // The upper bits of a 32-bit range are zero.
            IpAddr::from(((address & u128::from(u32::MAX)) as u32).to_be_bytes())
        } else {
            IpAddr::from(address.to_be_bytes())
        }
    }

    fn network(&self, prefix: u32) -> u128 {
        let host_bits = self.bits - prefix;
        self.base
            .checked_shr(host_bits)
            .unwrap_or(0)
            .checked_shl(host_bits)
            .unwrap_or(0)
    }

    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let prefix = self.prefix.min(other.prefix);
        self.bits == other.bits && self.network(prefix) == other.network(prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_know_their_addresses() {
        let cidr = Cidr::parse("10.64.0.0/18").unwrap();
        assert_eq!(cidr.to_string(), "10.64.0.0/18");
        for (ip, inside) in [
            ("10.64.0.0", true),
            ("10.64.63.255", true),
            ("10.64.64.0", false),
            ("::a40:0", false),
        ] {
            assert_eq!(cidr.contains(ip.parse().unwrap()), inside, "{ip}");
        }
        assert_eq!(cidr.address(258).to_string(), "10.64.1.2");
        let v6 = Cidr::parse("fd00::/64").unwrap();
        assert!(
            v6.contains("fd00::1".parse().unwrap())
                && !v6.contains("fd00:0:0:1::".parse().unwrap())
        );
        assert!(
            Cidr::parse("0.0.0.0/0")
                .unwrap()
                .contains("1.2.3.4".parse().unwrap())
        );
    }
}
