//! The flags for a text: `-p`, `-f` and `-`, or words without a flag.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use metal_attention::tokenizer::EncodeOptions;

use crate::cli_error::CliError;
use crate::completion;
use crate::find_model::not_found;
use crate::metadata_text::safe;
use crate::model_args::ModelArgs;

/// A text given on the command line, in a file, or on stdin. It is used as it is, to the last byte.
#[derive(clap::Args)]
pub struct TextArgs {
    /// The text itself
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with_all = ["file", "stdin"])]
    prompt: Option<String>,

    /// Read the text from a file; -: from stdin
    #[arg(short, long, value_name = "FILE", conflicts_with = "stdin")]
    file: Option<PathBuf>,

    /// Read the text from stdin
    #[arg(value_name = "-", value_parser = ["-"], hide_possible_values = true)]
    stdin: Option<String>,
}

impl TextArgs {
    /// The text. `None`: no flag gives one.
    pub fn read(&self) -> Result<Option<String>, CliError> {
        if let Some(text) = &self.prompt {
            return Ok(Some(text.clone()));
        }
        match &self.file {
            Some(path) if path != Path::new("-") => read_file(path).map(Some),
            None if self.stdin.is_none() => Ok(None),
            _ => read_stdin().map(Some),
        }
    }

    /// The source of the text for messages: the file's name, "command line" or "stdin".
    pub fn name(&self) -> String {
        match &self.file {
            Some(path) if path != Path::new("-") => path.display().to_string(),
            _ if self.prompt.is_some() => "command line".into(),
            _ => "stdin".into(),
        }
    }

    /// The text; that of stdin if no flag gives one.
    pub fn read_or_stdin(&self) -> Result<String, CliError> {
        self.read()?.map_or_else(read_stdin, Ok)
    }
}

/// A model and a text as words without flags.
#[derive(clap::Args)]
pub struct WordsArgs {
    /// The model, in the form of -m; with -m, the text begins here
    #[arg(value_name = "MODEL", add = completion::models::usable())]
    first: Option<String>,

    /// The text
    #[arg(value_name = "TEXT")]
    rest: Vec<String>,
}

impl WordsArgs {
    /// Splits the words into the model and the text, joined by spaces (`None`: no words are left). The first word is the model if
    /// `-m` names none and the word names one. Without `-m` and without a model in the environment it must name one; at a terminal
    /// the user chooses one for a text, if `may_choose`.
    pub fn model_and_text(&self, model: &ModelArgs, may_choose: bool) -> Result<(ModelArgs, Option<String>), CliError> {
        let words: Vec<String> = self.first.iter().chain(&self.rest).cloned().collect();
        let (mut model, rest) = model.with_words(&words);
        if may_choose && rest.first().is_some_and(|word| word.contains(char::is_whitespace)) {
            model = model.or_chosen()?;
        }
        match rest {
            [word, ..] if !model.is_named() && word != "-" => Err(no_such_model(word)),
            [] => Ok((model, None)),
            rest => Ok((model, Some(rest.join(" ")))),
        }
    }
}

/// The error for a first word that names no model where one is needed.
fn no_such_model(word: &str) -> CliError {
    if word.contains(char::is_whitespace) {
        let text = safe(word);
        return CliError::Usage(format!(
            "there is no model for the text {text:?}: a model comes first, as in metal-attention run llama3.2 {text:?}; -p {text:?} \
             has the built-in model continue it"
        ));
    }
    match not_found(Path::new(word)) {
        CliError::NoModel(what) => CliError::NoModel(format!(
            "{what}\nA text comes after the model, as in metal-attention run MODEL TEXT, or after -p"
        )),
        error => error,
    }
}

/// The flags for tokenizing a text.
#[derive(clap::Args)]
pub struct EncodingArgs {
    /// Turn the text of special tokens into these tokens
    #[arg(long)]
    parse_special: bool,

    /// Do not add the tokens that the model expects around a text (BOS, EOS)
    #[arg(long)]
    no_bos: bool,
}

impl EncodingArgs {
    /// The tokenizer's options.
    pub fn options(&self) -> EncodeOptions {
        EncodeOptions { add_special: !self.no_bos, parse_special: self.parse_special }
    }
}

/// Reads a file as UTF-8. An error of encoding has exit code 2.
pub fn read_file(path: &Path) -> Result<String, CliError> {
    read_text(&path.display().to_string(), File::open(path))
}

/// Reads stdin to its end as UTF-8.
pub fn read_stdin() -> Result<String, CliError> {
    read_text("stdin", Ok(std::io::stdin().lock()))
}

/// Reads all of `source`, which errors call `name`.
fn read_text(name: &str, source: std::io::Result<impl Read>) -> Result<String, CliError> {
    let mut bytes = Vec::new();
    source
        .and_then(|mut source| source.read_to_end(&mut bytes))
        .map_err(|e| CliError::General(format!("cannot read the text from {name}: {e}")))?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        let byte = e.as_bytes()[at];
        CliError::Usage(format!("the text from {name} is not UTF-8: unexpected byte 0x{byte:02x} at offset {at}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_kept_to_the_last_byte() {
        let text = "\u{feff} a\r\n\0é\n\n";
        assert_eq!(read_text("x", Ok(text.as_bytes())).unwrap(), text);
    }

    #[test]
    fn the_error_names_invalid_bytes_and_their_offset() {
        let error = read_text("x.txt", Ok(&b"ab\xffc"[..])).unwrap_err();
        assert_eq!(error.to_string(), "the text from x.txt is not UTF-8: unexpected byte 0xff at offset 2");
        assert_eq!(error.exit_code(), 2);
    }
}
