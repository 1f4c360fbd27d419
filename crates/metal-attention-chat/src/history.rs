//! Variants of a conversation, for chat templates that refuse it as it is.
//!
//! A template may refuse what a client sends: a system message that is not the first one, two messages in a row with
//! the same role, several calls in one message, arguments that are not an object. [`variants`] yields the conversation
//! unchanged, and then variants with the same content in other messages. `template.rs` uses the first one that the
//! template accepts.

use serde_json::{Value, json};

use crate::tool_calls::tool_result_as_text;
use crate::{Message, Role, ToolCall};

/// The length of the call ids that Mistral's templates accept: letters and digits.
const SHORT_ID: usize = 9;

/// The messages with missing references filled in: a tool message without a name gets the name of its call; one
/// without a call id gets that of the next unanswered call.
pub(crate) fn completed(messages: &[Message]) -> Vec<Message> {
    let mut calls: Vec<(&ToolCall, bool)> = Vec::new();
    let mut completed = messages.to_vec();
    for (message, out) in messages.iter().zip(&mut completed) {
        if message.role != Role::Tool {
            calls.extend(message.tool_calls.iter().map(|call| (call, false)));
            continue;
        }
        let found = match &message.tool_call_id {
            Some(id) => calls.iter_mut().rev().find(|(call, _)| call.id == *id),
            None => calls.iter_mut().find(|(call, answered)| {
                !answered && message.name.as_ref().is_none_or(|name| *name == call.function.name)
            }),
        };
        let Some((call, answered)) = found else { continue };
        *answered = true;
        if out.name.is_none() && !call.function.name.is_empty() {
            out.name = Some(call.function.name.clone());
        }
        if out.tool_call_id.is_none() && !call.id.is_empty() {
            out.tool_call_id = Some(call.id.clone());
        }
    }
    completed
}

/// A function that rewrites a conversation.
type HistoryRewrite = fn(&[Message]) -> Vec<Message>;

/// The variants of a conversation, the conversation itself first. They are made on demand.
pub(crate) fn variants(messages: &[Message]) -> impl Iterator<Item = Vec<Message>> {
    let roles: [HistoryRewrite; 7] = [
        <[Message]>::to_vec,
        alternating,
        |messages| closed_calls(alternating(messages)),
        one_system_message,
        |messages| closed_calls(one_system_message(messages)),
        no_system_message,
        |messages| closed_calls(no_system_message(messages)),
    ];
    let calls: [HistoryRewrite; 3] =
        [<[Message]>::to_vec, plain_calls, |messages| single_calls(&plain_calls(messages))];
    roles.into_iter().flat_map(move |roles| {
        let messages = roles(messages);
        calls.into_iter().map(move |calls| calls(&messages))
    })
}

/// Whether a message is an instruction: its role is system or developer.
pub(crate) fn instructs(message: &Message) -> bool {
    matches!(message.role, Role::System | Role::Developer)
}

/// Rewrites calls so that their arguments are objects and their ids are nine letters and digits.
fn plain_calls(messages: &[Message]) -> Vec<Message> {
    let mut messages = messages.to_vec();
    let mut n = 0;
    // The ids of the unanswered calls, old and new.
    let mut renamed: Vec<(String, String)> = Vec::new();
    for message in &mut messages {
        for call in &mut message.tool_calls {
            if !matches!(serde_json::from_str(&call.function.arguments), Ok(Value::Object(_))) {
                let arguments = &call.function.arguments;
                let value: Value = serde_json::from_str(arguments).unwrap_or_else(|_| arguments.as_str().into());
                call.function.arguments = json!({"arguments": value}).to_string();
            }
            n += 1;
            let is_short = call.id.len() == SHORT_ID && call.id.bytes().all(|byte| byte.is_ascii_alphanumeric());
            let id = if is_short { call.id.clone() } else { format!("call{n:05}") };
            renamed.push((std::mem::replace(&mut call.id, id.clone()), id));
        }
        if message.role == Role::Tool {
            let own = message.tool_call_id.as_deref().unwrap_or_default();
            let at = renamed.iter().position(|(old, _)| old == own);
            message.tool_call_id = Some(match at.or(renamed.first().map(|_| 0)) {
                Some(at) => renamed.remove(at).1,
                None => format!("call{n:05}"),
            });
        }
    }
    messages
}

/// Splits messages with several calls into messages with one call, each followed by its result.
fn single_calls(messages: &[Message]) -> Vec<Message> {
    let mut single: Vec<Message> = Vec::new();
    let mut rest = messages.iter().peekable();
    while let Some(message) = rest.next() {
        if message.tool_calls.len() < 2 {
            single.push(message.clone());
            continue;
        }
        let mut answers = Vec::new();
        while let Some(answer) = rest.next_if(|next| next.role == Role::Tool) {
            answers.push(answer.clone());
        }
        for (i, call) in message.tool_calls.iter().enumerate() {
            let first = Message { tool_calls: Vec::new(), ..message.clone() };
            let message = if i == 0 { first } else { Message { content: None, ..Message::assistant("") } };
            single.push(Message { tool_calls: vec![call.clone()], ..message });
            if let Some(at) = answers.iter().position(|answer| answer.tool_call_id.as_deref() == Some(&*call.id)) {
                single.push(answers.remove(at));
            }
        }
        single.extend(answers);
    }
    single
}

/// Merges the leading system messages into one and turns later ones into user messages. Adjacent messages of the same
/// role are joined, and a tool message that answers no call becomes a user message.
fn alternating(messages: &[Message]) -> Vec<Message> {
    let n_leading = messages.iter().take_while(|message| instructs(message)).count();
    let role = |(i, message): (usize, &Message)| match message.role {
        Role::System | Role::Developer if i >= n_leading => Message { role: Role::User, ..message.clone() },
        Role::System | Role::Developer => Message { role: Role::System, ..message.clone() },
        Role::User | Role::Assistant | Role::Tool => message.clone(),
    };
    joined(messages.iter().enumerate().map(role))
}

/// Merges all system messages into one at the beginning; otherwise like [`alternating`].
fn one_system_message(messages: &[Message]) -> Vec<Message> {
    let (system, others): (Vec<_>, Vec<_>) = messages.iter().cloned().partition(instructs);
    let system = system.into_iter().map(|message| Message { role: Role::System, ..message });
    joined(system.chain(others))
}

/// Puts the instructions before the text of the first user message; otherwise like [`alternating`]. The conversation
/// begins with a user message.
fn no_system_message(messages: &[Message]) -> Vec<Message> {
    let users = alternating(messages).into_iter().map(|message| match message.role {
        Role::System => Message { role: Role::User, ..message },
        Role::Developer | Role::User | Role::Assistant | Role::Tool => message,
    });
    let users: Vec<_> = users.collect();
    let begins = users.first().is_some_and(|first| first.role != Role::User).then(|| Message::user(""));
    joined(begins.into_iter().chain(users))
}

/// Inserts a message "OK." of the assistant between a call or its result and the next user message. Mistral's
/// templates require it.
fn closed_calls(messages: Vec<Message>) -> Vec<Message> {
    let mut closed: Vec<Message> = Vec::new();
    for message in messages {
        let open = closed.last().is_some_and(|last| last.role == Role::Tool || !last.tool_calls.is_empty());
        if open && message.role == Role::User {
            closed.push(Message::assistant("OK."));
        }
        closed.push(message);
    }
    closed
}

/// Joins adjacent messages of the same role. Tool messages that answer a call stay separate.
fn joined(messages: impl Iterator<Item = Message>) -> Vec<Message> {
    let mut joined: Vec<Message> = Vec::new();
    for mut message in messages {
        let answers = match joined.last() {
            Some(last) => last.role == Role::Tool || !last.tool_calls.is_empty(),
            None => false,
        };
        if message.role == Role::Tool && !answers {
            message = Message::user(tool_result_as_text(message.text()));
        }
        match joined.last_mut().filter(|last| last.role == message.role && message.role != Role::Tool) {
            Some(last) => join(last, message),
            None => joined.push(message),
        }
    }
    joined
}

fn join(last: &mut Message, next: Message) {
    let text = |one: Option<String>, other: Option<String>| match (one, other) {
        (Some(one), Some(other)) if !one.is_empty() && !other.is_empty() => Some(format!("{one}\n\n{other}")),
        (Some(one), Some(other)) => Some(one + &other),
        (one, other) => one.or(other),
    };
    last.content = text(last.content.take(), next.content);
    last.reasoning_content = text(last.reasoning_content.take(), next.reasoning_content);
    last.tool_calls.extend(next.tool_calls);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(calls: &[(&str, &str)]) -> Message {
        let tool_calls = calls.iter().map(|(id, arguments)| ToolCall::new(*id, format!("f{id}"), *arguments)).collect();
        Message { content: None, tool_calls, ..Message::assistant("") }
    }

    fn answer(id: Option<&str>, text: &str) -> Message {
        Message { tool_call_id: id.map(str::to_owned), ..Message::new(Role::Tool, text) }
    }

    fn brief(messages: &[Message]) -> Vec<String> {
        messages.iter().map(|m| format!("{} {}", m.role.name(), m.text())).collect()
    }

    #[test]
    fn answers_get_the_names_of_their_calls() {
        let messages = [calls(&[("a", "{}"), ("b", "{}")]), answer(Some("b"), "1"), answer(None, "2")];
        let completed = completed(&messages);
        let of = |message: &Message| (message.name.clone().unwrap(), message.tool_call_id.clone().unwrap());
        assert_eq!(of(&completed[1]), ("fb".into(), "b".into()));
        assert_eq!(of(&completed[2]), ("fa".into(), "a".into()));
        let orphan = [answer(Some("x"), "1")];
        assert_eq!(super::completed(&orphan), orphan);
    }

    #[test]
    fn system_messages_are_merged() {
        let messages = [
            Message::system("a"),
            Message::new(Role::Developer, "b"),
            Message::user("c"),
            Message::system("d"),
            Message::assistant("e"),
            Message::assistant("f"),
            Message::system("g"),
        ];
        assert_eq!(brief(&alternating(&messages)), ["system a\n\nb", "user c\n\nd", "assistant e\n\nf", "user g"]);
        assert_eq!(brief(&one_system_message(&messages)), ["system a\n\nb\n\nd\n\ng", "user c", "assistant e\n\nf"]);
        let none = brief(&no_system_message(&messages));
        assert_eq!(none, ["user a\n\nb\n\nc\n\nd", "assistant e\n\nf", "user g"]);
        assert_eq!(brief(&no_system_message(&messages[4..6])), ["user ", "assistant e\n\nf"]);
    }

    #[test]
    fn calls_get_complete_ids_and_plain_arguments() {
        let messages =
            [calls(&[("call_1", "{\"a\":"), ("", "[1]"), ("abcdefgh9", "{}")]), answer(None, "x"), answer(None, "y")];
        let plain = plain_calls(&completed(&messages));
        let expected = [("call00001", r#"{"arguments":"{\"a\":"}"#), ("call00002", r#"{"arguments":[1]}"#)];
        for (call, (id, arguments)) in plain[0].tool_calls.iter().zip(expected) {
            assert_eq!((&*call.id, &*call.function.arguments), (id, arguments));
        }
        assert_eq!(plain[0].tool_calls[2].id, "abcdefgh9");
        assert_eq!(plain[1].tool_call_id.as_deref(), Some("call00001"));
        assert_eq!(plain[2].tool_call_id.as_deref(), Some("call00002"));
        let single = single_calls(&plain);
        let ids = |m: &Message| m.tool_calls.first().map(|c| c.id.clone()).or(m.tool_call_id.clone()).unwrap();
        assert_eq!(
            single.iter().map(ids).collect::<Vec<_>>(),
            ["call00001", "call00001", "call00002", "call00002", "abcdefgh9"]
        );
    }

    #[test]
    fn tool_results_without_a_call_become_user_messages() {
        let messages = [Message::user("a"), answer(None, "b"), Message::assistant("c")];
        assert_eq!(brief(&alternating(&messages)), ["user a\n\nThe function answers: b", "assistant c"]);
    }
}
