//! [`CallPython`]: reads a call in Python's notation: `name(key="text", other=[1, True, {"a": None}])`.

use std::sync::Arc;

use serde_json::json;

use super::call::{CallPart, CallProgress, add_arguments, json_text};
use super::lenient_json::{JsonStep, LenientJson};
use super::parser::MAX_HEADER;
use super::python_string::{PythonString, StringStep};
use super::python_value::{AFTER_TEXT, as_json, is_prefix};
use super::signatures::Signatures;

/// Reads a call and converts its arguments to JSON. Strings are passed on character by character, other values when
/// they are complete. A value that is not valid Python becomes a string.
#[derive(Debug)]
pub(super) struct CallPython {
    state: PythonCallState,
    /// The text of the name or argument that is being read.
    text: String,
    name: String,
    /// Whether the name was added to the parts.
    begun: bool,
    /// The keyword of the argument, once it was read.
    key: Option<String>,
    within: ArgumentState,
    /// The reader of the current string.
    string: PythonString,
    /// The number of brackets that are open in the argument.
    depth: usize,
    /// The offset in `text` where the current word begins.
    word: usize,
    n_arguments: usize,
    signatures: Arc<Signatures>,
    parts: Vec<CallPart>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PythonCallState {
    Name,
    Argument,
    /// In an argument that is a string.
    Text,
    /// After an argument that is a string.
    AfterText,
    Done,
    NoCall,
}

/// The position within an argument that is not a plain string.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ArgumentState {
    Code,
    /// After one or two quotes, which may begin a string or be the start of triple quotes.
    Opening {
        quote: char,
        n: usize,
    },
    /// In a string.
    Text {
        quote: char,
        escaped: bool,
    },
    /// After a quote that may end a string.
    MaybeAfter {
        quote: char,
    },
    /// In a triple-quoted string, after `n` quotes that may end it.
    LongText {
        quote: char,
        escaped: bool,
        n: usize,
    },
}

/// Whether a function of this name is called in Python's notation. Others are called by a JSON object.
pub(super) fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(belongs)
}

/// Whether a character may be in a name.
fn belongs(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | ':')
}

impl CallPython {
    /// A new call, which begins with the function's name.
    pub fn new(signatures: Arc<Signatures>) -> Self {
        Self {
            state: PythonCallState::Name,
            text: String::new(),
            name: String::new(),
            begun: false,
            key: None,
            within: ArgumentState::Code,
            string: PythonString::new('"', false),
            depth: 0,
            word: 0,
            n_arguments: 0,
            signatures,
            parts: Vec::new(),
        }
    }

    pub fn parts(&self) -> &[CallPart] {
        &self.parts
    }

    pub fn take_parts(&mut self) -> Vec<CallPart> {
        std::mem::take(&mut self.parts)
    }

    /// Reads the next character.
    pub fn push(&mut self, c: char) -> CallProgress {
        self.state = match self.state {
            PythonCallState::Name => self.in_name(c),
            PythonCallState::Argument => self.in_argument(c),
            PythonCallState::Text => self.in_text(c),
            PythonCallState::AfterText => self.after_text(c),
            state @ (PythonCallState::Done | PythonCallState::NoCall) => state,
        };
        match self.state {
            PythonCallState::Done => CallProgress::Done,
            PythonCallState::NoCall => CallProgress::NoCall,
            PythonCallState::Name | PythonCallState::Argument | PythonCallState::Text | PythonCallState::AfterText => {
                CallProgress::Incomplete
            }
        }
    }

    fn in_name(&mut self, c: char) -> PythonCallState {
        if c == '(' {
            std::mem::take(&mut self.text).trim().clone_into(&mut self.name);
            return if self.name.is_empty() { PythonCallState::NoCall } else { PythonCallState::Argument };
        }
        // White space may surround the name, but not be in it.
        let in_name = !self.text.ends_with(char::is_whitespace) || self.text.trim().is_empty();
        let fits = c.is_whitespace() || belongs(c) && in_name;
        self.text.push(c);
        if fits && self.text.len() <= MAX_HEADER { PythonCallState::Name } else { PythonCallState::NoCall }
    }

    fn in_argument(&mut self, c: char) -> PythonCallState {
        match self.within {
            ArgumentState::Code => return self.in_code(c),
            ArgumentState::Opening { quote, n: 1 } if c == quote => {
                self.within = ArgumentState::Opening { quote, n: 2 }
            }
            ArgumentState::Opening { quote, n: 2 } if c == quote => {
                self.within = ArgumentState::LongText { quote, escaped: false, n: 0 };
            }
            ArgumentState::Opening { quote, n: 2 } => {
                self.within = ArgumentState::MaybeAfter { quote };
                return self.in_argument(c);
            }
            ArgumentState::Opening { quote, .. } | ArgumentState::Text { quote, escaped: false } if c == quote => {
                self.within = ArgumentState::MaybeAfter { quote };
            }
            ArgumentState::Opening { quote, .. } | ArgumentState::Text { quote, escaped: false } => {
                self.within = ArgumentState::Text { quote, escaped: c == '\\' };
            }
            ArgumentState::Text { quote, escaped: true } => self.within = ArgumentState::Text { quote, escaped: false },
            ArgumentState::MaybeAfter { .. } if AFTER_TEXT.contains(&c) || c == '=' && self.may_end_key() => {
                self.within = ArgumentState::Code;
                return self.in_code(c);
            }
            ArgumentState::MaybeAfter { .. } if c.is_whitespace() => {}
            ArgumentState::MaybeAfter { quote } => {
                self.within = ArgumentState::Text { quote, escaped: false };
                return self.in_argument(c);
            }
            ArgumentState::LongText { quote, escaped: false, n } if c == quote => {
                self.within = if n == 2 {
                    ArgumentState::Code
                } else {
                    ArgumentState::LongText { quote, escaped: false, n: n + 1 }
                };
            }
            ArgumentState::LongText { quote, escaped, .. } => {
                self.within = ArgumentState::LongText { quote, escaped: c == '\\' && !escaped, n: 0 };
            }
        }
        self.text.push(c);
        PythonCallState::Argument
    }

    /// In a string, which is passed on character by character.
    fn in_text(&mut self, c: char) -> PythonCallState {
        let step = self.string.push(c);
        let text = json_text(&self.string.take(step == StringStep::Before));
        add_arguments(&mut self.parts, &text);
        match step {
            StringStep::More => PythonCallState::Text,
            StringStep::Before => {
                add_arguments(&mut self.parts, "\"");
                self.key = None;
                self.next_text();
                self.after_text(c)
            }
        }
    }

    /// After a string. Text up to the next comma is ignored.
    fn after_text(&mut self, c: char) -> PythonCallState {
        match c {
            ',' => PythonCallState::Argument,
            ')' => self.end(),
            _ => PythonCallState::AfterText,
        }
    }

    fn end(&mut self) -> PythonCallState {
        add_arguments(&mut self.parts, if self.n_arguments == 0 { "{}" } else { "}" });
        PythonCallState::Done
    }

    fn may_end_key(&self) -> bool {
        self.key.is_none() && self.depth == 0
    }

    fn in_code(&mut self, c: char) -> PythonCallState {
        match c {
            ',' if self.depth == 0 => return self.end_argument(),
            ')' if self.depth == 0 => {
                if self.text.trim().is_empty() && self.key.is_none() {
                    self.begin();
                } else if self.end_argument() == PythonCallState::NoCall {
                    return PythonCallState::NoCall;
                }
                return self.end();
            }
            '=' if self.may_end_key() => {
                let key = self.text.trim().trim_matches(['"', '\'']);
                if key.is_empty() || key.contains(|c: char| c.is_whitespace() || "\"'()[]{}".contains(c)) {
                    return PythonCallState::NoCall;
                }
                self.key = Some(key.to_owned());
                self.begin();
                self.next_text();
                return PythonCallState::Argument;
            }
            '\'' | '"' if self.key.is_some() && self.depth == 0 && is_prefix(self.text.trim_start()) => {
                let raw = self.text.contains(['r', 'R']);
                self.string = PythonString::new(c, raw);
                let key = self.key.take().unwrap_or_default();
                self.write(&format!("{}: \"", json!(key)));
                self.next_text();
                return PythonCallState::Text;
            }
            '\'' | '"' if is_prefix(&self.text[self.word..]) => self.within = ArgumentState::Opening { quote: c, n: 1 },
            '(' | '[' | '{' => self.depth += 1,
            ')' | ']' | '}' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        self.text.push(c);
        if c.is_whitespace() || ",:([{".contains(c) {
            self.word = self.text.len();
        }
        PythonCallState::Argument
    }

    /// Adds the name to the parts, once it is certain that this is a call.
    fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            self.parts.push(CallPart::Name(self.name.clone()));
        }
    }

    fn next_text(&mut self) {
        self.text.clear();
        self.word = 0;
    }

    /// Writes the argument that was read.
    fn end_argument(&mut self) -> PythonCallState {
        let text = std::mem::take(&mut self.text);
        self.next_text();
        let text = text.trim();
        let named = self.key.take();
        if named.is_none() && text.is_empty() {
            return PythonCallState::Argument;
        }
        let value = as_json(text);
        // A positional argument gets the name of the function's parameter at its position. A first argument that is
        // not a value may be prose, so it is not taken as one.
        let in_order = || self.signatures.name_of(&self.name, self.n_arguments).map(str::to_owned);
        let in_order = || in_order().filter(|_| value.is_some() || self.begun);
        let key = named.or_else(|| in_order().or_else(|| self.begun.then(|| self.n_arguments.to_string())));
        let argument = match (key, value) {
            (Some(key), Some(value)) => format!("{}: {value}", json!(key)),
            (Some(key), None) => format!("{}: {}", json!(key), json!(text)),
            // A dictionary (`**{...}`) has names of its own.
            (None, _) => match as_json(text.trim_start_matches('*')).filter(|json| json.starts_with('{')) {
                Some(json) => json[1..json.len() - 1].to_owned(),
                None => return PythonCallState::NoCall,
            },
        };
        self.begin();
        if !argument.is_empty() {
            self.write(&argument);
        }
        PythonCallState::Argument
    }

    fn write(&mut self, argument: &str) {
        let before = if self.n_arguments == 0 { "{" } else { ", " };
        add_arguments(&mut self.parts, &format!("{before}{argument}"));
        self.n_arguments += 1;
    }

    /// The answer ends within the call: writes the incomplete argument, as far as it is usable, and closes the
    /// arguments.
    pub fn cut_short(&mut self) {
        if !self.begun {
            return;
        }
        if self.state == PythonCallState::Text {
            let text = json_text(&self.string.take(true)) + "\"";
            add_arguments(&mut self.parts, &text);
        } else if let Some(key) = self.key.take() {
            let text = std::mem::take(&mut self.text);
            let text = text.trim();
            let value = as_json(text).or_else(|| {
                let mut reader = LenientJson::new();
                text.chars().all(|c| reader.push(c) == JsonStep::More);
                reader.finish();
                Some(reader.take()).filter(|json| !json.is_empty())
            });
            if let Some(value) = value {
                self.write(&format!("{}: {value}", json!(key)));
            }
        }
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::Tool;

    fn read(text: &str) -> (Option<String>, String, CallProgress) {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"first": {}, "second": {}}}}});
        let mut call = CallPython::new(Arc::new(Signatures::of(&[Tool::try_from(tool).unwrap()])));
        let mut progress = CallProgress::Incomplete;
        for c in text.chars() {
            progress = call.push(c);
            if progress != CallProgress::Incomplete {
                break;
            }
        }
        if progress == CallProgress::Incomplete {
            call.cut_short();
        }
        let (mut name, mut arguments) = (None, String::new());
        for part in call.take_parts() {
            match part {
                CallPart::Name(text) => name = Some(text),
                CallPart::Arguments(text) => arguments += &text,
            }
        }
        (name, arguments, progress)
    }

    #[test]
    fn calls_are_read_with_arguments_of_every_kind() {
        for (text, arguments) in [
            ("f()", "{}"),
            (" f ( ) ", "{}"),
            ("f(a=1, b = -2.5,c=True ,d=None,)", r#"{"a": 1, "b": -2.5, "c": true, "d": null}"#),
            (r#"f(a="x, (y)=\"z\"", b='é\n')"#, r#"{"a": "x, (y)=\"z\"", "b": "é\n"}"#),
            (r#"f(a='it's, well, so', b="12" of" them")"#, r#"{"a": "it's, well, so", "b": "12\" of\" them"}"#),
            (r#"f(a=[1, {'b': (2, 3)}], c={"d": {"e": []}})"#, r#"{"a": [1, {"b": [2, 3]}], "c": {"d": {"e": []}}}"#),
            ("f(a='''x\n\"y\", 'z')''', b='')", r#"{"a": "x\n\"y\", 'z')", "b": ""}"#),
            (
                "f(a=2024-05-01, b=don't, c=g(1, 2), d=x == 1)",
                r#"{"a": "2024-05-01", "b": "don't", "c": "g(1, 2)", "d": "x == 1"}"#,
            ),
            ("f(a=)", r#"{"a": ""}"#),
            ("f(\"a\"=1)", r#"{"a": 1}"#),
            ("f('x', 2)", r#"{"first": "x", "second": 2}"#),
            ("f(**{'a': 1, 'b': {}})", r#"{"a": 1, "b": {}}"#),
            ("f(**{'a': 1}, b=2)", r#"{"a": 1, "b": 2}"#),
            ("f(a=1, 'x', 'y')", r#"{"a": 1, "second": "x", "2": "y"}"#),
        ] {
            assert_eq!(read(text), (Some("f".into()), arguments.into(), CallProgress::Done), "{text}");
            assert!(serde_json::from_str::<Value>(arguments).is_ok(), "{arguments}");
        }
        assert_eq!(read("g.h-i({'a': 1})").0.as_deref(), Some("g.h-i"));
    }

    #[test]
    fn other_texts_are_not_calls() {
        for text in
            ["", "f g(a=1)", "f, g", "(a=1)", "g(see above)", "g('x')", "f(x)", "f(=1)", "f(a b=1)", "]", "\"f\"("]
        {
            assert_eq!(read(text).0, None, "{text}");
        }
    }

    #[test]
    fn incomplete_calls_are_closed() {
        for (text, arguments) in [
            ("f(a", ""),
            ("f(a=", "{}"),
            ("f(a=1", "{\"a\": 1}"),
            (r#"f(a=1, b="x\ny"#, r#"{"a": 1, "b": "x\ny"}"#),
            ("f(a='x'", "{\"a\": \"x\"}"),
            ("f(a='x', ke", "{\"a\": \"x\"}"),
            ("f(a=[1, 'x", "{\"a\": [1, \"x\"]}"),
        ] {
            assert_eq!((read(text).1, read(text).2), (arguments.into(), CallProgress::Incomplete), "{text}");
        }
    }
}
