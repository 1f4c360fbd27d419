//! One step of the scheduler: plans a batch, evaluates it and samples the next tokens.
//!
//! [`Engine::step`] is called once per iteration of the engine's loop. Its batch holds one token of each running
//! sequence that has only one token left to evaluate (mostly decode tokens), and prefill chunks of the others.
//!
//! Of each output token the forward pass returns a row of *scores*: logits, a top-k list (pairs of id and logit), or an
//! argmax (an id). Each row has a [`ScoresUse`]. `choice.rs` chooses tokens by scores.
//!
//! With a drafter (`speculation/`), drafts follow the decode tokens of sequences for which they pay. From each row of such a
//! sequence a token is sampled, until one differs from the draft that follows the row in the batch; the drafts behind it are cut
//! back.
//!
//! A step may fail because no KV pages or state slots are left. Some are then freed, if need be by preemption, and the
//! step is planned again. This relies on the contract of [`ForwardPass`](crate::ForwardPass) that a batch that fails so
//! leaves the cache as before.
//!
//! The engine has three lists: `running`, the sequences that the steps evaluate; `cache_sequences`, for each *cache
//! sequence* (a place for one sequence in the KV cache, by its index) whether it is empty, busy with a running sequence
//! or an embedding job, or idle, that is, kept for prompts that begin like its tokens; `embeddings`, the embedding jobs
//! in progress, which `embedding.rs` evaluates between steps.

use std::time::Instant;

use crate::choice::{self, RequiredScores, Scores};
use crate::prompt::{BatchSpan, rewind, with_batch};
use crate::speculation::{Draft, DraftRequest, max_drafts_of_step};
use crate::{BatchToken, ForwardError};

use super::batch_sizer::MAX_LOGITS_BYTES;
use super::client_ring::share_between_clients;
use super::engine::{Engine, RunningSequence};
use super::scheduled_sequence::StepOutcome;
use super::{FinishReason, RequestError};

/// The batch of a step, and how its scores are used.
#[derive(Debug, Default)]
struct BatchPlan {
    /// The tokens of sequences with a single token left to evaluate, then prefill chunks. The tokens of one sequence
    /// are consecutive.
    tokens: Vec<BatchToken>,
    /// The spans of embedding rows.
    spans: Vec<BatchSpan>,
    /// The use of each row of scores: one entry for each output token of `tokens`, in the same order.
    scores_uses: Vec<ScoresUse>,
    /// Number of decode tokens: tokens that were generated in an earlier step and are the only ones of their sequences
    /// in the batch, except drafts. The last token of a prompt does not count.
    n_decode: usize,
    /// The drafts of sequences that have some: the index in [`Engine::running`], that of the cache sequence, and their number.
    drafted: Vec<(usize, usize, usize)>,
}

impl BatchPlan {
    /// Number of drafts of all sequences.
    fn n_drafts(&self) -> usize {
        self.drafted.iter().map(|(_, _, n)| n).sum()
    }
}

/// The use of one row of scores, with its sequence's index in [`Engine::running`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ScoresUse {
    /// The next token is sampled from the row. If it equals the draft, the row after this one is used, too.
    Sample(usize, Option<u32>),
    /// The row, of logits, gives the log probability of the prompt's next token.
    PromptLogprob(usize),
}

/// Pairs of an index in [`Engine::running`] and what the step did to that sequence, at most one pair for each index. A
/// sequence that evaluated only a part of its prompt has none, unless a log probability of the prompt failed.
type SequenceOutcomes = Vec<(usize, Result<StepOutcome, RequestError>)>;

impl Engine<'_> {
    /// Evaluates one batch and ends the sequences that it finishes. Returns without effect if no sequence runs.
    ///
    /// If KV pages or state slots run out, it frees some and tries again with a new batch. The retries end: before
    /// each, one sequence or embedding job is evicted, preempted or ended, and with none left the batch is empty. Any
    /// other error of the forward pass ends the sequences of the batch with that error.
    pub(super) fn step(&mut self) {
        let mut speculate = true;
        loop {
            let drafts = if speculate { self.propose() } else { Vec::new() };
            let batch = self.plan_batch(drafts);
            if batch.tokens.is_empty() {
                return;
            }
            let n_generated_before = self.n_generated();
            let start = Instant::now();
            let is_prompt = batch.tokens.len() - batch.n_drafts() > batch.n_decode;
            let hidden =
                self.speculator.as_ref().map_or(&[][..], |speculator| speculator.reads_hidden(is_prompt)).to_vec();
            let reads_hidden = !hidden.is_empty();
            match self.evaluate(&batch, &hidden) {
                Ok((mut outcomes, n_accepted)) => {
                    let (time, n_drafts) = (start.elapsed(), batch.n_drafts());
                    self.batch_sizer.record_step(batch.tokens.len(), time);
                    // Steps with prefill chunks are no measure of what drafts cost.
                    let n_decode = batch.tokens.len() - n_drafts;
                    if let Some(speculator) = self.speculator.as_mut().filter(|_| n_decode == batch.n_decode) {
                        speculator.record_step(n_decode, n_drafts, reads_hidden, time);
                    }
                    self.start_time_slices();
                    // Copies pages and states at the ends of prompts to the prefix store (snapshots in host memory or
                    // files), before a later step moves a sliding window past them.
                    self.keep_prompt_ends();
                    let n_new = self.n_generated() - n_generated_before;
                    self.update_metrics(|metrics| {
                        metrics.count_step(batch.tokens.len());
                        // In this metric, generated tokens in a chunk that is evaluated again after a preemption are
                        // prompt tokens.
                        metrics.prompt_tokens += (n_decode - batch.n_decode) as u64;
                        metrics.generated_tokens += n_new as u64;
                        metrics.drafted_tokens += n_drafts as u64;
                        metrics.accepted_tokens += n_accepted;
                    });
                    // Highest index first: ending a sequence removes it from `running` and shifts those after it.
                    outcomes.sort_unstable_by_key(|(i, _)| std::cmp::Reverse(*i));
                    for (i, outcome) in outcomes {
                        match outcome {
                            Ok(StepOutcome::Finished(reason)) => self.end(i, Ok(reason)),
                            // `evaluate` has dealt with `NeedsLogits`.
                            Ok(StepOutcome::Continues | StepOutcome::NeedsLogits) => {}
                            Err(why) => self.end(i, Err(why)),
                        }
                    }
                    return;
                }
                // Drafts take nothing from other sequences.
                Err(ForwardError::OutOfPages { .. } | ForwardError::OutOfStates { .. }) if batch.n_drafts() > 0 => {
                    speculate = false;
                }
                Err(ForwardError::OutOfPages { .. } | ForwardError::OutOfStates { .. }) => self.make_room(),
                Err(why) => {
                    tracing::error!("a step over {} tokens failed: {why}", batch.tokens.len());
                    let in_batch = |seq| batch.tokens.iter().any(|token| token.seq == seq);
                    for i in (0..self.running.len()).rev() {
                        if in_batch(self.running[i].cache_seq) {
                            self.end(i, Err(why.clone().into()));
                        }
                    }
                    return;
                }
            }
        }
    }

    /// The drafts for the sequences that have a single token left to evaluate, with their indices in [`Engine::running`].
    fn propose(&mut self) -> Vec<(usize, Draft)> {
        let Self { speculator: Some(speculator), running, pass, batch_sizer, .. } = self else { return Vec::new() };
        let n_ctx = pass.n_ctx();
        let single = running.iter().enumerate().filter(|(_, r)| r.sequence.ids.len() == pass.n_past(r.cache_seq) + 1);
        let single: Vec<usize> = single.map(|(i, _)| i).collect();
        let limit = |i: &usize| running[*i].sequence.max_drafts(n_ctx).min(speculator.max_depth());
        let of_requests: Vec<usize> = single.iter().copied().filter(|i| limit(i) > 0).collect();
        let limits: Vec<usize> = of_requests.iter().map(limit).collect();
        let forced: Vec<_> = of_requests.iter().map(|&i| running[i].sequence.forced()).collect();
        let request = |(&i, &n): (&usize, &usize)| {
            let RunningSequence { sequence, cache_seq, .. } = &running[i];
            DraftRequest { seq: *cache_seq, ids: &sequence.ids, prediction: &sequence.prediction, n }
        };
        let requests: Vec<_> = of_requests.iter().zip(&limits).map(request).collect();
        let max_rows =
            max_drafts_of_step(&**pass, single.len()).min(batch_sizer.max_tokens().saturating_sub(single.len()));
        let mut drafts = speculator.propose(&mut **pass, single.len(), max_rows, &requests, &forced);
        for (draft, &i) in drafts.iter_mut().zip(&of_requests) {
            draft.truncate(running[i].sequence.n_allowed(&draft.ids));
        }
        of_requests.into_iter().zip(drafts).filter(|(_, draft)| !draft.ids.is_empty()).collect()
    }

    /// Plans the next batch: one token of each sequence with a single token left to evaluate, then prefill chunks of
    /// the others. The tokens of the chunks are divided equally between clients, within a limit that the batch sizer
    /// sets. A span of embedding rows is not divided: a chunk ends before it, or has all of it, and the chunks after
    /// have that much less. Empty if no sequence runs. `drafts` follow the single tokens of their sequences.
    fn plan_batch(&self, mut drafts: Vec<(usize, Draft)>) -> BatchPlan {
        let mut batch = BatchPlan::default();
        // At least 1: a running sequence has tokens that are not in the KV cache.
        let unevaluated = |i: usize| self.running[i].sequence.ids.len() - self.pass.n_past(self.running[i].cache_seq);
        let (single_token, prefilling): (Vec<_>, Vec<_>) = (0..self.running.len()).partition(|&i| unevaluated(i) == 1);
        // A step is kept short if other running sequences, or embedding jobs, which are evaluated after it, wait for
        // its end. Requests that are not admitted yet do not count.
        let others_wait = self.running.len() > 1 || !self.embeddings.is_empty();
        let n_drafts: usize = drafts.iter().map(|(_, draft)| draft.ids.len()).sum();
        let max_prefill_tokens = self.batch_sizer.max_prefill_tokens(single_token.len() + n_drafts, others_wait);
        // For each sequence of `prefilling`: its client and number of unevaluated tokens, and in `chunk_lens` the
        // number of tokens in its chunk, maybe 0.
        let wanted: Vec<_> = prefilling.iter().map(|&i| (self.running[i].sequence.client, unevaluated(i))).collect();
        let chunk_lens = share_between_clients(&wanted, max_prefill_tokens);
        let single_token = single_token.into_iter().map(|i| (i, 1));
        // Rows of logits that the step may still return for log probabilities of prompts; rows that tokens are sampled
        // from do not count. At least one at first, so that every step makes progress.
        let mut logprob_rows_left = (MAX_LOGITS_BYTES / (4 * self.pass.spec().n_vocab)).max(1);
        // Tokens that chunks with a whole span have beyond their share.
        let mut n_over = 0;
        for (i, share) in single_token.chain(prefilling.into_iter().zip(chunk_lens)) {
            let n = share.saturating_sub(n_over);
            n_over -= share - n;
            if n == 0 {
                continue;
            }
            let (sequence, seq) = (&self.running[i].sequence, self.running[i].cache_seq);
            let start = self.pass.n_past(seq);
            let chunk = sequence.key().chunk(start, n);
            n_over += chunk.saturating_sub(n);
            let n = chunk;
            let last = sequence.ids.len() - 1;
            // The positions whose logits give log probabilities of the prompt; an empty range if none are wanted. The
            // logits of position p give the log probability of the token at p + 1. So the last position is not among
            // them: the token after it is sampled. They begin after `start` if positions are evaluated again after a
            // preemption, never before it: admission shares no prefix beyond `first`.
            let logprob_positions = sequence.next_logprob_position().map_or(last..last, |first| first.max(start)..last);
            // The chunk is cut after `logprob_rows_left` of these positions; the next step continues the prompt. If it
            // becomes empty, the sequence has no token in this step.
            let n = if logprob_positions.is_empty() {
                n
            } else {
                n.min(logprob_positions.start + logprob_rows_left - start)
            };
            let is_logprob_position = |pos| logprob_positions.contains(&pos);
            let is_output = |pos| pos == last || is_logprob_position(pos);
            let token = |pos| BatchToken { id: sequence.ids[pos], seq, pos, output: is_output(pos) };
            batch.spans.extend(BatchSpan::within(&sequence.spans, start..start + n, batch.tokens.len()));
            batch.tokens.extend((start..start + n).map(token));
            let n_logprobs = (start..start + n).filter(|&pos| is_logprob_position(pos)).count();
            logprob_rows_left -= n_logprobs;
            batch.scores_uses.extend(std::iter::repeat_n(ScoresUse::PromptLogprob(i), n_logprobs));
            if start + n == sequence.ids.len() {
                let draft =
                    drafts.extract_if(.., |(of, _)| *of == i).map(|(_, draft)| draft.ids).next().unwrap_or_default();
                let followed_by = draft.iter().copied().map(Some).chain([None]);
                batch.scores_uses.extend(followed_by.map(|draft| ScoresUse::Sample(i, draft)));
                let drafted = |(&id, pos)| BatchToken { id, seq, pos, output: true };
                batch.tokens.extend(draft.iter().zip(last + 1..).map(drafted));
                if !draft.is_empty() {
                    batch.drafted.push((i, seq, draft.len()));
                }
                // With `n == 1` the sequence had a single token left.
                batch.n_decode += usize::from(n == 1 && sequence.n_generated() > 0);
            }
        }
        batch
    }

    /// Number of tokens generated so far by all running sequences.
    fn n_generated(&self) -> usize {
        self.running.iter().map(|r| r.sequence.n_generated()).sum()
    }

    /// Evaluates `batch` and samples from its scores.
    ///
    /// A forward pass returns all rows in one form, so the form is the most expensive that any row requires: argmax,
    /// top-k list or logits. An argmax or a top-k list may turn out not to determine the next token of a sequence: its
    /// candidates may be forbidden. Then the sequence's last token is evaluated a second time, for all logits:
    /// `evaluate_again` first takes the token back, from the KV cache and the recurrent states.
    ///
    /// An error means that the batch itself failed: no sequence has changed, since `choice::evaluate` and
    /// `evaluate_again` call their closures only after the pass has succeeded.
    ///
    /// Returns what happened to the sequences, and how many drafts held.
    ///
    /// If only the second evaluation fails, the error is the outcome of the sequences it was for. It does not run out
    /// of pages or state slots: it needs those of the tokens that were taken back, which are free again.
    fn evaluate(&mut self, batch: &BatchPlan, hidden: &[usize]) -> Result<(SequenceOutcomes, u64), ForwardError> {
        let max_top_k = self.pass.max_top_k();
        let required_by = |scores_use: &ScoresUse| match *scores_use {
            ScoresUse::Sample(i, _) => self.running[i].sequence.required_scores(max_top_k),
            ScoresUse::PromptLogprob(_) => RequiredScores::Logits,
        };
        // `RequiredScores` are ordered by cost. For a batch without rows any value will do.
        let required = batch.scores_uses.iter().map(required_by).max().unwrap_or(RequiredScores::Logits);
        let Self { pass, running, speculator, .. } = self;
        let n_ctx = pass.n_ctx();
        let mut outcomes: SequenceOutcomes = Vec::new();
        // Indices in `running` of the sequences that need all logits.
        let mut needs_logits = Vec::new();
        // Indices in `running`, one for each draft that holds.
        let mut held = Vec::new();
        let row = |row: usize, scores: Scores<'_>| {
            let (ScoresUse::PromptLogprob(i) | ScoresUse::Sample(i, _)) = batch.scores_uses[row];
            // A row that failed, that finished its sequence, or whose token differs from the draft gives its sequence an
            // outcome before the last row. The rows after it are ignored.
            if outcomes.iter().any(|(with_outcome, _)| *with_outcome == i) || needs_logits.contains(&i) {
                return;
            }
            match (batch.scores_uses[row], scores) {
                (ScoresUse::PromptLogprob(_), Scores::Logits(logits)) => {
                    outcomes.extend(running[i].sequence.add_prompt_logprob(logits).err().map(|why| (i, Err(why))));
                }
                // Cannot occur: `required` is logits if any row is for a log probability.
                (ScoresUse::PromptLogprob(_), Scores::Argmax(_) | Scores::TopK(..)) => {}
                (ScoresUse::Sample(_, draft), scores) => {
                    let sequence = &mut running[i].sequence;
                    let n_before = sequence.ids.len();
                    let outcome = sequence.sample(scores, n_ctx);
                    let holds = draft.is_some() && sequence.ids.get(n_before).copied() == draft;
                    held.extend(holds.then_some(i));
                    match outcome {
                        Ok(StepOutcome::NeedsLogits) => needs_logits.push(i),
                        Ok(StepOutcome::Continues) if holds => {}
                        outcome => outcomes.push((i, outcome)),
                    }
                }
            }
        };
        let drafted: Vec<usize> = batch.drafted.iter().map(|(_, seq, _)| *seq).collect();
        let hidden = with_batch(&batch.tokens, &batch.spans, &drafted, |batch| {
            choice::evaluate(&mut **pass, batch, required, hidden, row)
        })?;
        for &(i, seq, n_drafts) in &batch.drafted {
            let n_held = held.iter().filter(|of| **of == i).count();
            running[i].sequence.count_drafts(n_drafts, n_held);
            if let Some(speculator) = speculator {
                speculator.record_verified(seq, n_drafts, n_held);
            }
            let n = pass.n_past(seq) - n_drafts + n_held;
            let reached = rewind(&mut **pass, seq, running[i].sequence.key(), n);
            assert_eq!(reached, n, "drafts can always be cut back");
        }
        if let Some(speculator) = speculator.as_mut().filter(|_| hidden.n_layers() > 0) {
            let mut row = 0;
            for tokens in batch.tokens.chunk_by(|a, b| a.seq == b.seq) {
                let (seq, first) = (tokens[0].seq, tokens[0].pos);
                // What was cut back does not hold.
                let n = tokens.len().min(pass.n_past(seq).saturating_sub(first));
                let ids: Vec<u32> = tokens[..n].iter().map(|token| token.id).collect();
                speculator.observe(&hidden, row, seq, first, &ids);
                row += tokens.len();
            }
        }
        let last_token = |&i: &usize| {
            let (ids, seq) = (&running[i].sequence.ids, running[i].cache_seq);
            BatchToken { id: ids[ids.len() - 1], seq, pos: ids.len() - 1, output: true }
        };
        // Usually empty; `evaluate_again` then does nothing.
        let tokens: Vec<_> = needs_logits.iter().map(last_token).collect();
        let evaluated = choice::evaluate_again(&mut **pass, &tokens, |row, scores| {
            let i = needs_logits[row];
            outcomes.push((i, running[i].sequence.sample(scores, n_ctx)));
        });
        if let Err(why) = evaluated {
            outcomes.extend(needs_logits.iter().map(|&i| (i, Err(why.clone().into()))));
        }
        Ok((outcomes, held.len() as u64))
    }

    /// Starts the time slice of each sequence that has evaluated its first new token since its last admission: it has
    /// more tokens in the KV cache than ever before (`furthest_evaluated`, which `admission.rs` updates at admissions
    /// and preemptions). Tokens that are evaluated again after a preemption are not new, so every sequence makes
    /// progress in its time slice. A sequence whose time slice is over may be preempted for a waiting client
    /// ([`SchedulerOptions::time_slice`](super::SchedulerOptions::time_slice)).
    fn start_time_slices(&mut self) {
        let now = Instant::now();
        for r in &mut self.running {
            if r.time_slice_start.is_none() && self.pass.n_past(r.cache_seq) > r.sequence.furthest_evaluated {
                r.time_slice_start = Some(now);
            }
        }
    }

    /// Frees KV pages and state slots for the running sequences, by the first of these that is possible:
    ///
    /// 1. it evicts the idle cache sequence that was used least recently, which keeps the tokens of a finished or
    ///    preempted sequence; its pages are copied to the prefix store if there is space,
    /// 2. it preempts the embedding job that was started last,
    /// 3. it preempts, among the sequences of the client with the most running ones, the one whose first admission is
    ///    the most recent; its pages are copied to the prefix store if there is space, otherwise its tokens are
    ///    evaluated again,
    /// 4. it ends the only running sequence, which has all pages or state slots, as `ContextFull`.
    fn make_room(&mut self) {
        // The greatest pair is preempted first. A sequence keeps its `admission_number` when it is preempted.
        let preemption_order =
            |r: &RunningSequence<'_>| (self.n_running(r.sequence.client), r.sequence.admission_number);
        let candidate = self.running.iter().enumerate().max_by_key(|(_, r)| preemption_order(r)).map(|(i, _)| i);
        if let Some(seq) = self.cache_sequences.least_recently_used_idle(/* except */ None) {
            self.store_and_evict(seq);
        } else if !self.embeddings.is_empty() {
            self.preempt_embedding();
        } else if let Some(i) = candidate.filter(|_| self.running.len() > 1) {
            let seq = self.preempt(i);
            self.store_and_evict(seq);
        } else if let Some(i) = candidate {
            self.end(i, Ok(FinishReason::ContextFull));
        }
    }
}
