//! `completions`: prints completion scripts for shells.

use std::io::Write;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::Cli;
use crate::cli_error::CliError;

const AFTER_HELP: &str = "\
The folders must exist: mkdir -p makes them.

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
    clap_complete::generate(args.shell, &mut Cli::command(), "metal-attention", &mut script);
    std::io::stdout().write_all(&script).map_err(CliError::stdout)
}
