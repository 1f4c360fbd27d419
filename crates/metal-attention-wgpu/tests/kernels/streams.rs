//! The kernels of several residual streams (AltUp of Gemma 3n) against their twins.

use crate::support::{nmse, poisoned, random, run, variants};
use metal_attention_wgpu::kernels::{
    StreamSlice, StreamsBuffers, add_to_idle_streams, add_to_idle_streams_twin, correct_streams, correct_streams_twin,
    predict_streams, predict_streams_twin, stretch, stretch_twin,
};

/// (elements of a row, streams, tokens)
const SHAPES: [(usize, usize, usize); 4] = [(1, 2, 1), (33, 4, 3), (256, 3, 7), (577, 16, 2)];

#[test]
fn streams_match_their_twins() {
    for gpu in variants() {
        for (n, n_streams, n_tokens) in SHAPES {
            let streams = random(1, n_tokens * n_streams * n);
            let (router, x) = (random(2, n_tokens * n_streams), random(3, n_tokens * n));
            let (predict, correct) = (random(4, n_streams * n_streams * n_streams), random(5, n_streams * n_streams));
            let scale = random(6, n);
            let [gr, gp, gc, gscale] = [&router, &predict, &correct, &scale].map(|v| gpu.upload("x", v).unwrap());
            let rows = || streams.chunks(n_streams * n).zip(router.chunks(n_streams)).zip(x.chunks(n));

            let [gs, gx] = [&streams, &x].map(|v| gpu.upload("x", v).unwrap());
            let buffers = StreamsBuffers { router: &gr, matrix: &gp, streams: &gs, x: &gx };
            run(gpu, &[predict_streams(gpu, n, n_streams, &buffers).unwrap()], n_tokens);
            let want: Vec<f32> = rows().flat_map(|((s, r), _)| predict_streams_twin(r, &predict, s)).collect();
            let first = |all: &[f32]| all.chunks(n_streams * n).flat_map(|row| row[..n].to_vec()).collect::<Vec<_>>();
            let error = nmse(&gpu.read::<f32>(&gs, want.len()).unwrap(), &want);
            let error_of_first = nmse(&gpu.read::<f32>(&gx, x.len()).unwrap(), &first(&want));
            assert!(
                error < 1e-11 && error_of_first < 1e-11,
                "predicted, {n}, {n_streams}: {error:e} {error_of_first:e}"
            );

            let [gs, gx] = [&streams, &x].map(|v| gpu.upload("x", v).unwrap());
            let scaled = poisoned(gpu, n_tokens * n);
            let buffers = StreamsBuffers { router: &gr, matrix: &gc, streams: &gs, x: &gx };
            run(gpu, &[correct_streams(gpu, n, n_streams, &buffers, &gscale, &scaled).unwrap()], n_tokens);
            let want: Vec<f32> = rows().flat_map(|((s, r), x)| correct_streams_twin(r, &correct, s, x)).collect();
            let error = nmse(&gpu.read::<f32>(&gs, want.len()).unwrap(), &want);
            let first = first(&want);
            let want_scaled: Vec<f32> = first.iter().enumerate().map(|(i, x)| x * scale[i % n]).collect();
            let error_of_first = nmse(&gpu.read::<f32>(&gx, x.len()).unwrap(), &first)
                .max(nmse(&gpu.read::<f32>(&scaled, x.len()).unwrap(), &want_scaled));
            assert!(
                error < 1e-11 && error_of_first < 1e-11,
                "corrected, {n}, {n_streams}: {error:e} {error_of_first:e}"
            );

            let [gs, gx] = [&streams, &x].map(|v| gpu.upload("x", v).unwrap());
            run(gpu, &[add_to_idle_streams(gpu, n, n_streams, &gs, &gx).unwrap()], n_tokens);
            let want: Vec<f32> = rows().flat_map(|((s, _), x)| add_to_idle_streams_twin(s, x)).collect();
            // Each element is one correctly rounded sum.
            assert_eq!(gpu.read::<f32>(&gs, want.len()).unwrap(), want);
        }
    }
}

#[test]
fn stretch_matches_its_twin() {
    for gpu in variants() {
        for (n, wider, n_tokens) in SHAPES {
            let (a, b) = (random(1, n_tokens * (n + wider)), random(2, n_tokens * n));
            let before = random(3, n_tokens * (2 * n + 1));
            for (with_target, accumulate) in [(true, false), (true, true), (false, false)] {
                let [ga, gb, y] = [&a, &b, &before].map(|v| gpu.upload("x", v).unwrap());
                let from = StreamSlice { buffer: &ga, stride: n + wider, at: wider };
                let target = with_target.then_some(StreamSlice { buffer: &gb, stride: n, at: 0 });
                let to = StreamSlice { buffer: &y, stride: 2 * n + 1, at: n };
                run(gpu, &[stretch(gpu, n, from, target, to, accumulate).unwrap()], n_tokens);
                let mut want = before.clone();
                for (t, row) in want.chunks_mut(2 * n + 1).enumerate() {
                    let a = &a[t * (n + wider) + wider..][..n];
                    let stretched = stretch_twin(a, with_target.then_some(&b[t * n..][..n]));
                    for (y, v) in row[n..2 * n].iter_mut().zip(stretched) {
                        *y = v + if accumulate { *y } else { 0.0 };
                    }
                }
                let error = nmse(&gpu.read::<f32>(&y, want.len()).unwrap(), &want);
                assert!(error < 1e-12, "{n} elements: {error:e}");
            }
        }
    }
}
