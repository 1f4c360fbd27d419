//! Marks the spellings of control tokens in message texts, so that they can be found again in the rendered prompt.
//!
//! A template mixes the text of messages with its own, and its output is one string. So where the spelling of a
//! control token begins in a message, a private-use character that occurs nowhere else is inserted after its first
//! character. After rendering, the marks are removed and their positions recorded ([`Prompt::literals`]). Texts
//! without such spellings pass unchanged, so that templates can trim, split and compare them as usual.

use std::collections::BTreeSet;

use metal_attention_tokenizer::Tokenizer;
use serde_json::Value;

use crate::Prompt;

/// The private-use characters that occur in a set of texts.
#[derive(Default)]
pub(crate) struct PrivateUse(BTreeSet<char>);

impl PrivateUse {
    /// Adds the private-use characters of `text`.
    pub fn add(&mut self, text: &str) {
        // The first UTF-8 bytes of private-use characters.
        if text.bytes().any(|byte| matches!(byte, 0xee | 0xef | 0xf3)) {
            let is_one = |c: &char| matches!(c, '\u{e000}'..='\u{f8ff}' | '\u{f0000}'..='\u{ffffd}');
            self.0.extend(text.chars().filter(is_one));
        }
    }

    /// Adds the private-use characters of all strings in `value`.
    pub fn add_value(&mut self, value: &Value) {
        match value {
            Value::String(text) => self.add(text),
            Value::Array(values) => values.iter().for_each(|value| self.add_value(value)),
            Value::Object(map) => map.iter().for_each(|(key, value)| {
                self.add(key);
                self.add_value(value);
            }),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

/// Inserts marks into texts and removes them from the rendered prompt.
pub(crate) struct Marker<'t> {
    /// The tokenizer with the control tokens. Without one nothing is marked.
    tokenizer: Option<&'t Tokenizer>,
    /// The character that is inserted as the mark.
    mark: char,
}

impl<'t> Marker<'t> {
    /// A marker that uses a character which is not in `taken`.
    pub fn new(tokenizer: Option<&'t Tokenizer>, taken: &PrivateUse) -> Self {
        let mut private_use = ('\u{e000}'..='\u{f8ff}').chain('\u{f0000}'..='\u{ffffd}');
        // If all 70 000 private-use characters are taken, a noncharacter is used.
        let mark = private_use.find(|c| !taken.0.contains(c)).unwrap_or('\u{10fffd}');
        Self { tokenizer, mark }
    }

    /// `text` with marks in it.
    pub fn mark(&self, text: &str) -> String {
        let starts = self.tokenizer.map_or(Vec::new(), |tokenizer| tokenizer.control_starts(text));
        let mut marked = String::with_capacity(text.len() + starts.len() * self.mark.len_utf8());
        let mut done = 0;
        for start in starts.into_iter().filter(|&start| text.is_char_boundary(start)) {
            let end = start + text[start..].chars().next().map_or(0, char::len_utf8);
            marked += &text[done..end];
            marked.push(self.mark);
            done = end;
        }
        marked + &text[done..]
    }

    /// `value` with marks in all its strings.
    pub fn mark_value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.mark(text).into(),
            Value::Array(values) => values.iter().map(|value| self.mark_value(value)).collect(),
            Value::Object(map) => map.iter().map(|(key, value)| (self.mark(key), self.mark_value(value))).collect(),
            Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
        }
    }

    /// Removes the marks from a rendered text and records their positions.
    pub fn prompt(&self, rendered: &str) -> Prompt {
        let mut text = String::with_capacity(rendered.len());
        let mut literals = Vec::new();
        for (i, piece) in rendered.split(self.mark).enumerate() {
            if i > 0
                && let Some((start, _)) = text.char_indices().next_back()
            {
                literals.push(start);
            }
            text += piece;
        }
        literals.dedup();
        Prompt { text, literals }
    }
}
