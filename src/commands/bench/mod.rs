//! `bench`: how fast models run here.

pub mod roofline;

use crate::cli_error::CliError;

/// Measure speed
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Roofline(Box<roofline::RooflineArgs>),
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    match &args.command {
        Command::Roofline(args) => roofline::run(args),
    }
}
