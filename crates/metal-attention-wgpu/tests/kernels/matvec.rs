//! `matvec` (GEMV) and its variants against their scalar twin: every tensor type, unusual shapes, fused inputs and
//! outputs, tiles of tokens, matrices in parts.

use crate::support::matrices::{repeated, tensor, tensors};
use crate::support::{
    batch, nmse, on_variants, poisoned, random, run, run_sized, takes_fewer_cases, variants, with_any_subgroups,
};
use metal_attention_gguf::{Tensor, TensorType};
use metal_attention_model::BatchToken;
use metal_attention_wgpu::kernels::{
    MatvecInput, MatvecOptions, MatvecOutput, TokenRows, ffn_silu_twin, matvec, matvec_of_inputs, matvec_twin,
    multi_token_matvec, rmsnorm_twin,
};
use metal_attention_wgpu::{Arena, BatchDims, WgpuDevice, WgpuMatrix, batch_words};

/// The largest NMSE. A sum of n f32 products that is divided among many accumulators has an error of a few ulp of its
/// largest terms. With 24 bits the squared relative error is near 1e-14; 1e-12 allows for sums that cancel.
const TOLERANCE: f64 = 1e-12;

/// One comparison of the GPU with the twin.
#[derive(Debug, Clone, Copy)]
struct Case {
    /// The prologue: "plain", "rmsnorm" or "silu".
    input: &'static str,
    output: MatvecOutput,
    bias: bool,
    n_tokens: usize,
    token_tile: usize,
}

const PLAIN: Case = Case { input: "plain", output: MatvecOutput::Store, bias: false, n_tokens: 1, token_tile: 1 };

/// Multiplies random tokens on the GPU and in the twin, and compares the results. `w`: the dequantised matrix.
fn check(gpu: &WgpuDevice, matrix: &WgpuMatrix, w: &[f32], case: Case) {
    let (n_in, n_out) = (matrix.n_in(), matrix.n_out());
    let x_len = if case.input == "silu" { 2 * n_in } else { n_in };
    let y_len = if case.output == MatvecOutput::Gated { n_out / 2 } else { n_out };
    let n = case.n_tokens;
    let (x, norm, bias, before) = (random(1, n * x_len), random(2, n_in), random(3, n_out), random(4, n * y_len));

    let (gx, gnorm, gbias) =
        (gpu.upload("x", &x).unwrap(), gpu.upload("norm", &norm).unwrap(), gpu.upload("bias", &bias).unwrap());
    let y = match case.output {
        MatvecOutput::Accumulate => gpu.upload("y", &before).unwrap(),
        _ => poisoned(gpu, n * y_len),
    };
    let input = match case.input {
        "rmsnorm" => MatvecInput::RmsNorm { weight: &gnorm, eps: 1e-5 },
        "silu" => MatvecInput::Silu,
        _ => MatvecInput::Plain,
    };
    let options =
        MatvecOptions { input, output: case.output, rows: TokenRows::Tokens, bias: case.bias.then_some(&gbias) };
    let batch = batch(gpu, n, 0);
    let dispatches = multi_token_matvec(gpu, matrix, options, case.token_tile, &gx, &y, &batch).unwrap();
    run(gpu, &dispatches, n);
    let got: Vec<f32> = gpu.read(&y, n * y_len).unwrap();

    let mut want = Vec::new();
    for (x, before) in x.chunks(x_len).zip(before.chunks(y_len)) {
        let x = match case.input {
            "rmsnorm" => rmsnorm_twin(x, &norm, 1e-5),
            "silu" => ffn_silu_twin(x),
            _ => x.to_vec(),
        };
        let mut y = matvec_twin(w, &x);
        if case.bias {
            y.iter_mut().zip(&bias).for_each(|(y, b)| *y += b);
        }
        match case.output {
            MatvecOutput::Store => want.extend(y),
            MatvecOutput::Accumulate => want.extend(y.iter().zip(before).map(|(y, b)| y + b)),
            MatvecOutput::Gated => want.extend(ffn_silu_twin(&y)),
        }
    }
    let error = nmse(&got, &want);
    let kernel = dispatches[0].kernel();
    assert!(error < TOLERANCE, "{kernel} {n_out} x {n_in}, {case:?}, {} parts: {error:e}", matrix.parts().len());
}

#[test]
fn every_type() {
    for (gpu, ty) in on_variants(TensorType::ALL) {
        let n_in = if ty.block_len() == 1 { 33 } else { 3 * ty.block_len() };
        let w = tensor(ty, n_in, 37, 5);
        let matrix = WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap();
        let values = w.to_f32();
        check(gpu, &matrix, &values, PLAIN);
        check(gpu, &matrix, &values, Case { n_tokens: 3, token_tile: 2, ..PLAIN });
    }
}

#[test]
fn unusual_shapes() {
    for (i, gpu) in variants().iter().enumerate() {
        for (ty, n_in, n_out) in [
            (TensorType::F32, 1, 1),
            (TensorType::F32, 31, 33),
            (TensorType::F32, 2048, 31),
            (TensorType::F16, 32, 32),
            (TensorType::F16, 33, 576),
            (TensorType::BF16, 77, 49),
            (TensorType::Q8_0, 32, 1),
            (TensorType::Q8_0, 1536, 31),
            (TensorType::Q4_0, 576, 576),
            (TensorType::Q4_0, 1536, 33),
            (TensorType::Q4_0, 576, 3072),
            (TensorType::Q6_K, 2048, 65),
            (TensorType::Q4_K, 8192, 5),
            (TensorType::F16, 49_152, 2),
            (TensorType::Q4_0, 96, 49_152),
            (TensorType::F32, 3, 151_936),
        ] {
            if i > 0 && n_out > 10_000 {
                continue;
            }
            let w = tensor(ty, n_in, n_out, 6);
            check(gpu, &WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap(), &w.to_f32(), PLAIN);
        }
    }
}

#[test]
fn more_workgroups_than_an_axis_may_have() {
    let gpu = &variants()[0];
    // At most 32 rows per workgroup. The matrix repeats 999 rows, so that the twin computes those only.
    let (n_in, n_out, period) = (64, 40 * 65_535, 999);
    let w = repeated(TensorType::Q4_0, n_in, n_out, period, 7);
    let matrix = WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap();
    let x = random(8, n_in);
    let y = poisoned(gpu, n_out);
    let gx = gpu.upload("x", &x).unwrap();
    let batch = batch(gpu, 1, 0);
    run(gpu, &matvec(gpu, &matrix, MatvecOptions::default(), &gx, &y, &batch).unwrap(), 1);
    let got: Vec<f32> = gpu.read(&y, n_out).unwrap();
    let values = tensor(TensorType::Q4_0, n_in, period, 7).to_f32();
    assert!(nmse(&got[..period], &matvec_twin(&values, &x)) < TOLERANCE);
    assert!(got[period..].iter().zip(&got).all(|(a, b)| a == b));
}

/// With many rows the kernel quantises inputs to integers.
#[test]
fn many_rows() {
    let gpu = &variants()[0];
    let types = TensorType::ALL.iter().filter(|ty| ty.block_len() > 1);
    many_rows_of(gpu, types.step_by(if takes_fewer_cases(gpu) { 3 } else { 1 }));
    // The same kernels with fewer lanes per row.
    many_rows_of(
        &with_any_subgroups(),
        [TensorType::Q4_0, TensorType::Q6_K, TensorType::Q3_K, TensorType::IQ1_M].iter(),
    );
}

/// Products of many rows, for inputs of very different magnitudes, with and without a norm.
fn many_rows_of<'a>(gpu: &WgpuDevice, types: impl Iterator<Item = &'a TensorType>) {
    let period = 37;
    for (i, &ty) in types.enumerate() {
        let n_in = [768, 256, 1024, 2048][i % 4];
        let n_out = (1 << 22) / n_in + 13;
        let w = repeated(ty, n_in, n_out, period, 14);
        let matrix = WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap();
        let values = tensor(ty, n_in, period, 14).to_f32();
        let norm = random(15, n_in);
        let gnorm = gpu.upload("norm", &norm).unwrap();
        for (scale, with_norm) in [(1.0, false), (1e-30, false), (1e30, false), (0.0, true), (1e-3, true), (1e10, true)]
        {
            // Two tokens, one with logits. Blocks of eight elements have very different magnitudes.
            let size = |k: usize| if (k / 8).is_multiple_of(3) { 1e-4 } else { 1.0 };
            let mut x: Vec<f32> = random(16, 2 * n_in).iter().enumerate().map(|(k, v)| v * size(k) * scale).collect();
            x[n_in + 16..n_in + 24].fill(0.0);
            let gx = gpu.upload("x", &x).unwrap();
            let tokens =
                [false, true].map(|logits| BatchToken { id: 0, seq: 0, pos: usize::from(logits), output: logits });
            let batch = gpu.upload("batch", &batch_words(&tokens)).unwrap();
            let y = poisoned(gpu, 2 * n_out);
            let input = if with_norm { MatvecInput::RmsNorm { weight: &gnorm, eps: 1e-5 } } else { MatvecInput::Plain };
            let options = MatvecOptions { input, rows: TokenRows::Outputs, ..Default::default() };
            let dispatches = matvec(gpu, &matrix, options, &gx, &y, &batch).unwrap();
            let is_integer = !matches!(ty, TensorType::IQ4_NL | TensorType::IQ4_XS) && gpu.features().neighbours >= 4;
            assert_eq!(dispatches[0].kernel().ends_with("_integer"), is_integer, "{}", dispatches[0].kernel());
            run_sized(gpu, &dispatches, BatchDims { n_tokens: 2, n_outputs: 1, n_runs: 1, n_splits: 1 });
            let got: Vec<f32> = gpu.read(&y, 2 * n_out).unwrap();
            let x = &x[n_in..];
            let want = matvec_twin(&values, &if with_norm { rmsnorm_twin(x, &norm, 1e-5) } else { x.to_vec() });
            let error = nmse(&got[..period], &want);
            assert!(error < TOLERANCE, "{ty} {n_out} x {n_in}, norm {with_norm}, scale {scale:e}: {error:e}");
            assert!(got[period..n_out].iter().zip(&got).all(|(a, b)| a == b), "{ty}: rows that are the same differ");
            assert!(got[n_out..].iter().all(|y| y.is_nan()));
        }
    }
}

/// Large products as in a layer: input vectors of several sizes, accumulation, gates, biases.
#[test]
fn many_rows_of_a_layer() {
    let gpu = &variants()[0];
    // Rows repeat, in pairs.
    let period = 76;
    // The last matrix has so many rows that a workgroup processes several groups of them.
    let cases = [
        (TensorType::Q4_0, 4096, 1 << 24),
        (TensorType::Q4_K, 8448, 1 << 24),
        (TensorType::Q6_K, 14_336, 1 << 24),
        (TensorType::Q8_0, 256, 3 << 23),
    ];
    for (ty, n_in, weights) in cases.into_iter().skip(if takes_fewer_cases(gpu) { 2 } else { 0 }) {
        let n_out = usize::div_ceil(weights, n_in).next_multiple_of(period);
        let w = repeated(ty, n_in, n_out, period, 14);
        let matrix = WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap();
        let values = tensor(ty, n_in, period, 14).to_f32();
        let (x, norm) = (random(15, n_in), random(16, n_in));
        let (bias, before) = (random(17, period).repeat(n_out / period), random(18, period).repeat(n_out / period));
        let gx = gpu.upload("x", &x).unwrap();
        let (gnorm, gbias) = (gpu.upload("norm", &norm).unwrap(), gpu.upload("bias", &bias).unwrap());
        let batch = batch(gpu, 1, 0);
        for (output, with_norm, with_bias) in [
            (MatvecOutput::Store, true, true),
            (MatvecOutput::Accumulate, false, false),
            (MatvecOutput::Accumulate, true, true),
            (MatvecOutput::Gated, true, false),
            (MatvecOutput::Gated, false, true),
        ] {
            let input = if with_norm { MatvecInput::RmsNorm { weight: &gnorm, eps: 1e-5 } } else { MatvecInput::Plain };
            let options = MatvecOptions { input, output, rows: TokenRows::Tokens, bias: with_bias.then_some(&gbias) };
            let gated = output == MatvecOutput::Gated;
            let y = match output {
                MatvecOutput::Accumulate => gpu.upload("y", &before).unwrap(),
                MatvecOutput::Store | MatvecOutput::Gated => poisoned(gpu, if gated { n_out / 2 } else { n_out }),
            };
            let dispatches = matvec(gpu, &matrix, options, &gx, &y, &batch).unwrap();
            let is_integer = gpu.features().neighbours >= 4;
            assert_eq!(dispatches[0].kernel().ends_with("_integer"), is_integer, "{}", dispatches[0].kernel());
            run(gpu, &dispatches, 1);
            let mut want = matvec_twin(&values, &if with_norm { rmsnorm_twin(&x, &norm, 1e-5) } else { x.clone() });
            if with_bias {
                want.iter_mut().zip(&bias).for_each(|(y, b)| *y += b);
            }
            match output {
                MatvecOutput::Store => {}
                MatvecOutput::Accumulate => want.iter_mut().zip(&before).for_each(|(y, b)| *y += b),
                MatvecOutput::Gated => want = ffn_silu_twin(&want),
            }
            let got: Vec<f32> = gpu.read(&y, if gated { n_out / 2 } else { n_out }).unwrap();
            let error = nmse(&got[..want.len()], &want);
            let case = format!("{ty} {n_out} x {n_in}, {output:?}, norm {with_norm}, bias {with_bias}");
            assert!(error < TOLERANCE, "{case}: {error:e}");
            assert!(got[want.len()..].iter().zip(&got).all(|(a, b)| a == b), "{case}: rows that are the same differ");
        }
    }
}

#[test]
fn fused_inputs_and_outputs() {
    for (gpu, (ty, n_in, n_out)) in
        on_variants(&[(TensorType::Q4_0, 576, 66), (TensorType::F16, 77, 34), (TensorType::Q8_0, 1536, 20)])
    {
        let w = tensors(&[(ty, n_in, n_out / 2), (ty, n_in, n_out / 2)], 8);
        let matrix = WgpuMatrix::interleave(gpu, "w", &w[0], &w[1], &mut Arena::default()).unwrap();
        let (a, b) = (w[0].to_f32(), w[1].to_f32());
        let values: Vec<f32> = a.chunks(n_in).zip(b.chunks(n_in)).flat_map(|(a, b)| [a, b].concat()).collect();
        for case in [
            Case { input: "rmsnorm", ..PLAIN },
            Case { input: "silu", output: MatvecOutput::Accumulate, ..PLAIN },
            Case { input: "rmsnorm", output: MatvecOutput::Gated, ..PLAIN },
            Case { bias: true, ..PLAIN },
            Case { input: "rmsnorm", output: MatvecOutput::Gated, bias: true, n_tokens: 3, token_tile: 2 },
            Case { input: "silu", output: MatvecOutput::Accumulate, bias: true, n_tokens: 3, token_tile: 4 },
        ] {
            check(gpu, &matrix, &values, case);
        }
    }
}

#[test]
fn tiles_of_tokens() {
    for gpu in variants() {
        let w = tensor(TensorType::Q4_0, 576, 99, 9);
        let matrix = WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap();
        let values = w.to_f32();
        for n_tokens in [1, 2, 3, 7, 8, 16] {
            for token_tile in [1, 2, 4, 8] {
                check(gpu, &matrix, &values, Case { n_tokens, token_tile, ..PLAIN });
            }
        }
    }
}

#[test]
fn matrices_in_parts() {
    for gpu in variants() {
        // Q and K have the same type, V has another.
        let w = tensors(&[(TensorType::Q4_0, 64, 96), (TensorType::Q4_0, 64, 32), (TensorType::Q8_0, 64, 33)], 10);
        let all: Vec<f32> = w.iter().flat_map(Tensor::to_f32).collect();
        let w: Vec<_> = w.iter().collect();
        let whole = WgpuMatrix::concat(gpu, "qkv", &w, &mut Arena::default()).unwrap();
        assert_eq!(whole.parts().iter().map(|p| (p.first_row, p.n_rows)).collect::<Vec<_>>(), [(0, 128), (128, 33)]);
        let split = WgpuMatrix::concat(gpu, "qkv", &w, &mut Arena::default().with_max_slice(1500)).unwrap();
        assert!(split.parts().len() > 4 && split.parts().iter().all(|p| p.buffer.size() <= 1500));
        for case in [
            Case { bias: true, ..PLAIN },
            Case { output: MatvecOutput::Accumulate, n_tokens: 3, token_tile: 2, ..PLAIN },
        ] {
            check(gpu, &whole, &all, case);
            check(gpu, &split, &all, case);
        }

        // Rows of gate and up alternate. They stay in pairs if their types are equal, and are in separate parts
        // otherwise.
        for (up, gates) in [(TensorType::Q4_0, true), (TensorType::Q5_1, false)] {
            let w = tensors(&[(TensorType::Q4_0, 96, 51), (up, 96, 51)], 11);
            let (a, b) = (w[0].to_f32(), w[1].to_f32());
            let all: Vec<f32> = a.chunks(96).zip(b.chunks(96)).flat_map(|(a, b)| [a, b].concat()).collect();
            let matrix =
                WgpuMatrix::interleave(gpu, "gate_up", &w[0], &w[1], &mut Arena::default().with_max_slice(1000))
                    .unwrap();
            assert!(matrix.parts().len() > 4);
            check(gpu, &matrix, &all, PLAIN);
            assert_eq!(matrix.has_pairs(), gates);
            let gated = Case { output: MatvecOutput::Gated, n_tokens: 2, token_tile: 2, ..PLAIN };
            if gates {
                check(gpu, &matrix, &all, gated);
            } else {
                let x = gpu.buffer("x", 4 * 96).unwrap();
                let options = MatvecOptions { output: MatvecOutput::Gated, ..Default::default() };
                let error = matvec(gpu, &matrix, options, &x, &x, &x).unwrap_err();
                assert!(error.to_string().contains("gate and up rows"), "{error}");
            }
        }
    }
}

/// Ranges of rows that are multiplied by different inputs.
#[test]
fn several_inputs() {
    use TensorType::{F16, F32, Q8_0};
    // The last case has one input, which is quantised to integers.
    let matrices: [(usize, &[(TensorType, usize)]); 6] = [
        (64, &[(F32, 5), (F32, 7)]),
        (33, &[(F16, 32), (F16, 16), (F16, 1), (F16, 31)]),
        (64, &[(Q8_0, 64), (F16, 48), (F16, 12), (Q8_0, 3), (Q8_0, 8), (Q8_0, 4)]),
        (2048, &[(F32, 64), (F32, 64), (F32, 32), (F32, 128)]),
        (1024, &[(Q8_0, 1024), (Q8_0, 1024), (Q8_0, 1022)]),
        (1024, &[(Q8_0, 4100)]),
    ];
    for (gpu, (n_in, parts)) in on_variants(&matrices) {
        let shapes: Vec<_> = parts.iter().map(|&(ty, n_out)| (ty, n_in, n_out)).collect();
        let w = tensors(&shapes, 12);
        let matrix = WgpuMatrix::concat(gpu, "w", &w.iter().collect::<Vec<_>>(), &mut Arena::default()).unwrap();
        for (n, tile) in [(1, 1), (2, 1), (3, 4), (9, 2)] {
            let x: Vec<_> = (0..parts.len()).map(|i| random(i as u64 + 1, n * n_in)).collect();
            let gx: Vec<_> = x.iter().map(|x| gpu.upload("x", x).unwrap()).collect();
            let y = poisoned(gpu, n * matrix.n_out());
            let inputs: Vec<_> = parts.iter().zip(&gx).map(|(&(_, n_out), x)| (n_out, x)).collect();
            let batch = batch(gpu, n, 0);
            run(gpu, &matvec_of_inputs(gpu, &matrix, &inputs, tile, &y, &batch).unwrap(), n);
            let product = |t: usize| w.iter().zip(&x).map(move |(w, x)| (w.to_f32(), &x[t * n_in..][..n_in]));
            let want: Vec<f32> = (0..n).flat_map(product).flat_map(|(w, x)| matvec_twin(&w, x)).collect();
            let got: Vec<f32> = gpu.read(&y, want.len()).unwrap();
            let error = nmse(&got, &want);
            assert!(error < TOLERANCE, "{parts:?}, {n} tokens in tiles of {tile}: {error:e}");
        }
    }
}

#[test]
fn rows_of_tokens_with_logits() {
    for gpu in variants() {
        let (n_in, n_out) = (64, 21);
        let w = tensor(TensorType::Q8_0, n_in, n_out, 12);
        let matrix = WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap();
        let with_logits = [1, 2, 5];
        let tokens: Vec<_> =
            (0..6).map(|i| BatchToken { id: 0, seq: 0, pos: i, output: with_logits.contains(&i) }).collect();
        let batch = gpu.upload("batch", &batch_words(&tokens)).unwrap();
        let x = random(13, 6 * n_in);
        let gx = gpu.upload("x", &x).unwrap();
        for (rows, sources) in [(TokenRows::Outputs, with_logits), (TokenRows::Gathered, [0, 1, 2])] {
            for token_tile in [1, 2] {
                let y = poisoned(gpu, 6 * n_out);
                let options = MatvecOptions { rows, ..Default::default() };
                let dispatches = multi_token_matvec(gpu, &matrix, options, token_tile, &gx, &y, &batch).unwrap();
                run_sized(gpu, &dispatches, BatchDims { n_tokens: 6, n_outputs: 3, n_runs: 1, n_splits: 1 });
                let got: Vec<f32> = gpu.read(&y, 6 * n_out).unwrap();
                let want: Vec<f32> =
                    sources.iter().flat_map(|&t| matvec_twin(&w.to_f32(), &x[t * n_in..][..n_in])).collect();
                assert!(nmse(&got[..3 * n_out], &want) < TOLERANCE, "{rows:?}, tile {token_tile}");
                assert!(got[3 * n_out..].iter().all(|y| y.is_nan()), "{rows:?}: more rows than tokens with logits");
            }
        }
    }
}
