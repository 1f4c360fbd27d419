//! `kernels` in a program without wgpu: accepts any flags and reports an error.

use crate::cli_error::CliError;

/// Print GPU kernels (not in this program: it was built without GPUs)
#[derive(clap::Args)]
pub struct Args {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    ignored: Vec<String>,
}

/// Runs the command.
pub fn run(_: &Args) -> Result<(), CliError> {
    Err(CliError::General(
        "this program was built without GPUs (the Cargo feature \"wgpu\") and has no kernels for them".into(),
    ))
}
