//! Tells the program which commit it was built from: the environment variable `METAL_ATTENTION_COMMIT` at compile time,
//! unset where this is no git checkout or there is no git.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // A copy of the sources inside of some other repository must not take that one's commit.
    if !Path::new(".git").exists() {
        return;
    }
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists()) {
        println!("cargo::rerun-if-changed={log}");
    }
    for sources in ["Cargo.lock", "crates", "src"] {
        println!("cargo::rerun-if-changed={sources}");
    }
    if let Some(commit) = git(&["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]) {
        println!("cargo::rustc-env=METAL_ATTENTION_COMMIT={commit}");
    }
}

/// The first line that git prints; `None` where it fails.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok()?.lines().next().map(str::to_owned)
}
