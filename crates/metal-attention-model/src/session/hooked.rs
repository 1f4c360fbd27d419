//! An executor around another one, for tests: it changes limits and rows, and stops or fails steps.

use std::io::Write;
use std::ops::Range;

use super::{Executor, LayerTrace, Step, StepLimits, StepResults};
use crate::{
    CacheBlock, CacheGroups, CacheLayout, DeviceInfo, ForwardError, MemoryUse, ModelSpec, PageCopy, Profiler,
    SnapshotError, TopK, argmax, highest,
};

/// What a test changes of the executor in a [`HookedExecutor`]. By default nothing.
pub trait Hooks: Send {
    /// The limits of steps, given those of the executor. Ids and top-k lists that the executor does not find are found in its
    /// logits.
    fn limits(&self, limits: StepLimits) -> StepLimits {
        limits
    }

    /// Called before each step that is run, and before each call that submits steps ahead, with the step that these follow. An
    /// error fails the call.
    fn before_step(&mut self, step: &Step) -> Result<(), ForwardError> {
        let _ = step;
        Ok(())
    }

    /// Changes the rows that a trace receives of the input of `layer`, `[n_rows, n_embd]`; the step itself is not affected.
    fn change_rows(&mut self, step: &Step, layer: usize, rows: &mut [f32]) {
        let _ = (step, layer, rows);
    }

    /// [`Executor::wake`]; `None`: the executor's.
    fn wake(&mut self) -> Option<bool> {
        None
    }
}

/// The executor `E` with the hooks of a test.
pub struct HookedExecutor<E, H> {
    inner: E,
    pub(super) hooks: H,
}

impl<E: Executor, H: Hooks> HookedExecutor<E, H> {
    /// `inner` with `hooks`.
    pub fn new(inner: E, hooks: H) -> Self {
        Self { inner, hooks }
    }

    /// Runs a step of the inner executor for all logits, `[n_outputs, n_vocab]`.
    fn logits(
        &mut self,
        step: &Step,
        trace: Option<LayerTrace<'_>>,
        profiler: Option<&mut Profiler>,
    ) -> Result<Vec<f32>, ForwardError> {
        let mut logits = vec![0.0; step.n_outputs() * self.inner.spec().n_vocab];
        self.inner.run(step, StepResults::Logits(&mut logits), trace, profiler)?;
        Ok(logits)
    }
}

impl<E: Executor, H: Hooks> Executor for HookedExecutor<E, H> {
    type InFlight = E::InFlight;

    fn spec(&self) -> &ModelSpec {
        self.inner.spec()
    }

    fn device(&self) -> DeviceInfo {
        self.inner.device()
    }

    fn cache_groups(&self) -> &CacheGroups {
        self.inner.cache_groups()
    }

    fn limits(&self) -> StepLimits {
        self.hooks.limits(self.inner.limits())
    }

    fn memory_use(&self, results: usize) -> MemoryUse {
        self.inner.memory_use(results)
    }

    fn begin_batch(&mut self) -> Result<(), ForwardError> {
        self.inner.begin_batch()
    }

    fn copy_page(&mut self, copy: PageCopy) -> Result<(), ForwardError> {
        self.inner.copy_page(copy)
    }

    fn run(
        &mut self,
        step: &Step,
        results: StepResults<'_>,
        trace: Option<LayerTrace<'_>>,
        profiler: Option<&mut Profiler>,
    ) -> Result<(), ForwardError> {
        self.hooks.before_step(step)?;
        let mut changed = Vec::new();
        let mut keep = |layer: usize, rows: &[f32]| changed.push((layer, rows.to_vec()));
        let mut rows_of_trace = None;
        let inner_trace = trace.map(|trace| {
            let LayerTrace { before, tokens, rows } = trace;
            rows_of_trace = Some(rows);
            LayerTrace { before, tokens, rows: &mut keep }
        });
        let (inner, n_vocab) = (self.inner.limits(), self.inner.spec().n_vocab);
        match results {
            StepResults::Ids(ids) if !inner.chooses_ids => {
                let logits = self.logits(step, inner_trace, profiler)?;
                ids.iter_mut().zip(logits.chunks(n_vocab)).for_each(|(id, row)| *id = argmax(row));
            }
            StepResults::TopK(lists) if inner.max_top_k != self.limits().max_top_k => {
                let (k, logits) = (self.limits().max_top_k, self.logits(step, inner_trace, profiler)?);
                lists.iter_mut().zip(logits.chunks(n_vocab)).for_each(|(list, row): (&mut TopK, _)| {
                    *list = highest(row, k);
                });
            }
            StepResults::Ids(_) | StepResults::TopK(_) | StepResults::Logits(_) | StepResults::Hidden(_) => {
                self.inner.run(step, results, inner_trace, profiler)?;
            }
        }
        for (layer, mut rows) in changed {
            self.hooks.change_rows(step, layer, &mut rows);
            if let Some(pass_on) = &mut rows_of_trace {
                pass_on(layer, &rows);
            }
        }
        Ok(())
    }

    fn n_at_once(&self, pos: usize) -> usize {
        self.inner.n_at_once(pos)
    }

    fn submit(&mut self, step: &Step, ahead: Range<usize>) -> Result<Vec<Self::InFlight>, ForwardError> {
        self.hooks.before_step(step)?;
        self.inner.submit(step, ahead)
    }

    fn read(&mut self, step: Self::InFlight, ids: &mut [u32]) -> Result<bool, ForwardError> {
        self.inner.read(step, ids)
    }

    fn discard(&mut self, steps: Vec<Self::InFlight>) {
        self.inner.discard(steps);
    }

    fn cache_layout(&self) -> CacheLayout {
        self.inner.cache_layout()
    }

    fn cache_bytes(&self) -> usize {
        self.inner.cache_bytes()
    }

    fn read_block(&mut self, block: CacheBlock, bytes: &mut [u8]) -> Result<(), ForwardError> {
        self.inner.read_block(block, bytes)
    }

    fn read_blocks(&mut self, blocks: &[CacheBlock], out: &mut dyn Write) -> Result<(), SnapshotError> {
        self.inner.read_blocks(blocks, out)
    }

    fn write_block(&mut self, block: CacheBlock, bytes: &[u8]) -> Result<(), ForwardError> {
        self.inner.write_block(block, bytes)
    }

    fn profiler(&self) -> Result<Profiler, ForwardError> {
        self.inner.profiler()
    }

    fn wake(&mut self) -> bool {
        self.hooks.wake().unwrap_or_else(|| self.inner.wake())
    }
}
