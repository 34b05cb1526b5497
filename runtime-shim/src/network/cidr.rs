//! An IPv4 range in CIDR notation, as configurations write it.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::Deserialize;

/// An IPv4 network whose host bits are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct Ipv4Cidr {
    network: Ipv4Addr,
    prefix: u8,
}

impl Ipv4Cidr {
    /// The range of `prefix` bits that `address` is in.
    ///
    /// # Errors
    /// Host bits are set, or the prefix is longer than 32.
    pub fn new(address: Ipv4Addr, prefix: u8) -> Result<Self, CidrError> {
        if prefix > 32 {
            return Err(CidrError::Prefix(prefix));
        }
        let cidr = Self {
            network: Ipv4Addr::from_bits(address.to_bits() & mask(prefix)),
            prefix,
        };
        if cidr.network == address {
            Ok(cidr)
        } else {
            Err(CidrError::HostBits(cidr))
        }
    }

    /// Every address.
    pub const ANY: Self = Self {
        network: Ipv4Addr::UNSPECIFIED,
        prefix: 0,
    };

    /// The range of one address.
    pub fn host(address: Ipv4Addr) -> Self {
        Self {
            network: address,
            prefix: 32,
        }
    }

    /// First address of the range.
    pub fn network(&self) -> Ipv4Addr {
        self.network
    }

    /// Length of the network part in bits.
    pub fn prefix(&self) -> u8 {
        self.prefix
    }

    /// The network part as a mask.
    pub fn netmask(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(mask(self.prefix))
    }

    /// How many addresses the range has.
    pub fn size(&self) -> u64 {
        1 << (32 - self.prefix)
    }

    /// Whether the address is in the range.
    pub fn contains(&self, address: Ipv4Addr) -> bool {
        address.to_bits() & mask(self.prefix) == self.network.to_bits()
    }
}

fn mask(prefix: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0)
}

/// Why a text is no [`Ipv4Cidr`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CidrError {
    /// Not `a.b.c.d/n`.
    #[error("{0:?} is not an IPv4 range such as 10.64.0.0/18")]
    Syntax(String),
    /// The prefix is out of range.
    #[error("prefix length {0} is larger than 32")]
    Prefix(u8),
    /// The address is not the first of its range.
    #[error("the address has bits beyond the prefix; did you mean {0}?")]
    HostBits(Ipv4Cidr),
}

impl FromStr for Ipv4Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let syntax = || CidrError::Syntax(text.to_owned());
        let (address, prefix) = text.split_once('/').ok_or_else(syntax)?;
        let address = address.parse().map_err(|_| syntax())?;
        let prefix = prefix.parse().map_err(|_| syntax())?;
        Self::new(address, prefix)
    }
}

impl TryFrom<String> for Ipv4Cidr {
    type Error = CidrError;

    fn try_from(text: String) -> Result<Self, CidrError> {
        text.parse()
    }
}

impl fmt::Display for Ipv4Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_cidr_notation() {
        for text in ["10.64.0.0/18", "0.0.0.0/0", "10.1.2.3/32"] {
            assert_eq!(text.parse::<Ipv4Cidr>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn refuses_what_is_ambiguous() {
        for text in [
            "",
            "10.64.0.0",
            "10.64.0.0/33",
            "10.64.0.1/18",
            "a/8",
            "10.64.0.0/-1",
        ] {
            assert!(text.parse::<Ipv4Cidr>().is_err(), "{text}");
        }
        assert_eq!(
            "10.64.0.1/18".parse::<Ipv4Cidr>().unwrap_err().to_string(),
            "the address has bits beyond the prefix; did you mean 10.64.0.0/18?"
        );
    }

    #[test]
    fn knows_its_members() {
        let cidr: Ipv4Cidr = "10.64.64.0/18".parse().unwrap();
        assert!(cidr.contains(Ipv4Addr::new(10, 64, 127, 255)));
        assert!(!cidr.contains(Ipv4Addr::new(10, 64, 128, 0)));
        assert_eq!(cidr.size(), 16_384);
        assert_eq!(cidr.netmask(), Ipv4Addr::new(255, 255, 192, 0));
        assert!(
            "0.0.0.0/0"
                .parse::<Ipv4Cidr>()
                .unwrap()
                .contains(Ipv4Addr::BROADCAST)
        );
    }
}
