//! Queries, keys and values with clamps, norms of all kinds, biases, norms of values and growing scales, and their
//! append to the cache (`attention_inputs.cu`).

use std::sync::Arc;

use super::super::{Expected, assert_close, device, launch, poisoned, random, read};
use super::{EPS, Gate, Setup, Shape, shape};
use crate::CudaDevice;
use crate::args::AttentionInputsArgs;
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::slice::DevicePtr;

/// One norm over all heads of a row: `NORM_OF_ROW` of `attention_inputs.cu`.
const NORM_OF_ROW: u32 = 4;

#[derive(Debug, Clone, Copy)]
struct Inputs {
    /// `LayerNorm`; else `RMSNorm`.
    layer_norm: bool,
    bias: bool,
    clamp: f32,
    /// Negative: no norm of values.
    value_eps: f32,
    /// 0: none.
    growth: f32,
    owns_cache: bool,
}

const PLAIN: Inputs =
    Inputs { layer_norm: false, bias: false, clamp: f32::INFINITY, value_eps: -1.0, growth: 0.0, owns_cache: true };
/// Positions after which the scale of queries grows, and the first one's offset.
const GROWTH: (usize, usize) = (10, 3);

/// Runs of consecutive tokens: sequence, first position, tokens. Sequences of one token, across a page, and within one.
const RUNS: &[(usize, usize, usize)] = &[(1, 0, 1), (3, 62, 4), (0, 127, 1), (2, 7, 5)];

/// `(v - mean) / sqrt(mean((v - mean)^2) + eps)` of `v`, with mean and square of `over`.
fn normed(v: &[f64], over: &[f64], layer_norm: bool, eps: f32) -> Vec<f64> {
    let n = over.len() as f64;
    let mean = if layer_norm { over.iter().sum::<f64>() / n } else { 0.0 };
    let square = over.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
    v.iter().map(|v| (v - mean) / (square + f64::from(eps)).sqrt()).collect()
}

fn check(gpu: &Arc<CudaDevice>, shape: Shape, inputs: Inputs) {
    let what = format!("{shape:?} {inputs:?}");
    let mut setup = Setup::new(gpu, shape, RUNS, false, f32::NAN);
    let Shape { n_head, n_head_kv, dim, .. } = shape;
    let n = setup.tokens.len();
    let biases = [random(21, n_head * dim), random(22, n_head_kv * dim)];
    let bias_buffers = biases.each_ref().map(|v| gpu.upload("bias", v).unwrap());
    let qkv = gpu.upload("qkv", &setup.qkv).unwrap();
    let queries = poisoned(gpu, n * n_head * dim);
    let base = setup.args(&qkv, DevicePtr::NULL, DevicePtr::NULL, 0);
    let [q_bias, k_bias] = bias_buffers.each_ref().map(|v| if inputs.bias { v.ptr() } else { DevicePtr::NULL });
    let args = AttentionInputsArgs {
        inputs: base.inputs,
        q_bias,
        k_bias,
        tokens: base.tokens,
        pages: base.pages,
        k_cache: base.k_cache,
        v_cache: base.v_cache,
        qkv: base.qkv,
        queries: queries.ptr(),
        n_head: base.n_head,
        n_head_kv: base.n_head_kv,
        head_dim: base.head_dim,
        stride: base.stride,
        q_step: base.q_step,
        k_at: base.k_at,
        v_at: base.v_at,
        owns_cache: u32::from(inputs.owns_cache),
        kind: if inputs.layer_norm { 2 } else { 1 },
        clamp: inputs.clamp,
        value_eps: inputs.value_eps,
        growth: inputs.growth,
        growth_length: GROWTH.0 as u32,
        growth_offset: GROWTH.1 as u32,
    };
    let before = [setup.read_cache(0), setup.read_cache(1)];
    let heads = n_head + if inputs.owns_cache { 2 * n_head_kv } else { 0 };
    let grid = LaunchGrid { blocks: [heads.div_ceil(4), n, 1], threads: 128, shared: 16 * dim };
    let kernel = kernels::ATTENTION_INPUTS[usize::from(!shape.f16)];
    launch(gpu, kernel, grid, &args);

    let limit = f64::from(inputs.clamp);
    let clamped = |v: &[f64]| v.iter().map(|v| v.clamp(-limit, limit)).collect::<Vec<_>>();
    // A query (`of` 0) or key (1) head of a token; `row`: all heads of its kind.
    let made = |setup: &Setup, of: usize, head: &[f64], row: &[f64], index: usize, pos: usize| {
        let mut v = clamped(head);
        let norm = |v: &mut Vec<f64>| {
            let over = if shape.norm == NORM_OF_ROW { clamped(row) } else { v.clone() };
            *v = normed(v, &over, inputs.layer_norm, EPS);
            for (i, v) in v.iter_mut().enumerate() {
                let at = if matches!(shape.norm, 2 | NORM_OF_ROW) { index * dim + i } else { i };
                *v *= if shape.norm == 3 { 1.0 } else { f64::from(setup.norms[of][at]) };
                *v += if inputs.bias { f64::from(biases[of][at]) } else { 0.0 };
            }
        };
        if shape.norm != 0 && !shape.norm_after_rope {
            norm(&mut v);
        }
        setup.rotate(&mut v, pos);
        if shape.norm != 0 && shape.norm_after_rope {
            norm(&mut v);
        }
        v
    };
    let part = |setup: &Setup, token: usize, first: usize, n: usize| -> Vec<f64> {
        setup.qkv[token * shape.stride() + first..][..n].iter().map(|v| f64::from(*v)).collect()
    };
    if inputs.owns_cache {
        setup.check_appended(&before, &what, |setup, which, head, token, kv| {
            if which == 1 {
                let head = clamped(head);
                return if inputs.value_eps < 0.0 { head } else { normed(&head, &head, false, inputs.value_eps) };
            }
            let row = part(setup, token, shape.k_at(), n_head_kv * dim);
            made(setup, 1, head, &row, kv, setup.tokens[token].pos as usize)
        });
    } else {
        for (which, before) in before.iter().enumerate() {
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            assert!(setup.read_cache(which).iter().zip(before).all(same), "{what}: the cache of another layer");
        }
    }
    let mut expected = Vec::new();
    for token in 0..n {
        let pos = setup.tokens[token].pos as usize;
        let row = part(&setup, token, 0, shape.k_at());
        let grown = f64::from(inputs.growth)
            * (1.0 + ((setup.tokens[token].position as usize + GROWTH.1) / GROWTH.0) as f64).ln();
        for head in 0..n_head {
            let query = made(&setup, 0, &setup.raw_query(token, head), &row, head, pos);
            expected.extend(query.iter().map(|v| {
                let value = v * f64::from(shape.scale()) * (1.0 + grown);
                Expected { value, error: 1e-6 * value.abs() + 3e-6 * f64::from(shape.scale()) }
            }));
        }
    }
    assert_close(&read(gpu, &queries, expected.len()), &expected, n_head * dim, &format!("{what}: queries"));
}

#[test]
fn attention_inputs() {
    let Some(gpu) = device() else { return };
    let mut case = 0;
    for (n_head, n_head_kv, dim, n_rot) in
        [(1, 1, 5, 0), (3, 1, 33, 32), (4, 2, 64, 24), (6, 3, 80, 80), (2, 2, 256, 256), (5, 1, 512, 510)]
    {
        let plain = Shape { n_rot, ..shape(n_head, n_head_kv, dim) };
        for (norm, norm_after_rope, gated, inputs) in [
            (0, false, false, Inputs { clamp: 1.25, ..PLAIN }),
            (0, false, true, Inputs { growth: 0.1, ..PLAIN }),
            (1, false, true, Inputs { layer_norm: true, bias: true, ..PLAIN }),
            (1, true, false, Inputs { value_eps: 1e-3, growth: 0.2, ..PLAIN }),
            (2, false, false, Inputs { owns_cache: false, ..PLAIN }),
            (2, true, false, Inputs { layer_norm: true, clamp: 2.0, ..PLAIN }),
            (3, true, false, Inputs { value_eps: 1e-6, clamp: 2.5, ..PLAIN }),
            (NORM_OF_ROW, false, false, PLAIN),
            (NORM_OF_ROW, false, false, Inputs { layer_norm: true, bias: true, clamp: 1.5, ..PLAIN }),
        ] {
            case += 1;
            let rotation = if n_rot == 0 { 0 } else { 1 + case % 2 };
            let gate = if gated { Gate::InQueries } else { Gate::None };
            let shape = Shape { norm, norm_after_rope, gate, rotation, f16: case % 3 != 0, ..plain };
            check(&gpu, shape, inputs);
        }
    }
}
