//! Mamba and Mamba-2 against their twins. Mamba-2 also fused with the convolution before it.

use super::{batches, check, n_runs, n_tokens, row, rows_at, silu, states, to_f64, words_of};
use crate::support::{on_variants, poisoned, random, run, takes_fewer_cases};
use metal_attention_wgpu::kernels::{
    ColumnRange, ConvolutionShape, Mamba2Buffers, Mamba2HeadWeights, Mamba2Shape, Mamba2Step, Mamba2StepBuffers,
    MambaBuffers, MambaShape, MambaToken, StateRange, convolution_twin, mamba, mamba_twin, mamba2, mamba2_step,
    mamba2_twin,
};
use metal_attention_wgpu::{Bind, GridExtent};

/// Negative numbers with the magnitudes of `x`.
fn negative(x: &[f32]) -> Vec<f32> {
    x.iter().map(|x| -x.abs()).collect()
}

#[test]
fn mamba2_matches_its_twin() {
    // (heads, groups, elements of a state column, elements of a head, whether results are gated)
    let shapes =
        [(3, 1, 8, 8, true), (4, 2, 16, 24, false), (5, 5, 96, 7, true), (6, 2, 128, 64, false), (2, 1, 256, 20, true)];
    for (gpu, (n_head, n_group, d_state, head_dim, gated)) in on_variants(&shapes) {
        let n_out = n_head * head_dim;
        let channels = n_out + 2 * n_group * d_state;
        let (x_at, dt_at, row_at) = (rows_at(channels), rows_at(n_head), rows_at(n_out));
        let (a, d, dt_bias) = (negative(&random(5, n_head)), random(6, n_head), random(7, n_head));
        let (taps, bias) = (random(8, 4 * channels), random(9, channels));
        let (a64, d64, dt_bias64) = (to_f64(&a), to_f64(&d), to_f64(&dt_bias));
        let weights = Mamba2HeadWeights { dt_bias: &dt_bias64, a: &a64, d: &d64 };
        for (i, segments) in batches().into_iter().enumerate() {
            let n = n_tokens(&segments);
            let (x, dt) = (random(1, n * x_at.stride), random(2, n * dt_at.stride));
            let gate = random(3, n * row_at.stride);
            let words = words_of(gpu, &segments);
            let runs = GridExtent::Fixed(n_runs(&segments) + 1);
            // Without the fused convolution, B and C may be in another buffer than x.
            for (fused, separate_bc) in [(false, false), (false, true), (true, false)] {
                let n_conv_state = if fused { 3 * channels } else { 0 };
                let matrices = n_head * d_state * head_dim;
                let (states_at, before) = states(n_conv_state + matrices);
                let shape = Mamba2Shape {
                    n_head,
                    n_group,
                    d_state,
                    head_dim,
                    x: x_at,
                    bc: separate_bc.then_some(ColumnRange { first: x_at.first + n_out, ..x_at }),
                    dt: dt_at,
                    gate: gated.then_some(row_at),
                    out: row_at,
                    states: StateRange { at: states_at.at + n_conv_state, ..states_at },
                };
                let upload = |v: &Vec<f32>| gpu.upload("x", v).unwrap();
                let [gx, gdt, ga, gd, gbias, gg, gs] = [&x, &dt, &a, &d, &dt_bias, &gate, &before].map(upload);
                let [gt, gcb] = [&taps, &bias].map(upload);
                let tickets = upload(&vec![0.0; n * n_group]);
                let out = poisoned(gpu, n * row_at.stride);
                let b = Mamba2Buffers {
                    x: &gx,
                    bc: separate_bc.then_some(&gx as &dyn Bind),
                    dt: &gdt,
                    dt_bias: &gbias,
                    a: &ga,
                    d: &gd,
                    gate: gated.then_some(&gg as &dyn Bind),
                    states: &gs,
                    out: &out,
                    segments: &words,
                };
                let has_bias = (if takes_fewer_cases(gpu) { n_head } else { i }) % 2 == 0;
                let dispatch = if fused {
                    let step = Mamba2Step { width: 4, bias: has_bias, convolution_at: states_at.at };
                    let bias = has_bias.then_some(&gcb as &dyn Bind);
                    let with = Mamba2StepBuffers { taps: &gt, bias, tickets: &tickets };
                    mamba2_step(gpu, &shape, &step, &b, &with, runs).unwrap().expect("heads that fit")
                } else {
                    mamba2(gpu, &shape, &b, runs).unwrap()
                };
                run(gpu, &[dispatch], n);
                let convolution = ConvolutionShape {
                    channels,
                    width: 4,
                    bias: has_bias,
                    silu: true,
                    x: x_at,
                    out: x_at,
                    states: shape.states,
                };
                let twin = |token: usize, n: usize, state: &mut Vec<f64>| -> Vec<f64> {
                    let rows = (token..token + n).flat_map(|t| to_f64(row(&x, x_at, t, channels)));
                    let mut inputs: Vec<f64> = rows.collect();
                    let mut matrices = state.split_off(n_conv_state);
                    if fused {
                        let bias = has_bias.then(|| to_f64(&bias));
                        inputs = convolution_twin(&convolution, &inputs, &to_f64(&taps), bias.as_deref(), state);
                    }
                    let mut results = Vec::new();
                    for (t, x) in (token..).zip(inputs.chunks(channels)) {
                        let dt = to_f64(row(&dt, dt_at, t, n_head));
                        let out = mamba2_twin(&shape, &weights, x, &dt, &mut matrices);
                        let gate = row(&gate, row_at, t, n_out);
                        results.extend(out.iter().zip(gate).map(|(x, g)| if gated { x * silu(*g) } else { *x }));
                    }
                    state.extend(matrices);
                    results
                };
                let what = format!("{shape:?}, batch {i}, fused: {fused}");
                let after = (&gs, states_at, n_conv_state + matrices, &before[..]);
                check(gpu, &what, &segments, (&out, row_at, n_out), after, &twin, 1e-11);
                let left: Vec<u32> = gpu.read(&tickets, n * n_group).unwrap();
                assert!(left.iter().all(|&n| n == 0), "{what}: {left:?}");
            }
        }
    }
}

#[test]
fn mamba_matches_its_twin() {
    for (gpu, (channels, d_state, gated)) in
        on_variants(&[(1, 1, false), (24, 16, true), (97, 8, true), (130, 17, false)])
    {
        let (row_at, bc_at) = (rows_at(channels), rows_at(d_state));
        let n_state = d_state * channels;
        let (states_at, before) = states(n_state);
        let (a, d, dt_bias) = (negative(&random(5, n_state)), random(6, channels), random(7, channels));
        let (a64, d64, dt_bias64) = (to_f64(&a), to_f64(&d), to_f64(&dt_bias));
        for (i, segments) in batches().into_iter().enumerate() {
            let n = n_tokens(&segments);
            let [x, dt, gate] = [1, 2, 3].map(|seed| random(seed, n * row_at.stride));
            let [b, c] = [10, 11].map(|seed| random(seed, n * bc_at.stride));
            let words = words_of(gpu, &segments);
            let shape = MambaShape {
                channels,
                d_state,
                x: row_at,
                dt: row_at,
                b: bc_at,
                c: bc_at,
                gate: gated.then_some(row_at),
                out: row_at,
                states: states_at,
            };
            let upload = |v: &Vec<f32>| gpu.upload("x", v).unwrap();
            let [gx, gdt, gb, gc, gg] = [&x, &dt, &b, &c, &gate].map(upload);
            let [ga, gd, gbias, gs] = [&a, &d, &dt_bias, &before].map(upload);
            let out = poisoned(gpu, n * row_at.stride);
            let buffers = MambaBuffers {
                x: &gx,
                dt: &gdt,
                b: &gb,
                c: &gc,
                dt_bias: &gbias,
                a: &ga,
                d: &gd,
                gate: gated.then_some(&gg as &dyn Bind),
                states: &gs,
                out: &out,
                segments: &words,
            };
            let runs = GridExtent::Fixed(n_runs(&segments) + 1);
            run(gpu, &[mamba(gpu, &shape, &buffers, runs).unwrap()], n);
            let twin = |token: usize, n: usize, state: &mut Vec<f64>| -> Vec<f64> {
                let token_result = |t: usize| {
                    let [x, dt] = [&x, &dt].map(|v| to_f64(row(v, row_at, t, channels)));
                    let [b, c] = [&b, &c].map(|v| to_f64(row(v, bc_at, t, d_state)));
                    let token = MambaToken { x: &x, dt: &dt, b: &b, c: &c };
                    let out = mamba_twin(&token, &dt_bias64, &a64, &d64, state);
                    let gate = row(&gate, row_at, t, channels);
                    let gated = |(x, g): (&f64, &f32)| if gated { x * silu(*g) } else { *x };
                    out.iter().zip(gate).map(gated).collect::<Vec<_>>()
                };
                (token..token + n).flat_map(token_result).collect()
            };
            let what = format!("{shape:?}, batch {i}");
            let after = (&gs, states_at, n_state, &before[..]);
            check(gpu, &what, &segments, (&out, row_at, channels), after, &twin, 1e-11);
        }
    }
}
