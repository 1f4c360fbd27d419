//! Keeps an idle discrete GPU awake: submits products whose results nothing reads, because such a GPU lowers its clocks
//! when idle and takes long to raise them for the next prompt.

use std::time::{Duration, Instant};

use wgpu::{ComputePassDescriptor, DeviceType, SubmissionIndex};

use crate::plan::DispatchPlan;
use crate::{BatchDims, WgpuDevice};

/// The intended time of one submission; a real batch may have to wait this long.
const WAKE_TIME: Duration = Duration::from_millis(2);

/// Most products of one submission.
const MAX_PRODUCTS: usize = 1024;

/// The share of the weights that is uploaded before [`Waker::beside_upload`] starts to submit products.
const LAST_PART: f64 = 0.5;

/// The dimensions of a batch of one token.
const ONE: BatchDims = BatchDims { n_tokens: 1, n_outputs: 1, n_runs: 1, n_splits: 1 };

/// Multiplies whatever the scratch buffers hold by the output head. The logits are overwritten by the next step.
#[derive(Debug)]
pub(super) struct Waker {
    /// Products of the next submission.
    products: usize,
    /// Whether the GPU is a discrete one. Others share power or cores with the CPU, and are not kept busy.
    pub(super) is_of_use: bool,
}

impl Waker {
    pub(super) fn new(gpu: &WgpuDevice) -> Self {
        Self { products: 1, is_of_use: gpu.summary().kind == DeviceType::DiscreteGpu }
    }

    /// Submits products and waits for them, then adapts their number to [`WAKE_TIME`]. Returns false if this is of no
    /// use on the GPU, or failed.
    pub(super) fn wake(&mut self, gpu: &WgpuDevice, plan: &DispatchPlan) -> bool {
        let start = Instant::now();
        // The next batch reports the error.
        if self.submit(gpu, plan).is_none_or(|submission| gpu.wait(Some(submission)).is_err()) {
            return false;
        }
        let taken = start.elapsed();
        if taken < WAKE_TIME / 2 {
            self.products = (2 * self.products).min(MAX_PRODUCTS);
        } else if taken > 2 * WAKE_TIME {
            self.products = (self.products / 2).max(1);
        }
        true
    }

    /// Submits products without waiting for them while weights are uploaded, of which the fraction `done` is on the
    /// GPU. Does nothing before [`LAST_PART`] of them, or while the kernels are not compiled.
    pub(super) fn beside_upload(&self, gpu: &WgpuDevice, plan: &DispatchPlan, done: f64) {
        if done >= LAST_PART && plan.head.iter().all(|dispatch| dispatch.is_ready(gpu)) {
            self.submit(gpu, plan);
        }
    }

    /// Submits the products. `None`: the GPU is not discrete, the model has no output head, or the device reported an
    /// error.
    fn submit(&self, gpu: &WgpuDevice, plan: &DispatchPlan) -> Option<SubmissionIndex> {
        if !self.is_of_use || plan.head.is_empty() || gpu.check().is_err() {
            return None;
        }
        let mut encoder = gpu.encoder();
        let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
        for _ in 0..self.products {
            for dispatch in &plan.head {
                dispatch.record(gpu, &mut pass, ONE);
            }
        }
        drop(pass);
        Some(gpu.submit(encoder))
    }
}
