//! [`Session`], the forward pass over any [`Executor`]: checks of batches, the page table, micro-batches, decode steps
//! that run ahead, retraction after errors, results, snapshots and profiles.

mod assistant;
mod executor;
mod hooked;
mod null;
mod options;
mod trace;

use std::io::Write;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

pub use assistant::{AssistantDrafts, AssistantToken};
use executor::n_outputs;
pub use executor::{Executor, LastSeen, Step, StepLimits, StepResults};
pub use hooked::{HookedExecutor, Hooks};
pub use null::NullExecutor;
pub use options::SessionOptions;
pub use trace::{LayerTrace, TracedTokens};

use crate::inputs::{check_blocks, check_spans, check_states, step_inputs};
use crate::{
    AfterLayer, Batch, BatchToken, CacheBlock, CacheLayout, DeviceInfo, ForwardError, ForwardPass, HiddenRequest,
    HiddenRows, Logits, Lookahead, MemoryUse, ModelSpec, OutputKind, Outputs, PageTable, PageUse, Phase, Profile,
    Profiler, SequenceCache, SequenceExtent, SnapshotError, StepInputs, TopK, argmax, check_outputs, highest,
    is_decode_step, micro_batches, one_run_per_sequence,
};

/// Evaluates batches with one model on one [`Executor`], and keeps the page table of its KV cache.
///
/// It derefs to the executor, for settings and numbers that only one backend has, and for the tests of the backends.
/// Methods of [`Executor`] that evaluate steps or write pages and states are called by the session alone: a caller that
/// calls [`run`](Executor::run), [`submit`](Executor::submit), [`read`](Executor::read), [`discard`](Executor::discard),
/// [`copy_page`](Executor::copy_page) or [`write_block`](Executor::write_block) itself leaves pages and steps in flight that
/// the session does not know of, and later results are wrong.
pub struct Session<E: Executor> {
    executor: E,
    /// The executor of an assistant, which reads the KV cache of `executor` and writes none.
    assistant: Option<E>,
    limits: StepLimits,
    /// The KV pages and state slots of each sequence. Steps share it while they run.
    pages: Arc<PageTable>,
    /// Greedy decode steps in flight, and the batch that is expected next.
    lookahead: Lookahead<E::InFlight>,
    /// Logits or hidden states of the last batch; grows only.
    rows: Vec<f32>,
    /// Collects kernel times between `start_profile` and `take_profile`.
    profiler: Option<Profiler>,
}

impl<E: Executor> Session<E> {
    /// A session with empty sequences.
    pub fn new(executor: E) -> Self {
        let (limits, pages) = (executor.limits(), PageTable::new(executor.cache_groups()));
        let (lookahead, pages) = (Lookahead::default(), Arc::new(pages));
        Self { executor, assistant: None, limits, pages, lookahead, rows: Vec::new(), profiler: None }
    }

    /// Bytes in use, those of an assistant included.
    pub fn memory_use(&self) -> MemoryUse {
        let own = self.executor.memory_use(size_of::<f32>() * self.rows.capacity());
        let MemoryUse { weights, kv_cache: _, scratch } =
            self.assistant.as_ref().map_or_else(MemoryUse::default, |assistant| assistant.memory_use(0));
        MemoryUse { weights: own.weights + weights, scratch: own.scratch + scratch, ..own }
    }

    /// The KV pages and state slots of each sequence.
    pub fn page_table(&self) -> &PageTable {
        &self.pages
    }

    /// The page table, to change it. It is copied first where an executor still holds a step with it (copy-on-write).
    fn pages(&mut self) -> &mut PageTable {
        Arc::make_mut(&mut self.pages)
    }

    /// Evaluates `batch` and writes `results`, which have a row for each of its output tokens.
    ///
    /// # Errors
    /// A batch that the model or the page table refuses changes nothing, except that steps in flight are discarded. After
    /// an error of a step all tokens of the batch are taken back ([`PageTable::retract`]).
    fn evaluate(
        &mut self,
        batch: Batch<'_>,
        mut results: StepResults<'_>,
        mut trace: Option<LayerTrace<'_>>,
    ) -> Result<(), ForwardError> {
        let begun = self.executor.begin_batch();
        self.discard_lookahead();
        begun?;
        let (spec, limits) = (self.executor.spec(), self.limits);
        let tokens = batch.tokens;
        let max_outputs = if results.needs_head() { limits.n_outputs } else { usize::MAX };
        check_outputs(spec, tokens, &|seq| self.pages.n_past(seq), results.needs_head(), max_outputs)?;
        self.pages.check(tokens, spec.n_ids(), batch.drafted)?;
        check_spans(spec, batch, limits.n_tokens, max_outputs)?;
        check_states(spec, batch)?;
        let blocks = check_blocks(spec, batch, limits.n_tokens, max_outputs)?;
        let (n_embd, state_width) = (spec.n_embd, spec.state_width());
        let places = self.pages.span_places(batch, n_embd)?;
        let bidirectional = batch.spans.iter().filter(|span| span.is_bidirectional());
        let undivided: Vec<_> = bidirectional.map(|span| span.inputs(n_embd)).chain(blocks).collect();
        let steps = micro_batches(spec, tokens, limits.n_tokens, max_outputs, &undivided);
        let steps: Vec<_> = if limits.one_run_per_sequence {
            steps.into_iter().flat_map(one_run_per_sequence).collect()
        } else {
            steps
        };
        self.pages().begin_batch(tokens, batch.drafted);
        self.pages().add_spans(batch, &places);
        let phase = Phase::of(tokens);
        let mut first = 0;
        for step_tokens in steps {
            let range = first..first + step_tokens.len();
            first = range.end;
            let step_results = results.take(n_outputs(step_tokens), self.executor.spec());
            let trace = trace.as_mut().map(LayerTrace::reborrow);
            let outcome = self.assign_pages(step_tokens).and_then(|()| {
                let inputs = step_inputs(n_embd, batch, &range, &places).map(Arc::new);
                let rows = |all: &[f32], width: usize| {
                    let rows = all.get(range.start * width..range.end * width).filter(|rows| !rows.is_empty());
                    rows.map(Into::into)
                };
                let (states, context) = (rows(batch.states, state_width), rows(batch.context, n_embd));
                let step = Step { states, context, ..self.step(step_tokens, phase, inputs) };
                self.executor.run(&step, step_results, trace, self.profiler.as_mut())
            });
            if let Err(why) = outcome {
                self.pages().retract(tokens);
                return Err(why);
            }
        }
        Ok(())
    }

    /// Assigns pages to `tokens`, which have passed the checks. A sequence that appends to a page which it shares gets a
    /// copy of it.
    fn assign_pages(&mut self, tokens: &[BatchToken]) -> Result<(), ForwardError> {
        let copies = self.pages().append(tokens);
        for (i, &copy) in copies.iter().enumerate() {
            if let Err(why) = self.executor.copy_page(copy) {
                self.pages().cancel_copies(&copies[i..]);
                return Err(why);
            }
        }
        Ok(())
    }

    /// The step of `tokens`, which have their pages, without states and context rows.
    fn step(&self, tokens: &[BatchToken], phase: Phase, inputs: Option<Arc<StepInputs>>) -> Step {
        Step {
            tokens: tokens.into(),
            pages: Arc::clone(&self.pages),
            phase,
            inputs,
            states: None,
            is_of_assistant: false,
            context: None,
        }
    }

    /// Evaluates a greedy decode step, and leaves further ones in flight. Returns the id that follows each sequence. On an
    /// error the sequences have their earlier lengths, and no step is in flight unless the batch was refused.
    fn decode_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        let begun = self.executor.begin_batch();
        if begun.is_err() || !self.lookahead.continues(batch) {
            self.discard_lookahead();
        }
        begun?;
        // If the step is in flight already, it gets the pages that were reserved for it.
        let (n_ids, n_embd) = (self.executor.spec().n_ids(), self.executor.spec().n_embd);
        self.pages.check(batch, n_ids, &[])?;
        self.pages.span_places(batch.into(), n_embd)?;
        self.pages().begin_batch(batch, &[]);
        let outcome = self.assign_pages(batch).and_then(|()| self.read_decode_step(batch));
        if outcome.is_err() {
            self.discard_lookahead();
            self.pages().retract(batch);
        }
        outcome
    }

    /// Submits the decode step of `batch`, which has its pages, unless it is in flight, and the steps after it; then waits
    /// for its ids.
    fn read_decode_step(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        let n_at_once = if batch.len() == 1 { self.executor.n_at_once(batch[0].pos) } else { 1 };
        let mut ids = vec![0; batch.len()];
        loop {
            while let Some(ahead) = self.lookahead.steps_to_submit(batch, Arc::make_mut(&mut self.pages), n_at_once) {
                let step = self.step(batch, Phase::Decode, None);
                for in_flight in self.executor.submit(&step, ahead)? {
                    self.lookahead.push(in_flight);
                }
            }
            let Some(first) = self.lookahead.pop() else {
                return Err(ForwardError::Device { why: "no decode step was submitted".into() });
            };
            if self.executor.read(first, &mut ids)? {
                self.lookahead.advance(batch, &ids);
                return Ok(ids);
            }
            self.discard_lookahead();
        }
    }

    /// Discards all steps in flight, and releases the pages that are reserved for them.
    fn discard_lookahead(&mut self) {
        let steps = self.lookahead.forget(Arc::make_mut(&mut self.pages)).collect::<Vec<_>>();
        if !steps.is_empty() {
            self.executor.discard(steps);
        }
    }

    /// Discards the steps in flight if they extend sequence `seq`, which is about to change.
    fn discard_lookahead_of(&mut self, seq: usize) {
        if self.lookahead.continues_sequence(seq) {
            self.discard_lookahead();
        }
    }

    /// Evaluates `batch` for rows of `width` floats, to the beginning of `self.rows`. Returns their number of floats.
    fn evaluate_rows(
        &mut self,
        batch: Batch<'_>,
        width: usize,
        results: impl for<'r> FnOnce(&'r mut [f32]) -> StepResults<'r>,
        trace: Option<LayerTrace<'_>>,
    ) -> Result<usize, ForwardError> {
        let n = n_outputs(batch.tokens) * width;
        let mut rows = std::mem::take(&mut self.rows);
        if rows.len() < n {
            let bytes = n.saturating_mul(size_of::<f32>());
            if rows.try_reserve_exact(n - rows.len()).is_err() {
                self.rows = rows;
                return Err(ForwardError::OutOfMemory { what: "the logits", bytes });
            }
            rows.resize(n, 0.0);
        }
        let outcome = self.evaluate(batch, results(&mut rows[..n]), trace);
        self.rows = rows;
        outcome.map(|()| n)
    }
}

/// The kinds of results of a batch.
impl<E: Executor> Session<E> {
    fn outputs(
        &mut self,
        batch: Batch<'_>,
        kind: OutputKind,
        trace: Option<LayerTrace<'_>>,
    ) -> Result<Outputs<'_>, ForwardError> {
        Ok(match kind {
            OutputKind::Logits => Outputs::Logits(self.logits(batch, trace)?),
            OutputKind::Hidden => Outputs::Hidden(self.hidden(batch, trace)?),
            OutputKind::Ids => Outputs::Ids(self.ids(batch, trace)?),
            OutputKind::TopK(k) => Outputs::TopK(self.top_k(batch, k, trace)?),
        })
    }

    fn logits(&mut self, batch: Batch<'_>, trace: Option<LayerTrace<'_>>) -> Result<Logits<'_>, ForwardError> {
        let n_vocab = self.executor.spec().n_vocab;
        let n = self.evaluate_rows(batch, n_vocab, |rows| StepResults::Logits(rows), trace)?;
        Ok(Logits::new(&self.rows[..n], n_vocab))
    }

    fn hidden(&mut self, batch: Batch<'_>, trace: Option<LayerTrace<'_>>) -> Result<&[f32], ForwardError> {
        let n_embd = self.executor.spec().n_embd;
        let n = self.evaluate_rows(batch, n_embd, |rows| StepResults::Hidden(rows), trace)?;
        Ok(&self.rows[..n])
    }

    /// Ids of a step that does not run ahead.
    fn ids(&mut self, batch: Batch<'_>, trace: Option<LayerTrace<'_>>) -> Result<Vec<u32>, ForwardError> {
        if !self.limits.chooses_ids {
            let logits = self.logits(batch, trace)?;
            return Ok((0..logits.n_rows()).map(|i| argmax(logits.row(i))).collect());
        }
        let mut ids = vec![0; n_outputs(batch.tokens)];
        self.evaluate(batch, StepResults::Ids(&mut ids), trace)?;
        // If the next batch is the decode step that continues these ids, its call submits further steps, too.
        let output_tokens: Vec<_> = batch.tokens.iter().filter(|token| token.output).copied().collect();
        self.lookahead.advance(&output_tokens, &ids);
        Ok(ids)
    }

    fn top_k(&mut self, batch: Batch<'_>, k: usize, trace: Option<LayerTrace<'_>>) -> Result<Vec<TopK>, ForwardError> {
        if k > self.limits.max_top_k || self.limits.max_top_k == 0 {
            let logits = self.logits(batch, trace)?;
            return Ok((0..logits.n_rows()).map(|i| highest(logits.row(i), k)).collect());
        }
        let mut lists = vec![TopK::new(); n_outputs(batch.tokens)];
        self.evaluate(batch, StepResults::TopK(&mut lists), trace)?;
        for list in &mut lists {
            list.truncate(k);
        }
        Ok(lists)
    }
}

impl<E: Executor> Deref for Session<E> {
    type Target = E;

    fn deref(&self) -> &E {
        &self.executor
    }
}

impl<E: Executor> DerefMut for Session<E> {
    fn deref_mut(&mut self) -> &mut E {
        &mut self.executor
    }
}

impl<E: Executor> ForwardPass for Session<E> {
    fn spec(&self) -> &ModelSpec {
        self.executor.spec()
    }

    fn device(&self) -> DeviceInfo {
        self.executor.device()
    }

    fn n_ctx(&self) -> usize {
        self.executor.cache_groups().capacity().n_ctx
    }

    fn n_seq(&self) -> usize {
        self.pages.n_seq()
    }

    fn n_ubatch(&self) -> usize {
        self.limits.n_tokens
    }

    fn n_past(&self, seq: usize) -> usize {
        self.pages.n_past(seq)
    }

    fn rewind(&mut self, seq: usize, n: usize) -> usize {
        if n < self.n_past(seq) {
            self.discard_lookahead_of(seq);
        }
        self.pages().rewind(seq, n)
    }

    fn reachable(&self, seq: usize, n: usize) -> usize {
        self.pages.reachable(seq, n)
    }

    fn share_prefix(&mut self, from: usize, to: usize, n: usize) -> Result<usize, ForwardError> {
        // Steps in flight may still write to pages that would be shared.
        self.discard_lookahead_of(from);
        self.discard_lookahead_of(to);
        self.pages().share(from, to, n)
    }

    fn cache_pages(&self) -> PageUse {
        self.pages.usage()
    }

    fn pages_held(&self, sequences: &[usize]) -> usize {
        self.pages.pages_held(sequences)
    }

    fn kv_cache_bytes(&self) -> usize {
        self.executor.cache_bytes()
    }

    fn memory_use(&self) -> MemoryUse {
        Session::memory_use(self)
    }

    fn cache(&mut self) -> &mut dyn SequenceCache {
        self
    }

    fn forward_with_hidden(
        &mut self,
        batch: Batch<'_>,
        kind: OutputKind,
        hidden: HiddenRequest<'_>,
    ) -> Result<(Outputs<'_>, HiddenRows), ForwardError> {
        let HiddenRequest { before: hidden_before, tokens: of_tokens } = hidden;
        let (n_layer, n_embd) = (self.executor.spec().n_layer(), self.executor.spec().n_embd);
        if let Some(&layer) = hidden_before.iter().find(|&&layer| layer > n_layer + 1) {
            return Err(ForwardError::LayerOutOfRange { layer, n_layer });
        }
        if hidden_before.is_empty() {
            return Ok((self.outputs(batch, kind, None)?, HiddenRows::default()));
        }
        let mut layers = hidden_before.to_vec();
        layers.sort_unstable();
        layers.dedup();
        let of_layer = n_embd
            * match of_tokens {
                TracedTokens::All => batch.tokens.len(),
                TracedTokens::Output => n_outputs(batch.tokens),
            };
        let n = of_layer.saturating_mul(hidden_before.len());
        let mut hidden = Vec::new();
        let bytes = n.saturating_mul(size_of::<f32>());
        hidden.try_reserve_exact(n).map_err(|_| ForwardError::OutOfMemory { what: "the hidden rows", bytes })?;
        hidden.resize(n, 0.0);
        // The rows of each requested layer so far: those of earlier steps come first.
        let mut n_filled = vec![0; hidden_before.len()];
        let mut keep = |layer: usize, rows: &[f32]| {
            for (i, n_filled) in n_filled.iter_mut().enumerate().filter(|(i, _)| hidden_before[*i] == layer) {
                hidden[i * of_layer + *n_filled..][..rows.len()].copy_from_slice(rows);
                *n_filled += rows.len();
            }
        };
        let trace = LayerTrace { before: &layers, tokens: of_tokens, rows: &mut keep };
        let outputs = self.outputs(batch, kind, Some(trace))?;
        Ok((outputs, HiddenRows::new(hidden, of_layer, n_embd)))
    }

    fn forward_assistant(
        &mut self,
        tokens: &[AssistantToken],
        states: &[f32],
        with_logits: bool,
    ) -> Result<AssistantDrafts, ForwardError> {
        self.draft(tokens, states, with_logits)
    }

    fn forward_traced(
        &mut self,
        batch: &[BatchToken],
        after_layer: Option<AfterLayer<'_>>,
    ) -> Result<Logits<'_>, ForwardError> {
        match after_layer {
            None => self.logits(batch.into(), None),
            Some(after_layer) => {
                // After a layer is before the next one.
                let before: Vec<usize> = (1..=self.executor.spec().n_layer()).collect();
                let mut rows = |layer: usize, x: &[f32]| after_layer(layer - 1, x);
                self.logits(
                    batch.into(),
                    Some(LayerTrace { before: &before, tokens: TracedTokens::All, rows: &mut rows }),
                )
            }
        }
    }

    fn forward_hidden(&mut self, batch: &[BatchToken]) -> Result<Vec<f32>, ForwardError> {
        Ok(self.hidden(batch.into(), None)?.to_vec())
    }

    fn forward_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        // A model that reads states gets them with each batch, and blocks are no sequences of decode steps, so that no step of these
        // models can be submitted ahead.
        let spec = self.executor.spec();
        let reads_states = spec.embedding.state.is_some() || spec.takes_context;
        let decodes = self.profiler.is_none() && batch.len() <= self.limits.n_ahead && is_decode_step(batch);
        if decodes && !reads_states {
            let (spec, max_outputs) = (self.executor.spec(), self.limits.n_outputs);
            check_outputs(spec, batch, &|seq| self.pages.n_past(seq), /* needs_head */ true, max_outputs)?;
            return self.decode_greedy(batch);
        }
        self.ids(batch.into(), None)
    }

    fn forward_top_k(&mut self, batch: &[BatchToken], k: usize) -> Result<Vec<TopK>, ForwardError> {
        self.top_k(batch.into(), k, None)
    }

    fn max_top_k(&self) -> usize {
        self.limits.max_top_k
    }

    fn start_profile(&mut self) -> Result<(), ForwardError> {
        self.profiler = Some(self.executor.profiler()?);
        Ok(())
    }

    fn take_profile(&mut self) -> Option<Profile> {
        self.profiler.take().map(Profiler::finish)
    }

    fn wake(&mut self) -> bool {
        self.executor.wake()
    }
}

impl<E: Executor> SequenceCache for Session<E> {
    fn layout(&self) -> CacheLayout {
        self.executor.cache_layout()
    }

    fn pages(&self) -> &PageTable {
        &self.pages
    }

    fn discard_lookahead(&mut self) {
        Session::discard_lookahead(self);
    }

    fn allocate(&mut self, seq: usize, extent: &SequenceExtent) -> Result<Vec<Option<CacheBlock>>, SnapshotError> {
        Session::discard_lookahead(self);
        Session::pages(self).allocate(seq, extent)
    }

    fn read_block(&mut self, block: CacheBlock, bytes: &mut [u8]) -> Result<(), ForwardError> {
        self.executor.read_block(block, bytes)
    }

    fn read_blocks(&mut self, blocks: &[CacheBlock], out: &mut dyn Write) -> Result<(), SnapshotError> {
        self.executor.read_blocks(blocks, out)
    }

    fn write_block(&mut self, block: CacheBlock, bytes: &[u8]) -> Result<(), ForwardError> {
        self.executor.write_block(block, bytes)
    }
}

#[cfg(test)]
mod block_tests;
#[cfg(test)]
mod span_tests;
#[cfg(test)]
mod tests;
