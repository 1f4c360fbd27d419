//! A generation: an iterator over the tokens that continue a sequence.
//!
//! It drives the crate's [`Sequence`]; [`TextStream`] turns its tokens into text.

use metal_attention_tokenizer::Tokenizer;

use crate::sequence::Sequence;
use crate::{Error, TextStream, Timings};

/// When a generation ends.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GenerateOptions {
    /// Maximum number of tokens to generate. `None`: until an end token is sampled or the context is full.
    pub n_predict: Option<usize>,
    /// Strings that end the generation; they are not part of its text.
    pub stop: Vec<String>,
    /// Tokens that end the generation, in addition to the vocabulary's end tokens; they are not part of its text.
    pub stop_ids: Vec<u32>,
    /// Never sample the vocabulary's end tokens.
    pub ignore_eos: bool,
    /// Minimum number of tokens before an end token may be sampled.
    pub min_tokens: usize,
    /// Maximum number of drafts in a step; 0: none, each step gives one token. `None`: as the generator's
    /// [depth](crate::Generator::set_drafter) allows. The text does not depend on it.
    pub max_drafts: Option<usize>,
    /// Tokens of a text that the generation is likely to repeat, such as the text that it edits: drafts are taken from it, too. Usually
    /// empty. The text does not depend on it.
    pub prediction: Vec<u32>,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// An end token was sampled, or the constraint is complete.
    EndOfGeneration,
    /// `n_predict` tokens were generated.
    Length,
    /// A stop string was generated.
    StopString,
    /// The context is full.
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
    /// Its id.
    pub id: u32,
    /// The text that is certain now: whole characters, and nothing that may be the start of a stop string. May be
    /// empty.
    pub text: String,
}

/// An iterator over the tokens of a generation as they are sampled. The end token is not among them.
///
/// It may be dropped early: the next [`Generator::generate`](crate::Generator::generate) resumes where it stopped.
pub struct Generation<'a> {
    /// Tokenizer of the model.
    tokenizer: &'a Tokenizer,
    /// The sequence that is continued.
    sequence: &'a mut Sequence,
    /// Text of the tokens, with stop strings withheld.
    text: TextStream<'a>,
    /// Tokens left to generate; `None`: no limit.
    remaining: Option<usize>,
    /// Tokens left to generate before an end token may be sampled.
    min_remaining: usize,
    /// End tokens in addition to the vocabulary's.
    stop_ids: Vec<u32>,
    /// Tokens that must not be sampled while `min_remaining` is above 0: all end tokens.
    forbidden_first: Vec<u32>,
    /// Tokens that must not be sampled afterwards: with `ignore_eos` the vocabulary's end tokens, otherwise none.
    forbidden_later: &'a [u32],
    /// Maximum number of drafts in a step.
    max_drafts: usize,
    /// Tokens that are likely to be repeated.
    prediction: Vec<u32>,
    /// Whether the generation has stopped or failed.
    ended: bool,
    /// Why it stopped; `None` after an error.
    stop_reason: Option<StopReason>,
}

impl<'a> Generation<'a> {
    /// A generation that continues `sequence`.
    pub(crate) fn new(tokenizer: &'a Tokenizer, sequence: &'a mut Sequence, options: GenerateOptions) -> Self {
        // A stop token outside the vocabulary can never be sampled.
        let in_vocabulary = |id: &u32| (*id as usize) < tokenizer.n_vocab();
        let stop_ids: Vec<u32> = options.stop_ids.into_iter().filter(in_vocabulary).collect();
        Self {
            text: TextStream::new(tokenizer, sequence.ids(), options.stop),
            remaining: options.n_predict,
            min_remaining: options.min_tokens,
            forbidden_first: tokenizer.end_of_generation().iter().chain(&stop_ids).copied().collect(),
            forbidden_later: if options.ignore_eos { tokenizer.end_of_generation() } else { &[] },
            stop_ids,
            max_drafts: options.max_drafts.unwrap_or(usize::MAX),
            prediction: options.prediction,
            ended: false,
            stop_reason: None,
            tokenizer,
            sequence,
        }
    }

    /// Why the generation ended; `None` before its end, and after an error.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop_reason
    }

    /// Token counts and durations of the prompt and the generation so far.
    pub fn timings(&self) -> Timings {
        self.sequence.timings
    }

    /// Ends the generation and returns the text that was withheld: the start of a stop string that was not completed,
    /// then a partial character as U+FFFD. Usually empty.
    pub fn finish(self) -> String {
        self.text.finish()
    }

    /// Ends the generation.
    fn stop(&mut self, reason: StopReason) {
        self.ended = true;
        self.stop_reason = Some(reason);
    }

    /// Samples the next token; `None` at the end of the generation.
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
        // The step gives one token more than drafts hold.
        let n_left = self.remaining.map_or(usize::MAX, |n| n - 1);
        let id = self.sequence.step(forbidden, n_left.min(self.max_drafts), &self.prediction)?;
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
