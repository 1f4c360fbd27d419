//! Numbers that nobody means: each command refuses them in a sentence or makes do with them, in little memory and time.
#![cfg(unix)]

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::common::stderr;

/// Kibibytes of address space that a command may have.
const MEMORY: u32 = 4 << 20;

/// At and beyond the ends of the types that numbers are kept in, and what is no number.
const NUMBERS: [&str; 10] = [
    "0",
    "-1",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "nan",
    "inf",
];

/// Runs the program to its end, with 4 GiB of address space.
fn run(args: &[&str]) -> Output {
    let program = crate::common::program();
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -v {MEMORY} && exec \"$0\" \"$@\"")]);
    command.arg(program.get_program()).args(args);
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(std::process::Stdio::null()).output().unwrap()
}

/// Runs `base` with each of `flags` at each of the numbers: it ends by itself, and an error is told.
fn check(base: &[&str], flags: &[&str]) {
    for flag in flags {
        for number in NUMBERS {
            let given = format!("{flag}={number}");
            let args = [base, &[given.as_str()]].concat();
            let output = run(&args);
            let errors = stderr(&output);
            let code = output.status.code();
            assert_eq!(output.status.signal(), None, "{args:?}: {errors}");
            // 101 is a panic; others are listed in README.md.
            assert!(code.is_some_and(|code| code <= 5), "{args:?} ended with {code:?}: {errors}");
            assert!(!errors.contains("panicked"), "{args:?}: {errors}");
            let told = errors.lines().any(|line| line.starts_with("error: "));
            assert!(told != (code == Some(0)), "{args:?} ended with {code:?}: {errors}");
        }
    }
}

#[test]
fn sizes_of_the_engine() {
    check(&["run", "--device=cpu", "-p=Once", "-n=1"], &["--ctx-size", "--threads", "--ubatch-size"]);
    check(&["run", "--device=cpu", "-p=Once", "-c=8"], &["--n-predict", "--seed"]);
    check(&["logits", "--device=cpu", "-p=Once", "--last"], &["--ctx-size", "--threads", "--ubatch-size"]);
    check(&["logits"], &["--tokens"]);
    check(&["perplexity", "--device=cpu", "-p=Once upon a time, there was a little girl", "-c=4"], &["--chunks"]);
    check(&["perplexity", "--device=cpu", "-p=Once upon a time, there was a little girl"], &["--ctx-size"]);
    check(&["perplexity", "--device=cpu", "-p=Once upon a time, there was a little girl", "-c=4"], &["--ubatch-size"]);
}

#[test]
fn sampling() {
    let flags = [
        "--temp",
        "--top-k",
        "--top-p",
        "--min-p",
        "--typical",
        "--top-nsigma",
        "--xtc-probability",
        "--xtc-threshold",
        "--repeat-last-n",
        "--repeat-penalty",
        "--presence-penalty",
        "--frequency-penalty",
        "--dry-multiplier",
        "--dry-base",
        "--dry-allowed-length",
        "--dry-penalty-last-n",
        "--dynatemp-range",
        "--dynatemp-exp",
    ];
    let base = ["run", "--device=cpu", "-p=Once Once Once", "-n=3", "--seed=1", "-c=16"];
    check(&base, &flags);
    // With the samplers that such a number is for.
    let more = ["--dry-multiplier=1", "--dynatemp-range=0.5", "--xtc-probability=1", "--repeat-penalty=2"];
    check(&[&base[..], &more].concat(), &["--dry-base", "--dynatemp-exp", "--repeat-last-n", "--dry-allowed-length"]);
    for bias in ["0-inf", "0+inf", "0+nan", "4294967296+1", "18446744073709551616-1", "511+3.5e38", "511-1e39"] {
        let output = run(&[&base[..], &["--logit-bias", bias]].concat());
        assert!(output.status.code().is_some_and(|code| code <= 5), "{bias}: {}", stderr(&output));
    }
}

#[test]
fn sizes_of_what_is_measured() {
    let base = ["bench", "--device=cpu", "--iterations=1", "--warmup=0"];
    let none = ["--seq-lengths=0", "--gen-length=2"];
    check(&[&base[..], &none].concat(), &["--depth", "--batch", "--threads", "--ctx-size", "--ubatch-size"]);
    check(&[&base[..], &["--gen-length=0"]].concat(), &["--seq-lengths"]);
    check(&[&base[..], &["--seq-lengths=0"]].concat(), &["--gen-length"]);
    // Past the context of the training.
    check(&[&base[..], &none, &["-c=18446744073709551615"]].concat(), &["--depth", "--batch"]);
    check(&[&base[..], &["--gen-length=0", "-c=18446744073709551615"]].concat(), &["--seq-lengths"]);
    for threads in ["0", "4097", "18446744073709551615"] {
        let output = run(&["bench", "roofline", "--quick", "--device=cpu", "--threads", threads]);
        assert_eq!(output.status.code(), Some(2), "{threads}: {}", stderr(&output));
    }
}

#[test]
fn sizes_of_models_that_are_made() {
    let folder = tempfile::tempdir().unwrap();
    let output = format!("--output={}", folder.path().join("model.gguf").display());
    // One layer, so that a size that is taken makes a small file.
    let base = ["synth", "custom", &output, "--n-layer=1", "--n-embd=32", "--n-head=1", "--n-ff=32", "--type=q4_0"];
    let flags = ["--n-head-kv", "--head-dim", "--n-vocab", "--n-ctx", "--rope-freq-base", "--seed"];
    check(&base, &flags);
    for flag in ["--n-layer", "--n-embd", "--n-head", "--n-ff"] {
        let rest: Vec<_> = base.iter().copied().filter(|arg| !arg.starts_with(&format!("{flag}="))).collect();
        check(&rest, &[flag]);
    }
    // All of them as large as a model may say it is: more parameters than 64 bits count.
    let most = ["--n-layer=4096", "--n-embd=268435456", "--n-head=1", "--head-dim=32", "--n-ff=268435456"];
    let refused = run(&[&["synth", "custom", &output, "--type=q4_0"], &most[..]].concat());
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("more parameters than can be counted"), "{}", stderr(&refused));
    // What was made is whole: it runs.
    let made = folder.path().join("model.gguf");
    if Path::exists(&made) {
        let ran = run(&["run", "--device=cpu", "-m", made.to_str().unwrap(), "-p=x", "-n=1", "-c=8"]);
        assert!(ran.status.success(), "{}", stderr(&ran));
    }
}

#[test]
fn sizes_of_the_server() {
    let most = "18446744073709551615";
    for (flag, message) in [
        ("--parallel", "the number of sequences must be at least 1 and at most 1048576"),
        ("--ctx-size", "out of memory: the KV cache"),
        ("--threads", "the number of threads must be at least 1 and at most 4096"),
    ] {
        let output = run(&["serve", "--device=cpu", "--port=0", flag, most]);
        assert!(output.status.code().is_some_and(|code| (1..=5).contains(&code)), "{flag}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{flag}: {}", stderr(&output));
    }
}
