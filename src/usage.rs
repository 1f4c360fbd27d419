//! The command line, and what helps where it is wrong: those who come from other programs know other flags.

use std::ffi::OsString;

use clap::Parser;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::Cli;

/// Flags of other programs, and what does the same here.
const FLAGS_ELSEWHERE: [(&[&str], &str); 8] = [
    (
        &["-ngl", "--n-gpu-layers", "--gpu-layers"],
        "a model runs on a GPU as a whole or not at all: --gpu, or --device with a name from `metal-attention devices`",
    ),
    (&["-cnv", "--conversation", "-i", "--interactive"], "`metal-attention chat` talks with a model"),
    (&["--hf-repo", "--hf-file"], "-m hf:OWNER/REPO, or -m hf:OWNER/REPO:FILE, downloads a model"),
    (&["-b", "--batch-size"], "--ubatch-size says how many tokens of a prompt go through the layers at once"),
    (&["--flash-attn"], "attention never makes the whole matrix: leave the flag out"),
    (&["-ctk", "--cache-type-k", "-ctv", "--cache-type-v"], "--cache-type is for keys and values"),
    (&["-r", "--reverse-prompt"], "--stop ends the text before a string"),
    (&["--format"], "--json, where a command has it"),
];

/// Reads the command line; where it is wrong, tells why and ends the process.
pub fn parse() -> Cli {
    let args: Vec<OsString> = std::env::args_os().collect();
    Cli::try_parse_from(&args).unwrap_or_else(|error| advised(error, &args).exit())
}

/// `error`, with a tip where there is one for `args`.
fn advised(mut error: clap::Error, args: &[OsString]) -> clap::Error {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    let named = text(ContextKind::InvalidArg);
    // What is no flag and was not expected: a text or a model, most likely.
    let stray = match error.kind() {
        ErrorKind::UnknownArgument if !named.starts_with('-') => named,
        ErrorKind::InvalidValue if named == "[-]" => text(ContextKind::InvalidValue),
        ErrorKind::InvalidSubcommand => text(ContextKind::InvalidSubcommand),
        ErrorKind::UnknownArgument | ErrorKind::InvalidValue | ErrorKind::ValueValidation => "",
        _ => return error,
    };
    let command = args.iter().skip(1).filter_map(|arg| arg.to_str()).find(|arg| !arg.starts_with('-')).unwrap_or("");
    let tip = if stray.is_empty() {
        flag_elsewhere(args).map(str::to_owned)
    } else if is_model(stray) {
        let command = if stray == command { "run" } else { command };
        Some(format!("a model is named with -m: metal-attention {command} -m {stray}"))
    } else if let Some(model) = model_without_flag(args) {
        let text =
            if command == "chat" { String::new() } else { format!(", a text is given with -p: ... -p {stray:?}") };
        Some(format!("a model is named with -m: metal-attention {command} -m {model}{text}"))
    } else if command == "chat" {
        Some("chat reads messages from the terminal or from stdin".to_owned())
    } else if matches!(command, "run" | "tokenize" | "logits" | "perplexity" | "compare") {
        Some(format!("a text is given with -p: metal-attention {command} -p {stray:?}"))
    } else {
        None
    };
    let Some(tip) = tip else { return error };
    if error.kind() == ErrorKind::InvalidValue && !stray.is_empty() {
        // The place for the name of stdin is no help to those who did not mean it.
        let mut other =
            clap::Error::new(ErrorKind::UnknownArgument).with_cmd(&<Cli as clap::CommandFactory>::command());
        other.insert(ContextKind::InvalidArg, ContextValue::String(stray.to_owned()));
        if let Some(usage) = error.get(ContextKind::Usage) {
            other.insert(ContextKind::Usage, usage.clone());
        }
        error = other;
    }
    error.remove(ContextKind::SuggestedArg);
    error.remove(ContextKind::SuggestedSubcommand);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
    error
}

/// Whether this names a model rather than anything else.
fn is_model(text: &str) -> bool {
    text.starts_with("hf:") || text.to_ascii_lowercase().ends_with(".gguf")
}

/// The first model that is named without a flag before it.
fn model_without_flag(args: &[OsString]) -> Option<&str> {
    let texts: Vec<&str> = args.iter().map(|arg| arg.to_str().unwrap_or_default()).collect();
    texts.windows(2).find(|pair| is_model(pair[1]) && !pair[0].starts_with('-')).map(|pair| pair[1])
}

/// What to say of the first flag that only other programs have.
fn flag_elsewhere(args: &[OsString]) -> Option<&'static str> {
    let known = |arg: &OsString| {
        let flag = arg.to_str()?.split('=').next()?;
        FLAGS_ELSEWHERE.iter().find(|(flags, _)| flags.contains(&flag)).map(|(_, tip)| *tip)
    };
    args.iter().find_map(known)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use clap::{Command, CommandFactory};

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// `command` and all below it, by name.
    fn all(command: &Command, name: &str, found: &mut BTreeMap<String, Command>) {
        for sub in command.get_subcommands() {
            all(sub, format!("{name} {}", sub.get_name()).trim(), found);
        }
        found.insert(name.to_owned(), command.clone());
    }

    #[test]
    fn help_is_wrapped_once() {
        let mut commands = BTreeMap::new();
        let mut cli = Cli::command();
        cli.build();
        all(&cli, "", &mut commands);
        assert!(commands.len() > 18, "{:?}", commands.keys());
        for (name, command) in commands {
            // Unwrapped, neighbouring lines of a paragraph would be wraps of our own.
            let whole = command.clone().max_term_width(0).term_width(0).render_long_help().to_string();
            let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let lines: Vec<_> = after.lines().collect();
            for pair in lines.windows(2) {
                let prose = pair.iter().all(|line| !line.is_empty() && !line.starts_with(' '));
                assert!(!prose, "{name}: wrapped by hand: {pair:?}");
            }
            assert!(whole.contains(after.trim_end()), "{name}");
            for width in [60, 80, 100, 120, 200] {
                let text = command.clone().term_width(width.min(120)).render_long_help().to_string();
                // Usage is never wrapped.
                for line in text.lines().filter(|line| !line.starts_with("Usage:")) {
                    let long_word = line.split_whitespace().any(|word| word.len() > width - 12);
                    assert!(line.chars().count() <= width.min(120) || long_word, "{name} at {width}: {line}");
                }
            }
        }
    }
}
