//! The recurrences of RWKV-6 and RWKV-7 against their twins: the bare recurrence, and fused with the rest of the time mix.

use super::{batches, check, n_runs, n_tokens, row, rows_at, silu, states, to_f64, words_of};
use crate::support::{on_variants, poisoned, random, run, takes_fewer_cases};
use metal_attention_model::NormKind;
use metal_attention_wgpu::kernels::{
    ColumnRange, GroupNormShape, Rwkv6Buffers, Rwkv6Mix, Rwkv6MixBuffers, Rwkv6Output, Rwkv6Shape, Rwkv6Token,
    Rwkv7Buffers, Rwkv7Mix, Rwkv7MixBuffers, Rwkv7Shape, Rwkv7Token, group_norm_twin, rwkv6, rwkv6_mix, rwkv6_twin,
    rwkv7, rwkv7_mix, rwkv7_twin,
};
use metal_attention_wgpu::{Bind, GridExtent};

/// (heads, elements of a key, elements of a value)
const SHAPES: [(usize, usize, usize); 5] = [(3, 8, 8), (2, 16, 24), (5, 24, 24), (1, 96, 96), (2, 64, 64)];

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Maps numbers of [-1, 1] to [0, 1].
fn fraction(x: &[f64]) -> Vec<f64> {
    x.iter().map(|x| (1.0 + x) / 2.0).collect()
}

/// The layer norm of a head.
fn normed(x: &[f64], weight: &[f64], bias: &[f64]) -> Vec<f64> {
    let at = ColumnRange::whole(x.len());
    let (n, kind) = (x.len(), NormKind::Layer);
    let shape =
        GroupNormShape { n, groups: 1, kind, eps: 1e-3, of_groups: true, bias: true, x: at, gate: None, out: at };
    group_norm_twin(&shape, x, weight, Some(bias), &[])
}

#[test]
fn rwkv7_matches_its_twin() {
    let shapes: Vec<_> = SHAPES.into_iter().enumerate().collect();
    for (gpu, (at, (n_head, key_dim, value_dim))) in on_variants(&shapes) {
        let (keys, values) = (n_head * key_dim, n_head * value_dim);
        let (key_at, value_at) = (rows_at(keys), rows_at(values));
        let n_state = keys * value_dim;
        let (states_at, before) = states(n_state);
        let weights = random(20, 8 * keys);
        for (i, segments) in batches().into_iter().enumerate() {
            let n = n_tokens(&segments);
            let [r, k, a] = [1, 2, 3].map(|seed| random(seed, n * key_at.stride));
            // The bare recurrence requires decays in [0, 1] and small `b`, so that the state does not grow.
            let decay: Vec<f32> = random(5, n * key_at.stride).iter().map(|x| x.abs()).collect();
            let b: Vec<f32> = random(4, n * key_at.stride).iter().map(|x| x / 20.0).collect();
            let [v, first, mix_weight, gate] = [6, 7, 8, 9].map(|seed| random(seed, n * value_at.stride));
            let shape = Rwkv7Shape {
                n_head,
                key_dim,
                value_dim,
                r: key_at,
                decay: key_at,
                k: key_at,
                v: value_at,
                a: key_at,
                b: key_at,
                out: value_at,
                states: states_at,
            };
            let words = words_of(gpu, &segments);
            let runs = GridExtent::Fixed(n_runs(&segments) + 1);
            let upload = |v: &Vec<f32>| gpu.upload("x", v).unwrap();
            let [gr, gk, ga, gdecay, gb] = [&r, &k, &a, &decay, &b].map(upload);
            let [gv, gfirst, gmix_weight, ggate, gweights] = [&v, &first, &mix_weight, &gate, &weights].map(upload);
            for fused in [false, true] {
                if fused && key_dim != value_dim || !fused && at > 1 && takes_fewer_cases(gpu) {
                    continue;
                }
                let (gs, out) = (upload(&before), poisoned(gpu, n * value_at.stride));
                let buffers = Rwkv7Buffers {
                    r: &gr,
                    decay: &gdecay,
                    k: &gk,
                    v: &gv,
                    a: &ga,
                    b: &gb,
                    states: &gs,
                    out: &out,
                    segments: &words,
                };
                let options = if takes_fewer_cases(gpu) { 3 * at % 4 } else { i };
                let (residual, gated, with_norm) = (options % 2 == 0, options != 2, options != 1);
                let dispatch = if fused {
                    let mix = Rwkv7Mix {
                        norm_eps: with_norm.then_some(1e-3),
                        residual: residual.then_some([value_at; 2]),
                        gate: gated.then_some(value_at),
                    };
                    let with = Rwkv7MixBuffers {
                        weights: &gweights,
                        residual: residual.then_some([&gfirst as &dyn Bind, &gmix_weight]),
                        gate: gated.then_some(&ggate as &dyn Bind),
                    };
                    rwkv7_mix(gpu, &shape, &mix, &buffers, &with, runs).unwrap().expect("heads that fit")
                } else {
                    rwkv7(gpu, &shape, &buffers, runs).unwrap()
                };
                run(gpu, &[dispatch], n);
                let head_result = |t: usize, h: usize, state: &mut [f64]| -> Vec<f64> {
                    let [r, mut k, mut a, mut decay, mut b] =
                        [&r, &k, &a, &decay, &b].map(|v| to_f64(&row(v, key_at, t, keys)[h * key_dim..][..key_dim]));
                    let head_values = |v| to_f64(&row(v, value_at, t, values)[h * value_dim..][..value_dim]);
                    let [mut v, first, mix_weight, gate] =
                        [&v, &first, &mix_weight, &gate].map(|v: &Vec<f32>| head_values(v));
                    if !fused {
                        return rwkv7_twin(&Rwkv7Token { r: &r, decay: &decay, k: &k, v: &v, a: &a, b: &b }, state);
                    }
                    let w: Vec<Vec<f64>> = weights.chunks(keys).map(|w| to_f64(&w[h * key_dim..][..key_dim])).collect();
                    decay.iter_mut().zip(&w[0]).for_each(|(d, w)| *d = (-0.606531 * sigmoid(*d + w)).exp());
                    let rate: Vec<f64> = a.iter().zip(&w[1]).map(|(a, w)| sigmoid(a + w)).collect();
                    let removed: Vec<f64> = k.iter().zip(&w[3]).map(|(k, w)| k * w).collect();
                    let length = removed.iter().map(|x| x * x).sum::<f64>().sqrt();
                    for i in 0..key_dim {
                        a[i] = -removed[i] / length;
                        b[i] = removed[i] / length * rate[i];
                        k[i] *= 1.0 + (rate[i] - 1.0) * w[4][i];
                    }
                    if residual {
                        (0..value_dim).for_each(|i| v[i] += (first[i] - v[i]) * sigmoid(mix_weight[i] + w[2][i]));
                    }
                    let out = rwkv7_twin(&Rwkv7Token { r: &r, decay: &decay, k: &k, v: &v, a: &a, b: &b }, state);
                    let bonus: f64 = (0..key_dim).map(|i| r[i] * k[i] * w[5][i]).sum();
                    let normed = if with_norm { normed(&out, &w[6], &w[7]) } else { out };
                    let open = |i: usize| if gated { gate[i] } else { 1.0 };
                    (0..value_dim).map(|i| (normed[i] + bonus * v[i]) * open(i)).collect()
                };
                let twin = |token: usize, n: usize, state: &mut Vec<f64>| -> Vec<f64> {
                    let heads = |t| (0..n_head).map(move |h| (t, h));
                    let all = (token..token + n).flat_map(heads);
                    let size = key_dim * value_dim;
                    all.flat_map(|(t, h)| head_result(t, h, &mut state[h * size..][..size])).collect()
                };
                let what = format!("{shape:?}, batch {i}, fused: {fused}");
                let after = (&gs, states_at, n_state, &before[..]);
                check(gpu, &what, &segments, (&out, value_at, values), after, &twin, 1e-11);
            }
        }
    }
}

#[test]
fn rwkv6_matches_its_twin() {
    for (gpu, (n_head, key_dim, value_dim)) in on_variants(&SHAPES) {
        let (keys, values) = (n_head * key_dim, n_head * value_dim);
        let (key_at, value_at) = (rows_at(keys), rows_at(values));
        let n_state = keys * value_dim;
        let (states_at, before) = states(n_state);
        let [bonus, decay_bias] = [20, 21].map(|seed| random(seed, keys));
        let [norm_weight, norm_bias] = [22, 23].map(|seed| random(seed, values));
        for (i, segments) in batches().into_iter().enumerate() {
            let n = n_tokens(&segments);
            let [r, k, raw] = [1, 2, 3].map(|seed| random(seed, n * key_at.stride));
            let [v, gate] = [4, 5].map(|seed| random(seed, n * value_at.stride));
            let shape = Rwkv6Shape {
                n_head,
                key_dim,
                value_dim,
                r: key_at,
                k: key_at,
                v: value_at,
                decay: key_at,
                out: value_at,
                states: states_at,
            };
            let words = words_of(gpu, &segments);
            let runs = GridExtent::Fixed(n_runs(&segments) + 1);
            let upload = |v: &Vec<f32>| gpu.upload("x", v).unwrap();
            for fused in [false, true] {
                let decay: Vec<f32> =
                    if fused { raw.clone() } else { fraction(&to_f64(&raw)).iter().map(|&x| x as f32).collect() };
                let [gr, gk, gv, gdecay, ggate] = [&r, &k, &v, &decay, &gate].map(upload);
                let [gbonus, gbias, gweight, gnorm_bias] = [&bonus, &decay_bias, &norm_weight, &norm_bias].map(upload);
                let (gs, out) = (upload(&before), poisoned(gpu, n * value_at.stride));
                let buffers = Rwkv6Buffers {
                    r: &gr,
                    k: &gk,
                    v: &gv,
                    decay: &gdecay,
                    bonus: Some(&gbonus),
                    states: &gs,
                    out: &out,
                    segments: &words,
                };
                let dispatch = if fused {
                    let mix = Rwkv6Mix { output: Rwkv6Output::Normed { eps: 1e-3 }, gate: value_at };
                    let with =
                        Rwkv6MixBuffers { decay_bias: &gbias, norm: Some([&gweight, &gnorm_bias]), gate: &ggate };
                    rwkv6_mix(gpu, &shape, &mix, &buffers, &with, runs).unwrap().expect("heads that fit")
                } else {
                    rwkv6(gpu, &shape, &buffers, runs).unwrap()
                };
                run(gpu, &[dispatch], n);
                let head_result = |t: usize, h: usize, state: &mut [f64]| -> Vec<f64> {
                    let head_keys = |v: &[f32]| to_f64(&v[h * key_dim..][..key_dim]);
                    let head_values = |v: &[f32]| to_f64(&v[h * value_dim..][..value_dim]);
                    let [r, k, mut decay] = [&r, &k, &decay].map(|v| head_keys(row(v, key_at, t, keys)));
                    let v = head_values(row(&v, value_at, t, values));
                    if fused {
                        let bias = head_keys(&decay_bias);
                        decay.iter_mut().zip(&bias).for_each(|(d, b)| *d = (-(*d + b).exp()).exp());
                    }
                    let token = Rwkv6Token { r: &r, k: &k, v: &v, decay: &decay };
                    let out = rwkv6_twin(&token, &head_keys(&bonus), state);
                    if !fused {
                        return out;
                    }
                    let gate = &row(&gate, value_at, t, values)[h * value_dim..][..value_dim];
                    let normed = normed(&out, &head_values(&norm_weight), &head_values(&norm_bias));
                    normed.iter().zip(gate).map(|(x, g)| x * silu(*g)).collect()
                };
                let twin = |token: usize, n: usize, state: &mut Vec<f64>| -> Vec<f64> {
                    let heads = |t| (0..n_head).map(move |h| (t, h));
                    let all = (token..token + n).flat_map(heads);
                    let size = key_dim * value_dim;
                    all.flat_map(|(t, h)| head_result(t, h, &mut state[h * size..][..size])).collect()
                };
                let what = format!("{shape:?}, batch {i}, fused: {fused}");
                let after = (&gs, states_at, n_state, &before[..]);
                check(gpu, &what, &segments, (&out, value_at, values), after, &twin, 1e-11);
            }
        }
    }
}

/// Gated linear attention, whose query heads share keys and values.
#[test]
fn linear_attention_of_rwkv6_matches_its_twin() {
    for (gpu, (n_head, share, dim)) in on_variants(&[(4, 2, 8), (6, 3, 24), (2, 1, 64)]) {
        let (all, n_kv) = (n_head * dim, n_head / share * dim);
        let (at, kv_at) = (rows_at(all), rows_at(n_kv));
        let n_state = all * dim;
        let (states_at, before) = states(n_state);
        let decay_bias = random(21, all);
        for (i, segments) in batches().into_iter().enumerate() {
            let n = n_tokens(&segments);
            let [r, raw, gate] = [1, 3, 5].map(|seed| random(seed, n * at.stride));
            let [k, v] = [2, 4].map(|seed| random(seed, n * kv_at.stride));
            let upload = |v: &Vec<f32>| gpu.upload("x", v).unwrap();
            let [gr, gk, gv, gdecay, ggate, gbias] = [&r, &k, &v, &raw, &gate, &decay_bias].map(upload);
            let (gs, out) = (upload(&before), poisoned(gpu, n * at.stride));
            let shape = Rwkv6Shape {
                n_head,
                key_dim: dim,
                value_dim: dim,
                r: at,
                k: kv_at,
                v: kv_at,
                decay: at,
                out: at,
                states: states_at,
            };
            let words = words_of(gpu, &segments);
            let buffers = Rwkv6Buffers {
                r: &gr,
                k: &gk,
                v: &gv,
                decay: &gdecay,
                bonus: None,
                states: &gs,
                out: &out,
                segments: &words,
            };
            let mix = Rwkv6Mix { output: Rwkv6Output::Linear { share }, gate: at };
            let with = Rwkv6MixBuffers { decay_bias: &gbias, norm: None, gate: &ggate };
            let runs = GridExtent::Fixed(n_runs(&segments) + 1);
            let dispatch = rwkv6_mix(gpu, &shape, &mix, &buffers, &with, runs).unwrap().expect("heads that fit");
            run(gpu, &[dispatch], n);
            let head_result = |t: usize, h: usize, state: &mut [f64]| -> Vec<f64> {
                let head_part = |v: &[f32]| to_f64(&row(v, at, t, all)[h * dim..][..dim]);
                let kv_part = |v: &[f32]| to_f64(&row(v, kv_at, t, n_kv)[h / share * dim..][..dim]);
                let [r, raw, gate] = [&r, &raw, &gate].map(|v| head_part(v));
                let [k, v] = [&k, &v].map(|v| kv_part(v));
                let bias = &decay_bias[h * dim..];
                let decay: Vec<f64> = raw.iter().zip(bias).map(|(d, b)| (-(d + f64::from(*b)).exp()).exp()).collect();
                let column = |c: usize| {
                    let mut sum = 0.0;
                    for i in 0..dim {
                        let s = &mut state[i * dim + c];
                        *s = decay[i] * *s + k[i] * (1.0 - decay[i]) * v[c];
                        sum += r[i] * *s;
                    }
                    sum / (dim as f64).sqrt() * sigmoid(gate[c])
                };
                (0..dim).map(column).collect()
            };
            let twin = |token: usize, n: usize, state: &mut Vec<f64>| -> Vec<f64> {
                let heads = |t| (0..n_head).map(move |h| (t, h));
                let size = dim * dim;
                let tokens = (token..token + n).flat_map(heads);
                tokens.flat_map(|(t, h)| head_result(t, h, &mut state[h * size..][..size])).collect()
            };
            let what = format!("{shape:?}, {share} heads share, batch {i}");
            let after = (&gs, states_at, n_state, &before[..]);
            check(gpu, &what, &segments, (&out, at, all), after, &twin, 1e-11);
        }
    }
}
