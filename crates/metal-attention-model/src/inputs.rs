//! Inputs of a batch that are not tokens: spans of embedding rows, for instance of a picture.
//!
//! Every input has an *index* in its sequence ([`BatchToken::pos`]), which counts for pages, limits and cuts, and a
//! *position*, by which RoPE rotates. In text both advance by 1 with each token. A span gives its rows positions of up to
//! three components, which may repeat or jump; text continues at 1 more than the largest of them. So after a span the
//! positions of text differ from the indices; [`PageTable`](crate::PageTable) keeps the spans of each sequence.

use std::ops::Range;

use crate::{BatchToken, ForwardError, ModelSpec};

/// A batch: inputs that are appended to sequences, of which some may be rows of embeddings instead of token ids.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// The inputs. In the place of a span's row, `id` is the token that stands in for it where a model reads ids beside
    /// the embedding table ([`PerLayerEmbedding`](crate::PerLayerEmbedding)).
    pub tokens: &'a [BatchToken],
    /// The spans, in the order of their inputs, without overlap.
    pub spans: &'a [Span<'a>],
    /// Sequences whose inputs in the batch, except the first of each, are drafts, which may be cut back. Until the next
    /// batch such a sequence can be [rewound](crate::ForwardPass::rewind) to each of its inputs, also in models with
    /// recurrent layers, which keep the state after each of them in a slot.
    pub drafted: &'a [usize],
    /// The states that a drafter reads ([`InputEmbedding::state`](crate::InputEmbedding::state)), a row for each input: row-major
    /// `[n_tokens, state_width]` ([`ModelSpec::state_width`]). Empty for models that read none.
    pub states: &'a [f32],
    /// Context rows of a block drafter ([`ModelSpec::takes_context`]) in the place of all inputs, whose ids are not read: row-major
    /// `[n_tokens, n_embd]`. They have no results, so that no input is an output token. Empty: the batch has none; in a block drafter
    /// its inputs of each sequence, which follow each other, are a block.
    pub context: &'a [f32],
}

impl<'a> From<&'a [BatchToken]> for Batch<'a> {
    fn from(tokens: &'a [BatchToken]) -> Self {
        Self { tokens, spans: &[], drafted: &[], states: &[], context: &[] }
    }
}

/// Consecutive inputs of one sequence that are rows of embeddings.
#[derive(Debug, Clone, Copy)]
pub struct Span<'a> {
    /// The index of the first input in the batch.
    pub first: usize,
    /// The rows, row-major `[n, n_embd]` with `n` of at least 1, as they would be after the factor on the embedding table
    /// ([`InputEmbedding::scale`](crate::InputEmbedding::scale)).
    pub rows: &'a [f32],
    /// Deepstack rows (Qwen 3-VL), `[n, n_embd]` for each of the first layers: those at index `i` are added to the residual
    /// stream after layer `i`. At most `n_layer` of them.
    pub deepstack: &'a [&'a [f32]],
    /// The position of each row, `[n]`, relative to the text position at which the span begins: the position that a token of
    /// text would have there. In any order; that of the first row need not be 0. Empty: 0, 1, 2, ..., as in text.
    pub positions: &'a [Position],
    /// Whether attention within the span is bidirectional in each layer, `[n_layer]`: there its inputs attend to later ones, up to
    /// its end; how far back they attend is the mask's. Empty: in none. A span with bidirectional attention in any layer is not divided over
    /// steps, and a sequence is not cut within it.
    pub bidirectional_in: &'a [bool],
}

impl Span<'_> {
    /// Number of inputs.
    fn len(&self, n_embd: usize) -> usize {
        self.rows.len() / n_embd
    }

    /// The indices of its inputs in the batch.
    pub(crate) fn inputs(&self, n_embd: usize) -> Range<usize> {
        self.first..self.first + self.len(n_embd)
    }

    /// Whether attention within the span is bidirectional in any layer, so that it must not be divided.
    pub(crate) fn is_bidirectional(&self) -> bool {
        self.bidirectional_in.contains(&true)
    }

    /// By how much the text position behind the span exceeds the text position at which it begins: 1 more than the largest
    /// component of its positions; without positions its number of inputs, `n_inputs`.
    pub(crate) fn advance(&self, n_inputs: usize) -> u32 {
        Position::advance(self.positions, n_inputs)
    }
}

/// A position of RoPE: time, height and width of a picture's or a film's patch. In text all three are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Position(pub [u32; 3]);

impl Position {
    /// The position of a token of text.
    pub fn of_text(position: u32) -> Self {
        Self([position; 3])
    }

    /// By how much the position of the text behind a span exceeds that at which it begins: 1 more than the largest component of
    /// its relative positions; without positions its number of inputs, `n_inputs`. Saturates.
    pub fn advance(positions: &[Self], n_inputs: usize) -> u32 {
        let largest = positions.iter().flat_map(|position| position.0).max();
        largest.map_or(n_inputs as u32, |largest| largest.saturating_add(1))
    }

    /// Whether all components are equal, as in text.
    pub fn is_of_text(self) -> bool {
        let [time, height, width] = self.0;
        time == height && height == width
    }

    /// The position `start` further in each component. Saturates.
    fn moved(self, start: u32) -> Self {
        Self(self.0.map(|component| component.saturating_add(start)))
    }
}

/// The spans of a sequence in the KV cache, in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SequenceSpans {
    spans: Vec<SpanPlace>,
}

/// A span in the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanPlace {
    /// The index of its first input in the sequence.
    pub start: usize,
    /// The index behind that of its last input.
    pub end: usize,
    /// The text position at which it begins: that of a token of text in the place of its first input.
    pub position: u32,
    /// The position of the token of text that follows it.
    pub next_position: u32,
    /// Whether attention within it is bidirectional in any layer, so that the sequence is not cut within it.
    pub is_bidirectional: bool,
}

impl SequenceSpans {
    /// The spans, in the order of their inputs.
    pub fn as_slice(&self) -> &[SpanPlace] {
        &self.spans
    }

    /// Whether they follow each other within a sequence of `n` inputs, and the text behind each begins at a position of at most
    /// `n_positions`.
    pub(crate) fn are_within(&self, n: usize, n_positions: usize) -> bool {
        let mut end = 0;
        self.spans.iter().all(|span| {
            let follows = end <= span.start && span.start < span.end && span.end <= n;
            end = span.end;
            follows && span.position <= span.next_position && span.next_position as usize <= n_positions
        })
    }

    /// Appends a span, which begins at or behind the end of all others.
    pub(crate) fn push(&mut self, span: SpanPlace) {
        self.spans.push(span);
    }

    /// Whether the input at `index` is a row of one of them.
    pub fn contain(&self, index: usize) -> bool {
        self.spans.iter().any(|span| (span.start..span.end).contains(&index))
    }

    /// The position of a token of text with this index in the sequence, which no span contains. Saturates.
    pub fn text_position(&self, index: usize) -> u32 {
        let before = self.spans.iter().rev().find(|span| span.end <= index);
        let (end, position) = before.map_or((0, 0), |span| (span.end, span.next_position));
        u32::try_from(index - end).unwrap_or(u32::MAX).saturating_add(position)
    }

    /// The largest number of inputs, at most `n`, to which the sequence can be cut without cutting a span with bidirectional
    /// attention.
    pub(crate) fn reachable(&self, n: usize) -> usize {
        self.spans
            .iter()
            .find(|span| span.is_bidirectional && span.start < n && n < span.end)
            .map_or(n, |span| span.start)
    }

    /// Cuts the sequence back to `n` inputs, where [`reachable(n)`](Self::reachable) is `n`. A span that is cut ends where the
    /// sequence does. Text behind it continues at the position that would follow if the rows that are left were text, or at that
    /// which followed the uncut span if it is smaller. Rows that are left may have larger positions.
    pub(crate) fn cut(&mut self, n: usize) {
        self.spans.retain(|span| span.start < n);
        if let Some(last) = self.spans.last_mut().filter(|last| last.end > n) {
            last.next_position = last.next_position.min(last.position.saturating_add((n - last.start) as u32));
            last.end = n;
        }
    }
}

/// The part of a batch's spans that one step evaluates.
#[derive(Debug, Clone, Default)]
pub struct StepInputs {
    /// The spans, in the order of their inputs; at least one in a [`Step`](crate::Step).
    pub spans: Vec<StepSpan>,
}

/// A span, or a part of one, in a step.
#[derive(Debug, Clone)]
pub struct StepSpan {
    /// The sequence.
    pub seq: usize,
    /// The indices of its inputs in the sequence ([`BatchToken::pos`]).
    pub indices: Range<usize>,
    /// The rows of embeddings, row-major `[n, n_embd]`.
    pub rows: Vec<f32>,
    /// Deepstack rows, `[n, n_embd]` for each of the first layers: those at index `i` are added after layer `i`.
    pub deepstack: Vec<Vec<f32>>,
    /// The position by which RoPE rotates each row, `[n]`.
    pub positions: Vec<Position>,
    /// Whether attention within the span is bidirectional in each layer, `[n_layer]`; empty: in none.
    pub bidirectional_in: Vec<bool>,
}

impl StepSpan {
    /// Whether attention within the span is bidirectional in layer `layer`.
    pub fn is_bidirectional_in(&self, layer: usize) -> bool {
        self.bidirectional_in.get(layer).copied().unwrap_or(false)
    }
}

impl StepInputs {
    /// The span that contains the input `token`, and the number of its row in that span. `None`: the input is a token id.
    pub fn of_token(&self, token: &BatchToken) -> Option<(&StepSpan, usize)> {
        let span = self.spans.iter().find(|span| span.seq == token.seq && span.indices.contains(&token.pos))?;
        Some((span, token.pos - span.indices.start))
    }
}

/// Checks the spans of a batch whose tokens were checked: each is within the batch and one sequence, with rows, positions and
/// flags of the model's sizes. One that must not be divided fits in a step: `n_ubatch` inputs, `max_outputs` output tokens.
pub fn check_spans(
    spec: &ModelSpec,
    batch: Batch<'_>,
    n_ubatch: usize,
    max_outputs: usize,
) -> Result<(), ForwardError> {
    let refused = |why| Err(ForwardError::BadSpan { why });
    let (n_embd, mut end) = (spec.n_embd, 0);
    for span in batch.spans {
        let Span { first, rows, deepstack, positions, bidirectional_in } = *span;
        let n = span.len(n_embd);
        if rows.is_empty() {
            return refused("it has no rows");
        }
        if !rows.len().is_multiple_of(n_embd) {
            return refused("the length of its rows is not a multiple of n_embd");
        }
        if first < end {
            return refused("it begins before the end of the span before it");
        }
        if n > batch.tokens.len().saturating_sub(first) {
            return refused("it ends beyond the batch");
        }
        end = first + n;
        let tokens = &batch.tokens[span.inputs(n_embd)];
        if tokens.iter().any(|token| token.seq != tokens[0].seq) {
            return refused("its inputs are of several sequences");
        }
        if !deepstack.is_empty() && spec.embedding.streams.is_some() {
            return refused("it has deepstack rows, which models with several residual streams do not take");
        }
        if deepstack.len() > spec.n_layer() {
            return refused("it has deepstack rows for more layers than the model has");
        }
        if deepstack.iter().any(|of_layer| of_layer.len() != rows.len()) {
            return refused("its deepstack rows of a layer have another length than its rows");
        }
        if !(positions.is_empty() || positions.len() == n) {
            return refused("the number of its positions is neither 0 nor that of its rows");
        }
        if !(bidirectional_in.is_empty() || bidirectional_in.len() == spec.n_layer()) {
            return refused("the number of flags in bidirectional_in is neither 0 nor that of the model's layers");
        }
        if span.is_bidirectional() {
            if n > n_ubatch {
                return Err(ForwardError::SpanTooLong { n, n_ubatch });
            }
            let n_outputs = tokens.iter().filter(|token| token.output).count();
            if n_outputs > max_outputs {
                return Err(ForwardError::TooManySpanOutputs { n_outputs, max_outputs });
            }
        }
    }
    Ok(())
}

/// Checks that a batch has the states that the model reads.
pub fn check_states(spec: &ModelSpec, batch: Batch<'_>) -> Result<(), ForwardError> {
    let expected = batch.tokens.len().saturating_mul(spec.state_width());
    let found = batch.states.len();
    if found == expected { Ok(()) } else { Err(ForwardError::WrongStates { found, expected }) }
}

/// Checks that a batch has context rows or blocks where the model is a block drafter, and no context rows where it is not. Returns the
/// blocks. `n_ubatch`, `max_outputs`: most inputs and output tokens of a block.
pub fn check_blocks(
    spec: &ModelSpec,
    batch: Batch<'_>,
    n_ubatch: usize,
    max_outputs: usize,
) -> Result<Vec<Range<usize>>, ForwardError> {
    let Batch { tokens, spans, drafted: _, states: _, context } = batch;
    let expected = if spec.takes_context { tokens.len().saturating_mul(spec.n_embd) } else { 0 };
    if !context.is_empty() && context.len() != expected {
        return Err(ForwardError::WrongContext { found: context.len(), expected });
    }
    if !spec.takes_context {
        return Ok(Vec::new());
    }
    let refused = |why| Err(ForwardError::BadBlock { why });
    if !spans.is_empty() {
        return refused("it has spans");
    }
    if !context.is_empty() {
        let has_outputs = tokens.iter().any(|token| token.output);
        return if has_outputs { refused("context rows have no results") } else { Ok(Vec::new()) };
    }
    let mut blocks: Vec<Range<usize>> = Vec::new();
    for block in tokens.chunk_by(|a, b| a.seq == b.seq) {
        let start = blocks.last().map_or(0, |before| before.end);
        if blocks.iter().any(|before| tokens[before.start].seq == block[0].seq) {
            return refused("the inputs of a block do not follow each other");
        }
        if block.len() > n_ubatch || block.iter().filter(|token| token.output).count() > max_outputs {
            return refused("a block does not fit in a micro-batch: a larger micro-batch is needed");
        }
        blocks.push(start..start + block.len());
    }
    Ok(blocks)
}

/// The parts of the spans of `batch` that are in the step of its inputs `range`; `None` if there are none. `places` has the
/// place of each span in its sequence.
pub(crate) fn step_inputs(
    n_embd: usize,
    batch: Batch<'_>,
    range: &Range<usize>,
    places: &[SpanPlace],
) -> Option<StepInputs> {
    let part = |(span, place): (&Span<'_>, &SpanPlace)| {
        let inputs = span.inputs(n_embd);
        let (start, end) = (inputs.start.max(range.start), inputs.end.min(range.end));
        if start >= end {
            return None;
        }
        let rows = start - inputs.start..end - inputs.start;
        let elements = rows.start * n_embd..rows.end * n_embd;
        let position = |i: usize| match span.positions.get(i) {
            Some(position) => position.moved(place.position),
            None => Position::of_text(place.position.saturating_add(i as u32)),
        };
        Some(StepSpan {
            seq: batch.tokens[start].seq,
            indices: place.start + rows.start..place.start + rows.end,
            rows: span.rows[elements.clone()].to_vec(),
            deepstack: span.deepstack.iter().map(|rows| rows[elements.clone()].to_vec()).collect(),
            positions: rows.map(position).collect(),
            bidirectional_in: span.bidirectional_in.to_vec(),
        })
    };
    let spans: Vec<_> = batch.spans.iter().zip(places).filter_map(part).collect();
    (!spans.is_empty()).then_some(StepInputs { spans })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(start: usize, end: usize, position: u32, next_position: u32, is_bidirectional: bool) -> SpanPlace {
        SpanPlace { start, end, position, next_position, is_bidirectional }
    }

    #[test]
    fn text_continues_behind_the_largest_component() {
        let mut spans = SequenceSpans::default();
        spans.push(place(3, 15, 3, 7, true));
        spans.push(place(20, 22, 12, 14, false));
        let positions: Vec<_> = [0, 2, 15, 16, 19, 22, 30].map(|index| spans.text_position(index)).to_vec();
        assert_eq!(positions, [0, 2, 7, 8, 11, 14, 22]);
    }

    #[test]
    fn bidirectional_spans_are_not_cut() {
        let mut spans = SequenceSpans::default();
        spans.push(place(3, 15, 3, 7, true));
        spans.push(place(20, 30, 12, 22, false));
        assert_eq!([3, 4, 14, 15, 25].map(|n| spans.reachable(n)), [3, 3, 3, 15, 25]);
        spans.cut(25);
        assert_eq!(spans.as_slice()[1], place(20, 25, 12, 17, false));
        spans.cut(20);
        assert_eq!(spans.as_slice().len(), 1);
        spans.cut(3);
        assert_eq!(spans, SequenceSpans::default());
    }
}
