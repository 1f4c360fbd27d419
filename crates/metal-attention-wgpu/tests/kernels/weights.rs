//! `WgpuMatrix`, a weight matrix on the GPU: its size, its parts, and errors.

use crate::support::gpu;
use crate::support::matrices::{tensor, tensors};
use metal_attention_gguf::TensorType;
use metal_attention_wgpu::{Arena, WgpuError, WgpuMatrix};

#[test]
fn a_matrix_is_little_larger_than_in_the_file() {
    let Some(gpu) = gpu() else { return };
    for &ty in TensorType::ALL {
        let n_in = if 576 % ty.block_len() == 0 { 576 } else { 768 };
        // Enough rows that a codebook in the same buffer hardly counts.
        let w = tensor(ty, n_in, 1000, 1);
        let matrix = WgpuMatrix::concat(gpu, "w", &[&w], &mut Arena::default()).unwrap();
        let ratio = matrix.bytes() as f64 / w.bytes().len() as f64;
        let limit = match ty {
            // Unpacked when loaded.
            TensorType::IQ3_S | TensorType::TQ1_0 => 1.25,
            // The bits between the scales, which form a scale of scales, are stored separately.
            TensorType::IQ1_M => 1.08,
            _ => 1.05,
        };
        assert!((1.0..limit).contains(&ratio), "{ty}: {ratio:.3} of the file");
    }
}

#[test]
fn parts_cover_every_row_once() {
    let Some(gpu) = gpu() else { return };
    let w = tensors(&[(TensorType::Q4_0, 64, 50), (TensorType::Q8_0, 64, 31), (TensorType::Q4_0, 64, 2)], 2);
    let matrices = [
        WgpuMatrix::concat(gpu, "w", &w.iter().collect::<Vec<_>>(), &mut Arena::default()).unwrap(),
        WgpuMatrix::concat(gpu, "w", &w.iter().collect::<Vec<_>>(), &mut Arena::default().with_max_slice(200)).unwrap(),
    ];
    assert_eq!(matrices.each_ref().map(|m| m.parts().len()), [3, 13 + 16 + 1]);
    for matrix in matrices {
        assert_eq!((matrix.n_in(), matrix.n_out()), (64, 83));
        let mut rows: Vec<usize> =
            matrix.parts().iter().flat_map(|p| (0..p.n_rows).map(|r| p.first_row + r * p.row_step)).collect();
        rows.sort_unstable();
        assert_eq!(rows, (0..83).collect::<Vec<_>>());
    }
}

#[test]
fn mismatched_and_oversized_tensors_are_refused() {
    let Some(gpu) = gpu() else { return };
    let w = tensors(&[(TensorType::Q4_0, 64, 4), (TensorType::Q4_0, 32, 4), (TensorType::Q4_0, 64, 6)], 3);
    let message = |result: Result<WgpuMatrix, WgpuError>| result.unwrap_err().to_string();
    let error = message(WgpuMatrix::concat(gpu, "qkv of layer 0", &[&w[0], &w[1]], &mut Arena::default()));
    assert!(error.contains("qkv of layer 0") && error.contains("rows of w0 have 64 elements"), "{error}");
    let error = message(WgpuMatrix::interleave(gpu, "gate_up", &w[0], &w[2], &mut Arena::default()));
    assert!(error.contains("w0 has 4 rows and w2 has 6"), "{error}");
    assert!(message(WgpuMatrix::concat(gpu, "nothing", &[], &mut Arena::default())).contains("no tensors"));
    // A part must have at least two rows.
    let error = WgpuMatrix::concat(gpu, "w", &[&w[0]], &mut Arena::default().with_max_slice(64)).unwrap_err();
    assert!(matches!(error, WgpuError::TooLarge { bytes: 144, max: 64, .. }), "{error}");
}
