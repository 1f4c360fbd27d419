//! Tests of norms, activations and RoPE.

use metal_attention_model::{Activation, GateActivation, RopeLayout};

use crate::kernels::elementwise::{Activate, ApplyGate, LayerNorm, RmsNorm, rope_apply};
use crate::simd::Isa;
use crate::test_support::TestRandom;

const LENGTHS: [usize; 8] = [1, 8, 15, 16, 17, 64, 172, 576];

#[test]
fn rms_norm() {
    let mut random = TestRandom(1);
    for isa in Isa::available() {
        for n in LENGTHS {
            for limit in [1e-3, 1.0, 300.0] {
                let (x, weight) = (random.floats(n, limit), random.floats(n, 2.0));
                let eps = 1e-5;
                let mut out = vec![f32::NAN; n];
                isa.run(RmsNorm { x: &x, weight: &weight, eps, out: &mut out });
                let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n as f64;
                for i in 0..n {
                    let want = f64::from(x[i]) / (mean + f64::from(eps)).sqrt() * f64::from(weight[i]);
                    let error = (f64::from(out[i]) - want).abs();
                    assert!(error <= 1e-6 * want.abs(), "{isa:?} {n} [{i}]: {} {want}", out[i]);
                }
            }
        }
    }
}

#[test]
fn a_norm_of_zeros_is_zero() {
    for isa in Isa::available() {
        let mut out = vec![f32::NAN; 40];
        isa.run(RmsNorm { x: &[0.0; 40], weight: &[2.0; 40], eps: 1e-6, out: &mut out });
        assert_eq!(out, [0.0; 40], "{isa:?}");
    }
}

#[test]
fn layer_norm() {
    let mut random = TestRandom(5);
    for isa in Isa::available() {
        for n in LENGTHS.into_iter().filter(|&n| n > 1) {
            for (limit, offset) in [(1e-3, 0.0), (1.0, 3.0), (300.0, -100.0)] {
                let mut x = random.floats(n, limit);
                for x in &mut x {
                    *x += offset;
                }
                let (weight, bias) = (random.floats(n, 2.0), random.floats(n, 1.0));
                let eps = 1e-5;
                let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n as f64;
                let variance = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n as f64;
                for bias in [None, Some(bias.as_slice())] {
                    let mut out = vec![f32::NAN; n];
                    isa.run(LayerNorm { x: &x, weight: &weight, bias, eps, out: &mut out });
                    for i in 0..n {
                        let normed = (f64::from(x[i]) - mean) / (variance + f64::from(eps)).sqrt();
                        let want = normed * f64::from(weight[i]) + bias.map_or(0.0, |bias| f64::from(bias[i]));
                        let error = (f64::from(out[i]) - want).abs();
                        assert!(error <= 2e-6 * want.abs() + 2e-6, "{isa:?} {n} [{i}]: {} {want}", out[i]);
                    }
                }
            }
        }
    }
}

/// The activation of element `i` of a row, in float64.
fn activation(activation: Activation, row: &[f32], i: usize) -> f64 {
    let gelu = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh());
    let x = f64::from(row[i]);
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => gelu(x),
        Activation::ReluSquared => x.max(0.0).powi(2),
        Activation::ClampedSwiglu { limit } => {
            let x = x.min(f64::from(limit));
            x / (1.0 + (-1.702 * x).exp())
        }
        Activation::ClampedSilu { limit } => (x / (1.0 + (-x).exp())).min(f64::from(limit)),
        Activation::SparseGelu { n_std } => {
            let n = row.len() as f64;
            let mean = row.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
            let variance = row.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
            gelu((x - mean - f64::from(n_std) * variance.sqrt()).max(0.0))
        }
    }
}

#[test]
fn activations_with_and_without_a_gate() {
    let mut random = TestRandom(2);
    let all = [
        Activation::Silu,
        Activation::Gelu,
        Activation::ReluSquared,
        Activation::ClampedSwiglu { limit: 7.0 },
        Activation::ClampedSilu { limit: 5.0 },
        Activation::SparseGelu { n_std: 1.644_853_6 },
    ];
    for isa in Isa::available() {
        for (kind, n) in all.iter().flat_map(|&kind| LENGTHS.map(|n| (kind, n))) {
            for limit in [0.1, 8.0, 200.0] {
                let (before, up) = (random.floats(n, limit), random.floats(n, 12.0));
                for up in [None, Some(up.as_slice())] {
                    let mut gate = before.clone();
                    isa.run(Activate { activation: kind, gate: &mut gate, up });
                    for i in 0..n {
                        let times = match (kind, up) {
                            (_, None) => 1.0,
                            (Activation::ClampedSwiglu { limit }, Some(up)) => {
                                1.0 + f64::from(up[i].clamp(-limit, limit))
                            }
                            (Activation::ClampedSilu { limit }, Some(up)) => f64::from(up[i].clamp(-limit, limit)),
                            (_, Some(up)) => f64::from(up[i]),
                        };
                        let want = activation(kind, &before, i) * times;
                        let error = (f64::from(gate[i]) - want).abs();
                        // Sparse GELU subtracts the cutoff, so its error is relative to the row's largest elements.
                        let size = match kind {
                            Activation::SparseGelu { .. } => limit,
                            _ => before[i].abs(),
                        };
                        let limit = 2e-6 * want.abs() + 5e-7 * f64::from(size) * times.abs() + 1e-35;
                        assert!(error <= limit, "{isa:?} {kind:?} {n} [{i}] of {}: {} {want}", before[i], gate[i]);
                    }
                }
            }
        }
    }
}

#[test]
fn rope_rotates_each_pair_by_its_angle() {
    let mut random = TestRandom(3);
    for layout in [RopeLayout::Interleaved, RopeLayout::Halves] {
        for (head_dim, n_rot) in [(8, 8), (20, 20), (64, 64), (64, 32), (80, 20), (16, 2)] {
            let before = random.floats(head_dim, 2.0);
            let angles: Vec<f64> = random.floats(n_rot / 2, 3.0).into_iter().map(f64::from).collect();
            let cos: Vec<f32> = angles.iter().map(|a| a.cos() as f32).collect();
            let sin: Vec<f32> = angles.iter().map(|a| a.sin() as f32).collect();
            let mut head = before.clone();
            rope_apply(layout, &mut head, &cos, &sin);
            let mut want: Vec<f64> = before.iter().map(|&v| v.into()).collect();
            for (i, angle) in angles.iter().enumerate() {
                let (a, b) = match layout {
                    RopeLayout::Interleaved => (2 * i, 2 * i + 1),
                    RopeLayout::Halves => (i, i + n_rot / 2),
                };
                let (x, y) = (f64::from(before[a]), f64::from(before[b]));
                want[a] = x * angle.cos() - y * angle.sin();
                want[b] = x * angle.sin() + y * angle.cos();
            }
            for i in 0..head_dim {
                assert!((f64::from(head[i]) - want[i]).abs() <= 1e-6, "{layout:?} {head_dim} {n_rot} [{i}]");
            }
            assert_eq!(head[n_rot..], before[n_rot..], "{layout:?}: elements after the rotated ones");
        }
    }
}

#[test]
fn gates_of_elements_and_of_heads() {
    let mut random = TestRandom(9);
    for (isa, n) in Isa::available().into_iter().flat_map(|isa| LENGTHS.map(|n| (isa, n))) {
        for (activation, per_gate) in [GateActivation::Sigmoid, GateActivation::Softplus]
            .into_iter()
            .flat_map(|a| [1, 2, 7, 16, 80].map(|n| (a, n)))
        {
            let (x, gate) = (random.floats(n * per_gate, 3.0), random.floats(n, 20.0));
            let mut found = x.clone();
            isa.run(ApplyGate { x: &mut found, gate: &gate, activation });
            for i in 0..n * per_gate {
                let g = f64::from(gate[i / per_gate]);
                let factor = match activation {
                    GateActivation::Sigmoid => 1.0 / (1.0 + (-g).exp()),
                    GateActivation::Softplus => g.exp().ln_1p(),
                };
                let want = f64::from(x[i]) * factor;
                let error = (f64::from(found[i]) - want).abs();
                assert!(
                    error <= 1e-6 * want.abs(),
                    "{isa:?} {activation:?} {n} x {per_gate} [{i}]: {} {want}",
                    found[i]
                );
            }
        }
    }
}
