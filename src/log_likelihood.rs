//! Perplexity: the exponential of the mean negative log-likelihood of tokens.

use std::thread;

use metal_attention::Logits;

use crate::threads::map_on_threads;

/// The sums over the tokens that are scored so far.
#[derive(Default)]
pub struct LogLikelihood {
    /// The number of tokens.
    count: usize,
    /// The sum of their negative log-likelihoods, in nats.
    sum: f64,
    /// The sum of the squares of these.
    sum_of_squares: f64,
}

impl LogLikelihood {
    /// Scores the token `next[i]` by row `i` of `logits`, on all cores.
    pub fn add(&mut self, logits: &Logits, next: &[u32]) {
        let n_threads = thread::available_parallelism().map_or(1, usize::from);
        let rows: Vec<_> = next.iter().enumerate().map(|(i, &id)| (logits.row(i), id)).collect();
        let score = |part: &[(&[f32], u32)]| part.iter().map(|&(row, id)| nll(row, id)).collect::<Vec<_>>();
        let nll = map_on_threads(rows.chunks(rows.len().div_ceil(n_threads).max(1)), score).concat();
        self.count += nll.len();
        self.sum += nll.iter().sum::<f64>();
        self.sum_of_squares += nll.iter().map(|x| x * x).sum::<f64>();
    }

    /// The number of tokens scored.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The perplexity; NaN if no token is scored.
    pub fn perplexity(&self) -> f64 {
        (self.sum / self.count as f64).exp()
    }

    /// The standard error of the perplexity: that of the mean, times the perplexity. NaN below two tokens.
    pub fn standard_error(&self) -> f64 {
        let n = self.count as f64;
        let mean = self.sum / n;
        let variance = (self.sum_of_squares / n - mean * mean).max(0.0);
        (variance / (n - 1.0)).sqrt() * self.perplexity()
    }
}

/// The negative log-likelihood of `id` under the softmax of `logits`, in nats.
fn nll(logits: &[f32], id: u32) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    sum.ln() + max - f64::from(logits[id as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fair_coin_has_perplexity_two() {
        let mut total = LogLikelihood::default();
        total.add(&Logits::new(&[5.0, 5.0, -1e3, -1e3], 2), &[0, 1]);
        assert!((total.perplexity() - 2.0).abs() < 1e-12);
        assert!(total.standard_error() < 1e-6);
    }

    #[test]
    fn mean_and_error_follow_their_formulas() {
        // Probabilities 1/4, 1/2, 1/8: -ln p = 2, 1 and 3 times ln 2.
        let (a, b) = (3f32.ln(), 7f32.ln());
        let mut total = LogLikelihood::default();
        total.add(&Logits::new(&[0.0, a, 0.0, 0.0], 2), &[0, 1]);
        total.add(&Logits::new(&[0.0, b], 2), &[0]);
        let ln2 = 2f64.ln();
        assert_eq!(total.count(), 3);
        assert!((total.perplexity() - 4.0).abs() < 1e-6);
        // Variance 2/3 ln² 2; over n - 1 = 2.
        assert!((total.standard_error() - 4.0 * ln2 / 3f64.sqrt()).abs() < 1e-6);
    }
}
