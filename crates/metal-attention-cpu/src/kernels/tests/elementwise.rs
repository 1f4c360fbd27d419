use metal_attention_model::RopeLayout;

use crate::kernels::elementwise::{FfnSilu, RmsNorm, rope_apply};
use crate::simd::Isa;
use crate::test_support::Random;

const LENGTHS: [usize; 8] = [1, 8, 15, 16, 17, 64, 172, 576];

#[test]
fn rms_norm() {
    let mut random = Random(1);
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
fn gated_silu() {
    let mut random = Random(2);
    for isa in Isa::available() {
        for n in LENGTHS {
            for limit in [0.1, 8.0, 200.0] {
                let (before, up) = (random.floats(n, limit), random.floats(n, 3.0));
                let mut gate = before.clone();
                isa.run(FfnSilu { gate: &mut gate, up: &up });
                for i in 0..n {
                    let (g, u) = (f64::from(before[i]), f64::from(up[i]));
                    let want = g / (1.0 + (-g).exp()) * u;
                    let error = (f64::from(gate[i]) - want).abs();
                    assert!(error <= 1e-6 * want.abs() + 1e-35, "{isa:?} {n} [{i}] silu({g}) {u}: {} {want}", gate[i]);
                }
            }
        }
    }
}

#[test]
fn rope_turns_each_pair_by_its_angle() {
    let mut random = Random(3);
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
            assert_eq!(head[n_rot..], before[n_rot..], "{layout:?}: what lies behind the rotated part");
        }
    }
}
