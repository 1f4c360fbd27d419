//! `embedding`, the lookup of token embeddings, against the dequantised table: every tensor type, split tables, unusual
//! sizes.

use crate::support::matrices::{scaled_tensor, tensor, tensors};
use crate::support::{on_variants, poisoned, run, variants};
use metal_attention_gguf::{Tensor, TensorType};
use metal_attention_model::BatchToken;
use metal_attention_wgpu::kernels::{embedding, embedding_twin};
use metal_attention_wgpu::{Arena, InputPlace, WgpuDevice, WgpuMatrix, batch_words, batch_words_at};

/// The GPU's embeddings of `ids`, `[ids.len(), n_embd]`.
fn gpu_embeddings(gpu: &WgpuDevice, table: &WgpuMatrix, ids: &[u32]) -> Vec<f32> {
    let tokens: Vec<_> =
        ids.iter().enumerate().map(|(pos, &id)| BatchToken { id, seq: 0, pos, output: false }).collect();
    let batch = gpu.upload("batch", &batch_words(&tokens)).unwrap();
    let x = poisoned(gpu, ids.len() * table.n_in());
    run(gpu, &embedding(gpu, table, &x, true, &batch).unwrap(), ids.len());
    gpu.read(&x, ids.len() * table.n_in()).unwrap()
}

/// Checks that elements are equal up to one rounding, of the addition of a minimum.
fn assert_equal(got: &[f32], want: &[f32], what: &str) {
    let largest = want.iter().fold(0.0f32, |m, w| m.max(w.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= largest * f32::EPSILON, "{what}: element {i} is {g}, not {w}");
    }
}

#[test]
fn every_type_gives_the_dequantised_values_of_the_file() {
    for (gpu, ty) in on_variants(TensorType::ALL) {
        for n_blocks in [1, 2, 3] {
            let (n_embd, n_vocab) = (n_blocks * ty.block_len(), 7);
            let table = tensor(ty, n_embd, n_vocab, 1);
            let matrix = WgpuMatrix::concat(gpu, "table", &[&table], &mut Arena::default()).unwrap();
            let ids = [6, 0, 3, 3, 5];
            let got = gpu_embeddings(gpu, &matrix, &ids);
            let want = embedding_twin(&table.to_f32(), n_embd, &ids);
            assert_equal(&got, &want, &format!("{ty}, {n_embd}"));
        }
    }
}

/// Super-blocks of 256 values multiply scales by a scale, so that scales may be subnormal F16 numbers.
#[test]
fn subnormal_scales_keep_their_value() {
    for (gpu, ty) in on_variants(TensorType::ALL) {
        let n_embd = 2 * ty.block_len().max(32);
        let scale = match ty {
            // NVFP4's scales have 8 bits, and the smallest normal one is 2^-7.
            TensorType::NVFP4 => 0.05,
            _ if ty.block_len() == 256 => 1e-3,
            _ => 1e-5,
        };
        let table = scaled_tensor(ty, n_embd, 3, 3, scale);
        let matrix = WgpuMatrix::concat(gpu, "table", &[&table], &mut Arena::default()).unwrap();
        let want = table.to_f32();
        assert!(want.iter().any(|&w| w != 0.0), "{ty}");
        assert_equal(&gpu_embeddings(gpu, &matrix, &[0, 1, 2]), &want, &format!("{ty}"));
    }
}

#[test]
fn unusual_sizes_and_a_large_vocabulary() {
    let gpu = &variants()[0];
    for (ty, n_embd, n_vocab) in [
        (TensorType::F32, 1, 1),
        (TensorType::F32, 7, 3),
        (TensorType::F16, 31, 5),
        (TensorType::F16, 33, 5),
        (TensorType::BF16, 1001, 4),
        (TensorType::Q8_0, 2048, 33),
        (TensorType::Q4_0, 576, 49_152),
    ] {
        let table = tensor(ty, n_embd, n_vocab, 2);
        let matrix = WgpuMatrix::concat(gpu, "table", &[&table], &mut Arena::default()).unwrap();
        let last = n_vocab as u32 - 1;
        let ids = [last, 0, last / 2];
        let want = embedding_twin(&table.to_f32(), n_embd, &ids);
        assert_equal(&gpu_embeddings(gpu, &matrix, &ids), &want, &format!("{ty}, {n_vocab} x {n_embd}"));
    }
}

#[test]
fn a_split_table_and_one_of_two_types() {
    for gpu in variants() {
        let tables = tensors(&[(TensorType::Q4_0, 64, 100), (TensorType::F16, 64, 31)], 3);
        let matrix =
            WgpuMatrix::concat(gpu, "table", &[&tables[0], &tables[1]], &mut Arena::default().with_max_slice(1000))
                .unwrap();
        assert!(matrix.parts().len() > 5);
        let all: Vec<f32> = tables.iter().flat_map(Tensor::to_f32).collect();
        let ids: Vec<u32> = (0..131).rev().collect();
        assert_equal(&gpu_embeddings(gpu, &matrix, &ids), &embedding_twin(&all, 64, &ids), "split");

        // Rows of two tables alternate.
        let tables = tensors(&[(TensorType::Q4_1, 64, 9), (TensorType::Q8_0, 64, 9)], 4);
        let matrix = WgpuMatrix::interleave(gpu, "table", &tables[0], &tables[1], &mut Arena::default()).unwrap();
        assert!(!matrix.has_pairs());
        let (a, b) = (tables[0].to_f32(), tables[1].to_f32());
        let all: Vec<f32> = a.chunks(64).zip(b.chunks(64)).flat_map(|(a, b)| [a, b].concat()).collect();
        let ids: Vec<u32> = (0..18).collect();
        assert_equal(&gpu_embeddings(gpu, &matrix, &ids), &embedding_twin(&all, 64, &ids), "interleaved");
    }
}

#[test]
fn given_rows_are_spared() {
    let gpu = &variants()[0];
    let table = tensor(TensorType::F32, 8, 3, 5);
    let matrix = WgpuMatrix::concat(gpu, "table", &[&table], &mut Arena::default()).unwrap();
    let tokens = [0, 1, 2].map(|pos| BatchToken { id: 2 - pos as u32, seq: 0, pos, output: false });
    let given = |i| InputPlace { has_row: i == 1, ..InputPlace::of_text(i as u32) };
    let batch = gpu.upload("batch", &batch_words_at(&tokens, given)).unwrap();
    for spares_rows in [true, false] {
        let x = gpu.upload("x", &[0.5_f32; 24]).unwrap();
        run(gpu, &embedding(gpu, &matrix, &x, spares_rows, &batch).unwrap(), 3);
        let mut want = embedding_twin(&table.to_f32(), 8, &[2, 1, 0]);
        if spares_rows {
            want[8..16].fill(0.5);
        }
        assert_equal(&gpu.read::<f32>(&x, 24).unwrap(), &want, "given rows");
    }
}

#[test]
fn an_id_outside_the_vocabulary_writes_nothing() {
    let gpu = &variants()[0];
    let table = tensor(TensorType::F32, 8, 3, 5);
    let matrix = WgpuMatrix::concat(gpu, "table", &[&table], &mut Arena::default()).unwrap();
    let got = gpu_embeddings(gpu, &matrix, &[3, 1, u32::MAX]);
    assert!(got[..8].iter().all(|x| x.is_nan()) && got[16..].iter().all(|x| x.is_nan()));
    assert_equal(&got[8..16], &table.to_f32()[8..16], "the row between");
}
