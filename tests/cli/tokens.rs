//! The commands `tokenize`, `detokenize` and `export-tokenizer`.

use crate::common::{run, run_with_input, stderr, stdout};
use serde_json::{Value, json};
use tempfile::TempDir;

const TALES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tales-4m-q4_0.gguf");

#[test]
fn text_is_tokenized() {
    assert_eq!(stdout(run(&["tokenize", "-p", "Once upon a time", "--json"])), "[1, 403, 407, 261, 378]\n");
    assert_eq!(stdout(run(&["tokenize", "-p", "Once upon a time", "--json", "--no-bos"])), "[403, 407, 261, 378]\n");
    assert_eq!(stdout(run(&["tokenize", "-p", "", "--json", "--no-bos"])), "[]\n");
    let lines = stdout(run(&["tokenize", "-p", "Once upon"]));
    assert_eq!(lines, "     1  <s>\n   403  \" Once\"\n   407  \" upon\"\n");
}

#[test]
fn input_is_tokenized_byte_for_byte() {
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
fn ids_are_detokenized_in_every_notation() {
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
fn a_tokenizer_is_exported_to_json_files() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("a/b");
    let read = |name: &str| -> Value { serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap() };
    // The second export replaces the files of the first.
    for model in [TALES, "models/stories260K.gguf"] {
        assert_eq!(stdout(run(&["export-tokenizer", "-m", model, folder.to_str().unwrap()])), "");
    }
    let mut names: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort_unstable();
    assert_eq!(names, ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]);
    let tokenizer = read("tokenizer.json");
    assert_eq!(tokenizer["model"]["vocab"].as_object().map(serde_json::Map::len), Some(512));
    assert_eq!(tokenizer["added_tokens"][1]["content"], json!("<s>"));
    assert_eq!(read("generation_config.json"), json!({"bos_token_id": 1, "eos_token_id": [2]}));
    assert_eq!(read("config.json")["max_position_embeddings"], json!(512));

    let vocabulary = dir.path().join("rwkv.gguf");
    std::fs::write(&vocabulary, metal_attention_testing::vocabulary::bytes("rwkv-cut.gguf")).unwrap();
    let rejected =
        run(&["export-tokenizer", "-m", vocabulary.to_str().unwrap(), dir.path().join("c").to_str().unwrap()]);
    assert_eq!(rejected.status.code(), Some(3));
    assert!(stderr(&rejected).contains("of the kind `rwkv`, cannot be exported"), "{}", stderr(&rejected));
    assert!(!dir.path().join("c").exists());
    let file = vocabulary.to_str().unwrap();
    assert_eq!(run(&["export-tokenizer", "-m", TALES, file]).status.code(), Some(1));
}
