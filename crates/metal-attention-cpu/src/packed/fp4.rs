//! The panel formats of the 4-bit floats `MXFP4` and `NVFP4`: packing and reading. Their scales are repacked as bfloat16, which
//! represents the file's 8-bit scales exactly.

use half::bf16;
use metal_attention_gguf::blocks::{BlockMxfp4, BlockNvfp4, FP4_VALUES, cast, e8m0_half, ue4m3_half};
use metal_attention_gguf::codes::nibble_halves;

use crate::packed::formats::{PackedFormat, Unpacked, format, looked_up, nibbles};
use crate::packed::{CodeBits, PANEL, pack_codes};
use crate::simd::Simd;

/// Twice the values of the 16 codes of a 4-bit float, plus the offset of 16.
const CODES: [u8; 16] = {
    let mut codes = [0; 16];
    let mut i = 0;
    while i < 16 {
        codes[i] = (FP4_VALUES[i] + 16) as u8;
        i += 1;
    }
    codes
};

/// Repacks one row's `MXFP4` block: codes, then the scale.
pub(crate) fn mxfp4(block: &[u8], lane: usize, out: &mut [u8]) {
    let block = &cast::<BlockMxfp4>(block)[0];
    pack_codes(CodeBits::Four, &nibble_halves(&block.qs), lane, &mut out[..256]);
    put_scale(e8m0_half(block.e), lane, &mut out[256..]);
}

/// Repacks one row's `NVFP4` block: codes of two times 32 columns, then four scales.
pub(crate) fn nvfp4(block: &[u8], lane: usize, out: &mut [u8]) {
    let block = &cast::<BlockNvfp4>(block)[0];
    for (i, out) in out[..512].chunks_exact_mut(256).enumerate() {
        // Two groups of 16 columns in 8 bytes each; the low nibbles are the group's first half.
        let code = |l: usize| block.qs[16 * i + l / 16 * 8 + l % 8] >> (4 * (l / 8 % 2)) & 15;
        pack_codes(CodeBits::Four, &std::array::from_fn(code), lane, out);
    }
    for (j, &d) in block.d.iter().enumerate() {
        put_scale(ue4m3_half(d), lane, &mut out[512 + 2 * PANEL * j..]);
    }
}

/// Writes a scale as bfloat16 to its lane of a field of 16 scales.
fn put_scale(scale: f32, lane: usize, out: &mut [u8]) {
    out[2 * lane..][..2].copy_from_slice(&bf16::from_f32(scale).to_le_bytes());
}

/// The 16 bfloat16 scales at byte `at` of a block, one for each row.
#[inline(always)]
unsafe fn scales<S: Simd>(block: *const u8, at: usize) -> S::F {
    // SAFETY: inside the block; the caller vouches for it.
    unsafe { S::f_load_bf16(block.add(at).cast()) }
}

format!(Mxfp4: block 32, sub 32, bytes 18, offset Some(4), bits 5, has_min false; S;
    codes |b, _i| looked_up::<S>(&CODES, nibbles::<S>(b));
    block_scale_and_min |b| (scales::<S>(b, 256), S::f_splat(0.0)));
format!(Nvfp4: block 64, sub 16, bytes 40, offset Some(4), bits 5, has_min false; S;
    codes |b, i| looked_up::<S>(&CODES, nibbles::<S>(b.add(256 * i)));
    block_scale_and_min |_b| (S::f_splat(1.0), S::f_splat(0.0));
    scale_and_min |b, _u, j| (scales::<S>(b, 512 + 2 * PANEL * j), S::f_splat(0.0)));
