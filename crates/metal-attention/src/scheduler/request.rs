//! A generation request, and the events that answer it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sampling::SamplerOptions;
use crate::{Constraint, LogitsProcessor, PromptSpan};
use tokio::sync::mpsc;

use super::RequestError;

/// The client that a request is of. Slots and tokens are divided equally between clients, however many requests each
/// has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Client {
    /// An unidentified client; all of these count as one client.
    #[default]
    Unknown,
    /// The client with this network address.
    Address(IpAddr),
    /// The client with this API key, by its index.
    Key(usize),
}

/// A request to continue a prompt. The default has an empty prompt, which is refused.
#[derive(Default)]
pub struct Request {
    /// The client.
    pub client: Client,
    /// Token ids of the prompt, special tokens included.
    pub prompt: Arc<[u32]>,
    /// Rows of embeddings in the place of some inputs of the prompt, which has ids there, too: in order, without
    /// overlap, and none at the prompt's end. Usually empty. Not with `prompt_logprobs`.
    pub spans: Arc<[PromptSpan]>,
    /// Options of the sampler.
    pub sampling: SamplerOptions,
    /// Maximum number of tokens to generate. `None`: until an end token is sampled or the context is full.
    pub max_tokens: Option<usize>,
    /// Strings that end the generation; they are not part of the result.
    pub stop: Arc<[String]>,
    /// Tokens that end the generation, in addition to the vocabulary's end tokens; they are not part of the result.
    pub stop_ids: Arc<[u32]>,
    /// Never sample the vocabulary's end tokens.
    pub ignore_eos: bool,
    /// Minimum number of tokens before an end token may be sampled.
    pub min_tokens: usize,
    /// The generation ends at the first line break after this time since its first token: an editor's completion that
    /// takes too long is still useful up to the end of a line.
    pub line_end_after: Option<Duration>,
    /// Added to the logits of these tokens, in addition to the bias in `sampling`; -inf forbids a token.
    pub logit_bias: Vec<(u32, f32)>,
    /// `Some(n)`: report the log probability of each generated token, and the `n` most probable tokens.
    pub logprobs: Option<usize>,
    /// `Some(n)`: report the log probability of each token of the prompt after the first, and the `n` most probable
    /// tokens there. The prompt is then evaluated from its start, whatever prefix the KV cache has.
    pub prompt_logprobs: Option<usize>,
    /// Restricts the tokens that may be sampled.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Changes the logits before all other rules. It runs on the engine's thread, so that all sequences wait for it. A
    /// panic or an error in it fails only this request.
    pub logits_processor: Option<Box<dyn LogitsProcessor>>,
    /// Time at which the request ends, finished or not.
    pub deadline: Option<Instant>,
    /// Maximum number of drafts in a step of this request; 0: none, each step gives it one token. `None`: as many as
    /// [`SchedulerOptions::draft_depth`](super::SchedulerOptions::draft_depth) allows. The text does not depend on it.
    pub max_drafts: Option<usize>,
    /// Tokens of a text that the answer is likely to repeat, such as the text that it edits: drafts are taken from it,
    /// too. Usually empty. Tokens beyond the length of a context are ignored. The text does not depend on it.
    pub prediction: Arc<[u32]>,
    /// Send all events at the end: a client that waits for the whole result is not woken for each token.
    pub buffer_events: bool,
}

/// An event of a generation. The last one is always [`Done`](Event::Done) or [`Failed`](Event::Failed).
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The prompt was evaluated: log probabilities of each token but the first. Only if the request asked for them.
    Prompt(Vec<TokenLogprobs>),
    /// A token was sampled.
    Token {
        /// Its id.
        id: u32,
        /// The text that is certain now: whole characters, and nothing that may be the start of a stop string. May be
        /// empty.
        text: String,
        /// Log probabilities, if requested.
        logprobs: Option<TokenLogprobs>,
    },
    /// The generation is finished.
    Done {
        /// Why it ended.
        reason: FinishReason,
        /// The last of the text, which was withheld as a possible stop string; usually empty.
        text: String,
        /// The stop string that ended it, not part of the text.
        stop_string: Option<String>,
        /// The end token that was sampled, not part of the text.
        end_token: Option<u32>,
        /// The end token's log probabilities, if requested.
        end_logprobs: Option<TokenLogprobs>,
        /// Token counts.
        usage: Usage,
        /// Durations.
        timings: RequestTimings,
    },
    /// The request failed.
    Failed(RequestError),
}

/// Natural logarithms of probabilities, from the model's logits before biases, constraints and samplers.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Log probability of the sampled token, or of the prompt's token.
    pub logprob: f32,
    /// Its rank among all tokens; 1 is the most probable one.
    pub rank: usize,
    /// Ids and log probabilities of the most probable tokens, highest first.
    pub top: Vec<(u32, f32)>,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end token was sampled, or the constraint is complete.
    EndOfText,
    /// `max_tokens` was reached, or the line ended after `line_end_after`.
    Length,
    /// A stop string was generated.
    StopString,
    /// The context, or the whole KV cache, is full.
    ContextFull,
    /// The request's deadline has passed.
    Deadline,
    /// The scheduler was shut down, or the client has dropped its events.
    Cancelled,
}

impl FinishReason {
    /// All reasons.
    pub const ALL: [Self; 6] =
        [Self::EndOfText, Self::Length, Self::StopString, Self::ContextFull, Self::Deadline, Self::Cancelled];

    /// The reason in snake case, as in `"end_of_text"`.
    pub fn name(self) -> &'static str {
        match self {
            Self::EndOfText => "end_of_text",
            Self::Length => "length",
            Self::StopString => "stop_string",
            Self::ContextFull => "context_full",
            Self::Deadline => "deadline",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Token counts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt, those in the place of rows included.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that were in the KV cache already.
    pub cached_tokens: usize,
    /// Generated tokens, the end token not included.
    pub generated_tokens: usize,
    /// Drafts that were evaluated for it.
    pub drafted_tokens: usize,
    /// Drafts that held, and are among the generated tokens.
    pub accepted_tokens: usize,
}

/// Durations of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestTimings {
    /// From submission to admission.
    pub queued: Duration,
    /// From admission to the first token.
    pub prefill: Duration,
    /// From the first token to the end.
    pub decode: Duration,
}

/// A finished generation.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The generated token ids.
    pub ids: Vec<u32>,
    /// Their text, without the stop string.
    pub text: String,
    /// Log probabilities of each generated token, if requested; otherwise empty.
    pub logprobs: Vec<TokenLogprobs>,
    /// Log probabilities of each token of the prompt after the first, if requested; otherwise empty.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Why it ended.
    pub reason: FinishReason,
    /// Token counts.
    pub usage: Usage,
    /// Durations.
    pub timings: RequestTimings,
}

/// A completion in the making: collects a request's events.
#[derive(Default)]
struct CompletionSoFar {
    ids: Vec<u32>,
    text: String,
    logprobs: Vec<TokenLogprobs>,
    prompt_logprobs: Vec<TokenLogprobs>,
}

impl CompletionSoFar {
    /// Adds an event. Returns the completion at `Done`, and an error at `Failed`.
    fn add(&mut self, event: Event) -> Result<Option<Completion>, RequestError> {
        match event {
            Event::Prompt(logprobs) => {
                self.prompt_logprobs = logprobs;
                Ok(None)
            }
            Event::Token { id, text, logprobs } => {
                self.ids.push(id);
                self.text += &text;
                self.logprobs.extend(logprobs);
                Ok(None)
            }
            Event::Done { reason, text, usage, timings, stop_string: _, end_token: _, end_logprobs: _ } => {
                let Self { ids, text: so_far, logprobs, prompt_logprobs } = std::mem::take(self);
                Ok(Some(Completion { ids, text: so_far + &text, logprobs, prompt_logprobs, reason, usage, timings }))
            }
            Event::Failed(why) => Err(why),
        }
    }
}

/// The events of one request. Dropping it cancels the request, which leaves its slot within one step.
#[derive(Debug)]
pub struct Events {
    receiver: mpsc::UnboundedReceiver<Event>,
    /// Whether the last event was received.
    ended: bool,
}

impl Events {
    /// The events of a request that was just submitted.
    pub(super) fn new(receiver: mpsc::UnboundedReceiver<Event>) -> Self {
        Self { receiver, ended: false }
    }

    /// The next event; `None` after the last one. Cancelling the wait loses no event.
    pub async fn recv(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        let event = self.receiver.recv().await;
        Some(self.check_end(event))
    }

    /// Blocking [`recv`](Self::recv). Panics inside an async runtime.
    pub fn blocking_recv(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        let event = self.receiver.blocking_recv();
        Some(self.check_end(event))
    }

    /// Waits for the end of the generation.
    pub async fn completion(self) -> Result<Completion, RequestError> {
        self.completion_with(|_| ()).await
    }

    /// [`completion`](Self::completion) that passes each event to `observe` first.
    pub async fn completion_with(mut self, mut observe: impl FnMut(&Event)) -> Result<Completion, RequestError> {
        let mut so_far = CompletionSoFar::default();
        loop {
            let event = self.receiver.recv().await;
            let event = self.check_end(event);
            observe(&event);
            if let Some(completion) = so_far.add(event)? {
                return Ok(completion);
            }
        }
    }

    /// Blocking [`completion`](Self::completion). Panics inside an async runtime.
    pub fn blocking_completion(mut self) -> Result<Completion, RequestError> {
        let mut so_far = CompletionSoFar::default();
        loop {
            let event = self.receiver.blocking_recv();
            if let Some(completion) = so_far.add(self.check_end(event))? {
                return Ok(completion);
            }
        }
    }

    /// Records whether `event` is the last one. A closed channel is an error: a partial text must not pass for a whole
    /// one.
    fn check_end(&mut self, event: Option<Event>) -> Event {
        let event = event.unwrap_or(Event::Failed(RequestError::EngineFailed));
        self.ended = matches!(event, Event::Done { .. } | Event::Failed(_));
        event
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_that_closes_without_a_last_event_is_an_error() {
        let (sender, receiver) = mpsc::unbounded_channel();
        let token = || Event::Token { id: 1, text: "a".into(), logprobs: None };
        sender.send(token()).unwrap();
        drop(sender);
        let mut events = Events::new(receiver);
        assert_eq!(events.blocking_recv(), Some(token()));
        assert_eq!(events.blocking_recv(), Some(Event::Failed(RequestError::EngineFailed)));
        assert_eq!(events.blocking_recv(), None);
        assert_eq!(pollster::block_on(events.recv()), None);
    }
}
