//! `top_k` against a sort on the CPU: the same lists, bit for bit.

use crate::support::{poisoned, random, run, variants};
use metal_attention_model::{TopK, highest};
use metal_attention_wgpu::WgpuDevice;
use metal_attention_wgpu::kernels::{top_k, top_k_list, top_k_scratch_bytes};

/// The GPU's top-k list of each row of `logits`, `[n_rows, n_vocab]`.
fn lists(gpu: &WgpuDevice, n_vocab: usize, k: usize, logits: &[f32]) -> Vec<TopK> {
    let n_rows = logits.len() / n_vocab;
    let logits = gpu.upload("logits", logits).unwrap();
    let scratch = gpu.buffer("scratch", top_k_scratch_bytes(n_vocab, k, n_rows)).unwrap();
    let best = poisoned(gpu, 2 * k * n_rows);
    run(gpu, &top_k(gpu, n_vocab, k, &logits, &scratch, &best).unwrap(), n_rows);
    gpu.read::<[u32; 2]>(&best, k * n_rows).unwrap().chunks(k).map(top_k_list).collect()
}

#[test]
fn known_rows() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for gpu in variants() {
        let list = |row: &[f32]| lists(gpu, row.len(), 4, row).remove(0);
        assert_eq!(list(&[1.0, 5.0, 3.0, 4.0, 2.0]), [(1, 5.0), (3, 4.0), (2, 3.0), (4, 2.0)]);
        assert_eq!(list(&[2.5; 6]), [(0, 2.5), (1, 2.5), (2, 2.5), (3, 2.5)]);
        assert_eq!(list(&[-1.0, nan, -2.0]), [(0, -1.0), (2, -2.0)]);
        assert_eq!(list(&[nan, inf, -inf, inf, 0.0]), [(1, inf), (3, inf), (4, 0.0), (2, -inf)]);
        assert_eq!(list(&[-1.0, -0.0, 0.0, 1e-45]), [(3, 1e-45), (1, 0.0), (2, 0.0), (0, -1.0)]);
        assert_eq!(list(&[7.0]), [(0, 7.0)]);
        assert_eq!(list(&[nan]), []);
    }
}

#[test]
fn vocabularies_and_lists_of_all_sizes() {
    for gpu in variants() {
        let shapes = [(2, 2, 1), (2047, 32, 3), (2049, 64, 2), (49_152, 64, 3), (49_152, 128, 1), (151_936, 128, 1)];
        for (n_vocab, k, n_rows) in shapes {
            // Few different values, so that many are equal; and some NaN.
            let mut logits: Vec<f32> =
                random(k as u64, n_vocab * n_rows).iter().map(|v| (v * 1000.0).round() / 50.0).collect();
            logits.iter_mut().step_by(97).for_each(|v| *v = f32::NAN);
            let want: Vec<TopK> = logits.chunks(n_vocab).map(|row| highest(row, k)).collect();
            assert_eq!(lists(gpu, n_vocab, k, &logits), want, "vocabulary {n_vocab}, k {k}");
        }
    }
}
