//! What a GPU can do at best: the ceilings that the forward pass is held against.

use std::time::{Duration, Instant};

use metal_attention_gguf::Tensor;
use metal_attention_model::timing;
use wgpu::{Buffer, CommandBuffer, ComputePassDescriptor};

use crate::arena::Arena;
use crate::batch::batch_words;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, StepSize};
use crate::error::WgpuError;
use crate::kernels::{
    MatvecOptions, TOKEN_TILE, buffer_copy, multi_token_matvec, rate_floats, rate_floats_work, rate_matrix,
    rate_matrix_work, rate_read, rate_sums, split_matmul, split_tile,
};
use crate::matrix::WgpuMatrix;
use crate::readback::Readback;

/// Dispatches of a measurement, about.
const MOST_DISPATCHES: usize = 4096;
/// Dispatches of a chain.
const CHAIN: usize = 128;
/// Submissions that are queued before the last of them is waited for.
const QUEUED: usize = 32;
/// One token, for dispatches whose grids do not depend on the step.
const ONE: StepSize = StepSize { n_tokens: 1, n_wanted: 1, n_runs: 1, n_splits: 1 };

/// Measures an open GPU, by the clock of the CPU. Rates are the best of a few runs, each over the `time` given.
pub struct WgpuCeilings<'a> {
    gpu: &'a WgpuDevice,
    time: Duration,
}

/// Seconds that the parts of a step take when they have nothing to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LaunchCosts {
    /// A dispatch that depends on the one before it, inside a submission that was recorded before.
    pub dispatch: f64,
    /// A dispatch of such a chain, where submissions are recorded and queued while others run: what takes longer,
    /// recording or running it.
    pub dispatch_queued: f64,
    /// A submission of one dispatch, from recording it until the CPU has read its result.
    pub submission: f64,
    /// The same where a row of submissions is queued and only the last one is waited for.
    pub submission_queued: f64,
}

impl<'a> WgpuCeilings<'a> {
    /// Measurements that take `time` or somewhat more each.
    pub fn new(gpu: &'a WgpuDevice, time: Duration) -> Self {
        Self { gpu, time }
    }

    /// Bytes per second that a kernel reads from a buffer of `bytes`, or of as many as the device binds.
    pub fn read_bandwidth(&self, bytes: u64) -> Result<f64, WgpuError> {
        let (words, n) = self.words("the buffer to read", bytes)?;
        let groups = self.groups().min(n / 4096).max(1);
        let sums = self.gpu.buffer("sums", 4 * rate_sums(groups) as u64)?;
        let seconds = self.seconds(&[rate_read(self.gpu, n, groups, &words, &sums)?], ONE)?;
        Ok(16.0 * n as f64 / seconds)
    }

    /// Bytes per second that a kernel moves between two buffers of `bytes`: those read plus those written.
    pub fn copy_bandwidth(&self, bytes: u64) -> Result<f64, WgpuError> {
        let (from, n) = self.words("the buffer to copy", bytes)?;
        let (to, _) = self.words("the buffer to copy to", bytes)?;
        let seconds = self.seconds(&[buffer_copy(self.gpu, 4 * n, &from, &to)?], ONE)?;
        Ok(2.0 * 16.0 * n as f64 / seconds)
    }

    /// Multiplications (with their additions) of 32-bit floats per second, in registers.
    pub fn f32_rate(&self) -> Result<f64, WgpuError> {
        let work = |steps, groups| rate_floats_work(steps, groups) as f64;
        let rate = self.rate(work, |steps, groups, x, sums| rate_floats(self.gpu, steps, groups, x, sums).map(Some))?;
        rate.ok_or_else(|| WgpuError::Lost { why: "the rate of multiplications was not measured".into() })
    }

    /// Multiplications (with their additions) per second of the matrix units that kernels use, in registers; `None` on
    /// a device without.
    pub fn matrix_rate(&self) -> Result<Option<f64>, WgpuError> {
        let work = |steps, groups| rate_matrix_work(self.gpu.features(), steps, groups).unwrap_or(0) as f64;
        self.rate(work, |steps, groups, x, sums| rate_matrix(self.gpu, steps, groups, x, sums))
    }

    /// What dispatches and submissions cost.
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
            // Where the clock is coarser than the difference, nothing is lost by calling it next to nothing.
            dispatch: ((long - short) / (4 * CHAIN) as f64).max(1e-9),
            dispatch_queued: timing::shortest(self.time, || queued(CHAIN))? / CHAIN as f64,
            submission,
            submission_queued: timing::shortest(self.time, || queued(1))?,
        })
    }

    /// Seconds that the products of `matrices`, one after the other, with `n_tokens` tokens take, for each of
    /// `n_tokens`: by the kernels for one token and for a few. Matrices together larger than the caches are read from
    /// memory, as in a step of decode.
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
                    (0..n).map(|pos| metal_attention_model::BatchToken { id: 0, seq: 0, pos, logits: true }).collect();
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
                self.seconds(&dispatches, StepSize { n_tokens: n as u32, n_wanted: n as u32, n_runs: 1, n_splits: 1 })
            })
            .collect()
    }

    /// Workgroups that fill a device: many for a GPU, a few for the cores behind a software one.
    fn groups(&self) -> usize {
        if self.gpu.summary().is_software() { 16 } else { 2048 }
    }

    /// A buffer of `bytes`, or of as many as the device binds, and its vectors of 16 bytes.
    fn words(&self, what: &str, bytes: u64) -> Result<(Buffer, usize), WgpuError> {
        let n = bytes.min(self.gpu.summary().max_binding) / 16;
        Ok((self.gpu.buffer(what, 16 * n)?, n as usize))
    }

    /// `work` per second of the dispatch that `kernel` makes for a number of steps and workgroups: enough steps to be
    /// worth launching.
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

    /// Records dispatches, one after the other.
    fn record<'d>(&self, dispatches: impl Iterator<Item = &'d Dispatch>, size: StepSize) -> CommandBuffer {
        let mut encoder = self.gpu.encoder();
        let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
        for dispatch in dispatches {
            dispatch.record(self.gpu, &mut pass, size);
        }
        drop(pass);
        encoder.finish()
    }

    /// Seconds of one run of `dispatches`: of many such runs in one submission, their share; the best of a few.
    fn seconds(&self, dispatches: &[Dispatch], size: StepSize) -> Result<f64, WgpuError> {
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
