//! The source of messages and commands: a terminal with editing, history and completion, or lines of stdin.

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

/// The source of the user's lines.
pub enum UserInput {
    /// A person at a terminal.
    Terminal {
        /// The line editor.
        editor: Box<Editor<EditorHelper, DefaultHistory>>,
        /// The file that keeps the lines of all conversations. `None`: they are not kept.
        history: Option<PathBuf>,
    },
    /// Lines of stdin, one message or command each.
    Lines(std::io::Lines<std::io::StdinLock<'static>>),
}

impl UserInput {
    /// The terminal if `interactive`, else stdin.
    pub fn new(interactive: bool) -> Result<Self, CliError> {
        if !interactive {
            return Ok(Self::Lines(std::io::stdin().lines()));
        }
        let config = Config::builder().completion_type(CompletionType::List).history_ignore_space(true).build();
        let mut editor = Editor::with_config(config)
            .map_err(|e| CliError::General(format!("cannot read from the terminal: {e}")))?;
        editor.set_helper(Some(EditorHelper { keys: None }));
        let history = history_file(|name| std::env::var_os(name).filter(|value| !value.is_empty()));
        if let Some(path) = &history {
            // An error is ignored: without the history the conversation is the same.
            let _ = editor.load_history(path);
        }
        Ok(Self::Terminal { editor: Box::new(editor), history })
    }

    /// Sends a message to `keys` for every key that is typed from now on. Returns false if there is no terminal.
    pub fn report_keys(&mut self, keys: &Sender<()>) -> bool {
        let Self::Terminal { editor, .. } = self else { return false };
        editor.set_helper(Some(EditorHelper { keys: Some(keys.clone()) }));
        true
    }

    /// Reads the next message or command. `None`: the end of the input.
    pub fn read(&mut self) -> Result<Option<String>, CliError> {
        match self {
            Self::Lines(lines) => {
                let line = lines.next().transpose();
                line.map_err(|e| CliError::General(format!("cannot read from stdin: {e}")))
            }
            Self::Terminal { editor, history } => loop {
                match read_line(editor, "> ")? {
                    TypedLine::Text(text) => {
                        if editor.add_history_entry(text.as_str()).unwrap_or(false)
                            && let Some(path) = history
                        {
                            let _ = path.parent().map(std::fs::create_dir_all);
                            let _ = editor.append_history(path);
                        }
                        return Ok(Some(assembled(&text)));
                    }
                    TypedLine::Cleared => {}
                    TypedLine::End => return Ok(None),
                }
            },
        }
    }

    /// Whether the input is a terminal.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal { .. })
    }

    /// Asks a question at the terminal. `None`: there is no terminal, or the user pressed Ctrl-C or Ctrl-D.
    pub fn ask(&mut self, question: &str) -> Result<Option<String>, CliError> {
        let Self::Terminal { editor, .. } = self else { return Ok(None) };
        Ok(match read_line(editor, question)? {
            TypedLine::Text(text) => Some(text),
            TypedLine::Cleared | TypedLine::End => None,
        })
    }
}

/// The file that keeps typed lines: `METAL_ATTENTION_HISTORY`, unless that is `off`, else a file in the user's state folder
/// (XDG Base Directory Specification; on Windows that of local application data). `None`: off, or there is no such folder.
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

/// The result of reading a line at the terminal.
enum TypedLine {
    /// The line.
    Text(String),
    /// Ctrl-C: the line is discarded.
    Cleared,
    /// Ctrl-D: the input ends.
    End,
}

/// Reads a line, or several if the message is unfinished.
fn read_line(editor: &mut Editor<EditorHelper, DefaultHistory>, prompt: &str) -> Result<TypedLine, CliError> {
    match editor.readline(prompt) {
        Ok(text) => Ok(TypedLine::Text(text)),
        Err(ReadlineError::Interrupted) => Ok(TypedLine::Cleared),
        Err(ReadlineError::Eof) => Ok(TypedLine::End),
        Err(error) => Err(CliError::General(format!("cannot read from the terminal: {error}"))),
    }
}

/// The mark at both ends of a message of several lines.
const QUOTES: &str = "\"\"\"";

/// Whether the message continues in the next line.
fn is_open(text: &str) -> bool {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(rest) => !rest.trim_end().ends_with(QUOTES),
        None => text.ends_with('\\'),
    }
}

/// The message of the lines in `text`: without quotes around it and without the backslashes at the ends of lines.
fn assembled(text: &str) -> String {
    match text.trim().strip_prefix(QUOTES).and_then(|rest| rest.strip_suffix(QUOTES)) {
        Some(message) => message.strip_prefix('\n').unwrap_or(message).trim_end_matches('\n').to_owned(),
        None => text.replace("\\\n", "\n"),
    }
}

/// The editor's helper: completes commands, detects unfinished messages, and reports keys.
pub struct EditorHelper {
    /// Receives a message for every key. `None`: keys are not reported.
    keys: Option<Sender<()>>,
}

impl Completer for EditorHelper {
    type Candidate = String;

    fn complete(&self, line: &str, pos: usize, _ctx: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        Ok(completions(&line[..pos]))
    }
}

/// The index in `line` at which its last word begins, and the completions of that word.
fn completions(line: &str) -> (usize, Vec<String>) {
    let (start, candidates) = match line.strip_prefix("/set ") {
        Some(option) if !option.contains(' ') => ("/set ".len(), &sampling_options::NAMES[..]),
        _ if line.starts_with('/') => (0, &NAMES[..]),
        _ => return (line.len(), Vec::new()),
    };
    let fitting = candidates.iter().filter(|name| name.starts_with(&line[start..]));
    (start, fitting.map(|&name| name.to_owned() + " ").collect())
}

impl Validator for EditorHelper {
    fn validate(&self, ctx: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(if is_open(ctx.input()) { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Hinter for EditorHelper {
    type Hint = String;

    /// Returns no hint; rustyline calls this at every key, which is reported here. An empty line, as at the prompt's start or
    /// after a deletion, is not reported.
    fn hint(&self, line: &str, _pos: usize, _ctx: &Context<'_>) -> Option<String> {
        if let Some(keys) = self.keys.as_ref().filter(|_| !line.is_empty()) {
            // The receiver may be gone already.
            let _ = keys.send(());
        }
        None
    }
}

impl Highlighter for EditorHelper {}

impl Helper for EditorHelper {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_reported_unless_the_line_is_empty() {
        let (keys, reported) = std::sync::mpsc::channel();
        let (helper, history) = (EditorHelper { keys: Some(keys) }, DefaultHistory::new());
        let context = Context::new(&history);
        for line in ["", "H", "Hi", ""] {
            assert_eq!(helper.hint(line, line.len(), &context), None);
        }
        assert_eq!(reported.try_iter().count(), 2);
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
