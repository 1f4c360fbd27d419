//! The messages of a conversation.

use metal_attention_chat::{Message, Role};

/// The messages of a conversation, with the system message apart.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChatHistory {
    /// The system message.
    pub system: Option<String>,
    /// The messages in order: of the user, the assistant, and tools.
    pub messages: Vec<Message>,
}

impl ChatHistory {
    /// The history of a list of messages, of which the first one may be the system message.
    pub fn from_messages(mut messages: Vec<Message>) -> Self {
        let has_system = messages.first().is_some_and(|m| matches!(m.role, Role::System | Role::Developer));
        let system = has_system.then(|| messages.remove(0).text().to_owned());
        Self { system, messages }
    }

    /// All messages, the system message first.
    pub fn with_system(&self) -> Vec<Message> {
        self.system.iter().map(Message::system).chain(self.messages.iter().cloned()).collect()
    }

    /// Removes the last message of the user and all that follow it. Returns its text; `None` if there is none.
    pub fn undo(&mut self) -> Option<String> {
        let at = self.last_of_user()?;
        let text = self.messages[at].text().to_owned();
        self.messages.truncate(at);
        Some(text)
    }

    /// Removes the messages after the last one of the user and returns them. `None` if the user has sent none.
    pub fn take_answer(&mut self) -> Option<Vec<Message>> {
        let at = self.last_of_user()?;
        Some(self.messages.split_off(at + 1))
    }

    /// The index of the last message of the user.
    fn last_of_user(&self) -> Option<usize> {
        self.messages.iter().rposition(|m| m.role == Role::User)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three_turns() -> ChatHistory {
        let messages = ["a", "b", "c"].into_iter().flat_map(|text| [Message::user(text), Message::assistant(text)]);
        ChatHistory { system: Some("s".into()), messages: messages.collect() }
    }

    fn texts(conversation: &ChatHistory) -> String {
        conversation.messages.iter().map(Message::text).collect()
    }

    #[test]
    fn turns_are_removed() {
        let mut conversation = three_turns();
        assert_eq!(conversation.undo(), Some("c".into()));
        assert_eq!(texts(&conversation), "aabb");
        assert_eq!(conversation.take_answer(), Some(vec![Message::assistant("b")]));
        assert_eq!(texts(&conversation), "aab");
        assert_eq!(
            (conversation.undo(), conversation.undo(), conversation.undo()),
            (Some("b".into()), Some("a".into()), None)
        );
        assert_eq!(conversation.take_answer(), None);
        assert_eq!(conversation.with_system(), [Message::system("s")]);
    }

    #[test]
    fn a_history_survives_the_conversion_to_messages() {
        let conversation = three_turns();
        assert_eq!(ChatHistory::from_messages(conversation.with_system()), conversation);
        let without = ChatHistory { system: None, ..conversation };
        assert_eq!(ChatHistory::from_messages(without.with_system()), without);
    }
}
