//! Tests of every operation of every instruction set against its definition.

use half::{bf16, f16};
use metal_attention_gguf::blocks::CodebookGrid;

use super::{CodebookTable, Isa, Kernel, LANES, SIGN_BITS, Simd, UpperBit, code_offset, exp, sigmoid};
use crate::test_support::TestRandom;

type Floats = [f32; LANES];
type Bytes = [u8; 64];

/// Evaluates `$body` on the instruction set `$isa`, which the body calls `$s`; `$input` are the variables that it captures.
macro_rules! on {
    ($isa:expr, $s:ident, |$($input:ident: $ty:ty),*| -> $out:ty $body:block) => {{
        struct Test<'a> {
            $($input: $ty,)*
            out: &'a mut $out,
        }
        impl Kernel for Test<'_> {
            #[inline(always)]
            unsafe fn run<$s: Simd>(self) {
                let Test { $($input,)* out } = self;
                // SAFETY: arrays have the lengths that the operations require; the caller vouches for `S`.
                *out = unsafe { $body };
            }
        }
        let mut out: $out = std::array::from_fn(|_| Default::default());
        $isa.run(Test { $($input,)* out: &mut out });
        out
    }};
}

/// A float operation on whole vectors.
macro_rules! floats {
    ($isa:expr; $($input:ident),* => $e:expr) => {
        on!($isa, S, |$($input: Floats),*| -> Floats {
            $(let $input = S::f_load($input.as_ptr());)*
            let mut out = [0.0; LANES];
            S::f_store(out.as_mut_ptr(), $e);
            out
        })
    };
}

/// An operation on integers whose result is read back as floats; results below 2^24 are exact.
macro_rules! ints {
    ($isa:expr; $($input:ident),* => $e:expr) => {
        on!($isa, S, |$($input: [i8; LANES]),*| -> Floats {
            $(let $input = S::i_load_i8($input.as_ptr());)*
            let mut out = [0.0; LANES];
            S::f_store(out.as_mut_ptr(), S::i_to_f($e));
            out
        })
    };
}

fn bits(x: Floats) -> [u32; LANES] {
    x.map(f32::to_bits)
}

fn each(f: impl FnMut(usize) -> f32) -> Floats {
    std::array::from_fn(f)
}

/// Vectors of ordinary, large, small, equal and signed-zero values.
fn samples() -> Vec<Floats> {
    let mut random = TestRandom(1);
    let edges = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        127.5,
        1e-40,
        f32::MIN_POSITIVE,
        3.0e38,
        -3.0e38,
        f32::INFINITY,
        f32::NEG_INFINITY,
    ];
    let mut all = vec![edges, each(|i| edges[(i + 5) % LANES]), [0.25; LANES]];
    for limit in [1.0, 10.0, 1000.0, 1e-6, 1e20] {
        all.extend((0..20).map(|_| std::array::from_fn(|_| random.float(limit))));
    }
    all
}

#[test]
fn arithmetic_is_ieee() {
    let all = samples();
    for isa in Isa::available() {
        for (n, &a) in all.iter().enumerate() {
            let (b, c) = (all[(n + 1) % all.len()], all[(n + 7) % all.len()]);
            let check = |what: &str, got: Floats, want: Floats| {
                for i in 0..LANES {
                    let same = got[i].to_bits() == want[i].to_bits() || (got[i].is_nan() && want[i].is_nan());
                    assert!(same, "{isa:?} {what} {} {} {}: {} {}", a[i], b[i], c[i], got[i], want[i]);
                }
            };
            check("+", floats!(isa; a, b => S::f_add(a, b)), each(|i| a[i] + b[i]));
            check("-", floats!(isa; a, b => S::f_sub(a, b)), each(|i| a[i] - b[i]));
            check("*", floats!(isa; a, b => S::f_mul(a, b)), each(|i| a[i] * b[i]));
            check("/", floats!(isa; a, b => S::f_div(a, b)), each(|i| a[i] / b[i]));
            check("abs", floats!(isa; a => S::f_abs(a)), a.map(f32::abs));
            check("round", floats!(isa; a => S::f_round(a)), a.map(f32::round_ties_even));
            let fma = |i: usize| if isa == Isa::SCALAR { a[i] * b[i] + c[i] } else { a[i].mul_add(b[i], c[i]) };
            check("fma", floats!(isa; a, b, c => S::f_fma(a, b, c)), each(fma));
            // Which of two zeros is larger is left open.
            let zero = |x: Floats| x.map(|v| v + 0.0);
            check("max", zero(floats!(isa; a, b => S::f_max(a, b))), zero(each(|i| a[i].max(b[i]))));
            check("min", zero(floats!(isa; a, b => S::f_min(a, b))), zero(each(|i| a[i].min(b[i]))));
        }
    }
}

#[test]
fn splat_fills_every_lane() {
    for isa in Isa::available() {
        assert_eq!(floats!(isa; => S::f_splat(-1.25)), [-1.25; LANES]);
        assert_eq!(ints!(isa; => S::i_splat(-70_000)), [-70_000.0; LANES]);
    }
}

#[test]
fn scaling_by_powers_of_two_is_exact() {
    let powers: Vec<f32> = (-126..=127).map(|n| n as f32).collect();
    for isa in Isa::available() {
        for (k, powers) in powers.chunks(LANES).enumerate() {
            let n = each(|i| powers[i % powers.len()]);
            let a = each(|i| 0.7 + (k + i) as f32 / 400.0);
            let want = each(|i| (f64::from(a[i]) * f64::from(n[i]).exp2()) as f32);
            assert_eq!(bits(floats!(isa; a, n => S::f_scale_by_power(a, n))), bits(want), "{isa:?}");
        }
    }
}

#[test]
fn sums_have_one_order_and_the_largest_is_found() {
    for isa in Isa::available() {
        for a in samples().into_iter().skip(2) {
            let got = on!(isa, S, |a: Floats| -> [f32; 2] {
                let a = S::f_load(a.as_ptr());
                [S::f_sum(a), S::f_largest(a)]
            });
            let mut sum = a.to_vec();
            while sum.len() > 1 {
                let (low, high) = sum.split_at(sum.len() / 2);
                sum = low.iter().zip(high).map(|(a, b)| a + b).collect();
            }
            assert_eq!(got[0].to_bits(), sum[0].to_bits(), "{isa:?} {a:?}");
            assert_eq!(got[1], a.into_iter().fold(f32::NEG_INFINITY, f32::max), "{isa:?} {a:?}");
        }
        for at in 0..LANES {
            let a = each(|i| if i == at { -1.0 } else { f32::NEG_INFINITY });
            assert_eq!(on!(isa, S, |a: Floats| -> [f32; 1] { [S::f_largest(S::f_load(a.as_ptr()))] }), [-1.0]);
        }
    }
}

#[test]
fn halves_widen_exactly() {
    for isa in Isa::available() {
        for first in (0..=u16::MAX).step_by(LANES) {
            let h: [u16; LANES] = std::array::from_fn(|i| first + i as u16);
            let load = |bf: bool| {
                on!(isa, S, |h: [u16; LANES], bf: bool| -> Floats {
                    let mut out = [0.0; LANES];
                    let v = if bf { S::f_load_bf16(h.as_ptr()) } else { S::f_load_f16(h.as_ptr()) };
                    S::f_store(out.as_mut_ptr(), v);
                    out
                })
            };
            let (f, b) = (load(false), load(true));
            for i in 0..LANES {
                let want = f16::from_bits(h[i]);
                assert!(f[i] == want.to_f32() || (f[i].is_nan() && want.is_nan()), "{isa:?} {:#x}: {}", h[i], f[i]);
                assert_eq!(f[i].is_sign_negative(), h[i] >> 15 == 1);
                let want = bf16::from_bits(h[i]);
                assert!(b[i] == want.to_f32() || (b[i].is_nan() && want.is_nan()), "{isa:?} {:#x}: {}", h[i], b[i]);
            }
        }
    }
}

#[test]
fn halves_round_to_nearest_even() {
    fn narrow(isa: Isa, x: Floats) -> [u16; LANES] {
        on!(isa, S, |x: Floats| -> [u16; LANES] {
            let mut out = [0; LANES];
            S::f_store_f16(out.as_mut_ptr(), S::f_load(x.as_ptr()));
            out
        })
    }
    let largest = f16::MAX.to_bits();
    for isa in Isa::available() {
        // Every finite half, the midpoint to the next one, and the floats beside the midpoint.
        for h in 0..largest {
            let (low, high) = (f16::from_bits(h).to_f32(), f16::from_bits(h + 1).to_f32());
            let middle = f32::midpoint(low, high);
            let even = h + h % 2;
            let x = [low, middle.next_down(), middle, middle.next_up(), high];
            let want = [h, h, even, h + 1, h + 1];
            let got = narrow(isa, each(|i| if i < 8 { x[i % 5] } else { -x[i % 5] }));
            for i in 0..LANES {
                let sign = if i < 8 { 0 } else { 1 << 15 };
                assert_eq!(got[i], want[i % 5] | sign, "{isa:?} {}", x[i % 5]);
            }
        }
        let got = narrow(isa, each(|i| [65519.996, 65520.0, 1e30, f32::INFINITY][i % 4]));
        let infinity = f16::INFINITY.to_bits();
        assert_eq!(got, std::array::from_fn(|i| [largest, infinity, infinity, infinity][i % 4]), "{isa:?}");
    }
}

#[test]
fn bytes_are_rounded_to_nearest_even() {
    for isa in Isa::available() {
        for k in -32..32 {
            let x = each(|i| (k * LANES as i32 + i as i32) as f32 * 0.25 * 0.99);
            let ties = each(|i| (k * 3) as f32 + if i % 2 == 0 { 0.5 } else { -0.5 });
            for x in [x, ties] {
                let got = on!(isa, S, |x: Floats| -> [i8; LANES] {
                    let mut out = [0; LANES];
                    S::f_store_i8(out.as_mut_ptr(), S::f_load(x.as_ptr()));
                    out
                });
                assert_eq!(got, x.map(|v| v.round_ties_even() as i8), "{isa:?} {x:?}");
            }
        }
    }
}

#[test]
fn integers() {
    let mut random = TestRandom(2);
    for isa in Isa::available() {
        for _ in 0..50 {
            let a: [i8; LANES] = std::array::from_fn(|_| random.bits() as i8);
            let b: [i8; LANES] = std::array::from_fn(|_| random.bits() as i8);
            let want = |f: fn(i32, i32) -> i32| each(|i| f(a[i].into(), b[i].into()) as f32);
            assert_eq!(ints!(isa; a => a), want(|a, _| a), "{isa:?}");
            assert_eq!(ints!(isa; a, b => S::i_add(a, b)), want(|a, b| a + b), "{isa:?}");
            assert_eq!(ints!(isa; a, b => S::i_and(a, b)), want(|a, b| a & b), "{isa:?}");
            assert_eq!(ints!(isa; a, b => S::i_or(a, b)), want(|a, b| a | b), "{isa:?}");
            assert_eq!(ints!(isa; a => S::i_shl::<4>(a)), want(|a, _| a << 4), "{isa:?}");
            assert_eq!(ints!(isa; a => S::i_shl::<7>(a)), want(|a, _| a << 7), "{isa:?}");
            assert_eq!(ints!(isa; a => S::i_shr::<2>(a)), want(|a, _| a >> 2), "{isa:?}");
            assert_eq!(ints!(isa; a => S::i_shr::<6>(a)), want(|a, _| a >> 6), "{isa:?}");
            let u = a.map(|v| v as u8);
            let got = on!(isa, S, |u: [u8; LANES]| -> Floats {
                let mut out = [0.0; LANES];
                S::f_store(out.as_mut_ptr(), S::i_to_f(S::i_load_u8(u.as_ptr())));
                out
            });
            assert_eq!(got, u.map(f32::from), "{isa:?}");
        }
    }
}

/// Reads a vector of bytes back: the dot product with an activation of 1 in one column.
macro_rules! bytes {
    ($isa:expr; $($input:ident),* => $e:expr) => {{
        let sums: [[f32; LANES]; 4] = on!($isa, S, |$($input: Bytes),*| -> [[f32; LANES]; 4] {
            $(let $input = S::b_load($input.as_ptr());)*
            let v = $e;
            let mut out = [[0.0; LANES]; 4];
            for (j, out) in out.iter_mut().enumerate() {
                let mut one = [0i8; 4];
                one[j] = 1;
                S::f_store(out.as_mut_ptr(), S::i_to_f(S::dot8(S::i_splat(0), v, one.as_ptr())));
            }
            out
        });
        let out: Bytes = std::array::from_fn(|i| sums[i % 4][i / 4] as i32 as u8);
        out
    }};
}

fn random_bytes(random: &mut TestRandom) -> Bytes {
    random.bytes(64).try_into().expect("64 bytes")
}

fn groups(a: Bytes, f: impl Fn(u32) -> u32) -> Bytes {
    let mut out = a;
    for group in out.as_chunks_mut::<4>().0 {
        *group = f(u32::from_le_bytes(*group)).to_le_bytes();
    }
    out
}

#[test]
fn byte_operations() {
    let mut random = TestRandom(3);
    for isa in Isa::available() {
        for _ in 0..50 {
            let (a, b) = (random_bytes(&mut random), random_bytes(&mut random));
            assert_eq!(bytes!(isa; a => a), a, "{isa:?} load");
            assert_eq!(bytes!(isa; => S::b_splat(0xa5)), [0xa5; 64], "{isa:?} splat");
            assert_eq!(bytes!(isa; a, b => S::b_and(a, b)), std::array::from_fn(|i| a[i] & b[i]), "{isa:?} and");
            assert_eq!(bytes!(isa; a, b => S::b_or(a, b)), std::array::from_fn(|i| a[i] | b[i]), "{isa:?} or");
            assert_eq!(bytes!(isa; a => S::b_shl::<1>(a)), groups(a, |g| g << 1), "{isa:?} shl 1");
            assert_eq!(bytes!(isa; a => S::b_shl::<4>(a)), groups(a, |g| g << 4), "{isa:?} shl 4");
            assert_eq!(bytes!(isa; a => S::b_shr::<3>(a)), groups(a, |g| g >> 3), "{isa:?} shr 3");
            assert_eq!(bytes!(isa; a => S::b_shr::<6>(a)), groups(a, |g| g >> 6), "{isa:?} shr 6");
            let index = a.map(|v| v & 15);
            let want = index.map(|i| TABLE[usize::from(i)]);
            assert_eq!(bytes!(isa; index => S::b_lookup(&TABLE, index)), want, "{isa:?} lookup");

            let got = on!(isa, S, |a: Bytes| -> Bytes {
                let mut out = [0; 64];
                let bytes = S::b_from_i(S::i_shl::<8>(S::i_load_u8(a.as_ptr())));
                out.as_mut_ptr().cast::<S::B>().write_unaligned(bytes);
                out
            });
            let want: Bytes = std::array::from_fn(|k| if k % 4 == 1 { a[k / 4] } else { 0 });
            assert_eq!(got, want, "{isa:?} bytes of lanes");
        }
    }
}

/// Looks up points of 8 columns.
struct Points<'a, const N: usize, const U: usize> {
    book: &'a CodebookTable<N>,
    codes: &'a Bytes,
    upper: [UpperBit; U],
    signs: &'a [Bytes; 2],
    /// The result of every step.
    out: &'a mut [Bytes; 8],
}

impl<const N: usize, const U: usize> Kernel for Points<'_, N, U> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: codes and upper bits of 16 rows; the caller vouches for `S`.
        unsafe {
            let signs = [S::b_load(self.signs[0].as_ptr()), S::b_load(self.signs[1].as_ptr())];
            let points = S::points8(self.book, self.codes.as_ptr(), self.upper, signs);
            for step in 0..8 {
                self.out[step].as_mut_ptr().cast::<S::B>().write_unaligned(points[step]);
            }
        }
    }
}

/// Looks up points of 4 columns.
struct ShortPoints<'a> {
    book: &'a CodebookTable<256>,
    codes: &'a [Bytes; 2],
    signs: &'a Bytes,
    /// The result of every step.
    out: &'a mut [Bytes; 8],
}

impl Kernel for ShortPoints<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: codes of 16 rows; the caller vouches for `S`.
        unsafe {
            let points = S::points4(self.book, self.codes.as_ptr().cast(), S::b_load(self.signs.as_ptr()));
            for step in 0..8 {
                self.out[step].as_mut_ptr().cast::<S::B>().write_unaligned(points[step]);
            }
        }
    }
}

/// Distinct values, so that every value index and sign gives another result.
const VALUES: [u8; 16] = [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 15, 25, 35];

/// Every row, step, and column of a step.
fn positions() -> impl Iterator<Item = (usize, usize, usize)> {
    (0..LANES).flat_map(|row| (0..32).map(move |at| (row, at / 4, at % 4)))
}

/// Tests the points of a codebook with `U` upper bits of codes, for random codes and signs, and all positions of the upper
/// bits.
fn points_of<const N: usize, const U: usize>(grid: CodebookGrid) {
    let book = Box::new(CodebookTable::<N>::new(grid, VALUES));
    let mut random = TestRandom(U as u64);
    for isa in Isa::available() {
        for round in 0..40 {
            let (codes, rows) = (random_bytes(&mut random), [(); U].map(|()| random_bytes(&mut random)));
            let signs = [(); 2].map(|()| random_bytes(&mut random).map(|byte| byte & 15));
            let upper: [UpperBit; U] = std::array::from_fn(|b| UpperBit {
                rows: rows[b].as_ptr(),
                bits: std::array::from_fn(|k| 1 << ((round + 3 * k + b) % 8)),
            });
            let mut got = [[0; 64]; 8];
            isa.run(Points { book: &*book, codes: &codes, upper, signs: &signs, out: &mut got });
            for (row, step, column) in positions() {
                let set = |b: usize| usize::from(rows[b][row] & upper[b].bits[step / 2] != 0) << (8 + b);
                let code = usize::from(codes[code_offset(row, step / 2)]) | (0..U).map(set).sum::<usize>();
                let sign = usize::from(signs[step / 4][4 * row + column] >> SIGN_BITS[step % 4] & 1);
                let want = VALUES[grid.value_index(code, 4 * (step % 2) + column) + 8 * sign];
                assert_eq!(got[step][4 * row + column], want, "{isa:?}, code {code}, step {step}");
            }
        }
    }
}

#[test]
fn points_of_codebooks() {
    points_of::<256, 0>(CodebookGrid::IQ2_XXS);
    points_of::<512, 1>(CodebookGrid::IQ2_XS);
    points_of::<1024, 2>(CodebookGrid::IQ2_S);
    points_of::<2048, 3>(CodebookGrid::IQ1);
    let book = Box::new(CodebookTable::<256>::new(CodebookGrid::IQ3_XXS, VALUES));
    let mut random = TestRandom(9);
    for isa in Isa::available() {
        for _ in 0..40 {
            let (codes, signs) = ([(); 2].map(|()| random_bytes(&mut random)), random_bytes(&mut random));
            let mut got = [[0; 64]; 8];
            isa.run(ShortPoints { book: &book, codes: &codes, signs: &signs, out: &mut got });
            for (row, step, column) in positions() {
                let sign = usize::from(signs[4 * row + column] >> step & 1);
                let code = usize::from(codes[step / 4][code_offset(row, step % 4)]);
                let want = VALUES[CodebookGrid::IQ3_XXS.value_index(code, column) + 8 * sign];
                assert_eq!(got[step][4 * row + column], want, "{isa:?}, code {code}, step {step}");
            }
        }
    }
}

const TABLE: [u8; 16] = [7, 0, 255, 128, 127, 3, 99, 200, 1, 64, 17, 33, 250, 12, 5, 90];

#[test]
fn dot_products() {
    const START: i32 = -70_000;
    let mut random = TestRandom(4);
    for isa in Isa::available() {
        for round in 0..100 {
            let codes = random_bytes(&mut random);
            let mut activations: [i8; 4] = std::array::from_fn(|_| (random.bits() as i8).max(-127));
            let (mut seven, mut eight) = (codes.map(|c| c & 127), codes);
            if round < 4 {
                // The largest possible sums, of either sign.
                activations = if round % 2 == 0 { [127; 4] } else { [-127; 4] };
                seven = [127; 64];
                eight = if round < 2 { [0; 64] } else { [255; 64] };
            }
            let got = on!(isa, S, |seven: Bytes, eight: Bytes, activations: [i8; 4]| -> [Floats; 3] {
                let (mut dot7, mut dot8) = ([0.0; LANES], [0.0; LANES]);
                let (start, a) = (S::i_splat(START), activations.as_ptr());
                S::f_store(dot7.as_mut_ptr(), S::i_to_f(S::dot7(start, S::b_load(seven.as_ptr()), a)));
                S::f_store(dot8.as_mut_ptr(), S::i_to_f(S::dot8(start, S::b_for_dot8(S::b_load(eight.as_ptr())), a)));
                [dot7, dot8, [if S::DOT8_UNSIGNED { 0.0 } else { 128.0 }; LANES]]
            });
            let want = |codes: Bytes, offset: i32| {
                each(|lane| {
                    let product = |j: usize| (i32::from(codes[4 * lane + j]) - offset) * i32::from(activations[j]);
                    (START + (0..4).map(product).sum::<i32>()) as f32
                })
            };
            assert_eq!(got[0], want(seven, 0), "{isa:?} {activations:?}");
            assert_eq!(got[1], want(eight, got[2][0] as i32), "{isa:?} {activations:?}");
        }
    }
}

/// The distance from the exact result, in units in the last place of it.
fn ulps(got: f32, want: f64) -> f64 {
    let ulp = (want as f32).next_up() - (want as f32);
    (f64::from(got) - want).abs() / f64::from(ulp)
}

#[test]
fn exponential_and_sigmoid() {
    let mut random = TestRandom(5);
    let edges = [
        0.0,
        -0.0,
        88.0,
        88.37,
        -70.0,
        1e-8,
        -1e-8,
        0.346_573_6,
        -0.346_573_6,
        0.346_574,
        1.0,
        -1.0,
        10.5,
        -10.5,
        50.0,
        -50.0,
    ];
    for isa in Isa::available() {
        for round in 0..4000 {
            let x = each(|i| if round == 0 { edges[i] } else { random.float(if round % 2 == 0 { 70.0 } else { 5.0 }) });
            let e = floats!(isa; x => exp::<S>(x));
            let s = floats!(isa; x => sigmoid::<S>(x));
            for i in 0..LANES {
                let x64 = f64::from(x[i]);
                assert!(
                    ulps(e[i], x64.exp()) <= 2.0,
                    "{isa:?} exp({}) = {}, off by {}",
                    x[i],
                    e[i],
                    ulps(e[i], x64.exp())
                );
                let want = 1.0 / (1.0 + (-x64).exp());
                assert!(ulps(s[i], want) <= 4.0, "{isa:?} sigmoid({}) = {}, not {want}", x[i], s[i]);
            }
        }
        // Results near the smallest normal number are too small by that number; far below they are 0.
        for x in [-72.0, -80.0, -87.0, -87.3, -87.33] {
            let splat = [x; LANES];
            let e = floats!(isa; splat => exp::<S>(splat));
            let want = f64::from(x).exp();
            let error = (f64::from(e[0]) - want).abs() - f64::from(f32::MIN_POSITIVE);
            let ulp = (want as f32).next_up() - want as f32;
            assert!(e[0] >= 0.0 && error <= 2.0 * f64::from(ulp), "{isa:?} exp({x}) = {}", e[0]);
        }
        for x in [-87.35, -88.0, -1000.0, -1e30, f32::NEG_INFINITY] {
            let x = [x; LANES];
            assert_eq!(floats!(isa; x => exp::<S>(x)), [0.0; LANES], "{isa:?} {x:?}");
        }
        for (x, want) in [(-100.0, 0.0), (100.0, 1.0), (f32::NEG_INFINITY, 0.0), (f32::INFINITY, 1.0)] {
            let x = [x; LANES];
            let s = floats!(isa; x => sigmoid::<S>(x));
            assert!((s[0] - want).abs() < 1e-37, "{isa:?} sigmoid({}) = {}", x[0], s[0]);
        }
        for x in [88.376_26, 89.0, 1e30, f32::INFINITY] {
            let x = [x; LANES];
            let e = floats!(isa; x => exp::<S>(x));
            assert!(e[0] >= 2.4e38, "{isa:?} exp({}) = {}", x[0], e[0]);
        }
    }
}
