//! Convolutions within blocks (`block_conv.cu`).

use super::{Expected, assert_close, device, launch, poisoned, random, read};
use crate::args::{BlockConvArgs, TokenArgs};
use crate::kernels;
use crate::launch::LaunchGrid;

#[test]
fn convolutions_within_blocks() {
    let Some(gpu) = device() else { return };
    for (n, group_size, n_tap) in [(8, 8, 2), (33, 11, 3), (258, 1, 4), (576, 64, 16)] {
        // Blocks of several sequences, some shorter than the taps.
        let lengths = [2, 1, 6, 1, 17];
        let token = |seq: u32| TokenArgs { id: 0, seq, pos: 0, last: 0, position: 0, rope_row: 0 };
        let tokens: Vec<_> = (0..).zip(lengths).flat_map(|(seq, n)| vec![token(seq); n]).collect();
        let places: Vec<_> = lengths.into_iter().flat_map(|n| 0..n).collect();
        let (n_tokens, n_taps) = (tokens.len(), n_tap * (n / group_size));
        let (x, base) = (random(1, n_tokens * n), random(2, 2 * n_tap * n));
        let taps = random(3, n_tokens * 2 * n_taps);
        let [x_buffer, base_buffer, taps_buffer] = [&x, &base, &taps].map(|v| gpu.upload("rows", v).unwrap());
        let token_buffer = gpu.upload("tokens", &tokens).unwrap();
        for side in [0, 1] {
            let y = poisoned(&gpu, n_tokens * n);
            let args = BlockConvArgs {
                x: x_buffer.ptr(),
                base: base_buffer.ptr(),
                taps: taps_buffer.ptr(),
                y: y.ptr(),
                tokens: token_buffer.ptr(),
                n: n as u32,
                n_tap: n_tap as u32,
                group_size: group_size as u32,
                side: side as u32,
            };
            let grid = LaunchGrid { blocks: [n.div_ceil(256), n_tokens, 1], threads: 256, shared: 0 };
            launch(&gpu, kernels::BLOCK_CONV, grid, &args);
            let expected = |i: usize| {
                let (t, c) = (i / n, i % n);
                let terms = (0..n_tap.min(places[t] + 1)).map(|k| {
                    let of_token = taps[(2 * t + side) * n_taps + k * (n / group_size) + c / group_size];
                    let tap = f64::from(base[(side * n_tap + k) * n + c]) + f64::from(of_token);
                    tap * f64::from(x[(t - k) * n + c])
                });
                let terms: Vec<f64> = terms.collect();
                let error = 2e-6 * terms.iter().map(|term| term.abs()).sum::<f64>() + 1e-6;
                Expected { value: terms.iter().sum(), error }
            };
            let expected: Vec<_> = (0..n_tokens * n).map(expected).collect();
            let what = format!("{n} channels, groups of {group_size}, {n_tap} taps, side {side}");
            assert_close(&read(&gpu, &y, n_tokens * n), &expected, n, &what);
        }
    }
}
