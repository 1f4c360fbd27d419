//! Where messages and commands come from: a terminal, with editing, history and completion, or lines of stdin.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::mpsc::Sender;

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{CompletionType, Config, Context, Editor, Helper};

use super::commands::NAMES;
use crate::cli_error::CliError;
use crate::sampling_options;

/// The user's side of the conversation.
pub enum Input {
    /// A person at a terminal.
    Terminal {
        editor: Box<Editor<Assistance, DefaultHistory>>,
        /// The file that keeps what was typed.
        history: Option<PathBuf>,
    },
    /// Lines, a message each.
    Lines(std::io::Lines<std::io::StdinLock<'static>>),
}

impl Input {
    /// From the terminal where `interactive`, else from stdin.
    pub fn new(interactive: bool) -> Result<Self, CliError> {
        if !interactive {
            return Ok(Self::Lines(std::io::stdin().lines()));
        }
        let config = Config::builder().completion_type(CompletionType::List).history_ignore_space(true).build();
        let mut editor = Editor::with_config(config)
            .map_err(|e| CliError::General(format!("cannot read from the terminal: {e}")))?;
        editor.set_helper(Some(Assistance { keys: None }));
        let history = history_file(|name| std::env::var_os(name).filter(|value| !value.is_empty()));
        if let Some(path) = &history {
            // The history is a convenience: without it the conversation is the same.
            let _ = editor.load_history(path);
        }
        Ok(Self::Terminal { editor: Box::new(editor), history })
    }

    /// Has `keys` hear of every key that is typed. False where there is no terminal.
    pub fn tell_keys(&mut self, keys: &Sender<()>) -> bool {
        let Self::Terminal { editor, .. } = self else { return false };
        editor.set_helper(Some(Assistance { keys: Some(keys.clone()) }));
        true
    }

    /// The next message or command; `None` where there are no more.
    pub fn read(&mut self) -> Result<Option<String>, CliError> {
        match self {
            Self::Lines(lines) => {
                let line = lines.next().transpose();
                line.map_err(|e| CliError::General(format!("cannot read from stdin: {e}")))
            }
            Self::Terminal { editor, history } => loop {
                match read_line(editor, "> ")? {
                    Line::Text(text) => {
                        if editor.add_history_entry(text.as_str()).unwrap_or(false)
                            && let Some(path) = history
                        {
                            let _ = path.parent().map(std::fs::create_dir_all);
                            let _ = editor.append_history(path);
                        }
                        return Ok(Some(assembled(&text)));
                    }
                    Line::Cleared => {}
                    Line::End => return Ok(None),
                }
            },
        }
    }

    /// Whether a person is at a terminal.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal { .. })
    }

    /// Asks a question of the person at the terminal; `None`: there is no answer.
    pub fn ask(&mut self, question: &str) -> Result<Option<String>, CliError> {
        let Self::Terminal { editor, .. } = self else { return Ok(None) };
        Ok(match read_line(editor, question)? {
            Line::Text(text) => Some(text),
            Line::Cleared | Line::End => None,
        })
    }
}

/// The file that keeps what was typed: `METAL_ATTENTION_HISTORY`, unless that is `off`, else a file in the user's folder for
/// state (XDG Base Directory Specification; on Windows the one for local application data). None where there is no such folder.
fn history_file(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(path) = variable("METAL_ATTENTION_HISTORY") {
        return (path != "off").then(|| path.into());
    }
    let folder = variable("XDG_STATE_HOME")
        .or_else(|| variable("LOCALAPPDATA"))
        .map(PathBuf::from)
        .or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".local/state")))?;
    Some(folder.join("metal-attention/history"))
}

/// What was typed at a prompt.
enum Line {
    Text(String),
    /// Ctrl-C.
    Cleared,
    /// Ctrl-D.
    End,
}

fn read_line(editor: &mut Editor<Assistance, DefaultHistory>, prompt: &str) -> Result<Line, CliError> {
    match editor.readline(prompt) {
        Ok(text) => Ok(Line::Text(text)),
        Err(ReadlineError::Interrupted) => Ok(Line::Cleared),
        Err(ReadlineError::Eof) => Ok(Line::End),
        Err(error) => Err(CliError::General(format!("cannot read from the terminal: {error}"))),
    }
}

/// What begins and ends a message of several lines.
const QUOTES: &str = "\"\"\"";

/// Whether more lines follow.
fn is_open(text: &str) -> bool {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(rest) => !rest.trim_end().ends_with(QUOTES),
        None => text.ends_with('\\'),
    }
}

/// The message that was typed: without the quotes around it, and without the backslashes at the ends of lines.
fn assembled(text: &str) -> String {
    match text.trim().strip_prefix(QUOTES).and_then(|rest| rest.strip_suffix(QUOTES)) {
        Some(message) => message.strip_prefix('\n').unwrap_or(message).trim_end_matches('\n').to_owned(),
        None => text.replace("\\\n", "\n"),
    }
}

/// Completes commands, knows when a message goes on in the next line, and tells of keys.
pub struct Assistance {
    keys: Option<Sender<()>>,
}

impl Completer for Assistance {
    type Candidate = String;

    fn complete(&self, line: &str, pos: usize, _ctx: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        Ok(completions(&line[..pos]))
    }
}

/// Where the word at the end of `line` begins, and what it may become.
fn completions(line: &str) -> (usize, Vec<String>) {
    let (start, candidates) = match line.strip_prefix("/set ") {
        Some(option) if !option.contains(' ') => ("/set ".len(), &sampling_options::NAMES[..]),
        _ if line.starts_with('/') => (0, &NAMES[..]),
        _ => return (line.len(), Vec::new()),
    };
    let fitting = candidates.iter().filter(|name| name.starts_with(&line[start..]));
    (start, fitting.map(|&name| name.to_owned() + " ").collect())
}

impl Validator for Assistance {
    fn validate(&self, ctx: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(if is_open(ctx.input()) { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Hinter for Assistance {
    type Hint = String;

    /// There are no hints; but this is called with every key.
    fn hint(&self, line: &str, _pos: usize, _ctx: &Context<'_>) -> Option<String> {
        if let Some(keys) = self.keys.as_ref().filter(|_| !line.is_empty()) {
            // Nobody may be listening any more.
            let _ = keys.send(());
        }
        None
    }
}

impl Highlighter for Assistance {}

impl Helper for Assistance {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_told_where_they_are_the_beginning_of_something() {
        let (keys, told) = std::sync::mpsc::channel();
        let (assistance, history) = (Assistance { keys: Some(keys) }, DefaultHistory::new());
        let context = Context::new(&history);
        for line in ["", "H", "Hi", ""] {
            assert_eq!(assistance.hint(line, line.len(), &context), None);
        }
        assert_eq!(told.try_iter().count(), 2);
    }

    #[test]
    fn the_history_is_in_the_folder_for_state() {
        let file = |variables: &[(&str, &str)]| {
            history_file(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into()))
        };
        assert_eq!(file(&[("METAL_ATTENTION_HISTORY", "off"), ("HOME", "/h")]), None);
        assert_eq!(file(&[("METAL_ATTENTION_HISTORY", "/a/b"), ("HOME", "/h")]), Some("/a/b".into()));
        assert_eq!(file(&[("XDG_STATE_HOME", "/s"), ("HOME", "/h")]), Some("/s/metal-attention/history".into()));
        assert_eq!(file(&[("HOME", "/h")]), Some("/h/.local/state/metal-attention/history".into()));
        assert_eq!(file(&[]), None);
    }

    #[test]
    fn messages_may_have_several_lines() {
        for (text, open, message) in [
            ("one", false, "one"),
            ("one\\", true, "one\\"),
            ("one\\\ntwo", false, "one\ntwo"),
            ("\"\"\"one", true, "\"\"\"one"),
            ("\"\"\"", true, "\"\"\""),
            ("\"\"\"\none\n\ntwo\n\"\"\"", false, "one\n\ntwo"),
            ("\"\"\"one\"\"\"", false, "one"),
        ] {
            assert_eq!((is_open(text), assembled(text).as_str()), (open, message), "{text:?}");
        }
    }

    #[test]
    fn commands_and_options_are_completed() {
        assert_eq!(completions("/re"), (0, vec!["/regenerate ".into(), "/reset ".into()]));
        assert_eq!(completions("/set top_"), (5, vec!["top_k ".into(), "top_p ".into(), "top_n_sigma ".into()]));
        assert_eq!(completions("re"), (2, vec![]));
        assert_eq!(completions("/save x"), (0, vec![]));
    }
}
