//! A call as a JSON object, read as it comes.

use serde_json::Value;

use super::call::{CallPart, Progress, add_arguments};

/// Reads `{"name": ..., "arguments": {...}}`, whose keys may come in any order and have other names that models use.
#[derive(Debug)]
pub(super) struct CallJson {
    state: State,
    key: String,
    /// The text of the value that is being read, or that waits for the name.
    value: JsonText,
    has_name: bool,
    has_arguments: bool,
    /// Arguments that came before the name.
    early: String,
    parts: Vec<CallPart>,
    /// The object is the arguments of this function alone.
    arguments_of: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    Key,
    InKey,
    Colon,
    Value,
    InValue,
    Done,
    NoCall,
}

/// A JSON value whose end is being looked for.
#[derive(Debug, Default)]
struct JsonText {
    so_far: String,
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl JsonText {
    /// Takes the next character. True: the value ends with it.
    fn push(&mut self, c: char) -> bool {
        self.so_far.push(c);
        if self.in_string {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
            return !self.in_string && self.depth == 0;
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}

const NAMES: [&str; 3] = ["name", "function", "tool_name"];
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

impl CallJson {
    /// A call that begins with the next `{`.
    pub fn new() -> Self {
        Self {
            state: State::Start,
            key: String::new(),
            value: JsonText::default(),
            has_name: false,
            has_arguments: false,
            early: String::new(),
            parts: Vec::new(),
            arguments_of: None,
        }
    }

    /// The arguments of the function `name`, which begin with the next `{`.
    pub fn arguments_of(name: String) -> Self {
        Self { state: State::Value, key: ARGUMENTS[0].into(), arguments_of: Some(name), ..Self::new() }
    }

    /// What was found since [`take_parts`](Self::take_parts).
    pub fn parts(&self) -> &[CallPart] {
        &self.parts
    }

    /// What was found since the last call of this.
    pub fn take_parts(&mut self) -> Vec<CallPart> {
        std::mem::take(&mut self.parts)
    }

    /// Takes the next character.
    pub fn push(&mut self, c: char) -> Progress {
        self.state = self.next(c);
        match self.state {
            State::Done => Progress::Done,
            State::NoCall => Progress::NoCall,
            _ => Progress::Open,
        }
    }

    fn next(&mut self, c: char) -> State {
        match (self.state, c) {
            (State::InKey, _) => {
                if self.value.push(c) {
                    self.key = serde_json::from_str(&self.value.so_far).unwrap_or_default();
                    return State::Colon;
                }
                State::InKey
            }
            (State::InValue, _) => self.in_value(c),
            (state, ' ' | '\t' | '\n' | '\r') | (state @ State::Key, ',') => state,
            (State::Start, '{') => State::Key,
            (State::Key, '"') => {
                self.value = JsonText::default();
                self.value.push(c);
                State::InKey
            }
            (State::Key, '}') => self.end(),
            (State::Colon, ':') => State::Value,
            (State::Value, _) => {
                if let Some(name) = &self.arguments_of {
                    if c != '{' {
                        return State::NoCall;
                    }
                    self.name(name.clone());
                }
                self.value = JsonText::default();
                self.in_value(c)
            }
            _ => State::NoCall,
        }
    }

    /// A character of a value.
    fn in_value(&mut self, c: char) -> State {
        let scalar = self.value.depth == 0 && !self.value.in_string && !matches!(c, '"' | '{' | '[');
        if scalar && matches!(c, ',' | '}' | ' ' | '\t' | '\n' | '\r') {
            let next = self.end_of_value();
            return if c == '}' && next == State::Key { self.end() } else { next };
        }
        let streamed = self.value.depth > 0 || (c == '{' && self.value.so_far.is_empty());
        if streamed && ARGUMENTS.contains(&&*self.key) {
            self.has_arguments = true;
            self.arguments(c.encode_utf8(&mut [0; 4]));
        }
        if self.value.push(c) { self.end_of_value() } else { State::InValue }
    }

    fn end_of_value(&mut self) -> State {
        let text = std::mem::take(&mut self.value.so_far);
        if self.arguments_of.is_some() {
            return State::Done;
        }
        let Ok(value) = serde_json::from_str::<Value>(&text) else { return State::NoCall };
        match value {
            Value::String(name) if NAMES.contains(&&*self.key) => self.name(name),
            // The arguments as a text that has the object.
            Value::String(arguments) if ARGUMENTS.contains(&&*self.key) => {
                self.has_arguments = true;
                self.arguments(&arguments);
            }
            // {"type": "function", "function": {"name": ..., "arguments": ...}}
            Value::Object(call) if self.key == "function" => {
                if let Some(name) = call.get("name").and_then(Value::as_str) {
                    self.name(name.to_owned());
                }
                if let Some(arguments) = ARGUMENTS.iter().find_map(|&key| call.get(key)) {
                    self.has_arguments = true;
                    self.arguments(&arguments.as_str().map_or_else(|| arguments.to_string(), str::to_owned));
                }
            }
            _ => {}
        }
        State::Key
    }

    /// The end of the object.
    fn end(&mut self) -> State {
        if !self.has_name {
            return State::NoCall;
        }
        if !self.has_arguments {
            self.arguments("{}");
        }
        State::Done
    }

    fn name(&mut self, name: String) {
        if self.has_name {
            return;
        }
        self.has_name = true;
        self.parts.push(CallPart::Name(name));
        let early = std::mem::take(&mut self.early);
        if !early.is_empty() {
            self.arguments(&early);
        }
    }

    fn arguments(&mut self, text: &str) {
        if self.has_name {
            add_arguments(&mut self.parts, text);
        } else {
            self.early += text;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (Option<String>, String, Progress) {
        let mut call = CallJson::new();
        let mut progress = Progress::Open;
        for c in text.chars() {
            progress = call.push(c);
            if progress != Progress::Open {
                break;
            }
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
    fn keys_come_in_any_order_and_under_several_names() {
        for (text, arguments) in [
            (r#"{"name": "f", "arguments": {"a": "}\"", "b": [1, {}]}}"#, r#"{"a": "}\"", "b": [1, {}]}"#),
            (r#"{"parameters":{"a":1},"name":"f"}"#, r#"{"a":1}"#),
            (r#"{"type":"function","name":"f","id":7,"arguments":{}}"#, "{}"),
            (r#"{"function": "f", "parameters": {"x": null} , "id": "abc"}"#, r#"{"x": null}"#),
            (r#"{"type":"function","function":{"name":"f","arguments":{"a":1}}}"#, r#"{"a":1}"#),
            (r#"{"name": "f", "arguments": "{\"a\": 1}"}"#, r#"{"a": 1}"#),
            (r#"{"tool_call_id": "0", "tool_name": "f", "parameters": {}}"#, "{}"),
            (r#"{"name": "f"}"#, "{}"),
            (r#"{"name": "f", "arguments": null}"#, "{}"),
        ] {
            assert_eq!(read(text), (Some("f".into()), arguments.into(), Progress::Done), "{text}");
        }
    }

    #[test]
    fn other_objects_are_no_calls() {
        for text in ["{}", r#"{"arguments": {}}"#, "x", r#"{"a" 1}"#, r#"{name: "f"}"#, r#"{"a": tru}"#] {
            assert_eq!(read(text).2, Progress::NoCall, "{text}");
        }
        assert_eq!(read(r#"{"name": "f", "argum"#), (Some("f".into()), String::new(), Progress::Open));
    }
}
