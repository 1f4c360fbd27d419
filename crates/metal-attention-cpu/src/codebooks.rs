//! Packed formats of the types with codebooks: a code is looked up in a table that the first-level cache holds.
//!
//! A panel's block has, for every 32 columns, a row of 16 bytes for each code of the rows (the lower 8 bits), and a 1-bit plane
//! of signs, where a type has them; then bytes with upper bits of codes and scales, each for all 16 rows, and the scale of
//! scales. A step (4 columns) is a word of a table: the places of 4 elements in the list of values, which signs complete to an
//! index of 16.

use std::array::from_fn;

use metal_attention_gguf::blocks::{
    BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3Xxs, Grid, Half, cast, even_signs,
};

use crate::packed::{Format, PANEL, Unpacked, bytes, format, halves, pack_codes};
use crate::simd::Simd;

/// Elements `4 half..4 half + 4` of each point of `grid`, as places.
const fn places<const N: usize>(grid: Grid, half: usize) -> [u32; N] {
    assert!(grid.entries.len() == N);
    let mut words = [0; N];
    let mut code = 0;
    while code < N {
        let mut k = 0;
        while k < 4 {
            words[code] |= (grid.place(code, 4 * half + k) as u32) << (8 * k);
            k += 1;
        }
        code += 1;
    }
    words
}

static IQ3_XXS: [u32; 256] = places(Grid::IQ3_XXS, 0);
static IQ2_S: [[u32; 1024]; 2] = [places(Grid::IQ2_S, 0), places(Grid::IQ2_S, 1)];
static IQ2_XS: [[u32; 512]; 2] = [places(Grid::IQ2_XS, 0), places(Grid::IQ2_XS, 1)];
static IQ2_XXS: [[u32; 256]; 2] = [places(Grid::IQ2_XXS, 0), places(Grid::IQ2_XXS, 1)];
static IQ1: [[u32; 2048]; 2] = [places(Grid::IQ1, 0), places(Grid::IQ1, 1)];

/// The values of a grid plus 64, then their negatives plus 64.
const fn signed_values(grid: Grid) -> [u8; 16] {
    let mut values = [64; 16];
    let mut i = 0;
    while i < grid.values.len() {
        values[i] = (64 + grid.values[i]) as u8;
        values[i + 8] = (64 - grid.values[i]) as u8;
        i += 1;
    }
    values
}

const IQ2_VALUES: [u8; 16] = signed_values(Grid::IQ2_S);
const IQ3_VALUES: [u8; 16] = signed_values(Grid::IQ3_XXS);
/// Eight times -1, 0 and 1, moved up by one, then down by one, plus 16.
const IQ1_VALUES: [u8; 16] = [9, 17, 25, 0, 7, 15, 23, 0, 0, 0, 0, 0, 0, 0, 0, 0];

// ---- packing -----------------------------------------------------------------------------

/// Writes a block of one row: for every 32 columns `N` codes and, unless there are none, signs; `tail`; `d`.
fn put<const N: usize>(
    codes: impl Fn(usize) -> u8,
    signs: Option<&dyn Fn(usize) -> u8>,
    tail: &[u8],
    d: Half,
    lane: usize,
    mut out: &mut [u8],
) {
    let mut take = |n: usize| out.split_off_mut(..n).expect("as many bytes as the format has");
    for i in 0..8 {
        let indices = take(N * PANEL);
        for k in 0..N {
            indices[PANEL * k + lane] = codes(N * i + k);
        }
        if let Some(signs) = signs {
            pack_codes(1, &from_fn(|l| signs(4 * i + l / 8) >> (l % 8) & 1), lane, take(4 * PANEL));
        }
    }
    for &byte in tail {
        take(PANEL)[lane] = byte;
    }
    take(2 * PANEL)[2 * lane..][..2].copy_from_slice(&d.0);
}

/// Two numbers below 16 to a byte, the first lowest.
fn nibble_pairs<const N: usize>(nibble: impl Fn(usize) -> u8) -> [u8; N] {
    from_fn(|i| nibble(2 * i) | nibble(2 * i + 1) << 4)
}

/// Packs an `IQ3_XXS` block; the tail is 8 scales of 4 bits.
pub(crate) fn iq3_xxs(block: &[u8], lane: usize, out: &mut [u8]) {
    let block = &cast::<BlockIq3Xxs>(block)[0];
    let signs = |i: usize| even_signs((block.signs_and_scale(i / 4) >> (7 * (i % 4)) & 127) as u8);
    let tail: [u8; 4] = nibble_pairs(|g| (block.signs_and_scale(g) >> 28) as u8);
    put::<8>(|j| block.qs[j], Some(&signs), &tail, block.d, lane, out);
}

/// Packs an `IQ2_XXS` block; the tail is 8 scales of 4 bits.
pub(crate) fn iq2_xxs(block: &[u8], lane: usize, out: &mut [u8]) {
    let block = &cast::<BlockIq2Xxs>(block)[0];
    let signs = |i: usize| even_signs((block.signs_and_scale(i / 4) >> (7 * (i % 4)) & 127) as u8);
    let tail: [u8; 4] = nibble_pairs(|g| (block.signs_and_scale(g) >> 28) as u8);
    put::<4>(|i| block.qs[8 * (i / 4) + i % 4], Some(&signs), &tail, block.d, lane, out);
}

/// Packs an `IQ2_XS` block; the tail is the ninth bits, 4 to a nibble, and 16 scales of 4 bits.
pub(crate) fn iq2_xs(block: &[u8], lane: usize, out: &mut [u8]) {
    let block = &cast::<BlockIq2Xs>(block)[0];
    let high = |g: usize| (0..4).fold(0, |bits, l| bits | ((block.code_and_signs(4 * g + l).0 >> 8) as u8) << l);
    let high: [u8; 4] = nibble_pairs(high);
    let signs = |i: usize| block.code_and_signs(i).1;
    let tail = [&high[..], &block.scales].concat();
    put::<4>(|i| block.code_and_signs(i).0 as u8, Some(&signs), &tail, block.d, lane, out);
}

/// Packs an `IQ2_S` block; the tail is as in the file.
pub(crate) fn iq2_s(block: &[u8], lane: usize, out: &mut [u8]) {
    let block = &cast::<BlockIq2S>(block)[0];
    let tail = [block.qh, block.scales].concat();
    put::<4>(|i| block.qs[i], Some(&|i| block.signs[i]), &tail, block.d, lane, out);
}

/// Packs an `IQ1_S` block; the tail is the numbers of the file: lower bytes, upper bytes.
pub(crate) fn iq1_s(block: &[u8], lane: usize, out: &mut [u8]) {
    let block = &cast::<BlockIq1S>(block)[0];
    let tail: [u8; 16] = from_fn(|i| block.qh[i % 8][i / 8]);
    put::<4>(|i| block.qs[i], None, &tail, block.d, lane, out);
}

/// Packs an `IQ1_M` block; the tail is the nibbles of the file and 16 scales of 4 bits.
pub(crate) fn iq1_m(block: &[u8], lane: usize, out: &mut [u8]) {
    let block = &cast::<BlockIq1M>(block)[0];
    let scales: [u8; 8] = nibble_pairs(|g| block.scale(g));
    let tail = [&block.qh[..], &scales].concat();
    put::<4>(|i| block.qs[i], None, &tail, block.d(), lane, out);
}

// ---- reading -----------------------------------------------------------------------------

/// Signs of a 1-bit plane, each bit moved to bit 3.
#[inline(always)]
unsafe fn signs<S: Simd>(p: *const u8) -> [S::B; 8] {
    // SAFETY: a plane is 1 vector; the caller vouches for it.
    unsafe {
        let (v, mask) = (S::b_load(p), S::b_splat(8));
        [
            S::b_and(S::b_shl::<3>(v), mask),
            S::b_and(S::b_shl::<2>(v), mask),
            S::b_and(S::b_shl::<1>(v), mask),
            S::b_and(v, mask),
            S::b_and(S::b_shr::<1>(v), mask),
            S::b_and(S::b_shr::<2>(v), mask),
            S::b_and(S::b_shr::<3>(v), mask),
            S::b_and(S::b_shr::<4>(v), mask),
        ]
    }
}

/// Codes of 32 columns from the lower bits of 4 codes at `p`, their upper bits, and a plane of what is added to the places in
/// `tables`.
#[inline(always)]
unsafe fn points<S: Simd, const N: usize>(
    p: *const u8,
    upper: [S::I; 4],
    tables: &[[u32; N]; 2],
    more: [S::B; 8],
    values: &[u8; 16],
) -> [S::B; 8] {
    let mut codes = more;
    for l in 0..4 {
        // SAFETY: 4 rows of 16 bytes; upper bits are cut off at the tables' length. The caller vouches for both.
        unsafe {
            let index = S::i_or(S::i_load_u8(p.add(PANEL * l)), upper[l]);
            for half in 0..2 {
                let places = S::b_gather(tables[half].as_ptr(), index);
                codes[2 * l + half] = S::b_lookup(values, S::b_or(places, more[2 * l + half]));
            }
        }
    }
    codes
}

/// Nibble `j` of the bytes at `at`, times two and one more.
#[inline(always)]
unsafe fn odd_scale<S: Simd>(block: *const u8, at: usize, j: usize) -> S::F {
    // SAFETY: inside the block; the caller vouches for it.
    unsafe {
        let both = bytes::<S>(block, at, j / 2);
        let scale = S::i_and(if j.is_multiple_of(2) { both } else { S::i_shr::<4>(both) }, S::i_splat(15));
        S::i_to_f(S::i_add(S::i_shl::<1>(scale), S::i_splat(1)))
    }
}

/// The scale of scales at byte `at`, times `factor`.
#[inline(always)]
unsafe fn scaled<S: Simd>(block: *const u8, at: usize, factor: f32) -> (S::F, S::F) {
    // SAFETY: inside the block; the caller vouches for it.
    unsafe { (S::f_mul(halves::<S>(block, at), S::f_splat(factor)), S::f_splat(0.0)) }
}

/// What `IQ1` adds to places: 4 in every byte of the rows whose bit is set in bit 2 of `down`.
#[inline(always)]
unsafe fn moves<S: Simd>(down: S::I) -> S::B {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let one = S::i_and(down, S::i_splat(4));
        let two = S::i_or(one, S::i_shl::<8>(one));
        S::b_from_i(S::i_or(two, S::i_shl::<16>(two)))
    }
}

/// Upper bits of four codes: fields of `h`, moved to bit 8 and up.
macro_rules! upper {
    ($s:ident, $mask:literal; $($field:expr),*) => { [$($s::i_and($field, $s::i_splat($mask))),*] };
}

format!(Iq3Xxs: block 256, sub 32, bytes 102, offset Some(6), bits 7, has_min false; S;
codes |b, i| {
    let b = b.add(192 * i);
    let mut codes = signs::<S>(b.add(128));
    for s in 0..8 {
        let places = S::b_gather(IQ3_XXS.as_ptr(), S::i_load_u8(b.add(PANEL * s)));
        codes[s] = S::b_lookup(&IQ3_VALUES, S::b_or(places, codes[s]));
    }
    codes
};
block_scale_and_min |b| scaled::<S>(b, 1600, 0.25);
scale_and_min |b, _u, j| (odd_scale::<S>(b, 1536, j), S::f_splat(0.0)));
format!(Iq2Xxs: block 256, sub 32, bytes 70, offset Some(6), bits 7, has_min false; S;
codes |b, i| {
    let b = b.add(128 * i);
    points::<S, 256>(b, [S::i_splat(0); 4], &IQ2_XXS, signs::<S>(b.add(64)), &IQ2_VALUES)
};
block_scale_and_min |b| scaled::<S>(b, 1088, 0.125);
scale_and_min |b, _u, j| (odd_scale::<S>(b, 1024, j), S::f_splat(0.0)));
format!(Iq2Xs: block 256, sub 16, bytes 78, offset Some(6), bits 7, has_min false; S;
codes |b, i| {
    let both = bytes::<S>(b, 1024, i / 2);
    let h = if i.is_multiple_of(2) { both } else { S::i_shr::<4>(both) };
    let upper = upper!(S, 0x100; S::i_shl::<8>(h), S::i_shl::<7>(h), S::i_shl::<6>(h), S::i_shl::<5>(h));
    let b = b.add(128 * i);
    points::<S, 512>(b, upper, &IQ2_XS, signs::<S>(b.add(64)), &IQ2_VALUES)
};
block_scale_and_min |b| scaled::<S>(b, 1216, 0.125);
scale_and_min |b, _u, j| (odd_scale::<S>(b, 1088, j), S::f_splat(0.0)));
format!(Iq2S: block 256, sub 16, bytes 82, offset Some(6), bits 7, has_min false; S;
codes |b, i| {
    let h = bytes::<S>(b, 1024, i);
    let upper = upper!(S, 0x300; S::i_shl::<8>(h), S::i_shl::<6>(h), S::i_shl::<4>(h), S::i_shl::<2>(h));
    let b = b.add(128 * i);
    points::<S, 1024>(b, upper, &IQ2_S, signs::<S>(b.add(64)), &IQ2_VALUES)
};
block_scale_and_min |b| scaled::<S>(b, 1280, 0.125);
scale_and_min |b, _u, j| (odd_scale::<S>(b, 1152, j), S::f_splat(0.0)));
format!(Iq1S: block 256, sub 32, bytes 50, offset Some(4), bits 5, has_min false; S;
codes |b, i| {
    let h = S::i_or(bytes::<S>(b, 512, i), S::i_shl::<8>(bytes::<S>(b, 512, 8 + i)));
    let upper = upper!(S, 0x700; S::i_shl::<8>(h), S::i_shl::<5>(h), S::i_shl::<2>(h), S::i_shr::<1>(h));
    points::<S, 2048>(b.add(64 * i), upper, &IQ1, [moves::<S>(S::i_shr::<13>(h)); 8], &IQ1_VALUES)
};
block_scale_and_min |b| scaled::<S>(b, 768, 0.125);
scale_and_min |b, _u, j| {
    let scale = S::i_and(S::i_shr::<4>(bytes::<S>(b, 512, 8 + j)), S::i_splat(7));
    (S::i_to_f(S::i_add(S::i_shl::<1>(scale), S::i_splat(1))), S::f_splat(0.0))
});
format!(Iq1M: block 256, sub 16, bytes 58, offset Some(4), bits 5, has_min false; S;
codes |b, i| {
    let (h, k) = (bytes::<S>(b, 512, 2 * i), bytes::<S>(b, 512, 2 * i + 1));
    let upper = upper!(S, 0x700; S::i_shl::<8>(h), S::i_shl::<4>(h), S::i_shl::<8>(k), S::i_shl::<4>(k));
    let moves = [
        moves::<S>(S::i_shr::<1>(h)),
        moves::<S>(S::i_shr::<5>(h)),
        moves::<S>(S::i_shr::<1>(k)),
        moves::<S>(S::i_shr::<5>(k)),
    ];
    let more = [moves[0], moves[0], moves[1], moves[1], moves[2], moves[2], moves[3], moves[3]];
    points::<S, 2048>(b.add(64 * i), upper, &IQ1, more, &IQ1_VALUES)
};
block_scale_and_min |b| scaled::<S>(b, 896, 0.125);
scale_and_min |b, _u, j| (odd_scale::<S>(b, 768, j), S::f_splat(0.0)));
