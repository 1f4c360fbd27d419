//! The continuation of a text, as an iterator over its tokens.

use metal_attention_tokenizer::Tokenizer;

use crate::sequence::Sequence;
use crate::{Error, TextStream, Timings};

/// When a generation ends.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GenerateOptions {
    /// Most tokens to generate. `None`: until the model ends the text or the context is full.
    pub n_predict: Option<usize>,
    /// Strings that end the text; they are not part of it.
    pub stop: Vec<String>,
    /// Tokens that end the text besides those of the vocabulary; they are not part of it.
    pub stop_ids: Vec<u32>,
    /// Never choose a token with which the vocabulary ends a text.
    pub ignore_eos: bool,
    /// The least number of tokens before one that ends the text may be chosen.
    pub min_tokens: usize,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// The model chose a token that ends the text, or its constraint was complete.
    EndOfGeneration,
    /// As many tokens as were asked for.
    Length,
    /// One of the stop strings.
    StopString,
    /// No room in the context.
    ContextFull,
}

impl StopReason {
    /// The reason in snake case, as in `"end_of_generation"`.
    pub fn name(self) -> &'static str {
        match self {
            Self::EndOfGeneration => "end_of_generation",
            Self::Length => "length",
            Self::StopString => "stop_string",
            Self::ContextFull => "context_full",
        }
    }
}

/// A generated token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GeneratedToken {
    /// Its number in the vocabulary.
    pub id: u32,
    /// What can be shown of the text now: whole characters, and nothing that may turn out to be the start of a stop
    /// string. May be empty.
    pub text: String,
}

/// Yields the tokens of a continuation as they are chosen. The token that ends it is not among them.
///
/// Dropping it early loses nothing: [`Generator::generate`](crate::Generator::generate) goes on where it was.
pub struct Generation<'a> {
    tokenizer: &'a Tokenizer,
    sequence: &'a mut Sequence,
    text: TextStream<'a>,
    /// Tokens to be generated yet.
    remaining: Option<usize>,
    /// Tokens to be generated yet before the text may end.
    min_remaining: usize,
    stop_ids: Vec<u32>,
    /// Tokens that are not chosen before the text may end: all that end it.
    forbidden_first: Vec<u32>,
    /// Tokens that are not chosen after that.
    forbidden_later: &'a [u32],
    /// No token comes any more: the generation stopped or failed.
    ended: bool,
    stop_reason: Option<StopReason>,
}

impl<'a> Generation<'a> {
    pub(crate) fn new(tokenizer: &'a Tokenizer, sequence: &'a mut Sequence, options: GenerateOptions) -> Self {
        // What the vocabulary has not never comes.
        let in_vocabulary = |id: &u32| (*id as usize) < tokenizer.n_vocab();
        let stop_ids: Vec<u32> = options.stop_ids.into_iter().filter(in_vocabulary).collect();
        Self {
            text: TextStream::new(tokenizer, sequence.ids(), options.stop),
            remaining: options.n_predict,
            min_remaining: options.min_tokens,
            forbidden_first: tokenizer.end_of_generation().iter().chain(&stop_ids).copied().collect(),
            forbidden_later: if options.ignore_eos { tokenizer.end_of_generation() } else { &[] },
            stop_ids,
            ended: false,
            stop_reason: None,
            tokenizer,
            sequence,
        }
    }

    /// Why the generation ended; `None` while it goes on, and after an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop_reason
    }

    /// What the prompt and the continuation cost so far.
    pub fn timings(&self) -> Timings {
        self.sequence.timings
    }

    /// Ends the generation and returns the text that was still held back: the start of a stop string that never came,
    /// then half a character as U+FFFD. Empty in most cases.
    pub fn finish(self) -> String {
        self.text.finish()
    }

    fn stop(&mut self, reason: StopReason) {
        self.ended = true;
        self.stop_reason = Some(reason);
    }

    /// The next token, or `None` where the generation ends.
    fn advance(&mut self) -> Result<Option<GeneratedToken>, Error> {
        if self.remaining == Some(0) {
            self.stop(StopReason::Length);
            return Ok(None);
        }
        if !self.sequence.can_step() {
            self.stop(StopReason::ContextFull);
            return Ok(None);
        }
        let forbidden = if self.min_remaining > 0 { &self.forbidden_first } else { self.forbidden_later };
        let id = self.sequence.step(forbidden)?;
        if self.tokenizer.is_end_of_generation(id) || self.stop_ids.contains(&id) {
            self.stop(StopReason::EndOfGeneration);
            return Ok(None);
        }
        self.sequence.push(id)?;
        if let Some(n) = &mut self.remaining {
            *n -= 1;
        }
        self.min_remaining = self.min_remaining.saturating_sub(1);
        let (text, stopped) = self.text.push(id);
        if stopped {
            self.stop(StopReason::StopString);
        } else if self.sequence.is_complete() {
            self.stop(StopReason::EndOfGeneration);
        }
        Ok(Some(GeneratedToken { id, text }))
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<GeneratedToken, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.advance();
        self.ended |= next.is_err();
        next.transpose()
    }
}

impl std::iter::FusedIterator for Generation<'_> {}
