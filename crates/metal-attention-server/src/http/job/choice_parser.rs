//! Parses the scheduler's events of a chat into text, reasoning and tool calls.

use std::sync::Arc;

use metal_attention::scheduler::{Event, FinishReason, RequestTimings, TokenLogprobs, Usage};
use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::{AnswerEvent, ToolCallParser};

use crate::http::ApiError;

/// The meaning of an event for its choice.
#[derive(Debug)]
pub enum ChatEvent {
    /// The prompt was evaluated: log probabilities of its tokens after the first.
    Prompt(Vec<TokenLogprobs>),
    /// A part of the text, the reasoning or a tool call.
    Answer(AnswerEvent),
    /// The current tool call ends because the sequence was cut off: its arguments may be incomplete.
    CutCall,
    /// The log probabilities of the generated token with this id.
    Logprobs(u32, TokenLogprobs),
    /// The choice is complete. The last event.
    End(ChatEnd),
}

/// The end of a choice.
#[derive(Debug)]
pub struct ChatEnd {
    /// The reason.
    pub reason: EndReason,
    /// Prompt and generated tokens.
    pub usage: Usage,
    /// Tokens of reasoning, including its delimiters; `None` if there was no reasoning.
    pub reasoning_tokens: Option<usize>,
    /// Times of the sequence.
    pub timings: RequestTimings,
}

/// The reason why a choice ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndReason {
    /// The model generated an end-of-text token.
    End,
    /// The model made tool calls and ended its text, or the first call ended it.
    Calls,
    /// A stop string, this one.
    StopString(String),
    /// The maximum number of generated tokens.
    Length,
    /// The context is full.
    ContextFull,
}

impl EndReason {
    /// The reason for a sequence that ended with `reason`. A timeout or a shutdown is an error.
    pub fn of_sequence(reason: FinishReason, stop_string: Option<String>) -> Result<Self, ApiError> {
        match reason {
            FinishReason::EndOfText => Ok(Self::End),
            FinishReason::StopString => Ok(Self::StopString(stop_string.unwrap_or_default())),
            FinishReason::Length => Ok(Self::Length),
            FinishReason::ContextFull => Ok(Self::ContextFull),
            FinishReason::Deadline => Err(ApiError::deadline()),
            FinishReason::Cancelled => Err(ApiError::shutting_down()),
        }
    }

    /// Whether the choice was cut off before the model ended it.
    pub fn is_cut(&self) -> bool {
        match self {
            Self::End | Self::Calls | Self::StopString(_) => false,
            Self::Length | Self::ContextFull => true,
        }
    }
}

/// The parser of one choice's events.
pub struct ChoiceParser {
    /// Splits text into content, reasoning and tool calls.
    parser: ToolCallParser,
    /// Whether the choice ends after its first tool call; later output is dropped.
    single_call: bool,
    /// Whether a tool call has ended.
    called: bool,
    /// Tokens of reasoning so far; `None`: no reasoning so far.
    reasoning_tokens: Option<usize>,
}

impl ChoiceParser {
    /// A choice that `parser` splits. `single_call`: it ends after its first tool call.
    pub fn new(parser: ToolCallParser, single_call: bool) -> Self {
        Self { parser, single_call, called: false, reasoning_tokens: None }
    }

    /// Converts the parser's events. `is_cut`: a call that ends among them was cut off.
    fn convert(&mut self, events: Vec<AnswerEvent>, is_cut: bool) -> Vec<ChatEvent> {
        let mut parts = Vec::new();
        for event in events {
            if self.single_call && self.called {
                break;
            }
            let is_end = matches!(event, AnswerEvent::CallEnd { .. });
            self.called |= is_end;
            parts.push(if is_end && is_cut { ChatEvent::CutCall } else { ChatEvent::Answer(event) });
        }
        parts
    }
}

/// The parsers of all choices of one job.
pub struct ChoiceParsers {
    /// The model's tokenizer, which gives the bytes of tokens.
    tokenizer: Arc<Tokenizer>,
    /// One parser a choice, by index.
    choices: Vec<ChoiceParser>,
}

impl ChoiceParsers {
    /// The parsers `choices` of a model with `tokenizer`.
    pub fn new(tokenizer: Arc<Tokenizer>, choices: Vec<ChoiceParser>) -> Self {
        Self { tokenizer, choices }
    }

    /// The number of choices.
    pub fn len(&self) -> usize {
        self.choices.len()
    }

    /// Parses an event of choice `i`. An error (timeout, shutdown, failed sequence) ends the whole request.
    pub fn parse(&mut self, i: usize, event: Event) -> Result<Vec<ChatEvent>, ApiError> {
        let choice = &mut self.choices[i];
        match event {
            Event::Prompt(logprobs) => Ok(vec![ChatEvent::Prompt(logprobs)]),
            Event::Token { id, text, logprobs } => {
                let was_reasoning = choice.parser.is_reasoning();
                let events = choice.parser.push_token(&self.tokenizer, id, &text);
                if was_reasoning || choice.parser.is_reasoning() {
                    *choice.reasoning_tokens.get_or_insert_default() += 1;
                }
                let mut parts = choice.convert(events, false);
                parts.extend(logprobs.map(|logprobs| ChatEvent::Logprobs(id, logprobs)));
                Ok(parts)
            }
            Event::Done { reason, text, stop_string, usage, timings, end_token: _, end_logprobs: _ } => {
                let reason = EndReason::of_sequence(reason, stop_string)?;
                let events = choice.parser.push(&text);
                let mut parts = choice.convert(events, false);
                let rest = choice.parser.finish();
                parts.extend(choice.convert(rest, reason.is_cut()));
                let calls = choice.parser.n_calls() > 0 && !reason.is_cut();
                let reason = if calls { EndReason::Calls } else { reason };
                let reasoning_tokens = choice.reasoning_tokens;
                parts.push(ChatEvent::End(ChatEnd { reason, usage, reasoning_tokens, timings }));
                Ok(parts)
            }
            Event::Failed(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use metal_attention::Model;
    use metal_attention_chat::{Tool, ToolFormat};
    use serde_json::json;

    use super::*;

    /// The events at the ends of calls and of the choice for a text that arrives in `pieces`.
    fn ends(pieces: &[&str], reason: FinishReason) -> Vec<String> {
        let tokenizer = Model::built_in().unwrap().tokenizer().unwrap();
        let tool = json!({"type": "function", "function": {"name": "now"}});
        let parser = ToolCallParser::new(ToolFormat::Hermes, &[Tool::try_from(tool).unwrap()]);
        let mut choices = ChoiceParsers::new(tokenizer, vec![ChoiceParser::new(parser, false)]);
        let token = |piece: &&str| Event::Token { id: 400, text: (*piece).to_owned(), logprobs: None };
        let done = Event::Done {
            reason,
            text: String::new(),
            stop_string: None,
            end_token: None,
            end_logprobs: None,
            usage: Usage::default(),
            timings: RequestTimings::default(),
        };
        let events = pieces.iter().map(token).chain([done]);
        let parts = events.flat_map(|event| choices.parse(0, event).unwrap());
        let end = |part| match part {
            ChatEvent::Answer(AnswerEvent::CallEnd { index }) => Some(format!("call {index}")),
            ChatEvent::CutCall => Some("cut call".into()),
            ChatEvent::End(end) => Some(format!("{:?}", end.reason)),
            ChatEvent::Answer(_) | ChatEvent::Prompt(_) | ChatEvent::Logprobs(..) => None,
        };
        parts.filter_map(end).collect()
    }

    #[test]
    fn a_tool_call_that_is_cut_off_is_marked() {
        let whole = "<tool_call>{\"name\": \"now\", \"arguments\": {}}";
        let cut = "</tool_call><tool_call>{\"name\": \"now\", \"arguments\": {\"zone\": \"C";
        assert_eq!(ends(&[whole, cut], FinishReason::Length), ["call 0", "cut call", "Length"]);
        assert_eq!(ends(&[cut], FinishReason::ContextFull), ["cut call", "ContextFull"]);
        assert_eq!(ends(&[whole], FinishReason::Length), ["call 0", "Length"]);
        // The model itself ended its text within the call.
        assert_eq!(ends(&[whole, cut], FinishReason::EndOfText), ["call 0", "call 1", "Calls"]);
    }
}
