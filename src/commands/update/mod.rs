//! `update`: replaces this program by the newest release, if the release is signed and newer.
//!
//! `release.rs` reads what a release has and checks its signature; `origin.rs` finds out what installed this program; `documents.rs`
//! replaces its manual pages and completions. Nothing is requested unless this command runs.

mod documents;
mod origin;
mod release;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cli_error::CliError;
use origin::Origin;
use release::{Release, Version};

/// The release address that the program was built with; empty where its owner has set none.
const ADDRESS: &str = env!("CARGO_PKG_REPOSITORY");

/// The minisign public key of releases; empty where their owner has set none.
const KEY: &str = include_str!("../../../release.pub");

const AFTER_HELP: &str = "\
The list of the release's files is signed; its signature, the checksum of the archive, and the version are checked before \
anything is replaced. The old program stays beside the new one, as metal-attention.old; manual pages and completions that \
install.sh installed are replaced, too. A program that a package manager or \
cargo installed is not touched: the message names the command that updates it.

Examples:
  metal-attention update --check
  metal-attention update";

/// Replace this program by the newest release
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// Print whether there is a newer release, and change nothing
    #[arg(long)]
    check: bool,

    /// Where releases are [default: the address that the program was built with]
    #[arg(long, value_name = "ADDRESS", requires = "key")]
    from: Option<String>,

    /// The minisign public key of these releases
    #[arg(long, value_name = "KEY", requires = "from")]
    key: Option<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let address = args.from.as_deref().unwrap_or(ADDRESS).trim_end_matches('/').trim_end_matches(".git");
    let key = args.key.as_deref().unwrap_or(KEY).trim();
    if address.is_empty() || key.is_empty() {
        return Err(CliError::General(
            "this program was built without the address of releases and their key, so that there is nothing to update from: update the \
             sources and build it again, or name both with --from and --key"
                .into(),
        ));
    }
    let program = program()?;
    let origin = Origin::of(&program);
    if let (Some(advice), false) = (origin.advice(), args.check) {
        return Err(CliError::General(format!("{} was installed by {origin}: {advice}", program.display())));
    }
    let own = Version::own();
    let release = Release::newest(address, key)?;
    if release.version <= own {
        return say(&format!("metal-attention {own} is the newest release"));
    }
    if args.check {
        let advice = origin.advice().unwrap_or("metal-attention update installs it");
        return say(&format!("metal-attention {} is released, this is {own}: {advice}", release.version));
    }
    let folder = program.parent().unwrap_or(Path::new("/"));
    // In the program's folder, so that it can be renamed into its place; and a folder that may not be written fails here.
    let unpacked = tempfile::Builder::new().prefix(".metal-attention-").tempdir_in(folder).map_err(|error| {
        CliError::General(format!(
            "cannot write to {}: {error}; try again as a user who may, as with sudo",
            folder.display()
        ))
    })?;
    let new = release.unpack(unpacked.path())?;
    check_runs(&new, &release.version)?;
    replace(&program, &new)?;
    if let Err((file, error)) = documents::replace(&program, unpacked.path()) {
        // The program is the new one: this is no failure.
        let _ = writeln!(io::stderr(), "warning: {} is still that of {own}: {error}", file.display());
    }
    say(&format!(
        "metal-attention {} is at {}; {own} stays beside it as {}",
        release.version,
        program.display(),
        old(&program).display()
    ))
}

fn say(line: &str) -> Result<(), CliError> {
    writeln!(io::stdout(), "{line}").map_err(CliError::stdout)
}

/// The file of this program, without links.
fn program() -> Result<PathBuf, CliError> {
    let found = std::env::current_exe().and_then(fs::canonicalize);
    found.map_err(|error| CliError::General(format!("cannot find the file of this program: {error}")))
}

/// Where the program stays that is replaced.
fn old(program: &Path) -> PathBuf {
    program.with_extension("old")
}

/// Checks that the new program runs on this machine, and is the version that its release says.
fn check_runs(program: &Path, version: &Version) -> Result<(), CliError> {
    let output = Command::new(program).arg("--version").output();
    let output = output.map_err(|error| CliError::General(format!("the new program does not run here: {error}")))?;
    let shown = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() || shown.split_whitespace().nth(1) != Some(&version.to_string()) {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(CliError::General(format!(
            "the new program does not run here, or is not version {version}; nothing was replaced: {}{}",
            shown.trim(),
            errors.trim()
        )));
    }
    Ok(())
}

/// Puts `new` in the place of `program`, which is kept beside it. If that fails the program is where it was.
fn replace(program: &Path, new: &Path) -> Result<(), CliError> {
    let failed =
        |what: &str, error: &io::Error| CliError::General(format!("cannot {what} {}: {error}", program.display()));
    fs::rename(program, old(program)).map_err(|error| failed("rename", &error))?;
    fs::rename(new, program).map_err(|error| {
        // If this fails, too, the message says where the program is.
        let _ = fs::rename(old(program), program);
        failed("replace", &error)
    })
}
