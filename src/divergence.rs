//! How far a model's predictions are from a reference's: the Kullback-Leibler divergence of its probabilities, token by
//! token.

use std::thread;

use metal_attention::Logits;
use serde_json::{Value, json};

use crate::threads::map_on_threads;

/// Probabilities below `exp` of this are left out of a divergence: files of a reference's keep no more.
const LEAST: f64 = -16.0;

/// What tokens compared so far add up to.
#[derive(Default)]
pub struct Divergence {
    /// Of each token, in nats: `sum p ln(p / q)`, where `p` is the reference's.
    divergences: Vec<f64>,
    /// Negative log-likelihoods of the tokens under the reference, in nats.
    reference: Sum,
    /// The model's less the reference's.
    more: Sum,
    /// Squares of the differences between the probabilities of the tokens.
    squares: Sum,
    /// Tokens whose likeliest prediction is the same.
    n_same_top: usize,
}

/// A sum, and the sum of the squares of what was added.
#[derive(Default)]
struct Sum {
    n: f64,
    total: f64,
    squares: f64,
}

impl Sum {
    fn add(&mut self, x: f64) {
        self.n += 1.0;
        self.total += x;
        self.squares += x * x;
    }

    fn mean(&self) -> f64 {
        self.total / self.n
    }

    /// Standard error of the mean.
    fn error(&self) -> f64 {
        let variance = (self.squares / self.n - self.mean().powi(2)).max(0.0);
        (variance / (self.n - 1.0)).sqrt()
    }
}

/// One token.
struct Compared {
    divergence: f64,
    reference: f64,
    nll: f64,
    same_top: bool,
}

impl Divergence {
    /// Compares the rows of `logits` with log-probabilities that `reference` gives for each, and with the tokens that came.
    pub fn add(&mut self, logits: &Logits, reference: impl Fn(usize) -> Vec<f32> + Sync, next: &[u32]) {
        let n_threads = thread::available_parallelism().map_or(1, usize::from);
        let rows: Vec<usize> = (0..next.len()).collect();
        let compare = |&i: &usize| compare(logits.row(i), &reference(i), next[i] as usize);
        let parts = rows.chunks(rows.len().div_ceil(n_threads).max(1));
        let compared = map_on_threads(parts, |part| part.iter().map(compare).collect::<Vec<Compared>>());
        for Compared { divergence, reference, nll, same_top } in compared.into_iter().flatten() {
            self.divergences.push(divergence);
            self.reference.add(reference);
            self.more.add(nll - reference);
            self.squares.add(((-nll).exp() - (-reference).exp()).powi(2));
            self.n_same_top += usize::from(same_top);
        }
    }

    /// Mean divergence of a token, in nats.
    pub fn mean(&self) -> f64 {
        self.divergences.iter().sum::<f64>() / self.divergences.len() as f64
    }

    /// Perplexity of the reference.
    pub fn reference_perplexity(&self) -> f64 {
        self.reference.mean().exp()
    }

    /// Share of tokens whose likeliest prediction is the reference's.
    pub fn same_top(&self) -> f64 {
        self.n_same_top as f64 / self.divergences.len() as f64
    }

    /// For people.
    pub fn lines(&self) -> String {
        let mut divergence = Sum::default();
        self.divergences.iter().for_each(|&x| divergence.add(x));
        let [median, p90, p95, p99, p999, max] = self.percentiles();
        let n = self.divergences.len() as f64;
        let same = self.same_top();
        format!(
            "perplexity of the reference {:.4}, ln of the ratio {:.5} +/- {:.5}\n\
             KL divergence {:.6} +/- {:.6}, median {median:.6}, 90 % {p90:.6}, 95 % {p95:.6}, 99 % {p99:.6}, \
             99.9 % {p999:.6}, most {max:.6}\n\
             same likeliest token {:.3} +/- {:.3} %, root mean square of changes of probability {:.3} %\n",
            self.reference_perplexity(),
            self.more.mean(),
            self.more.error(),
            divergence.mean(),
            divergence.error(),
            100.0 * same,
            100.0 * (same * (1.0 - same) / (n - 1.0)).sqrt(),
            100.0 * self.squares.mean().sqrt(),
        )
    }

    /// For programs.
    pub fn json(&self) -> Value {
        let mut divergence = Sum::default();
        self.divergences.iter().for_each(|&x| divergence.add(x));
        let [median, p90, p95, p99, p999, max] = self.percentiles();
        json!({
            "reference_perplexity": self.reference_perplexity(),
            "ln_ratio": {"mean": self.more.mean(), "error": self.more.error()},
            "kl_divergence": {
                "mean": divergence.mean(), "error": divergence.error(), "median": median,
                "p90": p90, "p95": p95, "p99": p99, "p99_9": p999, "max": max,
            },
            "same_top": self.same_top(),
            "rms_delta_p": self.squares.mean().sqrt(),
        })
    }

    /// Median, 90, 95, 99, 99.9 and 100 %, between neighbours in proportion.
    fn percentiles(&self) -> [f64; 6] {
        let mut sorted = self.divergences.clone();
        sorted.sort_by(f64::total_cmp);
        [0.5, 0.9, 0.95, 0.99, 0.999, 1.0].map(|share| {
            let at = share * (sorted.len() as f64 - 1.0);
            let low = at.max(0.0) as usize;
            let part = at - low as f64;
            let value = |i: usize| sorted.get(i.min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN);
            (1.0 - part) * value(low) + part * value(low + 1)
        })
    }
}

/// `ln softmax` of a row.
pub fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let norm = log_sum_exp(logits);
    logits.iter().map(|&x| (f64::from(x) - norm) as f32).collect()
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    sum.ln() + max
}

fn compare(logits: &[f32], reference: &[f32], next: usize) -> Compared {
    let norm = log_sum_exp(logits);
    let divergence = reference.iter().zip(logits).filter(|(p, _)| f64::from(**p) > LEAST);
    let divergence = divergence.map(|(&p, &x)| f64::from(p).exp() * (f64::from(p) - f64::from(x) + norm)).sum();
    Compared {
        divergence,
        reference: -f64::from(reference[next]),
        nll: norm - f64::from(logits[next]),
        same_top: likeliest(logits) == likeliest(reference),
    }
}

/// The first of the largest.
fn likeliest(row: &[f32]) -> usize {
    let best =
        row.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (i, &x)| if x > best.1 { (i, x) } else { best });
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_no_distance_from_itself() {
        let logits = [1.0, 2.0, 3.0, -4.0];
        let mut found = Divergence::default();
        found.add(&Logits::new(&logits, 2), |i| log_softmax(&logits[2 * i..][..2]), &[0, 1]);
        assert!(found.mean().abs() < 1e-6 && found.same_top() == 1.0);
    }

    #[test]
    fn figures_follow_their_formulas() {
        // p = (1/4, 3/4) against q = (1/2, 1/2), then against itself.
        let p = [0.25f32.ln(), 0.75f32.ln()];
        let mut found = Divergence::default();
        found.add(&Logits::new(&[1.0, 1.0, p[0], p[1]], 2), |_| p.to_vec(), &[1, 0]);
        let expected = 0.25 * 0.5f64.ln() + 0.75 * 1.5f64.ln();
        let json = found.json();
        let near = |value: &Value, expected: f64| assert!((value.as_f64().unwrap() - expected).abs() < 1e-6, "{value}");
        near(&json["kl_divergence"]["mean"], expected / 2.0);
        near(&json["kl_divergence"]["max"], expected);
        near(&json["kl_divergence"]["median"], expected / 2.0);
        near(&json["reference_perplexity"], (3.0f64 / 16.0).sqrt().recip());
        near(&json["ln_ratio"]["mean"], 1.5f64.ln() / 2.0);
        near(&json["same_top"], 0.5);
        near(&json["rms_delta_p"], 0.25 / 2f64.sqrt());
    }
}
