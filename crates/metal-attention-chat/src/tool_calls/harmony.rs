//! The messages of gpt-oss: each has a header that says in which channel it is, and to whom it goes.

/// Ends a header.
const MESSAGE: &str = "<|message|>";
const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";

/// Texts that end a message, and those that begin the next one's header.
pub(super) const ENDS: [&str; 3] = ["<|end|>", "<|call|>", "<|return|>"];
pub(super) const BEGINNINGS: [&str; 2] = [START, CHANNEL];

/// What a message is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Channel {
    /// Thoughts.
    Analysis,
    /// Text for the user.
    Final,
    /// The arguments of this function.
    Call(String),
}

/// What a message's header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HeaderMatch {
    /// More has to come.
    Incomplete,
    /// The message, which begins so many bytes later.
    Of(Channel, usize),
    /// This is none.
    None,
}

/// The header that `text` begins with; at most `longest` bytes are one.
pub(super) fn header(text: &str, longest: usize) -> HeaderMatch {
    let begun = text.trim_start();
    let beginnings = [START, CHANNEL, "to="];
    if !beginnings.iter().any(|b| begun.starts_with(b) || b.starts_with(begun)) {
        return HeaderMatch::None;
    }
    match text.find(MESSAGE) {
        Some(at) if at <= longest => HeaderMatch::Of(channel(&text[..at]), at + MESSAGE.len()),
        Some(_) => HeaderMatch::None,
        None if text.len() > longest + MESSAGE.len() => HeaderMatch::None,
        None => HeaderMatch::Incomplete,
    }
}

fn channel(header: &str) -> Channel {
    let recipient = header.split_once("to=").map(|(_, rest)| rest);
    let name = recipient.and_then(|rest| rest.split(|c: char| c.is_whitespace() || c == '<').next());
    match name.map(|name| name.strip_prefix("functions.").unwrap_or(name)) {
        Some(name) if !name.is_empty() && name != "assistant" && name != "user" => Channel::Call(name.to_owned()),
        _ if header.split_once(CHANNEL).is_some_and(|(_, name)| name.trim_start().starts_with("analysis")) => {
            Channel::Analysis
        }
        _ => Channel::Final,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_tell_the_channel() {
        let call = || Channel::Call("add".into());
        for (text, channel) in [
            ("<|channel|>analysis<|message|>", Channel::Analysis),
            ("<|start|>assistant<|channel|>final<|message|>", Channel::Final),
            ("<|channel|>final <|constrain|>json<|message|>", Channel::Final),
            ("<|channel|>commentary<|message|>", Channel::Final),
            ("<|channel|>commentary to=functions.add <|constrain|>json<|message|>", call()),
            ("<|channel|>analysis to=functions.add code<|message|>", call()),
            (" to=functions.add<|channel|>commentary json<|message|>", call()),
            ("<|channel|>commentary to=add<|message|>", call()),
        ] {
            assert_eq!(header(text, 512), HeaderMatch::Of(channel, text.len()), "{text}");
        }
        assert_eq!(header("<|chan", 512), HeaderMatch::Incomplete);
        assert_eq!(header("Hello", 512), HeaderMatch::None);
        assert_eq!(header(&format!("<|channel|>{}", "a".repeat(600)), 512), HeaderMatch::None);
    }
}
