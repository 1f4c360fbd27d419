//! The command `bench roofline`, which measures a device's ceilings (bandwidth, arithmetic, launches) and compares a model's
//! speed with the floors that follow from them. The tests check the report's structure, not the speeds.

use crate::common::{has_gpu, run, stderr, stdout};
use serde_json::Value;

/// Checks that `value` is an object whose `keys` are positive finite numbers.
fn positive(value: &Value, keys: &[&str]) {
    for key in keys {
        let number = value[key].as_f64();
        assert!(number.is_some_and(|v| v > 0.0 && v.is_finite()), "{key} of {value}");
    }
}

/// Runs the command with the flags `device`, checks the parts of the report that all devices share, and returns it.
fn roofline(device: &[&str]) -> Value {
    let flags = ["bench", "roofline", "--quick", "--json", "--n-prompt", "20"];
    let report: Value = serde_json::from_str(&stdout(run(&[&flags[..], device].concat()))).unwrap();
    positive(&report["ceilings"], &["read_bytes", "copy_bytes", "f32"]);
    let batches = report["batch_scaling"]["batches"].as_array().unwrap();
    let n_tokens: Vec<_> = batches.iter().map(|batch| batch["n_tokens"].as_u64().unwrap()).collect();
    assert_eq!(n_tokens, [1, 2, 4, 8, 16]);
    for batch in batches {
        positive(batch, &["us_per_token", "speedup"]);
    }
    assert_eq!(batches[0]["speedup"], 1.0);
    assert_eq!(report["batch_scaling"]["matrix"], "blk.0.ffn_gate.weight");
    assert_eq!(report["batch_scaling"]["layers"], 5);
    assert_eq!(report["model"]["matrix_bytes"].as_u64(), Some(4 * (5 * 64 * 708 + 512 * 64)));
    let floors = report["floors"].as_array().unwrap();
    assert_eq!(floors.len(), 2);
    for (floor, (phase, n_prompt, n_gen)) in floors.iter().zip([("prefill", 20, 0), ("decode", 0, 4)]) {
        assert_eq!((&floor["phase"], &floor["n_prompt"]), (&phase.into(), &n_prompt.into()));
        assert_eq!((&floor["n_gen"], &floor["depth"]), (&n_gen.into(), &0.into()));
        let parts = ["bytes_us", "multiplications_us", "floor_us", "measured_us", "percent"];
        positive(floor, &parts);
        positive(floor, &["floor_tokens_per_second", "tokens_per_second"]);
        let number = |key: &str| floor[key].as_f64().unwrap();
        let longest = number("bytes_us").max(number("multiplications_us")).max(number("launches_us"));
        assert_eq!(number("floor_us"), longest);
        let percent = 100.0 * longest / number("measured_us");
        assert!((number("percent") / percent - 1.0).abs() < 1e-9);
    }
    report
}

#[test]
fn the_report_of_the_cpu_has_ceilings_and_floors() {
    for threads in ["1", "2"] {
        let report = roofline(&["--device", "cpu", "--threads", threads]);
        assert_eq!(report["device"]["kind"], "cpu");
        assert_eq!(report["device"]["threads"].to_string(), threads);
        assert_eq!(report["ceilings"]["matrix_type"], "int8");
        positive(&report["ceilings"], &["matrix"]);
        positive(&report["ceilings"]["launches"], &["region_us"]);
        let launches = report["floors"][0]["work"]["launches"].as_u64().unwrap();
        assert_eq!(launches > 0, threads == "2", "regions of one thread are none: {launches}");
    }
}

#[test]
fn the_report_of_a_gpu_has_ceilings_and_floors() {
    if !has_gpu() {
        return;
    }
    let report = roofline(&["--gpu"]);
    assert_eq!(report["device"]["kind"], "gpu");
    let launches = ["dispatch_us", "dispatch_queued_us", "submission_us", "submission_queued_us"];
    positive(&report["ceilings"]["launches"], &launches);
    for floor in report["floors"].as_array().unwrap() {
        positive(&floor["work"], &["bytes", "f32_multiplications", "launches"]);
    }
}

#[test]
fn the_report_without_json_is_a_readable_list() {
    let output = run(&["bench", "roofline", "--quick", "--device", "cpu"]);
    let text = stdout(output);
    for part in ["ceilings\n", "  parallel region ", "tokens multiplied at once with ", "  prefill 32 ", "  decode @0 "]
    {
        assert!(text.contains(part), "{part:?}: {text}");
    }
}

#[test]
fn invalid_arguments_are_rejected() {
    for args in [&["--n-prompt", "0"][..], &["--threads", "0"], &["--device", "tpu"]] {
        let output = run(&[&["bench", "roofline", "--quick"], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
    }
}
