//! Tools for models whose chat template knows none: told in plain words.

use crate::{Message, Role, Tool};

/// Whether a chat template tells the model of tools.
pub(crate) fn describes_tools(source: &str) -> bool {
    source.contains("tools")
}

/// The conversation without tools: the first message describes them, calls are text, and what they gave comes from the
/// user.
pub(crate) fn in_plain_words(messages: &[Message], tools: &[Tool]) -> Vec<Message> {
    let mut plain: Vec<Message> = Vec::new();
    for message in messages {
        let mut message = message.clone();
        for call in std::mem::take(&mut message.tool_calls) {
            let name = serde_json::Value::from(call.function.name);
            let call = format!("{{\"name\": {name}, \"arguments\": {}}}", call.function.arguments);
            let text = message.content.get_or_insert_default();
            *text = if text.is_empty() { call } else { format!("{text}\n{call}") };
        }
        if message.role == Role::Tool {
            message = Message::user(format!("The function answers: {}", message.text()));
            // Two answers in a row are one message: roles have to alternate.
            if let Some(last) = plain.last_mut().filter(|last| last.role == Role::User) {
                last.content = Some(format!("{}\n{}", last.text(), message.text()));
                continue;
            }
        }
        plain.push(message);
    }
    if let (Some(first), false) = (plain.first_mut(), tools.is_empty()) {
        first.content = Some(format!("{}\n\n{}", instructions(tools), first.text()));
    }
    plain
}

fn instructions(tools: &[Tool]) -> String {
    let tools: Vec<_> = tools.iter().map(|tool| tool.as_value()["function"].to_string()).collect();
    format!(
        "You can call these functions:\n{}\n\nTo call one, answer with a JSON object and nothing else: \
         {{\"name\": the function's name, \"arguments\": an object with its arguments}}",
        tools.join("\n")
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
        let plain = in_plain_words(&messages, &[Tool::try_from(tool).unwrap()]);
        assert!(plain[0].text().starts_with("You can call these functions:\n{\"name\":\"f\"}\n\nTo call one"));
        assert!(plain[0].text().ends_with("\n\nHi"));
        assert_eq!(
            plain[1],
            Message::assistant("{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n{\"name\": \"f\", \"arguments\": {}}")
        );
        assert_eq!(plain[2..], [Message::user("The function answers: one\nThe function answers: two")]);
    }
}
