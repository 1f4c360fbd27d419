//! Helpers of the kernel tests: devices, random data, single dispatches, comparison.
#![allow(dead_code, missing_docs)]

pub mod matrices;

use std::sync::{Mutex, PoisonError};

use metal_attention_model::{BatchToken, PAGE};
use metal_attention_wgpu::{
    BatchBuffer, BatchDims, Bind, Dispatch, WgpuDevice, WgpuError, WgpuOptions, batch_words, wgpu,
};

/// The device's best variant; `None` on a machine without a GPU, and the test is recorded as skipped. In CI that is a
/// failure.
pub fn gpu() -> Option<&'static WgpuDevice> {
    variants().first()
}

/// Opens a device; `None` as [`gpu`].
pub fn open(options: &WgpuOptions) -> Option<WgpuDevice> {
    match WgpuDevice::open(options) {
        Ok(gpu) => Some(gpu),
        Err(WgpuError::NoAdapter) if std::env::var_os("CI").is_none() => {
            metal_attention_testing::skip("this machine has no GPU");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// The ways in which kernels can be compiled for the device, the best first: with and without subgroups, 16-bit floats
/// and matrix units. Empty on a machine without a GPU.
///
/// Each test thread has its own devices, because a software GPU runs the work of one device in sequence.
pub fn variants() -> &'static [WgpuDevice] {
    thread_local!(static MINE: ThreadDevices = ThreadDevices::new());
    MINE.with(|lent| lent.0)
}

/// Whether tests on `gpu` run a part of their cases.
pub fn takes_fewer_cases(gpu: &WgpuDevice) -> bool {
    metal_attention_testing::takes_fewer_cases(gpu.summary().is_software())
}

/// The pairs of a variant and a case that a test runs: each case on each variant. Where [`takes_fewer_cases`], each case runs on one
/// variant, and successive cases on different ones.
pub fn on_variants<T: Copy>(cases: &[T]) -> impl Iterator<Item = (&'static WgpuDevice, T)> {
    let n_variants = variants().len();
    variants().iter().enumerate().flat_map(move |(at, gpu)| {
        let taken = move |i: usize| !takes_fewer_cases(gpu) || i % n_variants == at;
        cases.iter().enumerate().filter(move |(i, _)| taken(*i)).map(move |(_, &case)| (gpu, case))
    })
}

/// A device whose kernels assume subgroups of four lanes or more, of unknown size.
pub fn with_any_subgroups() -> WgpuDevice {
    open(&WgpuOptions { checked: true, least_subgroup: Some(4), ..Default::default() })
        .expect("the device of `variants`")
}

/// The devices of a thread, which are returned to [`FREE`] when it ends.
struct ThreadDevices(&'static [WgpuDevice]);

/// Devices that no thread uses.
static FREE: Mutex<Vec<&'static [WgpuDevice]>> = Mutex::new(Vec::new());

impl ThreadDevices {
    fn new() -> Self {
        let free = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Self(free.unwrap_or_else(|| {
            let all = WgpuOptions { checked: true, ..Default::default() };
            let options = [
                all.clone(),
                WgpuOptions { cooperative_matrices: false, ..all.clone() },
                WgpuOptions { subgroups: false, f16: false, ..all },
            ];
            let mut devices: Vec<WgpuDevice> = options.iter().map_while(open).collect();
            // Without matrix units the first two are equal.
            devices.dedup_by_key(|gpu| gpu.features());
            devices.leak()
        }))
    }
}

impl Drop for ThreadDevices {
    fn drop(&mut self) {
        FREE.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
    }
}

/// Random numbers in `-1..1`, from a xorshift generator with the same numbers on every machine.
pub fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// A batch buffer of `n` tokens of sequence 0 from position `start`, all with logits.
pub fn batch(gpu: &WgpuDevice, n: usize, start: usize) -> wgpu::Buffer {
    let tokens: Vec<_> = (0..n).map(|i| BatchToken { id: i as u32, seq: 0, pos: start + i, output: true }).collect();
    gpu.upload("batch", &batch_words(&tokens)).unwrap()
}

/// KV pages for `n_ctx` positions of each of `n_seq` sequences, in random order.
pub fn shuffled_pages(n_seq: usize, n_ctx: usize) -> Vec<Vec<u32>> {
    let each = n_ctx.div_ceil(PAGE);
    let mut pages: Vec<u32> = (0..(n_seq * each) as u32).collect();
    let keys = random(9, pages.len());
    pages.sort_by(|&a, &b| keys[a as usize].total_cmp(&keys[b as usize]));
    pages.chunks(each).map(<[u32]>::to_vec).collect()
}

/// The cache group of the layers in tests.
pub const GROUP: usize = 1;

/// A batch of `tokens` of sequences with at most `n_ctx` positions, which have `pages` in cache group [`GROUP`] and
/// other pages in group 0.
pub fn batch_with_pages(gpu: &WgpuDevice, tokens: &[BatchToken], n_ctx: usize, pages: &[Vec<u32>]) -> BatchBuffer {
    let n_pages = pages.iter().flatten().map(|&page| page as usize + 1).max().unwrap_or(0);
    let mut batch = BatchBuffer::new(gpu, tokens.len(), pages.len(), n_ctx, &[n_pages; GROUP + 1]).unwrap();
    batch.write_tokens(gpu, tokens);
    for (seq, pages) in pages.iter().enumerate() {
        let others: Vec<_> = pages.iter().rev().copied().collect();
        batch.write_pages(gpu, 0, seq, &others);
        batch.write_pages(gpu, GROUP, seq, pages);
    }
    batch
}

/// Runs `dispatches` for a batch of `n` tokens, all with logits, and waits for them.
pub fn run(gpu: &WgpuDevice, dispatches: &[Dispatch], n: usize) {
    run_sized(gpu, dispatches, BatchDims { n_tokens: n as u32, n_outputs: n as u32, n_runs: n as u32, n_splits: 1 });
}

/// Runs `dispatches` for a batch of these dimensions, and waits for them.
pub fn run_sized(gpu: &WgpuDevice, dispatches: &[Dispatch], size: BatchDims) {
    let mut encoder = gpu.encoder();
    {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for dispatch in dispatches {
            dispatch.record(gpu, &mut pass, size);
        }
    }
    let submission = gpu.submit(encoder);
    gpu.wait(Some(submission)).unwrap();
}

/// A buffer of NaN, so that elements that a kernel does not write are noticed.
pub fn poisoned(gpu: &WgpuDevice, n: usize) -> wgpu::Buffer {
    gpu.upload("result", &vec![f32::NAN; n]).unwrap()
}

/// `|got - want|^2 / |want|^2`; NaN if any number is NaN.
pub fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let (mut error, mut power) = (0.0, 0.0);
    for (&g, &w) in got.iter().zip(want) {
        error += (f64::from(g) - f64::from(w)).powi(2);
        power += f64::from(w).powi(2);
    }
    if power == 0.0 { error } else { error / power }
}

/// Elements of a buffer that has others behind them, which kernels must leave as they are.
#[derive(Debug)]
pub struct Elements {
    buffer: wgpu::Buffer,
    n: usize,
}

/// What stands behind the elements.
const BEHIND: [f32; 9] = [77.0; 9];

impl Elements {
    pub fn new(gpu: &WgpuDevice, values: &[f32]) -> Self {
        Self { buffer: gpu.upload("elements", &[values, &BEHIND].concat()).unwrap(), n: values.len() }
    }

    /// `n` elements that are NaN.
    pub fn poisoned(gpu: &WgpuDevice, n: usize) -> Self {
        Self::new(gpu, &vec![f32::NAN; n])
    }

    /// The elements; those behind them are compared.
    pub fn read(&self, gpu: &WgpuDevice) -> Vec<f32> {
        let mut all = gpu.read::<f32>(&self.buffer, self.n + BEHIND.len()).unwrap();
        assert_eq!(all.split_off(self.n), BEHIND, "what stands behind the elements");
        all
    }
}

impl Bind for Elements {
    fn binding(&self) -> wgpu::BufferBinding<'_> {
        wgpu::BufferBinding { buffer: &self.buffer, offset: 0, size: wgpu::BufferSize::new(self.bytes()) }
    }

    fn bytes(&self) -> u64 {
        4 * self.n as u64
    }
}
