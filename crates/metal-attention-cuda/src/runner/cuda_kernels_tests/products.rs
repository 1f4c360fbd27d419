//! `y = W x`: repacking of every tensor type; the GEMV (`matvec.cu`, `matvec_rows` of `grouped_matvec.cu`) and `odd_rows.cu` with
//! F32 inputs; the GEMMs (`matmul_few.cu`, `matmul_wide.cu`, `matmul.cu`) with packed F16 inputs.
//!
//! An error is stated relative to `sqrt(sum (w x)^2)`, the size of a sum of terms of random sign. A wrong element, row or token
//! is off by about 1 in this measure.

use std::sync::Arc;

use metal_attention_gguf::{Tensor, TensorType};

use super::super::linear::{LinearInput, LinearOp};
use super::super::matmul_wide::{WideOutput, WideProduct};
use super::{
    Expected, WIDE, assert_close, launch, packed, packed_len, pass, poisoned, random, read, rounded, tensor, unpacked,
};
use crate::CudaExecutor;
use crate::args::{ElementsFunction, Epilogue, MatmulArgs, ResultRowsArgs};
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::matrix::{CudaMatrix, WeightLayout};
use crate::slice::DevicePtr;

/// Sums of `n_in` terms in F32, whose roundings (2^-24 of the partial sum) have random signs. In addition, inputs of the GEMV are digits of
/// 24 bits, or two F16 parts; of the GEMM they are rounded to F16 in the twin, too, as are weights.
pub(super) fn sum_error(n_in: usize) -> f64 {
    2e-6 + 4.0 * (n_in as f64).sqrt() / f64::from(1 << 24)
}

/// In addition, for 8-bit codes with F32 scales, whose weights are rounded to F32 before F16: some round to the other neighbour, 2^-11 of
/// one of hundreds of terms.
const CODES_ERROR: f64 = 1e-4;
/// Weights of K-quants are a code times a scale, minus a minimum, each rounded to F16 (2^-11): the twin knows only the exact value.
const K_QUANT_ERROR: f64 = 6e-3;

/// The error of the GEMM's weights of a type, in addition to that of the sum.
pub(super) fn layout_error(ty: TensorType) -> f64 {
    match WeightLayout::of(ty) {
        WeightLayout::Q4K | WeightLayout::Q5K | WeightLayout::Q6K => K_QUANT_ERROR,
        WeightLayout::Codes | WeightLayout::CodesAndMins => CODES_ERROR,
        WeightLayout::F16 | WeightLayout::Q8_0 | WeightLayout::Q4_0 | WeightLayout::F32 => 0.0,
    }
}

/// What is computed.
#[derive(Debug, Clone, Copy)]
struct Case {
    n_in: usize,
    n_tokens: usize,
    epilogue: Epilogue,
    activation: u32,
    bias: bool,
    norm: bool,
}

const PLAIN: Case = Case { n_in: 0, n_tokens: 1, epilogue: Epilogue::Store, activation: 0, bias: false, norm: false };

/// A kernel, or several that the runner chooses from by the number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernels {
    /// `matvec_1` to `matvec_4`, `matvec_rows`, or `odd_rows`.
    Gemv,
    /// `matmul_few_..`.
    Few,
    /// `matmul_wide_..`.
    Wide,
    /// `matmul_..`, which the runner does not launch on a device with warpgroup instructions.
    Plain,
}

/// The activation by its number, as `activate` of `kernels/common.cuh`.
pub(super) fn activate(activation: u32, v: f64) -> f64 {
    match activation {
        0 => v / (1.0 + (-v).exp()),
        1 => 0.5 * v * (1.0 + (0.797_884_560_802_865_4 * (v + 0.044_715 * v * v * v)).tanh()),
        _ => v.max(0.0) * v.max(0.0),
    }
}

/// The sum of the products, and its size.
pub(super) fn dot(w: &[f32], x: &[f64]) -> (f64, f64) {
    let terms = w.iter().zip(x).map(|(w, x)| f64::from(*w) * x);
    let (sum, squares) = terms.fold((0.0, 0.0), |(sum, squares), term| (sum + term, squares + term * term));
    (sum, squares.sqrt())
}

/// Launches the product of matrices of `shapes` (type and rows), one below the other or gate and up, and compares the result.
fn check(pass: &mut CudaExecutor, kernels: Kernels, shapes: &[(TensorType, usize)], case: Case) {
    let Case { n_in, n_tokens, epilogue, activation, .. } = case;
    let what = format!("{kernels:?} of {shapes:?} {case:?}");
    let gpu = Arc::clone(&pass.runner.gpu);
    let runner = &mut pass.runner;
    runner.exact = kernels == Kernels::Gemv;
    runner.max_few_tokens = if kernels == Kernels::Few { usize::MAX } else { 0 };
    let tensors: Vec<_> =
        shapes.iter().enumerate().map(|(i, &(ty, n_out))| tensor(ty, n_in, n_out, 7 + i as u64)).collect();
    let matrices: Vec<_> =
        tensors.iter().map(|tensor| CudaMatrix::new(&gpu, &mut runner.kernels, tensor).unwrap()).collect();
    let gated = epilogue == Epilogue::Gated;
    let n_out = if gated { shapes[0].1 } else { shapes.iter().map(|(_, n)| n).sum() };

    let (x, gain, bias, before) =
        (random(1, n_tokens * n_in), random(2, n_in), random(3, n_out), random(4, n_tokens * n_out));
    let (x_rows, gain_vector, bias_vector) =
        (gpu.upload("x", &x).unwrap(), gpu.upload("norm", &gain).unwrap(), gpu.upload("bias", &bias).unwrap());
    let y =
        if epilogue == Epilogue::Add { gpu.upload("y", &before).unwrap() } else { poisoned(&gpu, n_tokens * n_out) };
    let order = n_tokens.div_ceil(8) as u32;
    let x_packed = gpu.upload("x", &packed(&x, n_in, order | if kernels == Kernels::Wide { WIDE } else { 0 })).unwrap();
    // As F16 halves; the layout of gated results is that of the product that reads them, which the wide kernel has, too.
    let y_order = order | if kernels == Kernels::Wide { WIDE } else { 0 };
    let y_packed = gpu.upload("y", &vec![0xffff_u16; packed_len(n_out, y_order)]).unwrap();
    let op = LinearOp {
        label: "test",
        matrices: matrices
            .iter()
            .scan(0, |first, matrix| {
                *first += if gated { 0 } else { matrix.n_rows };
                Some((matrix, *first - if gated { 0 } else { matrix.n_rows }))
            })
            .collect(),
        n_out,
        epilogue,
        activation,
        scale: 0.75,
        bias: if case.bias { bias_vector.ptr() } else { DevicePtr::NULL },
        y: y.slice(),
        packed: y_packed.ptr(),
    };
    let eps = 1e-5;
    match kernels {
        Kernels::Gemv => {
            let norm = if case.norm { gain_vector.ptr() } else { DevicePtr::NULL };
            runner.product(&op, LinearInput::Rows { x: x_rows.slice(), norm, eps }, n_in, n_tokens).unwrap();
        }
        Kernels::Few | Kernels::Wide => {
            runner.product(&op, LinearInput::Packed(x_packed.slice()), n_in, n_tokens).unwrap();
        }
        Kernels::Plain => {
            let pairs = if gated { vec![[0, 1]] } else { (0..matrices.len()).map(|i| [i, i]).collect() };
            for [a, b] in pairs {
                let args = MatmulArgs {
                    a: matrices[a].args(op.matrices[a].1),
                    b: matrices[b].args(0),
                    x: x_packed.ptr(),
                    n_tokens: n_tokens as u32,
                    n_token_tiles: order,
                    n_out: n_out as u32,
                    output: epilogue as u32,
                    activation,
                    scale: op.scale,
                    bias: op.bias,
                    y: op.y.ptr(),
                    packed: op.packed,
                    y_token_tiles: order,
                    unused: 0,
                };
                let rows = matrices[a].n_tiles().div_ceil(if gated { 4 } else { 8 });
                let blocks = [(order as usize).div_ceil(16), rows, 1];
                let kernel = kernels::MATMUL[matrices[a].layout as usize];
                let grid = LaunchGrid { blocks, threads: 256, shared: 4 * 16 * 1024 };
                launch(&gpu, kernel, grid, &args);
            }
        }
    }
    let packed_result = gated && kernels != Kernels::Gemv;
    let got = if packed_result {
        unpacked(&read(&gpu, &y_packed, packed_len(n_out, y_order)), n_out, n_tokens, y_order)
    } else {
        read(&gpu, &y, n_tokens * n_out)
    };

    // Of each row of each matrix, its elements as the kernel has them, and the relative error of a sum.
    let rows: Vec<(Vec<f32>, f64)> = tensors
        .iter()
        .flat_map(|tensor| {
            let of_layout = layout_error(tensor.ty());
            let error = sum_error(n_in) + if kernels == Kernels::Gemv { 0.0 } else { of_layout };
            let round = kernels != Kernels::Gemv && of_layout < K_QUANT_ERROR;
            let values: Vec<f32> = tensor.to_f32().iter().map(|v| if round { rounded(*v) } else { *v }).collect();
            values.chunks(n_in).map(|row| (row.to_vec(), error)).collect::<Vec<_>>()
        })
        .collect();
    let mut expected = Vec::new();
    for (token, x) in x.chunks(n_in).enumerate() {
        let squares: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
        let rms = 1.0 / (squares / n_in as f64 + f64::from(eps)).sqrt();
        let input = |(x, gain): (&f32, &f32)| match kernels {
            Kernels::Gemv if case.norm => f64::from(*x) * rms * f64::from(*gain),
            Kernels::Gemv => f64::from(*x),
            Kernels::Few | Kernels::Wide | Kernels::Plain => f64::from(rounded(*x)),
        };
        let x: Vec<f64> = x.iter().zip(&gain).map(input).collect();
        for row in 0..n_out {
            let product = |row: usize| {
                let (w, error) = &rows[row];
                let (value, size) = dot(w, &x);
                Expected { value, error: error * size }
            };
            let one = product(row);
            let bias = if case.bias { f64::from(bias[row]) } else { 0.0 };
            let before = f64::from(before[token * n_out + row]);
            expected.push(match epilogue {
                Epilogue::Store => Expected { value: one.value + bias, error: one.error + 1e-6 * bias.abs() },
                Epilogue::Add => Expected {
                    value: before + 0.75 * (one.value + bias),
                    error: one.error + 1e-6 * (bias.abs() + before.abs()),
                },
                Epilogue::Gated => {
                    let up = product(n_out + row);
                    let gate = activate(activation, one.value);
                    let value = gate * up.value;
                    // The slope of SiLU and GELU is at most 1.13, that of the squared ReLU 2 v; results of GEMMs are F16.
                    let slope = 1.2f64.max(2.0 * one.value.abs());
                    let of_result = if packed_result { 1.0 / 2048.0 } else { 1e-6 };
                    let error = slope * one.error * (up.value.abs() + up.error) + gate.abs() * up.error;
                    Expected { value, error: error + of_result * value.abs() + 1e-7 * up.value.abs() }
                }
            });
        }
    }
    assert_close(&got, &expected, n_out, &what);
}

/// A number of columns for a type: not a multiple of a panel where its blocks allow.
pub(super) fn odd_width(ty: TensorType) -> usize {
    match ty.block_len() {
        1 => 132,
        n => 3 * n,
    }
}

#[test]
fn gemv_of_every_tensor_type_and_one_to_nine_tokens() {
    let Some(mut pass) = pass() else { return };
    for &ty in TensorType::ALL {
        for n_tokens in [1, 2, 3, 4, 9] {
            let case = Case { n_in: odd_width(ty), n_tokens, ..PLAIN };
            check(&mut pass, Kernels::Gemv, &[(ty, 37)], case);
        }
    }
}

#[test]
fn gemv_of_awkward_shapes() {
    use TensorType::{BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0};
    let Some(mut pass) = pass() else { return };
    for (ty, n_in, n_out) in [
        (F32, 4, 1),
        (F32, 60, 15),
        (F32, 2048, 31),
        (F16, 36, 16),
        (F16, 68, 17),
        (BF16, 76, 49),
        (Q8_0, 32, 1),
        (Q8_0, 1536, 31),
        (Q4_0, 32, 127),
        (Q4_0, 576, 576),
        (Q4_0, 1056, 33),
        (Q4_1, 96, 129),
        (Q4_K, 256, 1),
        (Q4_K, 2304, 65),
        (Q5_K, 1280, 47),
        (Q6_K, 2048, 65),
        (Q6_K, 8192, 5),
    ] {
        for n_tokens in [1, 4, 13] {
            check(&mut pass, Kernels::Gemv, &[(ty, n_out)], Case { n_in, n_tokens, ..PLAIN });
        }
    }
}

/// Norm prologue, bias, addition, gates, and several matrices in one launch.
fn check_epilogues(kernels: Kernels, tokens: &[usize]) {
    use TensorType::{F16, F32, Q4_0, Q4_K, Q5_0, Q6_K, Q8_0};
    let Some(mut pass) = pass() else { return };
    for &n_tokens in tokens {
        for (i, ty) in [F32, F16, Q8_0, Q4_0, Q4_K, Q6_K, Q5_0].into_iter().enumerate() {
            let case = Case { n_in: 256 * (1 + i % 2), n_tokens, norm: kernels == Kernels::Gemv, ..PLAIN };
            check(&mut pass, kernels, &[(ty, 33)], Case { bias: true, ..case });
            check(&mut pass, kernels, &[(ty, 50)], Case { epilogue: Epilogue::Add, bias: i.is_multiple_of(2), ..case });
            let gated = Case { epilogue: Epilogue::Gated, activation: i as u32 % 3, ..case };
            check(&mut pass, kernels, &[(ty, 71), (ty, 71)], gated);
        }
        let case = Case { n_in: 256, n_tokens, bias: true, ..PLAIN };
        check(&mut pass, kernels, &[(Q4_0, 98), (Q8_0, 32), (F32, 33)], case);
        check(&mut pass, kernels, &[(Q6_K, 1), (Q4_K, 17)], case);
    }
}

#[test]
fn gemv_epilogues() {
    check_epilogues(Kernels::Gemv, &[1, 2, 3, 4, 5, 8]);
}

/// Rows that are not a multiple of four elements.
#[test]
fn odd_rows() {
    use TensorType::{BF16, F16, F32};
    let Some(mut pass) = pass() else { return };
    for (ty, n_in, n_out) in [(F32, 1, 1), (F32, 31, 33), (F16, 33, 129), (BF16, 77, 17), (F16, 2, 260)] {
        for n_tokens in [1, 3, 17] {
            let case = Case { n_in, n_tokens, ..PLAIN };
            check(&mut pass, Kernels::Gemv, &[(ty, n_out)], Case { bias: true, ..case });
            check(&mut pass, Kernels::Gemv, &[(ty, n_out)], Case { epilogue: Epilogue::Add, ..case });
            check(&mut pass, Kernels::Gemv, &[(ty, n_out); 2], Case { epilogue: Epilogue::Gated, ..case });
        }
    }
}

/// Every tensor type, and tokens around the tiles of 8, 16, 32 and 64.
fn check_gemm(kernels: Kernels, tokens: &[usize]) {
    use TensorType::{F16, F32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0};
    let Some(mut pass) = pass() else { return };
    for (i, &ty) in TensorType::ALL.iter().enumerate() {
        let case = Case { n_in: odd_width(ty), n_tokens: tokens[i % tokens.len()], ..PLAIN };
        check(&mut pass, kernels, &[(ty, 67)], case);
    }
    for (i, &n_tokens) in tokens.iter().enumerate() {
        let (ty, n_in) = [(F16, 4), (Q8_0, 32), (Q4_0, 576), (F32, 200), (Q4_K, 768), (Q6_K, 256), (Q5_K, 512)][i % 7];
        for n_out in [1, 17, 130] {
            check(&mut pass, kernels, &[(ty, n_out)], Case { n_in, n_tokens, ..PLAIN });
        }
    }
    // Many columns and few rows: split-K.
    check(&mut pass, kernels, &[(Q4_0, 33)], Case { n_in: 8192 + 96, n_tokens: tokens[0], ..PLAIN });
    check(&mut pass, kernels, &[(Q4_K, 15)], Case { n_in: 8192 + 256, n_tokens: tokens[tokens.len() / 2], ..PLAIN });
}

#[test]
fn matmul_few() {
    check_gemm(Kernels::Few, &[5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65]);
}

#[test]
fn matmul_few_epilogues() {
    check_epilogues(Kernels::Few, &[5, 17, 33]);
}

/// Whether the device has the GEMM without warpgroup instructions; noted as skipped if not.
fn has_matmul() -> bool {
    let Some(gpu) = super::device() else { return false };
    let found = gpu.kernel(kernels::MATMUL[0]).is_ok();
    if !found {
        metal_attention_testing::skip("the device does not run matmul_f16");
    }
    found
}

/// Whether the runner launches the kernels with warpgroup instructions; noted as skipped if not.
fn has_wgmma() -> bool {
    let Some(gpu) = super::device() else { return false };
    let found = gpu.summary().has_wgmma();
    if !found {
        metal_attention_testing::skip("no warpgroup instructions");
    }
    found
}

#[test]
fn matmul_wide() {
    if has_wgmma() {
        check_gemm(Kernels::Wide, &[1, 15, 16, 17, 31, 33, 63, 64, 65, 129]);
        // As many rows as let a device of few multiprocessors take 256 tokens in a block.
        let Some(mut pass) = pass() else { return };
        for (ty, n_in, n_tokens) in [(TensorType::Q8_0, 96, 257), (TensorType::F16, 68, 255)] {
            check(&mut pass, Kernels::Wide, &[(ty, 500)], Case { n_in, n_tokens, ..PLAIN });
        }
    }
}

#[test]
fn matmul_wide_epilogues() {
    if has_wgmma() {
        check_epilogues(Kernels::Wide, &[15, 65]);
    }
}

/// Products of packed rows with several matrices, each with a result of its own; and one whose result is activated and packed.
#[test]
fn matmul_wide_results() {
    if !has_wgmma() {
        return;
    }
    let Some(mut pass) = pass() else { return };
    let gpu = Arc::clone(&pass.runner.gpu);
    let n_in = 132;
    for n_tokens in [16_usize, 65, 257] {
        pass.runner.max_few_tokens = 0;
        let order = n_tokens.div_ceil(8) as u32 | WIDE;
        let x = random(1, n_tokens * n_in);
        let x_packed = gpu.upload("x", &packed(&x, n_in, order)).unwrap();
        let parts = [200, 64, 129].map(|n_out| {
            let tensor = tensor(TensorType::F16, n_in, n_out, n_out as u64);
            let matrix = CudaMatrix::new(&gpu, &mut pass.runner.kernels, &tensor).unwrap();
            let bias = random(n_out as u64, n_out);
            let bias_buffer = gpu.upload("bias", &bias).unwrap();
            (tensor, matrix, bias, bias_buffer, poisoned(&gpu, n_tokens * n_out))
        });
        let results = parts.each_ref().map(|(_, matrix, _, bias, y)| ResultRowsArgs {
            y: y.ptr(),
            bias: bias.ptr(),
            n_out: matrix.n_rows as u32,
            unused: 0,
        });
        let product = WideProduct {
            label: "test",
            matrices: &parts.each_ref().map(|part| (&part.1, 0)),
            results: &results,
            output: WideOutput::Epilogue { epilogue: Epilogue::Store, activation: 0 },
            scale: 1.0,
            packed: DevicePtr::NULL,
        };
        pass.runner.launcher().wide_product(&product, x_packed.slice(), n_tokens).unwrap();
        let sums = |tensor: &Tensor, bias: &[f32]| -> Vec<Expected> {
            let weights = tensor.to_f32();
            let rows = x.chunks(n_in).flat_map(|x| {
                let x: Vec<f64> = x.iter().map(|v| f64::from(rounded(*v))).collect();
                let sum = |(w, bias): (&[f32], &f32)| {
                    let (sum, size) = dot(w, &x);
                    Expected { value: sum + f64::from(*bias), error: sum_error(n_in) * size + 1e-6 }
                };
                weights.chunks(n_in).zip(bias).map(sum).collect::<Vec<_>>()
            });
            rows.collect()
        };
        for (tensor, matrix, bias, _, y) in &parts {
            let got = read::<f32>(&gpu, y, n_tokens * matrix.n_rows);
            assert_close(&got, &sums(tensor, bias), matrix.n_rows, &format!("{n_tokens} tokens, {}", matrix.n_rows));
        }
        for function in [ElementsFunction::Gelu, ElementsFunction::GeluErf, ElementsFunction::QuickGelu] {
            for ((tensor, matrix, bias, ..), result) in parts.iter().zip(results) {
                let n_out = matrix.n_rows;
                let y = gpu.upload("y", &vec![0xffff_u16; packed_len(n_out, order)]).unwrap();
                let product = WideProduct {
                    matrices: &[(matrix, 0)],
                    results: &[ResultRowsArgs { y: DevicePtr::NULL, ..result }],
                    output: WideOutput::Activated(function),
                    packed: y.ptr(),
                    ..product
                };
                pass.runner.launcher().wide_product(&product, x_packed.slice(), n_tokens).unwrap();
                let width = n_out.next_multiple_of(64);
                let all = unpacked(&read(&gpu, &y, packed_len(n_out, order)), width, n_tokens, order);
                let rows = || all.chunks(width);
                assert!(rows().all(|row| row[n_out..].iter().all(|v| *v == 0.0)), "zeros fill the last panel up");
                let got: Vec<f32> = rows().flat_map(|row| &row[..n_out]).copied().collect();
                let activated = |Expected { value, error }: Expected| {
                    let of = |v| super::encoder::function(function, v, 1.0, [0.0; 2]);
                    // Slopes are at most 1.13; results are F16.
                    Expected { value: of(value), error: 1.2 * error + of(value).abs() / 2048.0 + 1e-6 }
                };
                let expected: Vec<_> = sums(tensor, bias).into_iter().map(activated).collect();
                assert_close(&got, &expected, n_out, &format!("{function:?}, {n_tokens} tokens, {n_out}"));
            }
        }
    }
}

#[test]
fn matmul() {
    if has_matmul() {
        check_gemm(Kernels::Plain, &[1, 15, 16, 17, 63, 64, 65, 127, 128, 129]);
    }
}

#[test]
fn matmul_epilogues() {
    if has_matmul() {
        check_epilogues(Kernels::Plain, &[17, 65]);
    }
}
