//! Converts items to the messages of a conversation. The interface has one item for reasoning, text or call; a message
//! of the assistant has all of them.

use metal_attention_chat::{Message, Role, TextWithPictures, ToolCall};
use serde_json::json;

use super::items::Item;
use super::tools::offered_name;

/// Builds messages from items. Successive items of reasoning, text and calls become one message of the assistant.
#[derive(Default)]
pub struct MessageBuilder {
    /// The finished messages.
    messages: Vec<Message>,
    /// The assistant's message to which further items may belong.
    open: Option<Message>,
}

impl MessageBuilder {
    /// A conversation that starts with `instructions` as its system message.
    pub fn new(instructions: Option<&str>) -> Self {
        let instructions = instructions.filter(|text| !text.is_empty());
        Self { messages: instructions.map(Message::system).into_iter().collect(), open: None }
    }

    /// Adds an item. References must be resolved before: they are ignored here.
    pub fn add(&mut self, item: &Item) {
        match item {
            Item::Message { role: Role::Assistant, text } => {
                if self.open.as_ref().is_some_and(|open| open.content.is_some() || !open.tool_calls.is_empty()) {
                    self.close();
                }
                if !text.is_empty() {
                    let TextWithPictures { text, pictures } = text.clone();
                    let open = self.open();
                    (open.content, open.pictures) = (Some(text), pictures);
                }
            }
            Item::Message { role, text } => self.push(Message::of(*role, text.clone())),
            Item::Reasoning(None) | Item::Reference(_) | Item::PassedOver(_) => {}
            Item::Reasoning(Some(text)) => {
                if self.open.as_ref().is_some_and(has_contents) {
                    self.close();
                }
                *self.open().reasoning_content.get_or_insert_default() += text;
            }
            Item::Call { id, namespace, name, arguments } => {
                let name = offered_name(namespace.as_deref(), name);
                self.open().tool_calls.push(ToolCall::new(id, name, arguments));
            }
            Item::CustomCall { id, namespace, name, input } => {
                let name = offered_name(namespace.as_deref(), name);
                self.open().tool_calls.push(ToolCall::new(id, name, json!({"input": input}).to_string()));
            }
            Item::Output { call_id, text } => {
                let call = Some(call_id.clone()).filter(|id| !id.is_empty());
                self.push(Message { tool_call_id: call, ..Message::of(Role::Tool, text.clone()) });
            }
        }
    }

    /// Returns the messages.
    pub fn finish(mut self) -> Vec<Message> {
        self.close();
        self.messages
    }

    /// The assistant's open message; starts one if need be.
    fn open(&mut self) -> &mut Message {
        self.open.get_or_insert_with(|| Message { content: None, ..Message::assistant("") })
    }

    /// Finishes the assistant's open message. Reasoning without a text or a call is dropped.
    fn close(&mut self) {
        self.messages.extend(self.open.take().filter(has_contents));
    }

    fn push(&mut self, message: Message) {
        self.close();
        self.messages.push(message);
    }
}

fn has_contents(message: &Message) -> bool {
    message.content.is_some() || !message.tool_calls.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(role: Role, text: &str) -> Item {
        Item::Message { role, text: text.into() }
    }

    fn reasoning(text: &str) -> Item {
        Item::Reasoning(Some(text.into()))
    }

    fn call(id: &str) -> Item {
        Item::Call { id: id.into(), namespace: None, name: "f".into(), arguments: "{}".into() }
    }

    fn output(id: &str) -> Item {
        Item::Output { call_id: id.into(), text: id.to_uppercase().as_str().into() }
    }

    /// The messages, one on each line: role, reasoning, text, calls.
    fn lines(items: &[Item]) -> Vec<String> {
        let mut conversation = MessageBuilder::new(Some("i"));
        for item in items {
            conversation.add(item);
        }
        let line = |message: &Message| {
            let calls: String = message.tool_calls.iter().flat_map(|call| [" ", &call.id]).collect();
            let reasoning = message.reasoning_content.as_ref().map_or(String::new(), |text| format!("({text})"));
            format!("{} {reasoning}{}{calls}", message.role.name(), message.text())
        };
        let messages = conversation.finish();
        assert_eq!(messages[0], Message::system("i"));
        messages[1..].iter().map(line).collect()
    }

    #[test]
    fn successive_items_are_one_message() {
        let assistant = |text: &str| says(Role::Assistant, text);
        let user = || says(Role::User, "u");
        assert_eq!(
            lines(&[user(), reasoning("t"), assistant("a"), call("c"), call("d"), output("c"), output("d"), user()]),
            ["user u", "assistant (t)a c d", "tool C", "tool D", "user u"]
        );
        assert_eq!(
            lines(&[call("c"), output("c"), call("d"), output("d")]),
            ["assistant  c", "tool C", "assistant  d", "tool D"]
        );
        assert_eq!(lines(&[assistant("a"), assistant("b")]), ["assistant a", "assistant b"]);
        assert_eq!(lines(&[call("c"), reasoning("t"), assistant("b")]), ["assistant  c", "assistant (t)b"]);
        assert_eq!(lines(&[reasoning("s"), reasoning("t"), assistant("b")]), ["assistant (st)b"]);
        assert_eq!(lines(&[reasoning("t"), user(), assistant(""), user()]), ["user u", "user u"]);
        assert_eq!(lines(&[output("c"), call("d"), user()]), ["tool C", "assistant  d", "user u"]);
        assert_eq!(lines(&[Item::Reasoning(None), Item::PassedOver("x".into())]), [""; 0]);
    }

    #[test]
    fn custom_calls_have_one_argument() {
        let mut conversation = MessageBuilder::new(None);
        let (id, name, input) = ("c".into(), "patch".into(), "a \"b\"".into());
        conversation.add(&Item::CustomCall { id, namespace: Some("mcp__x__".into()), name, input });
        let messages = conversation.finish();
        let called = ToolCall::new("c", "mcp__x__patch", "{\"input\":\"a \\\"b\\\"\"}");
        assert_eq!(messages, [Message { content: None, tool_calls: vec![called], ..Message::assistant("") }]);
    }
}
