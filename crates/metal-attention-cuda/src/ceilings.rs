//! [`CudaCeilings`]: measures what a device can do at best (memory bandwidth, arithmetic rates, launch costs), to compare the
//! forward pass with.

use std::sync::Arc;
use std::time::{Duration, Instant};

use metal_attention_gguf::Tensor;
use metal_attention_model::timing;

use crate::args::RateArgs;
use crate::device::{CudaBuffer, Readback};
use crate::kernels::{self, EntryPoint};
use crate::launch::{LaunchGrid, LaunchOrder};
use crate::matrix::CudaMatrix;
use crate::{CudaDevice, CudaError, CudaExecutor};

/// Most launches of one measurement, approximately.
const MAX_LAUNCHES: usize = 4096;
/// Launches of the shorter chain.
const CHAIN: usize = 128;
/// Graphs that are queued before the host waits for the last one.
const QUEUED: usize = 32;
/// Threads of a block of the rate kernels.
const THREADS: usize = 256;
/// Their blocks for each multiprocessor.
const BLOCKS_PER_SM: usize = 8;
/// Most bytes for each multiprocessor that are read or copied: far more than its share of the caches.
const MAX_BYTES_PER_SM: u64 = 8 << 20;
/// Multiply-adds of a thread of `rate_floats` in a step (`CHAINS` of `kernels/rates.cu`).
const FLOATS_A_STEP: usize = 8;
/// Multiply-adds of a warp of `rate_mma` in a step.
const MMA_A_STEP: usize = 8 * 16 * 16 * 8;

/// Measures a device by the host's clock. Rates are the best of a few measurements, which take about `time` together.
#[derive(Debug)]
pub struct CudaCeilings {
    /// The device that is measured.
    gpu: Arc<CudaDevice>,
    /// The approximate time of one measurement.
    time: Duration,
}

/// The costs of launching a kernel that does nothing, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CudaLaunchCosts {
    /// A kernel in a CUDA graph that depends on the one before it.
    pub in_graph: f64,
    /// A kernel that depends on the one before it, each launched by itself, when only the last one is awaited.
    pub without_graph: f64,
    /// From a launch until the host has read its result.
    pub round_trip: f64,
    /// A CUDA graph of one kernel, when many are queued and only the last one is awaited.
    pub graph: f64,
}

impl CudaCeilings {
    /// Measurements of about `time` each on `gpu`.
    pub fn new(gpu: &Arc<CudaDevice>, time: Duration) -> Self {
        Self { gpu: Arc::clone(gpu), time }
    }

    /// Bytes per second that a kernel reads from a buffer of `bytes` bytes, or fewer on a small device.
    pub fn read_bandwidth(&self, bytes: u64) -> Result<f64, CudaError> {
        let from = self.gpu.zeros("the buffer to read", self.bytes(bytes))?;
        let results = self.results()?;
        let args = RateArgs { n: from.bytes() / 16, ..args_of(&from, &results) };
        Ok((16 * args.n) as f64 / self.rate_seconds(kernels::RATE_READ, args)?)
    }

    /// Bytes per second that a kernel copies between two buffers of `bytes` bytes: those read plus those written.
    pub fn copy_bandwidth(&self, bytes: u64) -> Result<f64, CudaError> {
        let from = self.gpu.zeros("the buffer to copy", self.bytes(bytes))?;
        let to = self.gpu.buffer("the buffer to copy to", from.bytes())?;
        let args = RateArgs { n: from.bytes() / 16, ..args_of(&from, &to) };
        Ok((2 * 16 * args.n) as f64 / self.rate_seconds(kernels::RATE_COPY, args)?)
    }

    /// F32 multiply-adds per second, in registers.
    pub fn f32_rate(&self) -> Result<f64, CudaError> {
        self.rate(kernels::RATE_FLOATS, FLOATS_A_STEP * THREADS)
    }

    /// F16 multiply-adds per second on the tensor cores, with F32 sums, by `mma.sync`, which all supported devices have
    /// (`wgmma` is faster).
    pub fn matrix_rate(&self) -> Result<f64, CudaError> {
        self.rate(kernels::RATE_MMA, MMA_A_STEP * THREADS / 32)
    }

    /// Measures the costs of launches.
    pub fn launch_costs(&self) -> Result<CudaLaunchCosts, CudaError> {
        let gpu = &self.gpu;
        let (a, b) = (gpu.zeros("a word", 16)?, gpu.zeros("a word", 16)?);
        let kernel = gpu.kernel(kernels::RATE_LINK)?;
        let (forth, back) = (args_of(&a, &b), args_of(&b, &a));
        let grid = LaunchGrid { blocks: [1, 1, 1], threads: 1, shared: 0 };
        let chain = |n: usize| {
            [&forth, &back]
                .into_iter()
                .cycle()
                .take(n)
                // SAFETY: the two words live until the device has been awaited.
                .try_for_each(|args| unsafe { gpu.launch(kernel, grid, args, LaunchOrder::Overlapped) })
        };
        // A warm-up: the driver loads the kernel at its first launch.
        chain(2)?;
        gpu.wait()?;
        let timed = |run: &mut dyn FnMut() -> Result<(), CudaError>| {
            let start = Instant::now();
            run()?;
            gpu.wait()?;
            Ok(start.elapsed().as_secs_f64())
        };
        let [one, short, long] = [1, CHAIN, 5 * CHAIN].map(|n| gpu.record(|| chain(n)));
        let (one, short, long) = (one?, short?, long?);
        let short_seconds = self.best(|| timed(&mut || short.launch()))?;
        let long_seconds = self.best(|| timed(&mut || long.launch()))?;
        let mut readback = Readback::new(gpu, 4)?;
        Ok(CudaLaunchCosts {
            // At least 1 ns: the difference may be 0 or negative with a coarse clock.
            in_graph: ((long_seconds - short_seconds) / (4 * CHAIN) as f64).max(1e-9),
            without_graph: self.best(|| timed(&mut || chain(CHAIN)))? / CHAIN as f64,
            round_trip: self.best(|| {
                let start = Instant::now();
                chain(1)?;
                readback.copy(&b, 4)?;
                readback.read(4)?;
                Ok(start.elapsed().as_secs_f64())
            })?,
            graph: self.best(|| timed(&mut || (0..QUEUED).try_for_each(|_| one.launch())))? / QUEUED as f64,
        })
    }

    /// Seconds that the products of all `matrices` with `n` tokens take, one after the other, for each `n` in `n_tokens`, by
    /// the kernels that `pass` would use for a micro-batch of `n` tokens. `pass` has to be on this device. If the matrices are
    /// together larger than the caches, weights are read from memory, as in a decode step.
    pub fn products(
        &self,
        pass: &mut CudaExecutor,
        matrices: &[&Tensor],
        n_tokens: &[usize],
    ) -> Result<Vec<f64>, CudaError> {
        let gpu = &self.gpu;
        let runner = &mut pass.runner;
        let upload = |tensor: &&Tensor| CudaMatrix::new(gpu, &mut runner.kernels, tensor);
        let matrices = matrices.iter().map(upload).collect::<Result<Vec<_>, _>>()?;
        let max_tokens = n_tokens.iter().copied().max().unwrap_or(1);
        let widest = |width: fn(&CudaMatrix) -> usize| matrices.iter().map(width).max().unwrap_or(1);
        let x = gpu.upload("inputs", &vec![0.5f32; max_tokens * widest(|m| m.n_in)])?;
        let packed = gpu.buffer("packed inputs", crate::activations::packed(widest(|m| m.n_in), max_tokens) as u64)?;
        let y = gpu.buffer("products", 4 * (max_tokens * widest(|m| m.n_rows)) as u64)?;
        let mut seconds = Vec::new();
        for &n in n_tokens {
            seconds.push(self.seconds(&mut || {
                matrices.iter().try_for_each(|matrix| runner.benchmark_product(matrix, &x, &packed, &y, n))
            })?);
        }
        Ok(seconds)
    }

    /// `bytes`, limited for small devices, and rounded down to vectors of 16 bytes.
    fn bytes(&self, bytes: u64) -> u64 {
        bytes.min(MAX_BYTES_PER_SM * self.gpu.summary().n_sm as u64) & !15
    }

    /// Blocks that occupy the device.
    fn blocks(&self) -> usize {
        BLOCKS_PER_SM * self.gpu.summary().n_sm
    }

    /// A buffer with 4 bytes for each thread.
    fn results(&self) -> Result<CudaBuffer, CudaError> {
        self.gpu.buffer("results", (4 * THREADS * self.blocks()) as u64)
    }

    /// Multiply-adds per second of a rate kernel whose blocks do `work_per_block` of them in a step. Doubles the steps until a
    /// launch takes a millisecond.
    fn rate(&self, kernel: EntryPoint<RateArgs>, work_per_block: usize) -> Result<f64, CudaError> {
        let operands = self.gpu.zeros("operands", 16 * 64)?;
        let results = self.results()?;
        let mut fastest = 0.0_f64;
        let mut steps = 16;
        loop {
            let seconds = self.rate_seconds(kernel, RateArgs { steps, ..args_of(&operands, &results) })?;
            fastest = fastest.max((work_per_block * self.blocks()) as f64 * f64::from(steps) / seconds);
            if seconds > 1e-3 {
                return Ok(fastest);
            }
            steps *= 4;
        }
    }

    /// Seconds of one launch of a rate kernel on the whole device.
    fn rate_seconds(&self, kernel: EntryPoint<RateArgs>, args: RateArgs) -> Result<f64, CudaError> {
        let kernel = self.gpu.kernel(kernel)?;
        let grid = LaunchGrid { blocks: [self.blocks(), 1, 1], threads: THREADS, shared: 0 };
        // SAFETY: callers give buffers of `n` vectors, or with a word for each thread, which live until the device has been awaited.
        self.seconds(&mut || unsafe { self.gpu.launch(kernel, grid, &args, LaunchOrder::AfterPrevious) })
    }

    /// Seconds of one call of `launch`, from many calls in a row; the best of a few measurements.
    fn seconds(&self, launch: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        let run = |times: usize| {
            self.gpu.check_watch()?;
            let start = Instant::now();
            (0..times).try_for_each(|_| launch())?;
            self.gpu.wait()?;
            Ok::<_, CudaError>(start.elapsed().as_secs_f64().max(1e-9))
        };
        timing::seconds_per_run(self.time, MAX_LAUNCHES, run)
    }

    /// The smallest result of `run` within the time, after a warm-up.
    fn best(&self, mut run: impl FnMut() -> Result<f64, CudaError>) -> Result<f64, CudaError> {
        timing::shortest(self.time, || {
            self.gpu.check_watch()?;
            run()
        })
    }
}

/// Arguments of a rate kernel; the caller sets `n` or `steps`.
fn args_of(from: &CudaBuffer, to: &CudaBuffer) -> RateArgs {
    RateArgs { from: from.ptr(), to: to.ptr(), n: 0, steps: 0, unused: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_rate_kernels_compute_their_results() {
        let Some(gpu) = CudaDevice::for_tests() else { return };
        let grid = LaunchGrid { blocks: [3, 1, 1], threads: THREADS, shared: 0 };
        let run = |entry: EntryPoint<RateArgs>, from: &CudaBuffer, to: &CudaBuffer, n: u64, steps: u32| {
            let kernel = gpu.kernel(entry).unwrap();
            let args = RateArgs { n, steps, ..args_of(from, to) };
            // SAFETY: the buffers have the vectors and words, and live until the result is read.
            unsafe { gpu.launch(kernel, grid, &args, LaunchOrder::AfterPrevious).unwrap() };
            let mut readback = Readback::new(&gpu, to.bytes()).unwrap();
            readback.copy(to, to.bytes()).unwrap();
            readback.read(to.bytes()).unwrap().to_vec()
        };
        // A number of vectors that is not a multiple of the threads, nor of the vectors that a thread reads at a time.
        let words: Vec<u32> = (0..4 * 5003_u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        let from = gpu.upload("words", &words).unwrap();
        let n = 5003;
        let copied = run(kernels::RATE_COPY, &from, &gpu.buffer("a copy", from.bytes()).unwrap(), n, 0);
        assert_eq!(bytemuck::cast_slice::<u8, u32>(&copied), words);
        let results = gpu.buffer("results", (4 * 3 * THREADS) as u64).unwrap();
        let sums: Vec<u32> = bytemuck::pod_collect_to_vec(&run(kernels::RATE_READ, &from, &results, n, 0));
        let sum = |all: &[u32]| all.iter().fold(0_u32, |sum, &v| sum.wrapping_add(v));
        assert_eq!(sum(&sums), sum(&words));

        // Each step maps v to v / 2 + 1; a thread starts with its index and the seven numbers after it.
        let operands = gpu.upload("operands", &[0.5_f32, 1.0, 0.0, 0.0]).unwrap();
        let sums: Vec<f32> = bytemuck::pod_collect_to_vec(&run(kernels::RATE_FLOATS, &operands, &results, 0, 4));
        for (thread, &got) in sums.iter().enumerate() {
            let v = (thread % THREADS) as f32;
            assert!((got - (8.0 * v + 28.0 + 8.0 * 30.0) / 16.0).abs() < 1e-3, "thread {thread}: {got}");
        }
        // All elements are 1, so each element of a product is 16.
        let ones = gpu.upload("ones", &[0x3C00_u16; 8 * 64]).unwrap();
        let sums: Vec<f32> = bytemuck::pod_collect_to_vec(&run(kernels::RATE_MMA, &ones, &results, 0, 3));
        assert_eq!(sums, vec![3.0 * 16.0 * 32.0; 3 * THREADS]);
        // All threads store the same word.
        let word: Vec<u32> = bytemuck::pod_collect_to_vec(&run(kernels::RATE_LINK, &from, &results, 0, 0));
        assert_eq!(word[0], words[0] + 1);
    }
}
