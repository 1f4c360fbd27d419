//! Tests with extreme logits and options: NaN, infinities, ties.

use super::*;
use crate::sampling::SamplerKind;
use metal_attention_model::argmax;

/// Any float, with special values often.
fn any_logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        any::<u32>().prop_map(f32::from_bits),
        -3.0_f32..3.0,
        prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 0.0, -0.0, 1.0e-45]),
    ]
}

fn all_samplers() -> impl Strategy<Value = SamplerOptions> {
    let numbers = (
        prop::sample::select(vec![0.0, f32::MIN_POSITIVE, 0.8, 1.0, f32::MAX]),
        prop::sample::select(vec![0.0, 0.5, f32::MAX]),
        0_usize..50,
        0.0_f32..=1.0,
        0.0_f32..=1.0,
        0.0_f32..=1.0,
        prop::sample::select(vec![-1.0, 1.0e-30, 1.0, f32::MAX]),
    );
    let penalties = prop::sample::select(vec![f32::MIN_POSITIVE, 1.0, 1.1, f32::MAX]);
    let order = Just(SamplerKind::ALL.to_vec()).prop_shuffle();
    (numbers, penalties, order, any::<u64>()).prop_map(
        |((temperature, dynatemp_range, top_k, top_p, min_p, typical_p, top_n_sigma), penalty, order, seed)| {
            SamplerOptions {
                temperature,
                dynatemp_range,
                dynatemp_exponent: 1.5,
                top_k,
                top_p,
                min_p,
                typical_p,
                top_n_sigma,
                xtc_probability: 0.5,
                repeat_penalty: penalty,
                frequency_penalty: -penalty,
                presence_penalty: penalty,
                dry_multiplier: penalty,
                dry_base: penalty,
                order,
                seed: Some(seed),
                ..SamplerOptions::default()
            }
        },
    )
}

proptest! {
    #[test]
    fn only_eligible_tokens_are_chosen(
        logits in prop::collection::vec(any_logit(), 0..300), options in all_samplers(),
        tokens in prop::collection::vec(0_u32..320, 0..30),
    ) {
        let mut sampler = sampler(options);
        accept_all(&mut sampler, &tokens);
        for _ in 0..4 {
            prop_assert!(sampler.narrow(&logits, |_| true).as_slice().iter().all(|c| c.logit.is_finite()));
            let id = sampler.sample(&logits);
            let choosable = |l: &f32| *l > f32::NEG_INFINITY;
            if logits.contains(&f32::INFINITY) {
                prop_assert_eq!(logits[id as usize], f32::INFINITY);
            } else if logits.iter().any(choosable) {
                prop_assert!(choosable(&logits[id as usize]));
            } else {
                prop_assert_eq!(id, argmax(&logits));
            }
            sampler.accept(id);
        }
    }

    #[test]
    fn temperature_zero_is_argmax(logits in prop::collection::vec(any_logit(), 0..300), top_k in 0_usize..5) {
        let expected = argmax(&logits);
        let greedy = SamplerOptions { top_k, typical_p: 0.1, xtc_probability: 1.0, ..SamplerOptions::greedy() };
        let mut plain = sampler(greedy.clone());
        prop_assert!(plain.is_greedy());
        prop_assert_eq!(plain.sample(&logits), expected);
        // Another way to the same result, through the candidates.
        let mut biased = sampler(SamplerOptions { logit_bias: vec![(1000, 1.0)], ..greedy });
        prop_assert!(!biased.is_greedy());
        prop_assert_eq!(biased.sample(&logits), expected);
    }

    #[test]
    fn a_tiny_temperature_is_nearly_greedy(logits in logits()) {
        let ranked = ranked(&logits);
        prop_assume!(ranked.len() == 1 || logits[ranked[0]] - logits[ranked[1]] > 1e-3);
        for temperature in [1e-5, f32::MIN_POSITIVE, 1.0e-45] {
            let mut sampler = sampler(SamplerOptions { temperature, ..neutral() });
            prop_assert_eq!(sampler.sample(&logits) as usize, ranked[0]);
        }
    }
}

#[test]
fn a_tiny_temperature_leaves_finite_logits() {
    let mut sampler = sampler(SamplerOptions { temperature: f32::MIN_POSITIVE, ..neutral() });
    let logits: Vec<f32> = sampler.narrow(&[0.0, f32::MIN], |_| true).as_slice().iter().map(|c| c.logit).collect();
    assert_eq!(logits, [0.0, f32::MIN]);
}

#[test]
fn ties_go_to_the_lowest_id_when_greedy() {
    let mut greedy = sampler(SamplerOptions { logit_bias: vec![(0, 0.0)], ..SamplerOptions::greedy() });
    assert_eq!(greedy.sample(&[1.0, 3.0, 3.0, 3.0]), 1);
    assert_eq!(greedy.sample(&[-0.0, 0.0]), 0);
    assert_eq!(greedy.sample(&[f32::NAN, f32::INFINITY, f32::INFINITY]), 1);
}

#[test]
fn nothing_to_choose_from_is_argmax() {
    let mut sampler = sampler(neutral());
    for logits in [&[][..], &[f32::NAN; 3], &[f32::NEG_INFINITY; 3], &[f32::NAN, f32::NEG_INFINITY]] {
        assert_eq!(sampler.sample(logits), argmax(logits));
    }
    assert_eq!(sampler.sample(&[f32::NAN, f32::NEG_INFINITY]), 1);
}

#[test]
fn infinite_logits_are_equals() {
    let logits = [0.0, f32::INFINITY, 5.0, f32::INFINITY];
    assert_eq!(distribution(&mut sampler(neutral()), &logits), [(1, 0.5), (3, 0.5)]);
    let forbidden = SamplerOptions { logit_bias: vec![(1, f32::NEG_INFINITY)], ..neutral() };
    assert_eq!(kept(forbidden, &logits), [3]);
}
