//! Tests of the elementwise kernels of RWKV, and of the outputs of heads.

use metal_attention_model::NormKind;

use crate::kernels::recurrent::head_output::{Bonus, Gate, HeadNorm, HeadOutput};
use crate::kernels::recurrent::time_mix::{
    ApplyNonlinearity, LinearInputs, MixFirst, Nonlinearity, Rwkv6Decay, Rwkv7Inputs, TokenLerp,
};
use crate::simd::Isa;
use crate::test_support::TestRandom;

const LENGTHS: [usize; 7] = [1, 5, 16, 24, 64, 100, 257];

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Checks `found` against the function `of` of the elements of `rows`, in float64: by the squared error, relative to the
/// squares of the right results plus one.
fn check<const N: usize>(what: &str, found: &[f32], rows: [&[f32]; N], of: impl Fn([f64; N]) -> f64) {
    let want: Vec<f64> = (0..found.len()).map(|i| of(rows.map(|row| f64::from(row[i])))).collect();
    let error: f64 = found.iter().zip(&want).map(|(&found, want)| (f64::from(found) - want).powi(2)).sum();
    let squares: f64 = want.iter().map(|want| want * want + 1.0).sum();
    assert!(error < 1e-12 * squares, "{what}, {} elements: {error:e} of {squares:e}", found.len());
}

/// Calls `test` with every instruction set and length.
fn for_all(mut test: impl FnMut(Isa, usize, &mut TestRandom)) {
    for isa in Isa::available() {
        let mut random = TestRandom(7);
        for n in LENGTHS {
            test(isa, n, &mut random);
        }
    }
}

#[test]
fn shifts_lie_between_two_tokens() {
    for_all(|isa, n, random| {
        let [x, previous, lerp, more] = [3.0, 3.0, 1.0, 1.0].map(|limit| random.floats(n, limit));
        let mut out = vec![f32::NAN; n];
        isa.run(TokenLerp { x: &x, previous: &previous, lerp: &lerp, more: None, out: &mut out });
        check("shift", &out, [&x, &previous, &lerp], |[x, previous, lerp]| x + (previous - x) * lerp);
        isa.run(TokenLerp { x: &x, previous: &previous, lerp: &lerp, more: Some(&more), out: &mut out });
        let rows = [&x[..], &previous, &lerp, &more];
        check("shift", &out, rows, |[x, previous, lerp, more]| x + (previous - x) * (lerp + more));
    });
}

#[test]
fn functions_of_each_number() {
    for_all(|isa, n, random| {
        let (x, bias) = (random.floats(n, 8.0), random.floats(n, 2.0));
        for (nonlinearity, of) in [(Nonlinearity::Tanh, f64::tanh as fn(f64) -> f64), (Nonlinearity::Sigmoid, sigmoid)]
        {
            let mut found = x.clone();
            isa.run(ApplyNonlinearity { x: &mut found, nonlinearity });
            check("nonlinearity", &found, [&x], |[x]| of(x));
        }
        let mut decay = x.clone();
        isa.run(Rwkv6Decay { decay: &mut decay, bias: &bias });
        check("decay", &decay, [&x, &bias], |[x, bias]| (-(x + bias).exp()).exp());
        let (mut v, first, mix) = (random.floats(n, 3.0), random.floats(n, 3.0), random.floats(n, 3.0));
        let before = v.clone();
        isa.run(MixFirst { v: &mut v, first: &first, mix: &mix, bias: &bias });
        let rows = [&before[..], &first, &mix, &bias];
        check("first values", &v, rows, |[v, first, mix, bias]| v + (first - v) * sigmoid(mix + bias));
        let (mut r, mut k) = (x.clone(), vec![f32::NAN; n]);
        isa.run(LinearInputs { r: &mut r, scale: 0.25, key: &before, decay: &decay, k: &mut k });
        check("receptance", &r, [&x], |[r]| r / 4.0);
        check("keys", &k, [&before, &decay], |[k, decay]| k * (1.0 - decay));
    });
}

#[test]
fn inputs_of_rwkv7() {
    for_all(|isa, n, random| {
        let [w, w0, a, a0, k, removed, kept] = [3.0, 3.0, 3.0, 3.0, 2.0, 1.0, 1.0].map(|limit| random.floats(n, limit));
        for silent in [false, true] {
            // A key of zeros has no direction.
            let k = if silent { vec![0.0; n] } else { k.clone() };
            let [mut decay, mut rate, mut key, mut kappa] = [w.clone(), a.clone(), k.clone(), vec![f32::NAN; n]];
            isa.run(Rwkv7Inputs {
                decay: &mut decay,
                decay_bias: &w0,
                rate: &mut rate,
                rate_bias: &a0,
                k: &mut key,
                removed: &removed,
                kept: &kept,
                kappa: &mut kappa,
            });
            check("decay", &decay, [&w, &w0], |[w, w0]| (-(-0.5f64).exp() * sigmoid(w + w0)).exp());
            let rows = [&k[..], &a, &a0, &kept];
            check("keys", &key, rows, |[k, a, a0, kept]| k * (1.0 + (sigmoid(a + a0) - 1.0) * kept));
            let squares = k.iter().zip(&removed).map(|(k, removed)| (f64::from(*k) * f64::from(*removed)).powi(2));
            let length = squares.sum::<f64>().sqrt().max(1e-12);
            check("kappa", &kappa, [&k, &removed], |[k, removed]| -k * removed / length);
            let rows = [&k[..], &removed, &a, &a0];
            check("rate", &rate, rows, |[k, removed, a, a0]| k * removed / length * sigmoid(a + a0));
        }
    });
}

#[test]
fn outputs_of_heads() {
    for_all(|isa, n, random| {
        let [y, weight, bias, r, k, u, v, g] = [3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 4.0].map(|x| random.floats(n, x));
        let all = y.iter().map(|&y| f64::from(y));
        let mean = all.clone().sum::<f64>() / n as f64;
        let square = all.map(|y| (y - mean).powi(2)).sum::<f64>() / n as f64;
        let own: f64 = (0..n).map(|i| f64::from(r[i]) * f64::from(k[i]) * f64::from(u[i])).sum();
        let norm = || HeadNorm { kind: NormKind::Layer, weight: &weight, bias: Some(&bias), eps: 1e-3 };
        let bonus = || Bonus { r: &r, k: &k, factor: &u, v: &v };
        let rows = [&y[..], &weight, &bias, &v, &g];
        let of_norm =
            |y: f64, weight: f64, bias: f64| (y - mean) / (square + f64::from(1e-3f32)).sqrt() * weight + bias;

        let mut out = y.clone();
        isa.run(HeadOutput {
            out: &mut out,
            norm: Some(norm()),
            bonus: Some(bonus()),
            gate: Some((Gate::Identity, &g)),
        });
        check("all", &out, rows, |[y, weight, bias, v, g]| (of_norm(y, weight, bias) + own * v) * g);
        let mut out = y.clone();
        isa.run(HeadOutput { out: &mut out, norm: Some(norm()), bonus: None, gate: Some((Gate::Silu, &g)) });
        check("norm", &out, rows, |[y, weight, bias, _, g]| of_norm(y, weight, bias) * g * sigmoid(g));
        let mut out = y.clone();
        isa.run(HeadOutput { out: &mut out, norm: None, bonus: None, gate: Some((Gate::Sigmoid, &g)) });
        check("gate", &out, rows, |[y, .., g]| y * sigmoid(g));
        let mut out = y.clone();
        isa.run(HeadOutput { out: &mut out, norm: None, bonus: Some(bonus()), gate: None });
        check("bonus", &out, rows, |[y, _, _, v, _]| y + own * v);
    });
}
