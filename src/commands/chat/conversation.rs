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

    /// How many messages the user has sent.
    pub fn n_turns(&self) -> usize {
        self.messages.iter().filter(|m| m.role == Role::User).count()
    }

    /// Drops the first message of the user with what followed, up to the second one.
    pub fn drop_oldest_turn(&mut self) {
        let of_user = |m: &Message| m.role == Role::User;
        let end = self.messages.iter().skip(1).position(of_user).map_or(self.messages.len(), |at| at + 1);
        self.messages.drain(..end);
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
    fn turns_are_taken_back_and_dropped() {
        let mut conversation = three_turns();
        assert_eq!(conversation.undo(), Some("c".into()));
        assert_eq!((texts(&conversation), conversation.n_turns()), ("aabb".into(), 2));
        conversation.drop_oldest_turn();
        assert_eq!(texts(&conversation), "bb");
        assert_eq!(conversation.take_answer(), Some(vec![Message::assistant("b")]));
        assert_eq!(texts(&conversation), "b");
        assert_eq!(
            (conversation.undo(), conversation.undo(), conversation.take_answer()),
            (Some("b".into()), None, None)
        );
        conversation.drop_oldest_turn();
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
