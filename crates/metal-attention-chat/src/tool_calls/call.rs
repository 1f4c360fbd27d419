//! A call that is being read, however it is written.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use super::call_derived::CallDerived;
use super::call_gemma::CallGemma;
use super::call_json::CallJson;
use super::call_python::CallPython;
use super::call_tags::CallTags;

/// What was found in a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CallPart {
    /// The function.
    Name(String),
    /// More text of the arguments; it comes after the name only.
    Arguments(String),
}

/// How far a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallProgress {
    /// More has to come.
    Incomplete,
    /// The call is complete.
    Done,
    /// This is no call.
    NoCall,
}

/// Reads a call as it comes.
#[derive(Debug)]
pub(super) enum CallReader {
    /// A JSON object.
    Json(CallJson),
    /// Arguments in tags.
    Tags(CallTags),
    /// As Gemma writes it.
    Gemma(CallGemma),
    /// As Python writes it.
    Python(CallPython),
    /// In a derived format.
    Derived(Box<CallDerived>),
}

impl CallReader {
    /// Takes the next character.
    pub fn push(&mut self, c: char) -> CallProgress {
        match self {
            Self::Json(call) => call.push(c),
            Self::Tags(call) => call.push(c),
            Self::Gemma(call) => call.push(c),
            Self::Python(call) => call.push(c),
            Self::Derived(call) => call.push(c),
        }
    }

    /// What was found since [`take_parts`](Self::take_parts).
    pub fn parts(&self) -> &[CallPart] {
        match self {
            Self::Json(call) => call.parts(),
            Self::Tags(call) => call.parts(),
            Self::Gemma(call) => call.parts(),
            Self::Python(call) => call.parts(),
            Self::Derived(call) => call.parts(),
        }
    }

    /// What was found since the last call of this.
    pub fn take_parts(&mut self) -> Vec<CallPart> {
        match self {
            Self::Json(call) => call.take_parts(),
            Self::Tags(call) => call.take_parts(),
            Self::Gemma(call) => call.take_parts(),
            Self::Python(call) => call.take_parts(),
            Self::Derived(call) => call.take_parts(),
        }
    }

    /// What was read after the end of a call that has no mark of its own.
    pub fn unread(&self) -> &str {
        match self {
            Self::Tags(call) => call.unread(),
            Self::Json(call) => call.unread(),
            Self::Derived(call) => call.unread(),
            Self::Gemma(_) | Self::Python(_) => "",
        }
    }

    /// The function, where it was read before it is certain that this is a call.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Json(call) => call.name(),
            Self::Tags(_) | Self::Gemma(_) | Self::Python(_) | Self::Derived(_) => None,
        }
    }

    /// The call ends in the middle: hands out what there is of an argument, and closes the arguments.
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

/// Adds text to the arguments in `parts`.
pub(super) fn add_arguments(parts: &mut Vec<CallPart>, text: &str) {
    if let Some(CallPart::Arguments(last)) = parts.last_mut() {
        *last += text;
    } else {
        parts.push(CallPart::Arguments(text.to_owned()));
    }
}

/// A text as JSON, without the quotes around it.
pub(super) fn json_text(text: &str) -> String {
    let json = serde_json::Value::from(text).to_string();
    json[1..json.len() - 1].to_owned()
}

/// Nine letters and digits, which is what Mistral's templates want to see.
pub(super) fn call_id() -> String {
    const CHARACTERS: &[u8; 62] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    // Hashers are seeded at random, and no two the same.
    let mut random = RandomState::new().build_hasher().finish();
    let digit = |_| {
        let digit = CHARACTERS[(random % 62) as usize];
        random /= 62;
        char::from(digit)
    };
    (0..9).map(digit).collect()
}
