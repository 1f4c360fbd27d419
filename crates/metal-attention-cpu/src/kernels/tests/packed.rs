//! Tests of products of repacked quantised matrices and 8-bit activations.

use metal_attention_gguf::{TensorType, blocks};

use crate::activations::{BLOCK, Q8Activations};
use crate::kernels::matmul::{MatmulOp, WeightMatrix, matmul};
use crate::pool::ThreadPool;
use crate::simd::Isa;
use crate::test_support::{TestRandom, matrix, pool, tensor};

/// Every quantised type.
pub(super) fn packed_types() -> impl Iterator<Item = TensorType> {
    TensorType::ALL.iter().copied().filter(|ty| ty.block_len() > 1)
}

/// Random blocks of `ty` for `n_elements` weights between about -1 and 1.
pub(super) fn random_blocks(random: &mut TestRandom, ty: TensorType, n_elements: usize) -> Vec<u8> {
    blocks::random_blocks(ty, n_elements, random.bits(), 1.0)
}

/// The product of `matrix` and the rows of `x`, in a copy of `start` that it replaces or, with `accumulate`, is added to.
pub(super) fn multiply(
    pool: &ThreadPool,
    isa: Isa,
    matrix: &WeightMatrix,
    x: &[f32],
    start: &[f32],
    accumulate: bool,
) -> Vec<f32> {
    let mut q8 = Q8Activations::default();
    let mut y = start.to_vec();
    let rows = 0..x.len() / matrix.n_in();
    matmul(pool, isa, x, &mut q8, &mut [MatmulOp { matrix, rows, y: &mut y, accumulate }]);
    y
}

/// `x` after quantisation to 8 bits.
fn rounded_activations(pool: &ThreadPool, isa: Isa, x: &[f32], n_in: usize) -> Vec<f64> {
    let mut q8 = Q8Activations::default();
    q8.quantize(pool, isa, x, n_in);
    let row = |token| {
        let row = q8.row(token);
        // SAFETY: a row has `n_in` codes and a block for every 32 of them.
        let (codes, blocks) = unsafe {
            (std::slice::from_raw_parts(row.codes, n_in), std::slice::from_raw_parts(row.blocks, n_in / BLOCK))
        };
        let value = |(i, code): (usize, &i8)| f64::from(*code) * f64::from(blocks[i / BLOCK].scale);
        codes.iter().enumerate().map(value).collect::<Vec<_>>()
    };
    (0..x.len() / n_in).flat_map(row).collect()
}

#[test]
fn every_format_multiplies_as_it_dequantises() {
    const TOKENS: usize = 17;
    let mut random = TestRandom(1);
    let pools = [1, 2, 3, 4].map(pool);
    for ty in packed_types() {
        let widths = if ty.block_len() == 32 { [32, 64, 288, 1536] } else { [256, 512, 768, 1536] };
        for (k, n_out) in [1, 15, 16, 17, 33, 49].into_iter().enumerate() {
            for (l, n_in) in widths.into_iter().enumerate() {
                let tensor = tensor(ty, n_in, n_out, &random_blocks(&mut random, ty, n_in * n_out));
                let pool = &pools[(k + l) % 4];
                let matrix = matrix(pool, &tensor, false);
                assert!(matrix.reads_q8() && (matrix.n_in(), matrix.n_out()) == (n_in, n_out));
                let ratio = matrix.packed_bytes() as f64 / (n_out.next_multiple_of(16) * ty.row_bytes(n_in)) as f64;
                let max_ratio = match ty {
                    // Repacked with more bits per code.
                    TensorType::IQ3_S | TensorType::TQ1_0 => 1.23,
                    TensorType::NVFP4 => 1.12,
                    TensorType::MXFP4 => 1.06,
                    TensorType::IQ3_XXS | TensorType::IQ2_XS | TensorType::IQ2_XXS | TensorType::IQ1_M => 1.07,
                    _ => 1.0,
                };
                assert!((1.0..=max_ratio).contains(&ratio), "{ty}: {ratio}");
                let weights = tensor.to_f32();
                let x = random.floats(TOKENS * n_in, 2.0);
                let start = random.floats(TOKENS * n_out, 10.0);
                for isa in Isa::available() {
                    let what = format!("{isa:?} {ty} {n_in} x {n_out}, {} threads", pool.n_threads());
                    let all = multiply(pool, isa, &matrix, &x, &start, false);
                    let added = multiply(pool, isa, &matrix, &x, &start, true);
                    let a = rounded_activations(pool, isa, &x, n_in);
                    for token in 0..TOKENS {
                        let a = &a[token * n_in..][..n_in];
                        let a_sum: f64 = a.iter().map(|a| a.abs()).sum();
                        for row in 0..n_out {
                            let w = &weights[row * n_in..][..n_in];
                            let want: f64 = w.iter().zip(a).map(|(w, a)| f64::from(*w) * a).sum();
                            // Scale and minimum are applied separately, so roundings are relative to the largest weight.
                            let largest = w.iter().fold(0f32, |m, w| m.max(w.abs()));
                            // Products of the smallest scale of MXFP4 have fewer bits than a normal float.
                            let limit = (1e-6 * f64::from(largest) * a_sum).max(f64::from(f32::MIN_POSITIVE));
                            let i = token * n_out + row;
                            let got = f64::from(all[i]);
                            assert!((got - want).abs() <= limit, "{what} token {token} row {row}: {got} {want}");
                            let (got, want) = (f64::from(added[i]), want + f64::from(start[i]));
                            assert!((got - want).abs() <= limit + 1e-6 * want.abs(), "{what} added: {got} {want}");
                        }
                    }
                    for n in [1, 2, 3, 5, 7, 8, 9] {
                        let (x, start) = (&x[..n * n_in], &start[..n * n_out]);
                        let some = multiply(pool, isa, &matrix, x, start, false);
                        assert_eq!(some, all[..n * n_out], "{what}: {n} tokens as 17");
                        let some = multiply(pool, isa, &matrix, x, start, true);
                        assert_eq!(some, added[..n * n_out], "{what}: {n} tokens added as 17");
                    }
                    // Also for the last tokens: every position in a tile gives the same bits.
                    for token in 9..TOKENS {
                        let one = multiply(pool, isa, &matrix, &x[token * n_in..][..n_in], &start[..n_out], false);
                        assert_eq!(one, all[token * n_out..][..n_out], "{what}: token {token} alone");
                    }
                }
            }
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let mut random = TestRandom(2);
    let (n_in, n_out, n_tokens) = (512, 200, 9);
    let tensor = tensor(TensorType::Q4_K, n_in, n_out, &random_blocks(&mut random, TensorType::Q4_K, n_in * n_out));
    let x = random.floats(n_tokens * n_in, 1.0);
    for isa in Isa::available() {
        let results = [1, 2, 3, 4, 7].map(|n_threads| {
            let pool = pool(n_threads);
            let matrix = matrix(&pool, &tensor, false);
            multiply(&pool, isa, &matrix, &x, &vec![0.0; n_tokens * n_out], false)
        });
        assert!(results.iter().all(|r| *r == results[0]), "{isa:?}");
    }
}

#[test]
fn activations_keep_eight_bits() {
    let mut random = TestRandom(3);
    let pool = pool(2);
    let (n_in, n_tokens) = (96, 8);
    let mut x = Vec::new();
    for limit in [1.0, 1e-3, 1e-30, 1e30, 1e-38, 0.0, 250.0, 127.0] {
        x.extend(random.floats(n_in, limit));
    }
    // A block with one number other than 0, and one with two extremes.
    x[..32].fill(0.0);
    x[5] = -3.5;
    x[32] = 1e4;
    x[33] = -1e4;
    for isa in Isa::available() {
        let mut q8 = Q8Activations::default();
        q8.quantize(&pool, isa, &x, n_in);
        assert_eq!(q8.n_in(), n_in);
        for token in 0..n_tokens {
            let row = q8.row(token);
            for b in 0..n_in / BLOCK {
                let x = &x[token * n_in + b * BLOCK..][..BLOCK];
                // SAFETY: the block lies in the row.
                let (codes, block) =
                    unsafe { (std::slice::from_raw_parts(row.codes.add(b * BLOCK), BLOCK), *row.blocks.add(b)) };
                let largest = x.iter().fold(0f32, |m, v| m.max(v.abs()));
                for (x, code) in x.iter().zip(codes) {
                    assert!(*code >= -127, "{isa:?}");
                    let error = (f64::from(*x) - f64::from(*code) * f64::from(block.scale)).abs();
                    // Half a step, or the whole number where numbers are too small for a scale.
                    let limit = if largest > 1e-36 { f64::from(largest) / 127.0 * 0.5001 } else { 1e-36 };
                    assert!(error <= limit, "{isa:?} {x} as {code} x {}", block.scale);
                }
                let sum = |codes: &[i8]| codes.iter().map(|c| i32::from(*c)).sum::<i32>();
                assert_eq!(block.neg_sum, -sum(codes), "{isa:?}");
                assert_eq!(block.neg_half_sums, [-sum(&codes[..16]), -sum(&codes[16..])], "{isa:?}");
                assert_eq!(block.scaled_sum, block.scale * sum(codes) as f32, "{isa:?}");
            }
        }
    }
}

/// The kernel computes a single token for two panels at a time where rows are long; an odd number of panels leaves one.
#[test]
fn single_tokens_of_long_rows_have_the_bits_of_several() {
    let mut random = TestRandom(12);
    for (ty, n_in) in [(TensorType::Q4_0, 2080), (TensorType::Q4_0, 4128), (TensorType::Q4_K, 2304)] {
        for n_out in [16, 33, 80, 112] {
            let tensor = tensor(ty, n_in, n_out, &random_blocks(&mut random, ty, n_in * n_out));
            let x = random.floats(2 * n_in, 1.0);
            let start = vec![0.0; 2 * n_out];
            for pool in [pool(1), pool(3)] {
                let matrix = matrix(&pool, &tensor, false);
                for isa in Isa::available() {
                    let both = multiply(&pool, isa, &matrix, &x, &start, false);
                    for token in 0..2 {
                        let one = multiply(&pool, isa, &matrix, &x[token * n_in..][..n_in], &start[..n_out], false);
                        assert_eq!(one, both[token * n_out..][..n_out], "{isa:?} {ty} {n_in} x {n_out}");
                    }
                }
            }
        }
    }
}
