//! Sets, at compile time, `METAL_ATTENTION_TARGET` to the system that the program is built for, such as `x86_64-unknown-linux-gnu`,
//! and `METAL_ATTENTION_COMMIT` to the git commit that it is built from. The latter is not set without git or outside of a git
//! checkout.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let target = std::env::var("TARGET").expect("cargo names the target");
    println!("cargo::rustc-env=METAL_ATTENTION_TARGET={target}");
    // Sources that are copied into another repository must not get that repository's commit.
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

/// The first line of git's output. `None`: git failed.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok()?.lines().next().map(str::to_owned)
}
