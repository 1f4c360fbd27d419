//! Convolutions within blocks (DFlash-2) against their twin.

use crate::support::{batch_with_pages, nmse, poisoned, random, run_sized, shuffled_pages, variants};
use metal_attention_model::BatchToken;
use metal_attention_wgpu::BatchDims;
use metal_attention_wgpu::kernels::{BlockConvBuffers, BlockConvShape, block_conv, block_conv_twin};

#[test]
fn convolutions_within_blocks_match_their_twin() {
    for gpu in variants() {
        for (n, group_size, n_tap) in [(8, 8, 2), (33, 11, 3), (130, 1, 4), (576, 64, 16)] {
            // Blocks of several sequences, some shorter than the taps.
            for lengths in [&[1][..], &[5], &[2, 1, 6, 1, 17]] {
                let block = |(seq, &n): (usize, &usize)| {
                    (0..n).map(move |i| BatchToken { id: 0, seq, pos: 3 + i, output: true })
                };
                let tokens: Vec<_> = lengths.iter().enumerate().flat_map(block).collect();
                let batch = batch_with_pages(gpu, &tokens, 64, &shuffled_pages(lengths.len(), 64));
                for side in [0, 1] {
                    let shape = BlockConvShape { n, n_tap, group_size, side };
                    let (x, base) = (random(1, tokens.len() * n), random(2, 2 * n_tap * n));
                    let taps = random(3, tokens.len() * shape.n_taps());
                    let [gx, gb, gt] = [&x, &base, &taps].map(|v| gpu.upload("x", v).unwrap());
                    let y = poisoned(gpu, x.len());
                    let buffers = BlockConvBuffers { x: &gx, base: &gb, taps: &gt, y: &y, batch: batch.buffer() };
                    let dispatch = block_conv(gpu, shape, &buffers).unwrap();
                    let n_tokens = tokens.len() as u32;
                    run_sized(gpu, &[dispatch], BatchDims { n_tokens, n_outputs: n_tokens, n_runs: 1, n_splits: 1 });
                    let (mut want, mut at) = (Vec::new(), 0);
                    for &len in lengths {
                        let (x, taps) = (&x[at * n..][..len * n], &taps[at * shape.n_taps()..][..len * shape.n_taps()]);
                        want.extend(block_conv_twin(shape, x, &base, taps));
                        at += len;
                    }
                    let error = nmse(&gpu.read::<f32>(&y, want.len()).unwrap(), &want);
                    // A few roundings of a sum of up to 16 products.
                    assert!(error < 1e-12, "{shape:?}, {lengths:?}: {error:e}");
                }
            }
        }
    }
}
