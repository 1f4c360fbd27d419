//! Tools for models whose chat template does not know all about them: the rest is told in plain words.

use serde_json::Value;

use crate::{Message, Role, Tool};

/// What a chat template tells the model of tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Telling {
    /// The tools, calls and what they gave.
    All,
    /// The tools and what calls gave.
    AllButCalls,
    /// The tools, where the system message has them in a field of its own: Phi 4 mini.
    SystemField,
    /// Nothing.
    Nothing,
}

impl Telling {
    /// What the template of this text tells.
    pub fn of_template(source: &str) -> Self {
        if !source.contains("tools") {
            Self::Nothing
        } else if source.contains("tool_calls") {
            Self::All
        } else if source.contains("message['tools']") {
            Self::SystemField
        } else {
            Self::AllButCalls
        }
    }
}

/// The conversation for a template that tells no more than `telling`, and the text of the tools where they belong into a
/// field of its first message. What the template does not know is told so: the first message describes the tools, calls
/// are text, and what they gave comes from the user.
pub(crate) fn in_plain_words(telling: Telling, messages: &[Message], tools: &[Tool]) -> (Vec<Message>, Option<String>) {
    let results_are_known = matches!(telling, Telling::All | Telling::AllButCalls);
    let mut plain: Vec<Message> = Vec::new();
    for message in messages {
        let mut message = message.clone();
        for call in std::mem::take(&mut message.tool_calls) {
            let name = Value::from(call.function.name);
            let call = format!("{{\"name\": {name}, \"arguments\": {}}}", call.function.arguments);
            let text = message.content.get_or_insert_default();
            *text = if text.is_empty() { call } else { format!("{text}\n{call}") };
        }
        if message.role == Role::Tool && !results_are_known {
            message = Message::user(format!("The function answers: {}", message.text()));
            // Two answers in a row are one message: roles have to alternate.
            if let Some(last) = plain.last_mut().filter(|last| last.role == Role::User) {
                last.content = Some(format!("{}\n{}", last.text(), message.text()));
                continue;
            }
        }
        plain.push(message);
    }
    if tools.is_empty() {
        return (plain, None);
    }
    match telling {
        Telling::All | Telling::AllButCalls => (plain, None),
        Telling::SystemField => {
            if plain.first().is_none_or(|first| !matches!(first.role, Role::System | Role::Developer)) {
                plain.insert(0, Message::system(""));
            }
            (plain, Some(format!("[{}]", functions(tools).join(", "))))
        }
        Telling::Nothing => {
            if let Some(first) = plain.first_mut() {
                first.content = Some(format!("{}\n\n{}", instructions(tools), first.text()));
            }
            (plain, None)
        }
    }
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
    use crate::ToolCall;

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
        let (plain, field) = in_plain_words(Telling::Nothing, &messages, &tools);
        assert_eq!(field, None);
        assert!(plain[0].text().starts_with("You can call these functions:\n{\"name\":\"f\"}\n\nTo call one"));
        assert!(plain[0].text().ends_with("\n\nHi"));
        assert_eq!(
            plain[1],
            Message::assistant("{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n{\"name\": \"f\", \"arguments\": {}}")
        );
        assert_eq!(plain[2..], [Message::user("The function answers: one\nThe function answers: two")]);
        let (plain, field) = in_plain_words(Telling::SystemField, &messages, &tools);
        assert_eq!((plain[0].role, plain.len(), field.as_deref()), (Role::System, 4, Some("[{\"name\":\"f\"}]")));
        let (plain, _) = in_plain_words(Telling::AllButCalls, &messages, &tools);
        assert_eq!((plain.len(), plain[2].role), (4, Role::Tool));
    }
}
