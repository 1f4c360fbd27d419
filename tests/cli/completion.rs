//! Completion in shells: the scripts of `completions`, and what the program answers them.

#[cfg(unix)]
use std::{path::Path, process::Command};

use crate::common::{run, stdout};
use crate::hub::Setup;
use metal_attention_testing::hub_server::REPO;

#[test]
fn every_shell_has_a_script_that_calls_the_program() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = stdout(run(&["completions", shell]));
        assert!(script.contains("METAL_ATTENTION_COMPLETE") && script.contains("metal-attention"), "{shell}: {script}");
    }
}

/// A cache of the hub with the model `tester/tiny-GGUF:Q8_0`.
fn cache() -> Setup {
    let setup = Setup::with(&[("tiny-Q8_0.gguf", metal_attention::BUILT_IN_MODEL)]);
    stdout(setup.run(&["pull", REPO]));
    setup
}

/// What may stand at the end of the words, without descriptions.
fn candidates(cache: &Setup, words: &[&str]) -> Vec<String> {
    let mut command = cache.program(&["--", "metal-attention"]);
    command.env("METAL_ATTENTION_COMPLETE", "fish").env("METAL_ATTENTION_MODELS", "");
    let lines = stdout(command.args(words).output().unwrap());
    lines.lines().map(|line| line.split('\t').next().unwrap().to_owned()).collect()
}

#[test]
fn names_of_models_are_completed() {
    let cache = cache();
    let of = |words: &[&str]| candidates(&cache, words);
    assert_eq!(of(&["run", "llama3.2"]), ["llama3.2", "llama3.2:1b", "llama3.2:3b"]);
    assert_eq!(of(&["info", "-m", "tester/"]), ["tester/tiny-GGUF:Q8_0"]);
    assert_eq!(of(&["serve", "hf:te"]), ["hf:tester/tiny-GGUF:Q8_0"]);
    assert_eq!(of(&["rm", "t"]), ["tester/tiny-GGUF:Q8_0"]);
    assert_eq!(of(&["rm", "llama"]), [""; 0]);
    assert_eq!(of(&["pull", "gpt-o"]), ["gpt-oss"]);
    assert_eq!(of(&["pull", "gpt-oss:"]), ["gpt-oss:120b", "gpt-oss:20b"]);
    assert_eq!(of(&["completi"]), ["completions"]);
    assert_eq!(of(&["run", "--model-dr"]), ["--model-draft"]);
}

#[test]
#[cfg(unix)]
fn bash_completes_names_with_colons() {
    let cache = cache();
    let home = &cache.home;
    let script = stdout(run(&["completions", "bash"]));
    let folder = Path::new(env!("CARGO_BIN_EXE_metal-attention")).parent().unwrap();
    // Splits a line as bash does, and prints what may replace its last word.
    let test = r#"
        source "$1"
        compopt() { :; }
        try() {
            COMP_LINE="$1" COMP_POINT=${#1}
            shift
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
            _metal_attention
            echo "${COMPREPLY[@]}"
        }
        try "metal-attention comple" metal-attention comple
        try "metal-attention run llama3.2" metal-attention run llama3.2
        try "metal-attention run llama3.2:" metal-attention run llama3.2 :
        try "metal-attention run llama3.2:1" metal-attention run llama3.2 : 1
        try "metal-attention run --model=qwen3:4b-" metal-attention run --model = qwen3 : 4b-
        try "metal-attention rm te" metal-attention rm te
        try "metal-attention -v run hf:te" metal-attention -v run hf : te
    "#;
    let file = home.path().join("script");
    std::fs::write(&file, script).unwrap();
    let path = std::env::join_paths(
        [folder].into_iter().map(Path::to_owned).chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
    );
    let mut bash = Command::new("bash");
    bash.args(["-c", test, "bash"]).arg(&file).env("PATH", path.unwrap()).env("HF_HOME", home.path());
    let output =
        bash.env_remove("HF_HUB_CACHE").env_remove("METAL_ATTENTION_COMPLETE").current_dir(home.path()).output();
    let lines = stdout(output.unwrap());
    let lines: Vec<_> = lines.lines().collect();
    let expected = [
        "completions",
        "llama3.2 llama3.2:1b llama3.2:3b",
        "1b 3b",
        "1b",
        "4b-instruct",
        "tester/tiny-GGUF:Q8_0",
        "tester/tiny-GGUF:Q8_0",
    ];
    assert_eq!(lines, expected);
}
