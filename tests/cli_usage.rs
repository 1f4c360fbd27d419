//! What those who know other programs type, and how help is shown.

mod common;

use common::{program, run, stderr, stdout};

/// Runs the program, which refuses the command line and says `tip`.
#[track_caller]
fn tells(args: &[&str], tip: &str) {
    let output = run(args);
    let errors = stderr(&output);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(2), &b""[..]), "{args:?}: {errors}");
    assert!(errors.contains(tip), "{args:?}: {errors}");
}

#[test]
fn a_text_or_a_model_without_its_flag_is_told_the_flag() {
    tells(&["run", "hi"], "tip: a text is given with -p: metal-attention run -p \"hi\"");
    tells(&["run", "hi"], "unexpected argument 'hi' found");
    tells(&["run", "Once upon", "a time"], "-p \"a time\"");
    tells(&["run", "-n", "3", "say \"x\""], r#"-p "say \"x\"""#);
    tells(&["tokenize", "hi"], "metal-attention tokenize -p \"hi\"");
    tells(&["logits", "hi"], "metal-attention logits -p \"hi\"");
    tells(&["perplexity", "hi"], "metal-attention perplexity -p \"hi\"");
    tells(&["run", "llama.gguf"], "tip: a model is named with -m: metal-attention run -m llama.gguf");
    tells(&["run", "hf:a/b", "hi"], "metal-attention run -m hf:a/b, a text is given with -p: ... -p \"hi\"");
    tells(&["run", "-m", "a.gguf", "hi"], "tip: a text is given with -p: metal-attention run -p \"hi\"");
    tells(&["chat", "model.GGUF"], "metal-attention chat -m model.GGUF");
    tells(&["chat", "hello"], "chat reads messages from the terminal or from stdin");
    tells(&["serve", "model.gguf"], "metal-attention serve -m model.gguf");
    tells(&["info", "model.gguf"], "metal-attention info -m model.gguf");
    tells(&["bench", "model.gguf"], "metal-attention bench -m model.gguf");
    tells(&["model.gguf"], "metal-attention run -m model.gguf");
}

#[test]
fn flags_of_other_programs_are_translated() {
    for (flags, tip) in [
        (&["-ngl", "99"][..], "--gpu"),
        (&["--n-gpu-layers", "99"], "--gpu"),
        (&["--n-gpu-layers=99"], "--gpu"),
        (&["--gpu-layers", "1"], "--gpu"),
        (&["-cnv"], "metal-attention chat"),
        (&["-i"], "metal-attention chat"),
        (&["--hf-repo", "a/b"], "-m hf:OWNER/REPO"),
        (&["--batch-size", "64"], "--ubatch-size"),
        (&["-b", "64"], "--ubatch-size"),
        (&["--flash-attn", "on"], "leave the flag out"),
        (&["--cache-type-k", "f16"], "--cache-type "),
        (&["-ctk", "f16"], "--cache-type "),
        (&["--reverse-prompt", "x"], "--stop"),
        (&["-r", "x"], "--stop"),
        (&["--format", "json"], "--json"),
        // Those that are spelt otherwise are found without a table.
        (&["--top_k", "5"], "--top-k"),
        (&["--ctx_size", "5"], "--ctx-size"),
        (&["--repeat_penalty", "5"], "--repeat-penalty"),
    ] {
        tells(&[&["run", "-p", "x"], flags].concat(), tip);
    }
    // A value is no flag.
    tells(&["run", "-p", "-ngl", "-n", "x"], "invalid value 'x' for '--n-predict <N>'");
}

#[test]
fn names_of_other_programs_work_where_they_mean_the_same() {
    let expected = stdout(run(&["run", "-p", "Once", "-c", "64", "-n", "5", "--temp", "0", "-t", "1"]));
    for (n, c, t, threads) in [
        ("--max-tokens", "--n-ctx", "--temperature", "--n-threads"),
        ("--num-predict", "--num-ctx", "--temp", "--num-threads"),
        ("--max-new-tokens", "--context-size", "--temperature", "--threads"),
        ("--predict", "--context-length", "--temperature", "--threads"),
        ("--n-predict", "--ctx-size", "--temp", "--threads"),
    ] {
        let args = ["run", "--prompt", "Once", c, "64", n, "5", t, "0", threads, "1", "--repetition-penalty", "1"];
        assert_eq!(stdout(run(&args)), expected, "{args:?}");
    }
    let help = stdout(run(&["run", "--help"]));
    assert!(!help.contains("max-tokens") && !help.contains("num-ctx"), "{help}");
}

#[test]
fn a_flag_after_two_dashes_is_no_flag() {
    tells(&["run", "--", "-ngl"], "metal-attention run -p \"-ngl\"");
}

/// In a pipe `COLUMNS` is the width.
#[test]
fn help_has_the_width_of_the_terminal() {
    for command in ["synth", "pull", "bench", "serve"] {
        for (columns, widest) in [("60", 60), ("80", 80), ("120", 120), ("200", 120)] {
            let output = program().args([command, "--help"]).env("COLUMNS", columns).output().unwrap();
            let text = stdout(output);
            let prose = text.lines().filter(|line| !line.starts_with(' ') && !line.starts_with("Usage:"));
            let longest = prose.map(|line| line.chars().count()).max().unwrap();
            assert!((widest * 3 / 4..=widest).contains(&longest), "{command} at {columns}: {longest}\n{text}");
        }
    }
}
