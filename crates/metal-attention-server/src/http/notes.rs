//! Response headers that report how a request was read: fields without effect, schema keywords that are not enforced,
//! truncated parts, and the model that answered.

use std::collections::BTreeSet;

use axum::http::HeaderValue;
use axum::http::header::HeaderName;
use axum::response::Response;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

/// Fields that were accepted but have no effect, separated by commas.
pub const IGNORED: HeaderName = HeaderName::from_static("x-ignored");
/// Keywords of the request's JSON schemas that the grammar does not enforce, as JSON pointers, separated by commas.
pub const SCHEMA_UNSUPPORTED: HeaderName = HeaderName::from_static("x-schema-unsupported");
/// Parts of the request that were truncated to fit the context, separated by commas.
pub const TRUNCATED: HeaderName = HeaderName::from_static("x-truncated");
/// The number of the conversation's oldest turns that were dropped to fit the context.
pub const DROPPED_TURNS: HeaderName = HeaderName::from_static("x-dropped-turns");
/// The main name of the model that answered, where the request named another.
pub const MODEL: HeaderName = HeaderName::from_static("x-model");

/// Maximum bytes of a header's value; a longer list is cut and ends in `...`.
const MAX_VALUE: usize = 2048;

/// Escaped in a header's value in addition to bytes that are not visible ASCII: the separator and `%`.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%').add(b',');

/// Collects the contents of these headers while a request is read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Notes {
    /// Names of fields without effect.
    ignored: BTreeSet<String>,
    /// Places of schema keywords that are not enforced.
    schema_unsupported: BTreeSet<String>,
    /// Names of truncated parts.
    truncated: BTreeSet<String>,
    /// The number of dropped turns.
    dropped_turns: Option<String>,
    /// The model that answers, if it is another one than the request names.
    model: Option<String>,
}

impl Notes {
    /// Records that the field `name` has no effect.
    pub fn ignored(&mut self, name: impl Into<String>) {
        self.ignored.insert(name.into());
    }

    /// Records that the schema keyword at `place`, such as `#/properties/d/uniqueItems`, is not enforced.
    pub fn schema_unsupported(&mut self, place: impl Into<String>) {
        self.schema_unsupported.insert(place.into());
    }

    /// Records that the part `name` was truncated to fit the context.
    pub fn truncated(&mut self, name: impl Into<String>) {
        self.truncated.insert(name.into());
    }

    /// Records that the prompt lacks the conversation's oldest `n` turns.
    pub fn dropped_turns(&mut self, n: usize) {
        self.dropped_turns = Some(n.to_string());
    }

    /// Records that `model` answers, where the request named another.
    pub fn answered_by(&mut self, model: impl Into<String>) {
        self.model = Some(model.into());
    }

    /// Adds the notes of `other`, which take precedence.
    pub fn extend(&mut self, other: &Self) {
        self.ignored.extend(other.ignored.iter().cloned());
        self.schema_unsupported.extend(other.schema_unsupported.iter().cloned());
        self.truncated.extend(other.truncated.iter().cloned());
        self.dropped_turns = other.dropped_turns.clone().or(self.dropped_turns.take());
        self.model = other.model.clone().or(self.model.take());
    }

    /// Adds the headers to `response`, one for each kind of note that there is.
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

/// Returns `items` as a header's value: separated by commas, bytes other than visible ASCII percent-encoded; `None` if
/// there are no items.
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
