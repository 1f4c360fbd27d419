//! Spans of embedding rows in prompts, and the keys by which prefixes of sequences are compared.
//!
//! The tokens of a prompt are known by their ids. The rows of a span are known by the hash that the caller gives: rows
//! are not compared, and not kept longer than their request. A span is evaluated in one batch and no prefix ends within
//! it, so that two prompts either share it whole or not at all.

use std::ops::Range;
use std::sync::Arc;

use metal_attention_model::{Batch, BatchToken, ForwardError, ForwardPass, ModelSpec, Position, Span, check_spans};

/// What stands for the contents of a span in comparisons: a hash of everything from which the caller computes it, for a
/// picture the decoded pixels, the settings of the preprocessing and the encoder. Spans of one model with the same hash
/// have the same [`SpanContent`]; the KV cache gives the keys and values of one to the other, also across clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContentHash(pub [u8; 32]);

/// Rows of embeddings for consecutive inputs of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct SpanContent {
    /// What they are known by.
    pub hash: ContentHash,
    /// The rows, row-major `[n, n_embd]` ([`Span::rows`]).
    pub rows: Vec<f32>,
    /// Rows that are added to the residual stream after the first layers, `[n, n_embd]` each ([`Span::deepstack`]).
    pub deepstack: Vec<Vec<f32>>,
    /// The position of each row, `[n]`, relative to that which text would have at the first; empty: consecutive
    /// ([`Span::positions`]).
    pub positions: Vec<Position>,
    /// Whether attention within the span is bidirectional in each layer, `[n_layer]`; empty: in none
    /// ([`Span::bidirectional_in`]).
    pub bidirectional_in: Vec<bool>,
}

/// Consecutive inputs of a prompt that are rows of embeddings instead of tokens.
///
/// The prompt has ids of the vocabulary in their place. They are compared like those of tokens, and read by models that
/// read ids beside the embedding table.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptSpan {
    /// The indices of the inputs in the prompt.
    pub inputs: Range<usize>,
    /// Their rows, which prompts may share.
    pub content: Arc<SpanContent>,
}

impl PromptSpan {
    /// What the span is known by.
    pub fn key(&self) -> SpanKey {
        SpanKey { start: self.inputs.start, end: self.inputs.end, hash: self.content.hash }
    }

    /// By how much the position of the text behind the span exceeds that which text would have at its first row.
    fn advance(&self) -> usize {
        Position::advance(&self.content.positions, self.inputs.len()) as usize
    }
}

/// What a span of a sequence is known by: its place and the hash of its contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpanKey {
    /// The index of its first input in the sequence.
    pub start: usize,
    /// The index behind its last input.
    pub end: usize,
    /// The hash of its contents.
    pub hash: ContentHash,
}

/// What a sequence is known by: ids and the keys of its spans.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SequenceKey {
    /// An id for each input: of the token, or of that in the place of a row.
    pub ids: Vec<u32>,
    /// The spans, in order and without overlap; empty in most sequences.
    pub spans: Vec<SpanKey>,
}

impl From<Vec<u32>> for SequenceKey {
    /// The key of a sequence of tokens only.
    fn from(ids: Vec<u32>) -> Self {
        Self { ids, spans: Vec::new() }
    }
}

impl SequenceKey {
    /// The key of the whole sequence.
    pub(crate) fn as_prefix(&self) -> PrefixKey<'_> {
        PrefixKey { ids: &self.ids, spans: &self.spans }
    }
}

/// The key of a prefix of a sequence, borrowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PrefixKey<'a> {
    /// An id for each input.
    pub ids: &'a [u32],
    /// The spans that begin in it. The last one may end behind it.
    pub spans: &'a [SpanKey],
}

impl PrefixKey<'_> {
    /// Number of inputs.
    pub fn len(self) -> usize {
        self.ids.len()
    }

    /// The key of the first `n` inputs.
    pub fn first(self, n: usize) -> Self {
        Self { ids: &self.ids[..n], spans: &self.spans[..self.spans.partition_point(|span| span.start < n)] }
    }

    /// An owned copy.
    pub fn to_owned(self) -> SequenceKey {
        SequenceKey { ids: self.ids.to_vec(), spans: self.spans.to_vec() }
    }

    /// Length of the common prefix of two sequences: ids and spans are equal, and no span is cut.
    pub fn n_common(self, other: Self) -> usize {
        let n = self.ids.iter().zip(other.ids).take_while(|(a, b)| a == b).count();
        let n_spans = self.spans.iter().zip(other.spans).take_while(|(a, b)| a == b).count();
        let differing = self.spans.get(n_spans).into_iter().chain(other.spans.get(n_spans));
        self.uncut(differing.fold(n, |n, span| n.min(span.start)))
    }

    /// Whether the sequence begins with all of `prefix`.
    pub fn starts_with(self, prefix: Self) -> bool {
        self.ids.starts_with(prefix.ids) && self.first(prefix.len()).spans == prefix.spans
    }

    /// The longest length of at most `n` at which no span is cut.
    pub fn uncut(self, n: usize) -> usize {
        self.spans.iter().find(|span| span.start < n && n < span.end).map_or(n, |span| span.start)
    }

    /// The longest prefix of at most `n` inputs that cuts no span and that `reachable` returns as it is. `reachable(n)`
    /// returns to which prefix of at most `n` inputs a sequence with this key can be cut back.
    pub fn reachable(self, mut n: usize, reachable: impl Fn(usize) -> usize) -> usize {
        loop {
            let reached = reachable(n);
            n = self.uncut(reached);
            if n == reached {
                return n;
            }
        }
    }

    /// How many inputs to evaluate at once, from input `start` on, when `n` are wanted: fewer, up to a span that would
    /// be divided, or more, if a span begins at `start` that is longer than `n`.
    pub fn chunk(self, start: usize, n: usize) -> usize {
        let end = start + n;
        match self.spans.iter().find(|span| span.start < end && end < span.end) {
            None => n,
            Some(span) if span.start > start => span.start - start,
            Some(span) => span.end - start,
        }
    }
}

/// The keys of a prompt's spans.
pub(crate) fn span_keys(spans: &[PromptSpan]) -> Vec<SpanKey> {
    spans.iter().map(PromptSpan::key).collect()
}

/// Cuts sequence `seq`, which has this key, back to its first `n` inputs, or fewer, so that no span is cut. Returns the
/// length.
pub(crate) fn rewind(pass: &mut dyn ForwardPass, seq: usize, key: PrefixKey<'_>, mut n: usize) -> usize {
    loop {
        let reached = pass.rewind(seq, n);
        n = key.uncut(reached);
        if n == reached {
            return n;
        }
    }
}

/// What a forward pass allows of prompts.
#[derive(Debug, Clone)]
pub(crate) struct PromptLimits {
    /// The model.
    pub spec: ModelSpec,
    /// Maximum tokens of a micro-batch.
    pub n_ubatch: usize,
    /// Positions that a sequence can reach.
    pub n_positions: usize,
}

impl PromptLimits {
    /// The limits of `pass`.
    pub fn of(pass: &dyn ForwardPass) -> Self {
        let pages = pass.cache_pages();
        Self {
            spec: pass.spec().clone(),
            n_ubatch: pass.n_ubatch(),
            n_positions: pass.n_ctx().min(pages.total.saturating_mul(pages.page_len)),
        }
    }

    /// Checks the spans of a prompt. Returns the most inputs that a sequence with this prompt can have by its positions,
    /// which behind spans may exceed the indices of its tokens; without spans they set no limit (`usize::MAX`).
    ///
    /// # Errors
    /// Those with which a session would refuse a batch with these spans, and `BadSpan` for a prompt that ends with one:
    /// the last input of a prompt is evaluated alone at times.
    pub fn check(&self, prompt: &[u32], spans: &[PromptSpan]) -> Result<usize, ForwardError> {
        let Self { spec, n_ubatch, n_positions } = self;
        let Some(last) = spans.last() else { return Ok(usize::MAX) };
        let n_rows = |span: &PromptSpan| span.content.rows.len() / spec.n_embd.max(1);
        if spans.iter().any(|span| n_rows(span) != span.inputs.len()) {
            return Err(ForwardError::BadSpan { why: "it has not one row for each of its inputs" });
        }
        let token = |(pos, &id)| BatchToken { id, seq: 0, pos, output: false };
        let tokens: Vec<_> = prompt.iter().enumerate().map(token).collect();
        let all = |span: &PromptSpan| BatchSpan { first: span.inputs.start, content: Arc::clone(&span.content) };
        let all: Vec<_> = spans.iter().map(all).collect();
        with_batch(&tokens, &all, &[], |batch| check_spans(spec, batch, *n_ubatch, usize::MAX))?;
        if last.inputs.end == prompt.len() {
            return Err(ForwardError::BadSpan { why: "the prompt ends with it; put a token behind it" });
        }
        let advance = spans.iter().map(PromptSpan::advance).fold(0, usize::saturating_add);
        let n_inputs: usize = spans.iter().map(|span| span.inputs.len()).sum();
        let last_position = (prompt.len() - 1 - n_inputs).saturating_add(advance);
        if last_position >= *n_positions {
            let position = u32::try_from(last_position).unwrap_or(u32::MAX);
            return Err(ForwardError::PositionOutOfRange { position, n_ctx: *n_positions });
        }
        Ok(n_positions - advance.saturating_sub(n_inputs))
    }
}

/// A span of a batch.
#[derive(Debug, Clone)]
pub(crate) struct BatchSpan {
    /// The index of its first input in the batch.
    first: usize,
    /// Its rows.
    content: Arc<SpanContent>,
}

impl BatchSpan {
    /// Those of `spans` that begin within `inputs` of their sequence, for a batch whose input `first` is the first of
    /// these.
    pub fn within(spans: &[PromptSpan], inputs: Range<usize>, first: usize) -> impl Iterator<Item = Self> {
        let start = inputs.start;
        let within = spans.iter().filter(move |span| inputs.contains(&span.inputs.start));
        within.map(move |span| Self { first: first + span.inputs.start - start, content: Arc::clone(&span.content) })
    }
}

/// Calls `run` with the batch of `tokens` and `spans`, in which the sequences `drafted` have drafts ([`Batch::drafted`]).
pub(crate) fn with_batch<R>(
    tokens: &[BatchToken],
    spans: &[BatchSpan],
    drafted: &[usize],
    run: impl FnOnce(Batch<'_>) -> R,
) -> R {
    let mut deepstack: Vec<Vec<&[f32]>> = Vec::new();
    for span in spans {
        deepstack.push(span.content.deepstack.iter().map(Vec::as_slice).collect());
    }
    let of_batch = spans.iter().zip(&deepstack).map(|(BatchSpan { first, content }, deepstack)| Span {
        first: *first,
        rows: &content.rows,
        deepstack,
        positions: &content.positions,
        bidirectional_in: &content.bidirectional_in,
    });
    let spans: Vec<_> = of_batch.collect();
    run(Batch { tokens, spans: &spans, drafted, states: &[], context: &[] })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spans at these places with these hashes.
    fn spans(spans: &[(usize, usize, u8)]) -> Vec<SpanKey> {
        spans.iter().map(|&(start, end, hash)| SpanKey { start, end, hash: ContentHash([hash; 32]) }).collect()
    }

    #[test]
    fn prefixes_are_equal_in_ids_and_spans() {
        let of = |ids: &[u32], of: &[(usize, usize, u8)]| SequenceKey { ids: ids.to_vec(), spans: spans(of) };
        let key = of(&[1, 7, 7, 2, 7, 7, 3], &[(1, 3, 1), (4, 6, 2)]);
        let n_common = |other: &SequenceKey| {
            let n = key.as_prefix().n_common(other.as_prefix());
            assert_eq!(other.as_prefix().n_common(key.as_prefix()), n);
            assert_eq!(key.as_prefix().starts_with(other.as_prefix()), n == other.ids.len());
            n
        };
        assert_eq!(n_common(&key), 7);
        assert_eq!(n_common(&of(&[1, 7, 7, 2, 7, 7], &[(1, 3, 1), (4, 6, 2)])), 6);
        assert_eq!(n_common(&of(&[1, 7, 7, 2, 7, 7], &[(1, 3, 1), (4, 6, 3)])), 4);
        assert_eq!(n_common(&of(&[1, 7, 7, 2, 7, 7], &[(1, 3, 1)])), 4);
        assert_eq!(n_common(&of(&[1, 7, 7, 2, 7, 7], &[(4, 6, 2)])), 1);
        assert_eq!(n_common(&of(&[1, 7, 7, 2], &[(0, 1, 1), (1, 3, 1)])), 0);
        // Ids that differ within a span.
        assert_eq!(n_common(&of(&[1, 7, 8, 2], &[(1, 3, 1)])), 1);
        assert_eq!(n_common(&of(&[1, 7, 7, 9], &[(1, 3, 1)])), 3);
        assert_eq!(n_common(&of(&[], &[])), 0);
        // A sequence of which a part of a span was evaluated.
        assert_eq!(key.as_prefix().n_common(key.as_prefix().first(5)), 4);
        assert_eq!((key.as_prefix().first(4).spans.len(), key.as_prefix().first(5).spans.len()), (1, 2));
    }

    #[test]
    fn neither_cuts_nor_chunks_divide_spans() {
        let spans = spans(&[(3, 9, 1), (9, 12, 2)]);
        let key = PrefixKey { ids: &[0; 20], spans: &spans };
        assert_eq!([2, 3, 4, 8, 9, 11, 12, 20].map(|n| key.uncut(n)), [2, 3, 3, 3, 9, 9, 12, 20]);
        // A sequence that can be continued from multiples of 5 only.
        assert_eq!([20, 14, 12, 9, 5].map(|n| key.reachable(n, |n| n / 5 * 5)), [20, 0, 0, 0, 0]);
        let chunks = [(0, 2), (0, 3), (0, 5), (0, 9), (0, 10), (3, 1), (3, 6), (3, 8), (9, 1), (12, 5)];
        assert_eq!(chunks.map(|(start, n)| key.chunk(start, n)), [2, 3, 3, 9, 9, 6, 6, 6, 3, 5]);
    }
}
