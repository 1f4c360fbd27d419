//! The interface of backends: an executor computes what a session has planned.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use super::LayerTrace;
use crate::{
    BatchToken, CacheBlock, CacheGroups, CacheLayout, DeviceInfo, ForwardError, LayerSpec, Mask, MemoryUse, ModelSpec,
    PageCopy, PageTable, Phase, Position, Profiler, SnapshotError, StepInputs, StepSpan, TopK,
};

/// One micro-batch that an executor evaluates. Its tokens have their KV pages and state slots.
#[derive(Debug, Clone)]
pub struct Step {
    /// The tokens: at least one and at most [`StepLimits::n_tokens`]. If results are made of logits, at most
    /// [`StepLimits::n_outputs`] of them are output tokens. Ids, sequences and positions are in range.
    pub tokens: Arc<[BatchToken]>,
    /// The pages and state slots of all sequences, those of `tokens` included.
    pub pages: Arc<PageTable>,
    /// The kind of batch that the micro-batch is a part of, for profiles.
    pub phase: Phase,
    /// Those of its inputs that are rows of embeddings; `None`: all are token ids.
    pub inputs: Option<Arc<StepInputs>>,
    /// The state of each token, row-major `[n_tokens, state_width]`, for a model that reads them
    /// ([`InputEmbedding::state`](crate::InputEmbedding::state)), `[n_tokens, target_width]` for an assistant; `None` for all others.
    pub states: Option<Arc<[f32]>>,
    /// Whether it is a step of an assistant ([`AssistantEnds`](crate::AssistantEnds)). Its tokens, at most one of each sequence, are
    /// in no cache and none is written: each has the index of the last token of its sequence, as far as which it attends, and the
    /// position that follows.
    pub is_of_assistant: bool,
    /// The context rows of a block drafter in the place of all tokens, row-major `[n_tokens, n_embd]`: each layer stores the keys and
    /// values of the rows themselves, and nothing else is computed. `None` in all other steps; those of a
    /// [block drafter](ModelSpec::takes_context) evaluate blocks, a whole one of each sequence.
    pub context: Option<Arc<[f32]>>,
}

impl Step {
    /// The position by which `RoPE` rotates the input `token`.
    pub fn position(&self, token: &BatchToken) -> Position {
        match self.inputs.as_ref().and_then(|inputs| inputs.of_token(token)) {
            Some((span, i)) => span.positions[i],
            None if self.is_of_assistant => self.pages.text_position(&BatchToken { pos: token.pos + 1, ..*token }),
            None => self.pages.text_position(token),
        }
    }

    /// The spans, each with the index of its first input in the step. Its other inputs follow that one.
    pub fn spans(&self) -> impl Iterator<Item = (usize, &StepSpan)> {
        self.inputs.iter().flat_map(|inputs| &inputs.spans).map(|span| {
            let is_first = |token: &BatchToken| token.seq == span.seq && token.pos == span.indices.start;
            let first = self.tokens.iter().position(is_first);
            (first.expect("a step has the inputs of its spans"), span)
        })
    }

    /// Whether the tokens of each sequence are a block, all of which attend to one another.
    pub fn has_blocks(&self, spec: &ModelSpec) -> bool {
        spec.takes_context && self.context.is_none()
    }

    /// Checks that no block is longer than a window, for backends whose kernels take the first input that one attends to from its own
    /// window: a block sees all of itself.
    pub fn check_windows_hold_blocks(&self, spec: &ModelSpec) -> Result<(), ForwardError> {
        if !self.has_blocks(spec) {
            return Ok(());
        }
        let longest = self.tokens.chunk_by(|a, b| a.seq == b.seq).map(<[_]>::len).max().unwrap_or(0);
        let is_shorter = |layer: &LayerSpec| match layer.mixer.attention().map(|attention| attention.mask) {
            Some(Mask::Window(window) | Mask::Chunk(window)) => window < longest,
            Some(Mask::Causal | Mask::Full | Mask::SymmetricWindow(_)) | None => false,
        };
        if spec.layers.iter().any(is_shorter) {
            let why = "a block is longer than a layer's sliding window, which this device does not support: request fewer drafts, or \
                       use the CPU";
            return Err(ForwardError::BadBlock { why });
        }
        Ok(())
    }

    /// Number of output tokens.
    pub fn n_outputs(&self) -> usize {
        n_outputs(&self.tokens)
    }

    /// The index of the last input that each input of the step may attend to, in each layer of `spec`.
    pub fn last_seen(&self, spec: &ModelSpec) -> LastSeen {
        let spans: &[StepSpan] = self.inputs.as_ref().map_or(&[], |inputs| &inputs.spans);
        let list = |is_causal: bool, bidirectional: &[bool]| {
            let span_of = |token: &BatchToken| {
                let spans = spans.iter().zip(bidirectional).filter(|(_, is_bidirectional)| **is_bidirectional);
                spans.map(|(span, _)| span).find(|span| span.seq == token.seq && span.indices.contains(&token.pos))
            };
            let last = |token: &BatchToken| match (is_causal, span_of(token)) {
                (false, _) => self.pages.n_past(token.seq) - 1,
                (true, Some(span)) => span.indices.end - 1,
                (true, None) => token.pos,
            };
            self.tokens.iter().map(|token| last(token) as u32).collect()
        };
        if spans.is_empty() && spec.is_causal() {
            return LastSeen { lists: vec![list(!self.has_blocks(spec), &[])], of_layer: Vec::new() };
        }
        // Layers with equal masks and bidirectional spans have equal lists. A layer without attention does not read its list.
        let mut keys: Vec<(bool, Vec<bool>)> = Vec::new();
        let of_layer = spec.layers.iter().enumerate().map(|(i, layer)| {
            let is_causal = layer.mixer.attention().is_none_or(|a| a.mask.is_causal());
            let key = (is_causal, spans.iter().map(|span| span.is_bidirectional_in(i)).collect());
            keys.iter().position(|known| *known == key).unwrap_or_else(|| {
                keys.push(key);
                keys.len() - 1
            })
        });
        let of_layer = of_layer.collect();
        let lists = keys.iter().map(|(is_causal, bidirectional)| list(*is_causal, bidirectional)).collect();
        LastSeen { lists, of_layer }
    }
}

/// The index ([`BatchToken::pos`]) of the last input of its sequence that each input of a step attends to: under a causal mask
/// its own, or that of the last input of its block, or of its span in a layer with bidirectional attention within the span; under other masks
/// the last of its sequence, which a symmetric window limits further. Within the inputs of a sequence that follow each other in the
/// step the indices never decrease, since spans do not overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastSeen {
    /// The different lists, `[n_lists][n_tokens]`, at least one.
    pub lists: Vec<Vec<u32>>,
    /// The list of each layer, `[n_layer]`; empty: all have the first.
    of_layer: Vec<usize>,
}

impl LastSeen {
    /// The index of the list of layer `layer`.
    pub fn list_of(&self, layer: usize) -> usize {
        self.of_layer.get(layer).copied().unwrap_or(0)
    }

    /// Whether in layer `layer` an input of the step attends to later inputs. `tokens`: the tokens of the step.
    pub fn looks_ahead(&self, layer: usize, tokens: &[BatchToken]) -> bool {
        self.lists[self.list_of(layer)].iter().zip(tokens).any(|(&last, token)| last as usize != token.pos)
    }
}

/// Number of output tokens.
pub(super) fn n_outputs(tokens: &[BatchToken]) -> usize {
    tokens.iter().filter(|token| token.output).count()
}

/// Where an executor writes the results of a step's output tokens, in the order of the tokens.
#[derive(Debug)]
pub enum StepResults<'r> {
    /// Logits, row-major `[n_outputs, n_vocab]`.
    Logits(&'r mut [f32]),
    /// Hidden states after the last norm, row-major `[n_outputs, n_embd]`.
    Hidden(&'r mut [f32]),
    /// The argmax of each token's logits, `[n_outputs]`; only where [`StepLimits::chooses_ids`].
    Ids(&'r mut [u32]),
    /// The [`StepLimits::max_top_k`] highest logits of each token, `[n_outputs]`; only where that is not 0.
    TopK(&'r mut [TopK]),
}

impl StepResults<'_> {
    /// Removes the rows of the next `n` output tokens, of results for a batch of several steps.
    pub(super) fn take(&mut self, n: usize, spec: &ModelSpec) -> Self {
        const ROWS: &str = "there is a row for each output token of the batch";
        match self {
            Self::Logits(rows) => Self::Logits(rows.split_off_mut(..n * spec.n_vocab).expect(ROWS)),
            Self::Hidden(rows) => Self::Hidden(rows.split_off_mut(..n * spec.n_embd).expect(ROWS)),
            Self::Ids(ids) => Self::Ids(ids.split_off_mut(..n).expect(ROWS)),
            Self::TopK(lists) => Self::TopK(lists.split_off_mut(..n).expect(ROWS)),
        }
    }

    /// Whether they are made of logits.
    pub(super) fn needs_head(&self) -> bool {
        match self {
            Self::Hidden(_) => false,
            Self::Logits(_) | Self::Ids(_) | Self::TopK(_) => true,
        }
    }
}

/// What an executor's steps may have, and which results it computes by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLimits {
    /// Maximum tokens.
    pub n_tokens: usize,
    /// Maximum output tokens of steps that compute logits; `usize::MAX` if there is no limit.
    pub n_outputs: usize,
    /// Whether the tokens of a sequence have to be consecutive: a sequence has one run in a step.
    pub one_run_per_sequence: bool,
    /// Whether it finds the argmax of logits.
    pub chooses_ids: bool,
    /// Length of the lists of highest logits that it finds; 0: it finds none.
    pub max_top_k: usize,
    /// Maximum sequences of a greedy decode step that can be [submitted ahead](Executor::submit); 0: none can.
    pub n_ahead: usize,
}

/// A backend: evaluates steps of one model on one device, or on several that share the model, and holds the contents of
/// KV pages and state slots. A [`Session`](crate::Session) does everything that does not depend on the device: it checks
/// batches, assigns pages, divides batches into steps, and decides which decode steps run ahead.
pub trait Executor: Send {
    /// A decode step that was submitted ahead, whose ids can be read.
    type InFlight: Send;

    /// The model.
    fn spec(&self) -> &ModelSpec;

    /// The device.
    fn device(&self) -> DeviceInfo;

    /// The cache groups, from which the session makes its page table. They do not change.
    fn cache_groups(&self) -> &CacheGroups;

    /// Limits of steps. They do not change.
    fn limits(&self) -> StepLimits;

    /// Bytes that it holds. `results`: bytes of the session's buffer of results, in host memory.
    fn memory_use(&self, results: usize) -> MemoryUse;

    /// Called before the steps of a batch are run. Errors: the watch ([`Watch`](crate::Watch)) is cancelled, or the device is lost.
    fn begin_batch(&mut self) -> Result<(), ForwardError>;

    /// Copies a page of all layers of a cache group, before the step that is run next.
    fn copy_page(&mut self, copy: PageCopy) -> Result<(), ForwardError>;

    /// Evaluates a step and writes its results. `trace`, if given, copies rows of the residual stream of the same step;
    /// `profiler`, if given, records the step's kernels.
    ///
    /// # Errors
    /// The watch is cancelled, memory is short, or the device fails. Keys and values at the indices of the step's tokens,
    /// and the state slots that it writes, are undefined then; the session takes its tokens back.
    fn run(
        &mut self,
        step: &Step,
        results: StepResults<'_>,
        trace: Option<LayerTrace<'_>>,
        profiler: Option<&mut Profiler>,
    ) -> Result<(), ForwardError>;

    /// Number of greedy decode steps, at least 1, that are best submitted together for a single sequence whose next token has
    /// the index `pos` ([`BatchToken::pos`]).
    fn n_at_once(&self, pos: usize) -> usize {
        let _ = pos;
        1
    }

    /// Submits greedy decode steps without waiting for them. `step` is the oldest step that has not been read: step 0, with
    /// one token of each of at most [`StepLimits::n_ahead`] sequences. Step n is the one n decode steps after it: its tokens
    /// are the ids that step n - 1 chose, at the indices ([`BatchToken::pos`]) of the tokens of `step` plus n. `ahead` are the
    /// numbers n of the steps to submit. Steps `0..ahead.start` are in flight, so the device has the ids that step
    /// `ahead.start - 1` chooses. KV pages and state slots are assigned or reserved for all. Returns a handle for each
    /// submitted step, in order. Errors: as of [`run`](Self::run).
    fn submit(&mut self, step: &Step, ahead: Range<usize>) -> Result<Vec<Self::InFlight>, ForwardError> {
        let _ = (step, ahead);
        Err(ForwardError::Device { why: "this backend submits no steps ahead".into() })
    }

    /// Waits for a submitted step and writes its ids, `[n_sequences]`. Steps are read in the order in which they were
    /// submitted. Returns false, with `ids` unchanged, if the step gave no ids and has to be submitted again, as must those
    /// after it: on wgpu after the persistent kernel timed out, which is not used from then on. Errors: as of
    /// [`run`](Self::run).
    fn read(&mut self, step: Self::InFlight, ids: &mut [u32]) -> Result<bool, ForwardError> {
        let _ = (step, ids);
        Err(ForwardError::Device { why: "this backend submits no steps ahead".into() })
    }

    /// Forgets submitted steps, whose ids are not read. The device may still run them; they write nothing but the KV pages and
    /// state slots that were reserved for them, and end before what is submitted later begins.
    fn discard(&mut self, steps: Vec<Self::InFlight>) {
        drop(steps);
    }

    /// The layout of pages and states in memory.
    fn cache_layout(&self) -> CacheLayout;

    /// Bytes of the KV cache, recurrent states included.
    fn cache_bytes(&self) -> usize;

    /// Copies a block (a KV page of one cache group, or a state slot) to `bytes`, which has the length of the layout.
    fn read_block(&mut self, block: CacheBlock, bytes: &mut [u8]) -> Result<(), ForwardError>;

    /// Writes blocks to `out`, one after the other. A backend whose copies have a high fixed cost may copy several at once.
    fn read_blocks(&mut self, blocks: &[CacheBlock], out: &mut dyn Write) -> Result<(), SnapshotError> {
        let layout = self.cache_layout();
        let mut bytes = Vec::new();
        for &block in blocks {
            layout.make_room(block, &mut bytes)?;
            self.read_block(block, &mut bytes)?;
            out.write_all(&bytes).map_err(SnapshotError::Write)?;
        }
        Ok(())
    }

    /// Copies `bytes` to a block.
    fn write_block(&mut self, block: CacheBlock, bytes: &[u8]) -> Result<(), ForwardError>;

    /// A profiler for this device. An error if it has no timer.
    fn profiler(&self) -> Result<Profiler, ForwardError>;

    /// Keeps the device busy for a few milliseconds, so that it raises its clock; false if that has no effect. See
    /// [`ForwardPass::wake`](crate::ForwardPass::wake).
    fn wake(&mut self) -> bool {
        false
    }
}
