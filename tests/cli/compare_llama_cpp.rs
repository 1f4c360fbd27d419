//! Tests of tools/compare-llama-cpp with stub programs in place of both engines' benchmarks; they print JSON in the
//! engines' formats.
#![cfg(unix)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

/// A stub of metal-attention's `bench`: 100 tokens per second and thread, and 1 more for every earlier call.
const OURS: &str = r#"#!/usr/bin/env python3
import json, pathlib, sys
flag = lambda name: sys.argv[sys.argv.index(name) + 1]
calls = pathlib.Path(__file__).with_suffix(".calls")
n = len(calls.read_text().split()) if calls.exists() else 0
calls.write_text("x " * (n + 1))
assert int(flag("-c")) >= 512 or flag("--gen-length") != "0", sys.argv
tests = [(int(p), 0, 0) for p in flag("--seq-lengths").split(",") if p != "0"]
gen = int(flag("--gen-length"))
tests += [(0, gen, int(d)) for d in flag("--depth").split(",") if gen]
speed = 100.0 * int(flag("-t")) + n
rate = lambda p, g, d: {"n_prompt": p, "n_gen": g, "depth": d, "tokens_per_second": {"samples": [speed - 1, speed, 9999]}}
print(json.dumps({"engine": {"name": "metal-attention", "version": "1", "commit": None}, "results": [rate(*t) for t in tests]}))
"#;

/// A stub of llama-bench: always 50 tokens per second.
const THEIRS: &str = r#"#!/usr/bin/env python3
import json, sys
flag = lambda name: sys.argv[sys.argv.index(name) + 1]
assert flag("-o") == "json" and flag("-r") == "2", sys.argv
tests = []
for d in flag("-d").split(","):
    tests += [(int(p), 0, int(d)) for p in flag("-p").split(",") if p != "0"]
    tests += [(0, int(flag("-n")), int(d))] if flag("-n") != "0" else []
row = lambda p, g, d: {"build_commit": "abc", "build_number": 7, "n_prompt": p, "n_gen": g, "n_depth": d,
                       "samples_ns": [(p + g) * 20_000_000] * 2, "samples_ts": [1.0, 1.0]}
print(json.dumps([row(*t) for t in tests]))
"#;

/// Whether python3 is installed, which the tool needs. If not, the test is recorded as skipped.
fn has_python() -> bool {
    let found = Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        metal_attention_testing::skip("there is no python3");
    }
    found
}

/// Writes an executable script and returns its path.
fn program(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Runs the tool with these two programs as engines.
fn compare(ours: &str, theirs: &str, args: &[&str]) -> Output {
    let tool = concat!(env!("CARGO_MANIFEST_DIR"), "/tools/compare-llama-cpp");
    let common = [tool, "--ours", ours, "--llama-bench", theirs, "-m", "/some/a.gguf", "--iterations", "2"];
    Command::new("python3").args(common).args(args).output().unwrap()
}

#[test]
fn results_of_the_same_round_are_paired() {
    if !has_python() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (program(folder.path(), "ours", OURS), program(folder.path(), "theirs", THEIRS));
    let args = ["--seq-lengths", "32,512", "--depth", "0,1024", "--threads", "1,2", "--rounds", "3"];
    let output = compare(&ours, &theirs, &[&args[..], &["--json"]].concat());
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(report["engines"], json!(["metal-attention 1 (unknown commit)", "llama.cpp abc (build 7)"]));
    let results = report["results"].as_array().unwrap();
    let tests: Vec<Value> = results
        .iter()
        .map(|r| json!([r["model"], r["phase"], r["n_prompt"], r["n_gen"], r["depth"], r["threads"]]))
        .collect();
    let mut expected = Vec::new();
    for threads in [json!(1), json!(2), json!("best")] {
        for (phase, n_prompt, n_gen, depth) in
            [("prefill", 32, 0, 0), ("prefill", 512, 0, 0), ("decode", 0, 64, 0), ("decode", 0, 64, 1024)]
        {
            expected.push(json!(["a.gguf", phase, n_prompt, n_gen, depth, threads]));
        }
    }
    assert_eq!(tests, expected);
    // Our program is called four times a round. So the first result, of one thread, grows by 4 from round to round.
    let rounds: Vec<f64> =
        results[0]["rounds"].as_array().unwrap().iter().map(|r| r["ours"].as_f64().unwrap()).collect();
    assert_eq!(rounds, [100.0, 104.0, 108.0]);
    assert_eq!(results[0]["ratio"], json!({"median": 2.08, "min": 2.0, "max": 2.16}));
    assert_eq!((&results[0]["ours"], &results[0]["theirs"]), (&json!(104.0), &json!(50.0)));
    assert_eq!(results[8]["ours"], json!(206.0), "the best of both numbers of threads");
}

#[test]
fn tables_have_one_line_for_each_test() {
    if !has_python() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (program(folder.path(), "ours", OURS), program(folder.path(), "theirs", THEIRS));
    let args = ["--seq-lengths", "512", "--gen-length", "0", "-t", "2", "--rounds", "1"];
    let text = |more: &[&str]| String::from_utf8(compare(&ours, &theirs, &[&args[..], more].concat()).stdout).unwrap();
    let table = text(&[]);
    assert_eq!(table.lines().count(), 4, "{table}");
    assert!(
        table.ends_with("a.gguf  prefill     512      0        2   200       50.0  4.00x  4.00..4.00\n"),
        "{table}"
    );
    let markdown = text(&["--markdown"]);
    assert!(markdown.ends_with("| a.gguf | prefill | 512 | 0 | 2 | 201 | 50.0 | 4.02x | 4.02..4.02 |\n"), "{markdown}");
}

#[test]
fn errors_name_the_program_that_failed() {
    if !has_python() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let good = program(folder.path(), "ours", OURS);
    let failed = |name: &str, text: &str, part: &str| {
        let theirs = program(folder.path(), name, text);
        let output = compare(&good, &theirs, &["--rounds", "1", "-t", "1"]);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(1), &b""[..]), "{errors}");
        assert!(errors.contains(name) && errors.contains(part) && !errors.contains("Traceback"), "{errors}");
    };
    failed("failing", "#!/bin/sh\necho no such model >&2\nexit 3\n", "no such model");
    failed("silent", "#!/bin/sh\n", "no JSON");
    failed("other", "#!/bin/sh\necho '[{\"n_prompt\": 1}]'\n", "another JSON");
    failed("empty", "#!/bin/sh\necho '[]'\n", "another JSON");
    let output = compare(&good, "/no/such/llama-bench", &["--rounds", "1"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot run /no/such/llama-bench"));
    let output = compare(&good, &good, &["--rounds", "0"]);
    assert_eq!(output.status.code(), Some(2));
}
