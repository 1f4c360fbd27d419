//! `argmax` against the CPU's argmax: the same index for every row.

use crate::support::{batch_with_pages, poisoned, random, run, run_sized, variants};
use metal_attention_model::BatchToken;
use metal_attention_wgpu::kernels::{argmax, argmax_scratch_bytes};
use metal_attention_wgpu::{BatchDims, WgpuDevice, batch_words};

/// The GPU's argmax of each row of `logits`, `[n_rows, n_vocab]`.
fn gpu_argmax(gpu: &WgpuDevice, n_vocab: usize, logits: &[f32]) -> Vec<u32> {
    let n_rows = logits.len() / n_vocab;
    let logits = gpu.upload("logits", logits).unwrap();
    let scratch = gpu.buffer("scratch", argmax_scratch_bytes(n_vocab, n_rows)).unwrap();
    let ids = poisoned(gpu, n_rows);
    run(gpu, &argmax(gpu, n_vocab, &logits, &scratch, &ids, None).unwrap(), n_rows);
    gpu.read(&ids, n_rows).unwrap()
}

/// Compares the GPU's argmax of each row with the CPU's.
fn assert_equals_cpu(gpu: &WgpuDevice, n_vocab: usize, logits: &[f32], what: &str) {
    let want: Vec<u32> = logits.chunks(n_vocab).map(metal_attention_model::argmax).collect();
    assert_eq!(gpu_argmax(gpu, n_vocab, logits), want, "{what}, vocabulary {n_vocab}");
}

#[test]
fn known_rows() {
    let (nan, inf, tiny) = (f32::NAN, f32::INFINITY, f32::from_bits(1));
    let rows: &[(&str, [f32; 5], u32)] = &[
        ("a known vector", [1.0, 7.0, -3.0, 6.9, 0.0], 1),
        ("all equal", [2.5; 5], 0),
        ("the last is the largest", [-1.0, 0.0, 1.0, 2.0, 3.0], 4),
        ("negatives", [-5.0, -4.0, -3.5, -4.5, -9.0], 2),
        ("two largest", [0.0, 4.0, 1.0, 4.0, 4.0], 1),
        ("NaN before, between and after", [nan, -8.0, nan, -7.0, nan], 3),
        ("NaN of either sign, with a payload", [f32::from_bits(0xffc0_0001), 0.0, -nan, 1.0, nan], 3),
        ("only NaN", [nan; 5], 0),
        ("infinity", [1.0, inf, nan, inf, f32::MAX], 1),
        ("only -infinity", [-inf; 5], 0),
        ("-infinity and NaN", [nan, nan, -inf, nan, -inf], 2),
        ("-infinity and the lowest number", [-inf, -inf, f32::MIN, -inf, nan], 2),
        ("both zeros are equal", [-1.0, -0.0, 0.0, -0.0, -1.0], 1),
        ("both zeros, in reverse order", [-1.0, 0.0, -0.0, 0.0, -1.0], 1),
        ("denormals", [0.0, tiny, 2.0 * tiny, -tiny, -0.0], 2),
        ("negative denormals", [-3.0 * tiny, -tiny, -2.0 * tiny, -1.0, -tiny], 1),
    ];
    let logits: Vec<f32> = rows.iter().flat_map(|(_, row, _)| *row).collect();
    for gpu in variants() {
        let got = gpu_argmax(gpu, 5, &logits);
        for ((what, row, want), got) in rows.iter().zip(got) {
            assert_eq!(metal_attention_model::argmax(row), *want, "{what}, on the CPU");
            assert_eq!(got, *want, "{what}");
        }
        assert_equals_cpu(gpu, 1, &[3.0, nan, -inf], "one element");
        assert_equals_cpu(gpu, 2, &[1.0, 1.0, 0.0, 1.0, 1.0, 0.0, nan, -inf, nan, nan], "two elements");
    }
}

#[test]
fn vocabularies_and_row_counts_of_all_sizes() {
    for gpu in variants() {
        for (n_vocab, n_rows) in [(1, 1), (3, 7), (1023, 2), (1024, 3), (1025, 2), (49_152, 3), (151_936, 1)] {
            let mut logits = random(n_vocab as u64, n_vocab * n_rows);
            assert_equals_cpu(gpu, n_vocab, &logits, "random");
            // The largest value last, then also earlier, so that the earlier one must be returned.
            for row in logits.chunks_mut(n_vocab) {
                row[n_vocab - 1] = 2.0;
            }
            assert_equals_cpu(gpu, n_vocab, &logits, "the last is the largest");
            for row in logits.chunks_mut(n_vocab) {
                row[n_vocab / 2] = 2.0;
                row[n_vocab / 3] = f32::NAN;
            }
            assert_equals_cpu(gpu, n_vocab, &logits, "ties and NaN");
        }
        // More chunks than the second stage has invocations.
        let mut logits = vec![-1.0; 300_001];
        logits[299_999] = 0.5;
        assert_equals_cpu(gpu, logits.len(), &logits, "a large vocabulary");
    }
}

#[test]
fn argmax_writes_the_next_tokens_into_the_batch() {
    let (n_vocab, n_tokens) = (6, 4);
    let has_logits = [false, true, true, false];
    let tokens: Vec<_> = (0..n_tokens)
        .map(|i| BatchToken { id: 100 + i as u32, seq: i % 2, pos: 10 * i, output: has_logits[i] })
        .collect();
    for gpu in variants() {
        let logits = gpu.upload("logits", &[0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0f32]).unwrap();
        let batch = batch_with_pages(gpu, &tokens, 130, &[vec![7, 8, 9], vec![3, 2, 1]]);
        let scratch = gpu.buffer("scratch", argmax_scratch_bytes(n_vocab, 2)).unwrap();
        let ids = poisoned(gpu, 2);
        let dispatches = argmax(gpu, n_vocab, &logits, &scratch, &ids, Some(batch.buffer())).unwrap();
        let size = BatchDims { n_tokens: n_tokens as u32, n_outputs: 2, n_runs: 1, n_splits: 1 };
        run_sized(gpu, &dispatches, size);
        assert_eq!(gpu.read::<u32>(&ids, 2).unwrap(), [2, 5]);
        let mut want = batch_words(&tokens);
        want[0][2..].copy_from_slice(&[9, 6]);
        (want[3][0], want[3][1]) = (2, 11);
        want[4][..2].copy_from_slice(&[11, 11]);
        (want[5][0], want[5][1]) = (5, 21);
        want[6][..2].copy_from_slice(&[21, 21]);
        // The KV pages of each sequence, after those of another cache group.
        want.extend([[9, 8, 7, 7], [8, 9, 1, 2], [3, 3, 2, 1]]);
        assert_eq!(gpu.read::<[u32; 4]>(batch.buffer(), want.len()).unwrap(), want);
    }
}
