//! `tokenize`: turns text into token ids.

use std::io::Write;

use metal_attention::tokenizer::Tokenizer;

use crate::cli_error::CliError;
use crate::model_args::ModelArgs;
use crate::text_input::{EncodingArgs, TextArgs};

const AFTER_HELP: &str = "\
The text is used as it is; without -p and -f it is read from stdin. A file with a vocabulary \
and no weights is enough as a model.

Examples:
  metal-attention tokenize -p \"Hello world\"
  metal-attention tokenize -m model.gguf -f chapter.txt --json
  echo -n \"<|im_start|>user\" | metal-attention tokenize -m model.gguf --parse-special";

/// Turn text into token ids
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    text: TextArgs,

    #[command(flatten)]
    encoding: EncodingArgs,

    /// Print a JSON list of ids
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let tokenizer = args.model.open_tokenizer()?;
    let text = args.text.read_or_stdin()?;
    let ids = tokenizer.encode(&text, args.encoding.options());
    let output = if args.json {
        format!("{ids:?}\n")
    } else {
        ids.into_iter().map(|id| format!("{id:>6}  {}\n", quoted(&tokenizer, id))).collect::<Vec<_>>().concat()
    };
    std::io::stdout().write_all(output.as_bytes()).map_err(CliError::stdout)
}

/// The bytes of a token, quoted. A token without bytes shows its name in the vocabulary.
fn quoted(tokenizer: &Tokenizer, id: u32) -> String {
    match (tokenizer.token_bytes(id), tokenizer.token_text(id)) {
        ([], Some(spelling)) => spelling.to_owned(),
        (bytes, _) => match std::str::from_utf8(bytes) {
            Ok(text) => format!("{text:?}"),
            Err(_) => format!("b\"{}\"", bytes.escape_ascii()),
        },
    }
}
