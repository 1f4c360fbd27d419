//! The sequence of one generation request: its tokens, how the next one is sampled, and the events that its client
//! receives.
//!
//! A [`ScheduledSequence`] is made when the request leaves the queue, and lives until its last event. In between it
//! runs, or waits after a preemption. The engine evaluates its tokens; [`ScheduledSequence::sample`] turns the scores
//! of the last one into the next token.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::choice::{AllowedTokens, RequiredScores, Scores, choose, is_number, required_scores};
use crate::constraint::ActiveConstraint;
use crate::logits_processor::ActiveProcessor;
use crate::prompt::PrefixKey;
use crate::sampling::Sampler;
use crate::tokenizer::Tokenizer;
use crate::{PromptSpan, SpanKey, TextStream, highest};
use tokio::sync::mpsc;

use super::queue::{Submission, Ticket};
use super::{
    Client, Event, FinishReason, RequestError, RequestTimings, SequenceProgress, TokenLogprobs, Usage, panic_message,
};

/// The result of sampling a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepOutcome {
    /// A token was appended; the sequence continues.
    Continues,
    /// The scores (an argmax or a top-k list) do not determine the token: all logits of the last position are needed.
    NeedsLogits,
    /// The sequence is finished.
    Finished(FinishReason),
}

/// The log probabilities of a prompt's tokens, as far as the prompt was evaluated.
struct PromptLogprobsSoFar {
    /// Number of the most probable tokens that are reported at each position.
    n_top: usize,
    /// One entry for each token from the second on.
    list: Vec<TokenLogprobs>,
}

/// The sequence of a generation request from the queue to its last event.
pub(super) struct ScheduledSequence<'t> {
    /// Owner of the request, for fair shares between clients.
    pub client: Client,
    /// Token ids: the prompt, then the generated tokens.
    pub ids: Vec<u32>,
    /// The spans of embedding rows in the prompt.
    pub spans: Arc<[PromptSpan]>,
    /// Their keys.
    span_keys: Vec<SpanKey>,
    /// The most tokens that it can have, if its spans bound it: positions of text behind them may exceed the indices of
    /// its tokens.
    max_len: usize,
    /// Number in the order of first admission; larger is younger. A preempted sequence keeps it.
    pub admission_number: u64,
    /// The most tokens of it that were ever in the KV cache. Only tokens beyond these count as progress after a
    /// preemption.
    pub furthest_evaluated: usize,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Tokens of the prompt that were found in the KV cache at the first admission.
    n_cached: usize,
    /// Tokenizer of the model.
    tokenizer: &'t Tokenizer,
    /// The sampler, which has accepted all of `ids`.
    sampler: Sampler,
    /// Text of the generated tokens, with stop strings withheld.
    stream: TextStream<'t>,
    /// Maximum number of drafts in a step; `None`: as many as the scheduler allows.
    max_drafts: Option<usize>,
    /// Tokens of a text that the answer is likely to repeat.
    pub prediction: Arc<[u32]>,
    /// Drafts that were evaluated, and those that held.
    n_drafted: usize,
    n_accepted: usize,
    /// Maximum number of generated tokens; `None`: no limit.
    max_tokens: Option<usize>,
    /// Generated tokens before any end token may be sampled.
    min_tokens: usize,
    /// The sequence ends at the first line break after this time since its first generated token.
    line_end_after: Option<Duration>,
    /// End tokens of the request, in addition to those of the vocabulary.
    stop_ids: Arc<[u32]>,
    /// Tokens that must not be sampled before `min_tokens` tokens were generated: all end tokens.
    forbidden_before_min: Arc<[u32]>,
    /// Tokens that must not be sampled afterwards: with `ignore_eos` the vocabulary's end tokens, otherwise none.
    forbidden_after_min: Arc<[u32]>,
    /// The end token that was sampled, and its log probabilities if the request wants them.
    end: Option<(u32, Option<TokenLogprobs>)>,
    /// `Some(n)`: report each token's log probability and the `n` most probable tokens.
    logprobs: Option<usize>,
    /// Log probabilities of the prompt, until they are sent; `None` if not wanted.
    prompt_logprobs: Option<PromptLogprobsSoFar>,
    /// Constraint on the generated tokens.
    constraint: Option<ActiveConstraint>,
    /// Logits processor of the request.
    processing: Option<ActiveProcessor>,
    /// Size of the vocabulary, and length of the logits.
    n_vocab: usize,
    /// Time at which the sequence ends as `Deadline`.
    pub deadline: Option<Instant>,
    /// Channel to the client.
    events: mpsc::UnboundedSender<Event>,
    /// Events that are sent only at the end, if the request buffers them
    /// ([`Request::buffer_events`](super::Request::buffer_events)).
    buffered: Option<Vec<Event>>,
    /// Time at which the request was submitted.
    submitted: Instant,
    /// Time of the first admission.
    admitted: Option<Instant>,
    /// Time at which the first token was sampled.
    first_token: Option<Instant>,
    /// Counts the request as unfinished until it is dropped.
    ticket: Option<Ticket>,
}

impl<'t> ScheduledSequence<'t> {
    /// The sequence of `submission`, for a model with a vocabulary of `n_vocab` tokens. The prompt is already accepted
    /// by the sampler.
    pub fn new(submission: Submission, tokenizer: &'t Tokenizer, n_vocab: usize, admission_number: u64) -> Self {
        let Submission { request, span_keys, max_len, mut sampler, events, submitted, ticket } = submission;
        for &id in &*request.prompt {
            sampler.accept(id);
        }
        Self {
            client: request.client,
            admission_number,
            furthest_evaluated: 0,
            n_prompt: request.prompt.len(),
            n_cached: 0,
            ids: request.prompt.to_vec(),
            spans: request.spans,
            span_keys,
            max_len,
            tokenizer,
            sampler,
            stream: TextStream::new(tokenizer, &request.prompt, request.stop.to_vec()),
            max_drafts: request.max_drafts,
            prediction: request.prediction,
            n_drafted: 0,
            n_accepted: 0,
            max_tokens: request.max_tokens,
            min_tokens: request.min_tokens,
            line_end_after: request.line_end_after,
            forbidden_before_min: tokenizer.end_of_generation().iter().chain(&*request.stop_ids).copied().collect(),
            forbidden_after_min: if request.ignore_eos { tokenizer.end_of_generation().into() } else { Arc::default() },
            stop_ids: request.stop_ids,
            end: None,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs.map(|n_top| PromptLogprobsSoFar { n_top, list: Vec::new() }),
            constraint: request.constraint.map(ActiveConstraint::new),
            processing: request.logits_processor.map(ActiveProcessor::new),
            n_vocab,
            deadline: request.deadline,
            events,
            buffered: request.buffer_events.then(Vec::new),
            submitted,
            admitted: None,
            first_token: None,
            ticket,
        }
    }

    /// What its tokens are known by.
    pub fn key(&self) -> PrefixKey<'_> {
        PrefixKey { ids: &self.ids, spans: &self.span_keys }
    }

    /// Records an admission, with `n_cached` tokens found in the KV cache. Returns whether it is the first one; after a
    /// preemption `n_cached` is ignored.
    pub fn admit(&mut self, n_cached: usize) -> bool {
        let first = self.admitted.is_none();
        if first {
            self.admitted = Some(Instant::now());
            self.n_cached = n_cached;
        }
        first
    }

    /// The most drafts that the request allows and that are of use: the step gives one token more. `n_ctx` is the capacity
    /// of the context.
    pub fn max_drafts(&self, n_ctx: usize) -> usize {
        let left = self.max_tokens.map_or(usize::MAX, |max| max.saturating_sub(self.n_generated() + 1));
        let room = n_ctx.min(self.max_len).saturating_sub(self.ids.len());
        room.min(left).min(self.max_drafts.unwrap_or(usize::MAX))
    }

    /// Tokens that are likely to come next because its constraint leaves no choice. A panic of the constraint is met again,
    /// and reported, when it is asked for its mask.
    pub fn forced(&mut self) -> Vec<u32> {
        let Some(constraint) = &mut self.constraint else { return Vec::new() };
        catch_unwind(AssertUnwindSafe(|| constraint.forced())).unwrap_or_default()
    }

    /// How many of the drafts `ids` its constraint may allow.
    pub fn n_allowed(&mut self, ids: &[u32]) -> usize {
        let Some(constraint) = self.constraint.as_mut().filter(|_| !ids.is_empty()) else { return ids.len() };
        catch_unwind(AssertUnwindSafe(|| constraint.n_allowed(ids))).unwrap_or_default()
    }

    /// Counts drafts, and those of them that held.
    pub fn count_drafts(&mut self, n_drafts: usize, n_held: usize) {
        self.n_drafted += n_drafts;
        self.n_accepted += n_held;
    }

    /// Number of tokens generated so far.
    pub fn n_generated(&self) -> usize {
        self.ids.len() - self.n_prompt
    }

    /// Progress for the metrics, with `n_evaluated` tokens in the KV cache.
    pub fn progress(&self, n_evaluated: usize) -> SequenceProgress {
        let (n_prompt, n_cached) = (self.n_prompt, self.n_cached);
        SequenceProgress {
            n_prompt,
            n_cached,
            n_evaluated,
            n_generated: self.n_generated(),
            max_tokens: self.max_tokens,
        }
    }

    /// Whether the client has dropped its [`Events`](super::Events).
    pub fn is_abandoned(&self) -> bool {
        self.events.is_closed()
    }

    /// The position whose logits give the next missing log probability of the prompt (that of the token at the next
    /// position). `None` if none is missing or none is wanted.
    pub fn next_logprob_position(&self) -> Option<usize> {
        let scored = self.prompt_logprobs.as_ref()?.list.len();
        (scored + 1 < self.n_prompt).then_some(scored)
    }

    /// Adds the log probability that `logits`, `[n_vocab]`, give at position
    /// [`next_logprob_position`](Self::next_logprob_position). Sends the list to the client once it is complete. An
    /// error if the logit of the prompt's token is NaN or infinite.
    pub fn add_prompt_logprob(&mut self, logits: &[f32]) -> Result<(), RequestError> {
        let Some(position) = self.next_logprob_position() else { return Ok(()) };
        let Some(prompt) = &mut self.prompt_logprobs else { return Ok(()) };
        let id = self.ids[position + 1];
        if !is_number(Scores::Logits(logits), id) {
            return Err(RequestError::NoNumbers);
        }
        prompt.list.push(logprobs(logits, id, prompt.n_top));
        if self.next_logprob_position().is_none() {
            self.send_prompt_logprobs();
        }
        Ok(())
    }

    /// Sends the prompt's log probabilities to the client, unless that was done.
    fn send_prompt_logprobs(&mut self) {
        if let Some(prompt) = self.prompt_logprobs.take() {
            self.send(Event::Prompt(prompt.list));
        }
    }

    /// The scores that sampling the next token needs, if a list of `max_top_k` logits is cheaper than all of them.
    pub fn required_scores(&self, max_top_k: usize) -> RequiredScores {
        if self.logprobs.is_some() || self.processing.is_some() {
            return RequiredScores::Logits;
        }
        required_scores(&self.sampler, self.forbidden().len(), self.constraint.is_some(), max_top_k)
    }

    /// Samples the next token from `scores`, appends it and sends it to the client. `n_ctx` is the capacity of the
    /// context.
    ///
    /// A panic of the sampler, the constraint or the logits processor is caught and becomes an error of this sequence
    /// alone.
    pub fn sample(&mut self, scores: Scores<'_>, n_ctx: usize) -> Result<StepOutcome, RequestError> {
        // A prompt of one token has an empty list, which was not sent yet.
        self.send_prompt_logprobs();
        if self.max_tokens == Some(0) {
            return Ok(StepOutcome::Finished(FinishReason::Length));
        }
        catch_unwind(AssertUnwindSafe(|| {
            let Some(id) = self.choose(scores)? else { return Ok(StepOutcome::NeedsLogits) };
            if !is_number(scores, id) {
                return Err(RequestError::NoNumbers);
            }
            let logprobs = match (self.logprobs, scores) {
                (Some(n), Scores::Logits(logits)) => Some(logprobs(logits, id, n)),
                _ => None,
            };
            self.push(id, logprobs, n_ctx)
        }))
        .unwrap_or_else(|panic| {
            let message = panic_message(&*panic);
            tracing::error!("a request's next token could not be chosen: {message}");
            Err(RequestError::Panicked(message.to_owned()))
        })
    }

    /// Tokens that must not be sampled next.
    fn forbidden(&self) -> &Arc<[u32]> {
        if self.n_generated() < self.min_tokens { &self.forbidden_before_min } else { &self.forbidden_after_min }
    }

    /// The next token; `None` if `scores` are not enough.
    fn choose(&mut self, scores: Scores<'_>) -> Result<Option<u32>, RequestError> {
        let forbidden = Arc::clone(self.forbidden());
        let mask = self.constraint.as_mut().map(|constraint| constraint.mask(self.n_vocab, &forbidden));
        let mask = mask.transpose().map_err(RequestError::Constraint)?;
        let allowed = AllowedTokens { forbidden: &forbidden, mask };
        match &mut self.processing {
            Some(processing) => {
                processing.choose(&mut self.sampler, &self.ids, allowed, scores).map_err(RequestError::LogitsProcessor)
            }
            None => Ok(choose(&mut self.sampler, allowed, scores)),
        }
    }

    /// Appends a token and sends it to the client. An end token is not appended: it finishes the sequence.
    fn push(&mut self, id: u32, logprobs: Option<TokenLogprobs>, n_ctx: usize) -> Result<StepOutcome, RequestError> {
        self.first_token.get_or_insert_with(Instant::now);
        if self.tokenizer.is_end_of_generation(id) || self.stop_ids.contains(&id) {
            self.end = Some((id, logprobs));
            return Ok(StepOutcome::Finished(FinishReason::EndOfText));
        }
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(id).map_err(RequestError::Constraint)?;
        }
        self.ids.push(id);
        self.sampler.accept(id);
        let (text, stopped) = self.stream.push(id);
        let is_late = text.contains('\n') && self.is_late();
        self.send(Event::Token { id, text, logprobs });
        Ok(if stopped {
            StepOutcome::Finished(FinishReason::StopString)
        } else if self.constraint.as_ref().is_some_and(ActiveConstraint::is_complete) {
            StepOutcome::Finished(FinishReason::EndOfText)
        } else if is_late || self.max_tokens.is_some_and(|max| self.n_generated() >= max) {
            StepOutcome::Finished(FinishReason::Length)
        } else if self.ids.len() > n_ctx.min(self.max_len) {
            StepOutcome::Finished(FinishReason::ContextFull)
        } else {
            StepOutcome::Continues
        })
    }

    /// Whether the time of `line_end_after` is over.
    fn is_late(&self) -> bool {
        self.line_end_after.zip(self.first_token).is_some_and(|(time, first)| first.elapsed() >= time)
    }

    /// Sends an event, or buffers it. A closed channel is ignored here: the engine drops abandoned sequences before
    /// each step.
    fn send(&mut self, event: Event) {
        match &mut self.buffered {
            Some(buffered) => buffered.push(event),
            None => drop(self.events.send(event)),
        }
    }

    /// Sends the remaining text and `Event::Done`, after any buffered events.
    pub fn finish(mut self, reason: FinishReason) {
        // Dropped before the event is sent: a client that reads the load at its request's end must not find the request
        // counted.
        drop(self.ticket.take());
        let usage = Usage {
            prompt_tokens: self.n_prompt,
            cached_tokens: self.n_cached,
            generated_tokens: self.n_generated(),
            drafted_tokens: self.n_drafted,
            accepted_tokens: self.n_accepted,
        };
        let now = Instant::now();
        let admitted = self.admitted.unwrap_or(now);
        let first_token = self.first_token.unwrap_or(now);
        let timings = RequestTimings {
            queued: admitted - self.submitted,
            prefill: first_token - admitted,
            decode: now - first_token,
        };
        let stop_string = self.stream.stop_string().map(str::to_owned);
        let text = self.stream.finish();
        let (end_token, end_logprobs) = self.end.map_or((None, None), |(id, logprobs)| (Some(id), logprobs));
        let done = Event::Done { reason, text, stop_string, end_token, end_logprobs, usage, timings };
        send_last(&self.events, self.buffered, done);
    }

    /// Sends `Event::Failed`, after any buffered events.
    pub fn fail(mut self, why: RequestError) {
        drop(self.ticket.take());
        send_last(&self.events, self.buffered, Event::Failed(why));
    }
}

/// Sends the buffered events and then the last one.
fn send_last(events: &mpsc::UnboundedSender<Event>, buffered: Option<Vec<Event>>, last: Event) {
    for event in buffered.into_iter().flatten().chain([last]) {
        let _ = events.send(event);
    }
}

/// The log-softmax of `logits` at `id`, with its rank, and at the `n` highest logits. NaN is left out.
fn logprobs(logits: &[f32], id: u32, n: usize) -> TokenLogprobs {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().filter(|l| !l.is_nan()).map(|&l| f64::from(l - largest).exp()).sum();
    let of = |logit: f32| (f64::from(logit - largest) - sum.ln()) as f32;
    let top = highest(logits, n).into_iter().map(|(id, logit)| (id, of(logit))).collect();
    let logit = logits[id as usize];
    let rank = 1 + logits.iter().filter(|&&other| other > logit).count();
    TokenLogprobs { logprob: of(logit), rank, top }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_are_the_log_softmax() {
        // Probabilities 1/8, 1/2, 1/4, 1/8.
        let logits = [0.0f32, 4.0, 2.0, 1.0].map(|p| if p == 0.0 { 0.0 } else { p.ln() });
        let logprobs = logprobs(&logits, 2, 2);
        let close = |a: f32, p: f32| (a - p.ln()).abs() < 1e-6;
        assert!(close(logprobs.logprob, 0.25) && logprobs.rank == 2, "{logprobs:?}");
        assert_eq!(logprobs.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2]);
        assert!(close(logprobs.top[0].1, 0.5) && close(logprobs.top[1].1, 0.25), "{logprobs:?}");
    }
}
