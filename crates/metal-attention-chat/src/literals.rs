//! Marks text from users on its way through a template.
//!
//! A template handles the text of messages and its own alike, and what comes out is one text. So where a control token's
//! spelling begins in a user's text, a character that occurs nowhere else is put in after the first one. Texts without
//! such spellings pass unchanged, and templates that cut, trim and compare them see what they expect.

use std::collections::BTreeSet;

use metal_attention_tokenizer::Tokenizer;
use serde_json::Value;

use crate::Prompt;

/// The characters of texts that have no meaning of their own.
#[derive(Default)]
pub(crate) struct PrivateUse(BTreeSet<char>);

impl PrivateUse {
    /// Adds those of `text`.
    pub fn add(&mut self, text: &str) {
        // The first bytes that such characters have in UTF-8.
        if text.bytes().any(|byte| matches!(byte, 0xee | 0xef | 0xf3)) {
            let is_one = |c: &char| matches!(c, '\u{e000}'..='\u{f8ff}' | '\u{f0000}'..='\u{ffffd}');
            self.0.extend(text.chars().filter(is_one));
        }
    }

    /// Adds those of all texts in `value`.
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

/// Marks texts, and finds the marks again.
pub(crate) struct Marker<'t> {
    /// Knows control tokens; without one nothing is marked.
    tokenizer: Option<&'t Tokenizer>,
    mark: char,
}

impl<'t> Marker<'t> {
    /// A marker for texts that hold none of the characters `taken`.
    pub fn new(tokenizer: Option<&'t Tokenizer>, taken: &PrivateUse) -> Self {
        let mut private_use = ('\u{e000}'..='\u{f8ff}').chain('\u{f0000}'..='\u{ffffd}');
        // A text in which all 70 000 occur is not one that control tokens matter in.
        let mark = private_use.find(|c| !taken.0.contains(c)).unwrap_or('\u{10fffd}');
        Self { tokenizer, mark }
    }

    /// `text` with its marks.
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

    /// `value` with marks in all its texts.
    pub fn mark_value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.mark(text).into(),
            Value::Array(values) => values.iter().map(|value| self.mark_value(value)).collect(),
            Value::Object(map) => map.iter().map(|(key, value)| (self.mark(key), self.mark_value(value))).collect(),
            Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
        }
    }

    /// Takes the marks out of a rendered text.
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
