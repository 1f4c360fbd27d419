//! Tests of the samplers against their definitions, computed the slow way.

mod chain;
mod draws;
mod history;
mod hostile;
mod options;
mod short_list;
mod speed;

use proptest::prelude::*;

use super::candidates::{Softmax, TokenCandidate};
use super::{Sampler, SamplerOptions};

/// Options with every sampler off.
fn neutral() -> SamplerOptions {
    SamplerOptions { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: Some(1), ..SamplerOptions::default() }
}

fn sampler(options: SamplerOptions) -> Sampler {
    Sampler::new(options).expect("options in range")
}

fn accept_all(sampler: &mut Sampler, tokens: &[u32]) {
    for &id in tokens {
        sampler.accept(id);
    }
}

/// The candidates after the chain, as (id, probability), highest first.
fn distribution(sampler: &mut Sampler, logits: &[f32]) -> Vec<(u32, f64)> {
    let items = sampler.narrow(logits, |_| true).as_slice();
    let softmax = Softmax::of(items);
    let mut left: Vec<TokenCandidate> = items.to_vec();
    left.sort_by(TokenCandidate::by_logit);
    left.into_iter().map(|c| (c.id, softmax.probability(c))).collect()
}

/// The ids left after the chain, in ascending order.
fn kept(options: SamplerOptions, logits: &[f32]) -> Vec<usize> {
    let mut ids: Vec<usize> =
        distribution(&mut sampler(options), logits).into_iter().map(|(id, _)| id as usize).collect();
    ids.sort_unstable();
    ids
}

/// The softmax of all logits, in double precision.
fn softmax(logits: &[f32]) -> Vec<f64> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|&l| (f64::from(l) - f64::from(highest)).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|w| w / total).collect()
}

/// The tokens from the highest logit down, lowest id first among equals.
fn ranked(logits: &[f32]) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    ids
}

/// Finite logits of vocabularies small and large: flat, peaked, and with ties.
fn logits() -> impl Strategy<Value = Vec<f32>> {
    let value = prop_oneof![-8.0_f32..8.0, -1.0_f32..1.0, (-4_i8..5).prop_map(f32::from)];
    prop_oneof![prop::collection::vec(value.clone(), 1..20), prop::collection::vec(value, 200..900)]
}
