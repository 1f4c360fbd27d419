//! Profiles: the time of each kernel of a batch, from the GPU's timestamps.

use std::time::{Duration, Instant};

use metal_attention_model::{BatchKind, KernelTime, ProfiledStep, Profiler, Step};
use wgpu::{
    BufferDescriptor, BufferUsages, ComputePassDescriptor, ComputePassTimestampWrites, QuerySetDescriptor, QueryType,
};

use crate::executor::{BatchShape, ResultKind, WgpuExecutor};
use crate::kernels;
use crate::segments::repeatable;
use crate::{BatchDims, Dispatch, WgpuError};

/// Passes timed in one submission: two timestamps each, of the 4096 of a query set.
const PASSES_AT_ONCE: usize = 2048;

/// A note in every profile on how it differs from normal operation.
pub(super) const NOTE: &str = "timed by the GPU's clock, each step on its own, then each dispatch in a pass of its own; \
without a profile greedy steps are queued ahead, and the dispatches of a step share a pass";

/// Start and end of a pass, in ticks of the GPU's clock.
type Ticks = [u64; 2];

impl WgpuExecutor {
    /// Number of dispatches of a greedy step over `n_tokens` tokens whose last is at position `last`.
    pub fn launches(&self, n_tokens: usize, last: usize) -> usize {
        let size = BatchDims { n_tokens: n_tokens as u32, n_outputs: 1, n_runs: 1, n_splits: kernels::n_splits(last) };
        let plan = self.plan(BatchKind::of_n_tokens(n_tokens, self.few_limits));
        plan.greedy_step(size).filter(|dispatch| dispatch.has_work(size)).count()
    }

    /// Times the micro-batch that is about to be evaluated: once as a whole, then each dispatch in a pass of its own,
    /// which adds some overhead. Both runs leave the same KV cache and states as the evaluation that follows.
    pub(super) fn profile_step(
        &mut self,
        evaluated: &Step,
        output: ResultKind,
        profiler: &mut Profiler,
    ) -> Result<(), WgpuError> {
        self.write_pages(&evaluated.tokens, &evaluated.pages);
        self.write_batch(evaluated)?;
        let BatchShape { kind, size, output, consecutive_pages, n_deepstack, is_context } =
            self.step_shape(evaluated, output);
        let (plan, deepstack) = (self.plan(kind), self.spans.deepstack(n_deepstack));
        let dispatches: Vec<Dispatch> = if is_context {
            plan.context.clone()
        } else {
            // Without output tokens the grids of the output head are empty and are skipped as well.
            let layers = plan.layers(size, consecutive_pages, deepstack);
            let results = plan.merge_streams.iter().chain(plan.result_dispatches(output));
            let all = plan.embedding.iter().chain(layers).chain(results);
            all.filter(|dispatch| dispatch.has_work(size)).cloned().collect()
        };
        let (_, period) = self.gpu.clock()?;
        let since =
            |start: u64, end: u64| Duration::from_secs_f64(end.saturating_sub(start) as f64 * f64::from(period) * 1e-9);
        let whole = self.time_passes(evaluated, size, &[&dispatches[..]])?[0];
        let apart: Vec<&[Dispatch]> = dispatches.chunks(1).collect();
        let begin = Instant::now();
        let ticks = self.time_passes(evaluated, size, &apart)?;
        let first = ticks.first().map_or(0, |t| t[0]);
        let kernel = |(dispatch, &[start, end]): (&Dispatch, &Ticks)| KernelTime {
            kernel: dispatch.kernel().to_owned().into(),
            start: since(first, start),
            time: since(start, end),
            part: 0,
        };
        let step = ProfiledStep {
            phase: evaluated.phase,
            n_tokens: evaluated.tokens.len(),
            start: Duration::ZERO,
            time: since(whole[0], whole[1]),
            kernels: dispatches.iter().zip(&ticks).map(kernel).collect(),
        };
        profiler.add_step(begin, step);
        Ok(())
    }

    /// Runs each group of dispatches in a pass of its own and returns when it started and ended. `passes`: the groups.
    fn time_passes(&mut self, step: &Step, size: BatchDims, passes: &[&[Dispatch]]) -> Result<Vec<Ticks>, WgpuError> {
        self.write_batch(step)?;
        let gpu = &*self.gpu;
        let (device, _) = gpu.clock()?;
        // The batch runs several times, and then once for real: each run has to start from the same recurrent states.
        self.states.write(gpu, &repeatable(step.pages.segments(&step.tokens)));
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
