//! The time of a choice in a large vocabulary.

use std::time::Instant;

use super::*;

/// Logits like a model's: most of them low, a few high.
fn model_like(n_vocab: u32) -> Vec<f32> {
    (0..n_vocab)
        .map(|i| {
            let hash = i.wrapping_mul(2_654_435_761) ^ (i << 7);
            let uniform = (f64::from(hash) + 1.0) / 4_294_967_297.0;
            (-2.0 * uniform.ln()).sqrt() as f32 * 3.0 - 6.0
        })
        .collect()
}

#[test]
#[ignore = "measures time: cargo test --release -p metal-attention sampling::tests::speed -- --ignored --nocapture"]
fn a_step_is_cheap() {
    let logits = model_like(150_000);
    let tokens: Vec<u32> = (0..64).map(|i| i * 2000).collect();
    let default = SamplerOptions { seed: Some(1), ..SamplerOptions::default() };
    let cases = [
        ("default", 0.5, default.clone()),
        ("default, penalties", 0.5, SamplerOptions { repeat_penalty: 1.1, ..default.clone() }),
        ("min-p alone", 2.0, SamplerOptions { top_k: 0, top_p: 1.0, ..default.clone() }),
        ("top-p alone", 5.0, SamplerOptions { top_k: 0, min_p: 0.0, ..default.clone() }),
        ("temperature alone", 5.0, SamplerOptions { top_k: 0, min_p: 0.0, top_p: 1.0, ..default.clone() }),
        ("typical-p alone", 50.0, SamplerOptions { typical_p: 0.9, top_k: 0, ..default }),
        ("greedy", 0.5, SamplerOptions::greedy()),
    ];
    for (name, limit_ms, options) in cases {
        let mut sampler = sampler(options);
        accept_all(&mut sampler, &tokens);
        sampler.sample(&logits);
        let mut times: Vec<f64> = (0..51)
            .map(|_| {
                let start = Instant::now();
                let id = sampler.sample(&logits);
                sampler.accept(id);
                start.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!("{name}: median {:.3} ms, least {:.3} ms", times[25], times[0]);
        assert!(times[25] < limit_ms, "{name}: {:.3} ms", times[25]);
    }
}
