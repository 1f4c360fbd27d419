//! What a device can do at best: the ceilings that the forward pass is held against.

use std::sync::Arc;
use std::time::{Duration, Instant};

use metal_attention_gguf::Tensor;
use metal_attention_model::timing;

use crate::args::RateArgs;
use crate::device::{CudaBuffer, Readback};
use crate::launch::{Grid, Start};
use crate::matrix::CudaMatrix;
use crate::{CudaDevice, CudaError, CudaForwardPass};

/// Launches of a measurement, about.
const MOST_TIMES: usize = 4096;
/// Launches of a chain.
const CHAIN: usize = 128;
/// Graphs that are queued before the last of them is waited for.
const QUEUED: usize = 32;
/// Threads of a block of the kernels, and such blocks of a multiprocessor.
const THREADS: usize = 256;
const BLOCKS: usize = 8;
/// Bytes for each multiprocessor that are read or copied at most: far more than caches have.
const BYTES: u64 = 8 << 20;
/// Multiplications of a thread of `rate_floats` in a step, and of a warp of `rate_mma`: as `kernels/rates.cu` has them.
const FLOATS_A_STEP: usize = 8;
const MMA_A_STEP: usize = 8 * 16 * 16 * 8;

/// Measures the device that a forward pass runs on, by the clock of the CPU. Rates are the best of a few runs, each over the `time`
/// given.
#[derive(Debug)]
pub struct CudaCeilings {
    gpu: Arc<CudaDevice>,
    time: Duration,
}

/// Seconds that a kernel takes which has nothing to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CudaLaunchCosts {
    /// One that depends on the one before it, in a graph.
    pub in_graph: f64,
    /// The same, where each is launched by itself, and only the last one waited for.
    pub alone: f64,
    /// From a launch until the CPU has read its result.
    pub round_trip: f64,
    /// A graph of one kernel, where a row of them is queued and only the last one waited for.
    pub graph: f64,
}

impl CudaCeilings {
    /// Measurements that take `time` or somewhat more each.
    pub fn new(gpu: &Arc<CudaDevice>, time: Duration) -> Self {
        Self { gpu: Arc::clone(gpu), time }
    }

    /// Bytes per second that a kernel reads from a buffer of `bytes`, fewer on a small device.
    pub fn read_bandwidth(&self, bytes: u64) -> Result<f64, CudaError> {
        let from = self.gpu.zeros("the buffer to read", self.bytes(bytes))?;
        let results = self.results()?;
        let args = RateArgs { n: from.bytes() / 16, ..args_of(&from, &results) };
        Ok((16 * args.n) as f64 / self.rate_seconds("rate_read", args)?)
    }

    /// Bytes per second that a kernel moves between two buffers of `bytes`: those read plus those written.
    pub fn copy_bandwidth(&self, bytes: u64) -> Result<f64, CudaError> {
        let from = self.gpu.zeros("the buffer to copy", self.bytes(bytes))?;
        let to = self.gpu.buffer("the buffer to copy to", from.bytes())?;
        let args = RateArgs { n: from.bytes() / 16, ..args_of(&from, &to) };
        Ok((2 * 16 * args.n) as f64 / self.rate_seconds("rate_copy", args)?)
    }

    /// Multiplications (with their additions) of F32 per second, in registers.
    pub fn f32_rate(&self) -> Result<f64, CudaError> {
        self.rate("rate_floats", FLOATS_A_STEP * THREADS)
    }

    /// Multiplications (with their additions) of F16 per second on the tensor cores, with F32 sums, by the instruction that all
    /// devices have (`mma.sync`).
    pub fn matrix_rate(&self) -> Result<f64, CudaError> {
        self.rate("rate_mma", MMA_A_STEP * THREADS / 32)
    }

    /// What launches cost.
    pub fn launch_costs(&self) -> Result<CudaLaunchCosts, CudaError> {
        let gpu = &self.gpu;
        let (a, b) = (gpu.zeros("a word", 16)?, gpu.zeros("a word", 16)?);
        let kernel = gpu.kernel("rate_link")?;
        let (there, back) = (args_of(&a, &b), args_of(&b, &a));
        let grid = Grid { blocks: [1, 1, 1], threads: 1, shared: 0 };
        let chain = |n: usize| {
            [&there, &back]
                .into_iter()
                .cycle()
                .take(n)
                .try_for_each(|args| gpu.launch(kernel, grid, args, Start::Early))
        };
        // What the driver does late is done before the clock is looked at.
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
        let of_short = self.best(|| timed(&mut || short.launch()))?;
        let of_long = self.best(|| timed(&mut || long.launch()))?;
        let mut readback = Readback::new(gpu, 4)?;
        Ok(CudaLaunchCosts {
            // Where the clock is coarser than the difference, nothing is lost by calling it next to nothing.
            in_graph: ((of_long - of_short) / (4 * CHAIN) as f64).max(1e-9),
            alone: self.best(|| timed(&mut || chain(CHAIN)))? / CHAIN as f64,
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

    /// Seconds that the products of `matrices`, one after the other, with `n_tokens` tokens take, for each of `n_tokens`: by the
    /// kernels that `pass`, which runs on this device, takes for so many tokens. Matrices together larger than the caches are read
    /// from memory, as in a step of decode.
    pub fn products(
        &self,
        pass: &mut CudaForwardPass,
        matrices: &[&Tensor],
        n_tokens: &[usize],
    ) -> Result<Vec<f64>, CudaError> {
        let gpu = &self.gpu;
        let steps = &mut pass.steps;
        let upload = |tensor: &&Tensor| CudaMatrix::new(gpu, &mut steps.kernels, tensor);
        let matrices = matrices.iter().map(upload).collect::<Result<Vec<_>, _>>()?;
        let most = n_tokens.iter().copied().max().unwrap_or(1);
        let widest = |width: fn(&CudaMatrix) -> usize| matrices.iter().map(width).max().unwrap_or(1);
        let x = gpu.upload("inputs", &vec![0.5f32; most * widest(|m| m.n_in)])?;
        let packed = gpu.buffer("packed inputs", crate::activations::packed(widest(|m| m.n_in), most) as u64)?;
        let y = gpu.buffer("products", 4 * (most * widest(|m| m.n_rows)) as u64)?;
        let mut seconds = Vec::new();
        for &n in n_tokens {
            seconds.push(self.seconds(&mut || {
                matrices.iter().try_for_each(|matrix| steps.product_alone(matrix, &x, &packed, &y, n))
            })?);
        }
        Ok(seconds)
    }

    /// So many bytes, fewer on a small device, in whole vectors.
    fn bytes(&self, bytes: u64) -> u64 {
        bytes.min(BYTES * self.gpu.summary().n_sm as u64) & !15
    }

    /// Blocks that fill the device.
    fn blocks(&self) -> usize {
        BLOCKS * self.gpu.summary().n_sm
    }

    /// A word for each thread.
    fn results(&self) -> Result<CudaBuffer, CudaError> {
        self.gpu.buffer("results", (4 * THREADS * self.blocks()) as u64)
    }

    /// Multiplications per second of a kernel each block of which does `of_block` in a step: of enough steps to be worth a launch.
    fn rate(&self, kernel: &str, of_block: usize) -> Result<f64, CudaError> {
        let operands = self.gpu.zeros("operands", 16 * 64)?;
        let results = self.results()?;
        let mut fastest = 0.0_f64;
        let mut steps = 16;
        loop {
            let seconds = self.rate_seconds(kernel, RateArgs { steps, ..args_of(&operands, &results) })?;
            fastest = fastest.max((of_block * self.blocks()) as f64 * f64::from(steps) / seconds);
            if seconds > 1e-3 {
                return Ok(fastest);
            }
            steps *= 4;
        }
    }

    fn rate_seconds(&self, kernel: &str, args: RateArgs) -> Result<f64, CudaError> {
        let kernel = self.gpu.kernel(kernel)?;
        let grid = Grid { blocks: [self.blocks(), 1, 1], threads: THREADS, shared: 0 };
        self.seconds(&mut || self.gpu.launch(kernel, grid, &args, Start::InTurn))
    }

    /// Seconds of one run of what `launch` asks for: of many, their share; the best of a few.
    fn seconds(&self, launch: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        let run = |times: usize| {
            self.gpu.check_watch()?;
            let start = Instant::now();
            (0..times).try_for_each(|_| launch())?;
            self.gpu.wait()?;
            Ok::<_, CudaError>(start.elapsed().as_secs_f64().max(1e-9))
        };
        timing::seconds_per_run(self.time, MOST_TIMES, run)
    }

    /// The least of what `run` gives within the time, after a run to warm up.
    fn best(&self, mut run: impl FnMut() -> Result<f64, CudaError>) -> Result<f64, CudaError> {
        timing::shortest(self.time, || {
            self.gpu.check_watch()?;
            run()
        })
    }
}

fn args_of(from: &CudaBuffer, to: &CudaBuffer) -> RateArgs {
    RateArgs { from: from.ptr(), to: to.ptr(), n: 0, steps: 0, unused: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_kernels_do_what_they_are_timed_for() {
        let Some(gpu) = CudaDevice::for_tests() else { return };
        let grid = Grid { blocks: [3, 1, 1], threads: THREADS, shared: 0 };
        let run = |name: &str, from: &CudaBuffer, to: &CudaBuffer, n: u64, steps: u32| {
            let kernel = gpu.kernel(name).unwrap();
            let args = RateArgs { n, steps, ..args_of(from, to) };
            gpu.launch(kernel, grid, &args, Start::InTurn).unwrap();
            let mut readback = Readback::new(&gpu, to.bytes()).unwrap();
            readback.copy(to, to.bytes()).unwrap();
            readback.read(to.bytes()).unwrap().to_vec()
        };
        // No multiple of the threads, nor of the vectors that a thread asks for at once.
        let words: Vec<u32> = (0..4 * 5003_u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        let from = gpu.upload("words", &words).unwrap();
        let n = 5003;
        let copied = run("rate_copy", &from, &gpu.buffer("a copy", from.bytes()).unwrap(), n, 0);
        assert_eq!(bytemuck::cast_slice::<u8, u32>(&copied), words);
        let results = gpu.buffer("results", (4 * 3 * THREADS) as u64).unwrap();
        let sums: Vec<u32> = bytemuck::pod_collect_to_vec(&run("rate_read", &from, &results, n, 0));
        let sum = |all: &[u32]| all.iter().fold(0_u32, |sum, &v| sum.wrapping_add(v));
        assert_eq!(sum(&sums), sum(&words));

        // v -> v / 2 + 1, from the thread's number and the seven after it.
        let operands = gpu.upload("operands", &[0.5_f32, 1.0, 0.0, 0.0]).unwrap();
        let sums: Vec<f32> = bytemuck::pod_collect_to_vec(&run("rate_floats", &operands, &results, 0, 4));
        for (thread, &got) in sums.iter().enumerate() {
            let v = (thread % THREADS) as f32;
            assert!((got - (8.0 * v + 28.0 + 8.0 * 30.0) / 16.0).abs() < 1e-3, "thread {thread}: {got}");
        }
        // All elements 1: each of a product is 16.
        let ones = gpu.upload("ones", &[0x3C00_u16; 8 * 64]).unwrap();
        let sums: Vec<f32> = bytemuck::pod_collect_to_vec(&run("rate_mma", &ones, &results, 0, 3));
        assert_eq!(sums, vec![3.0 * 16.0 * 32.0; 3 * THREADS]);
    }
}
