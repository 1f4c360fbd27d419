//! Errors of the command line: the message on stderr and the exit code. The number in a test's name is the exit code.

use std::path::Path;

#[cfg(target_os = "linux")]
use crate::common::program;
use crate::common::{run, run_with_input, stderr};

/// Runs the program and checks its exit code, that stderr contains each of `parts`, and that stdout is empty.
#[track_caller]
fn fails(args: &[&str], code: i32, parts: &[&str]) {
    let output = run(args);
    let errors = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
    assert_eq!(output.stdout, b"", "{args:?}");
    for part in parts {
        assert!(errors.contains(part), "{part:?} is not in the message of {args:?}: {errors}");
    }
}

/// Runs several commands on a model file of these bytes, and checks that each rejects it with exit code 3, a message with
/// `parts` and the file's name.
#[track_caller]
fn fails_on(name: &str, bytes: &[u8], parts: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    for command in ["run", "tokenize", "logits", "info"] {
        let mut args = vec![command, "-m", path.to_str().unwrap()];
        args.extend((command != "info").then_some(["-p", "x"]).into_iter().flatten());
        fails(&args, 3, &[parts, &[name]].concat());
    }
}

/// The bytes of the built-in model's GGUF file.
fn built_in() -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("models/stories260K.gguf")).unwrap()
}

/// An encoder's attention is bidirectional, so it generates no text. It gives embeddings and logits.
#[test]
fn an_encoder_cannot_generate_text() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("encoder.gguf");
    let path = path.to_str().unwrap();
    let sizes = ["--n-embd", "32", "--n-head", "4", "--n-ff", "48", "--n-layer", "2"];
    let made = run(&[&["synth", "custom", "--arch", "llama-embed", "-o", path], &sizes[..]].concat());
    assert!(made.status.success(), "{}", stderr(&made));
    fails(&["run", "-m", path, "-p", "x"], 2, &["the model writes no text", "embed"]);
    // An encoder evaluates all tokens in one micro-batch, also more than the default `n_ubatch`.
    let tokens = vec!["5"; 600].join(",");
    let output = run(&["logits", "-m", path, "--tokens", &tokens, "--last"]);
    assert!(output.status.success(), "{}", stderr(&output));
}

/// NaN logits are reported as an error of the model file.
#[test]
fn a_model_with_nan_logits_is_3() {
    let mut bytes = built_in();
    let file = metal_attention::gguf::GgufFile::from_bytes(&bytes).unwrap();
    let norm = file.tensor("output_norm.weight").unwrap().bytes().to_vec();
    let at = bytes.windows(norm.len()).position(|window| window == norm).unwrap();
    for number in bytes[at..at + norm.len()].chunks_exact_mut(4) {
        number.copy_from_slice(&f32::NAN.to_le_bytes());
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("damaged.gguf");
    std::fs::write(&path, bytes).unwrap();
    let path = path.to_str().unwrap();
    for args in [
        &["run", "-p", "Once", "-n", "3", "--temp", "0"][..],
        &["run", "-p", "Once", "-n", "3"],
        &["logits", "-p", "Once", "--last"],
        &["embed", "-p", "Once", "--json"],
        &[
            "perplexity",
            "-p",
            "Once upon a time there was a little girl and a dog and a cat and a bird",
            "-c",
            "8",
            "--json",
        ],
    ] {
        let output = run(&[args, &["-m", path, "--device", "cpu"]].concat());
        let errors = stderr(&output);
        assert_eq!(output.status.code(), Some(3), "{args:?}: {errors}");
        assert!(errors.contains("NaN or infinity instead of numbers"), "{args:?}: {errors}");
    }
}

#[test]
fn wrong_usage_is_2() {
    fails(&[], 2, &["Usage:"]);
    fails(&["nonsense"], 2, &["nonsense"]);
    fails(&["run"], 2, &["there is no prompt", "-p TEXT"]);
    fails(&["run", "-p", "x", "-f", "y"], 2, &["cannot be used with"]);
    fails(&["run", "-p", "x", "-t", "0"], 2, &["--threads", "at least 1"]);
    fails(&["run", "-p", "x", "--ubatch-size", "0"], 2, &["at least 1"]);
    fails(&["run", "-p", "x", "-n", "many"], 2, &["many"]);
    fails(&["run", "-p", "x", "--cache-type", "q8"], 2, &["q8", "f16"]);
    fails(&["run", "-p", "x", "--stop", ""], 2, &["--stop"]);
    fails(&["run", "-p", "x", "--temp", "-1"], 2, &["temperature"]);
    fails(&["run", "-p", "x", "--top-p", "1.5"], 2, &["top_p", "1.5"]);
    fails(&["run", "-p", "x", "--samplers", "top_k;magic"], 2, &["magic"]);
    fails(&["run", "-p", "x", "--logit-bias", "7"], 2, &["15043-0.5"]);
    fails(&["run", "-p", "x", "--logit-bias", "512+1"], 2, &["512 tokens"]);
    fails(&["run", "-p", "once upon a time", "-c", "3"], 2, &["the prompt has", "-c"]);
    fails(&["logits"], 2, &["--tokens"]);
    fails(&["logits", "--tokens", "1,512"], 2, &["512"]);
    fails(&["logits", "--tokens", ""], 2, &["empty"]);
    fails(&["detokenize", "1,x"], 2, &["\"x\""]);
    fails(&["detokenize", "100000"], 2, &["100000", "512"]);
    fails(&["completions", "tcsh"], 2, &["tcsh"]);
}

#[test]
fn help_shows_examples_and_exit_codes() {
    let help = |args: &[&str]| crate::common::stdout(run(args));
    let text = help(&["--help"]);
    for code in ["0    success", "130  interrupted"] {
        assert!(text.contains(code), "{text}");
    }
    for command in [
        "run",
        "info",
        "tokenize",
        "detokenize",
        "logits",
        "perplexity",
        "compare",
        "devices",
        "pull",
        "list",
        "rm",
        "synth",
        "quantize",
        "imatrix",
        "completions",
    ] {
        assert!(text.contains(command), "{text}");
        let text = help(&[command, "--help"]);
        assert!(text.contains("Example") && text.contains(&format!("metal-attention {command}")), "{text}");
    }
}

#[test]
fn a_missing_model_is_3_and_similar_names_are_suggested() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("smollm-135m.gguf"), "x").unwrap();
    let path = dir.path().join("smolm-135m.gguf");
    fails(&["run", "-m", path.to_str().unwrap(), "-p", "x"], 3, &["no such file", "did you mean", "smollm-135m.gguf"]);
    fails(&["run", "-m", dir.path().to_str().unwrap(), "-p", "x"], 3, &["directory"]);
}

#[test]
fn files_that_are_no_model_are_3_and_their_kind_is_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\nsize 91726016\n";
    fails_on("pointer.gguf", pointer.as_bytes(), &["Git LFS pointer", "git lfs pull"]);
    fails_on("page.gguf", b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>", &["HTML page"]);
    let header = br#"{"model.embed_tokens.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let safetensors = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
    fails_on("model.safetensors", &safetensors, &["safetensors"]);
    fails_on("empty.gguf", b"", &["empty"]);
    fails_on("text.gguf", b"It was a dark and stormy night.", &["not a GGUF file"]);
    fails_on("short.gguf", &built_in()[..20_000], &["truncated"]);
    fails_on("half.gguf", &built_in()[..500_000], &["truncated"]);
}

#[test]
fn a_file_with_only_a_vocabulary_can_tokenize_but_not_run() {
    use metal_attention::gguf::{GgufFile, GgufWriter};
    let full = GgufFile::from_bytes(&built_in()).unwrap();
    let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    GgufWriter::new(file.reopen().unwrap(), 3, full.metadata(), &[]).unwrap().finish().unwrap();
    let path = file.path().to_str().unwrap();
    let ids = crate::common::stdout(run(&["tokenize", "-m", path, "-p", "Once upon a time", "--json"]));
    assert_eq!(ids, "[1, 403, 407, 261, 378]\n");
    fails(&["run", "-m", path, "-p", "x"], 3, &["token_embd.weight"]);
}

#[test]
fn an_unknown_pre_tokenizer_is_3() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tales-4m-q4_0.gguf");
    fails(&["tokenize", "-m", model, "-p", "x", "--pre", "esperanto"], 3, &["esperanto", "smollm"]);
}

#[test]
fn a_missing_device_is_4() {
    fails(&["run", "-p", "x", "--device", "gpu:nosuch"], 4, &["nosuch"]);
}

#[test]
fn a_kv_cache_beyond_memory_is_5() {
    fails(&["run", "-p", "x", "-c", "999999999999"], 5, &["out of memory", "KV cache"]);
    fails(&["run", "-p", "x", "-c", "18446744073709551615"], 5, &["out of memory"]);
}

#[test]
fn text_that_is_not_utf8_is_rejected_with_the_offset() {
    for args in [["run", "-"], ["tokenize", "-"]] {
        let output = run_with_input(&args, b"abc\xff\xfe");
        assert_eq!(output.status.code(), Some(2));
        let expected = "the text from stdin is not UTF-8: unexpected byte 0xff at offset 3";
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    }
}

#[test]
fn a_missing_prompt_file_or_output_folder_is_1() {
    fails(&["run", "-f", "no-such-prompt.txt"], 1, &["no-such-prompt.txt"]);
    fails(&["logits", "-p", "x", "-o", "no/such/folder/x.npy"], 1, &["no/such/folder/x.npy"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_1() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = program().args(["run", "-p", "x", "-n", "5"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cannot write to stdout"), "{}", stderr(&output));
}
