//! The one thing every backend does: evaluate a batch of tokens.

use crate::{ForwardError, ModelSpec, PageUse, Profile, SequenceCache, TopK, highest};

/// One token of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchToken {
    /// Id in the vocabulary, `0..n_vocab`.
    pub id: u32,
    /// Sequence it belongs to, `0..n_seq`; each has its own KV cache.
    pub seq: usize,
    /// Position in the sequence: the number of tokens before it.
    pub pos: usize,
    /// Whether the logits after this token are wanted, or its state.
    pub logits: bool,
}

/// Logits of the batch's tokens that asked for them, in batch order:
/// row-major `[n_rows, n_vocab]`.
#[derive(Debug, Clone, Copy)]
pub struct Logits<'a> {
    data: &'a [f32],
    n_vocab: usize,
}

impl<'a> Logits<'a> {
    /// Wraps `data` of shape `[n_rows, n_vocab]`.
    pub fn new(data: &'a [f32], n_vocab: usize) -> Self {
        assert!(n_vocab > 0 && data.len().is_multiple_of(n_vocab), "logits are whole rows");
        Self { data, n_vocab }
    }

    /// Number of tokens that asked for logits.
    pub fn n_rows(&self) -> usize {
        self.data.len() / self.n_vocab
    }

    /// Logits of the `i`-th token that asked for them.
    pub fn row(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.n_vocab..(i + 1) * self.n_vocab]
    }

    /// The last row; `None` when no token asked.
    pub fn last(&self) -> Option<&'a [f32]> {
        self.n_rows().checked_sub(1).map(|i| self.row(i))
    }

    /// All rows, `[n_rows, n_vocab]`.
    pub fn as_slice(&self) -> &'a [f32] {
        self.data
    }
}

/// What a forward pass runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `"cpu"` or `"gpu"`.
    pub kind: &'static str,
    /// The GPU's name, or the instruction set of the CPU's kernels.
    pub name: String,
    /// The GPU's driver.
    pub driver: Option<String>,
    /// Threads that compute; for a GPU 1, the one that feeds it.
    pub n_threads: usize,
}

/// Receives hidden states while a batch runs: the layer's index (`0..n_layer`,
/// after that layer's residual additions) and the state `[n_tokens, n_embd]`.
pub type LayerTrace<'a> = &'a mut dyn FnMut(usize, &[f32]);

/// Runs a model over batches of tokens and keeps their KV cache.
///
/// [`forward`](Self::forward) is the one entry; the other methods are wrappers
/// over it that work on sequence 0.
pub trait ForwardPass: Send {
    /// The model that runs.
    fn spec(&self) -> &ModelSpec;

    /// What runs it.
    fn device(&self) -> DeviceInfo;

    /// Positions each sequence has room for, as long as there are pages (see [`cache_pages`](Self::cache_pages)).
    fn n_ctx(&self) -> usize;

    /// Number of sequences the KV cache holds.
    fn n_seq(&self) -> usize;

    /// Most tokens that go through its layers at once: longer batches it cuts, and whoever wants to hear how far a prompt is cuts them
    /// by that.
    fn n_ubatch(&self) -> usize;

    /// Tokens of sequence `seq` in the KV cache.
    fn n_past(&self, seq: usize) -> usize;

    /// Cuts sequence `seq` back to its first `n` tokens and returns the length reached; no effect when it is already that
    /// short.
    ///
    /// Layers with a window keep what tokens to come see. Where they hold less than a token at `n` sees, the sequence
    /// becomes as long as it can be and still go on, which may be nothing. From the longest that a sequence was a
    /// micro-batch can always be taken back, but for the few tokens that steps run ahead; so can its last token.
    ///
    /// Layers with a recurrent state can go on only from where it was kept: at the ends of pages, as far as there is room,
    /// where the last batch began, and before the last token. The sequence becomes as long as the longest such beginning;
    /// what of the `n` tokens is missing then is to be evaluated again.
    fn rewind(&mut self, seq: usize, n: usize) -> usize;

    /// The length that [`rewind`](Self::rewind) would reach.
    fn reachable(&self, seq: usize, n: usize) -> usize;

    /// Makes sequence `to` the first `n` tokens of sequence `from` without evaluating them, or as many as are
    /// [`reachable`](Self::reachable) there, and returns its length; what it held is forgotten. On an error the cache is
    /// as it was.
    fn share_prefix(&mut self, from: usize, to: usize, n: usize) -> Result<usize, ForwardError>;

    /// How full the KV cache is, which all sequences share: less than [`n_ctx`](Self::n_ctx) positions for each of them
    /// may be left; and how many recurrent states there are.
    fn cache_pages(&self) -> PageUse;

    /// How many pages of the KV cache different `sequences` hold together; pages that several share count
    /// once.
    fn pages_held(&self, sequences: &[usize]) -> usize;

    /// Bytes of the KV cache, recurrent states included.
    fn kv_cache_bytes(&self) -> usize;

    /// The KV cache and the recurrent states, to write [snapshots](crate::Snapshot) of sequences and to read them back.
    fn cache(&mut self) -> &mut dyn SequenceCache;

    /// Evaluates `batch`, appending every token to its sequence's KV cache, and
    /// returns the logits of the tokens that asked for them. On an error the
    /// cache is as it was before the call, but for sequences that windows have
    /// moved on in: where a batch of more than a micro-batch fails or is
    /// cancelled on its way, these are [rewound](Self::rewind), and may be
    /// shorter than they were. `trace`, when given, sees the hidden state after
    /// every layer.
    fn forward_traced(
        &mut self,
        batch: &[BatchToken],
        trace: Option<LayerTrace<'_>>,
    ) -> Result<Logits<'_>, ForwardError>;

    /// [`forward_traced`](Self::forward_traced) without a trace.
    fn forward(&mut self, batch: &[BatchToken]) -> Result<Logits<'_>, ForwardError> {
        self.forward_traced(batch, None)
    }

    /// The states `[n_wanted, n_embd]`, row-major, after the last norm of the tokens whose `logits` are set: what embeddings
    /// are made of.
    fn forward_hidden(&mut self, batch: &[BatchToken]) -> Result<Vec<f32>, ForwardError>;

    /// Like [`forward`](Self::forward), but only the id of the largest logit of
    /// each token that asked comes back (the lowest id on ties, NaN skipped).
    fn forward_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        let logits = self.forward(batch)?;
        Ok((0..logits.n_rows()).map(|i| argmax(logits.row(i))).collect())
    }

    /// Like [`forward`](Self::forward), but only the `k` highest logits of each
    /// token that asked come back, with their ids (NaN left out).
    fn forward_top_k(&mut self, batch: &[BatchToken], k: usize) -> Result<Vec<TopK>, ForwardError> {
        let logits = self.forward(batch)?;
        Ok((0..logits.n_rows()).map(|i| highest(logits.row(i), k)).collect())
    }

    /// The largest `k` for which [`forward_top_k`](Self::forward_top_k) costs less
    /// than [`forward`](Self::forward); 0 where it never does.
    fn max_top_k(&self) -> usize {
        0
    }

    /// Times every kernel from now on, for [`take_profile`](Self::take_profile). Steps may take longer meanwhile; what
    /// they compute stays the same. An error where the backend has no clock for it.
    fn start_profile(&mut self) -> Result<(), ForwardError> {
        Err(ForwardError::Device { why: "this backend cannot time its kernels".into() })
    }

    /// Stops timing kernels and gives what was collected; `None` where
    /// [`start_profile`](Self::start_profile) was not called or failed.
    fn take_profile(&mut self) -> Option<Profile> {
        None
    }

    /// Gives the device a few milliseconds of work that nobody needs, so that it comes up to its speed before the next step, and
    /// waits for it: a GPU that was idle runs at a fraction of its clock for the first tenths of a second. False where that
    /// is of no use. See [`wake`](crate::wake).
    fn wake(&mut self) -> bool {
        false
    }

    /// One step of sequence 0: logits `[n_vocab]` after `id`.
    fn forward_token(&mut self, id: u32) -> Result<&[f32], ForwardError> {
        let pos = self.position();
        let logits = self.forward(&[BatchToken { id, seq: 0, pos, logits: true }])?;
        Ok(logits.row(0))
    }

    /// One step of sequence 0: the greedy next id after `id`.
    fn forward_token_greedy(&mut self, id: u32) -> Result<u32, ForwardError> {
        let pos = self.position();
        Ok(self.forward_greedy(&[BatchToken { id, seq: 0, pos, logits: true }])?[0])
    }

    /// A whole prompt through the layers at once; the greedy next id after it.
    fn forward_prompt(&mut self, ids: &[u32]) -> Result<u32, ForwardError> {
        let start = self.position();
        let batch: Vec<_> = ids
            .iter()
            .enumerate()
            .map(|(i, &id)| BatchToken { id, seq: 0, pos: start + i, logits: i + 1 == ids.len() })
            .collect();
        Ok(self.forward_greedy(&batch)?[0])
    }

    /// Like [`forward_token`](Self::forward_token), and the hidden state
    /// `[n_embd]` after each layer.
    fn forward_token_debug(&mut self, id: u32) -> Result<(Vec<f32>, Vec<Vec<f32>>), ForwardError> {
        let pos = self.position();
        let mut states = Vec::new();
        let mut keep = |_layer: usize, x: &[f32]| states.push(x.to_vec());
        let batch = [BatchToken { id, seq: 0, pos, logits: true }];
        let logits = self.forward_traced(&batch, Some(&mut keep))?.row(0).to_vec();
        Ok((logits, states))
    }

    /// Tokens of sequence 0 in the KV cache.
    fn position(&self) -> usize {
        self.n_past(0)
    }

    /// [`rewind`](Self::rewind) of sequence 0.
    fn truncate(&mut self, n: usize) -> usize {
        self.rewind(0, n)
    }

    /// Empties every sequence's KV cache.
    fn reset(&mut self) {
        for seq in 0..self.n_seq() {
            self.rewind(seq, 0);
        }
    }
}

/// Index of the largest value: the lowest index on ties, NaN skipped, 0 when
/// there is nothing to compare.
pub fn argmax(values: &[f32]) -> u32 {
    // Two passes that vectorise: the largest value, then where it is. A NaN is never larger.
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

/// Checks a batch against the model and the cache before anything is computed:
/// not empty, ids inside the vocabulary, sequences that exist, positions that
/// continue each sequence, room in the context. `n_past[seq]` is the length of
/// each sequence's KV cache.
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

/// Checks a batch against what the model's tokens see and give: texts come whole where a token sees those after it, and
/// logits are asked only of a model that has them.
pub fn check_outputs(
    spec: &ModelSpec,
    batch: &[BatchToken],
    n_past: &dyn Fn(usize) -> usize,
    logits: bool,
) -> Result<(), ForwardError> {
    if logits && spec.output.head.is_none() && batch.iter().any(|t| t.logits) {
        return Err(ForwardError::NoLogits);
    }
    if !spec.is_causal() {
        // A sequence that does not exist is refused with the rest of what makes a batch wrong.
        let continued = batch.iter().map(|t| (t.seq, n_past(t.seq))).find(|(_, n)| *n > 0);
        if let Some((seq, n_past)) = continued {
            return Err(ForwardError::NotFromStart { seq, n_past });
        }
    }
    Ok(())
}

/// Cuts a batch into pieces of `n_ubatch` tokens at most, of which `n_wanted` at most have something wanted of them; where
/// a token sees those after it, into whole texts.
pub fn micro_batches<'b>(
    spec: &ModelSpec,
    batch: &'b [BatchToken],
    n_ubatch: usize,
    n_wanted: usize,
) -> Vec<&'b [BatchToken]> {
    let mut pieces = Vec::new();
    for mut rest in uncut_micro_batches(spec, batch, n_ubatch) {
        while !rest.is_empty() {
            let mut wanted = 0;
            let fits = rest.iter().take_while(|t| {
                wanted += usize::from(t.logits);
                wanted <= n_wanted
            });
            let (piece, after) = rest.split_at(fits.count());
            pieces.push(piece);
            rest = after;
        }
    }
    pieces
}

fn uncut_micro_batches<'b>(spec: &ModelSpec, batch: &'b [BatchToken], n_ubatch: usize) -> Vec<&'b [BatchToken]> {
    if spec.is_causal() {
        return batch.chunks(n_ubatch).collect();
    }
    let mut pieces = Vec::new();
    let (mut start, mut end) = (0, 0);
    for text in batch.chunk_by(|a, b| a.seq == b.seq) {
        if end > start && end + text.len() - start > n_ubatch {
            pieces.push(&batch[start..end]);
            start = end;
        }
        end += text.len();
    }
    pieces.push(&batch[start..]);
    pieces
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
    fn pieces_have_no_more_tokens_or_results_than_there_is_room_for() {
        let shape = crate::ModelShape::named("smollm-135m").unwrap();
        let spec = ModelSpec::from_metadata(&shape.metadata()).unwrap();
        let batch: Vec<_> = (0..7).map(|pos| BatchToken { id: 0, seq: 0, pos, logits: pos >= 3 }).collect();
        let lengths = |n_ubatch, n_wanted| -> Vec<usize> {
            micro_batches(&spec, &batch, n_ubatch, n_wanted).iter().map(|piece| piece.len()).collect()
        };
        assert_eq!(lengths(3, 9), [3, 3, 1]);
        assert_eq!(lengths(9, 2), [5, 2]);
        assert_eq!(lengths(6, 1), [4, 1, 1, 1]);
        assert_eq!(lengths(9, 9), [7]);
    }

    #[test]
    fn a_batch_must_continue_its_sequences() {
        let token = |id, seq, pos| BatchToken { id, seq, pos, logits: true };
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
