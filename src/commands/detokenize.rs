//! `detokenize`: turns token ids into text.

use std::io::{IsTerminal, Write};

use crate::cli_error::CliError;
use crate::metadata_text::safe_lines;
use crate::model_args::ModelArgs;
use crate::text_input::read_stdin;
use crate::token_ids;

const AFTER_HELP: &str = "\
Ids are separated by commas or blanks, or are a JSON list; without any they are read from stdin. \
Bytes that are not UTF-8 become U+FFFD. On a terminal control characters are shown escaped and a line break follows.

Examples:
  metal-attention detokenize 403 407 261 378
  metal-attention tokenize -m model.gguf -f chapter.txt --json | metal-attention detokenize -m model.gguf";

/// Turn token ids into text
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// Show special tokens such as BOS, too
    #[arg(long)]
    special: bool,

    /// Token ids
    #[arg(value_name = "ID")]
    ids: Vec<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let tokenizer = args.model.open_tokenizer()?;
    let ids = token_ids::parse(&if args.ids.is_empty() { read_stdin()? } else { args.ids.join(" ") })?;
    token_ids::check(&ids, tokenizer.n_vocab())?;
    let mut text = tokenizer.decode(&ids, args.special);
    let mut stdout = std::io::stdout().lock();
    if stdout.is_terminal() {
        text = safe_lines(&text) + "\n";
    }
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(CliError::stdout)
}
