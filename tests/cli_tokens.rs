//! `tokenize`, `detokenize` and `completions`.

mod common;

use common::{run, run_with_input, stdout};

const TALES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tales-15m-q4_0.gguf");

#[test]
fn text_becomes_ids() {
    assert_eq!(stdout(run(&["tokenize", "-p", "Once upon a time", "--json"])), "[1, 403, 407, 261, 378]\n");
    assert_eq!(stdout(run(&["tokenize", "-p", "Once upon a time", "--json", "--no-bos"])), "[403, 407, 261, 378]\n");
    assert_eq!(stdout(run(&["tokenize", "-p", "", "--json", "--no-bos"])), "[]\n");
    let lines = stdout(run(&["tokenize", "-p", "Once upon"]));
    assert_eq!(lines, "     1  <s>\n   403  \" Once\"\n   407  \" upon\"\n");
}

#[test]
fn input_is_taken_byte_for_byte() {
    let text = " \r\nOne \u{1f600}\0 two\t\n\n";
    let from_prompt = stdout(run(&["tokenize", "-m", TALES, "-p", " \r\nOne", "--json"]));
    assert_eq!(stdout(run_with_input(&["tokenize", "-m", TALES, "--json"], b" \r\nOne")), from_prompt);
    let ids = stdout(run_with_input(&["tokenize", "-m", TALES, "-f", "-", "--json"], text.as_bytes()));
    assert_eq!(stdout(run_with_input(&["detokenize", "-m", TALES], ids.as_bytes())), text);
}

#[test]
fn special_tokens_are_parsed_on_request_only() {
    let ids = |args: &[&str]| stdout(run(&[&["tokenize", "-p", "</s>", "--no-bos", "--json"], args].concat()));
    assert_eq!(ids(&["--parse-special"]), "[2]\n");
    assert_ne!(ids(&[]), "[2]\n");
}

#[test]
fn ids_become_text_in_every_spelling() {
    for args in [&["detokenize", "1,403,407,261,378"][..], &["detokenize", "1", "403", "407", "261", "378"]] {
        assert_eq!(stdout(run(args)), "Once upon a time");
    }
    let json = run_with_input(&["detokenize"], b"[1, 403, 407,\n261, 378]\n");
    assert_eq!(stdout(json), "Once upon a time");
    assert_eq!(stdout(run_with_input(&["detokenize"], b"")), "");
    let special = stdout(run(&["detokenize", "--special", "1,403,2"]));
    assert!(special.starts_with("<s>") && special.ends_with("</s>"), "{special}");
}

#[test]
fn completion_scripts_know_the_commands() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = stdout(run(&["completions", shell]));
        assert!(script.contains("detokenize") && script.contains("rerank") && script.contains("top-k"), "{shell}");
    }
}
