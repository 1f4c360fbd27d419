//! Tests of products with F32 activations, and of embeddings.

use half::{bf16, f16};
use metal_attention_gguf::TensorType;

use super::packed::{multiply, packed_types, random_blocks};
use crate::activations::Q8Activations;
use crate::kernels::matmul::{MatmulOp, WeightMatrix, embedding, matmul, matmul_with_bias};
use crate::simd::Isa;
use crate::test_support::{TestRandom, matrix, pool, tensor};

/// Checks the product `y`, added to `before`, against float64: the error is a few roundings of the sum of magnitudes.
fn check(matrix: &WeightMatrix, weights: &[f32], x: &[f32], y: &[f32], before: &[f32], what: &str) {
    let (n_in, n_out) = (matrix.n_in(), matrix.n_out());
    for (token, x) in x.chunks_exact(n_in).enumerate() {
        for row in 0..n_out {
            let products = weights[row * n_in..][..n_in].iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
            let start = f64::from(before[token * n_out + row]);
            let magnitude = products.clone().map(f64::abs).sum::<f64>() + start.abs();
            let want = products.sum::<f64>() + start;
            let got = f64::from(y[token * n_out + row]);
            assert!((got - want).abs() <= 1e-6 * magnitude, "{what} token {token} row {row}: {got} {want}");
        }
    }
}

fn float_bytes(ty: TensorType, values: &[f32]) -> Vec<u8> {
    match ty {
        TensorType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        TensorType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        TensorType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        _ => unreachable!("a float type"),
    }
}

#[test]
fn float_matrices() {
    let mut random = TestRandom(1);
    let pool = pool(2);
    for ty in [TensorType::F32, TensorType::F16, TensorType::BF16] {
        for n_in in [1, 15, 16, 17, 172, 576] {
            for n_out in [1, 15, 16, 17, 33] {
                let tensor = tensor(ty, n_in, n_out, &float_bytes(ty, &random.floats(n_in * n_out, 1.0)));
                let matrix = matrix(&pool, &tensor, false);
                assert!(!matrix.reads_q8());
                assert_eq!(matrix.packed_bytes(), n_out.next_multiple_of(16) * ty.row_bytes(n_in));
                let x = random.floats(17 * n_in, 3.0);
                for isa in Isa::available() {
                    for accumulate in [false, true] {
                        let start = if accumulate { random.floats(17 * n_out, 1.0) } else { vec![0.0; 17 * n_out] };
                        let all = multiply(&pool, isa, &matrix, &x, &start, accumulate);
                        let what = format!("{isa:?} {ty} {n_in} x {n_out}");
                        check(&matrix, &tensor.to_f32(), &x, &all, &start, &what);
                        for n in [1, 2, 3, 5, 7, 8, 9] {
                            let some = multiply(&pool, isa, &matrix, &x[..n * n_in], &start[..n * n_out], accumulate);
                            assert_eq!(some, all[..n * n_out], "{what}: {n} tokens as 17");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn many_tokens_have_the_bits_of_few_with_the_bias_added() {
    let mut random = TestRandom(9);
    let pool = pool(2);
    let (n_in, n_out, n) = (172, 49, 300);
    let (x, bias) = (random.floats(n * n_in, 3.0), random.floats(n_out, 1.0));
    for ty in [TensorType::F32, TensorType::F16, TensorType::BF16] {
        let tensor = tensor(ty, n_in, n_out, &float_bytes(ty, &random.floats(n_in * n_out, 1.0)));
        let matrix = matrix(&pool, &tensor, false);
        for isa in Isa::available() {
            let all = multiply(&pool, isa, &matrix, &x, &vec![0.0; n * n_out], false);
            for (some, all) in x.chunks(11 * n_in).zip(all.chunks(11 * n_out)) {
                assert_eq!(multiply(&pool, isa, &matrix, some, &vec![0.0; all.len()], false), all, "{isa:?} {ty}");
            }
            let mut y = vec![f32::NAN; n * n_out];
            let product = MatmulOp { matrix: &matrix, rows: 0..n, y: &mut y, accumulate: false };
            matmul_with_bias(&pool, isa, &x, &mut Q8Activations::default(), &mut [product], Some(&bias));
            let with_bias = |row: &[f32]| row.iter().zip(&bias).map(|(v, bias)| bias + v).collect::<Vec<_>>();
            assert_eq!(y, all.chunks_exact(n_out).flat_map(with_bias).collect::<Vec<_>>(), "{isa:?} {ty}");
        }
    }
}

#[test]
fn quantised_matrices_in_exact_mode() {
    let mut random = TestRandom(2);
    for (n_threads, ty) in (1..=4).cycle().zip(packed_types()) {
        let pool = pool(n_threads);
        let (n_in, n_out) = (512, 33);
        let tensor = tensor(ty, n_in, n_out, &random_blocks(&mut random, ty, n_in * n_out));
        let matrix = matrix(&pool, &tensor, true);
        assert!(!matrix.reads_q8());
        let x = random.floats(5 * n_in, 1.0);
        for isa in Isa::available() {
            let y = multiply(&pool, isa, &matrix, &x, &[0.0; 5 * 33], false);
            check(&matrix, &tensor.to_f32(), &x, &y, &[0.0; 5 * 33], &format!("{isa:?} {ty}"));
        }
    }
}

#[test]
fn several_products_share_a_region() {
    let mut random = TestRandom(3);
    let n_in = 256;
    let kinds = [(TensorType::Q4_0, 17), (TensorType::F32, 16), (TensorType::Q6_K, 33), (TensorType::F16, 1)];
    let tensors = kinds.map(|(ty, n_out)| {
        let bytes = match ty {
            TensorType::F32 | TensorType::F16 => float_bytes(ty, &random.floats(n_in * n_out, 1.0)),
            _ => random_blocks(&mut random, ty, n_in * n_out),
        };
        tensor(ty, n_in, n_out, &bytes)
    });
    for n_threads in 1..=4 {
        let pool = pool(n_threads);
        let matrices = tensors.each_ref().map(|t| matrix(&pool, t, false));
        for n_tokens in [1, 6] {
            let x = random.floats(n_tokens * n_in, 1.0);
            for isa in Isa::available() {
                let mut q8 = Q8Activations::default();
                let mut results = matrices.each_ref().map(|m| vec![0.5; n_tokens * m.n_out()]);
                let mut products: Vec<_> = matrices
                    .iter()
                    .zip(&mut results)
                    .enumerate()
                    .map(|(i, (matrix, y))| MatmulOp { matrix, rows: 0..n_tokens, y, accumulate: i % 2 == 0 })
                    .collect();
                matmul(&pool, isa, &x, &mut q8, &mut products);
                for (i, (matrix, y)) in matrices.iter().zip(&results).enumerate() {
                    let start = vec![0.5; y.len()];
                    assert_eq!(*y, multiply(&pool, isa, matrix, &x, &start, i % 2 == 0), "{isa:?} product {i}");
                }
            }
        }
    }
}

#[test]
fn an_embedding_is_a_row_of_the_table() {
    let mut random = TestRandom(4);
    let table = tensor(TensorType::Q8_0, 64, 5, &random_blocks(&mut random, TensorType::Q8_0, 64 * 5));
    let all = table.to_f32();
    for id in 0..5 {
        let mut row = [0.0; 64];
        embedding(&table, id, &mut row);
        assert_eq!(row, all[64 * id..][..64]);
    }
}
