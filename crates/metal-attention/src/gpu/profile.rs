//! Where the time of a step goes on the GPU, by its own clock.

use std::time::Duration;

use metal_attention_kernels::wgpu::{
    self, BufferDescriptor, BufferUsages, ComputePassDescriptor, ComputePassTimestampWrites, QuerySet,
    QuerySetDescriptor, QueryType,
};
use metal_attention_kernels::{Dispatch, GpuError, StepSize};
use metal_attention_model::{BatchToken, ForwardError, check_batch};

use super::forward_pass::GpuForwardPass;
use super::plan::BatchKind;

/// Time of a step on the GPU.
#[derive(Debug, Clone)]
pub struct GpuProfile {
    /// The whole step, as it normally runs.
    pub step: Duration,
    /// Its dispatches in order, by their kernels' names. Each was timed in a pass of its own, which costs extra time of
    /// its own.
    pub dispatches: Vec<(String, Duration)>,
}

impl GpuForwardPass {
    /// Times a greedy step over `batch` on the GPU. The text stays as it is: nothing is appended.
    ///
    /// An error where the device cannot tell the time.
    pub fn profile(&mut self, batch: &[BatchToken]) -> Result<GpuProfile, ForwardError> {
        check_batch(batch, self.spec.n_vocab, self.n_ctx, &self.cache.n_past)?;
        if batch.len() > self.s.n_tokens || batch.iter().filter(|t| t.logits).count() > self.s.n_wanted {
            return Err(ForwardError::Device { why: "a profile is of one micro-batch: ask for fewer tokens".into() });
        }
        Ok(self.profile_checked(batch)?)
    }

    fn profile_checked(&mut self, batch: &[BatchToken]) -> Result<GpuProfile, GpuError> {
        self.lookahead.clear();
        let size = Self::size(batch, 0);
        let plan = self.plan(BatchKind::of(batch.len()));
        let dispatches: Vec<&Dispatch> = plan.greedy().filter(|d| d.runs(size)).collect();
        // The first run warms up.
        let mut step = Duration::ZERO;
        for _ in 0..2 {
            step = self.time_passes(batch, size, &[&dispatches])?[0];
        }
        let apart: Vec<&[&Dispatch]> = dispatches.chunks(1).collect();
        let times = self.time_passes(batch, size, &apart)?;
        let dispatches = dispatches.iter().map(|d| d.kernel().to_owned()).zip(times).collect();
        Ok(GpuProfile { step, dispatches })
    }

    /// Runs each group of dispatches in a pass of its own and tells how long it took.
    fn time_passes(
        &self,
        batch: &[BatchToken],
        size: StepSize,
        passes: &[&[&Dispatch]],
    ) -> Result<Vec<Duration>, GpuError> {
        let gpu = &*self.gpu;
        let count = 2 * passes.len() as u32;
        let (device, period) = gpu.clock()?;
        let queries: QuerySet =
            device.create_query_set(&QuerySetDescriptor { label: None, ty: QueryType::Timestamp, count });
        let resolved = device.create_buffer(&BufferDescriptor {
            label: Some("times"),
            size: 8 * u64::from(count),
            usage: BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        self.write_batch(batch);
        let mut encoder = gpu.encoder();
        for (i, group) in (0..).step_by(2).zip(passes) {
            let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor {
                label: None,
                timestamp_writes: Some(ComputePassTimestampWrites {
                    query_set: &queries,
                    beginning_of_pass_write_index: Some(i),
                    end_of_pass_write_index: Some(i + 1),
                }),
            });
            for dispatch in *group {
                dispatch.record(gpu, &mut pass, size);
            }
        }
        encoder.resolve_query_set(&queries, 0..count, &resolved, 0);
        let submission: wgpu::SubmissionIndex = gpu.submit(encoder);
        gpu.wait(Some(submission))?;
        let ticks: Vec<u64> = gpu.read(&resolved, count as usize)?;
        let time = |t: &[u64]| Duration::from_secs_f64(t[1].saturating_sub(t[0]) as f64 * f64::from(period) * 1e-9);
        Ok(ticks.chunks_exact(2).map(time).collect())
    }
}
