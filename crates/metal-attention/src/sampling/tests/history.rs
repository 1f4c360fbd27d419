//! Tests of the samplers with a history: penalties and DRY.

use super::*;
use crate::sampling::DRY_SEQUENCE_BREAKERS;

/// The logits after the chain, by id; temperature 1 leaves them as they are.
fn adjusted(sampler: &mut Sampler, logits: &[f32]) -> Vec<f32> {
    let mut items = sampler.narrow(logits, |_| true).as_slice().to_vec();
    items.sort_by_key(|c| c.id);
    items.iter().map(|c| c.logit).collect()
}

fn after(options: SamplerOptions, tokens: &[u32]) -> Sampler {
    let mut sampler = sampler(options);
    accept_all(&mut sampler, tokens);
    sampler
}

#[test]
fn penalties_by_hand() {
    let options = SamplerOptions { repeat_penalty: 2.0, frequency_penalty: 0.5, presence_penalty: 0.25, ..neutral() };
    let mut sampler = after(options, &[1, 2, 1, 9]);
    // Token 1, seen twice: 4 / 2 - 2 * 0.5 - 0.25; token 2, once: -3 * 2 - 0.5 - 0.25.
    assert_eq!(adjusted(&mut sampler, &[1.0, 4.0, -3.0, 2.0]), [1.0, 0.75, -6.75, 2.0]);
    sampler.reset();
    assert_eq!(adjusted(&mut sampler, &[1.0, 4.0, -3.0, 2.0]), [1.0, 4.0, -3.0, 2.0]);
}

#[test]
fn penalties_forget_what_left_the_window() {
    let options = SamplerOptions { frequency_penalty: 1.0, penalty_last_n: 3, ..neutral() };
    let mut sampler = after(options, &[0, 1, 1, 2, 1]);
    assert_eq!(adjusted(&mut sampler, &[0.0; 4]), [0.0, -2.0, -1.0, 0.0]);
    let unlimited = SamplerOptions { frequency_penalty: 1.0, penalty_last_n: usize::MAX, ..neutral() };
    assert_eq!(adjusted(&mut after(unlimited, &[0, 1, 1, 2, 1]), &[0.0; 4]), [-1.0, -3.0, -1.0, 0.0]);
}

#[test]
fn penalties_change_the_greedy_choice() {
    let options = SamplerOptions { repeat_penalty: 1.5, ..SamplerOptions::greedy() };
    let mut sampler = after(options, &[]);
    assert!(!sampler.is_greedy());
    assert_eq!(sampler.sample(&[1.0, 1.2, 0.9]), 1);
    sampler.accept(1);
    assert_eq!(sampler.sample(&[1.0, 1.2, 0.9]), 0);
}

#[test]
fn penalties_apply_wherever_they_stand() {
    // After top-k the candidates are in another order.
    let order = crate::sampling::SamplerKind::parse_order("top_k;penalties").expect("known names");
    let options = SamplerOptions { top_k: 3, presence_penalty: 1.0, order, ..neutral() };
    let mut sampler = after(options, &[3, 0]);
    assert_eq!(adjusted(&mut sampler, &[1.0, 2.0, 3.0, 4.0]), [2.0, 3.0, 3.0]);
}

proptest! {
    #[test]
    fn penalties_equal_a_count_of_the_window(
        tokens in prop::collection::vec(0_u32..6, 0..40), last_n in 1_usize..20,
    ) {
        let options = SamplerOptions { frequency_penalty: 1.0, penalty_last_n: last_n, ..neutral() };
        let window = &tokens[tokens.len().saturating_sub(last_n)..];
        let expected: Vec<f32> = (0..6).map(|id| -(window.iter().filter(|&&t| t == id).count() as f32)).collect();
        prop_assert_eq!(adjusted(&mut after(options, &tokens), &[0.0; 6]), expected);
    }

    #[test]
    fn dry_equals_its_definition(
        tokens in prop::collection::vec(0_u32..4, 0..40), last_n in 1_usize..50, allowed in 0_usize..4,
        breaker in 0_u32..8,
    ) {
        let options = SamplerOptions {
            dry_multiplier: 0.5, dry_base: 2.0, dry_allowed_length: allowed, dry_penalty_last_n: last_n,
            dry_sequence_breakers: vec!["x".into()], ..neutral()
        };
        let vocabulary: Vec<&[u8]> = (0..8).map(|id| if id == breaker { &b"x"[..] } else { b"y" }).collect();
        let mut sampler = sampler(options).with_vocabulary(vocabulary.into_iter());
        accept_all(&mut sampler, &tokens);

        let window = &tokens[tokens.len().saturating_sub(last_n)..];
        let since_breaker = window.iter().rev().take_while(|&&id| id != breaker).count();
        let mut expected = [0.0_f32; 4];
        for next in 1..window.len() {
            // Length of the sequence's end that also precedes this position.
            let before = window[..next].iter().rev();
            let length = before.zip(window.iter().rev()).take_while(|(a, b)| a == b).count().min(since_breaker);
            if length >= allowed && window[next] != breaker && since_breaker >= allowed {
                let penalty = 0.5 * 2.0_f32.powi((length - allowed) as i32);
                let logit = &mut expected[window[next] as usize];
                *logit = logit.min(-penalty);
            }
        }
        prop_assert_eq!(adjusted(&mut sampler, &[0.0; 4]), expected);
    }
}

#[test]
fn dry_by_hand() {
    let options = SamplerOptions { dry_multiplier: 0.8, ..neutral() };
    // 0 1 2 3 | 0 1 2: token 3 would continue a repetition of length 3 and costs
    // 0.8 * 1.75^(3 - 2).
    let mut sampler = after(options.clone(), &[0, 1, 2, 3, 0, 1, 2]);
    assert_eq!(adjusted(&mut sampler, &[0.0; 4]), [0.0, 0.0, 0.0, -0.8 * 1.75]);
    sampler.reset();
    assert_eq!(adjusted(&mut sampler, &[0.0; 4]), [0.0; 4]);
    // A repetition of 1 is allowed.
    assert_eq!(adjusted(&mut after(options, &[2, 3, 2]), &[0.0; 4]), [0.0; 4]);
}

#[test]
fn dry_of_a_long_repetition_stays_finite() {
    let options = SamplerOptions { dry_multiplier: 5.0, dry_penalty_last_n: usize::MAX, ..neutral() };
    let mut sampler = after(options, &[0; 1000]);
    assert_eq!(adjusted(&mut sampler, &[0.0, 0.0]), [f32::MIN, 0.0]);
}

#[test]
fn dry_breakers_are_the_tokens_that_contain_one() {
    let vocabulary: [&[u8]; 5] = [b"a", b"b", b"said:\"", b"\n", b""];
    let options = SamplerOptions { dry_multiplier: 1.0, ..neutral() };
    let tokens = [0, 1, 0, 2, 0, 1, 0];
    let with = |breakers: &[&str]| {
        let dry_sequence_breakers = breakers.iter().map(|&breaker| breaker.to_owned()).collect();
        let options = SamplerOptions { dry_sequence_breakers, ..options.clone() };
        let mut sampler = sampler(options).with_vocabulary(vocabulary.into_iter());
        accept_all(&mut sampler, &tokens);
        adjusted(&mut sampler, &[0.0; 5])
    };
    // Without breakers token 2 continues "a b a", a repetition of 3.
    assert_eq!(with(&[]), [0.0, 0.0, -1.75, 0.0, 0.0]);
    assert_eq!(with(&DRY_SEQUENCE_BREAKERS), [0.0; 5]);
    assert_eq!(with(&["", "absent"]), [0.0, 0.0, -1.75, 0.0, 0.0]);
}
