//! [`CallReader`]: reads one tool call character by character, in any of the notations. `parser.rs` finds the call in
//! the answer and feeds it.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use super::call_derived::CallDerived;
use super::call_gemma::CallGemma;
use super::call_json::CallJson;
use super::call_python::CallPython;
use super::call_tags::CallTags;

/// A part of a call that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CallPart {
    /// The name of the function. It is the first part.
    Name(String),
    /// More text of the arguments.
    Arguments(String),
}

/// The state of a call after a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallProgress {
    /// The call continues.
    Incomplete,
    /// The call is complete.
    Done,
    /// The text is not a call.
    NoCall,
}

/// The reader of a call, by notation.
#[derive(Debug)]
pub(super) enum CallReader {
    /// A JSON object with the name and the arguments.
    Json(CallJson),
    /// Arguments in tags.
    Tags(CallTags),
    /// Gemma's notation.
    Gemma(CallGemma),
    /// Python's notation.
    Python(CallPython),
    /// A notation that was derived from a chat template.
    Derived(Box<CallDerived>),
}

impl CallReader {
    /// Reads the next character.
    pub fn push(&mut self, c: char) -> CallProgress {
        match self {
            Self::Json(call) => call.push(c),
            Self::Tags(call) => call.push(c),
            Self::Gemma(call) => call.push(c),
            Self::Python(call) => call.push(c),
            Self::Derived(call) => call.push(c),
        }
    }

    /// The parts that were read since the last [`take_parts`](Self::take_parts).
    pub fn parts(&self) -> &[CallPart] {
        match self {
            Self::Json(call) => call.parts(),
            Self::Tags(call) => call.parts(),
            Self::Gemma(call) => call.parts(),
            Self::Python(call) => call.parts(),
            Self::Derived(call) => call.parts(),
        }
    }

    /// Removes and returns the parts that were read since the last call.
    pub fn take_parts(&mut self) -> Vec<CallPart> {
        match self {
            Self::Json(call) => call.take_parts(),
            Self::Tags(call) => call.take_parts(),
            Self::Gemma(call) => call.take_parts(),
            Self::Python(call) => call.take_parts(),
            Self::Derived(call) => call.take_parts(),
        }
    }

    /// The text that was read although it follows the call; only for a call without an end mark.
    pub fn unread(&self) -> &str {
        match self {
            Self::Tags(call) => call.unread(),
            Self::Json(call) => call.unread(),
            Self::Derived(call) => call.unread(),
            Self::Gemma(_) | Self::Python(_) => "",
        }
    }

    /// The name of the function, if it was read before it is certain that the text is a call.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Json(call) => call.name(),
            Self::Tags(_) | Self::Gemma(_) | Self::Python(_) | Self::Derived(_) => None,
        }
    }

    /// The answer ends within the call: adds the incomplete argument, as far as it is usable, and closes the
    /// arguments.
    pub fn cut_short(&mut self) {
        match self {
            Self::Json(call) => call.cut_short(),
            Self::Tags(call) => call.cut_short(),
            Self::Gemma(call) => call.cut_short(),
            Self::Python(call) => call.cut_short(),
            Self::Derived(call) => call.cut_short(),
        }
    }
}

/// Appends text to the arguments in `parts`.
pub(super) fn add_arguments(parts: &mut Vec<CallPart>, text: &str) {
    if let Some(CallPart::Arguments(last)) = parts.last_mut() {
        *last += text;
    } else {
        parts.push(CallPart::Arguments(text.to_owned()));
    }
}

/// A text as the inside of a JSON string, without the quotes.
pub(super) fn json_text(text: &str) -> String {
    let json = serde_json::Value::from(text).to_string();
    json[1..json.len() - 1].to_owned()
}

/// A random call id: nine letters and digits, as Mistral's templates require.
pub(super) fn call_id() -> String {
    const CHARACTERS: &[u8; 62] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    // Each RandomState has a random seed of its own.
    let mut random = RandomState::new().build_hasher().finish();
    let digit = |_| {
        let digit = CHARACTERS[(random % 62) as usize];
        random /= 62;
        char::from(digit)
    };
    (0..9).map(digit).collect()
}
