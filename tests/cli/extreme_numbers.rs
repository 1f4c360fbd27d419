//! Extreme values of numeric flags (zero, negative, beyond 32 and 64 bits, no numbers): each command either rejects them
//! with an error message or works, within 4 GiB of address space and without a panic or signal.
#![cfg(unix)]

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::common::stderr;

/// The limit of a command's address space, in KiB.
const MEMORY_KIB: u32 = 4 << 20;

/// Values at and beyond the limits of integer types, and values that are no finite numbers.
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

/// Runs the program with [`MEMORY_KIB`] of address space and waits until it exits.
fn run(args: &[&str]) -> Output {
    let program = crate::common::program();
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -v {MEMORY_KIB} && exec \"$0\" \"$@\"")]);
    command.arg(program.get_program()).args(args);
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(std::process::Stdio::null()).output().unwrap()
}

/// Runs `base` with each of `flags` set to each of [`NUMBERS`]. Checks that the program exits by itself, without a panic,
/// and that it prints an error exactly if its exit code is not 0.
fn check(base: &[&str], flags: &[&str]) {
    for flag in flags {
        for number in NUMBERS {
            let flag_and_value = format!("{flag}={number}");
            let args = [base, &[flag_and_value.as_str()]].concat();
            let output = run(&args);
            let errors = stderr(&output);
            let code = output.status.code();
            assert_eq!(output.status.signal(), None, "{args:?}: {errors}");
            // README.md lists the exit codes, of which 0 to 5 are possible here. 101 would be a panic.
            assert!(code.is_some_and(|code| code <= 5), "{args:?} ended with {code:?}: {errors}");
            assert!(!errors.contains("panicked"), "{args:?}: {errors}");
            let has_error = errors.lines().any(|line| line.starts_with("error: "));
            assert!(has_error != (code == Some(0)), "{args:?} ended with {code:?}: {errors}");
        }
    }
}

#[test]
fn engine_flags_at_extreme_values() {
    check(&["run", "--device=cpu", "-p=Once", "-n=1"], &["--ctx-size", "--threads", "--ubatch-size"]);
    check(&["run", "--device=cpu", "-p=Once", "-c=8"], &["--n-predict", "--seed"]);
    check(&["logits", "--device=cpu", "-p=Once", "--last"], &["--ctx-size", "--threads", "--ubatch-size"]);
    check(&["logits"], &["--tokens"]);
    check(&["perplexity", "--device=cpu", "-p=Once upon a time, there was a little girl", "-c=4"], &["--chunks"]);
    check(&["perplexity", "--device=cpu", "-p=Once upon a time, there was a little girl"], &["--ctx-size"]);
    check(&["perplexity", "--device=cpu", "-p=Once upon a time, there was a little girl", "-c=4"], &["--ubatch-size"]);
}

#[test]
fn sampling_flags_at_extreme_values() {
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
    // These flags have an effect only if their sampler is enabled.
    let more = ["--dry-multiplier=1", "--dynatemp-range=0.5", "--xtc-probability=1", "--repeat-penalty=2"];
    check(&[&base[..], &more].concat(), &["--dry-base", "--dynatemp-exp", "--repeat-last-n", "--dry-allowed-length"]);
    for bias in ["0-inf", "0+inf", "0+nan", "4294967296+1", "18446744073709551616-1", "511+3.5e38", "511-1e39"] {
        let output = run(&[&base[..], &["--logit-bias", bias]].concat());
        assert!(output.status.code().is_some_and(|code| code <= 5), "{bias}: {}", stderr(&output));
    }
}

#[test]
fn bench_flags_at_extreme_values() {
    let base = ["bench", "--device=cpu", "--iterations=1", "--warmup=0"];
    let none = ["--seq-lengths=0", "--gen-length=2"];
    check(&[&base[..], &none].concat(), &["--depth", "--batch", "--threads", "--ctx-size", "--ubatch-size"]);
    check(&[&base[..], &["--gen-length=0"]].concat(), &["--seq-lengths"]);
    check(&[&base[..], &["--seq-lengths=0"]].concat(), &["--gen-length"]);
    // With a context beyond the training context.
    check(&[&base[..], &none, &["-c=18446744073709551615"]].concat(), &["--depth", "--batch"]);
    check(&[&base[..], &["--gen-length=0", "-c=18446744073709551615"]].concat(), &["--seq-lengths"]);
    for threads in ["0", "4097", "18446744073709551615"] {
        let output = run(&["bench", "roofline", "--quick", "--device=cpu", "--threads", threads]);
        assert_eq!(output.status.code(), Some(2), "{threads}: {}", stderr(&output));
    }
}

#[test]
fn synth_flags_at_extreme_values() {
    let folder = tempfile::tempdir().unwrap();
    let output = format!("--output={}", folder.path().join("model.gguf").display());
    // One layer, so that an accepted size leads to a small file.
    let base = ["synth", "custom", &output, "--n-layer=1", "--n-embd=32", "--n-head=1", "--n-ff=32", "--type=q4_0"];
    let flags = ["--n-head-kv", "--head-dim", "--n-vocab", "--n-ctx", "--rope-freq-base", "--seed"];
    check(&base, &flags);
    for flag in ["--n-layer", "--n-embd", "--n-head", "--n-ff"] {
        let rest: Vec<_> = base.iter().copied().filter(|arg| !arg.starts_with(&format!("{flag}="))).collect();
        check(&rest, &[flag]);
    }
    // All sizes at their limits: the number of parameters exceeds 64 bits.
    let maxima = ["--n-layer=4096", "--n-embd=268435456", "--n-head=1", "--head-dim=32", "--n-ff=268435456"];
    let rejected = run(&[&["synth", "custom", &output, "--type=q4_0"], &maxima[..]].concat());
    assert_eq!(rejected.status.code(), Some(2), "{}", stderr(&rejected));
    assert!(stderr(&rejected).contains("more parameters than can be counted"), "{}", stderr(&rejected));
    // A file that was written is complete: the model runs.
    let model = folder.path().join("model.gguf");
    if Path::exists(&model) {
        let ran = run(&["run", "--device=cpu", "-m", model.to_str().unwrap(), "-p=x", "-n=1", "-c=8"]);
        assert!(ran.status.success(), "{}", stderr(&ran));
    }
}

#[test]
fn serve_flags_at_the_maximum_are_rejected() {
    let maximum = "18446744073709551615";
    for (flag, message) in [
        ("--parallel", "the number of sequences must be at least 1 and at most 1048576"),
        ("--ctx-size", "out of memory: the KV cache"),
        ("--threads", "the number of threads must be at least 1 and at most 4096"),
    ] {
        let output = run(&["serve", "--device=cpu", "--port=0", flag, maximum]);
        assert!(output.status.code().is_some_and(|code| (1..=5).contains(&code)), "{flag}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{flag}: {}", stderr(&output));
    }
}
