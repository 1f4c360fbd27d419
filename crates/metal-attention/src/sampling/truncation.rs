//! The truncating samplers: each removes the candidates that its rule finds too unlikely (XTC: too likely), and keeps
//! at least one, or `min_keep`.
//!
//! Top-k is [`Candidates::keep_highest`].

use super::candidates::{Candidates, Softmax, TokenCandidate};

/// Top-p, or nucleus sampling (Holtzman et al. 2019, arXiv 1904.09751): the most
/// probable tokens until their probabilities sum to at least `p`.
pub(super) fn top_p(candidates: &mut Candidates, p: f32, min_keep: usize) {
    candidates.keep_mass(p, min_keep, TokenCandidate::by_logit);
}

/// Min-p (Nguyen et al. 2024, arXiv 2407.01082): the tokens whose probability is
/// at least `p` times that of the most probable one.
pub(super) fn min_p(candidates: &mut Candidates, p: f32, min_keep: usize) {
    let Some(best) = candidates.best() else { return };
    let lowest = best.logit + p.ln();
    if candidates.as_slice().iter().filter(|c| c.logit >= lowest).count() < min_keep {
        candidates.keep_highest(min_keep);
    } else {
        candidates.retain(|c| c.logit >= lowest);
    }
}

/// Locally typical sampling (Meister et al. 2022, arXiv 2202.00666): the tokens
/// whose surprise is closest to the distribution's entropy, until their
/// probabilities sum to at least `p`.
pub(super) fn typical_p(candidates: &mut Candidates, p: f32, min_keep: usize) {
    let softmax = Softmax::of(candidates.as_slice());
    let entropy = softmax.entropy(candidates.as_slice());
    let distance = |c: &TokenCandidate| (softmax.surprise(*c) - entropy).abs();
    candidates.keep_mass(p, min_keep, |a, b| distance(a).total_cmp(&distance(b)).then_with(|| a.by_logit(b)));
}

/// Top-n-sigma (Tang et al. 2024, arXiv 2411.07641): the logits within `n`
/// standard deviations, of all candidates' logits, below the highest.
pub(super) fn top_n_sigma(candidates: &mut Candidates, n: f32) {
    let Some(best) = candidates.best() else { return };
    let items = candidates.as_slice();
    let count = items.len() as f64;
    let mean = items.iter().map(|c| f64::from(c.logit)).sum::<f64>() / count;
    let variance = items.iter().map(|c| (f64::from(c.logit) - mean).powi(2)).sum::<f64>() / count;
    let lowest = f64::from(best.logit) - f64::from(n) * variance.sqrt();
    candidates.retain(|c| f64::from(c.logit) >= lowest);
}

/// XTC, "exclude top choices": if several tokens are at least `threshold` probable, removes all of them but the least
/// probable, unless that leaves fewer than `min_keep`. The caller draws whether it applies to this token.
pub(super) fn xtc(candidates: &mut Candidates, threshold: f32, min_keep: usize) {
    let softmax = Softmax::of(candidates.as_slice());
    let is_top = |c: TokenCandidate| softmax.probability(c) >= f64::from(threshold);
    let top = || candidates.as_slice().iter().copied().filter(|&c| is_top(c));
    let n_left = (candidates.as_slice().len() + 1).saturating_sub(top().count());
    let least = top().max_by(TokenCandidate::by_logit);
    if let Some(least) = least.filter(|_| n_left >= min_keep) {
        candidates.retain(|&c| c == least || !is_top(c));
    }
}
