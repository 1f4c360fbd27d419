//! A drafter that is a second, smaller model.

use metal_attention_model::{BatchToken, ModelSpec, OutputKind, Outputs, PAGE, TopK, highest};

use super::token_map::TokenMap;
use super::{Draft, DraftLogits, DraftRequest, Drafter};
use crate::{EngineOptions, Error, ForwardError, ForwardPass, MemoryUse, Model};

/// The length of the lists among which the probability of a draft is taken: [`DraftModelOptions::p_min`].
const N_CANDIDATES: usize = 10;

/// Why a model cannot draft for another one.
#[derive(Debug, thiserror::Error)]
pub enum DraftModelError {
    /// The draft model is for embeddings or for ranking documents.
    #[error("the draft model writes no text, so it cannot propose tokens: use a model that generates text")]
    NoText,
    /// The vocabularies share nearly nothing.
    #[error(
        "the draft model's vocabulary is another one: only {n_shared} tokens have the same text, of {n_draft} in the draft model and \
         {n_target} in the model, so that its drafts could not hold: use a smaller model of the same family"
    )]
    OtherVocabulary {
        /// Tokens of the target that the draft model has, too.
        n_shared: usize,
        /// Tokens of the target with a text.
        n_target: usize,
        /// Tokens of the draft model with a text.
        n_draft: usize,
    },
    /// [`DraftModelOptions::p_min`] is no probability.
    #[error("the smallest probability of a draft is {p_min}: give a number from 0 to 1")]
    NoProbability {
        /// The number.
        p_min: f32,
    },
}

/// Options of a [`DraftModel`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DraftModelOptions {
    /// Ends a proposal before the first token whose probability is lower. `None`: proposals are as long as requested, and each
    /// of them takes the device the id of the highest logit alone.
    ///
    /// The probability is that among the ten likeliest tokens, which is no lower than the one among all: a list of ten costs
    /// little more than the highest logit, whereas the sum over a vocabulary needs all of its logits.
    pub p_min: Option<f32>,
}

/// Proposes what another model would generate greedily.
///
/// The draft model keeps a KV cache of its own, with what it has evaluated of each sequence and its drafts. A request first
/// evaluates the tokens that the cache lacks, at least one, in prefill chunks, then a draft a step; the sequences of all
/// requests share these steps. A sequence that is longer than the context of the draft model gets no drafts.
///
/// The draft model may have another vocabulary. Tokens then correspond by their texts: a token of the target that the draft
/// model lacks is encoded anew there, and a draft that the target lacks ends the proposal.
pub struct DraftModel {
    /// The forward pass of the draft model.
    pass: Box<dyn ForwardPass>,
    /// How the vocabularies correspond.
    map: TokenMap,
    /// Size of the target's vocabulary.
    n_vocab: usize,
    /// Options.
    options: DraftModelOptions,
    /// What is known of each sequence, `[n_seq of the target]`.
    sequences: Vec<DraftSequence>,
    /// Whether drafts are evaluated in a copy of their sequence, number `sequences.len() + seq` of the forward pass: a recurrent
    /// state cannot be cut back to the end of the sequence afterwards.
    copies: bool,
}

/// What a [`DraftModel`] keeps of a sequence.
#[derive(Debug, Default)]
struct DraftSequence {
    /// The target's tokens of the last request.
    ids: Vec<u32>,
    /// The draft model's tokens for them.
    tokens: Vec<u32>,
    /// Where those of each of `ids` end.
    ends: Vec<usize>,
    /// The tokens in the KV cache, drafts among them; there may be fewer in the cache.
    evaluated: Vec<u32>,
}

/// A token that the draft model chose.
struct Choice {
    /// Its id in the draft model's vocabulary.
    token: u32,
    /// Its probability among the [`N_CANDIDATES`] likeliest; 1 where that was not requested.
    probability: f32,
    /// The logits, `[n_vocab of the draft model]`; empty where they were not requested.
    logits: Vec<f32>,
}

impl DraftModel {
    /// Sets up a forward pass of `draft` with the sequences of `engine`, as many as the target has.
    ///
    /// # Errors
    /// The vocabularies share nearly nothing, one of them is not supported, the draft model generates no text, an option is out
    /// of range, or the forward pass cannot be set up.
    pub fn new(
        target: &Model,
        draft: &Model,
        engine: &EngineOptions,
        options: DraftModelOptions,
    ) -> Result<Self, Error> {
        let map = checked(target, draft, options)?;
        let mut engine = engine.clone();
        if has_states(draft.spec()) {
            // The copies share the pages of their sequences, but for the last one, and add some for the drafts.
            let n_seq = engine.n_seq;
            let n_cache = engine.n_cache.unwrap_or_else(|| engine.n_ctx_of(draft).saturating_mul(n_seq));
            engine.n_cache = Some(n_cache.saturating_add(2 * PAGE * n_seq));
            engine.n_seq = 2 * n_seq;
        }
        Ok(Self::over(target, map, draft.forward_pass(&engine)?, options))
    }

    /// A drafter over a forward pass of `draft`. If the draft model has recurrent layers, the second half of its sequences is
    /// for copies: it needs twice as many as the target.
    ///
    /// # Errors
    /// As [`new`](Self::new), but for the forward pass.
    pub fn with_pass(
        target: &Model,
        draft: &Model,
        pass: Box<dyn ForwardPass>,
        options: DraftModelOptions,
    ) -> Result<Self, Error> {
        Ok(Self::over(target, checked(target, draft, options)?, pass, options))
    }

    fn over(target: &Model, map: TokenMap, pass: Box<dyn ForwardPass>, options: DraftModelOptions) -> Self {
        let copies = has_states(pass.spec());
        let n_seq = if copies { pass.n_seq() / 2 } else { pass.n_seq() };
        let sequences = (0..n_seq).map(|_| DraftSequence::default()).collect();
        Self { pass, map, n_vocab: target.spec().n_vocab, options, sequences, copies }
    }

    /// The drafts for each request with what the draft model chose, from results of kind `kind`.
    fn draft(
        &mut self,
        requests: &[DraftRequest<'_>],
        kind: OutputKind,
    ) -> Result<Vec<Vec<(u32, Choice)>>, ForwardError> {
        let mut drafts: Vec<Vec<(u32, Choice)>> = requests.iter().map(|_| Vec::new()).collect();
        let (mut batch, mut active, mut wanted) = (Vec::new(), Vec::new(), vec![0; requests.len()]);
        for (i, request) in requests.iter().enumerate() {
            wanted[i] = self.prepare(request, &mut batch)?;
            active.extend((wanted[i] > 0).then_some(i));
        }
        let mut n_steps = 0;
        while !active.is_empty() {
            let choices = self.evaluate(&batch, kind, requests)?;
            batch.clear();
            let mut remaining = Vec::new();
            for (i, choice) in active.into_iter().zip(choices) {
                let likely = |choice: &Choice| self.options.p_min.is_none_or(|p_min| choice.probability >= p_min);
                let Some(choice) = choice.filter(likely) else { continue };
                let Some(id) = self.map.to_target(choice.token) else { continue };
                let (seq, token) = (requests[i].seq, choice.token);
                drafts[i].push((id, choice));
                if drafts[i].len() < wanted[i] {
                    let seq = self.sequence_of_drafts(seq, n_steps == 0)?;
                    batch.push(BatchToken { id: token, seq, pos: self.pass.n_past(seq), output: true });
                    remaining.push(i);
                }
            }
            active = remaining;
            n_steps += 1;
        }
        if self.copies {
            for request in requests {
                self.pass.rewind(self.sequences.len() + request.seq, 0);
            }
        }
        Ok(drafts)
    }

    /// Cuts the KV cache of a request's sequence back to what it has in common with its tokens, and appends the others to
    /// `batch`, at least the last one. Returns how many drafts the context has room for; 0, with nothing appended, if none.
    fn prepare(&mut self, request: &DraftRequest<'_>, batch: &mut Vec<BatchToken>) -> Result<usize, ForwardError> {
        let &DraftRequest { seq, ids, prediction: _, n } = request;
        let n_seq = self.sequences.len();
        let sequence = self.sequences.get_mut(seq).ok_or(ForwardError::SequenceOutOfRange { seq, n_seq })?;
        sequence.follow(ids, &self.map);
        let tokens = &sequence.tokens;
        // The last draft is not evaluated.
        let n = n.min((self.pass.n_ctx() + 1).saturating_sub(tokens.len()));
        let Some(last) = tokens.len().checked_sub(1).filter(|_| n > 0) else { return Ok(0) };
        sequence.evaluated.truncate(self.pass.n_past(seq));
        let reached = self.pass.rewind(seq, n_common(&sequence.evaluated, &tokens[..last]));
        sequence.evaluated.truncate(reached);
        let token = |(pos, &id)| BatchToken { id, seq, pos, output: pos == last };
        batch.extend(tokens.iter().enumerate().skip(reached).map(token));
        Ok(n)
    }

    /// The sequence of the forward pass in which the drafts for sequence `seq` are evaluated. `first`: before the first one.
    fn sequence_of_drafts(&mut self, seq: usize, first: bool) -> Result<usize, ForwardError> {
        if !self.copies {
            return Ok(seq);
        }
        let copy = self.sequences.len() + seq;
        if first {
            self.pass.share_prefix(seq, copy, self.pass.n_past(seq))?;
        }
        Ok(copy)
    }

    /// Evaluates `batch` in prefill chunks. Returns the choice for each of its output tokens; `None` if no logit is a number. For
    /// want of pages the sequences without a request lose theirs.
    fn evaluate(
        &mut self,
        batch: &[BatchToken],
        kind: OutputKind,
        requests: &[DraftRequest<'_>],
    ) -> Result<Vec<Option<Choice>>, ForwardError> {
        let mut choices = Vec::new();
        for chunk in batch.chunks(self.pass.n_ubatch()) {
            let mut outcome = choose(&mut *self.pass, chunk, kind);
            if matches!(outcome, Err(ForwardError::OutOfPages { .. } | ForwardError::OutOfStates { .. })) {
                for seq in 0..self.sequences.len() {
                    if requests.iter().all(|request| request.seq != seq) {
                        self.pass.rewind(seq, 0);
                    }
                }
                outcome = choose(&mut *self.pass, chunk, kind);
            }
            choices.extend(outcome?);
            for token in chunk {
                // Copies are not kept.
                if let Some(sequence) = self.sequences.get_mut(token.seq) {
                    sequence.evaluated.push(token.id);
                }
            }
        }
        Ok(choices)
    }
}

impl Drafter for DraftModel {
    fn name(&self) -> &'static str {
        "draft"
    }

    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Draft>, ForwardError> {
        let kind = match self.options.p_min {
            None => OutputKind::Ids,
            Some(_) => OutputKind::TopK(N_CANDIDATES),
        };
        Ok(ids(self.draft(requests, kind)?))
    }

    fn propose_with_logits(
        &mut self,
        requests: &[DraftRequest<'_>],
        logits: DraftLogits<'_>,
    ) -> Result<Vec<Draft>, ForwardError> {
        let proposals = self.draft(requests, OutputKind::Logits)?;
        let mut row = vec![f32::NEG_INFINITY; self.n_vocab];
        for (request, drafts) in proposals.iter().enumerate() {
            for (draft, (_, choice)) in drafts.iter().enumerate() {
                row.fill(f32::NEG_INFINITY);
                for (token, &logit) in (0..).zip(&choice.logits) {
                    if let Some(place) = self.map.to_target(token).and_then(|id| row.get_mut(id as usize)) {
                        *place = place.max(logit);
                    }
                }
                logits(request, draft, &row);
            }
        }
        Ok(ids(proposals))
    }

    fn forget(&mut self, seq: usize) {
        if let Some(sequence) = self.sequences.get_mut(seq) {
            *sequence = DraftSequence::default();
            self.pass.rewind(seq, 0);
        }
    }

    fn memory_use(&self) -> MemoryUse {
        let of_sequences: usize = self.sequences.iter().map(DraftSequence::bytes).sum();
        let memory = self.pass.memory_use();
        MemoryUse { scratch: memory.scratch + (self.map.bytes() + of_sequences) as u64, ..memory }
    }
}

impl DraftSequence {
    /// Replaces the target's tokens by `ids`, and the draft model's by those for them.
    fn follow(&mut self, ids: &[u32], map: &TokenMap) {
        let n = n_common(&self.ids, ids);
        self.ids.truncate(n);
        self.ends.truncate(n);
        self.tokens.truncate(self.ends.last().copied().unwrap_or(0));
        for &id in &ids[n..] {
            map.to_draft(id, self.ids.is_empty(), &mut self.tokens);
            self.ids.push(id);
            self.ends.push(self.tokens.len());
        }
    }

    /// Bytes of its lists.
    fn bytes(&self) -> usize {
        size_of::<u32>() * (self.ids.capacity() + self.tokens.capacity() + self.evaluated.capacity())
            + size_of::<usize>() * self.ends.capacity()
    }
}

/// The target's tokens of all proposals.
fn ids(proposals: Vec<Vec<(u32, Choice)>>) -> Vec<Draft> {
    let ids = |drafts: Vec<(u32, Choice)>| drafts.into_iter().map(|(id, _)| id).collect();
    proposals.into_iter().map(|drafts| Draft { ids: ids(drafts), confidence: Vec::new() }).collect()
}

/// Whether a model has recurrent layers.
fn has_states(spec: &ModelSpec) -> bool {
    spec.layers.iter().any(|layer| layer.state_elements() > 0)
}

/// Checks the models and the options, and compares the vocabularies.
fn checked(target: &Model, draft: &Model, options: DraftModelOptions) -> Result<TokenMap, Error> {
    if let Some(p_min) = options.p_min.filter(|p_min| !(0.0..=1.0).contains(p_min)) {
        return Err(DraftModelError::NoProbability { p_min }.into());
    }
    if !draft.spec().generates_text() {
        return Err(DraftModelError::NoText.into());
    }
    Ok(TokenMap::new(&*target.tokenizer()?, &*draft.tokenizer()?)?)
}

/// Evaluates `batch` and returns the choice for each of its output tokens, from results of kind `kind`.
///
/// These steps are not submitted ahead: a proposal has a known number of them, and further ones would stay in flight unread.
fn choose(
    pass: &mut dyn ForwardPass,
    batch: &[BatchToken],
    kind: OutputKind,
) -> Result<Vec<Option<Choice>>, ForwardError> {
    Ok(match pass.forward_outputs(batch.into(), kind, &[])?.0 {
        Outputs::Ids(ids) => {
            let choice = |token| Some(Choice { token, probability: 1.0, logits: Vec::new() });
            ids.into_iter().map(choice).collect()
        }
        Outputs::TopK(lists) => lists.iter().map(|list| of_list(list, Vec::new())).collect(),
        Outputs::Logits(logits) => {
            let rows = (0..logits.n_rows()).map(|i| logits.row(i));
            rows.map(|row| of_list(&highest(row, N_CANDIDATES), row.to_vec())).collect()
        }
        // Not requested.
        Outputs::Hidden(_) => Vec::new(),
    })
}

/// The first token of a list, with its probability among those of the list.
fn of_list(list: &TopK, logits: Vec<f32>) -> Option<Choice> {
    let &(token, largest) = list.first()?;
    let sum: f32 = list.iter().map(|(_, logit)| (logit - largest).exp()).sum();
    Some(Choice { token, probability: 1.0 / sum, logits })
}

/// The length of the common prefix.
fn n_common(a: &[u32], b: &[u32]) -> usize {
    /// Whole chunks are compared faster.
    const CHUNK: usize = 64;
    let chunks = a.chunks_exact(CHUNK).zip(b.chunks_exact(CHUNK)).take_while(|(a, b)| a == b).count();
    let n = chunks * CHUNK;
    n + a[n..].iter().zip(&b[n..]).take_while(|(a, b)| a == b).count()
}
