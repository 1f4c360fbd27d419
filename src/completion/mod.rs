//! Completion in shells: the shell calls this program with `METAL_ATTENTION_COMPLETE=SHELL` in its environment, and the program prints what may
//! stand at the cursor. So the names of models are those of this machine at that moment ([`models`]).
//!
//! `metal-attention completions SHELL` prints the script with which a shell does so ([`write_script`]).

mod bash;
pub mod models;

use std::io::{self, Write};

use clap::CommandFactory;
use clap_complete::env::{CompleteEnv, Elvish, Fish, Powershell, Shells, Zsh};

use crate::Cli;

/// The environment variable in which the script of a shell names the shell.
const VARIABLE: &str = "METAL_ATTENTION_COMPLETE";

const SHELLS: Shells<'static> = Shells(&[&bash::Bash, &Elvish, &Fish, &Powershell, &Zsh]);

/// Prints what may stand at the cursor and ends the process, if a shell's script calls the program.
pub fn answer_shell() {
    CompleteEnv::with_factory(Cli::command).var(VARIABLE).shells(SHELLS).completer("metal-attention").complete();
}

/// Writes the script for a shell. An error if there is none for it.
pub fn write_script(shell: &str, out: &mut dyn Write) -> io::Result<()> {
    let completer = SHELLS.completer(shell).ok_or(io::ErrorKind::Unsupported)?;
    completer.write_registration(VARIABLE, "metal-attention", "metal-attention", "metal-attention", out)
}
