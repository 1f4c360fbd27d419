//! The programs in `examples/c`, compiled by the system's C compiler and run with the shared and the static library.
#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The folder with the library, which Cargo builds beside the test program.
fn libraries() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// Runs a command and checks that it succeeds.
fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}

/// The C compiler. `None`: none is installed; in CI that is a failure.
fn compiler() -> Option<String> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let found = Command::new(&compiler).arg("--version").output().is_ok_and(|output| output.status.success());
    assert!(found || std::env::var_os("CI").is_none(), "there is no C compiler {compiler}");
    if !found {
        eprintln!("there is no C compiler {compiler}: the example is not tested");
    }
    found.then_some(compiler)
}

/// Compiles `source` with the linker flags `library` and returns the program's stdout.
fn output_of(compiler: &str, source: &Path, library: &[&str]) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    run(Command::new(compiler)
        .args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
        .arg(source)
        .arg("-I")
        .arg(root.join("include"))
        .args(library)
        .args(["-lm", "-o"])
        .arg(&program));
    let mut command = Command::new(&program);
    command.env("LD_LIBRARY_PATH", libraries()).env("DYLD_LIBRARY_PATH", libraries());
    String::from_utf8(run(&mut command).stdout).unwrap()
}

/// The output of the example `name` with the shared library. `None`: there is no compiler.
fn output_with_shared_library(name: &str) -> Option<String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/c").join(name);
    let folder = format!("-L{}", libraries().display());
    Some(output_of(&compiler()?, &source, &[&folder, "-lmetal_attention_c"]))
}

const STORY: &str = "\
5 tokens: Once upon a time
, there was a little girl named Lily. She loved to play outsid
20 tokens in 20 pieces after 5
stopped after 3 tokens: by the caller
similarity 1.000
";

#[test]
fn the_example_runs_with_the_shared_library() {
    let Some(output) = output_with_shared_library("generate.c") else { return };
    assert_eq!(output, STORY);
}

const CHAT: &str = r#"the model writes: {"name": "weather", "arguments": { "city" : "Paris" }}
{"role":"assistant","content":null,"tool_calls":[{"id":"ID","type":"function","function":{"name":"weather","arguments":"{ \"city\" : \"Paris\" }"}}]}
Lily had a pet. It was a cat
Once upon a time|, there was a little girl named Lily. She
Lily and Ben| were playing in the park. They li
The cat| and a boy were playing in the p
"#;

#[test]
fn chats_grammars_and_batches_work_from_c() {
    let Some(output) = output_with_shared_library("chat.c") else { return };
    // A call's id is random: nine letters and digits.
    let (before, rest) = output.split_once("\"id\":\"").unwrap();
    let (id, after) = rest.split_at(9);
    assert!(id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
    assert_eq!(format!("{before}\"id\":\"ID{after}"), CHAT);
}

#[test]
fn the_example_runs_with_the_static_library() {
    let Some(compiler) = compiler() else { return };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/c/generate.c");
    let library = libraries().join("libmetal_attention_c.a");
    let system: &[&str] = if cfg!(target_os = "macos") {
        &["-framework", "Metal", "-framework", "Foundation"]
    } else {
        &["-lpthread", "-ldl"]
    };
    let libraries = [&[library.to_str().unwrap()], system].concat();
    assert_eq!(output_of(&compiler, &source, &libraries), STORY);
}

#[test]
fn the_header_compiles_as_cpp() {
    let Some(_) = compiler() else { return };
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    if Command::new(&compiler).arg("--version").output().is_err() {
        eprintln!("there is no C++ compiler {compiler}: the header is not tested");
        return;
    }
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/metal_attention.h");
    run(Command::new(compiler)
        .args(["-std=c++11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++"])
        .arg(header));
}
