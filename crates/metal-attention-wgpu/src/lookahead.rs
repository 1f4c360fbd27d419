//! Greedy decode steps that are submitted ahead of the CPU. Argmax on the GPU writes the chosen ids into the batch
//! buffer, so that the next step can start before the CPU has read them. The CPU reads the ids of each step from a
//! readback buffer of its own.

use metal_attention_model::Step;

use crate::executor::{FLAG_BYTES, ResultKind, WgpuExecutor};
use crate::{Readback, WgpuError};

/// A greedy decode step that was submitted.
pub struct InFlightStep {
    /// Receives its ids, and then the flag of the persistent kernel.
    readback: Readback,
    /// Whether the persistent kernel evaluates it, so that the flag tells whether it timed out.
    is_persistent: bool,
}

impl WgpuExecutor {
    /// Submits the greedy decode step that is `ahead` tokens after `step`, without waiting for it.
    pub(super) fn submit_decode(&mut self, step: &Step, ahead: usize) -> Result<InFlightStep, WgpuError> {
        let tokens = &step.tokens[..];
        if ahead == 0 {
            self.write_batch(step)?;
        }
        let bytes = 4 * tokens.len() as u64;
        let mut readback = match self.free.pop().filter(|r| r.bytes() >= bytes + FLAG_BYTES) {
            Some(readback) => readback,
            None => Readback::new(&self.gpu, bytes + FLAG_BYTES)?,
        };
        self.write_pages(tokens, &step.pages);
        self.states.write(&self.gpu, &step.pages.segments_ahead(tokens, ahead));
        let mut encoder = self.record(self.batch_shape(tokens, &step.pages, ahead, ResultKind::Id), None);
        readback.copy(&mut encoder, &self.ids, bytes);
        if let Some(timed_out) = &self.persistent_timed_out {
            readback.copy_after(&mut encoder, timed_out, 0..4, bytes);
        }
        readback.map(self.gpu.submit(encoder));
        let is_persistent = self.persistent_timed_out.is_some() && tokens.len() == 1;
        Ok(InFlightStep { readback, is_persistent })
    }

    /// Waits for a step and writes its ids. False if the persistent kernel timed out, which is not used from then on.
    pub(super) fn read_decode(&mut self, mut step: InFlightStep, ids: &mut [u32]) -> Result<bool, WgpuError> {
        self.gpu.check()?;
        let bytes = size_of_val(ids) as u64 + FLAG_BYTES;
        let mut words = step.readback.read(&self.gpu, bytes, bytemuck::pod_collect_to_vec::<u8, u32>)?;
        let timed_out = words.pop() != Some(0) && step.is_persistent;
        self.free.push(step.readback);
        if timed_out {
            self.disable_persistent_layers();
            return Ok(false);
        }
        ids.copy_from_slice(&words);
        self.gpu.watch().advance((ids.len() * self.spec.n_layer()) as u64);
        Ok(true)
    }

    /// Drops a step whose ids are not read.
    pub(super) fn forget_decode(&mut self, mut step: InFlightStep) {
        step.readback.forget();
        self.free.push(step.readback);
    }

    /// Replaces the persistent kernel by a dispatch for each kernel, after it timed out.
    pub(super) fn disable_persistent_layers(&mut self) {
        tracing::warn!(
            "the GPU did not run all workgroups side by side: decode goes on with a dispatch for each kernel"
        );
        self.prepared = None;
        self.plan_one.persistent_layers = None;
        self.persistent_timed_out = None;
    }
}
