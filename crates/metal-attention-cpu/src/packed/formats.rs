//! Reading a panel's block of each type in a kernel: the trait [`PackedFormat`], the functions that unpack bit planes and
//! scales, and the table of formats without a codebook (macro `format!`).
//!
//! `S` is the instruction set, `S::B` a vector of 64 bytes (16 rows x 4 columns), `S::F` 16 floats, one for each row. The
//! numbers in the table are byte offsets in a panel's block: of `n` columns, `16 n * bits / 8` bytes of codes are followed by
//! the tail.

use std::mem::MaybeUninit;

use metal_attention_gguf::blocks::IQ4_VALUES;

use super::PANEL;
use crate::simd::Simd;

/// The format of a panel's block: `w = scale * (code - OFFSET) + min`.
pub(crate) trait PackedFormat {
    /// Columns of a block.
    const BLOCK: usize;
    /// Columns of a sub-block, which share a scale: 32 or 16.
    const SUB: usize;
    /// `n` of `OFFSET = 2^n`; `None` where the offset is 0.
    const OFFSET_LOG2: Option<u32>;
    /// Bits of the codes that [`codes`](Self::codes) returns, up to 8.
    const BITS: u32;
    /// Whether blocks have a minimum; otherwise `min` is 0.
    const HAS_MIN: bool;
    /// Bytes of a panel's block.
    const BYTES: usize;
    /// Whether the weights of a single token are read faster without software prefetching on instruction sets with
    /// [`Simd::STREAMS`]; measured.
    const STREAMS: bool = false;

    /// The codes of columns `32 i..32 i + 32`, one vector per step.
    ///
    /// # Safety
    ///
    /// `block` points to a whole block; the CPU has the instruction set.
    unsafe fn codes<S: Simd>(block: *const u8, i: usize) -> [S::B; 8];

    /// Scale and minimum of the block, per row. Those of the sub-blocks are multiples of them.
    ///
    /// # Safety
    ///
    /// See [`codes`](Self::codes).
    unsafe fn block_scale_and_min<S: Simd>(block: *const u8) -> (S::F, S::F);

    /// Unpacks the scales and minimums of all sub-blocks for [`scale_and_min`](Self::scale_and_min); formats for which that
    /// does not pay return zeros.
    ///
    /// # Safety
    ///
    /// See [`codes`](Self::codes).
    #[inline(always)]
    unsafe fn unpack<S: Simd>(_block: *const u8) -> Unpacked {
        [[[0; PANEL]; 8]; 2]
    }

    /// Scale and minimum of sub-block `j`, per row, in multiples of those of the block. Blocks of 32 columns have no
    /// sub-blocks: kernels do not call it for them, and their formats do not define it.
    ///
    /// # Safety
    ///
    /// See [`codes`](Self::codes); `unpacked` is what [`unpack`](Self::unpack) returned.
    #[inline(always)]
    unsafe fn scale_and_min<S: Simd>(_block: *const u8, _unpacked: &Unpacked, _j: usize) -> (S::F, S::F) {
        const { assert!(Self::BLOCK == 32, "formats with larger blocks define this function") };
        unreachable!("blocks of 32 columns have no sub-blocks")
    }
}

/// Scales and minimums of 8 sub-blocks, or scales of 16, a byte each: `[2][sub-block][row]`.
pub(crate) type Unpacked = [[[u8; PANEL]; 8]; 2];

// The functions below name every vector instead of mapping over arrays: a closure may not be inlined, and is then compiled
// without the instruction set. Masking the array in a common loop was measured to be 2 % slower in decode.

/// The codes of a 4-bit plane.
#[inline(always)]
pub(crate) unsafe fn nibbles<S: Simd>(p: *const u8) -> [S::B; 8] {
    // SAFETY: a plane is 4 vectors; the caller vouches for it.
    unsafe {
        let mask = S::b_splat(15);
        let (a, b, c, d) = (S::b_load(p), S::b_load(p.add(64)), S::b_load(p.add(128)), S::b_load(p.add(192)));
        [
            S::b_and(a, mask),
            S::b_and(b, mask),
            S::b_and(c, mask),
            S::b_and(d, mask),
            S::b_and(S::b_shr::<4>(a), mask),
            S::b_and(S::b_shr::<4>(b), mask),
            S::b_and(S::b_shr::<4>(c), mask),
            S::b_and(S::b_shr::<4>(d), mask),
        ]
    }
}

/// The codes of a 2-bit plane, in bits 0 and 1 or, where `HIGH` is set, in bits 4 and 5.
#[inline(always)]
unsafe fn pairs<S: Simd, const HIGH: bool>(p: *const u8) -> [S::B; 8] {
    // SAFETY: a plane is 2 vectors; the caller vouches for it.
    unsafe {
        let (a, b) = (S::b_load(p), S::b_load(p.add(64)));
        if HIGH {
            let mask = S::b_splat(0x30);
            [
                S::b_and(S::b_shl::<4>(a), mask),
                S::b_and(S::b_shl::<2>(a), mask),
                S::b_and(a, mask),
                S::b_and(S::b_shr::<2>(a), mask),
                S::b_and(S::b_shl::<4>(b), mask),
                S::b_and(S::b_shl::<2>(b), mask),
                S::b_and(b, mask),
                S::b_and(S::b_shr::<2>(b), mask),
            ]
        } else {
            let mask = S::b_splat(3);
            [
                S::b_and(a, mask),
                S::b_and(S::b_shr::<2>(a), mask),
                S::b_and(S::b_shr::<4>(a), mask),
                S::b_and(S::b_shr::<6>(a), mask),
                S::b_and(b, mask),
                S::b_and(S::b_shr::<2>(b), mask),
                S::b_and(S::b_shr::<4>(b), mask),
                S::b_and(S::b_shr::<6>(b), mask),
            ]
        }
    }
}

/// The codes of a 1-bit plane, in bit 4 where `FIFTH` is set, otherwise in bit 2.
#[inline(always)]
unsafe fn bits<S: Simd, const FIFTH: bool>(p: *const u8) -> [S::B; 8] {
    // SAFETY: a plane is 1 vector; the caller vouches for it.
    unsafe {
        let v = S::b_load(p);
        if FIFTH {
            let mask = S::b_splat(16);
            [
                S::b_and(S::b_shl::<4>(v), mask),
                S::b_and(S::b_shl::<3>(v), mask),
                S::b_and(S::b_shl::<2>(v), mask),
                S::b_and(S::b_shl::<1>(v), mask),
                S::b_and(v, mask),
                S::b_and(S::b_shr::<1>(v), mask),
                S::b_and(S::b_shr::<2>(v), mask),
                S::b_and(S::b_shr::<3>(v), mask),
            ]
        } else {
            let mask = S::b_splat(4);
            [
                S::b_and(S::b_shl::<2>(v), mask),
                S::b_and(S::b_shl::<1>(v), mask),
                S::b_and(v, mask),
                S::b_and(S::b_shr::<1>(v), mask),
                S::b_and(S::b_shr::<2>(v), mask),
                S::b_and(S::b_shr::<3>(v), mask),
                S::b_and(S::b_shr::<4>(v), mask),
                S::b_and(S::b_shr::<5>(v), mask),
            ]
        }
    }
}

/// Codes of 8 bits, one vector per step.
#[inline(always)]
unsafe fn whole_bytes<S: Simd>(p: *const u8) -> [S::B; 8] {
    // SAFETY: 8 vectors; the caller vouches for them.
    unsafe {
        let mut out = [S::b_for_dot8(S::b_load(p)); 8];
        for i in 1..8 {
            out[i] = S::b_for_dot8(S::b_load(p.add(64 * i)));
        }
        out
    }
}

/// The entries of `IQ4_VALUES` for the codes of a 4-bit plane, as codes of 8 bits.
#[inline(always)]
unsafe fn iq4_codes<S: Simd>(p: *const u8) -> [S::B; 8] {
    // SAFETY: as the caller vouches.
    unsafe { looked_up::<S>(if S::DOT8_UNSIGNED { &IQ4_CODES } else { &IQ4_SIGNED }, nibbles::<S>(p)) }
}

/// The bitwise or of two planes' codes.
#[inline(always)]
pub(crate) unsafe fn or<S: Simd>(mut a: [S::B; 8], b: [S::B; 8]) -> [S::B; 8] {
    for i in 0..8 {
        // SAFETY: the caller vouches for the instruction set.
        a[i] = unsafe { S::b_or(a[i], b[i]) };
    }
    a
}

/// The entries of `table` for codes below 16.
#[inline(always)]
pub(crate) unsafe fn looked_up<S: Simd>(table: &[u8; 16], mut codes: [S::B; 8]) -> [S::B; 8] {
    for i in 0..8 {
        // SAFETY: the caller vouches for the instruction set.
        codes[i] = unsafe { S::b_lookup(table, codes[i]) };
    }
    codes
}

/// The 16 half-precision numbers at byte `at` of a block, one for each row.
#[inline(always)]
pub(crate) unsafe fn halves<S: Simd>(block: *const u8, at: usize) -> S::F {
    // SAFETY: inside the block; the caller vouches for it.
    unsafe { S::f_load_f16(block.add(at).cast()) }
}

/// Byte `j` of the tail field at byte `at`, of each row.
#[inline(always)]
pub(crate) unsafe fn bytes<S: Simd>(block: *const u8, at: usize, j: usize) -> S::I {
    // SAFETY: inside the block; the caller vouches for it.
    unsafe { S::i_load_u8(block.add(at + PANEL * j)) }
}

/// Unpacks the 12 bytes at `at` with the eight 6-bit scales and minimums of `Q4_K` and `Q5_K`. A vector contains 4 of these
/// bytes of all rows.
#[inline(always)]
unsafe fn six_bit_pairs<S: Simd>(block: *const u8, at: usize) -> Unpacked {
    let mut out = MaybeUninit::<Unpacked>::uninit();
    // SAFETY: inside the block, the caller vouches for it; four vectors of 64 bytes fill `out`.
    unsafe {
        let (a, b, c) = (S::b_load(block.add(at)), S::b_load(block.add(at + 64)), S::b_load(block.add(at + 128)));
        let (low4, low6, high2) = (S::b_splat(15), S::b_splat(63), S::b_splat(0x30));
        let out: *mut S::B = out.as_mut_ptr().cast();
        out.write_unaligned(S::b_and(a, low6));
        out.add(1).write_unaligned(S::b_or(S::b_and(c, low4), S::b_and(S::b_shr::<2>(a), high2)));
        out.add(2).write_unaligned(S::b_and(b, low6));
        let low = S::b_and(S::b_shr::<4>(c), low4);
        out.add(3).write_unaligned(S::b_or(low, S::b_and(S::b_shr::<2>(b), high2)));
    }
    // SAFETY: written above.
    unsafe { out.assume_init() }
}

/// Unpacks the 12 bytes at `at` with the sixteen 6-bit scales of `Q3_K`: the lower 4 bits are in bytes 0 to 7, the upper 2 bits
/// in bytes 8 to 11.
#[inline(always)]
unsafe fn q3_k_scales<S: Simd>(block: *const u8, at: usize) -> Unpacked {
    let mut out = MaybeUninit::<Unpacked>::uninit();
    // SAFETY: inside the block, the caller vouches for it; four vectors of 64 bytes fill `out`.
    unsafe {
        let (a, b, c) = (S::b_load(block.add(at)), S::b_load(block.add(at + 64)), S::b_load(block.add(at + 128)));
        let (low4, high2) = (S::b_splat(15), S::b_splat(0x30));
        let out: *mut S::B = out.as_mut_ptr().cast();
        out.write_unaligned(S::b_or(S::b_and(a, low4), S::b_and(S::b_shl::<4>(c), high2)));
        out.add(1).write_unaligned(S::b_or(S::b_and(b, low4), S::b_and(S::b_shl::<2>(c), high2)));
        out.add(2).write_unaligned(S::b_or(S::b_and(S::b_shr::<4>(a), low4), S::b_and(c, high2)));
        out.add(3).write_unaligned(S::b_or(S::b_and(S::b_shr::<4>(b), low4), S::b_and(S::b_shr::<2>(c), high2)));
    }
    // SAFETY: written above.
    unsafe { out.assume_init() }
}

/// Unpacks 4-bit scales `s`, in `VECTORS` times 4 bytes at `at`, as `2 s + 1`: first those of even sub-blocks, then those of
/// odd ones. [`odd_scale`] reads them.
#[inline(always)]
pub(crate) unsafe fn odd_scales<S: Simd, const VECTORS: usize>(block: *const u8, at: usize) -> Unpacked {
    let mut out = [[[0; PANEL]; 8]; 2];
    // SAFETY: inside the block, the caller vouches for it; a half of `out` is two vectors.
    unsafe {
        let (mask, one) = (S::b_splat(30), S::b_splat(1));
        for v in 0..VECTORS {
            let both = S::b_load(block.add(at + 64 * v));
            let even: *mut S::B = out[0].as_mut_ptr().cast();
            even.add(v).write_unaligned(S::b_or(S::b_and(S::b_shl::<1>(both), mask), one));
            let odd: *mut S::B = out[1].as_mut_ptr().cast();
            odd.add(v).write_unaligned(S::b_or(S::b_and(S::b_shr::<3>(both), mask), one));
        }
    }
    out
}

/// The scale of sub-block `j` from [`odd_scales`].
#[inline(always)]
pub(crate) unsafe fn odd_scale<S: Simd>(unpacked: &Unpacked, j: usize) -> S::F {
    // SAFETY: 16 bytes; the caller vouches for the instruction set.
    unsafe { S::i_to_f(S::i_load_u8(unpacked[j % 2][j / 2].as_ptr())) }
}

/// Scale and minimum of sub-block `j` from [`six_bit_pairs`].
#[inline(always)]
unsafe fn unpacked_pair<S: Simd>(unpacked: &Unpacked, j: usize) -> (S::F, S::F) {
    // SAFETY: 16 bytes each; the caller vouches for the instruction set.
    unsafe {
        let [scale, min] = [unpacked[0][j].as_ptr(), unpacked[1][j].as_ptr()];
        (S::i_to_f(S::i_load_u8(scale)), S::i_to_f(S::i_load_u8(min)))
    }
}

/// `-x`: K-quants store minimums that are subtracted.
#[inline(always)]
unsafe fn negated<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { S::f_sub(S::f_splat(0.0), x) }
}

/// Declares a format: its constants, then a block of code for each function of [`PackedFormat`] with the function's parameters
/// between bars. `bytes` are per row; the constants in the code are byte offsets in the panel's block, 16 rows.
macro_rules! format {
    ($name:ident: block $block:literal, sub $sub:literal, bytes $bytes:literal, offset $offset:expr, bits $bits:literal, has_min $min:literal $(, streams $streams:literal)?;
     $s:ident; codes |$cb:ident, $ci:ident| $codes:expr; block_scale_and_min |$bb:ident| $block_scale:expr
     $(; unpack |$ub:ident| $unpack:expr)? $(; scale_and_min |$sb:ident, $su:ident, $sj:ident| $scale:expr)?) => {
        pub(crate) struct $name;
        // SAFETY of the blocks below: `block` is a whole block of this format, as the trait requires.
        #[allow(clippy::undocumented_unsafe_blocks)]
        impl PackedFormat for $name {
            const BLOCK: usize = $block;
            const SUB: usize = $sub;
            const OFFSET_LOG2: Option<u32> = $offset;
            const BITS: u32 = $bits;
            const HAS_MIN: bool = $min;
            const BYTES: usize = $bytes * PANEL;
            $(const STREAMS: bool = $streams;)?
            #[inline(always)]
            unsafe fn codes<$s: Simd>($cb: *const u8, $ci: usize) -> [$s::B; 8] {
                unsafe { $codes }
            }
            #[inline(always)]
            unsafe fn block_scale_and_min<$s: Simd>($bb: *const u8) -> ($s::F, $s::F) {
                unsafe { $block_scale }
            }
            $(#[inline(always)]
            unsafe fn unpack<$s: Simd>($ub: *const u8) -> Unpacked {
                unsafe { $unpack }
            })?
            $(#[inline(always)]
            unsafe fn scale_and_min<$s: Simd>($sb: *const u8, $su: &Unpacked, $sj: usize) -> ($s::F, $s::F) {
                unsafe { $scale }
            })?
        }
    };
}

pub(crate) use format;

/// The values of the 16 codes of `IQ4_NL` and `IQ4_XS`, plus 128, for unsigned dot products.
const IQ4_CODES: [u8; 16] = {
    let mut codes = [0; 16];
    let mut i = 0;
    while i < 16 {
        codes[i] = IQ4_VALUES[i] as u8 ^ 0x80;
        i += 1;
    }
    codes
};

format!(Q4_0: block 32, sub 32, bytes 18, offset Some(3), bits 4, has_min false, streams true; S;
    codes |b, _i| nibbles::<S>(b);
    block_scale_and_min |b| (halves::<S>(b, 256), S::f_splat(0.0)));
format!(Q4_1: block 32, sub 32, bytes 20, offset None, bits 4, has_min true; S;
    codes |b, _i| nibbles::<S>(b);
    block_scale_and_min |b| (halves::<S>(b, 256), halves::<S>(b, 288)));
format!(Q5_0: block 32, sub 32, bytes 22, offset Some(4), bits 5, has_min false; S;
    codes |b, _i| or::<S>(nibbles::<S>(b), bits::<S, true>(b.add(256)));
    block_scale_and_min |b| (halves::<S>(b, 320), S::f_splat(0.0)));
format!(Q5_1: block 32, sub 32, bytes 24, offset None, bits 5, has_min true; S;
    codes |b, _i| or::<S>(nibbles::<S>(b), bits::<S, true>(b.add(256)));
    block_scale_and_min |b| (halves::<S>(b, 320), halves::<S>(b, 352)));
format!(Q8_0: block 32, sub 32, bytes 34, offset Some(7), bits 8, has_min false; S;
    codes |b, _i| whole_bytes::<S>(b);
    block_scale_and_min |b| (halves::<S>(b, 512), S::f_splat(0.0)));
format!(Iq4Nl: block 32, sub 32, bytes 18, offset Some(7), bits 8, has_min false; S;
    codes |b, _i| iq4_codes::<S>(b);
    block_scale_and_min |b| (halves::<S>(b, 256), S::f_splat(0.0)));
format!(Q2K: block 256, sub 16, bytes 84, offset None, bits 2, has_min true; S;
codes |b, i| pairs::<S, false>(b.add(128 * i));
block_scale_and_min |b| (halves::<S>(b, 1280), negated::<S>(halves::<S>(b, 1312)));
scale_and_min |b, _u, j| {
    let both = bytes::<S>(b, 1024, j);
    (S::i_to_f(S::i_and(both, S::i_splat(15))), S::i_to_f(S::i_shr::<4>(both)))
});
format!(Q3K: block 256, sub 16, bytes 110, offset Some(2), bits 3, has_min false; S;
codes |b, i| or::<S>(pairs::<S, false>(b.add(192 * i)), bits::<S, false>(b.add(192 * i + 128)));
block_scale_and_min |b| (halves::<S>(b, 1728), S::f_splat(0.0));
unpack |b| q3_k_scales::<S>(b, 1536);
scale_and_min |_b, u, j| (S::i_to_f(S::i_add(S::i_load_u8(u[j / 8][j % 8].as_ptr()), S::i_splat(-32))), S::f_splat(0.0)));
format!(Q4K: block 256, sub 32, bytes 144, offset None, bits 4, has_min true; S;
codes |b, i| nibbles::<S>(b.add(256 * i));
block_scale_and_min |b| (halves::<S>(b, 2240), negated::<S>(halves::<S>(b, 2272)));
unpack |b| six_bit_pairs::<S>(b, 2048);
scale_and_min |_b, u, j| unpacked_pair::<S>(u, j));
format!(Q5K: block 256, sub 32, bytes 176, offset None, bits 5, has_min true; S;
codes |b, i| or::<S>(nibbles::<S>(b.add(320 * i)), bits::<S, true>(b.add(320 * i + 256)));
block_scale_and_min |b| (halves::<S>(b, 2752), negated::<S>(halves::<S>(b, 2784)));
unpack |b| six_bit_pairs::<S>(b, 2560);
scale_and_min |_b, u, j| unpacked_pair::<S>(u, j));
format!(Q6K: block 256, sub 16, bytes 210, offset Some(5), bits 6, has_min false; S;
codes |b, i| or::<S>(nibbles::<S>(b.add(384 * i)), pairs::<S, true>(b.add(384 * i + 256)));
block_scale_and_min |b| (halves::<S>(b, 3328), S::f_splat(0.0));
scale_and_min |b, _u, j| (S::i_to_f(S::i_load_i8(b.add(3072 + PANEL * j).cast())), S::f_splat(0.0)));
format!(Iq4Xs: block 256, sub 32, bytes 136, offset Some(7), bits 8, has_min false; S;
codes |b, i| iq4_codes::<S>(b.add(256 * i));
block_scale_and_min |b| (halves::<S>(b, 2144), S::f_splat(0.0));
scale_and_min |b, _u, j| {
    // The tail begins with 2 bytes with the upper 2 bits of 8 scales, and 4 bytes with their lower 4 bits.
    let low = bytes::<S>(b, 2048, 2 + j / 2);
    let low = S::i_and(if j.is_multiple_of(2) { low } else { S::i_shr::<4>(low) }, S::i_splat(15));
    let upper = bytes::<S>(b, 2048, j / 4);
    let upper = match j % 4 {
        0 => upper,
        1 => S::i_shr::<2>(upper),
        2 => S::i_shr::<4>(upper),
        3.. => S::i_shr::<6>(upper),
    };
    let code = S::i_or(low, S::i_shl::<4>(S::i_and(upper, S::i_splat(3))));
    (S::i_to_f(S::i_add(code, S::i_splat(-32))), S::f_splat(0.0))
});

/// The values of the 16 codes of `IQ4_NL` and `IQ4_XS`, for signed dot products.
const IQ4_SIGNED: [u8; 16] = {
    let mut codes = IQ4_CODES;
    let mut i = 0;
    while i < 16 {
        codes[i] ^= 0x80;
        i += 1;
    }
    codes
};

/// The values of the codes of repacked `IQ3_S`, odd numbers from -15 to 15, plus 16.
const IQ3_S_CODES: [u8; 16] = [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31];

format!(Iq3S: block 256, sub 32, bytes 134, offset Some(4), bits 5, has_min false; S;
codes |b, i| looked_up::<S>(&IQ3_S_CODES, nibbles::<S>(b.add(256 * i)));
block_scale_and_min |b| (halves::<S>(b, 2112), S::f_splat(0.0));
unpack |b| odd_scales::<S, 1>(b, 2048);
scale_and_min |_b, u, j| (odd_scale::<S>(u, j), S::f_splat(0.0)));
format!(Tq: block 256, sub 32, bytes 66, offset Some(0), bits 2, has_min false; S;
codes |b, i| pairs::<S, false>(b.add(128 * i));
block_scale_and_min |b| (halves::<S>(b, 1024), S::f_splat(0.0));
scale_and_min |_b, _u, _j| (S::f_splat(1.0), S::f_splat(0.0)));
format!(Q2_0: block 64, sub 32, bytes 18, offset Some(0), bits 2, has_min false; S;
codes |b, i| pairs::<S, false>(b.add(128 * i));
block_scale_and_min |b| (halves::<S>(b, 256), S::f_splat(0.0));
scale_and_min |_b, _u, _j| (S::f_splat(1.0), S::f_splat(0.0)));
// The codes are 4 q for a bit q, so that code - OFFSET = 4 q - 2 is twice the value 2 q - 1.
format!(Q1_0: block 128, sub 32, bytes 18, offset Some(1), bits 3, has_min false; S;
codes |b, i| bits::<S, false>(b.add(64 * i));
block_scale_and_min |b| (S::f_mul(halves::<S>(b, 256), S::f_splat(0.5)), S::f_splat(0.0));
scale_and_min |_b, _u, _j| (S::f_splat(1.0), S::f_splat(0.0)));
