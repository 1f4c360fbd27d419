//! The limits of this CPU that the speed of the forward pass is compared with: memory bandwidth, multiplication rates, the cost
//! of a parallel region, and the time of matrix products by themselves.

use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use metal_attention_gguf::Tensor;

use crate::activations::Q8Activations;
use crate::error::CpuError;
use crate::kernels::matmul::{MatmulOp, WeightMatrix, matmul};
use crate::memory::PackedMemory;
use crate::pool::ThreadPool;
use crate::simd::{Isa, Kernel, LANES, Simd};

/// 8-byte words of memory that one task reads or copies: 256 KiB.
const CHUNK: usize = 1 << 15;
/// Iterations of one task that measures a multiplication rate: some tens of microseconds.
const STEPS: usize = 1 << 14;
/// Operands of such a task, which are read again and again: a part of the first-level cache.
const OPERANDS: usize = 1 << 10;

/// Measures the limits of this CPU, with a thread pool like that of a forward pass. Every result is the best of many runs
/// within the given `time`.
pub struct CpuCeilings {
    pool: ThreadPool,
    isa: Isa,
}

impl CpuCeilings {
    /// Starts `n_threads` threads, the caller's included. An error where the system refuses them.
    pub fn new(n_threads: usize) -> Result<Self, CpuError> {
        let pool = ThreadPool::new(n_threads).map_err(|source| CpuError::Threads { n_threads, source })?;
        Ok(Self { pool, isa: Isa::best() })
    }

    /// Replaces the instruction set of the kernels by `isa`, which need not be the best one that this CPU has.
    #[must_use]
    pub fn with_isa(self, isa: Isa) -> Self {
        Self { isa, ..self }
    }

    /// The instruction set of the kernels.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Bytes per second that all threads together read from a buffer of `bytes`. It is the bandwidth of memory where `bytes` is
    /// much larger than the caches.
    pub fn read_bandwidth(&self, bytes: usize, time: Duration) -> Result<f64, CpuError> {
        let words = words("the buffer to read", bytes)?;
        let chunks: Vec<_> = words.chunks(CHUNK).collect();
        let seconds = best(time, || {
            self.pool.for_each(chunks.len(), &|i| {
                black_box(checksum(chunks[i]));
            });
        });
        Ok(8.0 * words.len() as f64 / seconds)
    }

    /// Bytes per second that all threads together copy from one buffer of `bytes` to another: bytes read plus bytes written.
    pub fn copy_bandwidth(&self, bytes: usize, time: Duration) -> Result<f64, CpuError> {
        let from = words("the buffer to copy", bytes)?;
        let mut to = words("the buffer to copy to", bytes)?;
        let chunks: Vec<_> = from.chunks(CHUNK).zip(to.chunks_mut(CHUNK)).map(Mutex::new).collect();
        let seconds = best(time, || {
            self.pool.for_each(chunks.len(), &|i| {
                // Each task has its own chunk, so no lock waits, and none is poisoned by another thread.
                if let Ok(mut chunk) = chunks[i].lock() {
                    let (from, to) = &mut *chunk;
                    to.copy_from_slice(from);
                }
            });
        });
        Ok(2.0 * 8.0 * from.len() as f64 / seconds)
    }

    /// Multiplications (with their additions) of 8-bit integers per second, by the dot products of the matrix kernels,
    /// with all threads and operands in the first-level cache.
    pub fn int8_rate(&self, time: Duration) -> f64 {
        let (codes, x) = (vec![1; OPERANDS], vec![1; OPERANDS]);
        self.rate(time, |sum| {
            self.isa.run(DotRate { codes: &codes, x: &x, steps: STEPS, sum });
        })
    }

    /// Multiplications (with their additions) of 32-bit floats per second, with all threads and operands in the
    /// first-level cache.
    pub fn f32_rate(&self, time: Duration) -> f64 {
        let x = vec![0.5; OPERANDS];
        self.rate(time, |sum| {
            self.isa.run(FmaRate { x: &x, steps: STEPS, sum });
        })
    }

    /// Multiplications per second of `task` on all threads. `task` adds the number of its multiplications to its argument.
    fn rate(&self, time: Duration, task: impl Fn(&mut RateSample) + Sync) -> f64 {
        let mut sample = RateSample::default();
        task(&mut sample);
        let n_tasks = 16 * self.pool.n_threads();
        let seconds = best(time, || {
            self.pool.for_each(n_tasks, &|_| {
                let mut sample = RateSample::default();
                task(&mut sample);
                black_box(sample.value);
            });
        });
        sample.multiplications as f64 * n_tasks as f64 / seconds
    }

    /// Seconds of an empty parallel region that every thread enters: the best of several means over many regions.
    pub fn region(&self, time: Duration) -> f64 {
        const REGIONS: usize = 64;
        /// Iterations before a waiting thread yields, in case another one waits for its core.
        const SPINS: u32 = 1000;
        let n_threads = self.pool.n_threads();
        let seconds = best(time, || {
            for _ in 0..REGIONS {
                let arrived = AtomicUsize::new(0);
                self.pool.for_each(n_threads, &|_| {
                    arrived.fetch_add(1, Ordering::AcqRel);
                    let mut spins = 0;
                    // A waiting thread takes no other task, so each task runs on another thread.
                    while arrived.load(Ordering::Acquire) < n_threads {
                        spins += 1;
                        if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
                    }
                });
            }
        });
        seconds / REGIONS as f64
    }

    /// Seconds of the products of `matrices`, one after the other, with `n` tokens, for each `n` in `n_tokens`. Matrices that
    /// together exceed the caches are read from memory, as in a decode step. `exact`: as in
    /// [`SessionOptions`](metal_attention_model::SessionOptions::exact).
    pub fn products(
        &self,
        matrices: &[&Tensor],
        n_tokens: &[usize],
        exact: bool,
        time: Duration,
    ) -> Result<Vec<f64>, CpuError> {
        let mut memory = PackedMemory::default();
        let matrices = matrices
            .iter()
            .map(|tensor| {
                let bytes = tensor.bytes().len() as u64;
                let matrix = WeightMatrix::new(&self.pool, &mut memory, tensor, exact);
                matrix.ok_or(CpuError::OutOfMemory { what: "a repacked weight matrix", bytes })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let widest = |width: fn(&WeightMatrix) -> usize| matrices.iter().map(width).max().unwrap_or(0);
        let (n_in, n_out) = (widest(WeightMatrix::n_in), widest(WeightMatrix::n_out));
        let mut q8 = Q8Activations::default();
        let measure = |&n: &usize| {
            let x: Vec<f32> = (0..n * n_in).map(|i| (i % 17) as f32 - 8.0).collect();
            let mut y = vec![0.0; n * n_out];
            best(time, || {
                for matrix in &matrices {
                    let y = &mut y[..n * matrix.n_out()];
                    let mut products = [MatmulOp { matrix, rows: 0..n, y, accumulate: false }];
                    matmul(&self.pool, self.isa, &x[..n * matrix.n_in()], &mut q8, &mut products);
                }
            })
        };
        Ok(n_tokens.iter().map(measure).collect())
    }
}

/// A buffer of `bytes`, all of whose pages have been written to. `what` names it in the error.
fn words(what: &'static str, bytes: usize) -> Result<Vec<u64>, CpuError> {
    let mut words = Vec::new();
    words.try_reserve_exact(bytes / 8).map_err(|_| CpuError::OutOfMemory { what, bytes: bytes as u64 })?;
    words.resize(bytes / 8, 0x0102_0304_0506_0708);
    Ok(words)
}

/// The shortest time of `run` in seconds, over at least 3 runs and at least `time`, after one run to warm up.
fn best(time: Duration, mut run: impl FnMut()) -> f64 {
    run();
    let start = Instant::now();
    let mut shortest = f64::INFINITY;
    let mut runs = 0;
    while runs < 3 || start.elapsed() < time {
        let start = Instant::now();
        run();
        shortest = shortest.min(start.elapsed().as_secs_f64());
        runs += 1;
    }
    shortest.max(1e-9)
}

/// The exclusive or of all words, computed in parallel lanes: it reads memory as fast as possible.
fn checksum(words: &[u64]) -> u64 {
    let (lines, rest) = words.as_chunks::<32>();
    let mut lanes = [0; 32];
    for line in lines {
        for (lane, word) in lanes.iter_mut().zip(line) {
            *lane ^= word;
        }
    }
    lanes.iter().chain(rest).fold(0, |a, b| a ^ b)
}

/// The result of a task that measures a multiplication rate.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct RateSample {
    /// The number of multiplications.
    multiplications: u64,
    /// The sum of all products, so that the compiler does not remove them.
    value: f32,
}

/// Dot products of `codes` (below 128) with `x`, in a register tile like that of matrix products.
struct DotRate<'a> {
    codes: &'a [u8],
    x: &'a [i8],
    steps: usize,
    sum: &'a mut RateSample,
}

impl Kernel for DotRate<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: as the caller vouches; tiles are no larger than the operands.
        unsafe { if const { S::TILE >= 8 } { self.tile::<S, 4, 4>() } else { self.tile::<S, 2, 2>() } }
    }
}

impl DotRate<'_> {
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize, const T: usize>(self) {
        let n_offsets = self.codes.len().min(self.x.len()) / (64 * R);
        assert!(n_offsets > 0 && 4 * T <= 64 * R, "a tile's operands are there");
        // SAFETY: step % n_offsets is below n_offsets, so every load lies inside the operands.
        unsafe {
            let mut acc = [[S::i_splat(0); T]; R];
            for step in 0..self.steps {
                let at = 64 * R * (step % n_offsets);
                let codes: [S::B; R] = std::array::from_fn(|r| S::b_load(self.codes.as_ptr().add(at + 64 * r)));
                for r in 0..R {
                    for t in 0..T {
                        acc[r][t] = S::dot7(acc[r][t], codes[r], self.x.as_ptr().add(at + 4 * t));
                    }
                }
            }
            for sum in acc.as_flattened() {
                self.sum.value += S::f_sum(S::i_to_f(*sum));
            }
        }
        self.sum.multiplications = (64 * R * T * self.steps) as u64;
    }
}

/// Sums of products of floats, in enough registers to hide the latency.
struct FmaRate<'a> {
    x: &'a [f32],
    steps: usize,
    sum: &'a mut RateSample,
}

impl Kernel for FmaRate<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: as the caller vouches; a tile is no larger than the operands.
        unsafe { if const { S::TILE >= 8 } { self.tile::<S, 4, 4>() } else { self.tile::<S, 2, 2>() } }
    }
}

impl FmaRate<'_> {
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize, const T: usize>(self) {
        let n_offsets = self.x.len() / (LANES * R);
        assert!(n_offsets > 0 && T <= R * LANES, "a tile's operands are there");
        // SAFETY: step % n_offsets is below n_offsets, so every load lies inside the operands.
        unsafe {
            let mut acc = [[S::f_splat(0.0); T]; R];
            for step in 0..self.steps {
                let at = LANES * R * (step % n_offsets);
                let w: [S::F; R] = std::array::from_fn(|r| S::f_load(self.x.as_ptr().add(at + LANES * r)));
                let x: [S::F; T] = std::array::from_fn(|t| S::f_splat(self.x[at + t]));
                for r in 0..R {
                    for t in 0..T {
                        acc[r][t] = S::f_fma(w[r], x[t], acc[r][t]);
                    }
                }
            }
            for sum in acc.as_flattened() {
                self.sum.value += S::f_sum(*sum);
            }
        }
        self.sum.multiplications = (LANES * R * T * self.steps) as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_multiplies_what_it_counts() {
        let codes: Vec<u8> = (0..OPERANDS).map(|i| (i % 128) as u8).collect();
        let (ones, halves) = (vec![1; OPERANDS], vec![0.5; OPERANDS]);
        for isa in Isa::available() {
            let mut sample = RateSample::default();
            isa.run(DotRate { codes: &codes, x: &ones, steps: 8, sum: &mut sample });
            // Codes 0 to 127, each as often as the others: 63.5 on average.
            assert_eq!(f64::from(sample.value), 63.5 * sample.multiplications as f64, "{}", isa.name());
            let mut sample = RateSample::default();
            isa.run(FmaRate { x: &halves, steps: 5, sum: &mut sample });
            assert_eq!(f64::from(sample.value), 0.25 * sample.multiplications as f64, "{}", isa.name());
        }
    }

    #[test]
    fn the_checksum_contains_every_word() {
        for n in [0, 1, 31, 32, 33, 100] {
            let words: Vec<u64> = (0..n).map(|i| i * i + 1).collect();
            assert_eq!(checksum(&words), words.iter().fold(0, |a, b| a ^ b), "{n}");
        }
    }

    #[test]
    fn every_ceiling_is_a_positive_number() {
        let time = Duration::from_millis(1);
        for n_threads in [1, 2] {
            let ceilings = CpuCeilings::new(n_threads).expect("threads");
            let found = [
                ceilings.read_bandwidth(1 << 20, time).expect("memory"),
                ceilings.copy_bandwidth(1 << 20, time).expect("memory"),
                ceilings.int8_rate(time),
                ceilings.f32_rate(time),
                ceilings.region(time),
            ];
            assert!(found.iter().all(|v| *v > 0.0 && v.is_finite()), "{found:?}");
        }
    }
}
