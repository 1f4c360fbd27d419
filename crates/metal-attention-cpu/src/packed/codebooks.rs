//! The panel formats of the types with a codebook (`IQ1`, `IQ2`, `IQ3_XXS`): packing and reading. A code stands for a *point*
//! of 8 or 4 columns, which is looked up in a table that fits the first-level cache.
//!
//! A panel's block contains, for each 32 columns, the lower 8 bits of the codes, 64 bytes for every four codes of the 16 rows,
//! and a 1-bit plane of signs where a type has signs. Then follow bytes with the upper bits of codes and the scales, each for
//! all 16 rows, and the scale of the scales. The table of a codebook ([`CodebookTable`]) stores a point as the indices of its
//! elements in a list of at most 8 values; with the sign as the upper bit they are indices in a table of 16 values.

use std::array::from_fn;

use metal_attention_gguf::blocks::{
    BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3Xxs, CodebookGrid, UnalignedF16, cast, even_signs,
};

use crate::packed::formats::{PackedFormat, Unpacked, bytes, format, halves, odd_scale, odd_scales};
use crate::packed::{CodeBits, PANEL, pack_codes};
use crate::simd::{CodebookTable, SIGN_BITS, Signs, Simd, UpperBit, code_offset};

static IQ3_XXS: CodebookTable<256> = CodebookTable::new(CodebookGrid::IQ3_XXS, IQ3_VALUES);
static IQ2_S: CodebookTable<1024> = CodebookTable::new(CodebookGrid::IQ2_S, IQ2_VALUES);
static IQ2_XS: CodebookTable<512> = CodebookTable::new(CodebookGrid::IQ2_XS, IQ2_VALUES);
static IQ2_XXS: CodebookTable<256> = CodebookTable::new(CodebookGrid::IQ2_XXS, IQ2_VALUES);
static IQ1: CodebookTable<2048> = CodebookTable::new(CodebookGrid::IQ1, IQ1_VALUES);

/// The values of a codebook plus 64, then their negatives plus 64: the table of 16 values, with an offset of 64.
const fn signed_values(grid: CodebookGrid) -> [u8; 16] {
    let mut values = [64; 16];
    let mut i = 0;
    while i < grid.values.len() {
        values[i] = (64 + grid.values[i]) as u8;
        values[i + 8] = (64 - grid.values[i]) as u8;
        i += 1;
    }
    values
}

const IQ2_VALUES: [u8; 16] = signed_values(CodebookGrid::IQ2_S);
const IQ3_VALUES: [u8; 16] = signed_values(CodebookGrid::IQ3_XXS);
/// The table of `IQ1`, with an offset of 16: eight times -1, 0 and 1, first shifted up by one, then (selected by the bit that
/// is the sign in other types) shifted down by one.
const IQ1_VALUES: [u8; 16] = [9, 17, 25, 0, 0, 0, 0, 0, 7, 15, 23, 0, 0, 0, 0, 0];

/// The step that each bit of a sign plane belongs to, for points of 8 columns: the inverse of [`SIGN_BITS`].
const SIGN_STEPS: [usize; 8] = {
    let mut steps = [0; 8];
    let mut step = 0;
    while step < 8 {
        steps[step / 4 * 4 + SIGN_BITS[step % 4]] = step;
        step += 1;
    }
    steps
};

// ---- packing -----------------------------------------------------------------------------

/// Writes one row's block to its lane of the panel's block `out`: for each 32 columns the lower bits of `N` codes and the
/// signs, where the type has some; then `tail` and the scale of the scales, `d`.
fn put<const N: usize>(
    codes: impl Fn(usize) -> u8,
    signs: Option<&dyn Fn(usize) -> u8>,
    tail: &[u8],
    d: UnalignedF16,
    lane: usize,
    mut out: &mut [u8],
) {
    let mut next_bytes = |n: usize| out.split_off_mut(..n).expect("as many bytes as the format has");
    for i in 0..8 {
        let indices = next_bytes(N * PANEL);
        for k in 0..N {
            indices[64 * (k / 4) + code_offset(lane, k % 4)] = codes(N * i + k);
        }
        if let Some(signs) = signs {
            let sign = |l: usize| signs(4 * i + l / 8) >> (l % 8) & 1;
            pack_codes(
                CodeBits::One,
                &from_fn(|l| if N == 4 { sign(4 * SIGN_STEPS[l / 4] + l % 4) } else { sign(l) }),
                lane,
                next_bytes(4 * PANEL),
            );
        }
    }
    for &byte in tail {
        next_bytes(PANEL)[lane] = byte;
    }
    next_bytes(2 * PANEL)[2 * lane..][..2].copy_from_slice(&d.0);
}

/// Packs numbers below 16 two to a byte, the first one in the low nibble.
fn nibble_pairs<const N: usize>(nibble: impl Fn(usize) -> u8) -> [u8; N] {
    from_fn(|i| nibble(2 * i) | nibble(2 * i + 1) << 4)
}

/// Repacks an `IQ3_XXS` block; the tail is 8 scales of 4 bits.
pub(crate) fn iq3_xxs(block: &[u8], lane: usize, out: &mut [u8]) {
    let block = &cast::<BlockIq3Xxs>(block)[0];
    let signs = |i: usize| even_signs((block.signs_and_scale(i / 4) >> (7 * (i % 4)) & 127) as u8);
    let tail: [u8; 4] = nibble_pairs(|g| (block.signs_and_scale(g) >> 28) as u8);
    put::<8>(|j| block.qs[j], Some(&signs), &tail, block.d, lane, out);
}

/// Repacks an `IQ2_XXS` block; the tail is 8 scales of 4 bits.
pub(crate) fn iq2_xxs(block: &[u8], lane: usize, out: &mut [u8]) {
    let block = &cast::<BlockIq2Xxs>(block)[0];
    let signs = |i: usize| even_signs((block.signs_and_scale(i / 4) >> (7 * (i % 4)) & 127) as u8);
    let tail: [u8; 4] = nibble_pairs(|g| (block.signs_and_scale(g) >> 28) as u8);
    put::<4>(|i| block.qs[8 * (i / 4) + i % 4], Some(&signs), &tail, block.d, lane, out);
}

/// Repacks an `IQ2_XS` block; the tail is the ninth bits of the codes, 4 to a nibble, and 16 scales of 4 bits.
pub(crate) fn iq2_xs(block: &[u8], lane: usize, out: &mut [u8]) {
    let block = &cast::<BlockIq2Xs>(block)[0];
    let high = |g: usize| (0..4).fold(0, |bits, l| bits | ((block.code_and_signs(4 * g + l).0 >> 8) as u8) << l);
    let high: [u8; 4] = nibble_pairs(high);
    let signs = |i: usize| block.code_and_signs(i).1;
    let tail = [&high[..], &block.scales].concat();
    put::<4>(|i| block.code_and_signs(i).0 as u8, Some(&signs), &tail, block.d, lane, out);
}

/// Repacks an `IQ2_S` block; the tail is as in the file: upper bits of the codes, and 16 scales of 4 bits.
pub(crate) fn iq2_s(block: &[u8], lane: usize, out: &mut [u8]) {
    let block = &cast::<BlockIq2S>(block)[0];
    let tail = [block.qh, block.scales].concat();
    put::<4>(|i| block.qs[i], Some(&|i| block.signs[i]), &tail, block.d, lane, out);
}

/// Packs the upper 3 bits of four codes to two bytes: the lower two bits of each code, and the third bit of each.
fn upper_of_four(upper: impl Fn(usize) -> u8) -> [u8; 2] {
    let joined = |field: fn(u8) -> u8, width: usize| (0..4).fold(0, |byte, l| byte | field(upper(l)) << (width * l));
    [joined(|bits| bits & 3, 2), joined(|bits| bits >> 2, 1)]
}

/// Repacks an `IQ1_S` block. The tail is, for each 32 columns, the first byte of [`upper_of_four`]; then, for each 32 columns,
/// its second byte with the scale in bits 4 to 6 and, in bit 7, whether the values are shifted down.
pub(crate) fn iq1_s(block: &[u8], lane: usize, out: &mut [u8]) {
    let block = &cast::<BlockIq1S>(block)[0];
    let tail: [u8; 16] = from_fn(|j| {
        let h = u16::from_le_bytes(block.qh[j % 8]);
        let upper = upper_of_four(|l| (h >> (3 * l) & 7) as u8);
        if j < 8 { upper[0] } else { upper[1] | (h >> 12 << 4) as u8 }
    });
    put::<4>(|i| block.qs[i], None, &tail, block.d, lane, out);
}

/// Repacks an `IQ1_M` block. The tail is, for each 32 columns, the two bytes of [`upper_of_four`], the second with a bit for
/// each code, from bit 4 on, that is set where its values are shifted down; then 16 scales of 4 bits.
pub(crate) fn iq1_m(block: &[u8], lane: usize, out: &mut [u8]) {
    let block = &cast::<BlockIq1M>(block)[0];
    let high: [u8; 16] = from_fn(|j| {
        let nibble = |l: usize| block.qh[2 * (j / 2) + l / 2] >> (4 * (l % 2)) & 15;
        let upper = upper_of_four(|l| nibble(l) & 7);
        let shifted_down = (0..4).fold(0, |byte, l| byte | nibble(l) >> 3 << (4 + l));
        if j % 2 == 0 { upper[0] } else { upper[1] | shifted_down }
    });
    let scales: [u8; 8] = nibble_pairs(|g| block.scale(g));
    let tail = [&high[..], &scales].concat();
    put::<4>(|i| block.qs[i], None, &tail, block.d(), lane, out);
}

// ---- reading -----------------------------------------------------------------------------

/// Reads a sign plane.
#[inline(always)]
unsafe fn signs<S: Simd>(p: *const u8) -> Signs<S::B> {
    // SAFETY: a plane is 1 vector; the caller vouches for it.
    unsafe {
        let (both, mask) = (S::b_load(p), S::b_splat(15));
        [S::b_and(both, mask), S::b_and(S::b_shr::<4>(both), mask)]
    }
}

/// The block's scale: the scale of the scales at byte `at` times `factor`; the minimum is 0.
#[inline(always)]
unsafe fn scaled<S: Simd>(block: *const u8, at: usize, factor: f32) -> (S::F, S::F) {
    // SAFETY: inside the block; the caller vouches for it.
    unsafe { (S::f_mul(halves::<S>(block, at), S::f_splat(factor)), S::f_splat(0.0)) }
}

/// The sign bits of all columns of a row: all set where bit 0 of the row's integer `down` is set (`IQ1` shifts the values
/// down), all clear otherwise.
#[inline(always)]
unsafe fn down_signs<S: Simd>(down: S::I) -> S::B {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let one = S::i_and(down, S::i_splat(1));
        let two = S::i_or(one, S::i_shl::<8>(one));
        let bits = S::i_or(two, S::i_shl::<2>(two));
        let bits = S::i_or(bits, S::i_shl::<1>(bits));
        S::b_from_i(S::i_or(bits, S::i_shl::<16>(bits)))
    }
}

/// The ninth and tenth bits of four codes, from a byte of each row.
#[inline(always)]
fn two_upper(rows: *const u8) -> [UpperBit; 2] {
    [UpperBit { rows, bits: [1, 4, 16, 64] }, UpperBit { rows, bits: [2, 8, 32, 128] }]
}

/// The ninth to eleventh bits of four codes, from the two bytes of [`upper_of_four`].
#[inline(always)]
fn three_upper(two: *const u8, third: *const u8) -> [UpperBit; 3] {
    let [low, high] = two_upper(two);
    [low, high, UpperBit { rows: third, bits: [1, 2, 4, 8] }]
}

format!(Iq3Xxs: block 256, sub 32, bytes 102, offset Some(6), bits 7, has_min false; S;
codes |b, i| {
    let b = b.add(192 * i);
    S::points4(&IQ3_XXS, b, S::b_load(b.add(128)))
};
block_scale_and_min |b| scaled::<S>(b, 1600, 0.25);
unpack |b| odd_scales::<S, 1>(b, 1536);
scale_and_min |_b, u, j| (odd_scale::<S>(u, j), S::f_splat(0.0)));
format!(Iq2Xxs: block 256, sub 32, bytes 70, offset Some(6), bits 7, has_min false; S;
codes |b, i| {
    let b = b.add(128 * i);
    S::points8(&IQ2_XXS, b, [], signs::<S>(b.add(64)))
};
block_scale_and_min |b| scaled::<S>(b, 1088, 0.125);
unpack |b| odd_scales::<S, 1>(b, 1024);
scale_and_min |_b, u, j| (odd_scale::<S>(u, j), S::f_splat(0.0)));
format!(Iq2Xs: block 256, sub 16, bytes 78, offset Some(6), bits 7, has_min false; S;
codes |b, i| {
    let bits = if i.is_multiple_of(2) { [1, 2, 4, 8] } else { [16, 32, 64, 128] };
    let upper = [UpperBit { rows: b.add(1024 + PANEL * (i / 2)), bits }];
    let b = b.add(128 * i);
    S::points8(&IQ2_XS, b, upper, signs::<S>(b.add(64)))
};
block_scale_and_min |b| scaled::<S>(b, 1216, 0.125);
unpack |b| odd_scales::<S, 2>(b, 1088);
scale_and_min |_b, u, j| (odd_scale::<S>(u, j), S::f_splat(0.0)));
format!(Iq2S: block 256, sub 16, bytes 82, offset Some(6), bits 7, has_min false; S;
codes |b, i| {
    let upper = two_upper(b.add(1024 + PANEL * i));
    let b = b.add(128 * i);
    S::points8(&IQ2_S, b, upper, signs::<S>(b.add(64)))
};
block_scale_and_min |b| scaled::<S>(b, 1280, 0.125);
unpack |b| odd_scales::<S, 2>(b, 1152);
scale_and_min |_b, u, j| (odd_scale::<S>(u, j), S::f_splat(0.0)));
format!(Iq1S: block 256, sub 32, bytes 50, offset Some(4), bits 5, has_min false; S;
codes |b, i| {
    let upper = three_upper(b.add(512 + PANEL * i), b.add(640 + PANEL * i));
    S::points8(&IQ1, b.add(64 * i), upper, [down_signs::<S>(S::i_shr::<7>(bytes::<S>(b, 640, i))); 2])
};
block_scale_and_min |b| scaled::<S>(b, 768, 0.125);
scale_and_min |b, _u, j| {
    let scale = S::i_and(S::i_shr::<4>(bytes::<S>(b, 640, j)), S::i_splat(7));
    (S::i_to_f(S::i_add(S::i_shl::<1>(scale), S::i_splat(1))), S::f_splat(0.0))
});
format!(Iq1M: block 256, sub 16, bytes 58, offset Some(4), bits 5, has_min false; S;
codes |b, i| {
    let rows = b.add(512 + 2 * PANEL * i);
    let h = S::i_load_u8(rows.add(PANEL));
    let (p, q) = (down_signs::<S>(S::i_shr::<4>(h)), down_signs::<S>(S::i_shr::<5>(h)));
    let (r, s) = (down_signs::<S>(S::i_shr::<6>(h)), down_signs::<S>(S::i_shr::<7>(h)));
    // Of four steps, 0 and 1 belong to one code, 2 and 3 to the next; bits 5 and 10 select their sign bits.
    let (first, second) = (S::b_splat(5), S::b_splat(10));
    let signs = [S::b_or(S::b_and(p, first), S::b_and(q, second)), S::b_or(S::b_and(r, first), S::b_and(s, second))];
    S::points8(&IQ1, b.add(64 * i), three_upper(rows, rows.add(PANEL)), signs)
};
block_scale_and_min |b| scaled::<S>(b, 896, 0.125);
unpack |b| odd_scales::<S, 2>(b, 768);
scale_and_min |_b, u, j| (odd_scale::<S>(u, j), S::f_splat(0.0)));
