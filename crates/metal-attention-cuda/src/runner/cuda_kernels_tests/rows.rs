//! Kernels that take rows one by one: norms (`norm.cu`), activations (`activation.cu`), and the embedding, the scaling of logits and
//! argmax (`ends.cu`). All compute in F32; bounds are some units in the last place of the largest intermediate value.

use std::sync::Arc;

use bytemuck::Zeroable;
use half::f16;
use metal_attention_gguf::TensorType;

use super::super::linear::MANY_ROWS;
use super::{Expected, assert_close, launch, packed_len, pass, poisoned, random, read, tensor, unpacked};
use crate::CudaExecutor;
use crate::args::{ActivationArgs, ArgmaxArgs, EmbeddingArgs, LogitsArgs, MatrixArgs, NormArgs, TokenArgs};
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::matrix::CudaMatrix;
use crate::slice::DevicePtr;

/// The packed rows have to be those of `out`, rounded to F16, and zeros up to whole panels.
pub(super) fn check_packed(packed: &[u16], out: &[f32], n_in: usize, order: u32, what: &str) {
    let (n_rows, padded) = (out.len() / n_in, n_in.next_multiple_of(64));
    for (i, got) in unpacked(packed, padded, n_rows, order).iter().enumerate() {
        let (row, k) = (i / padded, i % padded);
        let expected = if k < n_in { f16::from_f32(out[row * n_in + k]).to_f32() } else { 0.0 };
        assert_eq!(*got, expected, "{what}: packed row {row}, element {k}");
    }
}

#[derive(Debug, Clone, Copy)]
struct Norm {
    n_in: usize,
    n_rows: usize,
    /// 0: none, 1: `RMSNorm`, 2: `LayerNorm`.
    kind: u32,
    bias: bool,
    scale: f32,
    accumulate: bool,
    /// Whether rows are chosen by index.
    indexed: bool,
    /// Whether the result replaces the input.
    in_place: bool,
}

fn check_norm(pass: &mut CudaExecutor, case: Norm) {
    let what = format!("{case:?}");
    let Norm { n_in, n_rows, .. } = case;
    let runner = &mut pass.runner;
    let gpu = Arc::clone(&runner.gpu);
    runner.max_few_tokens = if n_rows.is_multiple_of(2) { 0 } else { usize::MAX };
    let order = runner.packed_layout(n_rows);
    let n_x = if case.indexed { n_rows + 3 } else { n_rows };
    // Rows of different sizes, and not centred.
    let size = |row: usize| [1.0f32, 100.0, 1e-3][row % 3];
    let x: Vec<f32> = random(1, n_x * n_in).iter().enumerate().map(|(i, v)| (v + 0.3) * size(i / n_in)).collect();
    let (weight, bias, before) = (random(2, n_in), random(3, n_in), random(4, n_rows * n_in));
    let indices: Vec<u32> = (0..n_rows).map(|row| ((row * 5 + 2) % n_x) as u32).collect();
    let x_buffer = gpu.upload("x", &x).unwrap();
    let [weight_buffer, bias_buffer] = [&weight, &bias].map(|v| gpu.upload("weights", v).unwrap());
    let out = if case.accumulate { gpu.upload("out", &before).unwrap() } else { poisoned(&gpu, n_rows * n_in) };
    let packed = gpu.upload("packed", &vec![0xffff_u16; packed_len(n_in, order)]).unwrap();
    let index_buffer = gpu.upload("rows", &indices).unwrap();
    let args = NormArgs {
        x: x_buffer.ptr(),
        weight: weight_buffer.ptr(),
        bias: if case.bias { bias_buffer.ptr() } else { DevicePtr::NULL },
        packed: packed.ptr(),
        out: if case.in_place { x_buffer.ptr() } else { out.ptr() },
        rows: if case.indexed { index_buffer.ptr() } else { DevicePtr::NULL },
        n_in: n_in as u32,
        n_token_tiles: 0,
        kind: case.kind,
        eps: 1e-5,
        scale: case.scale,
        accumulate: u32::from(case.accumulate),
    };
    runner.norm(args, n_rows).unwrap();
    let got: Vec<f32> = read(&gpu, if case.in_place { &x_buffer } else { &out }, n_rows * n_in);
    let mut expected = Vec::new();
    for row in 0..n_rows {
        let from = if case.indexed { indices[row] as usize } else { row };
        let x: Vec<f64> = x[from * n_in..][..n_in].iter().map(|v| f64::from(*v)).collect();
        let n = n_in as f64;
        let mean = if case.kind == 2 { x.iter().sum::<f64>() / n } else { 0.0 };
        let squares = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        let factor = if case.kind == 0 { 1.0 } else { 1.0 / (squares + f64::from(1e-5f32)).sqrt() };
        let largest = x.iter().fold(0.0, |a: f64, v| a.max(v.abs())) * factor * f64::from(case.scale.abs());
        for (i, v) in x.iter().enumerate() {
            let mut value = (v - mean) * factor;
            if case.kind != 0 {
                value = value * f64::from(weight[i]) + if case.bias { f64::from(bias[i]) } else { 0.0 };
            }
            value *= f64::from(case.scale);
            if case.accumulate {
                value += f64::from(before[row * n_in + i]);
            }
            expected.push(Expected { value, error: 1e-6 * (largest + value.abs()) + 2e-7 });
        }
    }
    assert_close(&got, &expected, n_in, &what);
    check_packed(&read(&gpu, &packed, packed_len(n_in, order)), &got, n_in, order, &what);
}

#[test]
fn norms() {
    let Some(mut pass) = pass() else { return };
    let plain = Norm {
        n_in: 0,
        n_rows: 1,
        kind: 1,
        bias: false,
        scale: 1.0,
        accumulate: false,
        indexed: false,
        in_place: false,
    };
    for (i, n_in) in [1, 3, 4, 31, 64, 100, 577, 1000, 2048, 8188, 8192, 8193, 8196, 12_290].into_iter().enumerate() {
        for kind in [0, 1, 2] {
            let n_rows = [1, 3, 17, 6, 8][(i + kind as usize) % 5];
            let case = Norm { n_in, n_rows, kind, ..plain };
            check_norm(&mut pass, case);
            check_norm(&mut pass, Norm { bias: kind == 2, scale: 0.75, accumulate: true, ..case });
            check_norm(&mut pass, Norm { bias: true, indexed: true, ..case });
            check_norm(&mut pass, Norm { in_place: true, scale: -2.0, ..case });
        }
    }
    // Enough rows for `norm_many_rows`, where a warp has a row; those of more than 2048 elements stay with `norm_rows`.
    let n_rows = MANY_ROWS * pass.runner.gpu.summary().n_sm + 3;
    for (n_in, kind) in [(4, 2), (100, 1), (768, 2), (2048, 2), (2052, 2), (577, 1)] {
        let case = Norm { n_in, n_rows, kind, ..plain };
        check_norm(&mut pass, Norm { bias: kind == 2, ..case });
        check_norm(&mut pass, Norm { indexed: true, scale: 0.75, accumulate: true, ..case });
    }
}

/// `activation(gate) * up` of a row as `activation.cu` defines it; without `up` its factor is 1.
pub(super) fn activated(activation: u32, parameter: f64, gate: &[f64], up: Option<&[f64]>) -> Vec<f64> {
    let gelu = |v: f64| 0.5 * v * (1.0 + (0.797_884_560_802_865_4 * (v + 0.044_715 * v * v * v)).tanh());
    let mean = gate.iter().sum::<f64>() / gate.len() as f64;
    let variance = gate.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (gate.len().max(2) - 1) as f64;
    let cutoff = mean + parameter * variance.sqrt();
    let one = |(i, v): (usize, &f64)| {
        let up = up.map(|up| up[i]);
        match activation {
            0 => v / (1.0 + (-v).exp()) * up.unwrap_or(1.0),
            1 => gelu(*v) * up.unwrap_or(1.0),
            2 => v.max(0.0).powi(2) * up.unwrap_or(1.0),
            3 => {
                let low = v.min(parameter);
                low / (1.0 + (-1.702 * low).exp()) * up.map_or(1.0, |up| 1.0 + up.clamp(-parameter, parameter))
            }
            5 => (v / (1.0 + (-v).exp())).min(parameter) * up.map_or(1.0, |up| up.clamp(-parameter, parameter)),
            _ => gelu((v - cutoff).max(0.0)) * up.unwrap_or(1.0),
        }
    };
    gate.iter().enumerate().map(one).collect()
}

#[test]
fn activations() {
    let Some(mut pass) = pass() else { return };
    let gpu = Arc::clone(&pass.runner.gpu);
    let runner = &mut pass.runner;
    runner.exact = false;
    for (i, n_ff) in [1, 2, 63, 64, 65, 1000, 2048, 2049, 5000].into_iter().enumerate() {
        for activation in 0..6 {
            for (with_up, n_tokens) in [(true, [5, 17, 1][i % 3]), (false, [2, 8][i % 2])] {
                let what = format!("activation {activation} of {n_tokens} times {n_ff}, up {with_up}");
                runner.max_few_tokens = if i.is_multiple_of(2) { 0 } else { usize::MAX };
                let (order, stride) = (runner.packed_layout(n_tokens), if with_up { 2 * n_ff } else { n_ff });
                let x: Vec<f32> = random(5, n_tokens * stride).iter().map(|v| 6.0 * v).collect();
                let parameter = [0.0, 0.0, 0.0, 3.5, 0.7, 3.5][activation as usize];
                let buffer = gpu.upload("gate and up", &x).unwrap();
                let out = poisoned(&gpu, n_tokens * n_ff);
                let packed = gpu.upload("packed", &vec![0xffff_u16; packed_len(n_ff, order)]).unwrap();
                let args = ActivationArgs {
                    gate: buffer.ptr(),
                    up: if with_up { buffer.slice().skip(n_ff).ptr() } else { DevicePtr::NULL },
                    out: out.ptr(),
                    packed: packed.ptr(),
                    gate_stride: stride as u32,
                    up_stride: stride as u32,
                    n_ff: n_ff as u32,
                    n_token_tiles: 0,
                    activation,
                    parameter,
                };
                runner.activate(args, n_tokens).unwrap();
                let got: Vec<f32> = read(&gpu, &out, n_tokens * n_ff);
                let mut expected = Vec::new();
                for row in x.chunks(stride) {
                    let row: Vec<f64> = row.iter().map(|v| f64::from(*v)).collect();
                    let up = with_up.then(|| &row[n_ff..]);
                    // An error of a cutoff is that of its mean and deviation, of values up to 6.
                    let of_cutoff = if activation == 4 { 6e-5 } else { 0.0 };
                    let values = activated(activation, f64::from(parameter), &row[..n_ff], up);
                    expected.extend(
                        values.iter().map(|&value| Expected { value, error: 2e-6 * value.abs() + 4e-6 + of_cutoff }),
                    );
                }
                assert_close(&got, &expected, n_ff, &what);
                if n_tokens > 4 {
                    check_packed(&read(&gpu, &packed, packed_len(n_ff, order)), &got, n_ff, order, &what);
                }
            }
        }
    }
}

#[test]
fn embeddings_of_every_tensor_type() {
    let Some(mut pass) = pass() else { return };
    let gpu = Arc::clone(&pass.runner.gpu);
    let kernel = kernels::EMBEDDING;
    for (i, &ty) in TensorType::ALL.iter().enumerate() {
        let n_embd = if ty.block_len() == 1 { [33, 1, 300][i % 3] } else { 3 * ty.block_len() };
        let position_type = if n_embd.is_multiple_of(32) { TensorType::Q8_0 } else { TensorType::BF16 };
        let (table, positions) = (tensor(ty, n_embd, 37, 20), tensor(position_type, n_embd, 18, 21));
        let kernels = &mut pass.runner.kernels;
        let on_device = CudaMatrix::new(&gpu, kernels, &table).unwrap();
        let positions_on_device = CudaMatrix::new(&gpu, kernels, &positions).unwrap();
        let (table, positions, types) = (table.to_f32(), positions.to_f32(), random(22, n_embd));
        let type_buffer = gpu.upload("types", &types).unwrap();
        for n_tokens in [1, 13] {
            let with_positions = n_tokens > 1;
            let token = |i: u32| TokenArgs {
                id: (i * 7 + 36) % 37,
                seq: 0,
                pos: 100 + i,
                last: 0,
                position: (i + 5) % 18,
                rope_row: 0,
            };
            let tokens: Vec<_> = (0..n_tokens as u32).map(token).collect();
            let token_buffer = gpu.upload("tokens", &tokens).unwrap();
            let out = poisoned(&gpu, n_tokens * n_embd);
            let args = EmbeddingArgs {
                table: on_device.args(0),
                positions: if with_positions { positions_on_device.args(0) } else { MatrixArgs::zeroed() },
                types: if with_positions { type_buffer.ptr() } else { DevicePtr::NULL },
                rows: DevicePtr::NULL,
                tokens: token_buffer.ptr(),
                x: out.ptr(),
                scale: 3.5,
                n_embd: n_embd as u32,
            };
            let grid = LaunchGrid { blocks: [n_embd.div_ceil(256), n_tokens, 1], threads: 256, shared: 0 };
            launch(&gpu, kernel, grid, &args);
            let mut expected = Vec::new();
            for token in &tokens {
                for k in 0..n_embd {
                    let mut value = 3.5 * f64::from(table[token.id as usize * n_embd + k]);
                    if with_positions {
                        value += f64::from(types[k]) + f64::from(positions[token.position as usize * n_embd + k]);
                    }
                    expected.push(Expected { value, error: 4e-6 });
                }
            }
            assert_close(&read(&gpu, &out, n_tokens * n_embd), &expected, n_embd, &format!("{ty}, {n_tokens} tokens"));
            // Rows in the place of those of the table, without the factor.
            let rows = random(23, n_tokens * n_embd);
            let row_buffer = gpu.upload("rows", &rows).unwrap();
            launch(&gpu, kernel, grid, &EmbeddingArgs { rows: row_buffer.ptr(), ..args });
            for (i, expected) in expected.iter_mut().enumerate() {
                let (token, k) = (tokens[i / n_embd], i % n_embd);
                expected.value += f64::from(rows[i]) - 3.5 * f64::from(table[token.id as usize * n_embd + k]);
            }
            assert_close(&read(&gpu, &out, n_tokens * n_embd), &expected, n_embd, &format!("{ty}, {n_tokens} rows"));
        }
    }
}

#[test]
fn scaled_logits() {
    let Some(pass) = pass() else { return };
    let gpu = &pass.runner.gpu;
    for n in [1, 255, 257, 70_001] {
        for soft_cap in [0.0, 3.0f32] {
            let logits: Vec<f32> = random(30, n).iter().map(|v| 8.0 * v).collect();
            let buffer = gpu.upload("logits", &logits).unwrap();
            let args = LogitsArgs { logits: buffer.ptr(), n: n as u32, scale: 0.7, soft_cap, unused: 0 };
            let grid = LaunchGrid { blocks: [256, 1, 1], threads: 256, shared: 0 };
            launch(gpu, kernels::SCALE_LOGITS, grid, &args);
            let expected = logits.iter().map(|v| {
                let (v, cap) = (f64::from(*v) * f64::from(0.7f32), f64::from(soft_cap));
                let value = if cap == 0.0 { v } else { cap * (v / cap).tanh() };
                Expected { value, error: 1e-6 * (1.0 + value.abs()) }
            });
            assert_close(&read(gpu, &buffer, n), &expected.collect::<Vec<_>>(), n, &format!("cap {soft_cap}"));
        }
    }
}

#[test]
fn argmax() {
    let Some(pass) = pass() else { return };
    let gpu = &pass.runner.gpu;
    let kernel = kernels::ARGMAX;
    let kinds: [fn(usize, f32) -> f32; 7] = [
        |_, v| v,
        // Many equal ones: the lowest id counts.
        |_, v| (2.0 * v).round(),
        |_, v| if v < 0.0 { -0.0 } else { 0.0 },
        |_, _| f32::NAN,
        |i, v| if i.is_multiple_of(3) { f32::NAN } else { -10.0 - v },
        |_, _| f32::NEG_INFINITY,
        |i, v| i as f32 + v,
    ];
    for n_vocab in [1, 2, 31, 255, 256, 257, 4099, 32_003] {
        for (n_rows, blocks, advance) in [(1, 1, false), (1, 128, true), (7, 32, true), (9, 5, false)] {
            let logits: Vec<f32> = (0..n_rows)
                .flat_map(|row| {
                    let kind = kinds[(row + n_rows) % kinds.len()];
                    random(40 + row as u64, n_vocab).into_iter().enumerate().map(move |(i, v)| kind(i, v))
                })
                .collect();
            let tokens: Vec<_> = (0..n_rows as u32)
                .map(|i| TokenArgs { id: 5, seq: i, pos: 10 + i, last: 3, position: 7 + i, rope_row: 20 + i })
                .collect();
            let (logit_buffer, token_buffer) =
                (gpu.upload("logits", &logits).unwrap(), gpu.upload("tokens", &tokens).unwrap());
            let zeros = |bytes: usize| gpu.zeros("argmax", bytes as u64).unwrap();
            let [best, tickets, ids, numbers] =
                [8 * n_rows * blocks, 4 * n_rows, 8 * 16 * n_rows, 4 * n_rows].map(zeros);
            let args = ArgmaxArgs {
                logits: logit_buffer.ptr(),
                n_vocab: n_vocab as u32,
                advance: u32::from(advance),
                best: best.ptr(),
                tickets: tickets.ptr(),
                ids: ids.ptr(),
                tokens: token_buffer.ptr(),
                numbers: numbers.ptr(),
            };
            let grid = LaunchGrid { blocks: [blocks, n_rows, 1], threads: 256, shared: 0 };
            for _ in 0..2 {
                launch(gpu, kernel, grid, &args);
            }
            let highest = |row: &[f32]| {
                let numbers = row.iter().enumerate().filter(|(_, v)| !v.is_nan());
                numbers.fold((0, f32::NAN), |best, (i, v)| if *v <= best.1 { best } else { (i as u32, *v) }).0
            };
            let expected: Vec<u32> = logits.chunks(n_vocab).map(highest).collect();
            let what = format!("{n_rows} rows of {n_vocab}, {blocks} blocks");
            let published: Vec<u64> = read(gpu, &ids, 16 * n_rows);
            let after: Vec<TokenArgs> = read(gpu, &token_buffer, n_rows);
            for (row, id) in expected.into_iter().enumerate() {
                for number in [1, 2] {
                    let found = published[16 * row + number];
                    assert_eq!(found, (number as u64) << 32 | u64::from(id), "{what}: row {row}");
                }
                let token = tokens[row];
                let TokenArgs { seq, pos, last, position, rope_row, .. } = token;
                let next = TokenArgs { id, seq, pos: pos + 2, last, position: position + 2, rope_row: rope_row + 2 };
                let advanced = if advance { next } else { token };
                assert_eq!(after[row], advanced, "{what}: row {row}");
            }
            assert_eq!(read::<u32>(gpu, &numbers, n_rows), vec![2; n_rows], "{what}");
            assert_eq!(read::<u32>(gpu, &tickets, n_rows), vec![0; n_rows], "{what}");
        }
    }
}
