//! Work that nobody needs, for a card that would be idle otherwise.

use std::time::{Duration, Instant};

use wgpu::{ComputePassDescriptor, DeviceType, SubmissionIndex};

use crate::plan::DispatchPlan;
use crate::{BatchDims, WgpuDevice};

/// How long a bunch of work should take: so long may what comes have to wait for it.
const WAKE_TIME: Duration = Duration::from_millis(2);

/// Most products of a bunch.
const MAX_PRODUCTS: usize = 1024;

/// Part of the weights from which on the card is kept awake while they are uploaded.
const LAST_PART: f64 = 0.5;

/// A step of one token.
const ONE: BatchDims = BatchDims { n_tokens: 1, n_wanted: 1, n_runs: 1, n_splits: 1 };

/// Multiplies the output head with what happens to lie there, into logits that the next step makes anew.
#[derive(Debug)]
pub(super) struct Waker {
    /// Products of a bunch.
    products: usize,
    /// Whether the GPU is a card, which sleeps when it is idle; others have better things to do.
    pub(super) is_of_use: bool,
}

impl Waker {
    pub(super) fn new(gpu: &WgpuDevice) -> Self {
        Self { products: 1, is_of_use: gpu.summary().kind == DeviceType::DiscreteGpu }
    }

    /// A bunch of products, which is waited for; then as many as take [`WAKE_TIME`] the next time. False where there is no use in
    /// more of them.
    pub(super) fn wake(&mut self, gpu: &WgpuDevice, plan: &DispatchPlan) -> bool {
        let start = Instant::now();
        // An error is the next step's to find.
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

    /// A product beside the upload of weights, of which `done` are there, which nobody waits for: little enough to hold no
    /// upload up, and where the kernels are there already.
    pub(super) fn beside_upload(&self, gpu: &WgpuDevice, plan: &DispatchPlan, done: f64) {
        if done >= LAST_PART && plan.head.iter().all(|dispatch| dispatch.is_ready(gpu)) {
            self.submit(gpu, plan);
        }
    }

    /// Submits a bunch; `None` where that is of no use.
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
