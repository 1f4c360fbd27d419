//! The output of `run` on stdout: plain text, or JSON lines (`--json`).

use std::io::{IsTerminal, StdoutLock, Write};
use std::sync::Arc;

use metal_attention::tokenizer::Tokenizer;
use metal_attention::{GeneratedToken, Generator, StopReason};
use metal_attention_chat::ToolCallParser;
use serde::Serialize;

use crate::cli_error::CliError;
use crate::commands::chat::session::AnswerOutput;
use crate::metadata_text::safe_lines;
use crate::statistics::{RunStatistics, TimingsJson};

/// Writes the prompt's echo, the generated text and the end. One value is for one text.
pub struct RunOutput {
    /// Stdout, locked as long as the value lives.
    stdout: StdoutLock<'static>,
    /// Whether JSON lines are written.
    json: bool,
    /// The generated text so far.
    text: String,
    /// Whether the last character written was no line break.
    in_line: bool,
    /// The reader of an answer, if the text is one and is not written as JSON. Thoughts are not written then.
    answer: Option<PrintedAnswer>,
}

/// Reads an answer of the model and writes its visible part.
struct PrintedAnswer {
    /// The model's tokenizer.
    tokenizer: Arc<Tokenizer>,
    /// Splits the answer.
    parser: ToolCallParser,
    /// Prints its visible part.
    output: AnswerOutput,
}

/// One line of `--json`.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum JsonLine<'a> {
    Meta {
        version: &'static str,
        model: &'a str,
        architecture: &'a str,
        n_ctx: usize,
        seed: u64,
        prompt: &'a str,
        prompt_ids: &'a [u32],
    },
    Token {
        id: u32,
        text: &'a str,
    },
    Done {
        text: &'a str,
        stop_reason: &'static str,
        timings: TimingsJson,
    },
}

impl RunOutput {
    /// Locks stdout.
    pub fn new(json: bool) -> Self {
        Self { stdout: std::io::stdout().lock(), json, text: String::new(), in_line: false, answer: None }
    }

    /// Declares the text that follows to be an answer, which `parser` splits into reasoning, text and tool calls. JSON lines have
    /// the answer as the model generated it.
    pub fn answer(&mut self, tokenizer: Arc<Tokenizer>, parser: ToolCallParser) {
        if !self.json {
            self.answer =
                Some(PrintedAnswer { tokenizer, parser, output: AnswerOutput::new(self.stdout.is_terminal()) });
        }
    }

    /// Writes what comes before the generated text: the line of type meta, or the prompt if `echo` is set. `generator` holds the
    /// prompt's tokens, `prompt` is its text.
    pub fn begin(&mut self, model: &str, generator: &Generator, prompt: &str, echo: bool) -> Result<(), CliError> {
        if self.json {
            let architecture = &generator.model().spec().architecture;
            self.line(&JsonLine::Meta {
                version: env!("CARGO_PKG_VERSION"),
                model,
                architecture,
                n_ctx: generator.forward_pass().n_ctx(),
                seed: generator.sampler().seed(),
                prompt,
                prompt_ids: generator.ids(),
            })
        } else if echo {
            self.write(prompt)
        } else {
            Ok(())
        }
    }

    /// Writes a generated token.
    pub fn token(&mut self, token: &GeneratedToken) -> Result<(), CliError> {
        self.text += &token.text;
        if let Some(PrintedAnswer { tokenizer, parser, output }) = &mut self.answer {
            output.write(parser.push_token(tokenizer, token.id, &token.text))
        } else if self.json {
            self.line(&JsonLine::Token { id: token.id, text: &token.text })
        } else {
            self.write(&token.text)
        }
    }

    /// Writes the text that was held back, because it might have become a stop string, until the generation ended. JSON lines have
    /// it in the last line only.
    pub fn rest(&mut self, text: &str) -> Result<(), CliError> {
        self.text += text;
        if let Some(PrintedAnswer { parser, output, .. }) = &mut self.answer {
            output.write(parser.push(text))?;
            output.write(parser.finish())
        } else if self.json {
            Ok(())
        } else {
            self.write(text)
        }
    }

    /// Writes the end of the output. Without a `stop_reason`, Ctrl-C ended the text.
    pub fn end(mut self, stop_reason: Option<StopReason>, statistics: &RunStatistics) -> Result<(), CliError> {
        let stop_reason = stop_reason.map_or("interrupted", StopReason::name);
        let text = std::mem::take(&mut self.text);
        if let Some(answer) = self.answer.take() {
            answer.output.end().map(drop)
        } else if self.json {
            self.line(&JsonLine::Done { text: &text, stop_reason, timings: statistics.to_json() })
        } else if self.stdout.is_terminal() {
            self.write("\n")
        } else {
            if self.in_line && is_stderr(&self.stdout) {
                // If both streams go to one reader, the output on stderr begins on a new line. The error is ignored, because stderr may
                // be closed.
                let _ = writeln!(std::io::stderr());
            }
            Ok(())
        }
    }

    /// Writes a line of JSON.
    fn line(&mut self, line: &JsonLine) -> Result<(), CliError> {
        let line = serde_json::to_string(line).map_err(|e| CliError::General(format!("cannot write JSON: {e}")))?;
        self.write(&(line + "\n"))
    }

    /// Writes and flushes, so that each token is seen at once. On a terminal control characters are escaped.
    fn write(&mut self, text: &str) -> Result<(), CliError> {
        let escaped = (!self.json && self.stdout.is_terminal()).then(|| safe_lines(text));
        let text = escaped.as_deref().unwrap_or(text);
        self.in_line = text.bytes().last().map_or(self.in_line, |byte| byte != b'\n');
        self.stdout.write_all(text.as_bytes()).and_then(|()| self.stdout.flush()).map_err(CliError::stdout)
    }
}

/// Whether stdout and stderr are one file or pipe, as after `2>&1`.
#[cfg(unix)]
fn is_stderr(stdout: &StdoutLock) -> bool {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    let file = |fd: std::os::fd::BorrowedFd| {
        let metadata = File::from(fd.try_clone_to_owned()?).metadata()?;
        Ok::<_, std::io::Error>((metadata.dev(), metadata.ino()))
    };
    matches!((file(stdout.as_fd()), file(std::io::stderr().as_fd())), (Ok(out), Ok(err)) if out == err)
}

/// Whether stdout and stderr may be one file or pipe, as after `2>&1`.
#[cfg(not(unix))]
fn is_stderr(_: &StdoutLock) -> bool {
    !std::io::stderr().is_terminal()
}
