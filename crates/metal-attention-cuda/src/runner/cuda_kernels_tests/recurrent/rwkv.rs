//! RWKV (`rwkv.cu`): the scans of RWKV-6, of gated linear attention and of RWKV-7, the inputs of RWKV-7's scan, and
//! independent products of a single token.

use std::sync::Arc;

use bytemuck::Zeroable;
use metal_attention_gguf::TensorType;
use metal_attention_model::Segment;

use super::super::super::ModelRunner;
use super::super::super::linear::{WARPS, gemv_shared_bytes};
use super::super::super::recurrence::RecurrenceKernel;
use super::super::products::{dot, odd_width, sum_error};
use super::super::{Expected, assert_close, assert_near, launch, pass, poisoned, random, read, tensor, to_f64};
use super::{SCAN_ERROR, States, batches, n_tokens, random_of, sigmoid};
use crate::CudaExecutor;
use crate::args::{InputFunction, Rwkv6Args, Rwkv7Args, Rwkv7InputsArgs, SideProductArgs, SideProductsArgs};
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::matrix::{CudaMatrix, PANEL};
use crate::slice::DevicePtr;

/// Launches the scan of RWKV-6, or without `bonus` that of gated linear attention.
fn check_rwkv6(pass: &mut CudaExecutor, (n_head, n_kv, dim): (usize, usize, usize), bonus: bool, segments: &[Segment]) {
    let what = format!("{n_head} heads of {dim}, {n_kv} of keys, bonus {bonus}, {segments:?}");
    let (gpu, n, width) = (Arc::clone(&pass.runner.gpu), n_tokens(segments), n_head * dim);
    let states = States::new(&gpu, width * dim, segments);
    let [r, decay] = [1, 2].map(|seed| random_of(2.0, seed, n * width));
    let [k, v] = [3, 4].map(|seed| random(seed, n * n_kv * dim));
    let (decay_bias, bonuses) = (random(5, width), random(6, width));
    let upload = |v: &Vec<f32>| gpu.upload("RWKV-6", v).unwrap();
    let [r_buffer, decay_buffer, k_buffer, v_buffer] = [&r, &decay, &k, &v].map(upload);
    let [bias_buffer, bonus_buffer] = [&decay_bias, &bonuses].map(upload);
    let out = poisoned(&gpu, n * width);
    let batch = states.batch(&pass.spec, &pass.cache, segments);
    let kernel = RecurrenceKernel::RWKV6;
    let args = Rwkv6Args {
        scan: ModelRunner::scan_args(batch, kernel, states.args(0), out.slice(), [n_head, dim, dim]),
        r: r_buffer.ptr(),
        k: k_buffer.ptr(),
        v: v_buffer.ptr(),
        decay: decay_buffer.ptr(),
        decay_bias: bias_buffer.ptr(),
        bonus: if bonus { bonus_buffer.ptr() } else { DevicePtr::NULL },
        n_head_kv: n_kv as u32,
        unused: 0,
    };
    pass.runner.launch_scan(batch, kernel, kernels::RWKV6, &args.scan, &args).unwrap();
    let got: Vec<f32> = read(&gpu, &out, n * width);
    let [r, decay, k, v, decay_bias, bonuses] = [&r, &decay, &k, &v, &decay_bias, &bonuses].map(|v| to_f64(v));
    states.check(segments, &got, [SCAN_ERROR; 2], &what, |token, state| {
        let of_column = |(head, column): (usize, usize)| {
            let (at, at_kv) = (head * dim, (token * n_kv + head / (n_head / n_kv)) * dim);
            let s = &mut state[(at + column) * dim..][..dim];
            let (mut y, value) = (0.0, v[at_kv + column]);
            for i in 0..dim {
                let w = (-(decay[token * width + at + i] + decay_bias[at + i]).exp()).exp();
                let (r, k) = (r[token * width + at + i], k[at_kv + i]);
                if bonus {
                    // out = r (S + diag(u) k^T v); S = diag(w) S + k^T v
                    y += r * (s[i] + bonuses[at + i] * k * value);
                    s[i] = w * s[i] + k * value;
                } else {
                    // S = diag(w) S + ((1 - w) k)^T v; out = r S / sqrt(dim)
                    s[i] = w * s[i] + (1.0 - w) * k * value;
                    y += r * s[i] / (dim as f64).sqrt();
                }
            }
            y
        };
        (0..n_head).flat_map(|head| (0..dim).map(move |column| (head, column))).map(of_column).collect()
    });
}

#[test]
fn rwkv6() {
    let Some(mut pass) = pass() else { return };
    for shape in [(1, 1, 1), (3, 3, 8), (2, 2, 24), (1, 1, 63), (2, 2, 64), (1, 1, 65), (1, 1, 130)] {
        for segments in batches() {
            check_rwkv6(&mut pass, shape, true, &segments);
        }
    }
    check_rwkv6(&mut pass, (1, 1, 256), true, &batches()[1]);
}

#[test]
fn gated_linear_attention() {
    let Some(mut pass) = pass() else { return };
    for shape in [(4, 2, 8), (6, 3, 25), (2, 1, 64), (1, 1, 100)] {
        for segments in batches() {
            check_rwkv6(&mut pass, shape, false, &segments);
        }
    }
}

fn check_rwkv7(pass: &mut CudaExecutor, n_head: usize, dim: usize, segments: &[Segment]) {
    let what = format!("{n_head} heads of {dim}, {segments:?}");
    let (gpu, n, width) = (Arc::clone(&pass.runner.gpu), n_tokens(segments), n_head * dim);
    let states = States::new(&gpu, width * dim, segments);
    let [r, k, v] = [1, 2, 3].map(|seed| random(seed, n * width));
    let decay: Vec<f32> = random(4, n * width).iter().map(|v| 0.75 + 0.2 * v).collect();
    // Of length 1 and at most 1, as in the model, so that states do not grow.
    let directions = random(5, n * width);
    let unit = |head: &[f32]| head.iter().map(|v| v * v).sum::<f32>().sqrt();
    let a: Vec<f32> = directions.chunks(dim).flat_map(|head| head.iter().map(|v| v / unit(head))).collect();
    let b: Vec<f32> = a.iter().zip(random(6, n * width)).map(|(a, v)| -a * v.abs()).collect();
    let upload = |v: &Vec<f32>| gpu.upload("RWKV-7", v).unwrap();
    let [r_buffer, k_buffer, v_buffer, decay_buffer, a_buffer, b_buffer] = [&r, &k, &v, &decay, &a, &b].map(upload);
    let out = poisoned(&gpu, n * width);
    let batch = states.batch(&pass.spec, &pass.cache, segments);
    let kernel = RecurrenceKernel::RWKV7;
    let args = Rwkv7Args {
        scan: ModelRunner::scan_args(batch, kernel, states.args(0), out.slice(), [n_head, dim, dim]),
        r: r_buffer.ptr(),
        decay: decay_buffer.ptr(),
        k: k_buffer.ptr(),
        v: v_buffer.ptr(),
        a: a_buffer.ptr(),
        b: b_buffer.ptr(),
    };
    pass.runner.launch_scan(batch, kernel, kernels::RWKV7, &args.scan, &args).unwrap();
    let got: Vec<f32> = read(&gpu, &out, n * width);
    let [r, k, v, decay, a, b] = [&r, &k, &v, &decay, &a, &b].map(|v| to_f64(v));
    // S = diag(w) S + b^T (a S) + k^T v; out = r S
    states.check(segments, &got, [SCAN_ERROR; 2], &what, |token, state| {
        let of_column = |(head, column): (usize, usize)| {
            let at = token * width + head * dim;
            let s = &mut state[(head * dim + column) * dim..][..dim];
            let removed: f64 = s.iter().zip(&a[at..]).map(|(s, a)| s * a).sum();
            let mut y = 0.0;
            for i in 0..dim {
                s[i] = decay[at + i] * s[i] + b[at + i] * removed + k[at + i] * v[at + column];
                y += r[at + i] * s[i];
            }
            y
        };
        (0..n_head).flat_map(|head| (0..dim).map(move |column| (head, column))).map(of_column).collect()
    });
}

#[test]
fn rwkv7() {
    let Some(mut pass) = pass() else { return };
    for (n_head, dim) in [(1, 1), (3, 8), (2, 24), (1, 63), (2, 64), (1, 65), (1, 130)] {
        for segments in batches() {
            check_rwkv7(&mut pass, n_head, dim, &segments);
        }
    }
    check_rwkv7(&mut pass, 1, 256, &batches()[1]);
}

#[test]
fn rwkv7_inputs() {
    let Some(pass) = pass() else { return };
    let gpu = &pass.runner.gpu;
    for (n_head, dim, n_tokens) in [(1, 1, 1), (3, 8, 2), (4, 33, 3), (5, 64, 1), (9, 31, 2), (2, 130, 2)] {
        for is_first in [true, false] {
            let what = format!("{n_tokens} tokens of {n_head} heads of {dim}, first layer {is_first}");
            let (width, n) = (n_head * dim, n_tokens * n_head * dim);
            let given = [1, 2, 3, 4].map(|seed| random_of(2.0, seed, n));
            let of_layer = [5, 6, 7, 8, 9].map(|seed| random(seed, width));
            let (first, mix) = (random(10, n), random_of(2.0, 11, n));
            let upload = |v: &Vec<f32>| gpu.upload("RWKV-7", v).unwrap();
            let [decay, rate, k, v] = given.each_ref().map(upload);
            let [decay_bias, rate_bias, removed, kept, value_bias] = of_layer.each_ref().map(upload);
            let first_value = if is_first { poisoned(gpu, n) } else { upload(&first) };
            let (value_mix, kappa) = (upload(&mix), poisoned(gpu, n));
            let args = Rwkv7InputsArgs {
                decay: decay.ptr(),
                rate: rate.ptr(),
                k: k.ptr(),
                v: v.ptr(),
                kappa: kappa.ptr(),
                decay_bias: decay_bias.ptr(),
                rate_bias: rate_bias.ptr(),
                removed: removed.ptr(),
                kept: kept.ptr(),
                first_value: first_value.ptr(),
                value_mix: if is_first { DevicePtr::NULL } else { value_mix.ptr() },
                value_bias: if is_first { DevicePtr::NULL } else { value_bias.ptr() },
                n_head: n_head as u32,
                head_dim: dim as u32,
            };
            let grid = LaunchGrid { blocks: [n_head.div_ceil(4), n_tokens, 1], threads: 128, shared: 0 };
            launch(gpu, kernels::RWKV7_INPUTS, grid, &args);
            let given = given.each_ref().map(|v| to_f64(v));
            let of_layer = of_layer.each_ref().map(|v| to_f64(v));
            // decay, rate, key, value, minus the normalised key
            let mut expected: [Vec<f64>; 5] = Default::default();
            for at in (0..n).step_by(dim) {
                let removed_key = |i: usize| given[2][at + i] * of_layer[2][(at + i) % width];
                let length = (0..dim).map(|i| removed_key(i).powi(2)).sum::<f64>().sqrt();
                for i in 0..dim {
                    let (token, channel) = (at + i, (at + i) % width);
                    let unit = removed_key(i) / length;
                    let rate = sigmoid(given[1][token] + of_layer[1][channel]);
                    let v = given[3][token];
                    let mixed = (f64::from(first[token]) - v) * sigmoid(f64::from(mix[token]) + of_layer[4][channel]);
                    let decay = (-(-0.5f64).exp() * sigmoid(given[0][token] + of_layer[0][channel])).exp();
                    expected[0].push(decay);
                    expected[1].push(unit * rate);
                    expected[2].push(given[2][token] * (1.0 + (rate - 1.0) * of_layer[3][channel]));
                    expected[3].push(if is_first { v } else { v + mixed });
                    expected[4].push(-unit);
                }
            }
            for (i, (buffer, expected)) in [&decay, &rate, &k, &v, &kappa].into_iter().zip(&expected).enumerate() {
                assert_near(&read(gpu, buffer, n), expected, dim, 1e-6, &format!("{what}: result {i}"));
            }
            let kept_values: Vec<f32> = read(gpu, &first_value, n);
            let expected: Vec<f32> = if is_first { read(gpu, &v, n) } else { first };
            assert_eq!(kept_values, expected, "{what}: the first layer's values");
        }
    }
}

/// Matrices of up to eight products, with the functions of their inputs, in one launch. `share`: how blocks and warps
/// are divided.
fn check_side_products(pass: &mut CudaExecutor, shapes: &[(TensorType, usize, usize, InputFunction)], share: usize) {
    let what = format!("{shapes:?}, division {share}");
    let gpu = Arc::clone(&pass.runner.gpu);
    let kernels = &mut pass.runner.kernels;
    let mut args = SideProductsArgs::zeroed();
    let (mut n_blocks, mut shared, mut all) = (0, 0, Vec::new());
    for (i, &(ty, n_in, n_out, function)) in shapes.iter().enumerate() {
        let weights = tensor(ty, n_in, n_out, 30 + i as u64);
        let matrix = CudaMatrix::new(&gpu, kernels, &weights).unwrap();
        let x = random_of(2.0, 40 + i as u64, n_in);
        let (x_buffer, y) = (gpu.upload("x", &x).unwrap(), poisoned(&gpu, n_out));
        let n_panels = n_in.div_ceil(PANEL);
        let max_warps = (n_panels / 4).clamp(1, WARPS);
        let warps_per_tile = [1, 2, 4, 8][(share + i) % 4].min(1 << max_warps.ilog2());
        let groups = matrix.n_tiles().div_ceil(WARPS / warps_per_tile);
        n_blocks += groups.div_ceil(1 + share % 3);
        shared = shared.max(gemv_shared_bytes([matrix.layout].into_iter(), n_panels, 1));
        args.products[i] = SideProductArgs {
            matrix: matrix.args(0),
            x: x_buffer.ptr(),
            y: y.ptr(),
            n_in: n_in as u32,
            end: n_blocks as u32,
            warps_per_tile: warps_per_tile as u32,
            function: function as u32,
        };
        all.push((weights, matrix, x, x_buffer, y));
    }
    let grid = LaunchGrid { blocks: [n_blocks, 1, 1], threads: 32 * WARPS, shared };
    launch(&gpu, kernels::SIDE_PRODUCTS, grid, &args);
    for (i, ((weights, _, x, _, y), &(_, n_in, n_out, function))) in all.iter().zip(shapes).enumerate() {
        let x: Vec<f64> = to_f64(x)
            .into_iter()
            .map(|x| match function {
                InputFunction::AsItLies => x,
                InputFunction::Tanh => x.tanh(),
                InputFunction::Sigmoid => sigmoid(x),
            })
            .collect();
        let expected: Vec<_> = weights
            .to_f32()
            .chunks(n_in)
            .map(|row| {
                let (value, size) = dot(row, &x);
                Expected { value, error: sum_error(n_in) * size }
            })
            .collect();
        assert_close(&read(&gpu, y, n_out), &expected, n_out, &format!("{what}: product {i}"));
    }
}

#[test]
fn side_products() {
    use InputFunction::{AsItLies, Sigmoid, Tanh};
    use TensorType::{BF16, F16, F32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0};
    let Some(mut pass) = pass() else { return };
    for share in 0..4 {
        check_side_products(&mut pass, &[(F32, 4, 1, Tanh)], share);
        // The largest input with a function, and sizes that are no multiples of a tile or panel.
        check_side_products(
            &mut pass,
            &[(F16, 1024, 33, Sigmoid), (F32, 60, 15, Tanh), (Q8_0, 1056, 17, AsItLies), (Q4_K, 256, 130, AsItLies)],
            share,
        );
        let types = [F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K];
        let functions = [Sigmoid, AsItLies, Tanh];
        let shapes: Vec<_> = types
            .into_iter()
            .enumerate()
            .map(|(i, ty)| (ty, odd_width(ty), [37, 1, 16, 47, 129][(i + share) % 5], functions[(i + share) % 3]))
            .collect();
        check_side_products(&mut pass, &shapes, share);
    }
}
