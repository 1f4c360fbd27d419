//! A call that is being read, however it is written.

use super::call_gemma::CallGemma;
use super::call_json::CallJson;
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
pub(super) enum Progress {
    /// More has to come.
    Open,
    /// The call is complete.
    Done,
    /// This is no call.
    NoCall,
}

/// Reads a call as it comes.
#[derive(Debug)]
pub(super) enum Call {
    /// A JSON object.
    Json(CallJson),
    /// Arguments in tags.
    Tags(CallTags),
    /// As Gemma writes it.
    Gemma(CallGemma),
}

impl Call {
    /// Takes the next character.
    pub fn push(&mut self, c: char) -> Progress {
        match self {
            Self::Json(call) => call.push(c),
            Self::Tags(call) => call.push(c),
            Self::Gemma(call) => call.push(c),
        }
    }

    /// What was found since [`take_parts`](Self::take_parts).
    pub fn parts(&self) -> &[CallPart] {
        match self {
            Self::Json(call) => call.parts(),
            Self::Tags(call) => call.parts(),
            Self::Gemma(call) => call.parts(),
        }
    }

    /// What was found since the last call of this.
    pub fn take_parts(&mut self) -> Vec<CallPart> {
        match self {
            Self::Json(call) => call.take_parts(),
            Self::Tags(call) => call.take_parts(),
            Self::Gemma(call) => call.take_parts(),
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
