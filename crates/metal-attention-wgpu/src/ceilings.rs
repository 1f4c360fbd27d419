//! Measures the highest rates that a GPU reaches: memory bandwidth, multiplications, launches. Benchmarks compare the
//! forward pass with them.

use std::time::{Duration, Instant};

use metal_attention_gguf::Tensor;
use metal_attention_model::timing;
use wgpu::{Buffer, CommandBuffer, ComputePassDescriptor};

use crate::arena::Arena;
use crate::batch::batch_words;
use crate::device::WgpuDevice;
use crate::dispatch::{BatchDims, Dispatch};
use crate::error::WgpuError;
use crate::kernels::{
    MatvecOptions, TOKEN_TILE, buffer_copy, multi_token_matvec, rate_floats, rate_floats_work, rate_matrix,
    rate_matrix_work, rate_read, rate_sums, split_matmul, split_tile,
};
use crate::matrix::WgpuMatrix;
use crate::readback::Readback;

/// About how many dispatches a measurement repeats.
const MOST_DISPATCHES: usize = 4096;
/// Dispatches of a chain in which each depends on the one before.
const CHAIN: usize = 128;
/// Submissions that are queued before the CPU waits for the last.
const QUEUED: usize = 32;
/// Dimensions for dispatches that do not depend on a batch.
const ONE: BatchDims = BatchDims { n_tokens: 1, n_outputs: 1, n_runs: 1, n_splits: 1 };

/// Measures an open GPU with the CPU's clock. Every rate is the best of a few runs.
pub struct WgpuCeilings<'a> {
    /// The GPU.
    gpu: &'a WgpuDevice,
    /// About how long each measurement takes.
    time: Duration,
}

/// Seconds that launches take when the kernels have nothing to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LaunchCosts {
    /// One dispatch of a chain in which each depends on the one before, in a submission that was recorded in advance.
    pub dispatch: f64,
    /// One dispatch of such a chain when submissions are recorded and queued while others run: the slower of recording
    /// and running.
    pub dispatch_queued: f64,
    /// One submission of one dispatch, from recording it until the CPU has read its result.
    pub submission: f64,
    /// One submission when several are queued and the CPU waits for the last only.
    pub submission_queued: f64,
}

impl<'a> WgpuCeilings<'a> {
    /// A measurement takes `time` or somewhat more.
    pub fn new(gpu: &'a WgpuDevice, time: Duration) -> Self {
        Self { gpu, time }
    }

    /// Bytes per second that a kernel reads from a buffer of `bytes`, or of the largest binding if that is less.
    pub fn read_bandwidth(&self, bytes: u64) -> Result<f64, WgpuError> {
        let (words, n) = self.words("the buffer to read", bytes)?;
        let groups = self.groups().min(n / 4096).max(1);
        let sums = self.gpu.buffer("sums", 4 * rate_sums(groups) as u64)?;
        let seconds = self.seconds(&[rate_read(self.gpu, n, groups, &words, &sums)?], ONE)?;
        Ok(16.0 * n as f64 / seconds)
    }

    /// Bytes per second that a kernel copies between two buffers of `bytes`: those read plus those written.
    pub fn copy_bandwidth(&self, bytes: u64) -> Result<f64, WgpuError> {
        let (from, n) = self.words("the buffer to copy", bytes)?;
        let (to, _) = self.words("the buffer to copy to", bytes)?;
        let seconds = self.seconds(&[buffer_copy(self.gpu, 4 * n, &from, &to)?], ONE)?;
        Ok(2.0 * 16.0 * n as f64 / seconds)
    }

    /// Fused multiply-adds of 32-bit floats per second, in registers.
    pub fn f32_rate(&self) -> Result<f64, WgpuError> {
        let work = |steps, groups| rate_floats_work(steps, groups) as f64;
        let rate = self.rate(work, |steps, groups, x, sums| rate_floats(self.gpu, steps, groups, x, sums).map(Some))?;
        rate.ok_or_else(|| WgpuError::Lost { why: "the rate of multiplications was not measured".into() })
    }

    /// Multiply-adds per second of the matrix units that kernels use, in registers; `None`: the device has none.
    pub fn matrix_rate(&self) -> Result<Option<f64>, WgpuError> {
        let work = |steps, groups| rate_matrix_work(self.gpu.features(), steps, groups).unwrap_or(0) as f64;
        self.rate(work, |steps, groups, x, sums| rate_matrix(self.gpu, steps, groups, x, sums))
    }

    /// The costs of dispatches and submissions.
    pub fn launch_costs(&self) -> Result<LaunchCosts, WgpuError> {
        let (a, b) = (self.gpu.buffer("a word", 4)?, self.gpu.buffer("a word", 4)?);
        let there_and_back = [buffer_copy(self.gpu, 1, &a, &b)?, buffer_copy(self.gpu, 1, &b, &a)?];
        let chain = |n: usize| there_and_back.iter().cycle().take(n);
        let run = |n: usize| {
            let commands = self.record(chain(n), ONE);
            let start = Instant::now();
            let submission = self.gpu.submit_commands(commands);
            self.gpu.wait(Some(submission))?;
            Ok(start.elapsed().as_secs_f64())
        };
        let long = timing::shortest(self.time, || run(5 * CHAIN))?;
        let short = timing::shortest(self.time, || run(CHAIN))?;
        let mut readback = Readback::new(self.gpu, 4)?;
        let submission = timing::shortest(self.time, || {
            let start = Instant::now();
            let mut encoder = self.gpu.encoder();
            let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
            there_and_back[0].record(self.gpu, &mut pass, ONE);
            drop(pass);
            readback.copy(&mut encoder, &b, 4);
            readback.map(self.gpu.submit(encoder));
            readback.read(self.gpu, 4, |_| ())?;
            Ok(start.elapsed().as_secs_f64())
        })?;
        let queued = |dispatches: usize| {
            let start = Instant::now();
            let mut last = None;
            for _ in 0..QUEUED {
                last = Some(self.gpu.submit_commands(self.record(chain(dispatches), ONE)));
            }
            self.gpu.wait(last)?;
            Ok(start.elapsed().as_secs_f64() / QUEUED as f64)
        };
        Ok(LaunchCosts {
            // A clock too coarse to see the difference must not make it zero or negative.
            dispatch: ((long - short) / (4 * CHAIN) as f64).max(1e-9),
            dispatch_queued: timing::shortest(self.time, || queued(CHAIN))? / CHAIN as f64,
            submission,
            submission_queued: timing::shortest(self.time, || queued(1))?,
        })
    }

    /// Seconds that the products of `matrices`, one after the other, take with each of `n_tokens` numbers of tokens, by
    /// the kernels for one token or for a few. Matrices that are together larger than the caches are read from memory,
    /// as in a decode step.
    pub fn products(&self, matrices: &[&Tensor], n_tokens: &[usize]) -> Result<Vec<f64>, WgpuError> {
        let gpu = self.gpu;
        let most = n_tokens.iter().copied().max().unwrap_or(1);
        let upload =
            |tensor: &&Tensor| WgpuMatrix::concat(gpu, "a matrix to multiply", &[tensor], &mut Arena::default());
        let matrices = matrices.iter().map(upload).collect::<Result<Vec<_>, _>>()?;
        let widest = |width: fn(&WgpuMatrix) -> usize| matrices.iter().map(width).max().unwrap_or(1);
        let x = gpu.upload("inputs", &vec![0.5f32; most * widest(WgpuMatrix::n_in)])?;
        let y = gpu.buffer("products", 4 * (most * widest(WgpuMatrix::n_out)) as u64)?;
        n_tokens
            .iter()
            .map(|&n| {
                let tokens: Vec<_> =
                    (0..n).map(|pos| metal_attention_model::BatchToken { id: 0, seq: 0, pos, output: true }).collect();
                let batch = gpu.upload("a batch", &batch_words(&tokens))?;
                let tokens_of_tile = if n == 1 { 1 } else { TOKEN_TILE };
                let mut dispatches = Vec::new();
                for matrix in &matrices {
                    let options = MatvecOptions::default();
                    let tile = split_tile(gpu.features(), matrix, n, false).filter(|_| n > 1);
                    dispatches.extend(match tile {
                        Some(tile) => split_matmul(gpu, matrix, options, tile, &x, &y, &batch)?,
                        None => multi_token_matvec(gpu, matrix, options, tokens_of_tile, &x, &y, &batch)?,
                    });
                }
                self.seconds(&dispatches, BatchDims { n_tokens: n as u32, n_outputs: n as u32, n_runs: 1, n_splits: 1 })
            })
            .collect()
    }

    /// Workgroups that fill the device: many for a GPU, a few for the cores behind a software GPU.
    fn groups(&self) -> usize {
        if self.gpu.summary().is_software() { 16 } else { 2048 }
    }

    /// A buffer of `bytes`, or of the largest binding, and its number of 16-byte vectors.
    fn words(&self, what: &str, bytes: u64) -> Result<(Buffer, usize), WgpuError> {
        let n = bytes.min(self.gpu.summary().max_binding) / 16;
        Ok((self.gpu.buffer(what, 16 * n)?, n as usize))
    }

    /// `work(steps, workgroups)` per second of the dispatch that `kernel` makes for that many steps and workgroups.
    /// `None` if `kernel` returns none.
    fn rate(
        &self,
        work: impl Fn(usize, usize) -> f64,
        kernel: impl Fn(usize, usize, &Buffer, &Buffer) -> Result<Option<Dispatch>, WgpuError>,
    ) -> Result<Option<f64>, WgpuError> {
        let groups = self.groups();
        let operands = self.gpu.upload("operands", &[1.0f32, 0.5, 0.25, 0.125])?;
        let sums = self.gpu.buffer("sums", 4 * rate_sums(groups) as u64)?;
        let mut fastest = None;
        for steps in [64, 512] {
            let Some(dispatch) = kernel(steps, groups, &operands, &sums)? else { return Ok(None) };
            let rate = work(steps, groups) / self.seconds(&[dispatch], ONE)?;
            fastest = Some(fastest.map_or(rate, |fastest: f64| fastest.max(rate)));
        }
        Ok(fastest)
    }

    /// Records dispatches one after the other.
    fn record<'d>(&self, dispatches: impl Iterator<Item = &'d Dispatch>, size: BatchDims) -> CommandBuffer {
        let mut encoder = self.gpu.encoder();
        let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
        for dispatch in dispatches {
            dispatch.record(self.gpu, &mut pass, size);
        }
        drop(pass);
        encoder.finish()
    }

    /// Seconds of one run of all `dispatches`, as its share of many runs in one submission; the best of a few.
    fn seconds(&self, dispatches: &[Dispatch], size: BatchDims) -> Result<f64, WgpuError> {
        let run = |times: usize| {
            let all = (0..times).flat_map(|_| dispatches);
            let commands = self.record(all, size);
            let start = Instant::now();
            let submission = self.gpu.submit_commands(commands);
            self.gpu.wait(Some(submission))?;
            Ok(start.elapsed().as_secs_f64().max(1e-9))
        };
        timing::seconds_per_run(self.time, MOST_DISPATCHES.div_ceil(dispatches.len().max(1)), run)
    }
}
