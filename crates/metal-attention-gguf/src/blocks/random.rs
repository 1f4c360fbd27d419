//! Random blocks, for tests and measurements.

use half::f16;

use super::e8m0_half;
use crate::TensorType;

/// Random blocks of type `ty` for `n` elements, a multiple of the block length. Codes and quantised scales are uniform; the
/// floating-point scales are finite, of either sign, zero in one of sixteen blocks, and such that no value is outside
/// `-size..size` by more than a few percent. Float types get random numbers in that range. The same `seed` gives the same
/// blocks.
///
/// All scales of `MXFP4` are positive, and those of `NVFP4` are codes of that range.
pub fn random_blocks(ty: TensorType, n: usize, seed: u64, size: f32) -> Vec<u8> {
    let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
    // SplitMix64.
    let mut next = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    let mut bytes = vec![0; ty.row_bytes(n)];
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        block.fill_with(|| next() as u8);
        // The largest value of the block, in -size..size; in one of sixteen blocks all scales are zero.
        let zero = next().is_multiple_of(16);
        let x = ((next() >> 40) as f32 / (1 << 23) as f32 - 1.0) * size;
        // Writes a half-precision scale or minimum to byte `at`. `largest`: the largest multiple of it that a value can be.
        let mut half = |at: usize, largest: f32| {
            let x = if zero { 0.0 } else { x / largest };
            block[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
        };
        match ty {
            TensorType::F32 => block.copy_from_slice(&x.to_le_bytes()),
            TensorType::I64 => block.copy_from_slice(&(x as i64).to_le_bytes()),
            TensorType::F16 | TensorType::Q1_0 => half(0, 1.0),
            TensorType::BF16 => block.copy_from_slice(&half::bf16::from_f32(x).to_le_bytes()),
            TensorType::Q4_0 => half(0, 8.0),
            TensorType::Q4_1 => {
                half(0, 30.0);
                half(2, -2.0);
            }
            TensorType::Q5_0 => half(0, 16.0),
            TensorType::Q5_1 => {
                half(0, 62.0);
                half(2, -2.0);
            }
            TensorType::Q8_0 => half(0, 128.0),
            TensorType::Q2_K => {
                half(80, 45.0);
                half(82, 15.0);
            }
            TensorType::Q3_K => half(108, 128.0),
            TensorType::Q4_K => {
                half(0, 63.0 * 15.0);
                half(2, 63.0);
            }
            TensorType::Q5_K => {
                half(0, 63.0 * 31.0);
                half(2, 63.0);
            }
            TensorType::Q6_K => half(208, 128.0 * 32.0),
            TensorType::IQ4_NL => half(0, 127.0),
            TensorType::IQ4_XS => half(0, 32.0 * 127.0),
            TensorType::IQ3_S => half(0, 31.0 * 15.0),
            TensorType::IQ3_XXS => half(0, 7.75 * 62.0),
            TensorType::IQ2_XXS | TensorType::IQ2_XS | TensorType::IQ2_S => half(0, 3.875 * 43.0),
            TensorType::IQ1_S => half(0, 15.0 * 1.125),
            TensorType::IQ1_M => {
                let d = f16::from_f32(if zero { 0.0 } else { x / (15.0 * 1.125) }).to_bits();
                for (i, scales) in block[48..].as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    scales[1] = scales[1] & 15 | ((d >> (4 * i)) as u8 & 15) << 4;
                }
            }
            TensorType::TQ1_0 => half(52, 1.0),
            TensorType::TQ2_0 => half(64, 2.0),
            TensorType::Q2_0 => half(0, 2.0),
            TensorType::MXFP4 => {
                // The largest power of two with which the largest code is in range, or one of the three smaller ones.
                let largest = (0..=254).rev().find(|&e| 12.0 * e8m0_half(e) <= size).unwrap_or(0);
                block[0] = if zero { 0 } else { largest.saturating_sub((next() % 4) as u8) };
            }
            TensorType::NVFP4 => {
                let largest = (0..127).rev().find(|&d| 12.0 * super::ue4m3_half(d) <= size).unwrap_or(0);
                for d in &mut block[..4] {
                    *d = if zero { 0 } else { largest - (next() % (u64::from(largest) + 1)) as u8 };
                }
            }
        }
    }
    bytes
}
