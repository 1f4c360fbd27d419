//! Helpers of the command line's tests: running the program, reading its output, reference data.

use std::path::Path;
use std::process::{Command, Output, Stdio};

pub use metal_attention_testing::reference::ids;
use serde_json::Value;

/// The built program, without the user's model, configuration and log settings.
pub fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_metal-attention"));
    command.env_remove("METAL_ATTENTION_MODEL").env_remove("RUST_LOG").stdin(Stdio::null());
    // Pipelines of test models are kept with the other results of the build.
    command.env("METAL_ATTENTION_CACHE", env!("CARGO_TARGET_TMPDIR"));
    // No test writes a configuration into this folder.
    command.env("XDG_CONFIG_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

/// Runs the program and waits until it exits.
pub fn run(args: &[&str]) -> Output {
    program().args(args).output().unwrap()
}

/// Runs the program with `input` on stdin.
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

/// The JSON of the reference data `name`.
pub fn reference(name: &str) -> Value {
    metal_attention_testing::reference::read(name)
}

/// Writes the held-out text into `folder` and returns the file's path.
pub fn held_out(folder: &Path) -> String {
    let file = folder.join("tales-heldout.txt");
    std::fs::write(&file, metal_attention_testing::reference::bytes("tales-heldout.txt")).unwrap();
    file.to_str().unwrap().to_owned()
}

/// Whether the program finds a GPU; a software Vulkan driver counts. Without one, the test fails in CI, and is recorded
/// as skipped elsewhere.
pub fn has_gpu() -> bool {
    let devices: Value = serde_json::from_str(&stdout(run(&["devices", "--json"]))).unwrap();
    let found = !devices["gpus"].as_array().unwrap().is_empty();
    if !found {
        assert!(!cfg!(feature = "wgpu") || std::env::var_os("CI").is_none(), "{}", devices["no_gpu"]);
        metal_attention_testing::skip(&format!("{}", devices["no_gpu"]));
    }
    found
}
