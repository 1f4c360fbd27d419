//! Command lines in the style of other programs (llama.cpp, Ollama, vLLM): flags that are accepted, ignored, or answered
//! with a hint; and the width of help texts.

use crate::common::{program, run, stderr, stdout};

/// Checks that the program rejects the command line with exit code 2 and a message that contains `tip`.
#[track_caller]
fn rejects_with_tip(args: &[&str], tip: &str) {
    let output = run(args);
    let errors = stderr(&output);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(2), &b""[..]), "{args:?}: {errors}");
    assert!(errors.contains(tip), "{args:?}: {errors}");
}

#[test]
fn a_text_or_model_without_its_flag_gets_a_hint() {
    rejects_with_tip(&["tokenize", "hi"], "metal-attention tokenize -p \"hi\"");
    rejects_with_tip(&["tokenize", "hi"], "unexpected argument 'hi' found");
    rejects_with_tip(&["tokenize", "say \"x\""], r#"-p "say \"x\"""#);
    rejects_with_tip(&["logits", "hi"], "metal-attention logits -p \"hi\"");
    rejects_with_tip(&["perplexity", "hi"], "metal-attention perplexity -p \"hi\"");
    rejects_with_tip(
        &["tokenize", "llama.gguf"],
        "tip: a model is named with -m: metal-attention tokenize -m llama.gguf",
    );
    rejects_with_tip(&["model.gguf"], "a command comes first: metal-attention run model.gguf");
    rejects_with_tip(&["llama3.2", "hi"], "a command comes first: metal-attention run llama3.2");
    rejects_with_tip(&["ps"], "`metal-attention list` shows the models");
}

#[test]
fn flags_of_other_programs_are_accepted_ignored_or_explained() {
    for (flags, tip) in [
        (&["-ngl", "12"][..], "-ngl 0 is the CPU"),
        (&["--gpu-layers", "1"], "--gpu"),
        (&["-ngld", "9"], "--device-draft"),
        (&["--mmproj-url", "https://example.org/mmproj.gguf"], "pictures"),
        (&["--lora", "a.gguf"], "merged"),
        (&["--cache-type-k", "q8_0"], "--cache-type "),
        (&["-help"], "--help"),
        (&["-temp", "5"], "--temp"),
        // These differ from our flags in spelling only and need no entry in the table of foreign flags.
        (&["--top_k", "5"], "--top-k"),
        (&["--ctx_size", "5"], "--ctx-size"),
        (&["--repeat_penalty", "5"], "--repeat-penalty"),
    ] {
        rejects_with_tip(&[&["run", "-p", "x"], flags].concat(), tip);
    }
    // The value of a flag is not taken for a flag.
    rejects_with_tip(&["run", "-p", "-ngl", "-n", "x"], "invalid value 'x' for '--n-predict <N>'");

    let once = ["run", "-p", "Once", "-n", "5", "--temp", "0", "--device", "cpu"];
    let plain = run(&once);
    let notes = stderr(&plain).lines().filter(|line| line.starts_with("note: ")).count();
    let flags =
        "-ngl 0 -fa on --jinja -b 64 -ub 64 -ctk f16 -ctv f16 --mlock -np 1 --no-warmup --color -no-cnv -n 5 --temp 0";
    let accepted = run(&[&["run"], &flags.split(' ').collect::<Vec<_>>()[..], &["-p", "Once"]].concat());
    let errors = stderr(&accepted);
    let ignored: Vec<&str> = errors
        .lines()
        .filter_map(|line| line.strip_prefix("note: ")?.split_once(" is passed over: "))
        .map(|(flag, _)| flag)
        .collect();
    assert_eq!(ignored, ["-fa", "--jinja", "-b", "--mlock", "-np", "--no-warmup", "--color"], "{errors}");
    let all = errors.lines().filter(|line| line.starts_with("note: ")).count();
    assert_eq!(all, notes + ignored.len(), "{errors}");
    assert_eq!(stdout(accepted), stdout(plain));
}

#[test]
fn equivalent_flags_of_other_programs_are_aliases() {
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
    assert!(!help.contains("--max-tokens") && !help.contains("num-ctx"), "{help}");
}

#[test]
fn a_word_after_two_dashes_is_no_flag() {
    rejects_with_tip(&["tokenize", "--", "-ngl"], "metal-attention tokenize -p \"-ngl\"");
}

/// Without a terminal the variable `COLUMNS` sets the width, which is at most 120.
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
