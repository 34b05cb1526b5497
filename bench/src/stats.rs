//! Statistics over samples. Each gives nothing where there is nothing to say, never a zero that
//! would read as a result.

/// The smallest sample that `percent` of 100 samples do not exceed (nearest rank).
pub(crate) fn percentile(samples: &[f64], percent: usize) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

/// The middle sample, or the mean of the two in the middle.
pub(crate) fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = sorted.get(middle).copied()?;
    if sorted.len() % 2 == 1 {
        return Some(upper);
    }
    Some(f64::midpoint(sorted[middle - 1], upper))
}

/// `a / b`, unless that has no meaning.
pub(crate) fn ratio(a: f64, b: f64) -> Option<f64> {
    Some(a / b).filter(|ratio| ratio.is_finite())
}

/// To a thousandth: what is measured is not known better.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(percentile(&samples, 50), Some(50.0));
        assert_eq!(percentile(&samples, 90), Some(90.0));
        assert_eq!(percentile(&samples, 99), Some(99.0));
        assert_eq!(percentile(&samples, 100), Some(100.0));
        assert_eq!(percentile(&samples, 0), Some(1.0));
    }

    #[test]
    fn few_samples_are_enough() {
        assert_eq!(percentile(&[7.0], 50), Some(7.0));
        assert_eq!(percentile(&[7.0], 99), Some(7.0));
        assert_eq!(percentile(&[2.0, 1.0], 50), Some(1.0));
        assert_eq!(percentile(&[2.0, 1.0], 90), Some(2.0));
    }

    #[test]
    fn no_samples_give_no_result() {
        assert_eq!(percentile(&[], 50), None);
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn medians_of_odd_and_even_counts() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[1.0]), Some(1.0));
    }

    #[test]
    fn ratios_without_meaning_are_left_out() {
        assert_eq!(ratio(3.0, 2.0), Some(1.5));
        assert_eq!(ratio(0.0, 2.0), Some(0.0));
        assert_eq!(ratio(1.0, 0.0), None);
        assert_eq!(ratio(0.0, 0.0), None);
    }

    #[test]
    fn rounding_keeps_microseconds_of_a_millisecond() {
        assert_eq!(rounded(1.234_56), 1.235);
        assert_eq!(rounded(100.0), 100.0);
    }
}
