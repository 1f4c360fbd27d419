//! Tests of each sampler: which candidates it keeps, and how temperature changes the probabilities.

use super::*;
use crate::sampling::SamplerKind;

/// Tolerance for the difference between single and double precision.
const EPS: f64 = 1e-5;

proptest! {
    #[test]
    fn without_samplers_the_distribution_is_the_softmax(logits in logits()) {
        let expected = softmax(&logits);
        let got = distribution(&mut sampler(neutral()), &logits);
        prop_assert_eq!(got.len(), logits.len());
        for (id, p) in got {
            prop_assert!((p - expected[id as usize]).abs() < EPS);
        }
    }

    #[test]
    fn probabilities_sum_to_one_whatever_the_options(
        logits in logits(), temperature in 0.05_f32..4.0, range in 0.0_f32..2.0, top_k in 0_usize..100,
        top_p in 0.0_f32..=1.0, min_p in 0.0_f32..=1.0, typical_p in 0.0_f32..=1.0, top_n_sigma in -1.0_f32..4.0,
        order in Just(SamplerKind::ALL.to_vec()).prop_shuffle(), xtc in any::<bool>(),
    ) {
        let options = SamplerOptions {
            temperature, dynatemp_range: range, top_k, top_p, min_p, typical_p, top_n_sigma, order,
            xtc_probability: f32::from(u8::from(xtc)), ..neutral()
        };
        let got = distribution(&mut sampler(options), &logits);
        prop_assert!(!got.is_empty());
        prop_assert!((got.iter().map(|(_, p)| p).sum::<f64>() - 1.0).abs() < 1e-9);
        prop_assert!(got.iter().all(|&(_, p)| (0.0..=1.0).contains(&p)));
    }

    #[test]
    fn top_k_keeps_exactly_the_k_highest(logits in logits(), top_k in 1_usize..1000) {
        let mut expected = ranked(&logits);
        expected.truncate(top_k);
        expected.sort_unstable();
        prop_assert_eq!(kept(SamplerOptions { top_k, ..neutral() }, &logits), expected);
    }

    #[test]
    fn top_p_keeps_the_smallest_prefix_with_the_mass(logits in logits(), top_p in 0.0_f32..1.0) {
        let (p, ranked) = (softmax(&logits), ranked(&logits));
        let got = distribution(&mut sampler(SamplerOptions { top_p, ..neutral() }), &logits);
        let ids: Vec<usize> = got.iter().map(|&(id, _)| id as usize).collect();
        prop_assert_eq!(&ids[..], &ranked[..ids.len()]);
        let mass: f64 = ids.iter().map(|&id| p[id]).sum();
        prop_assert!(mass >= f64::from(top_p) - EPS);
        prop_assert!(ids.len() == 1 || mass - p[ids[ids.len() - 1]] < f64::from(top_p) + EPS);
    }

    #[test]
    fn min_p_keeps_what_reaches_the_threshold(logits in logits(), min_p in 0.001_f32..=1.0) {
        let p = softmax(&logits);
        let threshold = f64::from(min_p) * p.iter().copied().fold(0.0, f64::max);
        let ids = kept(SamplerOptions { min_p, ..neutral() }, &logits);
        for (id, &p) in p.iter().enumerate() {
            // Relative: a single-precision logit is exact to about 1e-6.
            let ok = if ids.contains(&id) { p >= threshold * (1.0 - EPS) } else { p < threshold * (1.0 + EPS) };
            prop_assert!(ok, "token {} of probability {}, threshold {}", id, p, threshold);
        }
    }

    #[test]
    fn typical_p_keeps_the_smallest_set_nearest_to_the_entropy(logits in logits(), typical_p in 0.0_f32..1.0) {
        let p = softmax(&logits);
        let entropy: f64 = p.iter().map(|p| -p * p.ln()).sum();
        let distance: Vec<f64> = p.iter().map(|p| (-p.ln() - entropy).abs()).collect();
        let ids = kept(SamplerOptions { typical_p, ..neutral() }, &logits);
        let farthest_kept = ids.iter().copied().max_by(|&a, &b| distance[a].total_cmp(&distance[b])).unwrap();
        for id in 0..logits.len() {
            prop_assert!(ids.contains(&id) || distance[id] >= distance[farthest_kept] - EPS);
        }
        let mass: f64 = ids.iter().map(|&id| p[id]).sum();
        prop_assert!(mass >= f64::from(typical_p) - EPS);
        // Without its farthest token the set would fall short.
        let least = ids.iter().filter(|&&id| distance[id] > distance[farthest_kept] - EPS).map(|&id| p[id]);
        prop_assert!(ids.len() == 1 || mass - least.fold(0.0, f64::max) < f64::from(typical_p) + EPS);
    }

    #[test]
    fn top_n_sigma_keeps_what_is_near_the_highest(logits in logits(), top_n_sigma in 0.01_f32..4.0) {
        let n = logits.len() as f64;
        let mean = logits.iter().map(|&l| f64::from(l)).sum::<f64>() / n;
        let sigma = (logits.iter().map(|&l| (f64::from(l) - mean).powi(2)).sum::<f64>() / n).sqrt();
        let highest = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
        let lowest = highest - f64::from(top_n_sigma) * sigma;
        let ids = kept(SamplerOptions { top_n_sigma, ..neutral() }, &logits);
        for (id, &logit) in logits.iter().enumerate() {
            let logit = f64::from(logit);
            let ok = if ids.contains(&id) { logit >= lowest - EPS } else { logit <= lowest + EPS };
            prop_assert!(ok, "logit {}, lowest {}", logit, lowest);
        }
    }

    #[test]
    fn xtc_drops_the_top_but_its_least(logits in logits(), xtc_threshold in 0.01_f32..=0.5) {
        let p = softmax(&logits);
        let margin = p.iter().map(|p| (p - f64::from(xtc_threshold)).abs()).fold(1.0, f64::min);
        prop_assume!(margin > EPS);
        let top: Vec<usize> = ranked(&logits).into_iter().filter(|&id| p[id] >= f64::from(xtc_threshold)).collect();
        let dropped = &top[..top.len().saturating_sub(1)];
        let expected: Vec<usize> = (0..logits.len()).filter(|id| !dropped.contains(id)).collect();
        let options = SamplerOptions { xtc_probability: 1.0, xtc_threshold, ..neutral() };
        prop_assert_eq!(kept(options, &logits), expected);
    }

    #[test]
    fn temperature_divides_the_logits(logits in logits(), temperature in 0.1_f32..5.0) {
        let scaled: Vec<f32> = logits.iter().map(|l| l / temperature).collect();
        let expected = softmax(&scaled);
        for (id, p) in distribution(&mut sampler(SamplerOptions { temperature, ..neutral() }), &logits) {
            prop_assert!((p - expected[id as usize]).abs() < EPS);
        }
    }
}

#[test]
fn one_candidate_is_left_at_least() {
    let logits = [1.0, 3.0, 3.0, 2.0];
    assert_eq!(kept(SamplerOptions { top_p: 0.0, ..neutral() }, &logits), [1]);
    assert_eq!(kept(SamplerOptions { typical_p: 0.0, ..neutral() }, &logits).len(), 1);
    assert_eq!(kept(SamplerOptions { top_k: 1, ..neutral() }, &logits), [1]);
    // Equals of the highest stay.
    assert_eq!(kept(SamplerOptions { min_p: 1.0, ..neutral() }, &logits), [1, 2]);
    assert_eq!(kept(SamplerOptions { top_n_sigma: 1e-30, ..neutral() }, &logits), [1, 2]);
    assert_eq!(kept(SamplerOptions { top_n_sigma: 1.0, ..neutral() }, &[2.0; 3]), [0, 1, 2]);
}

#[test]
fn typical_p_may_drop_the_most_probable_token() {
    // Probabilities 0.45 and ten of 0.055: the entropy is 1.95 nats and the
    // surprises are 0.80 and 2.90, so the ten are nearer (0.95) than the one (1.16).
    let mut logits = vec![0.055_f32.ln(); 11];
    logits[0] = 0.45_f32.ln();
    let ids = kept(SamplerOptions { typical_p: 0.3, ..neutral() }, &logits);
    assert_eq!(ids, [1, 2, 3, 4, 5, 6]); // 5 * 0.055 < 0.3 <= 6 * 0.055
}

#[test]
fn dynamic_temperature_follows_the_entropy() {
    let options = SamplerOptions { temperature: 1.0, dynatemp_range: 0.5, ..neutral() };
    // 0.75 and 0.25: entropy 0.562335 nats of at most ln 2 = 0.693147, so the
    // flatness is 0.811278 and the temperature 0.5 + 0.811278 = 1.311278.
    let logits = [3.0_f32.ln(), 0.0];
    let got = distribution(&mut sampler(options.clone()), &logits);
    let odds = got[0].1 / got[1].1;
    assert!((odds.ln() - 3.0_f64.ln() / 1.311278).abs() < 1e-5, "odds {odds}");
    // The exponent bends the flatness: 0.811278^2 = 0.658172.
    let got = distribution(&mut sampler(SamplerOptions { dynatemp_exponent: 2.0, ..options }), &logits);
    let odds = got[0].1 / got[1].1;
    assert!((odds.ln() - 3.0_f64.ln() / 1.158172).abs() < 1e-5, "odds {odds}");
}

#[test]
fn dynamic_temperature_of_zero_keeps_the_highest() {
    let options = SamplerOptions { temperature: 0.5, dynatemp_range: 1.0, ..neutral() };
    // One token has all the mass, so the entropy and the temperature are 0.
    assert_eq!(kept(options, &[1000.0, 0.0, 0.0]), [0]);
}

#[test]
fn the_order_of_samplers_matters() {
    // Probabilities 0.4, 0.3, 0.2, 0.1.
    let logits: Vec<f32> = [0.4_f32, 0.3, 0.2, 0.1].iter().map(|p| p.ln()).collect();
    let with = |order: &str| SamplerOptions {
        temperature: 0.25,
        top_p: 0.7,
        order: SamplerKind::parse_order(order).expect("known names"),
        ..neutral()
    };
    assert_eq!(kept(with("top_p;temperature"), &logits), [0, 1]);
    // To the power 4: 256, 81, 16, 1 of 354; the first alone has 0.723.
    assert_eq!(kept(with("temperature;top_p"), &logits), [0]);
    assert_eq!(kept(with("temperature"), &logits), [0, 1, 2, 3]);
    assert_eq!(kept(with(""), &logits), [0, 1, 2, 3]);
}

#[test]
fn the_default_chain_by_hand() {
    // 50 tokens of weight 100, 99, ... : top-k keeps 40 (100 to 61, sum 3220),
    // top-p the shortest prefix with 0.95 * 3220 = 3059: 38 tokens (sum 3097).
    let logits: Vec<f32> = (0..50_u8).map(|i| f32::from(100 - i).ln()).collect();
    let options = SamplerOptions { seed: Some(1), ..SamplerOptions::default() };
    assert_eq!(kept(options, &logits), (0..38).collect::<Vec<_>>());
    // Min-p 0.05 of weights 100, 50, 5.1, 4.9: the last one goes.
    let logits = [100.0_f32, 50.0, 5.1, 4.9].map(f32::ln);
    let options = SamplerOptions { top_p: 1.0, seed: Some(1), ..SamplerOptions::default() };
    assert_eq!(kept(options, &logits), [0, 1, 2]);
}

#[test]
fn logit_bias_raises_and_forbids() {
    let logits = [1.0, 2.0, 3.0, 2.5];
    let with = |logit_bias: Vec<(u32, f32)>| SamplerOptions { logit_bias, ..neutral() };
    assert_eq!(kept(with(vec![(2, f32::NEG_INFINITY)]), &logits), [0, 1, 3]);
    // Biases of the same token add up; ids outside the vocabulary do nothing.
    let greedy = SamplerOptions { temperature: 0.0, ..with(vec![(0, 1.5), (0, 1.0), (9, 50.0)]) };
    assert_eq!(sampler(greedy).sample(&logits), 0);
    let forbidden = SamplerOptions { temperature: 0.0, ..with(vec![(2, f32::NEG_INFINITY)]) };
    assert_eq!(sampler(forbidden).sample(&logits), 3);
}
