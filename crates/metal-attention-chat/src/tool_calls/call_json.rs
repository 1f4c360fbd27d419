//! [`CallJson`]: reads a call that is a JSON object.

use serde_json::Value;

use super::call::{CallPart, CallProgress, add_arguments};
use super::lenient_json::{JsonStep, LenientJson};

/// Reads `{"name": ..., "arguments": {...}}`. The keys may come in any order and have other names that models use.
/// Invalid JSON is repaired ([`LenientJson`]). The arguments are passed on character by character.
#[derive(Debug)]
pub(super) struct CallJson {
    state: JsonCallState,
    key: String,
    /// The reader of the current key or value.
    reader: LenientJson,
    name: Option<String>,
    /// Whether the name was added to the parts.
    begun: bool,
    has_arguments: bool,
    /// Arguments that were read before the name.
    early: String,
    parts: Vec<CallPart>,
    /// Whether the object is the arguments alone; the name is known then.
    is_arguments: bool,
    unread: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JsonCallState {
    Start,
    /// Before a key. `first`: no key was read yet.
    Key {
        first: bool,
    },
    InKey,
    Colon,
    Value,
    InValue,
    /// In the object of the arguments.
    InArguments,
    Done,
    NoCall,
}

const NAMES: [&str; 3] = ["name", "function", "tool_name"];
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

impl CallJson {
    /// A new call, which begins with the next `{`.
    pub fn new() -> Self {
        Self {
            state: JsonCallState::Start,
            key: String::new(),
            reader: LenientJson::new(),
            name: None,
            begun: false,
            has_arguments: false,
            early: String::new(),
            parts: Vec::new(),
            is_arguments: false,
            unread: String::new(),
        }
    }

    /// The arguments of the function `name`, which begin with the next `{`.
    pub fn arguments_of(name: String) -> Self {
        Self {
            state: JsonCallState::Value,
            key: ARGUMENTS[0].into(),
            name: Some(name),
            is_arguments: true,
            ..Self::new()
        }
    }

    /// The name of the function, once it was read. The text may still turn out not to be a call.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The parts that were read since the last [`take_parts`](Self::take_parts).
    pub fn parts(&self) -> &[CallPart] {
        &self.parts
    }

    /// Removes and returns the parts that were read since the last call.
    pub fn take_parts(&mut self) -> Vec<CallPart> {
        std::mem::take(&mut self.parts)
    }

    /// The text that was read although it follows the call, if the closing brace is missing.
    pub fn unread(&self) -> &str {
        &self.unread
    }

    /// Reads the next character.
    pub fn push(&mut self, c: char) -> CallProgress {
        self.state = self.next(c);
        match self.state {
            JsonCallState::Done => CallProgress::Done,
            JsonCallState::NoCall => CallProgress::NoCall,
            JsonCallState::Start
            | JsonCallState::Key { .. }
            | JsonCallState::InKey
            | JsonCallState::Colon
            | JsonCallState::Value
            | JsonCallState::InValue
            | JsonCallState::InArguments => CallProgress::Incomplete,
        }
    }

    fn next(&mut self, c: char) -> JsonCallState {
        let is_blank = matches!(c, ' ' | '\t' | '\n' | '\r');
        match self.state {
            JsonCallState::Start if is_blank => JsonCallState::Start,
            JsonCallState::Start if c == '{' => JsonCallState::Key { first: true },
            JsonCallState::Key { first } if is_blank || (c == ',' && !first) => JsonCallState::Key { first },
            JsonCallState::Key { .. } if matches!(c, '"' | '\'') => self.read(c, JsonCallState::InKey),
            JsonCallState::Key { first: false } if c != '}' => self.missing_brace(c),
            JsonCallState::Key { .. } if c == '}' => self.end(),
            JsonCallState::InKey => match self.reader.push(c) {
                JsonStep::More => JsonCallState::InKey,
                step @ (JsonStep::Done | JsonStep::Before) => {
                    self.key = serde_json::from_str(&self.reader.take()).unwrap_or_default();
                    self.state = JsonCallState::Colon;
                    if step == JsonStep::Before { self.next(c) } else { JsonCallState::Colon }
                }
            },
            JsonCallState::Colon if is_blank => JsonCallState::Colon,
            JsonCallState::Colon if c == ':' => JsonCallState::Value,
            JsonCallState::Value if is_blank => JsonCallState::Value,
            JsonCallState::Value if self.is_arguments && c != '{' => JsonCallState::NoCall,
            JsonCallState::Value if c == '{' && ARGUMENTS.contains(&&*self.key) && !self.has_arguments => {
                self.has_arguments = true;
                self.begin();
                self.read(c, JsonCallState::InArguments)
            }
            JsonCallState::Value if matches!(c, ',' | '}' | ']' | ':') => JsonCallState::NoCall,
            JsonCallState::Value => self.read(c, JsonCallState::InValue),
            JsonCallState::InArguments => self.in_arguments(c),
            JsonCallState::InValue => match self.reader.push(c) {
                JsonStep::More => JsonCallState::InValue,
                JsonStep::Done => self.end_of_value(),
                JsonStep::Before => {
                    self.state = self.end_of_value();
                    if self.state == JsonCallState::NoCall { JsonCallState::NoCall } else { self.next(c) }
                }
            },
            JsonCallState::Start
            | JsonCallState::Key { .. }
            | JsonCallState::Colon
            | JsonCallState::Done
            | JsonCallState::NoCall => JsonCallState::NoCall,
        }
    }

    /// Begins a key or a value with `c`.
    fn read(&mut self, c: char, state: JsonCallState) -> JsonCallState {
        self.reader = LenientJson::new();
        self.state = state;
        if state == JsonCallState::InArguments {
            return self.in_arguments(c);
        }
        match self.reader.push(c) {
            JsonStep::More => state,
            JsonStep::Done | JsonStep::Before => JsonCallState::NoCall,
        }
    }

    fn in_arguments(&mut self, c: char) -> JsonCallState {
        let step = self.reader.push(c);
        let json = self.reader.take();
        self.arguments(&json);
        match step {
            JsonStep::More => JsonCallState::InArguments,
            JsonStep::Done if self.is_arguments => JsonCallState::Done,
            JsonStep::Done => JsonCallState::Key { first: false },
            JsonStep::Before => self.missing_brace(c),
        }
    }

    /// The closing brace is missing before `c`. The call ends here if it is otherwise complete.
    fn missing_brace(&mut self, c: char) -> JsonCallState {
        let state = self.end();
        if state == JsonCallState::Done {
            self.unread.push(c);
        }
        state
    }

    fn end_of_value(&mut self) -> JsonCallState {
        let text = self.reader.take();
        let is_arguments = ARGUMENTS.contains(&&*self.key) && !self.has_arguments;
        match serde_json::from_str::<Value>(&text) {
            Ok(Value::String(name)) if NAMES.contains(&&*self.key) => self.set_name(name),
            // The arguments as a string that contains the JSON object.
            Ok(Value::String(arguments)) if is_arguments => return self.text_of_arguments(&arguments),
            Ok(Value::Null) if is_arguments => {}
            // {"type": "function", "function": {"name": ..., "arguments": ...}}
            Ok(Value::Object(call)) if self.key == "function" => {
                if let Some(name) = call.get("name").and_then(Value::as_str) {
                    self.set_name(name.to_owned());
                }
                match ARGUMENTS.iter().find_map(|&key| call.get(key)) {
                    None | Some(Value::Null) => {}
                    Some(Value::String(arguments)) => return self.text_of_arguments(arguments),
                    Some(arguments @ Value::Object(_)) => {
                        self.has_arguments = true;
                        self.begin();
                        self.arguments(&arguments.to_string());
                    }
                    Some(Value::Bool(_) | Value::Number(_) | Value::Array(_)) => return JsonCallState::NoCall,
                }
            }
            Ok(_) if is_arguments => return JsonCallState::NoCall,
            // A number out of range, or values nested too deeply.
            Err(_) if is_arguments || NAMES.contains(&&*self.key) => return JsonCallState::NoCall,
            // Other keys are ignored.
            Ok(_) | Err(_) => {}
        }
        JsonCallState::Key { first: false }
    }

    /// Arguments that are a string: it must contain an object, or be empty.
    fn text_of_arguments(&mut self, text: &str) -> JsonCallState {
        let text = text.trim();
        if matches!(text, "" | "null") {
            return JsonCallState::Key { first: false };
        }
        let mut reader = LenientJson::new();
        let n = text.chars().take_while(|&c| reader.push(c) == JsonStep::More).count();
        if !text.starts_with('{') || n + 1 < text.chars().count() {
            return JsonCallState::NoCall;
        }
        reader.finish();
        self.has_arguments = true;
        self.begin();
        self.arguments(&reader.take());
        JsonCallState::Key { first: false }
    }

    /// The end of the object: the call is complete if it has a name.
    fn end(&mut self) -> JsonCallState {
        if self.name.is_none() {
            return JsonCallState::NoCall;
        }
        self.begin();
        if !self.has_arguments {
            self.has_arguments = true;
            self.arguments("{}");
        }
        JsonCallState::Done
    }

    fn set_name(&mut self, name: String) {
        if self.name.is_none() {
            self.name = Some(name);
            if self.has_arguments {
                self.begin();
            }
        }
    }

    /// Adds the name to the parts, once it is known.
    fn begin(&mut self) {
        let Some(name) = self.name.clone().filter(|_| !self.begun) else { return };
        self.begun = true;
        self.parts.push(CallPart::Name(name));
        let early = std::mem::take(&mut self.early);
        if !early.is_empty() {
            self.arguments(&early);
        }
    }

    fn arguments(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        if self.begun {
            add_arguments(&mut self.parts, text);
        } else {
            self.early += text;
        }
    }

    /// The answer ends within the call: closes the arguments. A call that lacks only its closing brace is complete.
    pub fn cut_short(&mut self) {
        match self.state {
            JsonCallState::InArguments => {
                self.reader.finish();
                let json = self.reader.take();
                self.arguments(&json);
            }
            JsonCallState::Key { first: false } => drop(self.end()),
            JsonCallState::Start
            | JsonCallState::Key { first: true }
            | JsonCallState::InKey
            | JsonCallState::Colon
            | JsonCallState::Value
            | JsonCallState::InValue
            | JsonCallState::Done
            | JsonCallState::NoCall => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (Option<String>, String, CallProgress) {
        let mut call = CallJson::new();
        let mut progress = CallProgress::Incomplete;
        for c in text.chars() {
            progress = call.push(c);
            if progress != CallProgress::Incomplete {
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
            (r#"{"name": "f", "arguments": ""}"#, "{}"),
            (r"{'name': 'f', 'arguments': {'a': True}}", r#"{"a": true}"#),
            (r#"{"name": "f", "arguments": {"a": 1,},}"#, r#"{"a": 1}"#),
            (r#"{"name": "f", "arguments": {"a": 1}</tool_call>"#, r#"{"a": 1}"#),
            (r#"{"name": "f", "arguments": {"a": 1e400}, "id": 1e400}"#, r#"{"a": 1e400}"#),
        ] {
            assert_eq!(read(text), (Some("f".into()), arguments.into(), CallProgress::Done), "{text}");
        }
    }

    #[test]
    fn other_objects_are_not_calls() {
        for text in [
            "{}",
            r#"{"arguments": {}}"#,
            "x",
            r#"{"a" 1}"#,
            r#"{"a": tru}"#,
            r#"{"name": "f", "arguments": ["x"]}"#,
            r#"{"name": "f", "arguments": "x y"}"#,
            r#"{"name": "f", "arguments": 1}"#,
        ] {
            assert_eq!((read(text).0, read(text).2), (None, CallProgress::NoCall), "{text}");
        }
        assert_eq!(read(r#"{"name": "f", "argum"#), (None, String::new(), CallProgress::Incomplete));
    }
}
