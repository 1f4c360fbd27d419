//! The short convolution (`recurrent.cu`), with SiLU or between the gates of LFM2.

use std::sync::Arc;

use bytemuck::Zeroable;
use metal_attention_model::Segment;

use super::super::{pass, poisoned, random, read, to_f64};
use super::{Input, States, batches, convolved, n_tokens, segment, sigmoid};
use crate::CudaExecutor;
use crate::args::{ConvolutionArgs, RowsArgs};
use crate::slice::DevicePtr;

#[derive(Debug, Clone, Copy)]
struct Convolution {
    channels: usize,
    n_tap: usize,
    bias: bool,
    gated: bool,
    /// Blocks of channels, with as many other elements after each.
    blocks: usize,
}

fn check(pass: &mut CudaExecutor, case: Convolution, segments: &[Segment]) {
    let what = format!("{case:?} {segments:?}");
    let Convolution { channels, n_tap, .. } = case;
    let (gpu, n) = (Arc::clone(&pass.runner.gpu), n_tokens(segments));
    let states = States::new(&gpu, (n_tap - 1) * channels, segments);
    let (taps, bias) = (random(2, n_tap * channels), random(3, channels));
    let [tap_buffer, bias_buffer] = [&taps, &bias].map(|v| gpu.upload("taps", v).unwrap());
    let out = poisoned(&gpu, n * channels);
    let block = channels / case.blocks;
    let (width, step) = match (case.gated, case.blocks) {
        (true, _) => (3 * channels, channels),
        (false, 1) => (channels, channels),
        (false, _) => (2 * channels, 2 * block),
    };
    let x = Input::new(&gpu, random(1, n * width), width);
    // With gates, rows have no other elements.
    let gated_rows = gpu.upload("rows", &x.values).unwrap();
    let args = ConvolutionArgs {
        x: if case.gated { RowsArgs::new(gated_rows.slice(), width, 0) } else { x.args() },
        taps: tap_buffer.ptr(),
        bias: if case.bias { bias_buffer.ptr() } else { DevicePtr::NULL },
        out: out.ptr(),
        channels: channels as u32,
        n_tap: n_tap as u32,
        block: block as u32,
        step: step as u32,
        gated: u32::from(case.gated),
        ..ConvolutionArgs::zeroed()
    };
    pass.runner.convolution(states.batch(&pass.spec, &pass.cache, segments), 0, args).unwrap();
    let got: Vec<f32> = read(&gpu, &out, n * channels);
    let (taps, bias) = (to_f64(&taps), case.bias.then(|| to_f64(&bias)));
    // Each element of a state is a copy or one product, which are rounded alike.
    states.check(segments, &got, [2e-6, 0.0], &what, |token, state| {
        let row = x.row(token);
        let at = |part: usize, c: usize| row[part * channels + c];
        if case.gated {
            let inputs: Vec<f64> = (0..channels).map(|c| f64::from((at(0, c) * at(2, c)) as f32)).collect();
            let sums = convolved(&inputs, &taps, bias.as_deref(), state);
            return sums.iter().enumerate().map(|(c, sum)| sum * at(1, c)).collect();
        }
        let inputs: Vec<f64> = (0..channels).map(|c| row[c / block * step + c % block]).collect();
        convolved(&inputs, &taps, bias.as_deref(), state).iter().map(|sum| sum * sigmoid(*sum)).collect()
    });
}

#[test]
fn convolutions() {
    let Some(mut pass) = pass() else { return };
    for (channels, n_tap, bias, gated, blocks) in [
        (1, 4, true, false, 1),
        (65, 4, false, false, 1),
        (130, 2, true, false, 1),
        (33, 1, true, false, 1),
        (20, 16, false, false, 1),
        (132, 3, true, false, 3),
        (129, 3, false, true, 1),
        (31, 5, false, true, 1),
        (10, 16, false, true, 1),
    ] {
        let case = Convolution { channels, n_tap, bias, gated, blocks };
        for segments in batches() {
            check(&mut pass, case, &segments);
        }
        // Around the tokens of a block and those that a thread loads at a time, and segments shorter than the taps.
        for n in [2, 7, 8, 9, 15, 16, 17, 33] {
            check(&mut pass, case, &[segment(0, 3, n, 2, 1)]);
        }
        let short = [(2, 5, 5), (1, 5, 5), (1, 5, 6), (35, 6, 5), (1, 5, 7)];
        let mut pos = 20;
        let segments: Vec<_> = short
            .iter()
            .map(|&(n, from, to)| {
                pos += n;
                segment(0, pos - n, n, from, to)
            })
            .collect();
        check(&mut pass, case, &segments);
    }
}
