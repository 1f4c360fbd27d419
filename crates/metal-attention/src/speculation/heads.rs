//! [`HeadDrafter`]: drafts of models that read states of the target: the prediction heads (multi-token prediction) in a model's own
//! file, and EAGLE-3.
//!
//! A head is a model of one layer with a KV cache of its own. At position `p` it reads the token there and a state of position
//! `p - 1`: that of the target model, as far as the target has evaluated the sequence; after that a head's own. The target's
//! states come from [`observe`](Drafter::observe). A proposal cuts the head's cache back to the tokens that it has read with
//! the target's states, reads those that were added since, and then its drafts, one after another; all sequences in one batch.
//!
//! EAGLE-3 does the same: it counts the position of a state, and the token behind it, as one, so that its position `p` is position
//! `p + 1` here. Its states are projections of several rows of the target, and its rows of logits may be those of some tokens alone.

use metal_attention_gguf::GgufFile;
use metal_attention_model::{
    Batch, BatchToken, Eagle3, ForwardError, ForwardPass, HeadUse, HiddenRequest, MemoryUse, ModelSpec, OutputKind,
    Outputs, TracedTokens, argmax,
};

use super::head_sequence::HeadSequence;
use super::{Draft, DraftLogits, DraftRequest, Drafter, Evaluated, StateProjection};
use crate::backends::BackendPass;
use crate::{EngineOptions, Error, Model};

/// The tokens that a drafter proposes, where they are not all of the target's.
pub struct DraftTokens {
    /// The target's id for each row of the drafter's logits.
    pub ids: Vec<u32>,
    /// Size of the target's vocabulary; all ids are below it.
    pub n_vocab: usize,
}

/// A projection, and what it has not projected yet: the rows of all sequences go through it together, when they are needed or are many.
struct PendingStates {
    projection: StateProjection,
    /// What the target has evaluated, in order.
    observed: Vec<Observed>,
    /// The rows of all of that, joined.
    rows: Vec<f32>,
}

/// Inputs of one sequence that the target has evaluated, without their rows.
struct Observed {
    seq: usize,
    first: usize,
    ids: Vec<u32>,
}

/// Proposes drafts with the prediction heads of a model's file, or with EAGLE-3.
pub struct HeadDrafter {
    /// The heads, in the order of their drafts; at least one.
    heads: Vec<Box<dyn ForwardPass>>,
    /// How they propose drafts together.
    heads_use: HeadUse,
    /// The hidden rows of the target that are read.
    reads: Vec<usize>,
    /// Makes the states of these rows; `None`: a row is a state.
    projection: Option<PendingStates>,
    /// The target's tokens for the rows of the logits; `None`: all tokens, in order.
    tokens: Option<DraftTokens>,
    /// Width of a state.
    n_embd: usize,
    /// What is known of each sequence of the target.
    sequences: Vec<HeadSequence>,
}

impl HeadDrafter {
    /// Loads the heads of `model`'s file on the device of `target`, a forward pass of that model. They share its embedding table
    /// and output head where they have none of their own. `None`: the file has no heads.
    ///
    /// # Errors
    /// The heads are not supported, damaged, or do not fit in memory.
    pub fn beside(model: &Model, target: &dyn BackendPass, options: &EngineOptions) -> Result<Option<Self>, Error> {
        let heads = model.prediction_heads()?;
        let heads = heads.iter().map(|head| Ok(target.beside(head, options)? as Box<dyn ForwardPass>));
        Ok(Self::new(heads.collect::<Result<_, Error>>()?, target.spec().n_layer()))
    }

    /// A drafter of these heads, in the order of their drafts, for a target with `n_layer` layers. `None` if there are no heads,
    /// or one of them is not a prediction head.
    pub fn new(heads: Vec<Box<dyn ForwardPass>>, n_layer: usize) -> Option<Self> {
        let heads_use = heads.first()?.spec().embedding.state?.heads()?;
        match heads_use {
            HeadUse::Repeated | HeadUse::Chained => {}
            // Its states are not rows of the target.
            HeadUse::Eagle => return None,
        }
        Self::over(heads, heads_use, vec![heads_use.state_before(n_layer)], None, None)
    }

    /// Loads the EAGLE-3 drafter of `file` on the device of `pass`, a forward pass of `target`. It shares the target's embedding table
    /// and output head where it has none of its own.
    ///
    /// # Errors
    /// The drafter does not suit the target, is damaged, or does not fit in memory.
    pub fn of_eagle3(
        file: &GgufFile,
        target: &Model,
        pass: &dyn BackendPass,
        options: &EngineOptions,
    ) -> Result<Self, Error> {
        let Eagle3 { layer, projection, target_layers, tokens } = Eagle3::load(file, target.loaded())?;
        let projection = StateProjection::beside(&projection, &target_layers, pass, options)?;
        let tokens = tokens.map(|ids| DraftTokens { ids, n_vocab: target.spec().n_vocab });
        let drafter = Self::eagle3(pass.beside(&layer, options)?, projection, tokens);
        Ok(drafter.expect("what was loaded fits together"))
    }

    /// EAGLE-3 over a forward pass of its layer, with its states from `projection`. `tokens`: those that it proposes. `None` if `layer`
    /// is no such model, the projection has another width, or the tokens are not as many as its logits.
    pub fn eagle3(
        layer: Box<dyn ForwardPass>,
        projection: StateProjection,
        tokens: Option<DraftTokens>,
    ) -> Option<Self> {
        let spec = layer.spec();
        let fits = tokens.as_ref().is_none_or(|tokens| {
            tokens.ids.len() == spec.n_vocab && tokens.ids.iter().all(|&id| (id as usize) < tokens.n_vocab)
        });
        if spec.embedding.state?.heads()? != HeadUse::Eagle || projection.n_embd() != spec.n_embd || !fits {
            return None;
        }
        let reads = projection.reads().to_vec();
        Self::over(vec![layer], HeadUse::Eagle, reads, Some(projection), tokens)
    }

    fn over(
        heads: Vec<Box<dyn ForwardPass>>,
        heads_use: HeadUse,
        reads: Vec<usize>,
        projection: Option<StateProjection>,
        tokens: Option<DraftTokens>,
    ) -> Option<Self> {
        let n_embd = heads.first()?.spec().n_embd;
        let is_alike = |spec: &ModelSpec| {
            spec.n_embd == n_embd && spec.embedding.state.and_then(|state| state.heads()) == Some(heads_use)
        };
        if !heads.iter().all(|head| is_alike(head.spec())) {
            return None;
        }
        let n_seq = heads.iter().map(|head| head.n_seq()).min()?;
        let sequences = (0..n_seq).map(|_| HeadSequence::new(heads_use, heads.len(), n_embd)).collect();
        let pending = |projection| PendingStates { projection, observed: Vec::new(), rows: Vec::new() };
        Some(Self { heads, heads_use, reads, projection: projection.map(pending), tokens, n_embd, sequences })
    }

    /// The most drafts that it proposes for a sequence; `None` if there is no limit.
    pub fn max_drafts(&self) -> Option<usize> {
        match self.heads_use {
            HeadUse::Repeated | HeadUse::Eagle => None,
            HeadUse::Chained => Some(self.heads.len()),
        }
    }

    fn propose_to(
        &mut self,
        requests: &[DraftRequest<'_>],
        mut logits: Option<DraftLogits<'_>>,
    ) -> Result<Vec<Draft>, ForwardError> {
        self.project()?;
        let mut drafts: Vec<Vec<u32>> = requests.iter().map(|_| Vec::new()).collect();
        // The state of each request's last position: at first the target's, which is among the states of its sequence.
        let mut states: Vec<Vec<f32>> = requests.iter().map(|_| Vec::new()).collect();
        let wanted = requests.iter().map(|request| self.accept(request)).collect::<Result<Vec<usize>, _>>()?;
        for step in 0..wanted.iter().copied().max().unwrap_or(0) {
            let open: Vec<usize> = (0..requests.len()).filter(|&r| wanted[r] > step).collect();
            let (mut batch, head) = (HeadBatch::default(), self.head_of_draft(step));
            for &r in &open {
                let DraftRequest { seq, ids, prediction: _, n: _ } = requests[r];
                match (self.heads_use, drafts[r].last()) {
                    (HeadUse::Repeated | HeadUse::Eagle, Some(&id)) => {
                        batch.push(id, seq, self.heads[head].n_past(seq), &states[r]);
                    }
                    (HeadUse::Repeated | HeadUse::Eagle | HeadUse::Chained, _) => {
                        let next = self.read_accepted(head, seq, ids, &mut batch);
                        let rows = states[r].chunks_exact(self.n_embd);
                        for (i, (&id, state)) in drafts[r].iter().zip(rows).enumerate() {
                            batch.push(id, seq, next + i, state);
                        }
                    }
                }
                batch.mark_output();
            }
            let HeadRows { scores, states: new_states } = self.evaluate(head, &batch, logits.is_some())?;
            let n_vocab = self.heads[head].spec().n_vocab;
            for ((row, &r), state) in open.iter().enumerate().zip(new_states.chunks_exact(self.n_embd)) {
                if let (Some(pass_on), Scores::Logits(all)) = (&mut logits, &scores) {
                    let row = &all[row * n_vocab..][..n_vocab];
                    match &self.tokens {
                        None => pass_on(r, step, row),
                        Some(tokens) => pass_on(r, step, &tokens.logits_of_target(row)),
                    }
                }
                let id = scores.id(row, n_vocab);
                drafts[r].push(self.tokens.as_ref().map_or(id, |tokens| tokens.ids[id as usize]));
                match self.heads_use {
                    HeadUse::Repeated | HeadUse::Eagle => state.clone_into(&mut states[r]),
                    // Each head reads the states of all heads before it.
                    HeadUse::Chained => states[r].extend_from_slice(state),
                }
            }
        }
        Ok(drafts.into_iter().map(|ids| Draft { ids, confidence: Vec::new() }).collect())
    }

    /// The head that proposes draft `i`.
    fn head_of_draft(&self, i: usize) -> usize {
        match self.heads_use {
            HeadUse::Repeated | HeadUse::Eagle => 0,
            HeadUse::Chained => i,
        }
    }

    /// Compares a request with what is known of its sequence. Returns the number of drafts that can be proposed.
    fn accept(&mut self, request: &DraftRequest<'_>) -> Result<usize, ForwardError> {
        let n_seq = self.sequences.len();
        let sequence = self.sequences.get_mut(request.seq);
        let sequence = sequence.ok_or(ForwardError::SequenceOutOfRange { seq: request.seq, n_seq })?;
        if request.ids.is_empty() || !sequence.follow(request.ids) {
            return Ok(0);
        }
        let n_ctx = self.heads.iter().map(|head| head.n_ctx()).min().unwrap_or(0);
        let n = request.n.min(self.max_drafts().unwrap_or(usize::MAX));
        // The last draft is not read.
        Ok(n.min((n_ctx + 1).saturating_sub(request.ids.len())))
    }

    /// Appends to `batch` what head `head` has not read of `ids` with the target's states, and the last token in any case. Returns
    /// the index in the head's sequence that follows.
    fn read_accepted(&mut self, head: usize, seq: usize, ids: &[u32], batch: &mut HeadBatch) -> usize {
        // The last token is read anew, since its results are wanted.
        self.read_from(head, seq, ids, ids.len() - 1, batch)
    }

    /// Appends to `batch` what head `head` has not read of `ids` with the target's states, from position `at_most` on in any case.
    /// Returns the index in the head's sequence that follows.
    fn read_from(&mut self, head: usize, seq: usize, ids: &[u32], at_most: usize, batch: &mut HeadBatch) -> usize {
        let (pass, sequence) = (&mut self.heads[head], &mut self.sequences[seq]);
        let read = sequence.read(head, ids);
        let reached = pass.rewind(seq, read.end.min(at_most).saturating_sub(read.start));
        let start = if sequence.can_continue(read.start, read.start + reached) {
            read.start
        } else {
            // The states that lie between are not known: the head begins anew at the first that is.
            pass.rewind(seq, 0);
            sequence.first_known().min(at_most)
        };
        for (position, &id) in ids.iter().enumerate().skip(start + pass.n_past(seq)) {
            batch.push(id, seq, position - start, sequence.state_before(position));
        }
        sequence.set_read(head, start, ids);
        ids.len() - start
    }

    /// Evaluates `batch` with head `head`. Returns what the head proposes after its output tokens, and their states.
    fn evaluate(&mut self, head: usize, batch: &HeadBatch, logits: bool) -> Result<HeadRows, ForwardError> {
        let pass = &mut self.heads[head];
        let before = [self.heads_use.state_before(pass.spec().n_layer())];
        let kind = if logits { OutputKind::Logits } else { OutputKind::Ids };
        let request = HiddenRequest { before: &before, tokens: TracedTokens::Output };
        match pass.forward_with_hidden(batch.as_batch(), kind, request) {
            Ok((outputs, hidden)) => {
                let scores = match outputs {
                    Outputs::Logits(logits) => Scores::Logits(logits.as_slice().to_vec()),
                    Outputs::Ids(ids) => Scores::Ids(ids),
                    Outputs::Hidden(_) | Outputs::TopK(_) => Scores::Ids(Vec::new()),
                };
                Ok(HeadRows { scores, states: hidden.of_layer(0).to_vec() })
            }
            Err(why) => {
                // What the head has read is not known now.
                for token in &batch.tokens {
                    self.sequences[token.seq].forget_read(head);
                }
                Err(why)
            }
        }
    }

    /// Projects the rows that were observed, and lets the drafter read what it can of their sequences, if that is much.
    fn project(&mut self) -> Result<(), ForwardError> {
        let Some(PendingStates { projection, observed, rows }) = &mut self.projection else { return Ok(()) };
        if observed.is_empty() {
            return Ok(());
        }
        // Without their states the sequences get no drafts until they are evaluated anew.
        let (observed, states) = (std::mem::take(observed), projection.project_joined(rows));
        rows.clear();
        let states = states?;
        let mut rest = &states[..];
        for Observed { seq, first, ids } in observed {
            let (of_these, others) = rest.split_at(ids.len() * self.n_embd);
            rest = others;
            self.sequences[seq].observe(first, &ids, of_these);
            self.catch_up(seq)?;
        }
        Ok(())
    }

    /// Lets the heads read what they can of sequence `seq`, if that is much: otherwise the next proposal does.
    fn catch_up(&mut self, seq: usize) -> Result<(), ForwardError> {
        for head in 0..self.heads.len() {
            if self.sequences[seq].n_unread(head) < self.heads[head].n_ubatch() {
                continue;
            }
            let (ids, mut batch) = (self.sequences[seq].ids().to_vec(), HeadBatch::default());
            self.read_from(head, seq, &ids, ids.len(), &mut batch);
            if !batch.tokens.is_empty() {
                self.evaluate(head, &batch, false)?;
            }
        }
        self.sequences[seq].drop_old_states();
        Ok(())
    }
}

impl Drafter for HeadDrafter {
    fn name(&self) -> &'static str {
        match self.heads_use {
            HeadUse::Repeated | HeadUse::Chained => "mtp",
            HeadUse::Eagle => "eagle3",
        }
    }

    fn reads_hidden(&self) -> &[usize] {
        &self.reads
    }

    fn observe(&mut self, evaluated: Evaluated<'_>) -> Result<(), ForwardError> {
        let Evaluated { seq, first, ids, hidden } = evaluated;
        let n_seq = self.sequences.len();
        let sequence = self.sequences.get_mut(seq).ok_or(ForwardError::SequenceOutOfRange { seq, n_seq })?;
        if let Some(PendingStates { projection, observed, rows }) = &mut self.projection {
            projection.join(ids.len(), hidden, rows)?;
            observed.push(Observed { seq, first, ids: ids.to_vec() });
            let is_much = rows.len() >= projection.n_chunk() * projection.width();
            return if is_much { self.project() } else { Ok(()) };
        }
        let states = hidden.first().copied().unwrap_or_default();
        let expected = ids.len() * self.n_embd;
        if states.len() != expected {
            return Err(ForwardError::WrongStates { found: states.len(), expected });
        }
        sequence.observe(first, ids, states);
        self.catch_up(seq)
    }

    fn forget(&mut self, seq: usize) {
        if let Some(pending) = &mut self.projection {
            pending.forget(seq);
        }
        if let Some(sequence) = self.sequences.get_mut(seq) {
            *sequence = HeadSequence::new(self.heads_use, self.heads.len(), self.n_embd);
            for head in &mut self.heads {
                head.rewind(seq, 0);
            }
        }
    }

    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Draft>, ForwardError> {
        self.propose_to(requests, None)
    }

    fn propose_with_logits(
        &mut self,
        requests: &[DraftRequest<'_>],
        logits: DraftLogits<'_>,
    ) -> Result<Vec<Draft>, ForwardError> {
        self.propose_to(requests, Some(logits))
    }

    fn memory_use(&self) -> MemoryUse {
        let mut sum = MemoryUse::default();
        let of_heads = self.heads.iter().map(|head| head.memory_use());
        let of_projection = self.projection.iter().map(|pending| pending.projection.memory_use());
        of_heads.chain(of_projection).for_each(|memory| sum += memory);
        let of_sequences: usize = self.sequences.iter().map(HeadSequence::bytes).sum();
        let of_tokens = self.tokens.as_ref().map_or(0, |tokens| size_of_val(&tokens.ids[..]));
        let of_rows = self.projection.as_ref().map_or(0, |pending| size_of::<f32>() * pending.rows.capacity());
        sum.scratch += (of_sequences + of_tokens + of_rows) as u64;
        sum
    }
}

impl PendingStates {
    /// Drops what was observed of sequence `seq`.
    fn forget(&mut self, seq: usize) {
        let (width, mut row) = (self.projection.width(), 0);
        let Self { observed, rows, .. } = self;
        observed.retain(|of| {
            let range = row * width..(row + of.ids.len()) * width;
            if of.seq == seq {
                rows.drain(range);
            } else {
                row += of.ids.len();
            }
            of.seq != seq
        });
    }
}

impl DraftTokens {
    /// The drafter's logits `row` as those of all of the target's tokens, `[n_vocab]`: negative infinity for the others.
    fn logits_of_target(&self, row: &[f32]) -> Vec<f32> {
        let mut all = vec![f32::NEG_INFINITY; self.n_vocab];
        for (&id, &logit) in self.ids.iter().zip(row) {
            all[id as usize] = logit;
        }
        all
    }
}

/// Tokens with their states for one head.
#[derive(Default)]
struct HeadBatch {
    tokens: Vec<BatchToken>,
    /// `[n_tokens, n_embd]`.
    states: Vec<f32>,
}

impl HeadBatch {
    fn push(&mut self, id: u32, seq: usize, pos: usize, state: &[f32]) {
        self.tokens.push(BatchToken { id, seq, pos, output: false });
        self.states.extend_from_slice(state);
    }

    /// Requests the results of the last token.
    fn mark_output(&mut self) {
        if let Some(last) = self.tokens.last_mut() {
            last.output = true;
        }
    }

    fn as_batch(&self) -> Batch<'_> {
        Batch { states: &self.states, ..Batch::from(&self.tokens[..]) }
    }
}

/// The results of a head's output tokens.
struct HeadRows {
    scores: Scores,
    /// `[n_outputs, n_embd]`.
    states: Vec<f32>,
}

/// What a head proposes.
enum Scores {
    /// `[n_outputs, n_vocab]`.
    Logits(Vec<f32>),
    /// `[n_outputs]`.
    Ids(Vec<u32>),
}

impl Scores {
    /// The likeliest token of row `row`.
    fn id(&self, row: usize, n_vocab: usize) -> u32 {
        match self {
            Self::Logits(all) => argmax(&all[row * n_vocab..][..n_vocab]),
            Self::Ids(ids) => ids[row],
        }
    }
}
