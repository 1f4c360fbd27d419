//! The convolution.

use super::{batches, check, n_runs, n_tokens, row, rows_at, states, wide, words_of};
use crate::support::{gpu, poisoned, random, run};
use metal_attention_wgpu::kernels::{ConvolutionBuffers, ConvolutionShape, convolution, convolution_twin};
use metal_attention_wgpu::{Bind, GridExtent};

#[test]
fn convolutions_match_their_twin() {
    let Some(gpu) = gpu() else { return };
    for (channels, width, bias, silu) in
        [(1, 4, true, true), (65, 4, false, true), (130, 2, true, false), (33, 1, true, true), (20, 16, false, false)]
    {
        let (x_at, out_at) = (rows_at(channels), rows_at(channels));
        let n_state = (width - 1) * channels;
        let (states_at, before) = states(n_state);
        let of = ConvolutionShape { channels, width, bias, silu, x: x_at, out: out_at, states: states_at };
        let (taps, biases) = (random(2, width * channels), random(3, channels));
        let [gt, gb] = [&taps, &biases].map(|v| gpu.upload("x", v).unwrap());
        for segments in batches() {
            let n = n_tokens(&segments);
            let x = random(1, n * x_at.stride);
            let [gx, gs] = [&x, &before].map(|v| gpu.upload("x", v).unwrap());
            let words = words_of(gpu, &segments);
            let out = poisoned(gpu, n * out_at.stride);
            let bias_of = bias.then_some(&gb as &dyn Bind);
            let b = ConvolutionBuffers { x: &gx, taps: &gt, bias: bias_of, states: &gs, out: &out, segments: &words };
            // One row of workgroups more than there are runs.
            let runs = GridExtent::Fixed(n_runs(&segments) + 1);
            run(gpu, &[convolution(gpu, &of, &b, runs).unwrap()], n);
            let twin = |token: usize, n: usize, state: &mut Vec<f64>| {
                let x: Vec<f64> = (token..token + n).flat_map(|t| wide(row(&x, x_at, t, channels))).collect();
                convolution_twin(&of, &x, &wide(&taps), bias.then(|| wide(&biases)).as_deref(), state)
            };
            let what = format!("{channels} channels, {width} taps");
            check(gpu, &what, &segments, (&out, out_at, channels), (&gs, states_at, n_state, &before), &twin, 1e-12);
        }
    }
}
