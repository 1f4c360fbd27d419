//! `completions`: prints completion scripts for shells.

use std::io::Write;

use clap_complete::Shell;

use crate::cli_error::CliError;
use crate::completion;

const AFTER_HELP: &str = "\
The folders must exist: mkdir -p makes them. The script calls metal-attention, which must be in PATH, at each press of Tab: so it \
completes the names of models, too: well-known ones, those in the cache of the hub, and files.

Examples:
  metal-attention completions bash > ~/.local/share/bash-completion/completions/metal-attention
  metal-attention completions zsh > ~/.zfunc/_metal-attention
  metal-attention completions fish > ~/.config/fish/completions/metal-attention.fish";

/// Print a completion script for a shell
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// The shell
    shell: Shell,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let mut script = Vec::new();
    completion::write_script(&args.shell.to_string(), &mut script).map_err(CliError::stdout)?;
    std::io::stdout().write_all(&script).map_err(CliError::stdout)
}
