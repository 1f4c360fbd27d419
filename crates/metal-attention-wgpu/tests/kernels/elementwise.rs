//! `ffn_silu` and `residual_add` against their twins.

use crate::support::{nmse, poisoned, random, run, variants};
use metal_attention_wgpu::kernels::{ffn_silu, ffn_silu_twin, residual_add, residual_add_twin};

/// (elements of a row, rows)
const SHAPES: [(usize, usize); 10] =
    [(1, 1), (31, 2), (32, 3), (33, 7), (255, 8), (576, 33), (1536, 1), (1536, 512), (2048, 3), (49_152, 1)];

#[test]
fn ffn_silu_matches_its_twin() {
    for gpu in variants() {
        for (n_ff, n_tokens) in SHAPES {
            let gate_up: Vec<f32> = random(1, 2 * n_ff * n_tokens).iter().map(|v| 8.0 * v).collect();
            let gpu_gate_up = gpu.upload("gate_up", &gate_up).unwrap();
            let hidden = poisoned(gpu, n_ff * n_tokens);
            run(gpu, &[ffn_silu(gpu, n_ff, &gpu_gate_up, &hidden).unwrap()], n_tokens);
            let got: Vec<f32> = gpu.read(&hidden, n_ff * n_tokens).unwrap();
            // Errors: an exponential within a few units of the last place (Vulkan: 3 + 2 |v|, here at most 19) and three
            // roundings of 2^-24 each: at most (2e-6)^2.
            let error = nmse(&got, &ffn_silu_twin(&gate_up));
            assert!(error < 4e-12, "n_ff {n_ff}, {n_tokens} tokens: {error:e}");
        }
    }
}

#[test]
fn ffn_silu_approaches_zero_and_the_gate_for_large_gates() {
    for gpu in variants() {
        let gate_up = gpu.upload("gate_up", &[-1e4, 2.0, -200.0, -3.0, 0.0, 5.0, 200.0, -3.0, 1e4, 2.0f32]).unwrap();
        let hidden = poisoned(gpu, 5);
        run(gpu, &[ffn_silu(gpu, 5, &gate_up, &hidden).unwrap()], 1);
        let got = gpu.read::<f32>(&hidden, 5).unwrap();
        assert!(got[..3].iter().all(|v| v.abs() < 1e-30), "{got:?}");
        assert_eq!(got[3..], [-600.0, 20_000.0]);
    }
}

#[test]
fn residual_add_matches_its_twin() {
    for gpu in variants() {
        for (n, n_tokens) in SHAPES {
            let (x, y) = (random(1, n * n_tokens), random(2, n * n_tokens));
            let (gx, gy) = (gpu.upload("x", &x).unwrap(), gpu.upload("y", &y).unwrap());
            run(gpu, &[residual_add(gpu, n, &gx, &gy).unwrap()], n_tokens);
            // Each element is one correctly rounded sum.
            assert_eq!(gpu.read::<f32>(&gx, x.len()).unwrap(), residual_add_twin(&x, &y), "n {n}, {n_tokens} tokens");
        }
    }
}
