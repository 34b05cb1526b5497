//! Kubernetes resource quantities as plain numbers.
//! Follows `k8s.io/apimachinery/pkg/api/resource`: exact decimal arithmetic, no
//! floating point, rounding up where a coarser unit is asked for.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Longest text that is looked at; the API server stores far shorter ones.
const MAX_LEN: usize = 64;
const NANOS: i128 = 1_000_000_000;

/// The quantity in whole units (bytes, pods), rounded up. `None` for text that
/// is not a quantity, and for negative or absurd values.
pub fn units(quantity: &Quantity) -> Option<u64> {
    divide_up(parse_nanos(&quantity.0)?, NANOS)
}

/// The quantity in thousandths (CPU millis), rounded up.
pub fn millis(quantity: &Quantity) -> Option<u64> {
    divide_up(parse_nanos(&quantity.0)?, NANOS / 1000)
}

/// The quantity divided by `divisor`, rounded up, as a downward API value is.
pub fn divided(quantity: &Quantity, divisor: &Quantity) -> Option<u64> {
    let divisor = parse_nanos(&divisor.0)?;
    (divisor > 0).then_some(())?;
    divide_up(parse_nanos(&quantity.0)?, divisor)
}

/// CPU thousandths as a canonical quantity: `2`, `1500m`.
pub fn from_millis(millis: u64) -> Quantity {
    if millis.is_multiple_of(1000) {
        Quantity((millis / 1000).to_string())
    } else {
        Quantity(format!("{millis}m"))
    }
}

/// Bytes as a canonical quantity: the largest binary suffix that is exact.
pub fn from_bytes(bytes: u64) -> Quantity {
    const SUFFIXES: [(&str, u32); 4] = [("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)];
    for (suffix, shift) in SUFFIXES {
        if bytes > 0 && bytes.trailing_zeros() >= shift {
            return Quantity(format!("{}{suffix}", bytes >> shift));
        }
    }
    Quantity(bytes.to_string())
}

fn divide_up(value: i128, by: i128) -> Option<u64> {
    (value >= 0).then_some(())?;
    u64::try_from(value / by + i128::from(value % by != 0)).ok()
}

fn parse_nanos(text: &str) -> Option<i128> {
    if text.len() > MAX_LEN {
        return None;
    }
    let (negative, rest) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let end = rest
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(rest.len());
    let (number, suffix) = rest.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    // `digits` x 10^-scale is the number without its suffix.
    let mut digits: i128 = 0;
    for digit in whole.bytes().chain(fraction.bytes()) {
        digits = digits
            .checked_mul(10)?
            .checked_add(i128::from(digit - b'0'))?;
    }
    let scale = i32::try_from(fraction.len()).ok()?;
    let (factor, exponent) = suffix_factor(suffix)?;
    let scaled = shift_decimal(digits.checked_mul(factor)?, exponent + 9 - scale)?;
    Some(if negative { -scaled } else { scaled })
}

/// Binary factor and power of ten of a suffix.
fn suffix_factor(suffix: &str) -> Option<(i128, i32)> {
    Some(match suffix {
        "" => (1, 0),
        "n" => (1, -9),
        "u" => (1, -6),
        "m" => (1, -3),
        "k" => (1, 3),
        "M" => (1, 6),
        "G" => (1, 9),
        "T" => (1, 12),
        "P" => (1, 15),
        "E" => (1, 18),
        "Ki" => (1 << 10, 0),
        "Mi" => (1 << 20, 0),
        "Gi" => (1 << 30, 0),
        "Ti" => (1 << 40, 0),
        "Pi" => (1 << 50, 0),
        "Ei" => (1 << 60, 0),
        other => {
            let exponent: i32 = other.strip_prefix(['e', 'E'])?.parse().ok()?;
            (1, exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT))
        }
    })
}

/// Beyond this every value is zero or out of range anyway.
const MAX_EXPONENT: i32 = 40;

/// `value` x 10^`power`; what does not divide evenly is rounded up.
fn shift_decimal(value: i128, power: i32) -> Option<i128> {
    let factor = 10_i128.checked_pow(power.unsigned_abs())?;
    if power >= 0 {
        value.checked_mul(factor)
    } else {
        Some(value / factor + i128::from(value % factor != 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn q(text: &str) -> Quantity {
        Quantity(text.to_owned())
    }

    #[test]
    fn reads_what_the_api_server_writes() {
        for (text, expected_units, expected_millis) in [
            ("0", 0, 0),
            ("1", 1, 1000),
            ("100m", 1, 100),
            ("1500m", 2, 1500),
            ("0.5", 1, 500),
            (".5", 1, 500),
            ("5.", 5, 5000),
            ("1u", 1, 1),
            ("64Mi", 64 << 20, (64 << 20) * 1000),
            ("1.5Gi", 3 << 29, (3 << 29) * 1000),
            ("2k", 2000, 2_000_000),
            ("1e3", 1000, 1_000_000),
            ("1E-3", 1, 1),
            ("12E", 12_000_000_000_000_000_000, 0),
        ] {
            assert_eq!(units(&q(text)), Some(expected_units), "{text}");
            if expected_millis > 0 || expected_units == 0 {
                assert_eq!(millis(&q(text)), Some(expected_millis), "{text}");
            }
        }
    }

    #[test]
    fn refuses_what_is_no_quantity() {
        for text in [
            "",
            "-",
            ".",
            "1.2.3",
            "1Q",
            "-1",
            "1e",
            "9999999999999999999999",
            "1e40",
        ] {
            assert_eq!(units(&q(text)), None, "{text}");
        }
        assert_eq!(units(&q(&"1".repeat(100))), None);
    }

    #[test]
    fn divides_as_the_downward_api_does() {
        assert_eq!(divided(&q("1500m"), &q("1")), Some(2));
        assert_eq!(divided(&q("1500m"), &q("1m")), Some(1500));
        assert_eq!(divided(&q("64Mi"), &q("1Mi")), Some(64));
        assert_eq!(divided(&q("1"), &q("0")), None);
    }

    #[test]
    fn writes_canonical_text() {
        assert_eq!(from_millis(4000).0, "4");
        assert_eq!(from_millis(2500).0, "2500m");
        assert_eq!(from_bytes(0).0, "0");
        assert_eq!(from_bytes(24 << 30).0, "24Gi");
        assert_eq!(from_bytes((1 << 30) + (1 << 10)).0, "1048577Ki");
        assert_eq!(from_bytes(1001).0, "1001");
    }
}
