//! Gated short convolutions against their twin.

use crate::support::{nmse, poisoned, random, run_sized, variants};
use metal_attention_model::{Segment, ShortConvSpec};
use metal_attention_wgpu::kernels::{MAX_TAPS, ShortConvBuffers, segment_words, short_conv, short_conv_twin};
use metal_attention_wgpu::{BatchDims, WgpuDevice, WgpuError};

const N_SLOTS: usize = 12;

/// The segments of runs of one sequence each: so many tokens, from which slot, to which.
fn segments(runs: &[&[(usize, u32, u32)]]) -> Vec<Segment> {
    let of_run = |(seq, run): (usize, &&[(usize, u32, u32)])| {
        let mut pos = 10 * seq;
        let segment = |&(n, from, to): &(usize, u32, u32)| {
            pos += n;
            Segment { seq, pos: pos - n, n, from, to }
        };
        run.iter().map(segment).collect::<Vec<_>>()
    };
    runs.iter().enumerate().flat_map(of_run).collect()
}

fn check(gpu: &WgpuDevice, of: ShortConvSpec, segments: &[Segment]) {
    let (width, elements) = (of.width, of.state_elements());
    let n_tokens: usize = segments.iter().map(|segment| segment.n).sum();
    let (inputs, taps) = (random(1, n_tokens * 3 * width), random(2, of.n_tap * width));
    let mut states = random(3, N_SLOTS * elements);
    states[..elements].fill(0.0);
    let [gi, gt, gs] = [&inputs, &taps, &states].map(|v| gpu.upload("x", v).unwrap());
    let words = segment_words(segments, N_SLOTS);
    // As long as a batch of so many tokens has room for.
    let mut padded = vec![[u32::MAX; 4]; 1 + 2 * n_tokens];
    padded[..words.len()].copy_from_slice(&words);
    let table = gpu.upload("segments", &padded).unwrap();
    let out = poisoned(gpu, n_tokens * width);
    let buffers = ShortConvBuffers { inputs: &gi, taps: &gt, states: &gs, out: &out, segments: &table };
    let dispatch = short_conv(gpu, of, N_SLOTS, &buffers).unwrap();
    // More runs than there are have nothing to do.
    let n_runs = words[0][0] + 1;
    run_sized(gpu, &[dispatch], BatchDims { n_tokens: n_tokens as u32, n_wanted: 0, n_runs, n_splits: 1 });
    let (mut want, mut at) = (Vec::new(), 0);
    for &Segment { n, from, to, .. } in segments {
        let mut state = states[from as usize * elements..][..elements].to_vec();
        want.extend(short_conv_twin(of, &inputs[at * 3 * width..][..n * 3 * width], &taps, &mut state));
        states[to as usize * elements..][..elements].copy_from_slice(&state);
        at += n;
    }
    let error = nmse(&gpu.read::<f32>(&out, want.len()).unwrap(), &want);
    // A few roundings of a sum of up to 16 products.
    assert!(error < 1e-12, "{of:?}, {segments:?}: {error:e}");
    // One rounding of a product each, and copies.
    assert_eq!(gpu.read::<f32>(&gs, states.len()).unwrap(), states, "{of:?}, {segments:?}: states");
}

#[test]
fn short_convolutions_match_their_twin() {
    for gpu in variants() {
        for (width, n_tap) in [(1, 2), (31, 3), (64, 4), (65, 3), (200, 5), (130, MAX_TAPS)] {
            let of = ShortConvSpec { width, n_tap };
            for n in [1, 2, 3, 15, 16, 17, 33, 70] {
                check(gpu, of, &segments(&[&[(n, 0, 1)]]));
                check(gpu, of, &segments(&[&[(n, 2, 1)]]));
            }
            // Sequences side by side.
            check(gpu, of, &segments(&[&[(1, 3, 1)], &[(1, 0, 2)], &[(1, 4, 5)], &[(1, 4, 6)]]));
            // Ends of pages, in place and not, short and long; two go on from one state, which stays.
            check(gpu, of, &segments(&[&[(7, 3, 1), (64, 1, 1), (20, 1, 2), (1, 2, 4)], &[(30, 6, 6), (1, 6, 5)]]));
            check(gpu, of, &segments(&[&[(1, 7, 8), (1, 8, 8), (2, 8, 9)], &[(40, 7, 10), (3, 10, 11)]]));
            check(gpu, of, &segments(&[&[(2, 5, 5), (1, 5, 5), (1, 5, 5), (35, 5, 5), (1, 5, 7)]]));
        }
    }
}

#[test]
fn more_taps_than_a_tile_has_tokens_are_refused() {
    let Some(gpu) = variants().first() else { return };
    let [x, y, z] = [1, 2, 3].map(|_| gpu.buffer("x", 1 << 16).unwrap());
    let [out, table] = [4, 5].map(|_| gpu.buffer("x", 1 << 16).unwrap());
    let buffers = ShortConvBuffers { inputs: &x, taps: &y, states: &z, out: &out, segments: &table };
    for n_tap in [0, 1, MAX_TAPS + 1] {
        let error = short_conv(gpu, ShortConvSpec { width: 8, n_tap }, 2, &buffers).unwrap_err();
        assert!(matches!(error, WgpuError::Mismatch { .. }), "{error}");
    }
}
