//! Tests of the kernels that compute each channel by itself: convolution, selective scan, gates and norms.

use metal_attention_model::NormKind;

use super::{Padded, nmse, wide};
use crate::kernels::recurrent::StridedRowsMut;
use crate::kernels::recurrent::convolution::Convolution;
use crate::kernels::recurrent::gates::{Decays, L2Norm, Softplus};
use crate::kernels::recurrent::head_output::{Gate, HeadNorm, HeadOutput};
use crate::kernels::recurrent::mamba::Mamba;
use crate::shared::SharedMut;
use crate::simd::Isa;
use crate::test_support::TestRandom;

const CHANNELS: [usize; 5] = [1, 16, 40, 64, 150];

/// The numbers of tokens in consecutive calls.
const PIECES: [&[usize]; 5] = [&[1], &[2], &[64], &[1, 1, 1, 2, 5], &[30, 1, 33]];

#[test]
fn convolutions_in_pieces() {
    let mut random = TestRandom(1);
    for (channels, width, pieces) in
        CHANNELS.iter().flat_map(|&c| [1, 3, 4].map(|w| (c, w))).flat_map(|(c, w)| PIECES.map(|p| (c, w, p)))
    {
        let n = pieces.iter().sum();
        let x = Padded::new(n, channels, || random.float(3.0));
        let weights = Padded::new(width, channels, || random.float(1.0));
        let bias = random.floats(channels, 1.0);
        let before = random.floats((width - 1) * channels, 3.0);
        // The concatenation of state and inputs.
        let all: Vec<f32> = before.iter().copied().chain(x.all()).collect();
        for (silu, bias) in [(true, Some(bias.as_slice())), (false, None)] {
            let mut want = Vec::new();
            for (t, c) in (0..n).flat_map(|t| (0..channels).map(move |c| (t, c))) {
                let sum = (0..width).map(|j| f64::from(weights.row(j)[c]) * f64::from(all[(t + j) * channels + c]));
                let sum = sum.sum::<f64>() + bias.map_or(0.0, |bias| f64::from(bias[c]));
                want.push(if silu { sum / (1.0 + (-sum).exp()) } else { sum });
            }
            for isa in Isa::available() {
                let mut state = before.clone();
                let mut out = Padded::new(n, channels, || f32::NAN);
                let mut token = 0;
                for piece in pieces {
                    let tokens = token..token + piece;
                    isa.run(Convolution {
                        x: x.rows(tokens.clone()),
                        weights: weights.rows(0..width),
                        bias,
                        silu,
                        state: StridedRowsMut::new(&mut state, width - 1, channels, channels),
                        out: out.part_mut(tokens, 0..channels),
                    });
                    token += piece;
                }
                out.check_between();
                let error = nmse(wide(&out.all()), &want);
                assert!(error < 1e-12, "{isa:?} {channels} channels, {width} wide, {pieces:?}: {error:e}");
                assert_eq!(state, all[n * channels..], "{isa:?} {channels} channels, {width} wide, {pieces:?}");
            }
        }
    }
}

/// The reference is arXiv 2312.00752, equations 2 and 4, discretised as in its section 3.6.
#[test]
fn selective_scans() {
    let mut random = TestRandom(2);
    for (channels, d_state, n) in CHANNELS.iter().flat_map(|&c| [(c, 16, 1), (c, 16, 70), (c, 5, 9), (c, 33, 20)]) {
        // Steps and decays of all sizes: the decay factors lie between 0 and 1.
        for (limit, of_dt) in [(1.0, 0.1), (16.0, 2.0), (1e-4, 1e-4), (100.0, 10.0)] {
            let x = Padded::new(n, channels, || random.float(2.0));
            let dt = Padded::new(n, channels, || random.float(of_dt).abs());
            let (b, c) = (Padded::new(n, d_state, || random.float(1.0)), Padded::new(n, d_state, || random.float(1.0)));
            let a = Padded::new(d_state, channels, || -random.float(limit).abs());
            let d = random.floats(channels, 1.0);
            let before = random.floats(d_state * channels, 1.0);
            let mut state: Vec<f64> = wide(&before).collect();
            let mut want = Vec::new();
            for (t, ch) in (0..n).flat_map(|t| (0..channels).map(move |ch| (t, ch))) {
                let (x, dt) = (f64::from(x.row(t)[ch]), f64::from(dt.row(t)[ch]));
                let mut y = f64::from(d[ch]) * x;
                for s in 0..d_state {
                    let h = &mut state[s * channels + ch];
                    *h = (dt * f64::from(a.row(s)[ch])).exp() * *h + dt * f64::from(b.row(t)[s]) * x;
                    y += f64::from(c.row(t)[s]) * *h;
                }
                want.push(y);
            }
            for isa in Isa::available() {
                let mut values = before.iter();
                let mut after = Padded::new(d_state, channels, || *values.next().expect("one for each element"));
                let mut out = Padded::new(n, channels, || f32::NAN);
                for part in [0..channels / 3, channels / 3..channels] {
                    isa.run(Mamba {
                        x: x.part(0..n, part.clone()),
                        dt: dt.part(0..n, part.clone()),
                        b: b.rows(0..n),
                        c: c.rows(0..n),
                        a: a.part(0..d_state, part.clone()),
                        d: &d[part.clone()],
                        state: after.part_mut(0..d_state, part.clone()),
                        out: out.part_mut(0..n, part),
                    });
                }
                out.check_between();
                after.check_between();
                let errors = (nmse(wide(&out.all()), &want), nmse(wide(&after.all()), &state));
                assert!(errors.0 < 1e-11 && errors.1 < 1e-11, "{isa:?} [{d_state}, {channels}] {n}: {errors:?}");
            }
        }
    }
}

#[test]
fn selective_scans_of_long_sequences() {
    let (n, channels, d_state) = (8192, 24, 16);
    let mut random = TestRandom(3);
    for (limit, of_dt) in [(1.0, 0.1), (16.0, 1.0), (1e-4, 1e-3), (200.0, 10.0)] {
        let x = Padded::new(n, channels, || random.float(2.0));
        let dt = Padded::new(n, channels, || random.float(of_dt).abs());
        let (b, c) = (Padded::new(n, d_state, || random.float(1.0)), Padded::new(n, d_state, || random.float(1.0)));
        let a = Padded::new(d_state, channels, || -random.float(limit).abs());
        let mut state = vec![0.0; d_state * channels];
        let mut want = Vec::new();
        for (t, ch) in (0..n).flat_map(|t| (0..channels).map(move |ch| (t, ch))) {
            let (x, dt) = (f64::from(x.row(t)[ch]), f64::from(dt.row(t)[ch]));
            want.push(0.0);
            for s in 0..d_state {
                let h = &mut state[s * channels + ch];
                *h = (dt * f64::from(a.row(s)[ch])).exp() * *h + dt * f64::from(b.row(t)[s]) * x;
                *want.last_mut().expect("just pushed") += f64::from(c.row(t)[s]) * *h;
            }
        }
        let mut after = Padded::new(d_state, channels, || 0.0);
        let mut out = Padded::new(n, channels, || f32::NAN);
        Isa::best().run(Mamba {
            x: x.rows(0..n),
            dt: dt.rows(0..n),
            b: b.rows(0..n),
            c: c.rows(0..n),
            a: a.rows(0..d_state),
            d: &vec![0.0; channels],
            state: after.part_mut(0..d_state, 0..channels),
            out: out.part_mut(0..n, 0..channels),
        });
        let errors = (nmse(wide(&out.all()), &want), nmse(wide(&after.all()), &state));
        assert!(errors.0 < 1e-6 && errors.1 < 1e-6, "{limit} {of_dt}: {errors:?}");
    }
}

#[test]
fn softplus() {
    let mut random = TestRandom(4);
    for (isa, n) in Isa::available().into_iter().flat_map(|isa| [1, 16, 100].map(|n| (isa, n))) {
        for limit in [0.1, 5.0, 60.0] {
            let (before, bias) = (random.floats(n, limit), random.floats(n, limit));
            let mut x = before.clone();
            isa.run(Softplus { x: &mut x, bias: &bias });
            for i in 0..n {
                let want = f64::from(before[i] + bias[i]).exp().ln_1p();
                let error = (f64::from(x[i]) - want).abs();
                assert!(error <= 1e-6 * want + 1e-37, "{isa:?} {}: {} {want}", before[i] + bias[i], x[i]);
            }
        }
    }
    let mut far = [-200.0, 200.0, f32::NEG_INFINITY, 0.0];
    Isa::best().run(Softplus { x: &mut far, bias: &[0.0; 4] });
    assert_eq!(far[..3], [0.0, 200.0, 0.0]);
}

#[test]
fn gates_by_silu() {
    let mut random = TestRandom(6);
    for (isa, n) in Isa::available().into_iter().flat_map(|isa| [1, 16, 33, 64].map(|n| (isa, n))) {
        for limit in [0.1, 5.0, 60.0] {
            let (before, gate) = (random.floats(n, 2.0), random.floats(n, limit));
            let mut x = before.clone();
            isa.run(HeadOutput { out: &mut x, norm: None, bonus: None, gate: Some((Gate::Silu, &gate)) });
            let want: Vec<f64> = wide(&before).zip(wide(&gate)).map(|(x, g)| x * g / (1.0 + (-g).exp())).collect();
            assert!(nmse(wide(&x), &want) < 1e-12, "{isa:?} {n} {limit}");
        }
    }
}

#[test]
fn l2_norms() {
    let mut random = TestRandom(5);
    for (isa, n) in Isa::available().into_iter().flat_map(|isa| [1, 16, 33, 128].map(|n| (isa, n))) {
        for limit in [1e-3, 1.0, 1e3] {
            let (before, eps, scale) = (random.floats(n, limit), 1e-6, 0.25);
            let mut x = before.clone();
            isa.run(L2Norm { x: &mut x, eps, scale });
            let sum = wide(&before).map(|x| x * x).sum::<f64>() + f64::from(eps);
            let want: Vec<f64> = wide(&before).map(|x| f64::from(scale) * x / sum.sqrt()).collect();
            assert!(nmse(wide(&x), &want) < 1e-12, "{isa:?} {n} {limit}");
        }
    }
}

#[test]
fn rows_of_a_shared_buffer() {
    let mut data = vec![0.0; 40];
    let shared = SharedMut::new(&mut data);
    // SAFETY: the rows are not accessed.
    let make = |first, rows, width, stride| unsafe {
        StridedRowsMut::shared(&shared, first, rows, width, stride);
    };
    make(4, 4, 6, 10);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| make(5, 4, 6, 10))).is_err());
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| make(0, 4, 11, 10))).is_err());
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| make(usize::MAX, 1, 6, 10))).is_err());
}

#[test]
fn gated_norms() {
    let mut random = TestRandom(6);
    for (isa, n) in Isa::available().into_iter().flat_map(|isa| [1, 15, 16, 18, 64, 128, 150].map(|n| (isa, n))) {
        for (limit, eps, kind) in
            [(1.0, 1e-6, Gate::Silu), (1e-4, 1e-3, Gate::Silu), (300.0, 1e-5, Gate::Silu), (2.0, 1e-6, Gate::Sigmoid)]
        {
            let (x, weight, gate) = (random.floats(n, limit), random.floats(n, 2.0), random.floats(n, 9.0));
            let mean = wide(&x).map(|x| x * x).sum::<f64>() / n as f64;
            let factor = 1.0 / (mean + f64::from(eps)).sqrt();
            let gates = wide(&gate).map(|x| if kind == Gate::Silu { x } else { 1.0 } / (1.0 + (-x).exp()));
            let want: Vec<f64> = wide(&x).zip(wide(&weight)).zip(gates).map(|((x, w), g)| x * factor * w * g).collect();
            let mut found = x;
            let norm = HeadNorm { kind: NormKind::Rms, weight: &weight, bias: None, eps };
            let out = &mut found;
            isa.run(HeadOutput { out, norm: Some(norm), bonus: None, gate: Some((kind, &gate)) });
            let error = nmse(wide(&found), &want);
            assert!(error < 1e-12, "{isa:?} {n} of {limit}: {error:e}");
        }
    }
}

#[test]
fn decays_of_channels() {
    let mut random = TestRandom(7);
    for (isa, n) in Isa::available().into_iter().flat_map(|isa| [1, 15, 16, 18, 128].map(|n| (isa, n))) {
        for (limit, a) in [(1.0, -1.0), (9.0, -16.0), (40.0, -0.01), (0.1, 0.0)] {
            let (x, bias) = (random.floats(n, limit), random.floats(n, 3.0));
            let mut found = x.clone();
            isa.run(Decays { x: &mut found, bias: &bias, a });
            for i in 0..n {
                let step = (f64::from(x[i]) + f64::from(bias[i])).exp().ln_1p();
                let want = (f64::from(a) * step).exp();
                // The exponent is off by a few last bits.
                let error = (f64::from(found[i]) - want).abs();
                let limit = 1e-6 * (1.0 + f64::from(a).abs() * step) * want + 1e-30;
                assert!(error <= limit, "{isa:?} {n} [{i}] {a}: {} {want}", found[i]);
            }
        }
    }
}
