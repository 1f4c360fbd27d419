//! `matmul` (GEMM) against its scalar twin: every tensor type, unusual shapes, outputs, selected rows, outliers.

use crate::support::matrices::{tensor, tensors};
use crate::support::{batch, nmse, on_variants, poisoned, random, run, run_sized, takes_fewer_cases, variants};
use metal_attention_gguf::TensorType;
use metal_attention_model::BatchToken;
use metal_attention_wgpu::kernels::{
    CooperativeTile, MatmulMethod, MatmulScratch, MatvecInput, MatvecOptions, MatvecOutput, TokenRows, all_on_units,
    ffn_silu_twin, matmul, matmul_by, matmul_method, matvec_twin, rmsnorm_twin,
};
use metal_attention_wgpu::{Arena, BatchDims, WgpuDevice, WgpuMatrix, batch_words};

/// The largest NMSE in f32: a sum of n products has a squared relative error of about n 2^-50, 1e-12 for 2048.
const EXACT: f64 = 1e-11;

/// The largest NMSE of factors rounded to 11 bits: each has a uniform, independent error of at most 2^-12, which add up
/// to 2 * 2^-24 / 3 = 4e-8 of the product's power.
const HALF: f64 = 1e-6;

const EPS: f32 = 1e-5;

/// One comparison of the GPU with the twin.
#[derive(Debug, Clone, Copy)]
struct Case {
    output: MatvecOutput,
    bias: bool,
    /// Whether matrix units with rounded factors are excluded.
    exact: bool,
    /// Whether the input is RMS-normalised in the prologue of the matrix-unit kernel, where the device has one.
    norm: bool,
    n_tokens: usize,
    /// Uses the matrix-unit kernel with such tiles, in plain loops in place of matrix units.
    loops: Option<CooperativeTile>,
}

const PLAIN: Case =
    Case { output: MatvecOutput::Store, bias: false, exact: false, norm: false, n_tokens: 17, loops: None };

fn tolerance(gpu: &WgpuDevice, ty: TensorType, n_out: usize, exact: bool) -> f64 {
    match matmul_method(gpu.features(), ty, n_out, 512, exact) {
        MatmulMethod::Cooperative(_) if gpu.features().cooperative_f16 => HALF,
        _ => EXACT,
    }
}

/// Multiplies random tokens on the GPU and in the twin, and compares the results.
fn check(gpu: &WgpuDevice, matrix: &WgpuMatrix, w: &[f32], case: Case) {
    check_with(gpu, matrix, w, case, &random(1, case.n_tokens * matrix.n_in()));
}

/// [`check`] with the input `x`, `[n_tokens, n_in]`.
fn check_with(gpu: &WgpuDevice, matrix: &WgpuMatrix, w: &[f32], case: Case, x: &[f32]) {
    let (n_in, n_out, n) = (matrix.n_in(), matrix.n_out(), case.n_tokens);
    let y_len = if case.output == MatvecOutput::Gated { n_out / 2 } else { n_out };
    let (bias, before) = (random(3, n_out), random(4, n * y_len));
    let (gx, gbias) = (gpu.upload("x", x).unwrap(), gpu.upload("bias", &bias).unwrap());
    let y = match case.output {
        MatvecOutput::Accumulate => gpu.upload("y", &before).unwrap(),
        _ => poisoned(gpu, n * y_len),
    };
    let gain: Vec<f32> = random(5, n_in).iter().map(|v| 1.0 + v / 2.0).collect();
    let weight = gpu.upload("norm", &gain).unwrap();
    let norm = case.norm && (case.loops.is_some() || all_on_units(gpu.features(), matrix, case.exact));
    let input = if norm { MatvecInput::RmsNorm { weight: &weight, eps: EPS } } else { MatvecInput::Plain };
    let options =
        MatvecOptions { input, output: case.output, bias: case.bias.then_some(&gbias), rows: TokenRows::Tokens };
    let batch = batch(gpu, n, 0);
    let dispatches = if let Some(tile) = case.loops {
        let scratch = MatmulScratch::for_loops(gpu, n, n_in).unwrap();
        matmul_by(gpu, matrix, options, |_| MatmulMethod::Cooperative(tile), &gx, &y, &scratch, &batch)
    } else {
        let scratch = MatmulScratch::new(gpu, n, n_in).unwrap();
        matmul(gpu, matrix, options, n, case.exact, &gx, &y, &scratch, &batch)
    };
    let dispatches = dispatches.unwrap();
    run(gpu, &dispatches, n);
    let got: Vec<f32> = gpu.read(&y, n * y_len).unwrap();

    let tolerance = tolerance(gpu, matrix.parts()[0].ty, n_out, case.exact);
    let kernel = dispatches[dispatches.len() - 1].kernel();
    // Each token is compared by itself, so that the error of a small one is not hidden by a large one.
    for (t, (x, before)) in x.chunks(n_in).zip(before.chunks(y_len)).enumerate() {
        let mut want = if norm { matvec_twin(w, &rmsnorm_twin(x, &gain, EPS)) } else { matvec_twin(w, x) };
        if case.bias {
            want.iter_mut().zip(&bias).for_each(|(y, b)| *y += b);
        }
        match case.output {
            MatvecOutput::Store => {}
            MatvecOutput::Accumulate => want.iter_mut().zip(before).for_each(|(y, b)| *y += b),
            MatvecOutput::Gated => want = ffn_silu_twin(&want),
        }
        let error = nmse(&got[t * y_len..][..y_len], &want);
        assert!(error < tolerance, "{kernel} {n_out} x {n_in}, token {t} of {case:?}: {error:e}");
    }
}

#[test]
fn every_type() {
    let step = if takes_fewer_cases(&variants()[0]) { 2 } else { 1 };
    let types: Vec<_> = TensorType::ALL.iter().copied().step_by(step).collect();
    for (gpu, ty) in on_variants(&types) {
        let n_in = if ty.block_len() == 1 { 33 } else { 3 * ty.block_len() };
        let w = tensor(ty, n_in, 65, 5);
        check(gpu, &WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap(), &w.to_f32(), PLAIN);
    }
}

#[test]
fn unusual_shapes() {
    let cases = [
        (TensorType::F32, 1, 1, 33),
        (TensorType::F32, 31, 33, 65),
        (TensorType::F16, 33, 66, 64),
        (TensorType::F16, 36, 130, 63),
        (TensorType::F16, 72, 31, 129),
        (TensorType::Q4_0, 576, 960, 16),
        (TensorType::Q4_0, 576, 960, 33),
        (TensorType::Q4_0, 1536, 578, 65),
        (TensorType::Q8_0, 2048, 49, 512),
        (TensorType::Q4_K, 2048, 8193, 17),
    ];
    for (gpu, (ty, n_in, n_out, n_tokens)) in on_variants(&cases) {
        let w = tensor(ty, n_in, n_out, 6);
        let matrix = WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap();
        check(gpu, &matrix, &w.to_f32(), Case { n_tokens, ..PLAIN });
        if all_on_units(gpu.features(), &matrix, false) {
            check(gpu, &matrix, &w.to_f32(), Case { n_tokens, norm: true, ..PLAIN });
        }
    }
}

#[test]
fn outputs() {
    // Sizes that are whole vectors, and sizes that are not.
    for (gpu, (ty, n_in, n_out)) in on_variants(&[(TensorType::Q4_0, 576, 136), (TensorType::F16, 77, 34)]) {
        let w = tensors(&[(ty, n_in, n_out / 2), (ty, n_in, n_out / 2)], 8);
        let matrix = WgpuMatrix::interleave(gpu, "w", &w[0], &w[1], &mut Arena::default()).unwrap();
        let (a, b) = (w[0].to_f32(), w[1].to_f32());
        let values: Vec<f32> = a.chunks(n_in).zip(b.chunks(n_in)).flat_map(|(a, b)| [a, b].concat()).collect();
        for output in [MatvecOutput::Store, MatvecOutput::Accumulate, MatvecOutput::Gated] {
            check(gpu, &matrix, &values, Case { output, ..PLAIN });
            check(gpu, &matrix, &values, Case { output, bias: true, exact: true, n_tokens: 66, ..PLAIN });
        }
    }
}

#[test]
fn matrices_in_parts() {
    for gpu in variants() {
        let w = tensors(&[(TensorType::Q4_0, 64, 98), (TensorType::Q4_0, 64, 32), (TensorType::F32, 64, 33)], 10);
        let all: Vec<f32> = w.iter().flat_map(metal_attention_gguf::Tensor::to_f32).collect();
        let whole = WgpuMatrix::concat(gpu, "qkv", &w.iter().collect::<Vec<_>>(), &mut Arena::default()).unwrap();
        assert_eq!(whole.parts().len(), 2);
        check(gpu, &whole, &all, Case { bias: true, ..PLAIN });

        let w = tensors(&[(TensorType::Q4_0, 96, 51), (TensorType::Q5_1, 96, 51)], 11);
        let (a, b) = (w[0].to_f32(), w[1].to_f32());
        let all: Vec<f32> = a.chunks(96).zip(b.chunks(96)).flat_map(|(a, b)| [a, b].concat()).collect();
        let matrix = WgpuMatrix::interleave(gpu, "gate_up", &w[0], &w[1], &mut Arena::default()).unwrap();
        check(gpu, &matrix, &all, Case { output: MatvecOutput::Accumulate, bias: true, ..PLAIN });
        let x = gpu.buffer("x", 4 * 96).unwrap();
        let scratch = MatmulScratch::new(gpu, 1, 96).unwrap();
        let gated = MatvecOptions { output: MatvecOutput::Gated, ..Default::default() };
        let error = matmul(gpu, &matrix, gated, 1, false, &x, &x, &scratch, &x).unwrap_err();
        assert!(error.to_string().contains("gate and up rows"), "{error}");
    }
}

/// The matrix-unit kernel with plain loops in place of the units, which tests its other code on devices without units.
#[test]
fn plain_loops_in_place_of_matrix_units() {
    let tile = |rows, tokens, depth, subgroups_rows, subgroups_tokens, stages| CooperativeTile {
        rows,
        tokens,
        depth,
        subgroups_rows,
        subgroups_tokens,
        stages,
    };
    // Two pipeline stages with a shorter last step; two matrices per subgroup, rows beyond the last, and a bias.
    let cases = [
        (TensorType::Q4_0, 96, tile(32, 32, 32, 2, 2, 2), MatvecOutput::Accumulate, true),
        (TensorType::F16, 36, tile(32, 32, 32, 1, 2, 1), MatvecOutput::Gated, false),
    ];
    for gpu in variants() {
        let features = gpu.features();
        if features.cooperative_f16 || features.cooperative_f32 || features.subgroup_size < 8 {
            continue;
        }
        for (ty, n_in, tile, output, norm) in cases {
            let w = tensor(ty, n_in, 66, 5);
            let matrix = WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap();
            let case = Case { output, loops: Some(tile), bias: !norm, norm, n_tokens: 37, ..PLAIN };
            check(gpu, &matrix, &w.to_f32(), case);
        }
    }
}

/// Tokens of very different magnitudes, each with one element far above its others, beyond the range of 16-bit floats.
#[test]
fn outliers() {
    for gpu in variants() {
        let (n_in, n_out, n_tokens) = (576, 40, 18);
        let w = tensor(TensorType::Q8_0, n_in, n_out, 12);
        let matrix = WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap();
        let mut x = random(13, n_in * n_tokens);
        for (t, row) in x.chunks_mut(n_in).enumerate() {
            let scale = [1.0, 1e6, 1e-6, 1e30, 1e-30, 0.0][t % 6];
            for v in &mut *row {
                *v *= scale;
            }
            row[37 * t % n_in] *= 1e4;
        }
        check_with(gpu, &matrix, &w.to_f32(), Case { n_tokens, ..PLAIN }, &x);
    }
}

#[test]
fn rows_of_tokens_with_logits() {
    for gpu in variants() {
        let (n_in, n_out, n) = (64, 21, 40);
        let w = tensor(TensorType::Q8_0, n_in, n_out, 14);
        let matrix = WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap();
        let tokens: Vec<_> = (0..n).map(|i| BatchToken { id: 0, seq: 0, pos: i, output: i % 2 == 1 }).collect();
        let batch = gpu.upload("batch", &batch_words(&tokens)).unwrap();
        let x = random(15, n * n_in);
        let gx = gpu.upload("x", &x).unwrap();
        for rows in [TokenRows::Outputs, TokenRows::Gathered] {
            let y = poisoned(gpu, n * n_out);
            let options = MatvecOptions { rows, ..Default::default() };
            let scratch = MatmulScratch::new(gpu, n, n_in).unwrap();
            let dispatches = matmul(gpu, &matrix, options, n, false, &gx, &y, &scratch, &batch).unwrap();
            run_sized(
                gpu,
                &dispatches,
                BatchDims { n_tokens: n as u32, n_outputs: n as u32 / 2, n_runs: 1, n_splits: 1 },
            );
            let got: Vec<f32> = gpu.read(&y, n * n_out).unwrap();
            let source = |i: usize| if rows == TokenRows::Outputs { 2 * i + 1 } else { i };
            let want: Vec<f32> =
                (0..n / 2).flat_map(|i| matvec_twin(&w.to_f32(), &x[source(i) * n_in..][..n_in])).collect();
            let error = nmse(&got[..n / 2 * n_out], &want);
            assert!(error < tolerance(gpu, TensorType::Q8_0, n_out, false), "{rows:?}: {error:e}");
            assert!(got[n / 2 * n_out..].iter().all(|y| y.is_nan()), "{rows:?}: more rows than tokens with logits");
        }
    }
}
