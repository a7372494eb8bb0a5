//! Percentiles.

use std::time::Duration;

use serde::Serialize;

/// Milliseconds: median, 95th percentile, least and most of a series.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Milliseconds {
    pub(super) p50: f64,
    pub(super) p95: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Milliseconds {
    /// Of a series; zeros for an empty one.
    pub(super) fn of(series: &[Duration]) -> Self {
        let mut sorted: Vec<f64> =
            series.iter().map(|d| (d.as_secs_f64() * 10_000.0).round() / 10.0).collect();
        sorted.sort_by(f64::total_cmp);
        // Nearest rank: a value that was measured.
        let rank = |percent: usize| {
            let index = (sorted.len() * percent).div_ceil(100).max(1) - 1;
            sorted.get(index).copied().unwrap_or_default()
        };
        Self { p50: rank(50), p95: rank(95), min: rank(0), max: rank(100) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_of_the_series() {
        let series: Vec<Duration> = (1..=20).map(Duration::from_millis).collect();
        let of = Milliseconds::of(&series);
        assert_eq!((of.p50, of.p95, of.min, of.max), (10.0, 19.0, 1.0, 20.0));
        assert_eq!(Milliseconds::of(&[]).p50, 0.0);
        assert_eq!(Milliseconds::of(&series[..1]).p95, 1.0);
    }
}
