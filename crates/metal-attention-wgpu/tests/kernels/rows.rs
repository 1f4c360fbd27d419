//! Kernels over rows, `norm`, `scale`, `row_gate`, `attention_gate`, `embedding_sum` and `activation`, against their twins.

use crate::support::{nmse, on_variants, poisoned, random, run, run_sized, variants};
use metal_attention_model::{Activation, BatchToken, GateActivation, GateWidth, NormKind};
use metal_attention_wgpu::kernels::{
    AttentionGateShape, Gating, NormColumns, NormShape, ScaleShape, activation, activation_twin, attention_gate,
    attention_gate_twin, embedding_sum, embedding_sum_twin, norm, norm_twin, row_gate, row_gate_twin, scale,
    scale_twin,
};
use metal_attention_wgpu::{BatchDims, Bind, InputPlace, batch_words, batch_words_at};

/// (elements of a row, rows per token, tokens)
const SHAPES: [(usize, usize, usize); 6] = [(1, 1, 1), (31, 3, 2), (33, 1, 7), (256, 5, 3), (577, 1, 9), (2048, 2, 2)];

#[test]
fn norms_match_their_twin() {
    for (gpu, (n, rows, n_tokens)) in on_variants(&SHAPES) {
        for (kind, weight, bias) in [
            (None, false, false),
            (Some(NormKind::Rms), false, false),
            (Some(NormKind::Rms), true, true),
            (Some(NormKind::Layer), true, false),
            (Some(NormKind::Layer), true, true),
        ] {
            for (accumulate, outputs_only, in_place) in
                [(false, false, false), (true, false, false), (false, true, false), (false, false, true)]
            {
                let columns = None;
                let shape =
                    NormShape { n, rows, kind, eps: 1e-3, weight, bias, scale: 0.7, accumulate, outputs_only, columns };
                let total = n * rows * n_tokens;
                let (x, before) = (random(1, total), random(2, total));
                let weights = random(3, n * (usize::from(weight) + usize::from(bias)));
                // Every second token has logits.
                let token = |i: usize| BatchToken { id: 0, seq: 0, pos: i, output: i.is_multiple_of(2) };
                let batch: Vec<_> = (0..n_tokens).map(token).collect();
                let buffers = [&x, &before, &weights].map(|v| gpu.upload("x", v).unwrap());
                let [gx, gy, gw] = &buffers;
                let words = gpu.upload("batch", &batch_words(&batch)).unwrap();
                let (source, target) = if in_place { (None, gx) } else { (Some(gx as &dyn Bind), gy) };
                let dispatch = norm(gpu, shape, source, Some(gw), target, &words).unwrap();
                let n_outputs = n_tokens.div_ceil(2);
                let size = BatchDims { n_tokens: n_tokens as u32, n_outputs: n_outputs as u32, n_runs: 1, n_splits: 1 };
                run_sized(gpu, &[dispatch], size);
                let row = |i: usize, all: &[f32]| all[i * n..][..n].to_vec();
                let selected: Vec<usize> = (0..n_tokens).filter(|t| !outputs_only || t % 2 == 0).collect();
                let from = selected.iter().flat_map(|t| t * rows..(t + 1) * rows);
                let want: Vec<f32> = from
                    .enumerate()
                    .flat_map(|(i, r)| norm_twin(shape, &row(r, &x), &weights, &row(i, &before)))
                    .collect();
                let got: Vec<f32> = gpu.read(target, want.len()).unwrap();
                let error = nmse(&got, &want);
                // As `rmsnorm`. A row of one element less its mean consists of rounding errors only, and is not
                // compared.
                assert!(error < 1e-12 || (n == 1 && kind == Some(NormKind::Layer)), "{shape:?}: {error:e}");
            }
        }
    }
}

#[test]
fn norms_write_columns_of_rows() {
    for (gpu, (n, rows, n_tokens)) in on_variants(&SHAPES) {
        let (at, y_width) = (n, 3 * n * rows + 1);
        let columns = Some(NormColumns { at, y_width });
        let shape =
            NormShape { rows, kind: Some(NormKind::Rms), eps: 1e-3, weight: true, columns, ..NormShape::of_row(n) };
        let (x, before, weights) = (random(1, n * rows * n_tokens), random(2, y_width * n_tokens), random(3, n));
        let buffers = [&x, &before, &weights].map(|v| gpu.upload("x", v).unwrap());
        let [gx, gy, gw] = &buffers;
        let batch: Vec<_> = (0..n_tokens).map(|pos| BatchToken { id: 0, seq: 0, pos, output: false }).collect();
        let words = gpu.upload("batch", &batch_words(&batch)).unwrap();
        run(gpu, &[norm(gpu, shape, Some(gx), Some(gw), gy, &words).unwrap()], n_tokens);
        let mut want = before.clone();
        for (to, from) in want.chunks_exact_mut(y_width).zip(x.chunks_exact(n * rows)) {
            for (to, from) in to[at..].chunks_exact_mut(n).zip(from.chunks_exact(n)) {
                let result = norm_twin(shape, from, &weights, to);
                to.copy_from_slice(&result);
            }
        }
        let got: Vec<f32> = gpu.read(gy, want.len()).unwrap();
        let error = nmse(&got, &want);
        assert!(error < 1e-12, "{shape:?}: {error:e}");
        let outside = NormShape { columns: Some(NormColumns { at: y_width, y_width }), ..shape };
        assert!(norm(gpu, outside, Some(gx), Some(gw), gy, &words).is_err());
    }
}

#[test]
fn scale_matches_its_twin() {
    for gpu in variants() {
        for (n, _, n_tokens) in SHAPES {
            for soft_cap in [None, Some(5.0)] {
                let shape = ScaleShape { n, scale: 20.0, soft_cap, outputs_only: false };
                let x = random(1, n * n_tokens);
                let gx = gpu.upload("x", &x).unwrap();
                run(gpu, &[scale(gpu, shape, &gx).unwrap()], n_tokens);
                let want: Vec<f32> = x.iter().map(|&x| scale_twin(shape, x)).collect();
                let error = nmse(&gpu.read::<f32>(&gx, x.len()).unwrap(), &want);
                // Vulkan computes tanh from two exponentials, with a few units of 2^-24.
                assert!(error < 1e-11, "{shape:?}: {error:e}");
            }
        }
    }
}

#[test]
fn embedding_sum_matches_its_twin() {
    for gpu in variants() {
        for (n, _, n_tokens) in SHAPES {
            for (types, positions) in [(true, true), (true, false), (false, true), (false, false)] {
                let (x, row, table) = (random(1, n * n_tokens), random(2, n), random(3, n * 20));
                let [gx, gr, gt] = [&x, &row, &table].map(|v| gpu.upload("x", v).unwrap());
                let batch = crate::support::batch(gpu, n_tokens, 5);
                let dispatch =
                    embedding_sum(gpu, n, 1.5, &gx, types.then_some(&gr), positions.then_some((&gt, 20)), &batch);
                run(gpu, &[dispatch.unwrap()], n_tokens);
                let want = (0..n_tokens).flat_map(|t| {
                    let row: &[f32] = if types { &row } else { &[] };
                    let position: &[f32] = if positions { &table[(5 + t) * n..][..n] } else { &[] };
                    embedding_sum_twin(1.5, &x[t * n..][..n], row, position)
                });
                let error = nmse(&gpu.read::<f32>(&gx, x.len()).unwrap(), &want.collect::<Vec<_>>());
                assert!(error < 1e-13, "n {n}, {types} {positions}: {error:e}");
            }
        }
    }
}

#[test]
fn given_rows_are_not_scaled_and_have_learned_positions() {
    let (gpu, n, tokens) = (&variants()[0], 7, [4, 5, 6].map(|pos| BatchToken { id: 0, seq: 0, pos, output: false }));
    let (x, row, table) = (random(1, 3 * n), random(2, n), random(3, n * 20));
    let [gx, gr, gt] = [&x, &row, &table].map(|v| gpu.upload("x", v).unwrap());
    let place = |i: usize| InputPlace { rope_row: 0, position: 3 + 2 * i as u32, has_row: i != 1 };
    let batch = gpu.upload("batch", &batch_words_at(&tokens, place)).unwrap();
    run(gpu, &[embedding_sum(gpu, n, 1.5, &gx, Some(&gr), Some((&gt, 20)), &batch).unwrap()], 3);
    let want = (0..3).flat_map(|t| {
        let scale = if t == 1 { 1.5 } else { 1.0 };
        embedding_sum_twin(scale, &x[t * n..][..n], &row, &table[(3 + 2 * t) * n..][..n])
    });
    let error = nmse(&gpu.read::<f32>(&gx, x.len()).unwrap(), &want.collect::<Vec<_>>());
    assert!(error < 1e-13, "{error:e}");
}

#[test]
fn activations_match_their_twin() {
    let all = [
        Activation::Silu,
        Activation::Gelu,
        Activation::ReluSquared,
        Activation::ClampedSwiglu { limit: 7.0 },
        Activation::ClampedSilu { limit: 5.0 },
        Activation::SparseGelu { n_std: 0.8 },
    ];
    for gpu in variants() {
        for ((n, _, n_tokens), kind) in SHAPES.into_iter().flat_map(|shape| all.map(|kind| (shape, kind))) {
            let gate: Vec<f32> = random(1, n * n_tokens).iter().map(|v| 9.0 * v).collect();
            let (stride, at) = (2 * n + 3, n + 1);
            let ups: Vec<f32> = random(2, stride * n_tokens).iter().map(|v| 9.0 * v).collect();
            let up: Vec<f32> = ups.chunks(stride).flat_map(|row| row[at..at + n].to_vec()).collect();
            let pairs: Vec<f32> = gate.iter().zip(&up).flat_map(|(&g, &u)| [g, u]).collect();
            let [gg, gu, gp] = [&gate, &ups, &pairs].map(|v| gpu.upload("x", v).unwrap());
            for (gating, x, has_up) in [
                (Gating::None, &gg, false),
                (Gating::Pairs, &gp, true),
                (Gating::Rows { up: &gu, stride, at }, &gg, true),
            ] {
                let y = poisoned(gpu, n * n_tokens);
                run(gpu, &[activation(gpu, kind, n, gating, x, &y).unwrap()], n_tokens);
                let rows = gate.chunks(n).zip(up.chunks(n));
                let want: Vec<f32> =
                    rows.flat_map(|(gate, up)| activation_twin(kind, gate, has_up.then_some(up))).collect();
                let error = nmse(&gpu.read::<f32>(&y, n * n_tokens).unwrap(), &want);
                // As `ffn_silu`.
                assert!(error < 4e-12, "{kind:?}, {n} elements, {gating:?}: {error:e}");
            }
        }
    }
}

#[test]
fn row_gates_match_their_twin() {
    for gpu in variants() {
        for (n, _, n_tokens) in SHAPES {
            let [x, y] = [1, 2].map(|seed| random(seed, n * n_tokens));
            let gate = random(3, n);
            let [gx, gg, gy] = [&x, &gate, &y].map(|v| gpu.upload("x", v).unwrap());
            run(gpu, &[row_gate(gpu, n, &gx, &gg, &gy).unwrap()], n_tokens);
            let rows = x.chunks(n).zip(y.chunks(n));
            let want: Vec<f32> = rows.flat_map(|(x, y)| row_gate_twin(x, &gate, y)).collect();
            let error = nmse(&gpu.read::<f32>(&gy, n * n_tokens).unwrap(), &want);
            assert!(error < 1e-12, "n {n}, {n_tokens} tokens: {error:e}");
        }
    }
}

#[test]
fn gates_of_attention_match_their_twin() {
    for gpu in variants() {
        for (n_head, head_dim, n_tokens) in [(1, 2, 1), (3, 40, 7), (6, 64, 33), (5, 96, 2)] {
            for width in [GateWidth::Element, GateWidth::Head] {
                for activation in [GateActivation::Sigmoid, GateActivation::Softplus] {
                    let (n, first) = (n_head * head_dim, 2 * head_dim + 1);
                    let stride = first + n + 3;
                    let shape = AttentionGateShape { n_head, head_dim, width, activation, stride, first };
                    // From where a gate lets almost nothing through to where powers overflow.
                    let cube = |x: &f32| 100.0 * x * x * x;
                    let projected: Vec<f32> = random(1, stride * n_tokens).iter().map(cube).collect();
                    let y = random(2, n * n_tokens);
                    let [gpu_projected, gpu_y] = [&projected, &y].map(|v| gpu.upload("x", v).unwrap());
                    run(gpu, &[attention_gate(gpu, &shape, &gpu_projected, &gpu_y).unwrap()], n_tokens);
                    let rows = projected.chunks(stride).zip(y.chunks(n));
                    let want: Vec<f32> = rows.flat_map(|(row, y)| attention_gate_twin(&shape, row, y)).collect();
                    let got: Vec<f32> = gpu.read(&gpu_y, want.len()).unwrap();
                    let error = nmse(&got, &want);
                    assert!(error < 1e-12, "{shape:?}, {n_tokens} tokens: {error:e}");
                    // Small factors are as exact as large ones.
                    for (got, want) in got.iter().zip(&want) {
                        assert!((got - want).abs() <= 2e-5 * want.abs() + 1e-30, "{shape:?}: {got} for {want}");
                    }
                }
            }
        }
    }
    let gpu = &variants()[0];
    let [projected, y] = [10, 8].map(|n| poisoned(gpu, n));
    let (width, activation) = (GateWidth::Element, GateActivation::Sigmoid);
    let shape = AttentionGateShape { n_head: 2, head_dim: 4, width, activation, stride: 10, first: 3 };
    assert!(attention_gate(gpu, &shape, &projected, &y).is_err(), "gates beyond the row");
}
