//! A request, and the events that answer it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sampling::SamplerOptions;
use crate::{Constraint, LogitsProcessor};
use tokio::sync::mpsc;

use super::RequestError;

/// Who asks. Clients take turns, however much each of them asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Client {
    /// Nobody in particular: all who say nothing about themselves are one client.
    #[default]
    Unknown,
    /// Whoever is at this address.
    Address(IpAddr),
    /// Whoever has this key, by its number.
    Key(usize),
}

/// A text to continue. The default continues nothing: a prompt has at least one token.
#[derive(Default)]
pub struct Request {
    /// Who asks.
    pub client: Client,
    /// Token ids of the prompt, special tokens included.
    pub prompt: Arc<[u32]>,
    /// How tokens are chosen.
    pub sampling: SamplerOptions,
    /// Most tokens to generate. `None`: until the model ends the text or the context is full.
    pub max_tokens: Option<usize>,
    /// Strings that end the text; they are not part of it.
    pub stop: Arc<[String]>,
    /// Tokens that end the text besides those of the vocabulary; they are not part of it.
    pub stop_ids: Arc<[u32]>,
    /// Never choose a token with which the vocabulary ends a text.
    pub ignore_eos: bool,
    /// The least number of tokens before one that ends the text may be chosen.
    pub min_tokens: usize,
    /// The text ends at the first line break after this time since its first token: a completion in an editor that takes too
    /// long is of use up to a line's end.
    pub line_end_after: Option<Duration>,
    /// Added to the logits of these tokens, besides the bias in `sampling`; -inf forbids a token.
    pub logit_bias: Vec<(u32, f32)>,
    /// `Some(n)`: tell the log probability of each token, and the `n` most probable ones.
    pub logprobs: Option<usize>,
    /// `Some(n)`: tell the log probability of each token of the prompt after the first, and the `n` most probable ones
    /// there. The prompt is then evaluated from its start, whatever the KV cache holds of it.
    pub prompt_logprobs: Option<usize>,
    /// Which tokens may come next.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Changes the logits of each token before everything else. It runs on the scheduler's thread: others wait for it. A
    /// panic or an error in it fails this request and no other.
    pub logits_processor: Option<Box<dyn LogitsProcessor>>,
    /// When the request ends, finished or not.
    pub deadline: Option<Instant>,
    /// Keep all events until the text is finished: a client that waits for the whole answer need not be woken for each
    /// token.
    pub whole: bool,
}

/// One step of a request's answer. The last one is [`Done`](Event::Done) or [`Failed`](Event::Failed), whatever
/// happens.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The prompt was evaluated, where the request asked for its log probabilities: those of each token but the first.
    Prompt(Vec<TokenLogprobs>),
    /// A token was chosen.
    Token {
        /// Its number in the vocabulary.
        id: u32,
        /// What can be shown of the text now: whole characters, and nothing that may turn out to be the start of a
        /// stop string. May be empty.
        text: String,
        /// Log probabilities, where the request asked for them.
        logprobs: Option<TokenLogprobs>,
    },
    /// The text is finished.
    Done {
        /// Why it ended.
        reason: FinishReason,
        /// Text that was held back and turned out to belong to it; mostly empty.
        text: String,
        /// The stop string that ended it; it is not part of the text.
        stop_string: Option<String>,
        /// The token that ended it, where the model chose one; it is not part of the text.
        end_token: Option<u32>,
        /// That token's log probabilities, where the request asked for them.
        end_logprobs: Option<TokenLogprobs>,
        /// Tokens it took.
        usage: Usage,
        /// Time it took.
        timings: RequestTimings,
    },
    /// The request could not be finished.
    Failed(RequestError),
}

/// Natural logarithms of probabilities, from the model's own logits: before biases, constraints and samplers.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token that was chosen, or that the prompt has here.
    pub logprob: f32,
    /// Its place among all tokens: 1 is the most probable one.
    pub rank: usize,
    /// Of the most probable tokens, highest first.
    pub top: Vec<(u32, f32)>,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The model chose a token that ends the text, or the constraint was complete.
    EndOfText,
    /// As many tokens as were asked for, or as much time as there was for them.
    Length,
    /// One of the stop strings.
    StopString,
    /// No room in the context, or in the whole KV cache.
    ContextFull,
    /// The request's deadline.
    Deadline,
    /// The scheduler shut down.
    Cancelled,
}

impl FinishReason {
    /// Every reason.
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

/// Tokens that a request took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that were in the KV cache already.
    pub cached_tokens: usize,
    /// Tokens generated, without the one that ended the text.
    pub generated_tokens: usize,
}

/// Time that a request took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestTimings {
    /// From its submission until it got a place in the KV cache.
    pub queued: Duration,
    /// From there to its first token.
    pub prefill: Duration,
    /// From its first token to its end.
    pub decode: Duration,
}

/// A text from its first token to its end.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The tokens that were generated.
    pub ids: Vec<u32>,
    /// Their text, without what ended it.
    pub text: String,
    /// Log probabilities of each token, where the request asked for them; else empty.
    pub logprobs: Vec<TokenLogprobs>,
    /// Log probabilities of each token of the prompt after the first, where the request asked for them; else empty.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Why it ended.
    pub reason: FinishReason,
    /// Tokens it took.
    pub usage: Usage,
    /// Time it took.
    pub timings: RequestTimings,
}

/// Puts a text together from its events.
#[derive(Default)]
struct CompletionSoFar {
    ids: Vec<u32>,
    text: String,
    logprobs: Vec<TokenLogprobs>,
    prompt_logprobs: Vec<TokenLogprobs>,
}

impl CompletionSoFar {
    /// Takes the next event; at the last one the whole text comes out.
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

/// The events of one request. Dropping it cancels the request, which gives up its place within one step.
#[derive(Debug)]
pub struct Events {
    receiver: mpsc::UnboundedReceiver<Event>,
    /// The last event was told.
    ended: bool,
}

impl Events {
    pub(super) fn new(receiver: mpsc::UnboundedReceiver<Event>) -> Self {
        Self { receiver, ended: false }
    }

    /// The next event; `None` after the last one. Nothing is lost where the wait for it is given up.
    pub async fn recv(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        let event = self.receiver.recv().await;
        Some(self.check_end(event))
    }

    /// [`recv`](Self::recv) for threads that may block; panics inside an async runtime.
    pub fn blocking_recv(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        let event = self.receiver.blocking_recv();
        Some(self.check_end(event))
    }

    /// Waits for the end of the text.
    pub async fn completion(self) -> Result<Completion, RequestError> {
        self.completion_with(|_| ()).await
    }

    /// [`completion`](Self::completion), which gives `observe` each event first.
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

    /// [`completion`](Self::completion) for threads that may block; panics inside an async runtime.
    pub fn blocking_completion(mut self) -> Result<Completion, RequestError> {
        let mut so_far = CompletionSoFar::default();
        loop {
            let event = self.receiver.blocking_recv();
            if let Some(completion) = so_far.add(self.check_end(event))? {
                return Ok(completion);
            }
        }
    }

    /// Where the other side ended without a last word, that is an error: nobody may take half a text for the whole.
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
    fn a_channel_that_ends_without_a_last_word_is_an_error() {
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
