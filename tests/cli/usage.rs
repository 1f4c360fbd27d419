//! What those who know other programs type, and how help is shown.

use crate::common::{program, run, stderr, stdout};

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
    tells(&["tokenize", "hi"], "metal-attention tokenize -p \"hi\"");
    tells(&["tokenize", "hi"], "unexpected argument 'hi' found");
    tells(&["tokenize", "say \"x\""], r#"-p "say \"x\"""#);
    tells(&["logits", "hi"], "metal-attention logits -p \"hi\"");
    tells(&["perplexity", "hi"], "metal-attention perplexity -p \"hi\"");
    tells(&["tokenize", "llama.gguf"], "tip: a model is named with -m: metal-attention tokenize -m llama.gguf");
    tells(&["model.gguf"], "a command comes first: metal-attention run model.gguf");
    tells(&["llama3.2", "hi"], "a command comes first: metal-attention run llama3.2");
    tells(&["ps"], "`metal-attention list` shows the models");
}

#[test]
fn flags_of_other_programs_are_taken_passed_over_or_named() {
    for (flags, tip) in [
        (&["-ngl", "12"][..], "-ngl 0 is the CPU"),
        (&["--gpu-layers", "1"], "--gpu"),
        (&["-md", "draft.gguf"], "no speculative decoding"),
        (&["--mmproj", "mmproj.gguf"], "images"),
        (&["--lora", "a.gguf"], "merged"),
        (&["--cache-type-k", "q8_0"], "--cache-type "),
        (&["-help"], "--help"),
        (&["-temp", "5"], "--temp"),
        // Those that are spelt otherwise are found without a table.
        (&["--top_k", "5"], "--top-k"),
        (&["--ctx_size", "5"], "--ctx-size"),
        (&["--repeat_penalty", "5"], "--repeat-penalty"),
    ] {
        tells(&[&["run", "-p", "x"], flags].concat(), tip);
    }
    // A value is no flag.
    tells(&["run", "-p", "-ngl", "-n", "x"], "invalid value 'x' for '--n-predict <N>'");

    let once = ["run", "-p", "Once", "-n", "5", "--temp", "0", "--device", "cpu"];
    let plain = run(&once);
    let notes = stderr(&plain).lines().filter(|line| line.starts_with("note: ")).count();
    let flags =
        "-ngl 0 -fa on --jinja -b 64 -ub 64 -ctk f16 -ctv f16 --mlock -np 1 --no-warmup --color -no-cnv -n 5 --temp 0";
    let taken = run(&[&["run"], &flags.split(' ').collect::<Vec<_>>()[..], &["-p", "Once"]].concat());
    let errors = stderr(&taken);
    let passed_over: Vec<&str> = errors
        .lines()
        .filter_map(|line| line.strip_prefix("note: ")?.split_once(" is passed over: "))
        .map(|(flag, _)| flag)
        .collect();
    assert_eq!(passed_over, ["-fa", "--jinja", "-b", "--mlock", "-np", "--no-warmup", "--color"], "{errors}");
    let all = errors.lines().filter(|line| line.starts_with("note: ")).count();
    assert_eq!(all, notes + passed_over.len(), "{errors}");
    assert_eq!(stdout(taken), stdout(plain));
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
    tells(&["tokenize", "--", "-ngl"], "metal-attention tokenize -p \"-ngl\"");
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
