//! The interface of all backends: evaluating batches of tokens, with a KV cache.
//!
//! Also checks of batches and their division into micro-batches, which the backends share.

use std::ops::Range;

use crate::{
    AssistantDrafts, AssistantToken, Batch, ForwardError, MemoryUse, ModelSpec, PageUse, Profile, SequenceCache, TopK,
    TracedTokens,
};

/// One token of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchToken {
    /// Token id, `0..n_vocab`.
    pub id: u32,
    /// Index of its sequence, `0..n_seq`.
    pub seq: usize,
    /// Its index in the sequence: the number of inputs before it. The position by which `RoPE` rotates is the same number,
    /// except in and behind a [`Span`](crate::Span).
    pub pos: usize,
    /// Whether the caller wants an output for this token: logits, a hidden state, a greedy choice or a top-k list, as
    /// the called function returns them. The other tokens are evaluated for their keys, values and states only. The
    /// same as `logits` of llama.cpp's `llama_batch`.
    pub output: bool,
}

/// Logits of the tokens of a batch with `output` set, in batch order: row-major `[n_rows, n_vocab]`.
#[derive(Debug, Clone, Copy)]
pub struct Logits<'a> {
    /// All rows.
    data: &'a [f32],
    /// Length of a row.
    n_vocab: usize,
}

impl<'a> Logits<'a> {
    /// Wraps `data` of shape `[n_rows, n_vocab]`.
    pub fn new(data: &'a [f32], n_vocab: usize) -> Self {
        assert!(n_vocab > 0 && data.len().is_multiple_of(n_vocab), "logits are whole rows");
        Self { data, n_vocab }
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.data.len() / self.n_vocab
    }

    /// Row `i`, `[n_vocab]`.
    pub fn row(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.n_vocab..(i + 1) * self.n_vocab]
    }

    /// The last row; `None` if there are none.
    pub fn last(&self) -> Option<&'a [f32]> {
        self.n_rows().checked_sub(1).map(|i| self.row(i))
    }

    /// All rows, `[n_rows, n_vocab]`.
    pub fn as_slice(&self) -> &'a [f32] {
        self.data
    }
}

/// The device of a forward pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `"cpu"` or `"gpu"`.
    pub kind: &'static str,
    /// The GPU's name, or the instruction set of the CPU's kernels.
    pub name: String,
    /// The GPU's driver; `None` for a CPU.
    pub driver: Option<String>,
    /// CPU threads that compute; 1 for a GPU.
    pub n_threads: usize,
}

/// Which result of each output token a batch returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputKind {
    /// Its logits.
    Logits,
    /// Its hidden state after the last norm.
    Hidden,
    /// The argmax of its logits (the lowest id on ties, NaN skipped).
    Ids,
    /// Its highest logits with their ids (NaN left out), as many as the number.
    TopK(usize),
}

/// The results of a batch's output tokens, in batch order, of the requested [`OutputKind`].
#[derive(Debug)]
pub enum Outputs<'p> {
    /// Logits.
    Logits(Logits<'p>),
    /// Hidden states after the last norm, row-major `[n_outputs, n_embd]`.
    Hidden(&'p [f32]),
    /// Token ids, `[n_outputs]`.
    Ids(Vec<u32>),
    /// Lists of the highest logits, `[n_outputs]`.
    TopK(Vec<TopK>),
}

/// Called after each layer with its index, `0..n_layer`, and the residual stream of all tokens of a micro-batch,
/// `[n_tokens, n_embd]`.
pub type AfterLayer<'a> = &'a mut dyn FnMut(usize, &[f32]);

/// The hidden rows that a batch returns beside its results.
#[derive(Debug, Clone, Copy)]
pub struct HiddenRequest<'a> {
    /// The layers before which the residual stream is returned: `i` is the input of layer `i`, `n_layer` the output of the last
    /// layer, before the output norm, and `n_layer + 1` the result of the output norm. In any order; empty: none.
    pub before: &'a [usize],
    /// The tokens whose rows are returned. With [`TracedTokens::All`] the last layer computes the rows of all tokens, as
    /// otherwise of the output tokens alone.
    pub tokens: TracedTokens,
}

/// Rows of the residual stream before some layers, of the output tokens of a batch or of all.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct HiddenRows {
    /// `[n_layers, n_rows, n_embd]`.
    rows: Vec<f32>,
    /// Elements of one layer: `n_rows * n_embd`.
    of_layer: usize,
    /// Elements of a row.
    n_embd: usize,
}

impl HiddenRows {
    /// Wraps `rows` of `n_layers` layers with `of_layer` elements each.
    pub(crate) fn new(rows: Vec<f32>, of_layer: usize, n_embd: usize) -> Self {
        Self { rows, of_layer, n_embd }
    }

    /// The rows before the `i`th of the requested layers, row-major `[n_rows, n_embd]`.
    pub fn of_layer(&self, i: usize) -> &[f32] {
        &self.rows[i * self.of_layer..][..self.of_layer]
    }

    /// Those of the rows before the `i`th of the requested layers with these indices, row-major `[n, n_embd]`.
    pub fn rows_of_layer(&self, i: usize, rows: Range<usize>) -> &[f32] {
        &self.of_layer(i)[rows.start * self.n_embd..rows.end * self.n_embd]
    }

    /// Number of requested layers; 0 if there are no rows.
    pub fn n_layers(&self) -> usize {
        self.rows.len().checked_div(self.of_layer).unwrap_or(0)
    }

    /// All rows, `[n_layers, n_rows, n_embd]`.
    pub fn as_slice(&self) -> &[f32] {
        &self.rows
    }
}

/// Evaluates batches of tokens with one model, and keeps the KV cache of `n_seq` sequences.
///
/// [`Session`](crate::Session) is its one implementation. [`forward_outputs`](Self::forward_outputs) evaluates a batch; the
/// other evaluating methods return less of it, or trace it. Those without a `seq` argument use sequence 0.
pub trait ForwardPass: sealed::Sealed + Send {
    /// The model.
    fn spec(&self) -> &ModelSpec;

    /// The device.
    fn device(&self) -> DeviceInfo;

    /// Maximum tokens of a sequence, as far as there are free pages (see [`cache_pages`](Self::cache_pages)).
    fn n_ctx(&self) -> usize;

    /// Number of sequences in the KV cache.
    fn n_seq(&self) -> usize;

    /// Maximum tokens of a micro-batch. Longer batches are divided; a caller that reports progress divides a prompt by
    /// this itself.
    fn n_ubatch(&self) -> usize;

    /// Tokens of sequence `seq` in the KV cache, which is also its next position; 0 if there is no such sequence.
    fn n_past(&self, seq: usize) -> usize;

    /// Cuts sequence `seq` back to its first `n` tokens, or fewer, and returns the new length. No effect if it has no
    /// more than `n` tokens.
    ///
    /// Layers with a sliding window keep only what later tokens attend to. If they lack a position that a token at `n`
    /// attends to, the sequence becomes as long as it can be and still continue, which may be 0. The last micro-batch
    /// can always be taken back, less the few tokens that lookahead steps have run ahead; so can the last token.
    ///
    /// Layers with a recurrent state can continue only from checkpoints: at ends of pages as far as there is capacity,
    /// at the start of the last batch, and before the last token. The sequence becomes as long as the longest of these;
    /// the caller evaluates the missing tokens again.
    fn rewind(&mut self, seq: usize, n: usize) -> usize;

    /// The length that [`rewind`](Self::rewind) to `n` would reach.
    fn reachable(&self, seq: usize, n: usize) -> usize;

    /// Replaces sequence `to` by the first `n` tokens of sequence `from`, or as many as are
    /// [`reachable`](Self::reachable) there, without evaluating them. Whole pages are shared. Returns the length. On an
    /// error the cache is unchanged.
    fn share_prefix(&mut self, from: usize, to: usize, n: usize) -> Result<usize, ForwardError>;

    /// Use of the KV pages, which all sequences share, and of the recurrent states. There may be fewer than
    /// [`n_ctx`](Self::n_ctx) positions for each sequence.
    fn cache_pages(&self) -> PageUse;

    /// Number of KV pages that `sequences`, all different, hold together; shared pages count once.
    fn pages_held(&self, sequences: &[usize]) -> usize;

    /// Bytes of the KV cache, recurrent states included.
    fn kv_cache_bytes(&self) -> usize;

    /// Bytes in use.
    fn memory_use(&self) -> MemoryUse;

    /// The KV cache and the recurrent states, for writing and restoring [snapshots](crate::Snapshot) of sequences.
    fn cache(&mut self) -> &mut dyn SequenceCache;

    /// Evaluates `batch`, appending every input to its sequence. Returns the results of the inputs with `output` set, and in
    /// the same step the hidden rows of `hidden`.
    ///
    /// On an error the cache is as before, with one exception: if a batch of several micro-batches fails or is
    /// cancelled after the first one, its sequences are [rewound](Self::rewind), and may be shorter than before if
    /// windows have moved on.
    fn forward_with_hidden(
        &mut self,
        batch: Batch<'_>,
        kind: OutputKind,
        hidden: HiddenRequest<'_>,
    ) -> Result<(Outputs<'_>, HiddenRows), ForwardError>;

    /// [`forward_with_hidden`](Self::forward_with_hidden), with the hidden rows of the output tokens before the layers
    /// `hidden_before` ([`HiddenRequest::before`]).
    fn forward_outputs(
        &mut self,
        batch: Batch<'_>,
        kind: OutputKind,
        hidden_before: &[usize],
    ) -> Result<(Outputs<'_>, HiddenRows), ForwardError> {
        self.forward_with_hidden(batch, kind, HiddenRequest { before: hidden_before, tokens: TracedTokens::Output })
    }

    /// Drafts a token for each of several sequences with the [assistant](crate::AssistantEnds) that is attached to this pass: what
    /// follows each of `tokens`, which itself follows its sequence. No sequence changes. `states`: of each token the state that the
    /// assistant reads, row-major `[n_tokens, n_embd]`; for the first draft that of the last position after the output norm.
    ///
    /// # Errors
    /// No assistant is attached; a token that is not in the vocabulary, whose sequence is empty or full, or is there twice; a wrong
    /// number of states; or a failure of the device. Steps in flight are discarded.
    fn forward_assistant(
        &mut self,
        tokens: &[AssistantToken],
        states: &[f32],
        with_logits: bool,
    ) -> Result<AssistantDrafts, ForwardError>;

    /// Evaluates `batch` and returns the logits of the output tokens. `after_layer`, if given, is called after every layer
    /// with its index, `0..n_layer`, and the residual stream of all tokens, `[n_tokens, n_embd]`. A batch of several
    /// micro-batches calls it several times for each layer. Errors as in [`forward_outputs`](Self::forward_outputs).
    fn forward_traced(
        &mut self,
        batch: &[BatchToken],
        after_layer: Option<AfterLayer<'_>>,
    ) -> Result<Logits<'_>, ForwardError>;

    /// [`forward_traced`](Self::forward_traced) without a trace.
    fn forward(&mut self, batch: &[BatchToken]) -> Result<Logits<'_>, ForwardError> {
        self.forward_traced(batch, None)
    }

    /// Evaluates `batch` and returns the hidden states of the output tokens after the last norm, row-major
    /// `[n_outputs, n_embd]`; for embeddings. Errors as in [`forward_outputs`](Self::forward_outputs).
    fn forward_hidden(&mut self, batch: &[BatchToken]) -> Result<Vec<f32>, ForwardError>;

    /// [`forward`](Self::forward) that returns only the argmax of each row (the lowest id on ties, NaN skipped).
    /// Greedy decode steps may be submitted ahead.
    fn forward_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError>;

    /// [`forward`](Self::forward) that returns only the `k` highest logits of each row with their ids (NaN left out).
    fn forward_top_k(&mut self, batch: &[BatchToken], k: usize) -> Result<Vec<TopK>, ForwardError>;

    /// The largest `k` for which [`forward_top_k`](Self::forward_top_k) is cheaper than [`forward`](Self::forward); 0
    /// if it never is.
    fn max_top_k(&self) -> usize;

    /// Times every kernel from now on, until [`take_profile`](Self::take_profile). Steps may be slower; their results
    /// are unchanged. An error if the backend has no timer.
    fn start_profile(&mut self) -> Result<(), ForwardError>;

    /// Stops timing kernels and returns the profile; `None` if [`start_profile`](Self::start_profile) was not called or
    /// failed.
    fn take_profile(&mut self) -> Option<Profile>;

    /// Keeps the device busy for a few milliseconds and waits for it, so that it comes up to its clock: an idle GPU
    /// runs at a fraction of its clock for the first tenths of a second. False if that has no effect. See
    /// [`wake`](crate::wake).
    fn wake(&mut self) -> bool;

    /// Evaluates `id` in sequence 0; the logits after it, `[n_vocab]`.
    fn forward_token(&mut self, id: u32) -> Result<&[f32], ForwardError> {
        let pos = self.position();
        let logits = self.forward(&[BatchToken { id, seq: 0, pos, output: true }])?;
        Ok(logits.row(0))
    }

    /// Evaluates `id` in sequence 0; the argmax after it.
    fn forward_token_greedy(&mut self, id: u32) -> Result<u32, ForwardError> {
        let pos = self.position();
        Ok(self.forward_greedy(&[BatchToken { id, seq: 0, pos, output: true }])?[0])
    }

    /// Evaluates a prompt in sequence 0 as one batch; the argmax after its last token.
    fn forward_prompt(&mut self, ids: &[u32]) -> Result<u32, ForwardError> {
        let start = self.position();
        let batch: Vec<_> = ids
            .iter()
            .enumerate()
            .map(|(i, &id)| BatchToken { id, seq: 0, pos: start + i, output: i + 1 == ids.len() })
            .collect();
        Ok(self.forward_greedy(&batch)?[0])
    }

    /// [`forward_token`](Self::forward_token), with the hidden state `[n_embd]` after each layer.
    fn forward_token_debug(&mut self, id: u32) -> Result<(Vec<f32>, Vec<Vec<f32>>), ForwardError> {
        let pos = self.position();
        let mut states = Vec::new();
        let mut keep = |_layer: usize, x: &[f32]| states.push(x.to_vec());
        let batch = [BatchToken { id, seq: 0, pos, output: true }];
        let logits = self.forward_traced(&batch, Some(&mut keep))?.row(0).to_vec();
        Ok((logits, states))
    }

    /// [`n_past`](Self::n_past) of sequence 0.
    fn position(&self) -> usize {
        self.n_past(0)
    }

    /// [`rewind`](Self::rewind) of sequence 0.
    fn truncate(&mut self, n: usize) -> usize {
        self.rewind(0, n)
    }

    /// Empties every sequence.
    fn reset(&mut self) {
        for seq in 0..self.n_seq() {
            self.rewind(seq, 0);
        }
    }
}

/// Nothing but a session implements [`ForwardPass`].
mod sealed {
    pub trait Sealed {}

    impl<E: crate::Executor> Sealed for crate::Session<E> {}
}

/// Index of the largest value: the lowest on ties, NaN skipped, 0 if there is nothing to compare.
pub fn argmax(values: &[f32]) -> u32 {
    // Two loops that vectorise: the largest value, then its index. A NaN is never larger.
    let (chunks, rest) = values.as_chunks::<16>();
    let mut lanes = [f32::NEG_INFINITY; 16];
    for chunk in chunks {
        for (largest, &v) in lanes.iter_mut().zip(chunk) {
            *largest = if v > *largest { v } else { *largest };
        }
    }
    let largest = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &v| if v > a { v } else { a });
    values.iter().position(|&v| v == largest).unwrap_or(0) as u32
}

/// Checks a batch before anything is computed: not empty, ids in the vocabulary, existing sequences, positions that
/// continue each sequence, and context length. `n_past[seq]` is the length of each sequence.
pub fn check_batch(batch: &[BatchToken], n_vocab: usize, n_ctx: usize, n_past: &[usize]) -> Result<(), ForwardError> {
    if batch.is_empty() {
        return Err(ForwardError::EmptyPrompt);
    }
    let mut next = n_past.to_vec();
    for t in batch {
        if t.id as usize >= n_vocab {
            return Err(ForwardError::TokenOutOfRange { id: t.id, n_vocab });
        }
        let n_seq = next.len();
        let expected = next.get_mut(t.seq).ok_or(ForwardError::SequenceOutOfRange { seq: t.seq, n_seq })?;
        if t.pos != *expected {
            return Err(ForwardError::PositionGap { seq: t.seq, pos: t.pos, expected: *expected });
        }
        *expected += 1;
    }
    for (seq, (&now, &then)) in next.iter().zip(n_past).enumerate() {
        if now > n_ctx {
            return Err(ForwardError::ContextFull { seq, n_past: then, n_new: now - then, n_ctx });
        }
    }
    Ok(())
}

/// Checks the outputs of a batch. A model without a causal mask needs whole sequences, each in one run and with at most
/// `max_outputs` output tokens, since a step evaluates all of it. `needs_head`: the outputs are made of logits, not of hidden
/// states, so that output tokens need an output head. `n_past(seq)` is the length of a sequence.
pub fn check_outputs(
    spec: &ModelSpec,
    batch: &[BatchToken],
    n_past: &dyn Fn(usize) -> usize,
    needs_head: bool,
    max_outputs: usize,
) -> Result<(), ForwardError> {
    if needs_head && spec.output.head.is_none() && batch.iter().any(|t| t.output) {
        return Err(ForwardError::NoLogits);
    }
    if !spec.is_causal() {
        // A sequence that does not exist has length 0 here; `check_batch` reports it.
        let continued = batch.iter().map(|t| (t.seq, n_past(t.seq))).find(|(_, n)| *n > 0);
        if let Some((seq, n_past)) = continued {
            return Err(ForwardError::NotFromStart { seq, n_past });
        }
        let mut start = 0;
        for run in batch.chunk_by(|a, b| a.seq == b.seq) {
            let (seq, before) = (run[0].seq, &batch[..start]);
            // Only a later run of a sequence has its first token at another position, but for gaps, which `check_batch` reports.
            let n_past = if run[0].pos == 0 { 0 } else { before.iter().filter(|t| t.seq == seq).count() };
            if n_past > 0 {
                return Err(ForwardError::NotFromStart { seq, n_past });
            }
            let n_outputs = run.iter().filter(|t| t.output).count();
            if n_outputs > max_outputs {
                return Err(ForwardError::TooManySequenceOutputs { seq, n_outputs, max_outputs });
            }
            start += run.len();
        }
    }
    Ok(())
}

/// Divides a batch into micro-batches of at most `n_ubatch` tokens, of which at most `max_outputs` are output tokens.
/// Without a causal mask, sequences are not divided. `undivided`: ranges of tokens that are not divided either, each of at most
/// `n_ubatch` tokens and `max_outputs` output tokens.
pub fn micro_batches<'b>(
    spec: &ModelSpec,
    batch: &'b [BatchToken],
    n_ubatch: usize,
    max_outputs: usize,
    undivided: &[Range<usize>],
) -> Vec<&'b [BatchToken]> {
    if !spec.is_causal() {
        return whole_sequences(batch, n_ubatch, max_outputs);
    }
    causal_micro_batches(batch, n_ubatch, max_outputs, undivided)
}

/// [`micro_batches`] of a causal model.
fn causal_micro_batches<'b>(
    batch: &'b [BatchToken],
    n_ubatch: usize,
    max_outputs: usize,
    undivided: &[Range<usize>],
) -> Vec<&'b [BatchToken]> {
    let mut micro_batches = Vec::new();
    let mut start = 0;
    while start < batch.len() {
        let mut n_outputs = 0;
        let fits = batch[start..].iter().take(n_ubatch).take_while(|t| {
            n_outputs += usize::from(t.output);
            n_outputs <= max_outputs
        });
        let mut end = start + fits.count();
        if let Some(span) = undivided.iter().find(|span| span.start < end && end < span.end && start < span.start) {
            end = span.start;
        }
        micro_batches.push(&batch[start..end]);
        start = end;
    }
    micro_batches
}

/// Divides a batch between sequences, so that no micro-batch of several exceeds the limits.
fn whole_sequences(batch: &[BatchToken], n_ubatch: usize, max_outputs: usize) -> Vec<&[BatchToken]> {
    let mut micro_batches = Vec::new();
    let (mut start, mut end, mut n_outputs) = (0, 0, 0);
    for sequence in batch.chunk_by(|a, b| a.seq == b.seq) {
        let outputs = sequence.iter().filter(|token| token.output).count();
        if end > start && (end + sequence.len() - start > n_ubatch || n_outputs + outputs > max_outputs) {
            micro_batches.push(&batch[start..end]);
            (start, n_outputs) = (end, 0);
        }
        end += sequence.len();
        n_outputs += outputs;
    }
    micro_batches.push(&batch[start..]);
    micro_batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn argmax_takes_the_first_of_the_largest_and_skips_nan() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for (values, want) in [
            (&[][..], 0),
            (&[3.0], 0),
            (&[1.0, 1.0], 0),
            (&[-2.0, -1.0], 1),
            (&[nan, -5.0, nan], 1),
            (&[nan, nan], 0),
            (&[nan, -inf, -inf], 1),
            (&[0.0, inf, nan, inf], 1),
        ] {
            assert_eq!(argmax(values), want, "{values:?}");
        }
        for n in [1, 15, 16, 17, 49_152] {
            for at in [0, n / 2, n - 1] {
                let mut values = vec![-1.0; n];
                values[at] = 2.0;
                assert_eq!(argmax(&values) as usize, at, "of {n}");
            }
        }
    }

    #[test]
    fn micro_batches_respect_the_limits_of_tokens_and_outputs() {
        let shape = crate::ModelShape::named("smollm-135m").unwrap();
        let spec = ModelSpec::from_metadata(&shape.metadata()).unwrap();
        let batch: Vec<_> = (0..7).map(|pos| BatchToken { id: 0, seq: 0, pos, output: pos >= 3 }).collect();
        let lengths = |n_ubatch, max_outputs| -> Vec<usize> {
            micro_batches(&spec, &batch, n_ubatch, max_outputs, &[])
                .iter()
                .map(|micro_batch| micro_batch.len())
                .collect()
        };
        assert_eq!(lengths(3, 9), [3, 3, 1]);
        assert_eq!(lengths(9, 2), [5, 2]);
        assert_eq!(lengths(6, 1), [4, 1, 1, 1]);
        assert_eq!(lengths(9, 9), [7]);
        let around = |n_ubatch, span: Range<usize>| -> Vec<usize> {
            micro_batches(&spec, &batch, n_ubatch, 9, &[span]).iter().map(|micro_batch| micro_batch.len()).collect()
        };
        assert_eq!(around(4, 2..5), [2, 4, 1]);
        assert_eq!(around(4, 0..4), [4, 3]);
        assert_eq!(around(5, 3..7), [3, 4]);
        // Without a causal mask a sequence is longer than a micro-batch.
        let encoder = ModelSpec::from_metadata(&crate::ModelShape::custom("bert").unwrap().metadata()).unwrap();
        let token = |seq, pos| BatchToken { id: 0, seq, pos, output: true };
        let two: Vec<_> = (0..7).map(|pos| token(0, pos)).chain((0..2).map(|pos| token(1, pos))).collect();
        let lengths = |n_ubatch| -> Vec<usize> {
            micro_batches(&encoder, &two, n_ubatch, 9, &[]).iter().map(|micro_batch| micro_batch.len()).collect()
        };
        assert_eq!(lengths(4), [7, 2]);
        assert_eq!(lengths(9), [9]);
        // Nor does the limit of outputs divide one.
        let by_outputs = micro_batches(&encoder, &two, 9, 8, &[]);
        assert_eq!(by_outputs.iter().map(|micro_batch| micro_batch.len()).collect::<Vec<_>>(), [7, 2]);
    }

    #[test]
    fn a_batch_must_continue_its_sequences() {
        let token = |id, seq, pos| BatchToken { id, seq, pos, output: true };
        let check = |batch: &[BatchToken]| check_batch(batch, 10, 4, &[2, 0]);
        assert_eq!(check(&[token(9, 0, 2), token(0, 1, 0), token(1, 0, 3), token(1, 1, 1)]), Ok(()));
        assert_eq!(check(&[]), Err(ForwardError::EmptyPrompt));
        assert_eq!(check(&[token(10, 0, 2)]), Err(ForwardError::TokenOutOfRange { id: 10, n_vocab: 10 }));
        assert_eq!(check(&[token(0, 2, 0)]), Err(ForwardError::SequenceOutOfRange { seq: 2, n_seq: 2 }));
        assert_eq!(check(&[token(0, 1, 1)]), Err(ForwardError::PositionGap { seq: 1, pos: 1, expected: 0 }));
        assert_eq!(
            check(&[token(0, 0, 2), token(0, 0, 3), token(0, 0, 4)]),
            Err(ForwardError::ContextFull { seq: 0, n_past: 2, n_new: 3, n_ctx: 4 })
        );
    }
}
