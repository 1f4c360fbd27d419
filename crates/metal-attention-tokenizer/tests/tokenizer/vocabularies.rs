//! Recorded encodings of many vocabularies.
//!
//! The repository has cut-down vocabularies and `cases.json`, compressed; see `tests/data/tokenizers/README.md`.
//! Other vocabularies can be tested if they have the files of llama.cpp's `models/ggml-vocab-*`: `NAME.gguf`;
//! `NAME.gguf.inp`, texts separated by lines `__ggml_vocab_test__`; and `NAME.gguf.out`, the expected ids of each text,
//! without BOS and without parsing special tokens. Set the variable to their folder:
//! `METAL_ATTENTION_TOKENIZERS=DIR cargo test -p metal-attention-tokenizer --test tokenizer vocabularies`.

use metal_attention_gguf::GgufFile;
use metal_attention_tokenizer::{EncodeOptions, Tokenizer, TokenizerOptions};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

fn open(path: &Path, pre: Option<&str>) -> Tokenizer {
    let file = if path.exists() {
        GgufFile::read(path)
    } else {
        let name = path.file_name().and_then(|name| name.to_str()).expect("a plain name");
        GgufFile::from_bytes(&metal_attention_testing::vocabulary::bytes(name))
    };
    let file = file.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let options = TokenizerOptions { pre: pre.map(str::to_owned) };
    Tokenizer::from_metadata(file.metadata(), &options).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A path relative to the root of the repository.
fn in_repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Checks all cases in `folder`. Returns their number.
fn check_folder(folder: &Path) -> usize {
    let mut cases = 0;
    let mut failures = Vec::new();
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
        .map(|entry| entry.expect("a folder entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "gguf"))
        .collect();
    files.sort();
    for path in files {
        let beside = |ending: &str| fs::read_to_string(format!("{}.{ending}", path.display())).ok();
        let (Some(inputs), Some(outputs)) = (beside("inp"), beside("out")) else { continue };
        let tokenizer = open(&path, None);
        let inputs = inputs.split("\n__ggml_vocab_test__\n");
        for (number, (text, expected)) in inputs.zip(outputs.lines()).enumerate() {
            let expected: Vec<u32> = expected.split_whitespace().map(|id| id.parse().expect("an id")).collect();
            let ids = tokenizer.encode(text, EncodeOptions::default());
            if ids != expected {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                failures.push(format!("{name} case {number} {text:?}\n  expected {expected:?}\n  found    {ids:?}"));
            }
            cases += 1;
        }
    }
    assert!(failures.is_empty(), "{} of {cases} fail:\n{}", failures.len(), failures.join("\n"));
    cases
}

#[test]
fn vocabularies_of_the_folder_in_the_environment_pass() {
    let Some(folder) = std::env::var_os("METAL_ATTENTION_TOKENIZERS") else {
        println!("not run: METAL_ATTENTION_TOKENIZERS names no folder with larger vocabularies");
        return;
    };
    let cases = check_folder(Path::new(&folder));
    assert!(cases > 0, "no NAME.gguf with NAME.gguf.inp and .out in {}", Path::new(&folder).display());
    println!("{cases} cases");
}

#[test]
fn recorded_cases_pass() {
    let recorded: Value =
        serde_json::from_slice(&metal_attention_testing::vocabulary::bytes("cases.json")).expect("cases.json is JSON");
    let ids = |value: &Value| -> Vec<u32> {
        let ids = value.as_array().expect("a list of ids");
        ids.iter().map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    let mut cases = 0;
    for group in recorded.as_array().expect("a list") {
        let path = group["vocabulary"].as_str().expect("a path");
        let pre = group["pre"].as_str();
        let tokenizer = open(&in_repository(path), pre);
        let name = format!("{path} {}", pre.unwrap_or_default());
        assert_eq!(tokenizer.end_of_generation(), ids(&group["end_of_generation"]), "{name}");
        assert_eq!(tokenizer.bos().map(u64::from), group["bos"].as_u64(), "BOS of {name}");
        assert_eq!(tokenizer.eos().map(u64::from), group["eos"].as_u64(), "EOS of {name}");
        for case in group["cases"].as_array().expect("a list") {
            let flag = |key: &str| case[key].as_bool().expect("a flag");
            let options = EncodeOptions { add_special: flag("add_special"), parse_special: flag("parse_special") };
            let text = case["text"].as_str().expect("a text");
            assert_eq!(tokenizer.encode(text, options), ids(&case["ids"]), "{name} {options:?} {text:?}");
            cases += 1;
        }
    }
    assert!(cases > 1000, "only {cases} cases");
}
