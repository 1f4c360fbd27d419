//! The commands of a conversation.

use std::path::PathBuf;

use metal_attention_chat::Thinking;

/// What `/help` says.
pub const HELP: &str = "\
/system [TEXT]     shows the system message, or sets it; /system none removes it
/reset, /clear     forgets all messages but the system message
/undo              takes back the last message and its answer
/regenerate        answers the last message anew
/save FILE         writes the messages as JSON
/load FILE         goes on with the messages in a file
/set [NAME VALUE]  shows the sampling options, or changes one: /set temp 0.7
/set think [HOW]   has the model think: true, false, low, medium or high; /set nothink: not at all
/show              shows the model, its device and its context
/stats             shows speed, memory and how full the context is
/help, /?          shows this
/exit, /bye        leaves, as Ctrl-D does
A message that begins with / is written with //. A line that ends with \\ goes on in the next one;
\"\"\" begins and ends a message of several lines. Ctrl-C stops an answer.";

/// The names, for completion.
pub const NAMES: [&str; 13] = [
    "/bye",
    "/clear",
    "/exit",
    "/help",
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

/// What the user wants.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// An empty line.
    Nothing,
    /// A message for the model.
    Say(String),
    System(Option<String>),
    Reset,
    Undo,
    Regenerate,
    Save(PathBuf),
    Load(PathBuf),
    Set(Option<(String, String)>),
    Think(Thinking),
    Show,
    Stats,
    Help,
    Exit,
}

/// Understands what the user typed, or says what is wrong with it.
pub fn parse(text: &str) -> Result<Command, String> {
    let trimmed = text.trim();
    let Some(command) = trimmed.strip_prefix('/') else {
        return Ok(if trimmed.is_empty() { Command::Nothing } else { Command::Say(text.to_owned()) });
    };
    if command.starts_with('/') {
        return Ok(Command::Say(command.to_owned()));
    }
    let (name, rest) =
        command.split_once(char::is_whitespace).map_or((command, ""), |(name, rest)| (name, rest.trim()));
    let file = || {
        if rest.is_empty() { Err(format!("/{name} needs the name of a file")) } else { Ok(PathBuf::from(rest)) }
    };
    let command = match name {
        "system" => Command::System(Some(rest.to_owned()).filter(|text| !text.is_empty())),
        "save" => Command::Save(file()?),
        "load" => Command::Load(file()?),
        "set" => match rest.split_once(char::is_whitespace) {
            Some(("think", how)) => {
                let how = how.trim();
                Command::Think(how.parse().map_err(|error| format!("/set think {how}: {error}"))?)
            }
            None if rest == "think" => Command::Think(Thinking::On),
            None if rest == "nothink" => Command::Think(Thinking::OFF),
            Some((option, value)) => Command::Set(Some((option.to_owned(), value.trim().to_owned()))),
            None if rest.is_empty() => Command::Set(None),
            None => return Err(format!("/set {rest} needs a value, as in /set temp 0.7")),
        },
        "reset" | "clear" => Command::Reset,
        "undo" => Command::Undo,
        "regenerate" => Command::Regenerate,
        // What ollama lists under it, such as /show info, is shown together.
        "show" => Command::Show,
        "stats" => Command::Stats,
        "help" | "?" => Command::Help,
        "exit" | "quit" | "bye" => Command::Exit,
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
            ("", Command::Nothing),
            ("  \t", Command::Nothing),
            (" Hello /reset ", Command::Say(" Hello /reset ".into())),
            ("//reset is a command", Command::Say("/reset is a command".into())),
            ("/system", Command::System(None)),
            ("/system  Be brief.\nVery. ", Command::System(Some("Be brief.\nVery.".into()))),
            (" /save a b.json", Command::Save("a b.json".into())),
            ("/load x", Command::Load("x".into())),
            ("/set", Command::Set(None)),
            ("/set temp  0.5", Command::Set(Some(("temp".into(), "0.5".into())))),
            ("/set think", Command::Think(Thinking::On)),
            ("/set think  high", Command::Think(Thinking::Effort(ReasoningEffort::High))),
            ("/set nothink", Command::Think(Thinking::OFF)),
            ("/exit", Command::Exit),
            ("/bye", Command::Exit),
            ("/?", Command::Help),
            ("/clear", Command::Reset),
            ("/show info", Command::Show),
        ] {
            assert_eq!(parse(text), Ok(command), "{text:?}");
        }
    }

    #[test]
    fn wrong_commands_are_explained() {
        for (text, message) in [
            ("/rest", "there is no command /rest; /help lists them, and // begins a message with /"),
            ("/save", "/save needs the name of a file"),
            ("/set temp", "/set temp needs a value, as in /set temp 0.7"),
            ("/set think hard", "/set think hard: it is true, false, none, minimal, low, medium, high, xhigh or max"),
        ] {
            assert_eq!(parse(text), Err(message.into()), "{text:?}");
        }
    }

    #[test]
    fn every_name_is_a_command_with_help() {
        for name in NAMES {
            assert!(!parse(&format!("{name} x y")).is_err_and(|e| e.contains("no command")), "{name}");
            assert!(HELP.contains(&format!("{name} ")) || HELP.contains(&format!("{name}, ")), "{name}");
        }
        assert!(NAMES.is_sorted());
    }
}
