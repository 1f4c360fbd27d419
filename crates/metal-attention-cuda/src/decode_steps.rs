//! How decode steps and other small micro-batches are launched: by the persistent kernel, as a CUDA graph, or kernel by kernel.
//!
//! A decode step is one token of each of `n` sequences, all of them output tokens. The calls:
//!
//! ```text
//! launch_decode_steps            launches one decode step, or several of one sequence:
//!   DecodeKernel::launch         the persistent kernel (decode.rs), where it is possible: all layers of one or more tokens of one
//!                                sequence in one launch; each token is the highest logit of the one before
//!   launch_micro_batch           otherwise, one step. Also called for micro-batches of a few tokens of some sequences:
//!     CudaGraph::launch          from the second decode step of its size on, or the fourth other micro-batch, unless it is timed
//!     ModelRunner::run           earlier ones of a size, the first of which loads the kernels, and those that are timed: kernel by kernel
//! ```
//!
//! Step numbers. Kernels that choose ids write them to host memory with the number of their decode step, under which the host reads
//! them ([`ChosenIds`](crate::ids::ChosenIds)). Steps are numbered in the order of their launches:
//! - The persistent kernel gets the number of its first step as an argument (`ChosenIds::number_steps`).
//! - The argmax kernel of all other steps counts them in device memory, since a CUDA graph cannot get new arguments. Before its launch
//!   `ChosenIds::begin_counted` takes the next number, and corrects the device's counters if the persistent kernel has run in between.
//!   After it `mark_submitted` records that the counters will be at that number. `with_step_number` does both. If the launch fails
//!   the second call is missing, so that the counters are corrected before the next step.

use std::sync::Arc;

use crate::CudaError;
use crate::device::CudaBuffer;
use crate::executor::CudaExecutor;
use crate::inputs::QueryTiles;
use crate::launch::CudaGraph;
use crate::recurrent_state::RunSizes;
use crate::runner::{MicroBatch, MicroBatchSize, TokenOutput};

/// The CUDA graph of the micro-batches of one size.
pub(crate) enum StepGraph {
    /// Not recorded yet: as many have run kernel by kernel. The first one has loaded the kernels.
    Counted(u32),
    /// The launches.
    Recorded(CudaGraph),
}

/// What the launches of a micro-batch depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StepGraphKey {
    /// The sizes.
    pub(crate) size: MicroBatchSize,
    /// Whether the output norm of all tokens is computed for a trace.
    pub(crate) traces_norm: bool,
}

impl StepGraphKey {
    /// The number of micro-batches that run before one is recorded. To record a graph takes as long as some ten launches of its kernels one
    /// by one save; decode steps of one size are many, micro-batches with drafts have many sizes.
    fn recorded_after(self) -> u32 {
        if self.size.query_tiles.count == 0 { 1 } else { 3 }
    }
}

/// Most graphs of an executor; further sizes are launched kernel by kernel.
const MAX_GRAPHS: usize = 256;

impl CudaExecutor {
    /// Whether a decode step of one sequence at position `pos` is one launch of the persistent kernel.
    pub fn uses_persistent_kernel(&self, pos: usize) -> bool {
        self.steps_per_launch(pos) > 0
    }

    /// The number of decode steps of a single sequence, the first at position `pos`, that one launch of the persistent kernel may evaluate,
    /// each with the id that the one before has chosen. 0: the persistent kernel is not used there.
    pub(crate) fn steps_per_launch(&self, pos: usize) -> usize {
        self.persistent_kernel.as_ref().map_or(0, |kernel| kernel.steps_per_launch(pos))
    }

    /// Limits [`steps_per_launch`](Self::steps_per_launch) to `n`, on all ranks alike; 0 disables the persistent kernel.
    pub(crate) fn limit_steps_per_launch(&mut self, n: usize) {
        match &mut self.persistent_kernel {
            Some(kernel) if n > 0 => kernel.limit_steps(n),
            Some(_) | None => self.persistent_kernel = None,
        }
    }

    /// Launches decode steps: one token of each of `n` sequences, all with output. `pos` is the position of the first sequence's
    /// token. With `TokenOutput::Id { feeds_next_step: true }` the device also writes the chosen ids, at the next positions, to the buffer of
    /// tokens.
    ///
    /// Before the call the device has to hold the tokens ([`upload_tokens`](Self::upload_tokens), or what an earlier step with
    /// `feeds_next_step` has written), the page tables up to the last step's position (`CudaKvCache::write_pages`)
    /// and the state slots (`CudaRecurrentStates::write`).
    ///
    /// Returns the number of steps launched, from 1 to `max_steps`. It is more than one only for a single sequence in the persistent
    /// kernel, where each step takes the id that the one before has chosen. Does not wait for the device.
    ///
    /// Precondition: `max_steps` is at least 1, and more than 1 only with `TokenOutput::Id`; the others have room for the output of one
    /// step.
    pub(crate) fn launch_decode_steps(
        &mut self,
        n: usize,
        pos: usize,
        max_steps: usize,
        output: TokenOutput,
    ) -> Result<usize, CudaError> {
        debug_assert!(max_steps == 1 || max_steps > 1 && matches!(output, TokenOutput::Id { .. }));
        let gpu = Arc::clone(&self.runner.gpu);
        gpu.bind()?;
        let allows_persistent = n == 1 && output != TokenOutput::Hidden;
        let n_steps = if allows_persistent { self.steps_per_launch(pos).min(max_steps) } else { 0 };
        if let Some(kernel) = self.persistent_kernel.as_mut().filter(|_| n_steps > 0) {
            let number = match output {
                TokenOutput::Id { feeds_next_step: _ } => self.runner.ids.number_steps(n_steps),
                // The kernel writes an id all the same, with a number that no step has. The word is free: `evaluate`, the only caller with such
                // an output, has discarded all steps in flight.
                TokenOutput::Hidden | TokenOutput::Logits | TokenOutput::TopK => 0,
            };
            let exchange = self.runner.exchange.as_ref();
            let mut launch = || kernel.launch(&gpu, exchange, output, n_steps, number);
            match &mut self.runner.timers {
                None => launch()?,
                Some(timers) => timers.around("decode", launch)?,
            }
            self.runner.n_launches += 1;
            // Launches what follows the kernel: gathers the logits of all ranks, and finds the highest ones.
            self.runner.finish_persistent(self.spec.n_vocab, output)?;
            return Ok(n_steps);
        }
        let (query_tiles, runs) = (QueryTiles::default(), RunSizes::of_decode(n));
        let size = MicroBatchSize { n_tokens: n, n_outputs: n, query_tiles, runs, output };
        self.with_step_number(size, |pass| pass.launch_micro_batch(StepGraphKey { size, traces_norm: false }))?;
        Ok(1)
    }

    /// Calls `submit`, which launches a micro-batch, other than in the persistent kernel. Where the micro-batch chooses ids, assigns the
    /// step number under which they are read later (see the top of this file). Errors: those of `submit`, or the counters on the device
    /// could not be written; the number is skipped then.
    pub(crate) fn with_step_number(
        &mut self,
        size: MicroBatchSize,
        submit: impl FnOnce(&mut Self) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let n = match size.output {
            TokenOutput::Id { feeds_next_step: _ } => size.n_outputs,
            TokenOutput::Hidden | TokenOutput::Logits | TokenOutput::TopK => 0,
        };
        if n > 0 {
            self.runner.ids.begin_counted(n)?;
        }
        submit(self)?;
        if n > 0 {
            self.runner.ids.mark_submitted(n);
        }
        Ok(())
    }

    /// Launches a micro-batch of token ids, without spans and states, kernel by kernel or as a CUDA graph. Those that are timed never use a graph.
    /// After an error the size has no entry in `graphs`: its next micro-batch is a warm-up again.
    pub(crate) fn launch_micro_batch(&mut self, key: StepGraphKey) -> Result<(), CudaError> {
        let StepGraphKey { size, traces_norm } = key;
        let gpu = Arc::clone(&self.runner.gpu);
        let no_trace = |_: usize, _: &CudaBuffer| Ok(());
        let (spec, cache, recurrent) = (&self.spec, &self.cache, &self.recurrent_states);
        let batch = MicroBatch { spec, cache, recurrent, size, spans: None, states: &[], context: None };
        if self.runner.timers.is_some() {
            return self.runner.run(batch, traces_norm, no_trace);
        }
        let graph = match self.graphs.remove(&key) {
            Some(StepGraph::Recorded(graph)) => graph,
            Some(StepGraph::Counted(n)) if n >= key.recorded_after() => {
                gpu.record(|| self.runner.run(batch, traces_norm, no_trace))?
            }
            // Kernels are loaded at their first launch, which is not possible while a graph is recorded.
            counted @ (None | Some(StepGraph::Counted(_))) => {
                self.runner.run(batch, traces_norm, no_trace)?;
                let n = if let Some(StepGraph::Counted(n)) = counted { n } else { 0 };
                if self.graphs.len() < MAX_GRAPHS {
                    self.graphs.insert(key, StepGraph::Counted(n + 1));
                }
                return Ok(());
            }
        };
        graph.launch()?;
        self.graphs.insert(key, StepGraph::Recorded(graph));
        Ok(())
    }
}
