//! The short convolution of recurrent layers, against its twin.

use super::{batches, check, n_runs, n_tokens, row, rows_at, states, to_f64, words_of};
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
        let shape = ConvolutionShape { channels, width, bias, silu, x: x_at, out: out_at, states: states_at };
        let (taps, biases) = (random(2, width * channels), random(3, channels));
        let [gt, gb] = [&taps, &biases].map(|v| gpu.upload("x", v).unwrap());
        for segments in batches() {
            let n = n_tokens(&segments);
            let x = random(1, n * x_at.stride);
            let [gx, gs] = [&x, &before].map(|v| gpu.upload("x", v).unwrap());
            let words = words_of(gpu, &segments);
            let out = poisoned(gpu, n * out_at.stride);
            let bias_buffer = bias.then_some(&gb as &dyn Bind);
            let b =
                ConvolutionBuffers { x: &gx, taps: &gt, bias: bias_buffer, states: &gs, out: &out, segments: &words };
            // One row of workgroups more than there are runs, which must do nothing.
            let runs = GridExtent::Fixed(n_runs(&segments) + 1);
            run(gpu, &[convolution(gpu, &shape, &b, runs).unwrap()], n);
            let twin = |token: usize, n: usize, state: &mut Vec<f64>| {
                let x: Vec<f64> = (token..token + n).flat_map(|t| to_f64(row(&x, x_at, t, channels))).collect();
                convolution_twin(&shape, &x, &to_f64(&taps), bias.then(|| to_f64(&biases)).as_deref(), state)
            };
            let what = format!("{channels} channels, {width} taps");
            check(gpu, &what, &segments, (&out, out_at, channels), (&gs, states_at, n_state, &before), &twin, 1e-12);
        }
    }
}
