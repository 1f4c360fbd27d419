//! What `run` writes to stdout: plain text, or JSON lines.

use std::io::{IsTerminal, StdoutLock, Write};
use std::sync::Arc;

use metal_attention::tokenizer::Tokenizer;
use metal_attention::{GeneratedToken, Generator, StopReason};
use metal_attention_chat::ToolCallParser;
use serde::Serialize;

use crate::cli_error::CliError;
use crate::commands::chat::session::AnswerOutput;
use crate::metadata_text::safe_lines;
use crate::statistics::{Statistics, TimingsJson};

/// Writes a continuation as it is generated.
pub struct RunOutput {
    stdout: StdoutLock<'static>,
    json: bool,
    /// The continuation so far.
    text: String,
    /// What was written last does not end its line.
    in_line: bool,
    /// Where the text is an answer: what is not shown of it, such as thoughts, is left out.
    answer: Option<Answer>,
}

/// The answer of a model to a message.
struct Answer {
    tokenizer: Arc<Tokenizer>,
    parser: ToolCallParser,
    output: AnswerOutput,
}

/// A line of `--json`.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line<'a> {
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
    /// Takes stdout.
    pub fn new(json: bool) -> Self {
        Self { stdout: std::io::stdout().lock(), json, text: String::new(), in_line: false, answer: None }
    }

    /// What follows is an answer, which `parser` reads. In JSON it is written as the model wrote it.
    pub fn answer(&mut self, tokenizer: Arc<Tokenizer>, parser: ToolCallParser) {
        if !self.json {
            self.answer = Some(Answer { tokenizer, parser, output: AnswerOutput::new(self.stdout.is_terminal()) });
        }
    }

    /// What is continued: `generator` has the prompt's tokens, `prompt` is its text.
    pub fn begin(&mut self, model: &str, generator: &Generator, prompt: &str, echo: bool) -> Result<(), CliError> {
        if self.json {
            let architecture = &generator.model().spec().architecture;
            self.line(&Line::Meta {
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

    /// A generated token.
    pub fn token(&mut self, token: &GeneratedToken) -> Result<(), CliError> {
        self.text += &token.text;
        if let Some(Answer { tokenizer, parser, output }) = &mut self.answer {
            output.write(parser.push_token(tokenizer, token.id, &token.text))
        } else if self.json {
            self.line(&Line::Token { id: token.id, text: &token.text })
        } else {
            self.write(&token.text)
        }
    }

    /// Text that was held back until the generation had ended. In JSON it is part of the last line's text only.
    pub fn rest(&mut self, text: &str) -> Result<(), CliError> {
        self.text += text;
        if let Some(Answer { parser, output, .. }) = &mut self.answer {
            output.write(parser.push(text))?;
            output.write(parser.finish())
        } else if self.json {
            Ok(())
        } else {
            self.write(text)
        }
    }

    /// The end; without a reason it was Ctrl-C.
    pub fn end(mut self, stop_reason: Option<StopReason>, statistics: &Statistics) -> Result<(), CliError> {
        let stop_reason = stop_reason.map_or("interrupted", StopReason::name);
        let text = std::mem::take(&mut self.text);
        if let Some(answer) = self.answer.take() {
            answer.output.end().map(drop)
        } else if self.json {
            self.line(&Line::Done { text: &text, stop_reason, timings: statistics.to_json() })
        } else if self.stdout.is_terminal() {
            self.write("\n")
        } else {
            if self.in_line && is_stderr(&self.stdout) {
                // Where both go to one reader, what follows on stderr has lines of its own. Where stderr is closed
                // nothing follows.
                let _ = writeln!(std::io::stderr());
            }
            Ok(())
        }
    }

    fn line(&mut self, line: &Line) -> Result<(), CliError> {
        let line = serde_json::to_string(line).map_err(|e| CliError::General(format!("cannot write JSON: {e}")))?;
        self.write(&(line + "\n"))
    }

    /// Writes and flushes, for every token to be seen at once. On a terminal control characters are shown escaped.
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
