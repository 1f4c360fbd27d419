//! Response headers that say how a request was read: which fields had no effect, which parts of a schema are not enforced,
//! what was cut off, which model answered.

use std::collections::BTreeSet;

use axum::http::HeaderValue;
use axum::http::header::HeaderName;
use axum::response::Response;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

/// Fields that were accepted and have no effect here, separated by commas.
pub const IGNORED: HeaderName = HeaderName::from_static("x-ignored");
/// Keywords of the request's JSON schemas that the grammar does not enforce, with their places, separated by commas.
pub const SCHEMA_UNSUPPORTED: HeaderName = HeaderName::from_static("x-schema-unsupported");
/// Parts of the request of which the context had no room for all, separated by commas.
pub const TRUNCATED: HeaderName = HeaderName::from_static("x-truncated");
/// How many of the conversation's oldest turns the context had no room for.
pub const DROPPED_TURNS: HeaderName = HeaderName::from_static("x-dropped-turns");
/// The name of the model that answered, where the request named another.
pub const MODEL: HeaderName = HeaderName::from_static("x-model");

/// Most bytes of a header's value; a longer list ends in `...`.
const MAX_VALUE: usize = 2048;

/// What is escaped in a header's value: other bytes than visible ASCII (always), and the separator.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%').add(b',');

/// Collects what the response headers say while a request is read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Notes {
    ignored: BTreeSet<String>,
    schema_unsupported: BTreeSet<String>,
    truncated: BTreeSet<String>,
    dropped_turns: Option<String>,
    model: Option<String>,
}

impl Notes {
    /// The field `name` has no effect.
    pub fn ignored(&mut self, name: impl Into<String>) {
        self.ignored.insert(name.into());
    }

    /// The schema keyword at `place`, such as `#/properties/d/uniqueItems`, is not enforced.
    pub fn schema_unsupported(&mut self, place: impl Into<String>) {
        self.schema_unsupported.insert(place.into());
    }

    /// The context has no room for all of the part `name`.
    pub fn truncated(&mut self, name: impl Into<String>) {
        self.truncated.insert(name.into());
    }

    /// The prompt is without the conversation's oldest `n` turns.
    pub fn dropped_turns(&mut self, n: usize) {
        self.dropped_turns = Some(n.to_string());
    }

    /// The request named another model than `model`, which answers it.
    pub fn answered_by(&mut self, model: impl Into<String>) {
        self.model = Some(model.into());
    }

    /// Adds what `other` says.
    pub fn extend(&mut self, other: &Self) {
        self.ignored.extend(other.ignored.iter().cloned());
        self.schema_unsupported.extend(other.schema_unsupported.iter().cloned());
        self.truncated.extend(other.truncated.iter().cloned());
        self.dropped_turns = other.dropped_turns.clone().or(self.dropped_turns.take());
        self.model = other.model.clone().or(self.model.take());
    }

    /// `response` with a header for each kind of note that there is.
    pub fn attach(&self, mut response: Response) -> Response {
        let headers = response.headers_mut();
        for (name, value) in [
            (IGNORED, list(&self.ignored)),
            (SCHEMA_UNSUPPORTED, list(&self.schema_unsupported)),
            (TRUNCATED, list(&self.truncated)),
            (DROPPED_TURNS, list(&self.dropped_turns)),
            (MODEL, list(&self.model)),
        ] {
            headers.extend(value.map(|value| (name, value)));
        }
        response
    }
}

/// `items` as a header's value: separated by commas, other bytes than visible ASCII percent-encoded. None where there are none.
fn list<'a>(items: impl IntoIterator<Item = &'a String>) -> Option<HeaderValue> {
    let mut value = String::new();
    for item in items {
        if !value.is_empty() {
            value += ", ";
        }
        value.extend(utf8_percent_encode(item, ESCAPED));
        if value.len() > MAX_VALUE {
            value.truncate(MAX_VALUE);
            value += "...";
            break;
        }
    }
    if value.is_empty() { None } else { HeaderValue::from_str(&value).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_become_headers() {
        let mut notes = Notes::default();
        assert!(notes.attach(Response::default()).headers().is_empty());
        notes.ignored("user");
        notes.ignored("top_a");
        notes.schema_unsupported("#/properties/a,\u{e9}/not");
        notes.truncated("input[2]");
        notes.dropped_turns(3);
        notes.answered_by("llama");
        let response = notes.attach(Response::default());
        let value = |name| response.headers().get(name).unwrap().to_str().unwrap();
        assert_eq!(value(IGNORED), "top_a, user");
        assert_eq!(value(SCHEMA_UNSUPPORTED), "#/properties/a%2C%C3%A9/not");
        assert_eq!(value(TRUNCATED), "input[2]");
        assert_eq!(value(DROPPED_TURNS), "3");
        assert_eq!(value(MODEL), "llama");
    }

    #[test]
    fn long_lists_are_cut() {
        let mut notes = Notes::default();
        for i in 0..4096 {
            notes.ignored(format!("{i:04}"));
        }
        let response = notes.attach(Response::default());
        let value = response.headers().get(IGNORED).unwrap();
        assert_eq!(value.len(), MAX_VALUE + 3);
        assert!(value.to_str().unwrap().ends_with("..."));
    }
}
