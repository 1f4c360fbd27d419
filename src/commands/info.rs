//! `info`.

use crate::cli_error::CliError;

/// Placeholder.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> Result<(), CliError> {
    Err(CliError::General("not written yet".into()))
}
