//! Support for tools if the chat template does not handle them, or not completely: tools, calls and results are put
//! into the texts of messages.

use serde_json::Value;

use super::syntax::{PYTHONIC_END, PYTHONIC_START};
use super::{ToolFormat, python_value};
use crate::{Message, Role, Tool, ToolCall};

/// The support for tools in a chat template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TemplateToolSupport {
    pub tools: ToolPlacement,
    calls: CallPlacement,
    results: ResultRole,
}

/// The place where a template expects the tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToolPlacement {
    /// The variable `tools`.
    Variable,
    /// A field of the system message, as text: Phi 4 mini.
    SystemText,
    /// A field of the system message, as a list: GLM 4.
    SystemList,
    /// The template does not support tools.
    Nowhere,
}

/// The place where a template expects calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallPlacement {
    /// The field `tool_calls`.
    Field,
    /// Separate messages, with the function's name in `metadata`: GLM 4.
    Metadata,
    /// The text of the message, in the model's format: LFM2.
    Text,
    /// The template does not support calls.
    Nowhere,
}

/// The role that a template expects for results of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ResultRole {
    /// The role `tool`, or any role.
    Tool,
    /// The role `observation`: GLM 4.
    Observation,
    /// The template does not support results.
    Nothing,
}

impl TemplateToolSupport {
    /// The support in the template `source`, judged by the names that occur in it.
    pub fn of_template(source: &str) -> Self {
        let has = |text: &str| source.contains(text);
        let metadata = calls_are_metadata(source);
        let tools = match (has("tools"), has("['tools']") && !has("tool_calls")) {
            (false, _) => ToolPlacement::Nowhere,
            (true, false) => ToolPlacement::Variable,
            (true, true) if has("for tool in tools") => ToolPlacement::SystemList,
            (true, true) => ToolPlacement::SystemText,
        };
        let calls = match tools {
            _ if metadata => CallPlacement::Metadata,
            ToolPlacement::Variable if has("tool_calls") => CallPlacement::Field,
            ToolPlacement::Variable if ToolFormat::known(source) == Some(ToolFormat::Pythonic) => CallPlacement::Text,
            ToolPlacement::Variable
            | ToolPlacement::SystemText
            | ToolPlacement::SystemList
            | ToolPlacement::Nowhere => CallPlacement::Nowhere,
        };
        let results = match tools {
            _ if metadata => ResultRole::Observation,
            ToolPlacement::Variable => ResultRole::Tool,
            ToolPlacement::SystemText | ToolPlacement::SystemList | ToolPlacement::Nowhere => ResultRole::Nothing,
        };
        Self { tools, calls, results }
    }

    /// Whether the template supports everything that the conversation contains.
    pub fn suffices(self, messages: &[Message], tools: &[Tool]) -> bool {
        (self.tools == ToolPlacement::Variable || tools.is_empty())
            && (matches!(self.calls, CallPlacement::Field | CallPlacement::Text)
                || messages.iter().all(|message| message.tool_calls.is_empty()))
            && (self.results == ResultRole::Tool || messages.iter().all(|message| message.role != Role::Tool))
    }

    /// The name of the role of messages with results.
    pub fn role_of_results(self) -> &'static str {
        match self.results {
            ResultRole::Tool | ResultRole::Nothing => Role::Tool.name(),
            ResultRole::Observation => "observation",
        }
    }

    /// The field for the name in an assistant's message.
    pub fn field_of_name(self) -> &'static str {
        match self.calls {
            CallPlacement::Metadata => "metadata",
            CallPlacement::Field | CallPlacement::Text | CallPlacement::Nowhere => "name",
        }
    }

    /// The text of `calls`, to be appended to the message's text, in three parts: start mark, calls, end mark. `None`
    /// if calls are not put into the text.
    pub fn in_text(self, calls: &[ToolCall]) -> Option<[String; 3]> {
        let is_text = self.calls == CallPlacement::Text && !calls.is_empty();
        let calls = || calls.iter().map(as_python).collect::<Vec<_>>().join(", ");
        is_text.then(|| [format!("{PYTHONIC_START}["), calls(), format!("]{PYTHONIC_END}")])
    }

    /// The tools as the value of a field of the system message; `None` if the template does not expect them there.
    pub fn in_system_message(self, tools: &[Tool]) -> Option<Value> {
        match self.tools {
            ToolPlacement::SystemText => Some(format!("[{}]", functions(tools).join(", ")).into()),
            ToolPlacement::SystemList => Some(tools.iter().map(|tool| tool.as_value().clone()).collect()),
            ToolPlacement::Variable | ToolPlacement::Nowhere => None,
        }
    }
}

/// Whether a call is a separate message whose text is the arguments.
pub(super) fn calls_are_metadata(source: &str) -> bool {
    source.contains("metadata") && (source.contains("observation") || source.contains("[gMASK]"))
}

/// The conversation with everything that the template does not support put into texts: the first message describes the
/// tools, calls are JSON in the assistant's text, and results are messages of the user.
pub(crate) fn with_tools_as_text(support: TemplateToolSupport, messages: &[Message], tools: &[Tool]) -> Vec<Message> {
    let mut plain: Vec<Message> = Vec::new();
    // Whether the last message is a user message with results. Further user messages are joined to it, because roles
    // have to alternate.
    let mut answers = false;
    for message in messages {
        let mut message = message.clone();
        let mut calls = match support.calls {
            CallPlacement::Field | CallPlacement::Text => Vec::new(),
            CallPlacement::Metadata | CallPlacement::Nowhere => std::mem::take(&mut message.tool_calls),
        };
        if support.calls == CallPlacement::Metadata && !calls.is_empty() {
            if !message.text().is_empty() {
                plain.push(message);
            }
            let call = |call: ToolCall| Message {
                name: Some(call.function.name),
                ..Message::assistant(call.function.arguments)
            };
            plain.extend(calls.drain(..).map(call));
            continue;
        }
        for call in calls {
            let name = Value::from(call.function.name);
            let call = format!("{{\"name\": {name}, \"arguments\": {}}}", call.function.arguments);
            let text = message.content.get_or_insert_default();
            *text = if text.is_empty() { call } else { format!("{text}\n{call}") };
        }
        let is_answer = message.role == Role::Tool && support.results == ResultRole::Nothing;
        if is_answer {
            message = Message::user(tool_result_as_text(message.text()));
        }
        let last = plain.last_mut().filter(|last| last.role == Role::User && (is_answer || answers));
        answers = is_answer;
        if let Some(last) = last.filter(|_| message.role == Role::User) {
            last.content = Some(format!("{}\n{}", last.text(), message.text()));
            continue;
        }
        plain.push(message);
    }
    if tools.is_empty() {
        return plain;
    }
    match support.tools {
        ToolPlacement::Variable => {}
        ToolPlacement::SystemText | ToolPlacement::SystemList => {
            if plain.first().is_none_or(|first| !matches!(first.role, Role::System | Role::Developer)) {
                plain.insert(0, Message::system(""));
            }
        }
        ToolPlacement::Nowhere => {
            if let Some(first) = plain.first_mut() {
                first.content = Some(format!("{}\n\n{}", instructions(tools), first.text()));
            }
        }
    }
    plain
}

/// The result of a call as text of the user.
pub(crate) fn tool_result_as_text(answer: &str) -> String {
    format!("The function answers: {answer}")
}

/// A call in Python's notation.
fn as_python(call: &ToolCall) -> String {
    let arguments = match serde_json::from_str(&call.function.arguments) {
        Ok(Value::Object(arguments)) => {
            let argument = |(key, value): (&String, &Value)| format!("{key}={}", python_value::as_python(value));
            arguments.iter().map(argument).collect::<Vec<_>>().join(", ")
        }
        Ok(_) | Err(_) => call.function.arguments.clone(),
    };
    format!("{}({arguments})", call.function.name)
}

fn functions(tools: &[Tool]) -> Vec<String> {
    tools.iter().map(|tool| tool.as_value()["function"].to_string()).collect()
}

fn instructions(tools: &[Tool]) -> String {
    format!(
        "You can call these functions:\n{}\n\nTo call one, answer with a JSON object and nothing else: \
         {{\"name\": the function's name, \"arguments\": an object with its arguments}}",
        functions(tools).join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_calls_and_answers_become_text() {
        let tool = serde_json::json!({"type": "function", "function": {"name": "f"}});
        let call = Message {
            content: None,
            tool_calls: vec![ToolCall::new("1", "f", r#"{"a": 1}"#), ToolCall::new("2", "f", "{}")],
            ..Message::assistant("")
        };
        let answer = |text| Message::new(Role::Tool, text);
        let messages = [Message::user("Hi"), call, answer("one"), answer("two")];
        let tools = [Tool::try_from(tool).unwrap()];
        let plain = with_tools_as_text(TemplateToolSupport::of_template(""), &messages, &tools);
        assert!(plain[0].text().starts_with("You can call these functions:\n{\"name\":\"f\"}\n\nTo call one"));
        assert!(plain[0].text().ends_with("\n\nHi"));
        assert_eq!(
            plain[1],
            Message::assistant("{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n{\"name\": \"f\", \"arguments\": {}}")
        );
        assert_eq!(plain[2..], [Message::user("The function answers: one\nThe function answers: two")]);
    }

    #[test]
    fn templates_that_support_tools_are_left_alone() {
        let tool = serde_json::json!({"type": "function", "function": {"name": "f"}});
        let tools = [Tool::try_from(tool).unwrap()];
        let call = Message { tool_calls: vec![ToolCall::new("1", "f", "{}")], ..Message::assistant("Well.") };
        let messages = [Message::user("Hi"), call, Message::new(Role::Tool, "one")];
        let told = |source: &str| {
            let support = TemplateToolSupport::of_template(source);
            let plain = with_tools_as_text(support, &messages, &tools);
            let texts: Vec<_> = plain.iter().map(|m| format!("{} {}", m.role.name(), m.text())).collect();
            (
                support.suffices(&messages, &tools),
                texts,
                support.in_system_message(&tools).map(|tools| tools.to_string()),
            )
        };
        let (user, called) = ("user Hi".to_owned(), "assistant Well.\n{\"name\": \"f\", \"arguments\": {}}".to_owned());
        let result = "tool one".to_owned();
        let (suffices, texts, _) = told("tools tool_calls");
        assert_eq!((suffices, texts), (true, vec![user.clone(), "assistant Well.".into(), result.clone()]));
        assert_eq!(told("tools"), (false, vec![user.clone(), called.clone(), result.clone()], None));
        let answers = "user The function answers: one".to_owned();
        let system = "system ".to_owned();
        let field = "\"[{\\\"name\\\":\\\"f\\\"}]\"".to_owned();
        assert_eq!(told("message['tools']"), (false, vec![system.clone(), user.clone(), called, answers], Some(field)));
        let apart = vec![system, user, "assistant Well.".into(), "assistant {}".into(), result];
        let field = "[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]".to_owned();
        assert_eq!(
            told("[gMASK]{% set tools = item['tools'] %}{% for tool in tools %}{{ item['metadata'] }}"),
            (false, apart, Some(field))
        );
    }
}
