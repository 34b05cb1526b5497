//! The names of things by their content.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A digest that is not written as this crate needs it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("digest {given:?} is not of the form sha256:<64 lower-case hex digits>")]
pub struct ParseDigestError {
    given: String,
}

macro_rules! sha256_digest {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; 32]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "sha256:{}", hex::encode(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = ParseDigestError;

            fn from_str(s: &str) -> Result<Self, ParseDigestError> {
                parse_sha256(s).map(Self)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

sha256_digest! {
    /// SHA-256 of a layer as the registry serves it (compressed). The key of everything here.
    LayerDigest
}
sha256_digest! {
    /// SHA-256 of a layer's tar archive, as the image's configuration names it (`rootfs.diff_ids`).
    DiffId
}

/// BLAKE3 of the uncompressed bytes of one span.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpanDigest(pub [u8; 32]);

impl SpanDigest {
    /// Digest of `plain`.
    pub fn of(plain: &[u8]) -> Self {
        Self(*blake3::hash(plain).as_bytes())
    }
}

impl fmt::Debug for SpanDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "blake3:{}", hex::encode(self.0))
    }
}

/// OCI allows other algorithms and upper case nowhere; what is not plain SHA-256 is refused, so
/// that one layer never has two names.
fn parse_sha256(s: &str) -> Result<[u8; 32], ParseDigestError> {
    let refused = || ParseDigestError {
        given: s.chars().take(100).collect(),
    };
    let digits = s.strip_prefix("sha256:").ok_or_else(refused)?;
    if digits.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err(refused());
    }
    let mut out = [0; 32];
    hex::decode_to_slice(digits, &mut out).map_err(|_| refused())?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_and_read_again() {
        let digest = LayerDigest([0xab; 32]);
        assert_eq!(digest.to_string().parse(), Ok(digest));
        assert_eq!(digest.to_string(), format!("sha256:{}", "ab".repeat(32)));
    }

    #[test]
    fn everything_else_is_refused() {
        for given in [
            String::new(),
            "sha256:".to_owned(),
            format!("sha512:{}", "ab".repeat(64)),
            format!("sha256:{}", "AB".repeat(32)),
            format!("sha256:{}", "ab".repeat(31)),
            format!("sha256:{}", "ab".repeat(33)),
            format!("sha256:{}é", "ab".repeat(31)),
            "ab".repeat(32),
        ] {
            let error = given.parse::<LayerDigest>().unwrap_err();
            assert!(error.to_string().contains("sha256:<64"), "{error}");
        }
    }
}
