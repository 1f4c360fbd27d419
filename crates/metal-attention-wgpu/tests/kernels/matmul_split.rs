//! `split_matmul`, the split-K GEMM, against its scalar twin: every tensor type, unusual shapes, outputs, norms,
//! selected rows, outliers. On devices without 16-bit matrix units it runs in plain loops.

use crate::support::matrices::{tensor, tensors};
use crate::support::{batch, nmse, poisoned, random, run, run_sized, takes_fewer_cases, variants};
use metal_attention_gguf::TensorType;
use metal_attention_model::BatchToken;
use metal_attention_wgpu::kernels::{
    MatvecInput, MatvecOptions, MatvecOutput, SplitTile, TokenRows, ffn_silu_twin, matvec_twin, rmsnorm_twin,
    split_matmul,
};
use metal_attention_wgpu::{Arena, BatchDims, WgpuDevice, WgpuMatrix, batch_words};

const EPS: f32 = 1e-5;

/// One comparison of the GPU with the twin.
#[derive(Debug, Clone, Copy)]
struct Case {
    output: MatvecOutput,
    norm: bool,
    bias: bool,
    n_tokens: usize,
    tile: SplitTile,
}

const TILE: SplitTile = SplitTile { rows: 16, depth: 32, subgroups: 4 };
const PLAIN: Case = Case { output: MatvecOutput::Store, norm: false, bias: false, n_tokens: 17, tile: TILE };

/// The largest NMSE, as in `matmul.rs`: factors rounded to 11 bits, or sums in f32.
fn tolerance(gpu: &WgpuDevice) -> f64 {
    if gpu.features().cooperative_f16 { 1e-6 } else { 1e-11 }
}

/// The variants that support the kernel.
fn gpus() -> impl Iterator<Item = &'static WgpuDevice> {
    variants().iter().filter(|gpu| gpu.features().subgroup_size >= 8)
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
    let gain: Vec<f32> = random(5, n_in).iter().map(|v| 1.0 + v / 2.0).collect();
    let (gx, gbias) = (gpu.upload("x", x).unwrap(), gpu.upload("bias", &bias).unwrap());
    let weight = gpu.upload("norm", &gain).unwrap();
    let y = match case.output {
        MatvecOutput::Accumulate => gpu.upload("y", &before).unwrap(),
        _ => poisoned(gpu, n * y_len),
    };
    let input = if case.norm { MatvecInput::RmsNorm { weight: &weight, eps: EPS } } else { MatvecInput::Plain };
    let options =
        MatvecOptions { input, output: case.output, bias: case.bias.then_some(&gbias), rows: TokenRows::Tokens };
    let dispatches = split_matmul(gpu, matrix, options, case.tile, &gx, &y, &batch(gpu, n, 0)).unwrap();
    run(gpu, &dispatches, n);
    let got: Vec<f32> = gpu.read(&y, n * y_len).unwrap();
    for (t, (x, before)) in x.chunks(n_in).zip(before.chunks(y_len)).enumerate() {
        let mut want = if case.norm { matvec_twin(w, &rmsnorm_twin(x, &gain, EPS)) } else { matvec_twin(w, x) };
        if case.bias {
            want.iter_mut().zip(&bias).for_each(|(y, b)| *y += b);
        }
        match case.output {
            MatvecOutput::Store => {}
            MatvecOutput::Accumulate => want.iter_mut().zip(before).for_each(|(y, b)| *y += b),
            MatvecOutput::Gated => want = ffn_silu_twin(&want),
        }
        let error = nmse(&got[t * y_len..][..y_len], &want);
        assert!(
            error < tolerance(gpu),
            "{} {n_out} x {n_in}, token {t} of {case:?}: {error:e}",
            dispatches[0].kernel()
        );
    }
}

#[test]
fn every_type() {
    for gpu in gpus().take(1) {
        // A software GPU compiles a kernel for each type for seconds; the reading of weights is that of `matvec.rs`, too.
        let step = if takes_fewer_cases(gpu) { 12 } else { 1 };
        for &ty in TensorType::ALL.iter().step_by(step) {
            let n_in = if ty.block_len() == 1 { 40 } else { 3 * ty.block_len() };
            let w = tensor(ty, n_in, 33, 5);
            check(gpu, &WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap(), &w.to_f32(), PLAIN);
        }
    }
}

#[test]
fn unusual_shapes_and_all_tiles() {
    let tile = |rows, depth, subgroups| SplitTile { rows, depth, subgroups };
    for (i, gpu) in gpus().enumerate() {
        if i > 0 && takes_fewer_cases(gpu) {
            break;
        }
        let cases = [
            (TensorType::F16, 8, 33, 2, tile(16, 32, 4)),
            (TensorType::F16, 72, 31, 16, tile(32, 64, 2)),
            (TensorType::Q4_0, 576, 66, 33, tile(16, 64, 3)),
            (TensorType::Q4_0, 1536, 50, 3, tile(32, 32, 4)),
            (TensorType::Q8_0, 2048, 49, 15, tile(64, 32, 2)),
        ];
        let step = if takes_fewer_cases(gpu) { 2 } else { 1 };
        for (ty, n_in, n_out, n_tokens, tile) in cases.into_iter().step_by(step) {
            let w = tensor(ty, n_in, n_out, 6);
            let matrix = WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap();
            if !takes_fewer_cases(gpu) || n_tokens % 2 == 1 {
                check(gpu, &matrix, &w.to_f32(), Case { n_tokens, tile, ..PLAIN });
            }
            if !takes_fewer_cases(gpu) || n_tokens % 2 == 0 {
                check(gpu, &matrix, &w.to_f32(), Case { n_tokens, tile, norm: true, ..PLAIN });
            }
        }
    }
}

#[test]
fn outputs() {
    for (i, gpu) in gpus().enumerate() {
        if i > 0 && takes_fewer_cases(gpu) {
            break;
        }
        let (n_in, n_out) = (576, 136);
        let w = tensors(&[(TensorType::Q4_0, n_in, n_out / 2), (TensorType::Q4_0, n_in, n_out / 2)], 8);
        let matrix = WgpuMatrix::interleave(gpu, "w", &w[0], &w[1], &mut Arena::default()).unwrap();
        let (a, b) = (w[0].to_f32(), w[1].to_f32());
        let values: Vec<f32> = a.chunks(n_in).zip(b.chunks(n_in)).flat_map(|(a, b)| [a, b].concat()).collect();
        for output in [MatvecOutput::Store, MatvecOutput::Accumulate, MatvecOutput::Gated] {
            check(gpu, &matrix, &values, Case { output, ..PLAIN });
            check(gpu, &matrix, &values, Case { output, bias: true, norm: true, n_tokens: 5, ..PLAIN });
        }
    }
}

#[test]
fn matrices_in_parts() {
    for gpu in gpus() {
        let w = tensors(&[(TensorType::Q4_0, 64, 98), (TensorType::Q8_0, 64, 33)], 10);
        let all: Vec<f32> = w.iter().flat_map(metal_attention_gguf::Tensor::to_f32).collect();
        let whole = WgpuMatrix::concat(gpu, "qkv", &w.iter().collect::<Vec<_>>(), &mut Arena::default()).unwrap();
        assert_eq!(whole.parts().len(), 2);
        check(gpu, &whole, &all, Case { bias: true, norm: true, ..PLAIN });

        let w = tensors(&[(TensorType::Q4_0, 96, 51), (TensorType::Q5_1, 96, 51)], 11);
        let matrix = WgpuMatrix::interleave(gpu, "gate_up", &w[0], &w[1], &mut Arena::default()).unwrap();
        let x = gpu.buffer("x", 4 * 96).unwrap();
        let gated = MatvecOptions { output: MatvecOutput::Gated, ..Default::default() };
        let error = split_matmul(gpu, &matrix, gated, TILE, &x, &x, &x).unwrap_err();
        assert!(error.to_string().contains("gate and up rows"), "{error}");
    }
}

/// Tokens of very different magnitudes, each with one element far above its others, beyond the range of 16-bit floats.
#[test]
fn outliers() {
    for gpu in gpus() {
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
    for gpu in gpus() {
        let (n_in, n_out, n) = (64, 21, 40);
        let w = tensor(TensorType::Q8_0, n_in, n_out, 14);
        let matrix = WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap();
        let tokens: Vec<_> = (0..n).map(|i| BatchToken { id: 0, seq: 0, pos: i, output: i % 2 == 1 }).collect();
        let batch = gpu.upload("batch", &batch_words(&tokens)).unwrap();
        let x = random(15, n * n_in);
        let gx = gpu.upload("x", &x).unwrap();
        let y = poisoned(gpu, n * n_out);
        let options = MatvecOptions { rows: TokenRows::Outputs, ..Default::default() };
        let dispatches = split_matmul(gpu, &matrix, options, TILE, &gx, &y, &batch).unwrap();
        run_sized(gpu, &dispatches, BatchDims { n_tokens: n as u32, n_outputs: n as u32 / 2, n_runs: 1, n_splits: 1 });
        let got: Vec<f32> = gpu.read(&y, n * n_out).unwrap();
        let want: Vec<f32> =
            (0..n / 2).flat_map(|i| matvec_twin(&w.to_f32(), &x[(2 * i + 1) * n_in..][..n_in])).collect();
        let error = nmse(&got[..n / 2 * n_out], &want);
        assert!(error < tolerance(gpu), "{error:e}");
        assert!(got[n / 2 * n_out..].iter().all(|y| y.is_nan()), "more rows than tokens with logits");
    }
}
