//! `export-tokenizer`: writes a model's tokenizer in the files of Hugging Face's transformers.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use metal_attention::Error;
use metal_attention::tokenizer::Tokenizer;

use crate::cli_error::CliError;
use crate::model_args::ModelArgs;
use crate::output_file::OutputFile;

const AFTER_HELP: &str = "\
The folder gets tokenizer.json, tokenizer_config.json, config.json, generation_config.json and, if the model has a \
chat template, chat_template.jinja: the files that `AutoTokenizer.from_pretrained(DIR)` of transformers and the model cards of \
servers read. Everything comes from the file's metadata; a file with a vocabulary and no weights is enough. Files of \
these names are replaced.

Examples:
  metal-attention export-tokenizer -m model.gguf model-tokenizer
  python -c \"from transformers import AutoTokenizer; print(AutoTokenizer.from_pretrained('model-tokenizer')('Hello'))\"";

/// Write a model's tokenizer in the files of transformers
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// The folder to write to; created if it does not exist
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let file = args.model.open_gguf()?;
    let in_file = |e| args.model.in_file(Error::from(e));
    let tokenizer = Tokenizer::from_metadata(file.metadata(), &args.model.tokenizer_options()).map_err(in_file)?;
    let exported = tokenizer.export(file.metadata()).map_err(in_file)?;
    let not_made = |source| CliError::Write { to: args.folder.display().to_string(), source };
    fs::create_dir_all(&args.folder).map_err(not_made)?;
    for file in exported {
        let path = args.folder.join(file.name);
        let mut out = OutputFile::create(&path)?;
        let not_written = |source| CliError::Write { to: path.display().to_string(), source };
        out.write_all(file.text.as_bytes()).map_err(not_written)?;
        out.commit()?;
    }
    Ok(())
}
