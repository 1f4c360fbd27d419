//! The commands of a conversation: lines that begin with `/`.

use std::path::PathBuf;

use metal_attention_chat::ReasoningSetting;

/// The text of `/help`.
pub const HELP: &str = "\
/system [TEXT]     shows the system message, or sets it; /system none removes it
/image FILE [TEXT] adds a picture to the next message, or to TEXT
/reset, /clear     forgets all messages but the system message
/undo              takes back the last message and its answer
/regenerate        answers the last message anew
/save FILE         writes the messages as JSON
/load FILE         replaces the messages by those in a file
/set [NAME VALUE]  shows the sampling options, or changes one: /set temp 0.7
/set think [HOW]   makes the model think: true, false, low, medium or high; /set nothink: not at all
/show              shows the model, its device and its context
/stats             shows speed, memory and how full the context is
/help, /?          shows this
/exit, /bye        leaves, as Ctrl-D does
A message that begins with / is written with //. A line that ends with \\ continues in the next one;
\"\"\" begins and ends a message of several lines. Ctrl-C stops an answer.";

/// The names, sorted, for completion.
pub const NAMES: [&str; 14] = [
    "/bye",
    "/clear",
    "/exit",
    "/help",
    "/image",
    "/load",
    "/regenerate",
    "/reset",
    "/save",
    "/set",
    "/show",
    "/stats",
    "/system",
    "/undo",
];

/// One line of the user: a command or a message.
#[derive(Debug, Clone, PartialEq)]
pub enum ChatCommand {
    /// An empty line.
    Nothing,
    /// A message for the model.
    Say(String),
    /// `/system`: show the system message (`None`) or set it.
    System(Option<String>),
    /// `/image`: add the picture in a file to the next message; with a text that is the message.
    Image(PathBuf, Option<String>),
    /// `/reset`: forget all messages but the system message.
    Reset,
    /// `/undo`: remove the last message and its answer.
    Undo,
    /// `/regenerate`: answer the last message again.
    Regenerate,
    /// `/save`: write the messages to a file.
    Save(PathBuf),
    /// `/load`: read the messages from a file.
    Load(PathBuf),
    /// `/set`: show all sampling options (`None`) or set one to a value.
    Set(Option<(String, String)>),
    /// `/set think`: choose whether the model thinks.
    Think(ReasoningSetting),
    /// `/show`: show the model and its settings.
    Show,
    /// `/stats`: show speed and memory.
    Stats,
    /// `/help`: list the commands.
    Help,
    /// `/exit`: leave.
    Exit,
}

/// Parses a line of the user. The error is a message for the user.
pub fn parse(text: &str) -> Result<ChatCommand, String> {
    let trimmed = text.trim();
    let Some(command) = trimmed.strip_prefix('/') else {
        return Ok(if trimmed.is_empty() { ChatCommand::Nothing } else { ChatCommand::Say(text.to_owned()) });
    };
    if command.starts_with('/') {
        return Ok(ChatCommand::Say(command.to_owned()));
    }
    let (name, rest) =
        command.split_once(char::is_whitespace).map_or((command, ""), |(name, rest)| (name, rest.trim()));
    let file = || {
        if rest.is_empty() { Err(format!("/{name} needs the name of a file")) } else { Ok(PathBuf::from(rest)) }
    };
    let command = match name {
        "system" => ChatCommand::System(Some(rest.to_owned()).filter(|text| !text.is_empty())),
        "image" => {
            // Quotes hold a name with spaces together, as files that are dragged into a terminal have them.
            let path = file()?.to_string_lossy().into_owned();
            let quoted = ['\'', '"'].iter().find_map(|&quote| path.strip_prefix(quote)?.split_once(quote));
            let (name, text) = quoted.or_else(|| path.split_once(char::is_whitespace)).unwrap_or((&path, ""));
            ChatCommand::Image(name.into(), Some(text.trim().to_owned()).filter(|text| !text.is_empty()))
        }
        "save" => ChatCommand::Save(file()?),
        "load" => ChatCommand::Load(file()?),
        "set" => match rest.split_once(char::is_whitespace) {
            Some(("think", how)) => {
                let how = how.trim();
                ChatCommand::Think(how.parse().map_err(|error| format!("/set think {how}: {error}"))?)
            }
            None if rest == "think" => ChatCommand::Think(ReasoningSetting::On),
            None if rest == "nothink" => ChatCommand::Think(ReasoningSetting::OFF),
            Some((option, value)) => ChatCommand::Set(Some((option.to_owned(), value.trim().to_owned()))),
            None if rest.is_empty() => ChatCommand::Set(None),
            None => return Err(format!("/set {rest} needs a value, as in /set temp 0.7")),
        },
        "reset" | "clear" => ChatCommand::Reset,
        "undo" => ChatCommand::Undo,
        "regenerate" => ChatCommand::Regenerate,
        // Ollama's `/show info` and the like all show the same here.
        "show" => ChatCommand::Show,
        "stats" => ChatCommand::Stats,
        "help" | "?" => ChatCommand::Help,
        "exit" | "quit" | "bye" => ChatCommand::Exit,
        _ => return Err(format!("there is no command /{name}; /help lists them, and // begins a message with /")),
    };
    Ok(command)
}

#[cfg(test)]
mod tests {
    use metal_attention_chat::ReasoningEffort;

    use super::*;

    #[test]
    fn lines_are_messages_or_commands() {
        for (text, command) in [
            ("", ChatCommand::Nothing),
            ("  \t", ChatCommand::Nothing),
            (" Hello /reset ", ChatCommand::Say(" Hello /reset ".into())),
            ("//reset is a command", ChatCommand::Say("/reset is a command".into())),
            ("/system", ChatCommand::System(None)),
            ("/system  Be brief.\nVery. ", ChatCommand::System(Some("Be brief.\nVery.".into()))),
            (" /save a b.json", ChatCommand::Save("a b.json".into())),
            ("/load x", ChatCommand::Load("x".into())),
            ("/image a.png", ChatCommand::Image("a.png".into(), None)),
            ("/image a.png  What is this?", ChatCommand::Image("a.png".into(), Some("What is this?".into()))),
            ("/image 'my cat.png' Who?", ChatCommand::Image("my cat.png".into(), Some("Who?".into()))),
            ("/set", ChatCommand::Set(None)),
            ("/set temp  0.5", ChatCommand::Set(Some(("temp".into(), "0.5".into())))),
            ("/set think", ChatCommand::Think(ReasoningSetting::On)),
            ("/set think  high", ChatCommand::Think(ReasoningSetting::Effort(ReasoningEffort::High))),
            ("/set nothink", ChatCommand::Think(ReasoningSetting::OFF)),
            ("/exit", ChatCommand::Exit),
            ("/bye", ChatCommand::Exit),
            ("/?", ChatCommand::Help),
            ("/clear", ChatCommand::Reset),
            ("/show info", ChatCommand::Show),
        ] {
            assert_eq!(parse(text), Ok(command), "{text:?}");
        }
    }

    #[test]
    fn wrong_commands_are_explained() {
        for (text, message) in [
            ("/rest", "there is no command /rest; /help lists them, and // begins a message with /"),
            ("/save", "/save needs the name of a file"),
            ("/image", "/image needs the name of a file"),
            ("/set temp", "/set temp needs a value, as in /set temp 0.7"),
            ("/set think hard", "/set think hard: it is true, false, none, minimal, low, medium, high, xhigh or max"),
        ] {
            assert_eq!(parse(text), Err(message.into()), "{text:?}");
        }
    }

    #[test]
    fn every_command_name_has_help() {
        for name in NAMES {
            assert!(!parse(&format!("{name} x y")).is_err_and(|e| e.contains("no command")), "{name}");
            assert!(HELP.contains(&format!("{name} ")) || HELP.contains(&format!("{name}, ")), "{name}");
        }
        assert!(NAMES.is_sorted());
    }
}
