//! One step of the scheduler: plans a batch, evaluates it and samples the next tokens.
//!
//! [`Engine::step`] is called once per turn of the engine's loop. Its batch holds one decode token of each running
//! sequence that has only one token left to evaluate, and prefill chunks of the others. A step that fails for want of
//! KV pages frees pages, by preemption if need be, and is planned again.

use std::time::Instant;

use crate::choice::{self, RequiredScores, Scores};
use crate::{BatchToken, ForwardError};

use super::client_ring::split_tokens;
use super::embedding::MAX_LOGITS_BYTES;
use super::engine::{Engine, RunningSequence};
use super::scheduled_sequence::StepOutcome;
use super::{FinishReason, RequestError};

/// The batch of a step, and how its logits are used.
#[derive(Debug, Default)]
struct BatchPlan {
    /// Decode tokens, then prefill chunks; the tokens of one sequence are consecutive.
    tokens: Vec<BatchToken>,
    /// The use of each row of logits: one entry for each token of `tokens` with `output` set, in the same order.
    logits_uses: Vec<LogitsUse>,
    /// Sequences whose only token in the batch was generated in an earlier step.
    n_decode: usize,
}

/// The use of one row of logits, with the index of its sequence in [`Engine::running`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LogitsUse {
    /// The next token is sampled from the row.
    Sample(usize),
    /// The row gives the log probability of the prompt's next token.
    PromptLogprob(usize),
}

/// Pairs of an index in [`Engine::running`] and what the step did to that sequence. A sequence that evaluated only a
/// part of its prompt has no entry.
type SequenceOutcomes = Vec<(usize, Result<StepOutcome, RequestError>)>;

impl Engine<'_> {
    /// Evaluates one batch and ends the sequences that it finishes. Returns without effect if no sequence runs.
    ///
    /// If KV pages or recurrent states run out, it frees some and tries again with a new batch. Any other error of the
    /// forward pass ends the sequences of the batch with that error.
    pub(super) fn step(&mut self) {
        loop {
            let batch = self.plan_batch();
            if batch.tokens.is_empty() {
                return;
            }
            let n_generated = self.n_generated();
            let start = Instant::now();
            match self.evaluate(&batch) {
                Ok(mut outcomes) => {
                    self.batch_sizer.record_step(batch.tokens.len(), start.elapsed());
                    self.mark_progress();
                    self.keep_prompt_ends();
                    let n_new = self.n_generated() - n_generated;
                    self.count(|metrics| {
                        metrics.count_step(batch.tokens.len());
                        metrics.prompt_tokens += (batch.tokens.len() - batch.n_decode) as u64;
                        metrics.generated_tokens += n_new as u64;
                    });
                    // Highest index first: ending a sequence removes it from `running` and shifts those after it.
                    outcomes.sort_unstable_by_key(|(i, _)| std::cmp::Reverse(*i));
                    for (i, outcome) in outcomes {
                        match outcome {
                            Ok(StepOutcome::Finished(reason)) => self.end(i, Ok(reason)),
                            Ok(_) => {}
                            Err(why) => self.end(i, Err(why)),
                        }
                    }
                    return;
                }
                Err(ForwardError::OutOfPages { .. } | ForwardError::OutOfStates { .. }) => self.free_pages(),
                Err(why) => {
                    tracing::error!("a step over {} tokens failed: {why}", batch.tokens.len());
                    let failed = |seq| batch.tokens.iter().any(|token| token.seq == seq);
                    for i in (0..self.running.len()).rev() {
                        if failed(self.running[i].seq) {
                            self.end(i, Err(why.clone().into()));
                        }
                    }
                    return;
                }
            }
        }
    }

    /// Plans the next batch: one token of each sequence with a single token left to evaluate, then prefill chunks of
    /// the others, whose tokens are divided equally between clients.
    fn plan_batch(&self) -> BatchPlan {
        let mut batch = BatchPlan::default();
        let unevaluated = |i: usize| self.running[i].sequence.ids.len() - self.pass.n_past(self.running[i].seq);
        let (decoding, prefilling): (Vec<_>, Vec<_>) = (0..self.running.len()).partition(|&i| unevaluated(i) == 1);
        let max_prefill = self.batch_sizer.prompt_tokens(decoding.len(), self.running.len() > 1);
        let wanted: Vec<_> = prefilling.iter().map(|&i| (self.running[i].sequence.client, unevaluated(i))).collect();
        let chunks = split_tokens(&wanted, max_prefill);
        let decoding = decoding.into_iter().map(|i| (i, 1));
        // Rows of logits that this step may still return for the log probabilities of prompts.
        let mut logprob_rows = (MAX_LOGITS_BYTES / (4 * self.pass.spec().n_vocab)).max(1);
        for (i, n) in decoding.chain(prefilling.into_iter().zip(chunks)).filter(|&(_, n)| n > 0) {
            let (sequence, seq) = (&self.running[i].sequence, self.running[i].seq);
            let start = self.pass.n_past(seq);
            let last = sequence.ids.len() - 1;
            // Positions whose logits give log probabilities of the prompt; the last one's are sampled from.
            let scored = sequence.next_prompt_logprob().map_or(last..last, |first| first.max(start)..last);
            // A chunk with more such rows is cut; the next step continues it.
            let n = if scored.is_empty() { n } else { n.min(scored.start + logprob_rows - start) };
            let token =
                |pos| BatchToken { id: sequence.ids[pos], seq, pos, output: pos == last || scored.contains(&pos) };
            batch.tokens.extend((start..start + n).map(token));
            let n_scored = (start..start + n).filter(|pos| scored.contains(pos)).count();
            logprob_rows -= n_scored;
            batch.logits_uses.extend(std::iter::repeat_n(LogitsUse::PromptLogprob(i), n_scored));
            if start + n == sequence.ids.len() {
                batch.logits_uses.push(LogitsUse::Sample(i));
                batch.n_decode += usize::from(n == 1 && sequence.n_generated() > 0);
            }
        }
        batch
    }

    /// The number of tokens generated so far, over all running sequences.
    fn n_generated(&self) -> usize {
        self.running.iter().map(|r| r.sequence.n_generated()).sum()
    }

    /// Evaluates `batch` and samples from its logits.
    ///
    /// All rows are returned in the form that the most demanding of them needs: argmax, top-k list or logits. A
    /// sequence that cannot sample from its top-k list has its last token evaluated a second time, for all logits.
    ///
    /// An error means that the batch itself failed: no sequence has changed. If only the second evaluation fails, the
    /// error is the outcome of the sequences it was for.
    fn evaluate(&mut self, batch: &BatchPlan) -> Result<SequenceOutcomes, ForwardError> {
        let k = self.pass.max_top_k();
        let required_by = |logits_use: &LogitsUse| match *logits_use {
            LogitsUse::Sample(i) => self.running[i].sequence.required_scores(k),
            LogitsUse::PromptLogprob(_) => RequiredScores::Logits,
        };
        let required = batch.logits_uses.iter().map(required_by).max().unwrap_or(RequiredScores::Logits);
        let Self { pass, running, .. } = self;
        let n_ctx = pass.n_ctx();
        let mut outcomes: SequenceOutcomes = Vec::new();
        let mut again = Vec::new();
        choice::evaluate(&mut **pass, &batch.tokens, required, |row, scores| match (batch.logits_uses[row], scores) {
            // A sequence that has failed ignores its later rows.
            (LogitsUse::PromptLogprob(i) | LogitsUse::Sample(i), _)
                if outcomes.iter().any(|(failed, _)| *failed == i) => {}
            (LogitsUse::PromptLogprob(i), Scores::Logits(logits)) => {
                outcomes.extend(running[i].sequence.add_prompt_logprob(logits).err().map(|why| (i, Err(why))));
            }
            (LogitsUse::PromptLogprob(_), Scores::Argmax(_) | Scores::TopK(..)) => {}
            (LogitsUse::Sample(i), scores) => match running[i].sequence.sample(scores, n_ctx) {
                Ok(StepOutcome::NeedsLogits) => again.push(i),
                outcome => outcomes.push((i, outcome)),
            },
        })?;
        let last_token = |&i: &usize| {
            let (ids, seq) = (&running[i].sequence.ids, running[i].seq);
            BatchToken { id: ids[ids.len() - 1], seq, pos: ids.len() - 1, output: true }
        };
        let tokens: Vec<_> = again.iter().map(last_token).collect();
        let evaluated = choice::evaluate_again(&mut **pass, &tokens, |row, scores| {
            let i = again[row];
            outcomes.push((i, running[i].sequence.sample(scores, n_ctx)));
        });
        if let Err(why) = evaluated {
            outcomes.extend(again.iter().map(|&i| (i, Err(why.clone().into()))));
        }
        Ok(outcomes)
    }

    /// Starts the time slice of each sequence that has evaluated a token for the first time. Tokens that it
    /// re-evaluates after a preemption do not count, so that every sequence gets further in its slice.
    fn mark_progress(&mut self) {
        let now = Instant::now();
        for r in &mut self.running {
            if r.progressed_at.is_none() && self.pass.n_past(r.seq) > r.sequence.max_evaluated {
                r.progressed_at = Some(now);
            }
        }
    }

    /// Frees KV pages for the running sequences, by the first of these that is possible:
    ///
    /// 1. it evicts the idle sequence (finished or preempted) that was used least recently,
    /// 2. it preempts the embedding that was started last,
    /// 3. it preempts the youngest sequence of a client with the most running sequences; its pages are found again in
    ///    the prefix store, or its tokens are evaluated again,
    /// 4. it ends the only running sequence, which fills the whole KV cache, as `ContextFull`.
    fn free_pages(&mut self) {
        let rank = |r: &RunningSequence<'_>| (self.n_running(r.sequence.client), r.sequence.number);
        let youngest = self.running.iter().enumerate().max_by_key(|(_, r)| rank(r)).map(|(i, _)| i);
        if let Some(seq) = self.sequences.oldest_idle(None) {
            self.store_and_evict(seq);
        } else if !self.embeddings.is_empty() {
            self.preempt_embedding();
        } else if let Some(i) = youngest.filter(|_| self.running.len() > 1) {
            let seq = self.preempt(i);
            self.store_and_evict(seq);
        } else if let Some(i) = youngest {
            self.end(i, Ok(FinishReason::ContextFull));
        }
    }
}
