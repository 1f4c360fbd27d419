//! What the tests of the command line share.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// The built program, with no model and no configuration of the user's, and no log.
pub fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_metal-attention"));
    command.env_remove("METAL_ATTENTION_MODEL").env_remove("RUST_LOG").stdin(Stdio::null());
    // Pipelines of test models are kept with the other results of the build.
    command.env("METAL_ATTENTION_CACHE", env!("CARGO_TARGET_TMPDIR"));
    // Nobody writes a configuration there.
    command.env("XDG_CONFIG_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

/// Runs the program to its end.
pub fn run(args: &[&str]) -> Output {
    program().args(args).output().unwrap()
}

/// Runs the program with `input` on stdin.
#[allow(dead_code)] // not every file of tests has input
pub fn run_with_input(args: &[&str], input: &[u8]) -> Output {
    use std::io::Write;
    let mut child =
        program().args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

/// Checks that the program succeeded, and returns its stdout.
#[track_caller]
pub fn stdout(output: Output) -> String {
    assert!(output.status.success(), "{}: {}", output.status, stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// The program's stderr.
pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A file of the repository's reference data, which lies packed.
#[allow(dead_code)] // not every file of tests has a reference
pub fn reference_file(name: &str) -> Vec<u8> {
    metal_attention_testing::reference::bytes(name)
}

/// Reference data of the repository.
#[allow(dead_code)] // not every file of tests has a reference
pub fn reference(name: &str) -> Value {
    serde_json::from_slice(&reference_file(&format!("{name}.json"))).unwrap()
}

/// The held-out text, as a file of `folder`.
#[allow(dead_code)] // not every file of tests has a text
pub fn held_out(folder: &Path) -> String {
    let file = folder.join("tales-heldout.txt");
    std::fs::write(&file, reference_file("tales-heldout.txt")).unwrap();
    file.to_str().unwrap().to_owned()
}

/// A list of ids in reference data.
#[allow(dead_code)] // not every file of tests has a reference
pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Whether the program finds a GPU, be it software. In CI a missing one is a failure; elsewhere the test says that it
/// is skipped.
#[allow(dead_code)] // not every file of tests has to do with GPUs
pub fn has_gpu() -> bool {
    let devices: Value = serde_json::from_str(&stdout(run(&["devices", "--json"]))).unwrap();
    let found = !devices["gpus"].as_array().unwrap().is_empty();
    if !found {
        assert!(!cfg!(feature = "wgpu") || std::env::var_os("CI").is_none(), "{}", devices["no_gpu"]);
        metal_attention_testing::skip(&format!("{}", devices["no_gpu"]));
    }
    found
}
