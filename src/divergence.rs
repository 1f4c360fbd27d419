//! Compares a model's predictions with those of a reference model: the Kullback-Leibler divergence of the probabilities at each
//! token, and what follows from it.

use std::thread;

use metal_attention::Logits;
use serde_json::{Value, json};

use crate::threads::map_on_threads;

/// The smallest log-probability of the reference that counts for a divergence: files of a reference hold no smaller ones.
const MIN_LOG_PROBABILITY: f64 = -16.0;

/// The sums over the tokens that are compared so far.
#[derive(Default)]
pub struct Divergence {
    /// The divergence at each token in nats: `sum p ln(p / q)`, where `p` is the reference's probability and `q` the model's.
    divergences: Vec<f64>,
    /// The negative log-likelihoods of the tokens under the reference, in nats.
    reference: RunningSum,
    /// The negative log-likelihoods under the model minus those under the reference.
    excess: RunningSum,
    /// The squares of the differences between the two probabilities of the tokens.
    squares: RunningSum,
    /// The number of tokens at which both predict the same likeliest token.
    n_same_top: usize,
}

/// The number, sum and sum of squares of some values.
#[derive(Default)]
struct RunningSum {
    /// The number of values.
    n: f64,
    /// Their sum.
    total: f64,
    /// The sum of their squares.
    squares: f64,
}

impl RunningSum {
    /// Adds a value.
    fn add(&mut self, x: f64) {
        self.n += 1.0;
        self.total += x;
        self.squares += x * x;
    }

    /// The mean of the values.
    fn mean(&self) -> f64 {
        self.total / self.n
    }

    /// The standard error of the mean.
    fn error(&self) -> f64 {
        let variance = (self.squares / self.n - self.mean().powi(2)).max(0.0);
        (variance / (self.n - 1.0)).sqrt()
    }
}

/// The comparison at one token.
struct TokenDivergence {
    /// The divergence in nats.
    divergence: f64,
    /// The negative log-likelihood of the token that follows, under the reference.
    reference: f64,
    /// The same under the model.
    nll: f64,
    /// Whether both predict the same likeliest token.
    same_top: bool,
}

impl Divergence {
    /// Compares each row of `logits` with the log-probabilities `reference(row)`; `next` are the tokens that follow.
    pub fn add(&mut self, logits: &Logits, reference: impl Fn(usize) -> Vec<f32> + Sync, next: &[u32]) {
        let n_threads = thread::available_parallelism().map_or(1, usize::from);
        let rows: Vec<usize> = (0..next.len()).collect();
        let compare = |&i: &usize| compare(logits.row(i), &reference(i), next[i] as usize);
        let parts = rows.chunks(rows.len().div_ceil(n_threads).max(1));
        let compared = map_on_threads(parts, |part| part.iter().map(compare).collect::<Vec<TokenDivergence>>());
        for TokenDivergence { divergence, reference, nll, same_top } in compared.into_iter().flatten() {
            self.divergences.push(divergence);
            self.reference.add(reference);
            self.excess.add(nll - reference);
            self.squares.add(((-nll).exp() - (-reference).exp()).powi(2));
            self.n_same_top += usize::from(same_top);
        }
    }

    /// The mean divergence in nats.
    pub fn mean(&self) -> f64 {
        self.divergences.iter().sum::<f64>() / self.divergences.len() as f64
    }

    /// The perplexity of the reference.
    pub fn reference_perplexity(&self) -> f64 {
        self.reference.mean().exp()
    }

    /// The share of tokens at which both predict the same likeliest token.
    pub fn same_top(&self) -> f64 {
        self.n_same_top as f64 / self.divergences.len() as f64
    }

    /// The results as three lines of text.
    pub fn lines(&self) -> String {
        let mut divergence = RunningSum::default();
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
            self.excess.mean(),
            self.excess.error(),
            divergence.mean(),
            divergence.error(),
            100.0 * same,
            100.0 * (same * (1.0 - same) / (n - 1.0)).sqrt(),
            100.0 * self.squares.mean().sqrt(),
        )
    }

    /// The results as a JSON object.
    pub fn json(&self) -> Value {
        let mut divergence = RunningSum::default();
        self.divergences.iter().for_each(|&x| divergence.add(x));
        let [median, p90, p95, p99, p999, max] = self.percentiles();
        json!({
            "reference_perplexity": self.reference_perplexity(),
            "ln_ratio": {"mean": self.excess.mean(), "error": self.excess.error()},
            "kl_divergence": {
                "mean": divergence.mean(), "error": divergence.error(), "median": median,
                "p90": p90, "p95": p95, "p99": p99, "p99_9": p999, "max": max,
            },
            "same_top": self.same_top(),
            "rms_delta_p": self.squares.mean().sqrt(),
        })
    }

    /// The percentiles 50, 90, 95, 99, 99.9 and 100 of the divergences, interpolated linearly.
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

/// The log-softmax of a row.
pub fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let norm = log_sum_exp(logits);
    logits.iter().map(|&x| (f64::from(x) - norm) as f32).collect()
}

/// The logarithm of the sum of exponentials of a row.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    sum.ln() + max
}

/// Compares one row of logits with the reference's log-probabilities; `next` is the token that follows.
fn compare(logits: &[f32], reference: &[f32], next: usize) -> TokenDivergence {
    let norm = log_sum_exp(logits);
    let divergence = reference.iter().zip(logits).filter(|(p, _)| f64::from(**p) > MIN_LOG_PROBABILITY);
    let divergence = divergence.map(|(&p, &x)| f64::from(p).exp() * (f64::from(p) - f64::from(x) + norm)).sum();
    TokenDivergence {
        divergence,
        reference: -f64::from(reference[next]),
        nll: norm - f64::from(logits[next]),
        same_top: likeliest(logits) == likeliest(reference),
    }
}

/// The index of the largest value, of the first one if there are several.
fn likeliest(row: &[f32]) -> usize {
    let best =
        row.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (i, &x)| if x > best.1 { (i, x) } else { best });
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_has_no_divergence_from_itself() {
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
