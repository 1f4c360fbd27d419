//! The vector operations on plain arrays: the reference implementation, and what runs on CPUs without the other instruction
//! sets.

use half::{bf16, f16};

use super::{LANES, Simd};

/// Plain Rust on `[f32; 16]`.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

/// Applies `f` to every lane.
#[inline(always)]
fn lanes<A: Copy, R>(a: [A; LANES], f: impl FnMut(A) -> R) -> [R; LANES] {
    a.map(f)
}

/// Applies `f` to every pair of lanes.
#[inline(always)]
fn zip<A: Copy, B: Copy, R>(a: [A; LANES], b: [B; LANES], f: impl Fn(A, B) -> R) -> [R; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// Applies `f` to every group of 4 bytes as a little-endian integer.
#[inline(always)]
fn groups(a: [u8; 64], f: impl Fn(u32) -> u32) -> [u8; 64] {
    let mut out = [0; 64];
    for (o, g) in out.as_chunks_mut::<4>().0.iter_mut().zip(a.as_chunks::<4>().0) {
        *o = f(u32::from_le_bytes(*g)).to_le_bytes();
    }
    out
}

/// Adds the dot product of 4 codes, less `offset`, and 4 activations to every lane.
#[inline(always)]
fn dot(acc: [i32; LANES], codes: [u8; 64], a: [i8; 4], offset: i32) -> [i32; LANES] {
    std::array::from_fn(|lane| {
        let products = (0..4).map(|j| (i32::from(codes[4 * lane + j]) - offset) * i32::from(a[j]));
        acc[lane] + products.sum::<i32>()
    })
}

// SAFETY of every block below: pointers are valid for one vector, as the trait requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Scalar {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type B = [u8; 64];

    const DOT8_UNSIGNED: bool = false;
    const TILE: usize = 4;
    const STREAMS: bool = false;

    #[inline(always)]
    unsafe fn f_splat(x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn f_load(p: *const f32) -> Self::F {
        unsafe { p.cast::<Self::F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn f_load_f16(p: *const u16) -> Self::F {
        lanes(unsafe { p.cast::<[u16; LANES]>().read_unaligned() }, |b| f16::from_bits(b).to_f32())
    }
    #[inline(always)]
    unsafe fn f_load_bf16(p: *const u16) -> Self::F {
        lanes(unsafe { p.cast::<[u16; LANES]>().read_unaligned() }, |b| bf16::from_bits(b).to_f32())
    }
    #[inline(always)]
    unsafe fn f_store(p: *mut f32, x: Self::F) {
        unsafe { p.cast::<Self::F>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn f_store_f16(p: *mut u16, x: Self::F) {
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(lanes(x, |v| f16::from_f32(v).to_bits())) }
    }
    #[inline(always)]
    unsafe fn f_store_i8(p: *mut i8, x: Self::F) {
        unsafe { p.cast::<[i8; LANES]>().write_unaligned(lanes(x, |v| v.round_ties_even() as i32 as i8)) }
    }
    #[inline(always)]
    unsafe fn f_add(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn f_sub(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn f_mul(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn f_div(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn f_fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn f_max(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn f_min(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn f_abs(a: Self::F) -> Self::F {
        lanes(a, f32::abs)
    }
    #[inline(always)]
    unsafe fn f_round(a: Self::F) -> Self::F {
        lanes(a, f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn f_scale_by_power(a: Self::F, n: Self::F) -> Self::F {
        zip(a, n, |a, n| a * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn f_sum(a: Self::F) -> f32 {
        let mut width = LANES / 2;
        let mut a = a;
        while width > 0 {
            for i in 0..width {
                a[i] += a[i + width];
            }
            width /= 2;
        }
        a[0]
    }
    #[inline(always)]
    unsafe fn f_largest(a: Self::F) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    unsafe fn i_splat(x: i32) -> Self::I {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn i_load_u8(p: *const u8) -> Self::I {
        lanes(unsafe { p.cast::<[u8; LANES]>().read_unaligned() }, i32::from)
    }
    #[inline(always)]
    unsafe fn i_load_i8(p: *const i8) -> Self::I {
        lanes(unsafe { p.cast::<[i8; LANES]>().read_unaligned() }, i32::from)
    }
    #[inline(always)]
    unsafe fn i_add(a: Self::I, b: Self::I) -> Self::I {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn i_and(a: Self::I, b: Self::I) -> Self::I {
        zip(a, b, |a, b| a & b)
    }
    #[inline(always)]
    unsafe fn i_or(a: Self::I, b: Self::I) -> Self::I {
        zip(a, b, |a, b| a | b)
    }
    #[inline(always)]
    unsafe fn i_shl<const N: u32>(a: Self::I) -> Self::I {
        lanes(a, |v| v << N)
    }
    #[inline(always)]
    unsafe fn i_shr<const N: u32>(a: Self::I) -> Self::I {
        lanes(a, |v| v >> N)
    }
    #[inline(always)]
    unsafe fn i_to_f(a: Self::I) -> Self::F {
        lanes(a, |v| v as f32)
    }

    #[inline(always)]
    unsafe fn b_load(p: *const u8) -> Self::B {
        unsafe { p.cast::<Self::B>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn b_splat(x: u8) -> Self::B {
        [x; 64]
    }
    #[inline(always)]
    unsafe fn b_and(a: Self::B, b: Self::B) -> Self::B {
        std::array::from_fn(|i| a[i] & b[i])
    }
    #[inline(always)]
    unsafe fn b_or(a: Self::B, b: Self::B) -> Self::B {
        std::array::from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    unsafe fn b_shl<const N: u32>(a: Self::B) -> Self::B {
        groups(a, |g| g << N)
    }
    #[inline(always)]
    unsafe fn b_shr<const N: u32>(a: Self::B) -> Self::B {
        groups(a, |g| g >> N)
    }
    #[inline(always)]
    unsafe fn b_for_dot8(codes: Self::B) -> Self::B {
        codes.map(|code| code ^ 128)
    }
    #[inline(always)]
    unsafe fn b_lookup(table: &[u8; 16], index: Self::B) -> Self::B {
        index.map(|i| table[usize::from(i & 15)])
    }
    #[inline(always)]
    unsafe fn b_from_i(a: Self::I) -> Self::B {
        std::array::from_fn(|k| a[k / 4].to_le_bytes()[k % 4])
    }

    #[inline(always)]
    unsafe fn dot7(acc: Self::I, codes: Self::B, a: *const i8) -> Self::I {
        dot(acc, codes, unsafe { a.cast::<[i8; 4]>().read_unaligned() }, 0)
    }
    #[inline(always)]
    unsafe fn dot8(acc: Self::I, codes: Self::B, a: *const i8) -> Self::I {
        dot(acc, codes.map(|code| code ^ 128), unsafe { a.cast::<[i8; 4]>().read_unaligned() }, 128)
    }
}
