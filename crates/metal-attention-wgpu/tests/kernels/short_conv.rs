//! Gated short convolutions (LFM2) against their twin.

use crate::support::{nmse, poisoned, random, run_sized, variants};
use metal_attention_model::{Segment, ShortConvSpec};
use metal_attention_wgpu::kernels::{MAX_TAPS, ShortConvBuffers, segment_words, short_conv, short_conv_twin};
use metal_attention_wgpu::{BatchDims, WgpuDevice, WgpuError};

const N_SLOTS: usize = 12;

/// The segments of one run per sequence, given as (tokens, slot of the state before, slot of the state after).
fn segments(runs: &[&[(usize, u32, u32)]]) -> Vec<Segment> {
    let run_segments = |(seq, run): (usize, &&[(usize, u32, u32)])| {
        let mut pos = 10 * seq;
        let segment = |&(n, from, to): &(usize, u32, u32)| {
            pos += n;
            Segment { seq, pos: pos - n, n, from, to }
        };
        run.iter().map(segment).collect::<Vec<_>>()
    };
    runs.iter().enumerate().flat_map(run_segments).collect()
}

/// Runs the convolution over random inputs on the GPU and in the twin; compares results and states.
fn check(gpu: &WgpuDevice, shape: ShortConvSpec, segments: &[Segment]) {
    let (width, elements) = (shape.width, shape.state_elements());
    let n_tokens: usize = segments.iter().map(|segment| segment.n).sum();
    let (inputs, taps) = (random(1, n_tokens * 3 * width), random(2, shape.n_tap * width));
    let mut states = random(3, N_SLOTS * elements);
    states[..elements].fill(0.0);
    let [gi, gt, gs] = [&inputs, &taps, &states].map(|v| gpu.upload("x", v).unwrap());
    let words = segment_words(segments, N_SLOTS);
    // The buffer is as large as for a batch of one segment per token.
    let mut padded = vec![[u32::MAX; 4]; 1 + 2 * n_tokens];
    padded[..words.len()].copy_from_slice(&words);
    let table = gpu.upload("segments", &padded).unwrap();
    let out = poisoned(gpu, n_tokens * width);
    let buffers = ShortConvBuffers { inputs: &gi, taps: &gt, states: &gs, out: &out, segments: &table };
    let dispatch = short_conv(gpu, shape, N_SLOTS, &buffers).unwrap();
    // One run more than there are, which must do nothing.
    let n_runs = words[0][0] + 1;
    run_sized(gpu, &[dispatch], BatchDims { n_tokens: n_tokens as u32, n_outputs: 0, n_runs, n_splits: 1 });
    let (mut want, mut at) = (Vec::new(), 0);
    for &Segment { n, from, to, .. } in segments {
        let mut state = states[from as usize * elements..][..elements].to_vec();
        want.extend(short_conv_twin(shape, &inputs[at * 3 * width..][..n * 3 * width], &taps, &mut state));
        states[to as usize * elements..][..elements].copy_from_slice(&state);
        at += n;
    }
    let error = nmse(&gpu.read::<f32>(&out, want.len()).unwrap(), &want);
    // A few roundings of a sum of up to 16 products.
    assert!(error < 1e-12, "{shape:?}, {segments:?}: {error:e}");
    // A state's element is one rounded product or a copy, so that states must be equal.
    assert_eq!(gpu.read::<f32>(&gs, states.len()).unwrap(), states, "{shape:?}, {segments:?}: states");
}

#[test]
fn short_convolutions_match_their_twin() {
    for gpu in variants() {
        for (width, n_tap) in [(1, 2), (31, 3), (64, 4), (65, 3), (200, 5), (130, MAX_TAPS)] {
            let shape = ShortConvSpec { width, n_tap };
            for n in [1, 2, 3, 15, 16, 17, 33, 70] {
                check(gpu, shape, &segments(&[&[(n, 0, 1)]]));
                check(gpu, shape, &segments(&[&[(n, 2, 1)]]));
            }
            // Several sequences.
            check(gpu, shape, &segments(&[&[(1, 3, 1)], &[(1, 0, 2)], &[(1, 4, 5)], &[(1, 4, 6)]]));
            // Checkpoints in place and in other slots, after short and long segments. Two sequences continue from one
            // state, which is unchanged.
            check(gpu, shape, &segments(&[&[(7, 3, 1), (64, 1, 1), (20, 1, 2), (1, 2, 4)], &[(30, 6, 6), (1, 6, 5)]]));
            check(gpu, shape, &segments(&[&[(1, 7, 8), (1, 8, 8), (2, 8, 9)], &[(40, 7, 10), (3, 10, 11)]]));
            check(gpu, shape, &segments(&[&[(2, 5, 5), (1, 5, 5), (1, 5, 5), (35, 5, 5), (1, 5, 7)]]));
        }
    }
}

#[test]
fn more_taps_than_tokens_of_a_tile_are_refused() {
    let Some(gpu) = variants().first() else { return };
    let [x, y, z] = [1, 2, 3].map(|_| gpu.buffer("x", 1 << 16).unwrap());
    let [out, table] = [4, 5].map(|_| gpu.buffer("x", 1 << 16).unwrap());
    let buffers = ShortConvBuffers { inputs: &x, taps: &y, states: &z, out: &out, segments: &table };
    for n_tap in [0, 1, MAX_TAPS + 1] {
        let error = short_conv(gpu, ShortConvSpec { width: 8, n_tap }, 2, &buffers).unwrap_err();
        assert!(matches!(error, WgpuError::Mismatch { .. }), "{error}");
    }
}
