//! The text of one request: its tokens, how the next one is chosen, and what its client hears of it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::choice::{Allowed, Need, Scores, choose, is_number, need};
use crate::constraint::Constraining;
use crate::logits_processor::Processing;
use crate::sampling::Sampler;
use crate::tokenizer::Tokenizer;
use crate::{TextStream, highest};
use tokio::sync::mpsc;

use super::queue::{Submission, Ticket};
use super::{
    Client, Event, FinishReason, RequestError, RequestTimings, RunningText, TokenLogprobs, Usage, panic_message,
};

/// Where a text is after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// A token was added.
    Goes,
    /// What the step brought was too little to choose from: the text waits for all logits.
    TooLittle,
    /// The text is finished.
    Finished(FinishReason),
}

/// Log probabilities of a prompt's tokens, as far as it was evaluated.
struct PromptLogprobs {
    /// So many of the most probable tokens are told at each position.
    n_top: usize,
    /// Those of the tokens from the second on.
    list: Vec<TokenLogprobs>,
}

/// A text that waits for a place, runs, or lost its place for a while.
pub(super) struct Text<'t> {
    pub client: Client,
    /// Prompt and generated tokens.
    pub ids: Vec<u32>,
    /// Counts texts in the order in which they got their places.
    pub number: u64,
    /// How many of its tokens were in the KV cache when it lost its place last.
    pub reached: usize,
    pub n_prompt: usize,
    n_cached: usize,
    tokenizer: &'t Tokenizer,
    sampler: Sampler,
    stream: TextStream<'t>,
    max_tokens: Option<usize>,
    /// No token that ends the text is chosen before there are so many others.
    min_tokens: usize,
    /// The text ends at the first line break after this time since its first token.
    line_end_after: Option<Duration>,
    /// Tokens that end the text besides those of the vocabulary.
    stop_ids: Arc<[u32]>,
    /// Tokens that are not chosen before there are so many others: all that end the text.
    forbidden_first: Arc<[u32]>,
    /// Tokens that are not chosen after that.
    forbidden_later: Arc<[u32]>,
    /// The token that ended the text, and its log probabilities.
    end: Option<(u32, Option<TokenLogprobs>)>,
    logprobs: Option<usize>,
    prompt_logprobs: Option<PromptLogprobs>,
    constraint: Option<Constraining>,
    processing: Option<Processing>,
    n_vocab: usize,
    /// When the text ends, finished or not.
    pub deadline: Option<Instant>,
    events: mpsc::UnboundedSender<Event>,
    /// Events that wait for the end of the text, where the client does.
    held: Option<Vec<Event>>,
    submitted: Instant,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    ticket: Option<Ticket>,
}

impl<'t> Text<'t> {
    /// The `number`-th text, for a model with `n_vocab` tokens.
    pub fn new(submission: Submission, tokenizer: &'t Tokenizer, n_vocab: usize, number: u64) -> Self {
        let Submission { request, mut sampler, events, submitted, ticket } = submission;
        for &id in &*request.prompt {
            sampler.accept(id);
        }
        Self {
            client: request.client,
            number,
            reached: 0,
            n_prompt: request.prompt.len(),
            n_cached: 0,
            ids: request.prompt.to_vec(),
            tokenizer,
            sampler,
            stream: TextStream::new(tokenizer, &request.prompt, request.stop.to_vec()),
            max_tokens: request.max_tokens,
            min_tokens: request.min_tokens,
            line_end_after: request.line_end_after,
            forbidden_first: tokenizer.end_of_generation().iter().chain(&*request.stop_ids).copied().collect(),
            forbidden_later: if request.ignore_eos { tokenizer.end_of_generation().into() } else { Arc::default() },
            stop_ids: request.stop_ids,
            end: None,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs.map(|n_top| PromptLogprobs { n_top, list: Vec::new() }),
            constraint: request.constraint.map(Constraining::new),
            processing: request.logits_processor.map(Processing::new),
            n_vocab,
            deadline: request.deadline,
            events,
            held: request.whole.then(Vec::new),
            submitted,
            admitted: None,
            first_token: None,
            ticket,
        }
    }

    /// The text has a place, with `n_cached` of its tokens in the KV cache. False where it had one before.
    pub fn admit(&mut self, n_cached: usize) -> bool {
        let first = self.admitted.is_none();
        if first {
            self.admitted = Some(Instant::now());
            self.n_cached = n_cached;
        }
        first
    }

    /// Tokens generated so far.
    pub fn n_generated(&self) -> usize {
        self.ids.len() - self.n_prompt
    }

    /// How far the text is, with `n_evaluated` of its tokens in the KV cache.
    pub fn progress(&self, n_evaluated: usize) -> RunningText {
        let (n_prompt, n_cached) = (self.n_prompt, self.n_cached);
        RunningText { n_prompt, n_cached, n_evaluated, n_generated: self.n_generated(), max_tokens: self.max_tokens }
    }

    /// Whether nobody listens any more.
    pub fn is_abandoned(&self) -> bool {
        self.events.is_closed()
    }

    /// The first position whose logits give a log probability of the prompt that is still missing; `None` where none is.
    /// The logits there are those of the token after it.
    pub fn next_scored(&self) -> Option<usize> {
        let scored = self.prompt_logprobs.as_ref()?.list.len();
        (scored + 1 < self.n_prompt).then_some(scored)
    }

    /// Takes the logits at position [`next_scored`](Self::next_scored), and tells the client once the prompt is whole. An error
    /// where they are no numbers.
    pub fn score(&mut self, logits: &[f32]) -> Result<(), RequestError> {
        let Some(position) = self.next_scored() else { return Ok(()) };
        let Some(prompt) = &mut self.prompt_logprobs else { return Ok(()) };
        let id = self.ids[position + 1];
        if !is_number(Scores::Logits(logits), id) {
            return Err(RequestError::NoNumbers);
        }
        prompt.list.push(logprobs(logits, id, prompt.n_top));
        if self.next_scored().is_none() {
            self.tell_prompt();
        }
        Ok(())
    }

    /// Tells the client the prompt's log probabilities, once.
    fn tell_prompt(&mut self) {
        if let Some(prompt) = self.prompt_logprobs.take() {
            self.tell(Event::Prompt(prompt.list));
        }
    }

    /// What the next choice takes, where a list of `max_top_k` logits is cheaper than all of them.
    pub fn need(&self, max_top_k: usize) -> Need {
        if self.logprobs.is_some() || self.processing.is_some() {
            return Need::Logits;
        }
        need(&self.sampler, self.forbidden().len(), self.constraint.is_some(), max_top_k)
    }

    /// Chooses the next token from `scores` and adds it to the text, which has room for `n_ctx` tokens. A panic
    /// of the sampler, the constraint or the logits processor is an error of this text alone.
    pub fn step(&mut self, scores: Scores<'_>, n_ctx: usize) -> Result<Progress, RequestError> {
        // A prompt of one token has no log probabilities.
        self.tell_prompt();
        if self.max_tokens == Some(0) {
            return Ok(Progress::Finished(FinishReason::Length));
        }
        catch_unwind(AssertUnwindSafe(|| {
            let Some(id) = self.choose(scores)? else { return Ok(Progress::TooLittle) };
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

    /// Tokens not to choose next.
    fn forbidden(&self) -> &Arc<[u32]> {
        if self.n_generated() < self.min_tokens { &self.forbidden_first } else { &self.forbidden_later }
    }

    fn choose(&mut self, scores: Scores<'_>) -> Result<Option<u32>, RequestError> {
        let forbidden = Arc::clone(self.forbidden());
        let mask = self.constraint.as_mut().map(|constraint| constraint.mask(self.n_vocab, &forbidden));
        let mask = mask.transpose().map_err(RequestError::Constraint)?;
        let allowed = Allowed { forbidden: &forbidden, mask };
        match &mut self.processing {
            Some(processing) => {
                processing.choose(&mut self.sampler, &self.ids, allowed, scores).map_err(RequestError::LogitsProcessor)
            }
            None => Ok(choose(&mut self.sampler, allowed, scores)),
        }
    }

    /// Adds a token to the text and tells the client.
    fn push(&mut self, id: u32, logprobs: Option<TokenLogprobs>, n_ctx: usize) -> Result<Progress, RequestError> {
        self.first_token.get_or_insert_with(Instant::now);
        if self.tokenizer.is_end_of_generation(id) || self.stop_ids.contains(&id) {
            self.end = Some((id, logprobs));
            return Ok(Progress::Finished(FinishReason::EndOfText));
        }
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(id).map_err(RequestError::Constraint)?;
        }
        self.ids.push(id);
        self.sampler.accept(id);
        let (text, stopped) = self.stream.push(id);
        let is_late = text.contains('\n') && self.is_late();
        self.tell(Event::Token { id, text, logprobs });
        Ok(if stopped {
            Progress::Finished(FinishReason::StopString)
        } else if self.constraint.as_ref().is_some_and(Constraining::is_complete) {
            Progress::Finished(FinishReason::EndOfText)
        } else if is_late || self.max_tokens.is_some_and(|most| self.n_generated() >= most) {
            Progress::Finished(FinishReason::Length)
        } else if self.ids.len() > n_ctx {
            Progress::Finished(FinishReason::ContextFull)
        } else {
            Progress::Goes
        })
    }

    /// Whether the text had its time, and ends with its line.
    fn is_late(&self) -> bool {
        self.line_end_after.zip(self.first_token).is_some_and(|(time, first)| first.elapsed() >= time)
    }

    /// Tells the client, now or at the end. Where nobody listens any more, the next look at all texts finds out.
    fn tell(&mut self, event: Event) {
        match &mut self.held {
            Some(held) => held.push(event),
            None => drop(self.events.send(event)),
        }
    }

    /// Tells the client that the text is finished, and what was held back of it.
    pub fn finish(mut self, reason: FinishReason) {
        // Who hears of the end may look how much there is to do.
        drop(self.ticket.take());
        let usage =
            Usage { prompt_tokens: self.n_prompt, cached_tokens: self.n_cached, generated_tokens: self.n_generated() };
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
        tell_last(&self.events, self.held, done);
    }

    /// Tells the client that the text cannot be finished.
    pub fn fail(mut self, why: RequestError) {
        drop(self.ticket.take());
        tell_last(&self.events, self.held, Event::Failed(why));
    }
}

/// Tells the client the last event of all, after those that were held.
fn tell_last(events: &mpsc::UnboundedSender<Event>, held: Option<Vec<Event>>, last: Event) {
    for event in held.into_iter().flatten().chain([last]) {
        let _ = events.send(event);
    }
}

/// The log-softmax of `logits` at `id` and at the `n` highest.
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
