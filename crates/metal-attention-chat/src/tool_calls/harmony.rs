//! The message format of gpt-oss (harmony). An answer consists of messages; each has a header that names its channel
//! and its recipient.

/// The mark that ends a header.
const MESSAGE: &str = "<|message|>";
const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";

/// Marks that end a message.
pub(super) const ENDS: [&str; 3] = ["<|end|>", "<|call|>", "<|return|>"];
/// Marks that begin the header of the next message.
pub(super) const BEGINNINGS: [&str; 2] = [START, CHANNEL];

/// The kind of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Channel {
    /// Reasoning.
    Analysis,
    /// Text for the user.
    Final,
    /// The arguments of a call of this function.
    Call(String),
}

/// The result of reading a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HeaderMatch {
    /// More text is needed.
    Incomplete,
    /// The kind of the message, and the length of the header in bytes.
    Of(Channel, usize),
    /// The text is not a header.
    None,
}

/// Reads the header at the start of `text`. A header has at most `longest` bytes.
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

/// The kind of the message with this header.
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
    fn headers_name_the_channel() {
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
