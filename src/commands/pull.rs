//! `pull`: downloads models from the Hugging Face hub into its cache.

use std::io::{self, IsTerminal, Write};

use metal_attention_hub::{Environment, Hub, ModelName};

use crate::cli_error::CliError;
use crate::completion;
use crate::download_progress::DownloadProgress;
use crate::metadata_text::{file_name, safe};
use crate::units;

const AFTER_HELP: &str = "\
Well-known names are those of other programs' libraries: each stands for a repository and a file of it. A repository has a model in several types. Without :TYPE the one in Q4_K_M is downloaded, else Q4_0, else the only one; \
if there are several others, all are listed. :FILE names one by its file. All parts of a split model are downloaded.

The repository's mmproj file, with which a model sees pictures, comes with it: of several the one in F16, else BF16, Q8_0, F32, \
else the smallest.

The command asks the hub for the newest version; -m hf:NAME of other commands uses the version in the cache without a \
request, and downloads only missing files. An interrupted download is resumed, checksums are \
verified, and the first file's path is printed.

Environment:
  HF_HOME         folder for the cache and the token [default: ~/.cache/huggingface]
  HF_HUB_CACHE    folder for the cache [default: hub in HF_HOME]
  HF_TOKEN        token for gated and private models [default: the file token in HF_HOME]
  HF_ENDPOINT     the hub [default: https://huggingface.co]
  HF_HUB_OFFLINE  1: no requests, only what is in the cache

Examples:
  metal-attention pull llama3.2 qwen3.5:4b
  metal-attention pull --no-mmproj ggml-org/gemma-3-4b-it-GGUF
  metal-attention pull bartowski/SmolLM2-135M-Instruct-GGUF
  metal-attention pull hf:bartowski/SmolLM2-135M-Instruct-GGUF:Q8_0
  metal-attention pull ggml-org/models:tinyllamas/stories15M-q4_0.gguf
  metal-attention pull https://huggingface.co/OWNER/REPO/blob/main/FILE.gguf";

/// Download models from the Hugging Face hub
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// What to download: a well-known name, OWNER/REPO, OWNER/REPO:TYPE, OWNER/REPO:FILE, or an address on the hub
    #[arg(value_name = "NAME", required = true, add = completion::models::downloadable())]
    names: Vec<String>,

    /// Leave out the mmproj file, which a model needs to see pictures
    #[arg(long)]
    no_mmproj: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let hub = Hub::new(Environment::read()?);
    let hub = if args.no_mmproj { hub.without_mmproj() } else { hub };
    for given in &args.names {
        let name: ModelName = given.parse()?;
        let model =
            hub.pull(&name, &mut DownloadProgress::new()).map_err(|error| CliError::of_model(given, &name, error))?;
        // Errors are ignored, because stderr may be closed.
        let mmproj = model.mmproj.as_ref().map(|mmproj| file_name(&mmproj.file));
        let mmproj = mmproj.map_or(String::new(), |file| format!(" with {file} for pictures"));
        let _ =
            writeln!(io::stderr(), "{}, {}{mmproj}", safe(&model.name.to_string()), units::bytes(model.total_bytes()));
        let (mut out, file) = (io::stdout(), model.files[0].display().to_string());
        // Other programs get the path unescaped.
        let file = if out.is_terminal() { safe(&file) } else { file };
        writeln!(out, "{file}").map_err(CliError::stdout)?;
    }
    Ok(())
}
