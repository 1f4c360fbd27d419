//! What was said.

use metal_attention_chat::{Message, Role};

/// A system message and the messages after it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    /// Instructions for the whole conversation.
    pub system: Option<String>,
    /// What was said, the first message first.
    pub messages: Vec<Message>,
}

impl Conversation {
    /// The conversation of a list of messages, the system message first where there is one.
    pub fn from_messages(mut messages: Vec<Message>) -> Self {
        let has_system = messages.first().is_some_and(|m| matches!(m.role, Role::System | Role::Developer));
        let system = has_system.then(|| messages.remove(0).text().to_owned());
        Self { system, messages }
    }

    /// All messages, the system message first.
    pub fn with_system(&self) -> Vec<Message> {
        self.system.iter().map(Message::system).chain(self.messages.iter().cloned()).collect()
    }

    /// Takes back the last message of the user with what followed. Returns its text; `None` where there is none.
    pub fn undo(&mut self) -> Option<String> {
        let at = self.last_of_user()?;
        let text = self.messages[at].text().to_owned();
        self.messages.truncate(at);
        Some(text)
    }

    /// Takes away what followed the last message of the user. `None` where there is no such message.
    pub fn take_answer(&mut self) -> Option<Vec<Message>> {
        let at = self.last_of_user()?;
        Some(self.messages.split_off(at + 1))
    }

    fn last_of_user(&self) -> Option<usize> {
        self.messages.iter().rposition(|m| m.role == Role::User)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three_turns() -> Conversation {
        let messages = ["a", "b", "c"].into_iter().flat_map(|text| [Message::user(text), Message::assistant(text)]);
        Conversation { system: Some("s".into()), messages: messages.collect() }
    }

    fn texts(conversation: &Conversation) -> String {
        conversation.messages.iter().map(Message::text).collect()
    }

    #[test]
    fn turns_are_taken_back() {
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
    fn messages_make_the_conversation_again() {
        let conversation = three_turns();
        assert_eq!(Conversation::from_messages(conversation.with_system()), conversation);
        let without = Conversation { system: None, ..conversation };
        assert_eq!(Conversation::from_messages(without.with_system()), without);
    }
}
