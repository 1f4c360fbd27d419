//! Tests of the random numbers: frequencies, seeds, and their stability.

use super::*;

/// Draws `n` times and compares each token's frequency with its probability.
/// For a token of probability p the count's standard deviation is
/// sqrt(n p (1 - p)); five of them are exceeded once in 1.7 million times.
fn frequencies_match(options: SamplerOptions, logits: &[f32]) {
    let n = 20_000;
    let mut sampler = sampler(options);
    let expected = distribution(&mut sampler, logits);
    sampler.reset();
    let mut counts = vec![0_u32; logits.len()];
    for _ in 0..n {
        counts[sampler.sample(logits) as usize] += 1;
    }
    let n = f64::from(n);
    let mut possible = vec![false; logits.len()];
    for &(id, p) in &expected {
        possible[id as usize] = true;
        let count = f64::from(counts[id as usize]);
        let bound = 5.0 * (n * p * (1.0 - p)).sqrt() + 1.0;
        assert!((count - n * p).abs() <= bound, "token {id} of probability {p} was drawn {count} times of {n}");
    }
    for (id, &count) in counts.iter().enumerate() {
        assert!(possible[id] || count == 0, "token {id} was excluded, but drawn {count} times");
    }
}

#[test]
fn frequencies_match_the_softmax() {
    let logits: Vec<f32> = (0..30_u8).map(|i| f32::from(i % 7) * 0.7 - f32::from(i) * 0.1).collect();
    for seed in 0..4 {
        frequencies_match(SamplerOptions { seed: Some(seed), ..neutral() }, &logits);
    }
}

#[test]
fn frequencies_match_after_the_default_chain_and_others() {
    let logits: Vec<f32> = (0..200_u8).map(|i| (f32::from(i) * 1.7).sin() * 4.0).collect();
    let default = SamplerOptions { seed: Some(5), ..SamplerOptions::default() };
    frequencies_match(default.clone(), &logits);
    frequencies_match(SamplerOptions { temperature: 1.7, top_k: 0, top_p: 0.8, ..default.clone() }, &logits);
    frequencies_match(SamplerOptions { typical_p: 0.5, ..default }, &logits);
}

#[test]
fn xtc_applies_as_often_as_its_probability_says() {
    // Equal tops: where XTC applies, only the last of them is left.
    let options = SamplerOptions { xtc_probability: 0.3, xtc_threshold: 0.1, ..neutral() };
    let mut sampler = sampler(options);
    let n = 10_000;
    let applied = (0..n).filter(|_| distribution(&mut sampler, &[1.0; 4]).len() == 1).count() as f64;
    let bound = 5.0 * (f64::from(n) * 0.3 * 0.7).sqrt();
    assert!((applied - f64::from(n) * 0.3).abs() < bound, "applied {applied} times of {n}");
}

#[test]
fn the_same_seed_gives_the_same_tokens() {
    let logits: Vec<f32> = (0..100_u8).map(|i| (f32::from(i) * 0.37).cos()).collect();
    let draw = |sampler: &mut Sampler| (0..50).map(|_| sampler.sample(&logits)).collect::<Vec<_>>();
    let mut first = sampler(SamplerOptions { seed: Some(42), ..neutral() });
    let tokens = draw(&mut first);
    assert_eq!(draw(&mut sampler(SamplerOptions { seed: Some(42), ..neutral() })), tokens);
    assert_ne!(draw(&mut sampler(SamplerOptions { seed: Some(43), ..neutral() })), tokens);
    assert_ne!(draw(&mut first), tokens, "the random numbers go on");
    first.reset();
    assert_eq!(draw(&mut first), tokens, "a reset starts them again");
}

#[test]
fn the_random_numbers_are_those_of_chacha8() {
    // floor(1000 * u) of the first numbers, from an independent implementation
    // of ChaCha8 (key: the seed in little-endian order, then zeros; nonce 0).
    let mut sampler = sampler(SamplerOptions { seed: Some(42), ..neutral() });
    let drawn: Vec<u32> = (0..8).map(|_| sampler.sample(&[0.0; 1000])).collect();
    assert_eq!(drawn, [348, 285, 493, 367, 825, 67, 489, 266]);
}

#[test]
fn a_missing_seed_is_drawn_and_reported() {
    let without = || sampler(SamplerOptions { seed: None, ..neutral() });
    let mut first = without();
    assert_ne!(first.seed(), without().seed());
    let mut again = sampler(SamplerOptions { seed: Some(first.seed()), ..neutral() });
    let logits: Vec<f32> = vec![0.0; 1000];
    for _ in 0..20 {
        assert_eq!(first.sample(&logits), again.sample(&logits));
    }
}

#[test]
fn a_step_depends_on_nothing_but_its_logits() {
    // The reused buffer keeps nothing of an earlier, larger choice.
    let mut used = sampler(SamplerOptions { seed: Some(3), ..SamplerOptions::default() });
    used.sample(&[0.5; 2000]);
    used.reset();
    let mut fresh = sampler(SamplerOptions { seed: Some(3), ..SamplerOptions::default() });
    let logits: Vec<f32> = (0..300_u16).map(|i| (f32::from(i) * 0.9).sin()).collect();
    for _ in 0..100 {
        assert_eq!(used.sample(&logits), fresh.sample(&logits));
    }
}

#[test]
fn a_sequence_is_continued_by_another_sampler() {
    let options = SamplerOptions {
        seed: Some(11),
        temperature: 1.3,
        xtc_probability: 0.5,
        xtc_threshold: 0.05,
        presence_penalty: 0.4,
        dry_multiplier: 0.8,
        ..SamplerOptions::default()
    };
    let logits =
        |position: usize| -> Vec<f32> { (0..60).map(|i| ((i * 7 + position) as f32 * 0.9).sin() * 2.0).collect() };
    let prompt = [3, 1, 4, 1, 5];
    let mut first = sampler(options.clone());
    for id in prompt {
        first.accept(id);
    }
    let mut tokens = prompt.to_vec();
    for position in prompt.len()..40 {
        let id = first.sample(&logits(position));
        first.accept(id);
        tokens.push(id);
    }
    for cut in prompt.len()..tokens.len() {
        let mut other = sampler(options.clone());
        for &id in &tokens[..cut] {
            other.accept(id);
        }
        for position in cut..tokens.len() {
            let id = other.sample(&logits(position));
            other.accept(id);
            assert_eq!(id, tokens[position], "at {position}, from {cut} on");
        }
    }
}
