//! `rm`: removes models from the cache of the Hugging Face hub.

use std::io::{self, Write};

use metal_attention_hub::{Environment, Hub, ModelName};

use crate::cli_error::CliError;
use crate::completion;
use crate::metadata_text::{file_name, safe};
use crate::units;

const AFTER_HELP: &str = "\
OWNER/REPO removes all models of a repository, :TYPE or :FILE only these; older versions are removed, too. Files that \
other programs downloaded from the same repository stay, except GGUF files. The mmproj file, with which models see pictures, goes \
with the last model of its repository.

Examples:
  metal-attention rm bartowski/SmolLM2-135M-Instruct-GGUF:Q8_0
  metal-attention rm --yes bartowski/SmolLM2-135M-Instruct-GGUF";

/// Remove models that came from the Hugging Face hub
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// Models to remove: a well-known name, OWNER/REPO, OWNER/REPO:TYPE or OWNER/REPO:FILE, as `list` prints them
    #[arg(value_name = "NAME", required = true, add = completion::models::removable())]
    names: Vec<ModelName>,

    /// Do not ask
    #[arg(long, short)]
    yes: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let hub = Hub::new(Environment::read()?);
    for name in &args.names {
        let models = hub.removable(name)?;
        let mut out = io::stderr().lock();
        for model in &models {
            // Errors are ignored, because stderr may be closed.
            let (name, file) = (safe(&model.name.to_string()), safe(&model.files[0].display().to_string()));
            let _ = writeln!(out, "{name}, {}: {file}", units::bytes(model.bytes));
        }
        for mmproj in hub.mmproj_removed_with(name, &models)? {
            let (name, file) = (file_name(&mmproj.file), safe(&mmproj.file.display().to_string()));
            let _ = writeln!(out, "{name}, {}: {file}", units::bytes(mmproj.bytes));
        }
        if models.is_empty() {
            let name = safe(&name.to_string());
            let _ = writeln!(out, "{name}: a download that has not come to its end");
        }
        if !args.yes && !confirmed(&mut out)? {
            return Err(CliError::General("nothing was removed".into()));
        }
        hub.remove(name, &models)?;
        let _ = writeln!(out, "removed");
    }
    Ok(())
}

/// Asks on stderr and reads the answer from stdin. An error if stdin is at its end.
fn confirmed(out: &mut impl Write) -> Result<bool, CliError> {
    let _ = write!(out, "remove from the cache? [y/N] ").and_then(|()| out.flush());
    let mut answer = String::new();
    let n =
        io::stdin().read_line(&mut answer).map_err(|e| CliError::General(format!("cannot read the answer: {e}")))?;
    if n == 0 {
        let _ = writeln!(out);
        return Err(CliError::Usage("stdin ended before an answer: --yes removes without asking".into()));
    }
    Ok(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}
