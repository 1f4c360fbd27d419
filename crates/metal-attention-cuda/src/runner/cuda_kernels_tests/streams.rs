//! Several residual streams (`streams.cu`): prediction, correction, the addition to idle streams, and the rescaling of
//! rows to the norm of others.

use super::{Expected, assert_close, assert_near, device, launch, poisoned, random, read, to_f64};
use crate::args::{StreamsArgs, StretchArgs};
use crate::kernels::{self, EntryPoint};
use crate::launch::LaunchGrid;
use crate::slice::DevicePtr;

/// Elements of a row, streams, tokens.
const SHAPES: [(usize, usize, usize); 5] = [(1, 2, 1), (33, 4, 3), (256, 3, 7), (257, 5, 1), (577, 8, 2)];

/// The largest error relative to the root mean square: sums of up to 72 products.
const ERROR: f64 = 2e-6;

#[test]
fn streams() {
    let Some(gpu) = device() else { return };
    for (n, n_streams, n_tokens) in SHAPES {
        let what = format!("{n_streams} streams of {n} elements, {n_tokens} tokens");
        let streams = random(1, n_tokens * n_streams * n);
        let (router, x, scale) = (random(2, n_tokens * n_streams), random(3, n_tokens * n), random(6, n));
        let (predict, correct) = (random(4, n_streams * n_streams * n_streams), random(5, n_streams * n_streams));
        let upload = |v: &Vec<f32>| gpu.upload("streams", v).unwrap();
        let [router_buffer, predict_buffer, correct_buffer, scale_buffer] =
            [&router, &predict, &correct, &scale].map(upload);
        let grid = LaunchGrid { blocks: [n.div_ceil(256), n_tokens, 1], threads: 256, shared: 0 };
        // Runs a kernel; returns streams, x and the scaled x.
        let run = |entry: EntryPoint<StreamsArgs>, matrix: DevicePtr<f32>| {
            let (stream_buffer, x_buffer, scaled) = (upload(&streams), upload(&x), poisoned(&gpu, n_tokens * n));
            let args = StreamsArgs {
                router: router_buffer.ptr(),
                matrix,
                streams: stream_buffer.ptr(),
                x: x_buffer.ptr(),
                scale: scale_buffer.ptr(),
                scaled: scaled.ptr(),
                n: n as u32,
                n_streams: n_streams as u32,
            };
            launch(&gpu, entry, grid, &args);
            [(&stream_buffer, streams.len()), (&x_buffer, x.len()), (&scaled, x.len())]
                .map(|(buffer, n)| read::<f32>(&gpu, buffer, n))
        };
        let old = |token: usize, i: usize, e: usize| f64::from(streams[(token * n_streams + i) * n + e]);
        let factors = |token: usize, matrix: &[f32]| -> f64 {
            let inputs = &router[token * n_streams..][..n_streams];
            matrix.iter().zip(inputs).map(|(m, r)| f64::from(*m) * f64::from(*r).tanh()).sum()
        };
        // The twin's streams, from a function of token, stream and element.
        let all = |of: &dyn Fn(usize, usize, usize) -> f64| -> Vec<f64> {
            let places = (0..n_tokens).flat_map(|t| (0..n_streams).flat_map(move |i| (0..n).map(move |e| (t, i, e))));
            places.map(|(t, i, e)| of(t, i, e)).collect()
        };
        let first = |all: &[f32]| -> Vec<f32> { all.chunks(n_streams * n).flat_map(|row| row[..n].to_vec()).collect() };

        let [got, got_x, _] = run(kernels::PREDICT_STREAMS, predict_buffer.ptr());
        let expected = all(&|token, i, e| {
            let sum: f64 = (0..n_streams)
                .map(|j| factors(token, &predict[(i * n_streams + j) * n_streams..][..n_streams]) * old(token, j, e))
                .sum();
            old(token, i, e) + sum
        });
        assert_near(&got, &expected, n, ERROR, &format!("{what}: predicted"));
        assert_eq!(got_x, first(&got), "{what}: x after the prediction");

        let [got, got_x, scaled] = run(kernels::CORRECT_STREAMS, correct_buffer.ptr());
        let expected = all(&|token, i, e| {
            let innovation = f64::from(x[token * n + e]) - old(token, 0, e);
            old(token, i, e) + innovation * (1.0 + factors(token, &correct[i * n_streams..][..n_streams]))
        });
        assert_near(&got, &expected, n, ERROR, &format!("{what}: corrected"));
        assert_eq!(got_x, first(&got), "{what}: x after the correction");
        let products: Vec<f32> = got_x.iter().enumerate().map(|(i, x)| x * scale[i % n]).collect();
        assert_eq!(scaled, products, "{what}: scaled");

        let [got, got_x, _] = run(kernels::ADD_TO_IDLE_STREAMS, DevicePtr::NULL);
        let sums = streams.iter().enumerate().map(|(i, v)| {
            let (token, stream, e) = (i / (n_streams * n), i / n % n_streams, i % n);
            if stream == 0 { *v } else { v + x[token * n + e] }
        });
        assert_eq!(got, sums.collect::<Vec<_>>(), "{what}: idle streams");
        assert_eq!(got_x, x, "{what}: x after the addition");
    }
}

#[test]
fn stretched_rows() {
    let Some(gpu) = device() else { return };
    for (n, wider, n_rows) in SHAPES {
        let (stride, goal_stride, y_stride) = (n + wider, n + 1, 2 * n + 1);
        let (a, goal) = (random(1, n_rows * stride), random(2, n_rows * goal_stride));
        let before = random(3, n_rows * y_stride);
        let [a_buffer, goal_buffer] = [&a, &goal].map(|v| gpu.upload("rows", v).unwrap());
        for (with_goal, accumulate, scale) in [(true, false, 1.0f32), (true, true, 0.5), (false, false, -3.0)] {
            let y = gpu.upload("rows", &before).unwrap();
            let args = StretchArgs {
                a: a_buffer.slice().skip(wider).ptr(),
                goal: if with_goal { goal_buffer.slice().skip(1).ptr() } else { DevicePtr::NULL },
                y: y.slice().skip(n).ptr(),
                n: n as u32,
                a_stride: stride as u32,
                goal_stride: goal_stride as u32,
                y_stride: y_stride as u32,
                accumulate: u32::from(accumulate),
                scale,
            };
            let grid = LaunchGrid { blocks: [n_rows, 1, 1], threads: 256, shared: 0 };
            launch(&gpu, kernels::STRETCH, grid, &args);
            let mut expected: Vec<_> = before.iter().map(|v| Expected { value: f64::from(*v), error: 0.0 }).collect();
            for row in 0..n_rows {
                let a = to_f64(&a[row * stride + wider..][..n]);
                let goal = to_f64(&goal[row * goal_stride + 1..][..n]);
                let norm = |v: &[f64]| v.iter().map(|v| v * v).sum::<f64>().sqrt();
                let factor = f64::from(scale) * if with_goal { norm(&goal) / norm(&a) } else { 1.0 };
                for (to, v) in expected[row * y_stride + n..][..n].iter_mut().zip(a) {
                    let value = factor * v + if accumulate { to.value } else { 0.0 };
                    *to = Expected { value, error: 6e-7 * (factor * v).abs() + 1e-7 * value.abs() };
                }
            }
            let what = format!("{n_rows} rows of {n}, goal {with_goal}, add {accumulate}");
            assert_close(&read(&gpu, &y, before.len()), &expected, y_stride, &what);
        }
    }
}
