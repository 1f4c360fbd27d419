//! Every vocabulary with recorded cases: `NAME.gguf` with `NAME.gguf.inp`, texts separated by lines
//! `__ggml_vocab_test__`, and `NAME.gguf.out`, the expected ids of each, without BOS and without
//! parsing special tokens. This is the layout of llama.cpp's `models/ggml-vocab-*`.
//!
//! Small vocabularies are in `tests/data/tokenizers`. To try larger ones, name their folder:
//! `METAL_ATTENTION_TOKENIZERS=DIR cargo test -p metal-attention-tokenizer --test vocabularies`.

use metal_attention_gguf::GgufFile;
use metal_attention_tokenizer::{EncodeOptions, Tokenizer, TokenizerOptions};
use std::fs;
use std::path::{Path, PathBuf};

fn open(path: &Path) -> Tokenizer {
    let file = GgufFile::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Tokenizer::from_metadata(file.metadata(), &TokenizerOptions::default())
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tokenizers")
}

/// Checks every case in `folder` and returns how many there were.
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
        let beside = |ending: &str| {
            fs::read_to_string(format!("{}.{ending}", path.display())).ok()
        };
        let (Some(inputs), Some(outputs)) = (beside("inp"), beside("out")) else { continue };
        let tokenizer = open(&path);
        let inputs = inputs.split("\n__ggml_vocab_test__\n");
        for (number, (text, expected)) in inputs.zip(outputs.lines()).enumerate() {
            let expected: Vec<u32> =
                expected.split_whitespace().map(|id| id.parse().expect("an id")).collect();
            let ids = tokenizer.encode(text, EncodeOptions::default());
            if ids != expected {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                failures.push(format!(
                    "{name} case {number} {text:?}\n  expected {expected:?}\n  found    {ids:?}"
                ));
            }
            cases += 1;
        }
    }
    assert!(failures.is_empty(), "{} of {cases} fail:\n{}", failures.len(), failures.join("\n"));
    cases
}

#[test]
fn vocabularies_named_by_the_environment_pass() {
    let Some(folder) = std::env::var_os("METAL_ATTENTION_TOKENIZERS") else {
        println!("not run: METAL_ATTENTION_TOKENIZERS names no folder with larger vocabularies");
        return;
    };
    let cases = check_folder(Path::new(&folder));
    assert!(cases > 0, "no NAME.gguf with NAME.gguf.inp and .out in {}", Path::new(&folder).display());
    println!("{cases} cases");
}
