//! Converts Anthropic's messages to the messages of a chat template.

use metal_attention_chat::{Message, TextWithPictures, ToolCall};
use serde::Deserialize;

use super::content::{Block, Content};
use crate::http::ApiError;
use crate::http::limits::MAX_MESSAGES;
use crate::http::notes::Notes;

/// The prefix of a line that Claude Code puts before the system prompt. It differs with every request and would defeat
/// the prefix cache.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// A message of a request.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct InputMessage {
    /// Its author.
    role: Role,
    /// Its content.
    #[serde(default)]
    content: Content,
}

/// The author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Role {
    User,
    Assistant,
    System,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::System => "system",
        }
    }
}

/// Converts `system` and `messages` to a conversation. Notes the types of ignored blocks.
pub fn conversation(system: Content, messages: Vec<InputMessage>, notes: &mut Notes) -> Result<Vec<Message>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::field("messages", "messages is empty: give at least one message"));
    }
    let mut conversation = Vec::new();
    let system = InputMessage { role: Role::System, content: system };
    system.add_to(&mut conversation, "system", notes)?;
    for (i, message) in messages.into_iter().enumerate() {
        message.add_to(&mut conversation, &format!("messages[{i}].content"), notes)?;
        if conversation.len() > MAX_MESSAGES {
            let message =
                format!("messages has more than {MAX_MESSAGES} messages and results, which is the most allowed");
            return Err(ApiError::field("messages", message));
        }
    }
    Ok(conversation)
}

impl InputMessage {
    /// Appends the message to a conversation. Tool results come first, since they must follow the calls directly.
    fn add_to(self, conversation: &mut Vec<Message>, place: &str, notes: &mut Notes) -> Result<(), ApiError> {
        let Self { role, content } = self;
        let (mut text, mut reasoning) = (TextWithPictures::default(), String::new());
        let (mut calls, mut n_results) = (Vec::new(), 0);
        for (i, block) in content.0.into_iter().enumerate() {
            match (role, block) {
                (Role::System, Block::Text(more)) => text.push_str(&without_billing_header(&more)),
                (Role::User | Role::Assistant, Block::Text(more)) => text.push_str(&more),
                (Role::User | Role::Assistant, Block::Image(picture)) => text.push_picture(picture),
                (Role::Assistant, Block::Thinking(more)) => reasoning += &more,
                (Role::Assistant, Block::ToolUse { id, name, input }) => calls.push(ToolCall::new(id, name, input)),
                (Role::User, Block::ToolResult { id, text }) => {
                    n_results += 1;
                    let result = Message::of(metal_attention_chat::Role::Tool, text);
                    conversation.push(Message { tool_call_id: Some(id).filter(|id| !id.is_empty()), ..result });
                }
                (_, Block::PassedOver(kind)) => notes.ignored(kind),
                (
                    role,
                    block @ (Block::Thinking(_) | Block::ToolUse { .. } | Block::ToolResult { .. } | Block::Image(_)),
                ) => {
                    let param = format!("{place}[{i}]");
                    let (kind, role) = (block.kind(), role.name());
                    let message = format!("{param}: a block of type {kind:?} has no place in what the {role} says");
                    return Err(ApiError::field(param, message));
                }
            }
        }
        match role {
            Role::System if text.is_empty() => {}
            Role::System => conversation.push(Message::system(text.text)),
            Role::User if text.is_empty() && n_results > 0 => {}
            Role::User => conversation.push(Message::of(metal_attention_chat::Role::User, text)),
            Role::Assistant => conversation.push(Message {
                content: Some(text.text).filter(|text| !text.is_empty() || calls.is_empty()),
                pictures: text.pictures,
                reasoning_content: Some(reasoning).filter(|reasoning| !reasoning.is_empty()),
                tool_calls: calls,
                ..Message::assistant("")
            }),
        }
        Ok(())
    }
}

/// Returns a system prompt without the lines that start with [`BILLING_HEADER`].
fn without_billing_header(text: &str) -> String {
    text.split_inclusive('\n').filter(|line| !line.starts_with(BILLING_HEADER)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::http::job::chat::PromptEnd;

    fn read(system: Value, messages: Value) -> Result<(Vec<Message>, Notes), String> {
        let mut notes = Notes::default();
        let system = serde_json::from_value(system).map_err(|error| error.to_string())?;
        let messages = serde_json::from_value(messages).map_err(|error| error.to_string())?;
        let conversation = conversation(system, messages, &mut notes).map_err(|error| error.message().to_owned())?;
        Ok((conversation, notes))
    }

    fn messages(messages: Value) -> Vec<Message> {
        read(json!(null), messages).unwrap().0
    }

    fn result(id: Option<&str>, text: &str) -> Message {
        let message = Message::new(metal_attention_chat::Role::Tool, text);
        Message { tool_call_id: id.map(str::to_owned), ..message }
    }

    #[test]
    fn the_billing_line_is_removed() {
        let header = |n: u32| format!("x-anthropic-billing-header: cc_version=2.1.{n}; cc_entrypoint=cli; cch={n};");
        let hello = json!([{"role": "user", "content": "Hello"}]);
        let system = |system: Value| read(system, hello.clone()).unwrap().0.remove(0);
        let be_kind = Message::system("Be kind.\nAlways.");
        for n in [1, 2] {
            let blocks = json!([{"type": "text", "text": header(n)}, {"type": "text", "text": "Be kind.\n"},
                {"type": "text", "text": "Always.", "cache_control": {"type": "ephemeral"}}]);
            assert_eq!(system(blocks), be_kind);
            assert_eq!(system(json!(format!("{}\nBe kind.\nAlways.", header(n)))), be_kind);
        }
        // Only lines that start with the prefix are removed.
        let quoted = "Leave out x-anthropic-billing-header: a.";
        assert_eq!(system(json!(quoted)), Message::system(quoted));
        assert_eq!(system(json!(header(1))), Message::user("Hello"));
        assert_eq!(system(json!("")), Message::user("Hello"));
    }

    #[test]
    fn tool_results_come_before_the_text_of_the_user() {
        let sent = json!([
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "b"}, {"type": "tool_use", "id": "x", "name": "f", "input": {"k": 1}},
                {"type": "tool_use", "id": "y", "name": "g", "input": {}}]},
            {"role": "user", "content": [{"type": "text", "text": "and now"},
                {"type": "tool_result", "tool_use_id": "x", "content": "1"},
                {"type": "tool_result", "tool_use_id": "y"}]},
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        ]);
        let calls = Message {
            reasoning_content: Some("Hm.".into()),
            tool_calls: vec![ToolCall::new("x", "f", r#"{"k":1}"#), ToolCall::new("y", "g", "{}")],
            ..Message::assistant("b")
        };
        let expected = [
            Message::user("a"),
            calls,
            result(Some("x"), "1"),
            result(Some("y"), ""),
            Message::user("and now"),
            Message::system("Be brief."),
        ];
        assert_eq!(messages(sent), expected);
    }

    #[test]
    fn empty_messages_stay_messages() {
        let sent = json!([{"role": "user", "content": []}, {"role": "assistant", "content": ""},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "f", "input": null}]},
            {"role": "user", "content": [{"type": "tool_result", "content": []}]}, {"role": "user"}]);
        let call = Message { content: None, tool_calls: vec![ToolCall::new("", "f", "{}")], ..Message::assistant("") };
        let expected = [Message::user(""), Message::assistant(""), call, result(None, ""), Message::user("")];
        assert_eq!(messages(sent), expected);
    }

    #[test]
    fn blocks_of_servers_are_noted() {
        let sent = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}, {"type": "text", "text": "b"}]}]);
        let (conversation, notes) = read(json!(null), sent).unwrap();
        assert_eq!(conversation, [Message::user("a"), Message::assistant("b")]);
        let mut expected = Notes::default();
        expected.ignored("server_tool_use");
        expected.ignored("web_search_tool_result");
        assert_eq!(notes, expected);
        assert_eq!(PromptEnd::after(&conversation), PromptEnd::WithinMessage);
        assert_eq!(PromptEnd::after(&conversation[..1]), PromptEnd::Answer);
    }

    #[test]
    fn blocks_are_refused_in_messages_of_other_roles() {
        let refused = |messages: Value| read(json!(null), messages).unwrap_err();
        let one = |role: &str, block: Value| json!([{"role": role, "content": [block]}]);
        let call = json!({"type": "tool_use", "id": "x", "name": "f", "input": {}});
        let message = "messages[0].content[0]: a block of type \"tool_use\" has no place in what the user says";
        assert_eq!(refused(one("user", call.clone())), message);
        let result = json!({"type": "tool_result", "tool_use_id": "x"});
        let message = "messages[0].content[0]: a block of type \"tool_result\" has no place in what the assistant says";
        assert_eq!(refused(one("assistant", result)), message);
        let message = "system[0]: a block of type \"tool_use\" has no place in what the system says";
        assert_eq!(read(json!([call]), one("user", json!("a"))).unwrap_err(), message);
        assert_eq!(refused(json!([])), "messages is empty: give at least one message");
        assert!(refused(one("tool", json!("a"))).contains("unknown variant `tool`"));
        let many = json!([{"role": "user", "content": vec![json!({"type": "tool_result"}); MAX_MESSAGES + 1]}]);
        assert!(refused(many).starts_with("messages has more than 4096 messages"));
    }
}
