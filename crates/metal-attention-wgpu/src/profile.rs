//! Where the time of a step goes on the GPU, by its own clock.

use std::time::Duration;

use metal_attention_model::{BatchKind, BatchToken, KernelTime, Phase, ProfiledStep};
use wgpu::{
    BufferDescriptor, BufferUsages, ComputePassDescriptor, ComputePassTimestampWrites, QuerySetDescriptor, QueryType,
};

use crate::forward_pass::{Output, Step, WgpuForwardPass};
use crate::kernels;
use crate::segments::repeatable;
use crate::{Dispatch, StepSize, WgpuError};

/// Passes that are timed in one submission: two timestamps each, of the 4096 that a set of queries holds.
const PASSES_AT_ONCE: usize = 2048;

/// How steps run without timers.
pub(super) const NOTE: &str = "timed by the GPU's clock, each step on its own, then each dispatch in a pass of its own; \
without a profile greedy steps are queued ahead, and the dispatches of a step share a pass";

/// From when to when a pass ran, in ticks of the GPU's clock.
type Ticks = [u64; 2];

impl WgpuForwardPass {
    /// Dispatches of a greedy step over `n_tokens` tokens of which the last is at position `last`.
    pub fn launches(&self, n_tokens: usize, last: usize) -> usize {
        let size = StepSize { n_tokens: n_tokens as u32, n_wanted: 1, n_runs: 1, n_splits: kernels::n_splits(last) };
        let plan = self.plan(BatchKind::of_n_tokens(n_tokens, self.few_are));
        plan.greedy(size).filter(|dispatch| dispatch.runs(size)).count()
    }

    /// Times the step over `batch` that is about to run: as it is, then each of its dispatches in a pass of its own,
    /// which costs some extra time of its own. Both runs leave behind what the step itself will.
    pub(super) fn profile_step(&mut self, phase: Phase, batch: &[BatchToken], output: Output) -> Result<(), WgpuError> {
        self.write_pages(batch);
        let Step { kind, size, in_order, .. } = self.step_of(batch, 0, output);
        let plan = self.plan(kind);
        // Without wanted tokens the grids of the head are empty, too.
        let all = plan.embedding.iter().chain(plan.layers(size, in_order)).chain(plan.results(output));
        let dispatches: Vec<&Dispatch> = all.filter(|dispatch| dispatch.runs(size)).collect();
        let (_, period) = self.gpu.clock()?;
        let since =
            |start: u64, end: u64| Duration::from_secs_f64(end.saturating_sub(start) as f64 * f64::from(period) * 1e-9);
        let whole = self.time_passes(batch, size, &[&dispatches])?[0];
        let apart: Vec<&[&Dispatch]> = dispatches.chunks(1).collect();
        let ticks = self.time_passes(batch, size, &apart)?;
        let first = ticks.first().map_or(0, |t| t[0]);
        let kernel = |(dispatch, &[start, end]): (&&Dispatch, &Ticks)| KernelTime {
            kernel: dispatch.kernel().to_owned().into(),
            start: since(first, start),
            time: since(start, end),
            part: 0,
        };
        let step = ProfiledStep {
            phase,
            n_tokens: batch.len(),
            start: Duration::ZERO,
            time: since(whole[0], whole[1]),
            kernels: dispatches.iter().zip(&ticks).map(kernel).collect(),
        };
        if let Some(profiler) = &mut self.profiler {
            profiler.add_step(step);
        }
        Ok(())
    }

    /// Runs each group of dispatches in a pass of its own and tells from when to when it ran.
    fn time_passes(
        &self,
        batch: &[BatchToken],
        size: StepSize,
        passes: &[&[&Dispatch]],
    ) -> Result<Vec<Ticks>, WgpuError> {
        let gpu = &*self.gpu;
        let (device, _) = gpu.clock()?;
        self.write_batch(batch);
        // Run again and again, and then once more as the step itself.
        self.states.write(gpu, &repeatable(self.cache.pages.segments(batch)));
        let mut ticks = Vec::new();
        for passes in passes.chunks(PASSES_AT_ONCE) {
            let count = 2 * passes.len() as u32;
            let queries = device.create_query_set(&QuerySetDescriptor { label: None, ty: QueryType::Timestamp, count });
            let resolved = device.create_buffer(&BufferDescriptor {
                label: Some("times"),
                size: 8 * u64::from(count),
                usage: BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            });
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
            let submission = gpu.submit(encoder);
            gpu.wait(Some(submission))?;
            ticks.extend(gpu.read::<u64>(&resolved, count as usize)?.chunks_exact(2).map(|t| [t[0], t[1]]));
        }
        Ok(ticks)
    }
}
