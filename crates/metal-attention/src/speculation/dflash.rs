//! [`DflashDrafter`]: drafts of a block drafter (DFlash, DFlash-2, DSpark) in a file beside the model's.
//!
//! A block drafter is a model of a few layers that keeps keys and values of the target's hidden rows: its *context*, one row for each
//! token that the target has evaluated. A proposal is one step of it: the last token of the text and mask tokens are a *block*, which
//! attends to the context and to itself; each place of the block proposes a token. Then the block is cut back. So nothing of a
//! proposal is kept, and the context grows by the rows of the tokens that held.

use std::ops::Range;

use metal_attention_model::{
    Batch, BatchToken, BlockChoiceWeights, DflashSpec, ForwardError, ForwardPass, HeadUse, HiddenRequest, LoadedDflash,
    Logits, MemoryUse, OutputKind, Outputs, TopK, TracedTokens, argmax, highest,
};

use super::block_selector::BlockSelector;
use super::head_sequence::HeadSequence;
use super::projection::StateProjection;
use super::{Draft, DraftLogits, DraftRequest, Drafter, Evaluated};
use crate::backends::BackendPass;
use crate::{EngineOptions, Error};

/// Proposes drafts with a block drafter.
pub struct DflashDrafter {
    spec: DflashSpec,
    /// From the target's hidden rows to context rows.
    projection: StateProjection,
    /// The layers: context and blocks.
    block: Box<dyn ForwardPass>,
    choice: Choice,
    /// What is known of each sequence of the target, with the context rows as states.
    sequences: Vec<HeadSequence>,
}

/// How the drafts of a block are chosen: see [`BlockChoice`](metal_attention_model::BlockChoice).
enum Choice {
    /// The likeliest of each place.
    Likeliest,
    /// By a selector among the likeliest of each place.
    Selector(Box<BlockSelector>),
    /// By the sum of a place's logits and those of a model of bigrams behind the token before it.
    Markov(Box<dyn ForwardPass>),
}

/// A request that gets drafts.
#[derive(Clone, Copy)]
struct Open<'a> {
    /// Its index among the requests.
    request: usize,
    /// The sequence.
    seq: usize,
    /// All of its tokens.
    ids: &'a [u32],
    /// Drafts to propose, at least one.
    n: usize,
}

impl DflashDrafter {
    /// Sets up the drafter `loaded` on the device of `target`, beside whose model it was loaded.
    ///
    /// # Errors
    /// It is not supported on the device, does not fit in memory, or several devices share the target.
    pub fn beside(loaded: &LoadedDflash, target: &dyn BackendPass, options: &EngineOptions) -> Result<Self, Error> {
        let projection = StateProjection::beside(&loaded.projection, &loaded.spec.target_layers, target, options)?;
        let choice = match &loaded.choice {
            BlockChoiceWeights::Likeliest => Choice::Likeliest,
            BlockChoiceWeights::Selector(weights) => Choice::Selector(Box::new(BlockSelector::new(weights))),
            BlockChoiceWeights::Markov(bigrams) => Choice::Markov(target.beside(bigrams, options)?),
        };
        let block: Box<dyn ForwardPass> = target.beside(&loaded.model, options)?;
        let n_embd = block.spec().n_embd;
        let sequences = (0..block.n_seq()).map(|_| HeadSequence::new(HeadUse::Repeated, 1, n_embd)).collect();
        Ok(Self { spec: loaded.spec.clone(), projection, block, choice, sequences })
    }

    /// The most drafts that it proposes for a sequence.
    pub fn max_drafts(&self) -> usize {
        self.spec.max_drafts()
    }

    fn propose_to(
        &mut self,
        requests: &[DraftRequest<'_>],
        logits: Option<DraftLogits<'_>>,
    ) -> Result<Vec<Draft>, ForwardError> {
        let mut drafts = vec![Draft::default(); requests.len()];
        let mut open = Vec::new();
        for (request, &DraftRequest { seq, ids, prediction: _, n }) in requests.iter().enumerate() {
            let n = self.accept(seq, ids, n)?;
            if n > 0 {
                open.push(Open { request, seq, ids, n });
            }
        }
        if open.is_empty() {
            return Ok(drafts);
        }
        let mut context = ContextBatch::default();
        for &Open { seq, ids, .. } in &open {
            self.read_context(seq, &ids[..ids.len() - 1], &mut context);
        }
        self.store(&context)?;
        let lengths: Vec<usize> = open.iter().map(|open| self.block.n_past(open.seq)).collect();
        let chosen = self.evaluate_blocks(&open, logits);
        for (open, n) in open.iter().zip(lengths) {
            self.block.rewind(open.seq, n);
        }
        for (open, chosen) in open.iter().zip(chosen?) {
            drafts[open.request].ids = chosen;
        }
        Ok(drafts)
    }

    /// Compares the tokens of a request with what is known of its sequence. Returns how many of `n` drafts can be proposed.
    fn accept(&mut self, seq: usize, ids: &[u32], n: usize) -> Result<usize, ForwardError> {
        let n_seq = self.sequences.len();
        let sequence = self.sequences.get_mut(seq).ok_or(ForwardError::SequenceOutOfRange { seq, n_seq })?;
        if ids.is_empty() || !sequence.follow(ids) {
            return Ok(0);
        }
        // A block lies behind the context, and in one micro-batch.
        let first = self.spec.first_draft();
        let room = (self.block.n_ctx() + 1).saturating_sub(ids.len()).min(self.block.n_ubatch());
        Ok(n.min(self.spec.max_drafts()).min(room.saturating_sub(first)))
    }

    /// Appends to `context` the rows of `ids`, which the target has evaluated, that the drafter has not read.
    fn read_context(&mut self, seq: usize, ids: &[u32], context: &mut ContextBatch) {
        let (pass, sequence) = (&mut self.block, &mut self.sequences[seq]);
        let read = sequence.read(0, ids);
        let reached = pass.rewind(seq, read.end - read.start);
        let mut start = read.start;
        if sequence.first_row() > start + reached {
            // The rows that lie between are not known: the context begins anew at the first that is.
            pass.rewind(seq, 0);
            start = sequence.first_row();
        }
        for position in start + pass.n_past(seq)..ids.len() {
            context.push(seq, position - start, sequence.state_before(position + 1));
        }
        sequence.set_read(0, start, ids);
    }

    /// Stores the keys and values of context rows.
    fn store(&mut self, context: &ContextBatch) -> Result<(), ForwardError> {
        if context.tokens.is_empty() {
            return Ok(());
        }
        let batch = Batch { context: &context.rows, ..Batch::from(&context.tokens[..]) };
        match self.block.forward_outputs(batch, OutputKind::Hidden, &[]) {
            Ok(_) => Ok(()),
            Err(why) => {
                // What was read is not known now.
                for token in &context.tokens {
                    self.sequences[token.seq].forget_read(0);
                }
                Err(why)
            }
        }
    }

    /// Evaluates a block for each of `open`. Returns the drafts of each.
    fn evaluate_blocks(
        &mut self,
        open: &[Open<'_>],
        mut logits: Option<DraftLogits<'_>>,
    ) -> Result<Vec<Vec<u32>>, ForwardError> {
        let first = self.spec.first_draft();
        let mut tokens = Vec::new();
        for &Open { seq, ids, n, .. } in open {
            let start = self.block.n_past(seq);
            let anchor = ids.last().copied();
            let block = anchor.into_iter().chain(std::iter::repeat(self.spec.mask_token)).take(self.spec.block_len(n));
            let token = |(i, id)| BatchToken { id, seq, pos: start + i, output: i >= first };
            tokens.extend(block.enumerate().map(token));
        }
        let places = places(open);
        let n_layer = self.block.spec().n_layer();
        let (kind, before): (_, &[usize]) = match (&self.choice, &logits) {
            (Choice::Likeliest, None) => (OutputKind::Ids, &[]),
            (Choice::Selector(selector), None) => (OutputKind::TopK(selector.top_k()), &[n_layer + 1]),
            (Choice::Selector(_), Some(_)) => (OutputKind::Logits, &[n_layer + 1]),
            (Choice::Likeliest, Some(_)) | (Choice::Markov(_), _) => (OutputKind::Logits, &[]),
        };
        let request = HiddenRequest { before, tokens: TracedTokens::Output };
        let (outputs, hidden) = self.block.forward_with_hidden(Batch::from(&tokens[..]), kind, request)?;
        match (&mut self.choice, outputs) {
            (Choice::Likeliest, Outputs::Ids(ids)) => Ok(places.into_iter().map(|of| ids[of].to_vec()).collect()),
            (Choice::Likeliest, Outputs::Logits(all)) => {
                pass_on_rows(open, &places, all, &mut logits);
                Ok(places.into_iter().map(|of| of.map(|row| argmax(all.row(row))).collect()).collect())
            }
            (Choice::Selector(selector), outputs) => {
                let candidates: Vec<TopK> = match outputs {
                    Outputs::TopK(lists) => lists,
                    Outputs::Logits(all) => {
                        pass_on_rows(open, &places, all, &mut logits);
                        (0..all.n_rows()).map(|row| highest(all.row(row), selector.top_k())).collect()
                    }
                    Outputs::Hidden(_) | Outputs::Ids(_) => return Err(other_results()),
                };
                let choose = |(open, of): (&Open<'_>, Range<usize>)| {
                    selector.choose(open.ids, &candidates[of.clone()], hidden.rows_of_layer(0, of))
                };
                Ok(open.iter().zip(places).map(choose).collect())
            }
            (Choice::Markov(bigrams), Outputs::Logits(all)) => {
                add_bigrams(&mut **bigrams, open, &places, all.as_slice().to_vec(), logits)
            }
            (Choice::Likeliest, Outputs::Hidden(_) | Outputs::TopK(_))
            | (Choice::Markov(_), Outputs::Hidden(_) | Outputs::Ids(_) | Outputs::TopK(_)) => Err(other_results()),
        }
    }
}

/// The rows of the drafts of each of `open` among the rows of all.
fn places(open: &[Open<'_>]) -> Vec<Range<usize>> {
    let mut end = 0;
    let of = |open: &Open<'_>| {
        end += open.n;
        end - open.n..end
    };
    open.iter().map(of).collect()
}

/// Passes on the rows of all drafts.
fn pass_on_rows(open: &[Open<'_>], places: &[Range<usize>], all: Logits<'_>, logits: &mut Option<DraftLogits<'_>>) {
    let Some(pass_on) = logits else { return };
    for (open, of) in open.iter().zip(places) {
        for (draft, row) in of.clone().enumerate() {
            pass_on(open.request, draft, all.row(row));
        }
    }
}

/// The error for other results than were requested, which a session does not return.
fn other_results() -> ForwardError {
    ForwardError::Device { why: "other results were returned than requested".into() }
}

/// Chooses the drafts of `open` one after another, by the sum of their rows in `all` and those of `bigrams` behind the token before.
fn add_bigrams(
    bigrams: &mut dyn ForwardPass,
    open: &[Open<'_>],
    places: &[Range<usize>],
    mut all: Vec<f32>,
    mut logits: Option<DraftLogits<'_>>,
) -> Result<Vec<Vec<u32>>, ForwardError> {
    let n_vocab = bigrams.spec().n_vocab;
    let mut drafts: Vec<Vec<u32>> = open.iter().map(|_| Vec::new()).collect();
    for draft in 0..open.iter().map(|open| open.n).max().unwrap_or(0) {
        let active: Vec<usize> = (0..open.len()).filter(|&i| open[i].n > draft).collect();
        let before = |i: usize| drafts[i].last().or(open[i].ids.last()).copied().unwrap_or_default();
        let token = |&i: &usize| BatchToken { id: before(i), seq: open[i].seq, pos: 0, output: true };
        let tokens: Vec<_> = active.iter().map(token).collect();
        // Without layers nothing is kept of a sequence.
        for token in &tokens {
            bigrams.rewind(token.seq, 0);
        }
        let added = bigrams.forward(&tokens)?;
        for (row, &i) in active.iter().enumerate() {
            let sum = &mut all[(places[i].start + draft) * n_vocab..][..n_vocab];
            sum.iter_mut().zip(added.row(row)).for_each(|(sum, added)| *sum += added);
            if let Some(pass_on) = &mut logits {
                pass_on(open[i].request, draft, sum);
            }
            drafts[i].push(argmax(sum));
        }
    }
    Ok(drafts)
}

impl Drafter for DflashDrafter {
    fn name(&self) -> &'static str {
        "dflash"
    }

    fn reads_hidden(&self) -> &[usize] {
        self.projection.reads()
    }

    fn observe(&mut self, evaluated: Evaluated<'_>) -> Result<(), ForwardError> {
        let Evaluated { seq, first, ids, hidden } = evaluated;
        let n_seq = self.sequences.len();
        if seq >= n_seq {
            return Err(ForwardError::SequenceOutOfRange { seq, n_seq });
        }
        let rows = self.projection.project(ids.len(), hidden)?;
        let sequence = &mut self.sequences[seq];
        sequence.observe(first, ids, &rows);
        // Otherwise the next proposal reads them.
        if sequence.n_unread(0) >= self.block.n_ubatch() {
            let (ids, mut context) = (sequence.ids().to_vec(), ContextBatch::default());
            self.read_context(seq, &ids, &mut context);
            self.store(&context)?;
        }
        self.sequences[seq].drop_old_states();
        Ok(())
    }

    fn forget(&mut self, seq: usize) {
        if let Some(sequence) = self.sequences.get_mut(seq) {
            *sequence = HeadSequence::new(HeadUse::Repeated, 1, self.block.spec().n_embd);
            self.block.rewind(seq, 0);
        }
    }

    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Draft>, ForwardError> {
        self.propose_to(requests, None)
    }

    /// The logits of a selector are those of the places whose candidates it chooses among.
    fn propose_with_logits(
        &mut self,
        requests: &[DraftRequest<'_>],
        logits: DraftLogits<'_>,
    ) -> Result<Vec<Draft>, ForwardError> {
        self.propose_to(requests, Some(logits))
    }

    fn memory_use(&self) -> MemoryUse {
        let mut sum = self.block.memory_use();
        sum += self.projection.memory_use();
        match &self.choice {
            Choice::Likeliest => {}
            Choice::Selector(selector) => sum.weights += selector.bytes() as u64,
            Choice::Markov(bigrams) => sum += bigrams.memory_use(),
        }
        sum.scratch += self.sequences.iter().map(HeadSequence::bytes).sum::<usize>() as u64;
        sum
    }
}

/// Context rows of several sequences.
#[derive(Default)]
struct ContextBatch {
    tokens: Vec<BatchToken>,
    /// `[n_tokens, n_embd]`.
    rows: Vec<f32>,
}

impl ContextBatch {
    fn push(&mut self, seq: usize, pos: usize, row: &[f32]) {
        // The row is in the place of a token.
        self.tokens.push(BatchToken { id: 0, seq, pos, output: false });
        self.rows.extend_from_slice(row);
    }
}
