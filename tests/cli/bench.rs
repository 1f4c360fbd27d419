//! The command `bench`: which combinations it measures, its output formats, and the arguments it rejects. The measured
//! speeds themselves are not checked.

use std::path::Path;
use std::process::Output;

use crate::common::{has_gpu, run, stderr, stdout};
use metal_attention_testing::mmproj;
use serde_json::{Value, json};

/// Runs `bench` on the CPU, with few iterations and short decodes unless `args` set them.
fn on_cpu(args: &[&str]) -> Output {
    let mut all = vec!["bench", "--device", "cpu"];
    for (flag, value) in [("--iterations", "2"), ("--gen-length", "3")] {
        if !args.contains(&flag) {
            all.extend([flag, value]);
        }
    }
    run(&[&all[..], args].concat())
}

fn bench(args: &[&str]) -> String {
    stdout(on_cpu(args))
}

fn report(args: &[&str]) -> Value {
    serde_json::from_str(&bench(&[&["--json"], args].concat())).unwrap()
}

fn results(report: &Value) -> &[Value] {
    report["results"].as_array().unwrap()
}

/// One list a result: phase, prompt tokens, tokens to decode, depth, sequences, threads.
fn tests(report: &Value) -> Vec<Value> {
    let names = ["phase", "n_prompt", "n_gen", "depth", "batch", "threads"];
    results(report).iter().map(|r| names.iter().map(|name| r[name].clone()).collect()).collect()
}

#[test]
fn every_combination_of_the_lists_is_measured() {
    let args = ["--seq-lengths", "4,8", "--depth", "0,5", "--batch", "1,2", "--threads", "1,2", "--warmup", "0"];
    let report = report(&args);
    let expected: Vec<_> = [1, 2]
        .iter()
        .flat_map(|threads| {
            [
                json!(["prefill", 4, 0, 0, 1, threads]),
                json!(["prefill", 8, 0, 0, 1, threads]),
                json!(["decode", 0, 3, 0, 1, threads]),
                json!(["decode", 0, 3, 5, 1, threads]),
                json!(["decode", 0, 3, 0, 2, threads]),
                json!(["decode", 0, 3, 5, 2, threads]),
            ]
        })
        .collect();
    assert_eq!(tests(&report), expected);
    for result in results(&report) {
        assert_eq!((&result["device"], &result["driver"]), (&json!("cpu"), &Value::Null));
        assert_eq!(result["model"], "stories260K (built in)");
        // sha256sum models/stories260K.gguf
        assert_eq!(result["model_sha256"], "e10e90d4e58761087890a30bcc3d2857618a53375cfaf1955b19961e5d2d02b0");
        let rates = &result["tokens_per_second"];
        let samples: Vec<_> = rates["samples"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        assert_eq!(samples.len(), 2);
        let number = |name: &str| rates[name].as_f64().unwrap();
        assert!(samples.contains(&number("best")) && samples.iter().all(|&x| x > 0.0 && x <= number("best")));
        assert!((number("mean") * 2.0 / (samples[0] + samples[1]) - 1.0).abs() < 1e-12, "{rates}");
    }
    assert_eq!((&report["interrupted"], &report["engine"]["name"]), (&json!(false), &json!("metal-attention")));
    assert_eq!(report["settings"]["iterations"], 2);
}

#[test]
fn models_are_measured_in_order_and_tests_beyond_their_context_are_skipped() {
    let built_in = concat!(env!("CARGO_MANIFEST_DIR"), "/models/stories260K.gguf");
    let folder = tempfile::tempdir().unwrap();
    let short = folder.path().join("short.gguf");
    let short = short.to_str().unwrap();
    let sizes = ["--n-layer", "1", "--n-embd", "64", "--n-head", "2", "--n-ff", "64", "--n-ctx", "256"];
    stdout(run(&[&["synth", "custom", "-o", short], &sizes[..]].concat()));
    let report = report(&["-m", built_in, short, "--seq-lengths", "2,300", "--depth", "0,254,18446744073709551615"]);
    let found: Vec<_> = results(&report).iter().map(|r| (&r["model"], &r["n_prompt"], &r["depth"])).collect();
    let (small, short) = (json!("stories260K.gguf"), json!("short.gguf"));
    let [zero, two, long, deep] = [0, 2, 300, 254].map(|n| json!(n));
    assert_eq!(
        found,
        [
            (&small, &two, &zero),
            (&small, &long, &zero),
            (&small, &zero, &zero),
            (&small, &zero, &deep),
            (&short, &two, &zero),
            (&short, &zero, &zero),
        ]
    );
    let skipped: Vec<_> = report["skipped"].as_array().unwrap().iter().map(|s| (&s["model"], &s["depth"])).collect();
    assert_eq!(skipped, [(&small, &json!(u64::MAX)), (&short, &zero), (&short, &deep), (&short, &json!(u64::MAX)),]);
    let reason = report["skipped"][1]["reason"].as_str().unwrap();
    assert!(reason.contains("prefill of 300 tokens") && reason.contains("256") && reason.contains("-c"), "{reason}");
}

#[test]
fn the_context_flag_replaces_the_training_context() {
    let skipped =
        |args: &[&str]| report(&[args, &["--seq-lengths", "520", "--gen-length", "0"]].concat())["skipped"].clone();
    assert_eq!(skipped(&["-c", "520"]), json!([]));
    assert_eq!(skipped(&["-c", "519"]).as_array().unwrap().len(), 1);
    assert_eq!(skipped(&["-c", "0"]).as_array().unwrap().len(), 1);
}

#[test]
fn csv_markdown_and_the_table_have_the_same_results() {
    let args = ["--seq-lengths", "4", "--depth", "0,2"];
    let csv = bench(&[&["--csv"], &args[..]].concat());
    let lines: Vec<_> = csv.lines().collect();
    assert_eq!(lines.len(), 4, "{csv}");
    assert!(lines[0].starts_with("engine,version,commit,model,model_sha256,device,device_name,driver,threads,phase,"));
    assert!(lines[1].contains(",prefill,4,0,0,1,") && lines[3].contains(",decode,0,3,2,1,"), "{csv}");
    let markdown = bench(&[&["--markdown"], &args[..]].concat());
    assert_eq!(markdown.lines().filter(|line| line.starts_with("| ")).count(), 5, "{markdown}");
    let table = bench(&args);
    assert_eq!(table.lines().filter(|line| line.starts_with("stories260K (built in)  cpu")).count(), 3, "{table}");
}

#[test]
fn prefill_or_decode_can_be_measured_alone() {
    assert_eq!(tests(&report(&["--seq-lengths", "0", "-t", "1"])), [json!(["decode", 0, 3, 0, 1, 1])]);
    let prefill = report(&["--seq-lengths", "7,7", "--gen-length", "0", "-t", "1"]);
    assert_eq!(tests(&prefill), [json!(["prefill", 7, 0, 0, 1, 1])]);
}

#[test]
fn results_are_compared_with_an_earlier_report() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("earlier.json");
    let args = ["--seq-lengths", "4", "-t", "1", "--iterations", "2"];
    let mut earlier = report(&args);
    // The earlier report has a decode rate far above any machine's, and no result for a prefill of 4 tokens.
    earlier["results"][0]["n_prompt"] = json!(5);
    earlier["results"][1]["tokens_per_second"]["samples"] = json!([1e12, 1e12, 1e12]);
    std::fs::write(&path, earlier.to_string()).unwrap();
    let flags = ["--compare", path.to_str().unwrap()];
    let output = on_cpu(&[&["--json"], &args[..], &flags].concat());
    assert!(stderr(&output).contains("note: 1 result not in the earlier report"), "{}", stderr(&output));
    let report: Value = serde_json::from_str(&stdout(output)).unwrap();
    assert_eq!(results(&report)[0].get("comparison"), None);
    let comparison = &results(&report)[1]["comparison"];
    assert_eq!(comparison["earlier_median"], 1e12);
    let ratio = comparison["ratio"].as_f64().unwrap();
    let median = results(&report)[1]["tokens_per_second"]["median"].as_f64().unwrap();
    assert!(ratio < 1e-3 && (ratio * 1e12 / median - 1.0).abs() < 1e-12, "{comparison}");
    assert!(comparison["noise"].as_f64().unwrap() >= 0.01);
    let table = bench(&[&args[..], &flags].concat());
    assert!(table.contains("  moved\n") && table.contains("ratio"), "{table}");
}

#[test]
fn a_file_that_is_no_report_is_rejected_as_comparison() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("earlier.json");
    let path = path.to_str().unwrap();
    let assert_rejected = |part: &str| {
        let output = on_cpu(&["--compare", path]);
        let errors = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains(part) && errors.contains("earlier.json"), "{part}: {errors}");
        assert_eq!(output.stdout, b"");
    };
    assert_rejected("No such file");
    let result = json!({
        "model": "m", "model_sha256": "", "phase": "decode", "n_prompt": 0, "n_gen": 1, "depth": 0, "batch": 1,
        "threads": 1, "device": "cpu", "device_name": "", "driver": null,
        "tokens_per_second": {"mean": 1, "median": 1, "stddev": 0, "best": 1, "samples": []},
    });
    let valid = report(&["--seq-lengths", "1", "--gen-length", "0"]);
    let with = |name: &str, value: Value| {
        let mut report = valid.clone();
        report[name] = value;
        report.to_string()
    };
    for (text, part) in [
        (String::new(), "EOF"),
        ("[]".into(), "no schema_version"),
        ("{\"schema_version\": \"1\"}".into(), "no schema_version"),
        ("{\"schema_version\": 1}".into(), "missing field"),
        (with("schema_version", json!(2)), "schema_version is 2"),
        (with("results", json!([result])), "no samples above 0"),
        (with("results", json!([{"phase": "sleep"}])), "sleep"),
        (with("results", json!({})), "expected a sequence"),
    ] {
        std::fs::write(path, text).unwrap();
        assert_rejected(part);
    }
}

#[test]
fn invalid_arguments_are_rejected() {
    let missing = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nosuch.gguf");
    for (args, code, part) in [
        (&["--iterations", "0"][..], 2, "at least 1"),
        (&["--batch", "0"], 2, "at least 1"),
        (&["--threads", "0"], 2, "at least 1"),
        (&["--threads", "99999999"], 2, "threads"),
        (&["--seq-lengths", ""], 2, "empty"),
        (&["--seq-lengths", "1,x"], 2, "invalid digit"),
        (&["--seq-lengths", "-1"], 2, "-1"),
        (&["--depth", "1,,2"], 2, "empty"),
        (&["--seq-lengths", "0", "--gen-length", "0"], 2, "nothing to measure"),
        (&["--device", "cpu,tpu"], 2, "\"tpu\" is no device"),
        (&["--device", "cpu", "--gpu"], 2, "cannot be used with"),
        (&["--json", "--csv"], 2, "cannot be used with"),
        (&["-m", missing.to_str().unwrap()], 3, "nosuch.gguf"),
        (&["--device", "gpu:nosuch"], 4, "nosuch"),
        (&["--device", "cpu", "--seq-lengths", "0", "--batch", "99999999999999999"], 2, "at most 1048576"),
    ] {
        let output = run(&[&["bench"], args].concat());
        let errors = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
        assert!(errors.contains(part), "{args:?}: {errors}");
        assert_eq!(output.stdout, b"", "{args:?}");
    }
}

#[test]
fn results_before_an_error_are_printed() {
    let args = ["bench", "--device", "cpu,gpu:nosuch", "--seq-lengths", "4", "--gen-length", "0", "--json"];
    let output = run(&args);
    assert_eq!(output.status.code(), Some(4), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(results(&report).len(), 1);
}

#[test]
fn the_profile_has_a_process_for_every_test() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let flags = ["--seq-lengths", "4", "--depth", "0,5", "-t", "1", "--json", "--profile", trace.to_str().unwrap()];
    let output = on_cpu(&flags);
    let errors = stderr(&output);
    let report: Value = serde_json::from_str(&stdout(output)).unwrap();
    assert_eq!(results(&report).len(), 3);
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let names: Vec<_> = events.iter().filter(|e| e["name"] == "process_name").collect();
    let tests = ["prefill of 4 tokens", "decode of 3 tokens", "decode of 3 tokens at depth 5"];
    assert_eq!(names.len(), 3);
    for ((name, test), (pid, steps)) in names.iter().zip(tests).zip([(1, 1), (2, 3), (3, 3)]) {
        let title = name["args"]["name"].as_str().unwrap();
        assert!(title.starts_with("stories260K (built in), CPU, ") && title.ends_with(&format!(", {test}")), "{title}");
        assert!(errors.contains(title), "{errors}");
        let found = events.iter().filter(|e| e["pid"] == pid && e["tid"] == 1 && e["ph"] == "X").count();
        assert_eq!(found, steps, "{title}: what fills the context is left out");
    }
}

#[test]
fn flags_of_bench_before_a_subcommand_are_rejected() {
    for name in ["encoder", "roofline"] {
        let output = run(&["bench", "--json", name]);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(name), "{}", stderr(&output));
    }
}

#[test]
fn an_encoder_is_measured_against_its_products() {
    let folder = tempfile::tempdir().unwrap();
    let (file, image) = (folder.path().join("mmproj.gguf"), folder.path().join("image.bmp"));
    std::fs::write(&file, mmproj::gemma3(32)).unwrap();
    std::fs::write(&image, mmproj::bmp(30, 20, 1)).unwrap();
    let flags =
        ["bench", "encoder", "--device", "cpu", "-t", "1", "--iterations", "3", "--mmproj", file.to_str().unwrap()];
    let report: Value = serde_json::from_str(&stdout(run(&[&flags[..], &["--json"]].concat()))).unwrap();
    let number = |report: &Value, key: &str| report[key].as_f64().unwrap_or_else(|| panic!("{key} of {report}"));
    assert_eq!((&report["device"]["kind"], &report["device"]["threads"]), (&"cpu".into(), &1.into()));
    assert_eq!((&report["mmproj"], &report["n_rows"]), (&"mmproj.gguf".into(), &4.into()));
    assert_eq!(report["picture"]["parts"], serde_json::json!([[24, 24]]));
    assert_eq!((&report["picture"]["width"], &report["decode_ms"]), (&1024.into(), &Value::Null));
    // Counted in crates/metal-attention-model/tests/model/vision.rs.
    let operations = [("products", 2 * (27_648 + 129_024 + 2048)), ("attention", 165_888), ("depthwise", 0)];
    for (key, n) in operations {
        assert!((number(&report["operations"], key) - f64::from(n) / 1e9).abs() < 1e-12, "{key} of {report}");
    }
    for (rate, time, n) in [
        ("encoder_gflops", "encoder_ms", 2 * (27_648 + 129_024 + 2048) + 165_888),
        ("products_gflops", "products_ms", 2 * (27_648 + 129_024 + 2048)),
    ] {
        assert_eq!(report[time]["samples"].as_array().unwrap().len(), 3);
        let expected = f64::from(n) / 1e6 / number(&report[time], "median");
        assert!((number(&report, rate) / expected - 1.0).abs() < 1e-9, "{rate} of {report}");
    }
    let ratio = number(&report, "encoder_gflops") / number(&report, "products_gflops");
    assert!((number(&report, "ratio") / ratio - 1.0).abs() < 1e-9, "{report}");
    let text = stdout(run(&[&flags[..], &["--image", image.to_str().unwrap()]].concat()));
    for part in [
        "mmproj.gguf: 30 x 20 pixels, 4 rows in 1 part(s)",
        "  reading the picture ",
        "  encoder ",
        "  products alone ",
        "  ratio ",
    ] {
        assert!(text.contains(part), "{part:?}: {text}");
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_prints_the_results_so_far() {
    use std::process::{Command, Stdio};
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut child = crate::common::program()
        .args(["bench", "--device", "cpu", "--json", "--iterations", "100000000", "--seq-lengths", "1", "-v"])
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    // With -v the program logs the scratch memory once the model is loaded. Ctrl-C is handled from then on.
    while !std::fs::read_to_string(&log).unwrap().contains("scratch") {
        std::thread::sleep(std::time::Duration::from_millis(10));
        assert!(child.try_wait().unwrap().is_none(), "{}", std::fs::read_to_string(&log).unwrap());
    }
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["interrupted"], true);
    assert!(results(&report).len() < 2, "{report}");
}

#[test]
fn a_gpu_is_measured_once_for_all_thread_counts() {
    if !has_gpu() {
        return;
    }
    let args = ["bench", "--device", "gpu:0,cpu", "--threads", "1,2", "--seq-lengths", "20", "--gen-length", "3"];
    let more = ["--depth", "0,6", "--batch", "1,2", "--iterations", "1", "--json"];
    let report: Value = serde_json::from_str(&stdout(run(&[&args[..], &more].concat()))).unwrap();
    let devices: Vec<_> = results(&report).iter().map(|r| (r["device"].clone(), r["threads"].clone())).collect();
    let on = |device, threads| vec![(json!(device), json!(threads)); 5];
    assert_eq!(devices, [on("gpu:0", 1), on("cpu", 1), on("cpu", 2)].concat());
    let listed: Value = serde_json::from_str(&stdout(run(&["devices", "--json"]))).unwrap();
    let gpu = &listed["gpus"][0];
    assert_eq!((&results(&report)[0]["device_name"], &results(&report)[0]["driver"]), (&gpu["name"], &gpu["driver"]));
    let gpu = stdout(run(&["bench", "--gpu", "--seq-lengths", "2", "--gen-length", "0", "--iterations", "1"]));
    assert!(gpu.contains("stories260K (built in)  gpu "), "{gpu}");
}
