//! Tests of choices from the highest logits against choices from all of them.

use metal_attention_model::highest;

use super::*;
use crate::sampling::SamplerKind;

/// Options for which a short list may be enough.
fn options() -> impl Strategy<Value = SamplerOptions> {
    let chain = (
        prop::sample::select(vec![0.0, 0.5, 0.8, 1.0, 2.0]),
        prop::sample::select(vec![0, 1, 3, 20, 40]),
        prop::sample::select(vec![0.5, 0.95, 1.0]),
        prop::sample::select(vec![0.0, 0.05, 0.3, 1.0]),
        prop::sample::select(vec![0.0, 0.5]),
    );
    let penalties = (
        prop::sample::select(vec![1.0, 1.0, 1.1, 3.0, 0.5]),
        prop::sample::select(vec![0.0, 0.0, 0.4, -0.4]),
        prop::sample::select(vec![0.0, 0.0, 0.8]),
    );
    let order = prop_oneof![3 => Just(SamplerKind::ALL.to_vec()), 1 => Just(SamplerKind::ALL.to_vec()).prop_shuffle()];
    (chain, penalties, order, any::<u64>()).prop_map(
        |((temperature, top_k, top_p, min_p, xtc_probability), (repeat, presence, dry), order, seed)| SamplerOptions {
            temperature,
            top_k,
            top_p,
            min_p,
            xtc_probability,
            repeat_penalty: repeat,
            presence_penalty: presence,
            frequency_penalty: presence / 2.0,
            dry_multiplier: dry,
            order,
            seed: Some(seed),
            ..SamplerOptions::default()
        },
    )
}

fn any_logits() -> impl Strategy<Value = Vec<f32>> {
    let odd = prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 3.0]);
    let often_odd = prop_oneof![6 => -3.0_f32..3.0, 1 => odd];
    prop_oneof![4 => logits(), 1 => prop::collection::vec(often_odd, 1..200)]
}

/// `logits` without the `forbidden` tokens.
fn masked(logits: &[f32], forbidden: &[u32]) -> Vec<f32> {
    let mut masked = logits.to_vec();
    for &id in forbidden {
        if let Some(logit) = masked.get_mut(id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    masked
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn a_short_list_gives_the_same_token_or_none(
        rows in prop::collection::vec(any_logits(), 1..4), options in options(), k in 1_usize..130,
        tokens in prop::collection::vec(0_u32..40, 0..30), forbidden in prop::collection::vec(0_u32..40, 0..3),
    ) {
        let [mut full, mut short, mut either] = [(); 3].map(|()| sampler(options.clone()));
        accept_all(&mut full, &tokens);
        accept_all(&mut short, &tokens);
        accept_all(&mut either, &tokens);
        // Several choices, so that one that failed must have left nothing behind.
        for logits in &rows {
            let masked = masked(logits, &forbidden);
            let expected = full.sample_from_all(&masked, |_| true);
            let allowed = |id| !forbidden.contains(&id);
            let chosen = short.sample_short(&highest(logits, k), k, allowed);
            prop_assert_eq!(chosen.unwrap_or_else(|| short.sample_from_all(&masked, |_| true)), expected);
            prop_assert_eq!(either.sample_allowed(logits, allowed), expected);
            full.accept(expected);
            short.accept(expected);
            either.accept(expected);
        }
    }
}

/// Logits of 5000 tokens, all different.
fn many_logits() -> Vec<f32> {
    (0..5000_u32).map(|id| (id.wrapping_mul(2_654_435_761) >> 8) as f32 / 2e6).collect()
}

#[test]
fn a_top_k_as_large_as_can_be_chooses_as_well() {
    let logits = many_logits();
    for top_k in [64, 65, 2500, 4999, 5000, 1_000_000, usize::MAX] {
        let options = SamplerOptions { top_k, temperature: 3.0, ..neutral() };
        let expected = sampler(options.clone()).sample_from_all(&logits, |_| true);
        assert_eq!(sampler(options).sample(&logits), expected, "{top_k}");
    }
}

#[test]
fn a_short_list_does_where_the_chain_allows() {
    let logits = many_logits();
    let list = highest(&logits, 128);
    let chooses = |options: SamplerOptions, tokens: &[u32]| {
        let mut sampler = sampler(options);
        accept_all(&mut sampler, tokens);
        let offered = sampler.short_list();
        let chosen = sampler.sample_short(&list, 128, |id| id != list[0].0);
        assert!(offered.is_some() || chosen.is_none());
        chosen.is_some()
    };
    let with = |change: fn(&mut SamplerOptions)| {
        let mut options = neutral();
        change(&mut options);
        options
    };
    assert!(chooses(SamplerOptions::default(), &[]));
    assert!(chooses(SamplerOptions::greedy(), &[]));
    assert!(chooses(with(|o| o.top_k = 127), &[]));
    assert!(!chooses(with(|o| o.top_k = 128), &[]), "one of the list is forbidden");
    assert!(chooses(with(|o| o.min_p = 0.9), &[]));
    assert!(!chooses(with(|o| o.min_p = 1e-30), &[]), "the cut-off is below the list");
    assert!(!chooses(neutral(), &[]));
    assert!(!chooses(with(|o| o.top_p = 0.9), &[]));
    assert!(!chooses(with(|o| o.top_n_sigma = 1.0), &[]));

    let seen: Vec<u32> = list[..60].iter().map(|&(id, _)| id).collect();
    let penalised = SamplerOptions { repeat_penalty: 1.3, frequency_penalty: 0.1, ..SamplerOptions::default() };
    assert!(chooses(penalised.clone(), &seen));
    assert!(chooses(SamplerOptions { temperature: 0.0, ..penalised.clone() }, &seen));
    assert!(
        !chooses(SamplerOptions { top_k: 100, ..penalised.clone() }, &seen),
        "what rises into the 100 is not listed"
    );
    assert!(!chooses(SamplerOptions { repeat_penalty: 0.5, ..penalised }, &seen), "any token may rise");
    assert!(!chooses(SamplerOptions { logit_bias: vec![(1, 1.0)], ..SamplerOptions::default() }, &[]));
}

#[test]
fn where_no_token_is_allowed_all_count_as_lowest() {
    let mut sampler = sampler(SamplerOptions::default());
    assert_eq!(sampler.sample_allowed(&[0.0, 7.5, f32::NAN], |_| false), 0);
    assert_eq!(sampler.sample_allowed(&[0.0, 7.5, f32::NEG_INFINITY], |id| id == 2), 0);
}
