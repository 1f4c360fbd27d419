//! The flag `--profile`: the table of kernel times on stderr and the trace file (Chrome's trace format), on the CPU and on
//! the first GPU.

use std::collections::BTreeMap;

#[cfg(feature = "wgpu")]
use crate::common::has_gpu;
use crate::common::{run, stderr, stdout};
use serde_json::Value;

const RUN: [&str; 7] = ["run", "-p", "Once upon a time", "--temp", "0", "-n", "6"];

/// Parses the table: for each phase (prefill, decode) its lines as (kernel, calls, total in ms).
fn table(stderr: &str) -> BTreeMap<String, Vec<(String, usize, f64)>> {
    let mut phases = BTreeMap::<_, Vec<_>>::new();
    let mut phase = String::new();
    for line in stderr.lines() {
        if let Some((name, _)) = line.split_once(": ").filter(|(name, _)| ["prefill", "decode"].contains(name)) {
            name.clone_into(&mut phase);
        } else if line.starts_with("  ") && !phase.is_empty() && !line.starts_with("  kernel ") {
            let mut words: Vec<_> = line.split_whitespace().collect();
            assert!(words.len() >= 5, "{line}");
            let numbers = words.split_off(words.len() - 4);
            let row = (words.join(" "), numbers[0].parse().unwrap(), numbers[1].parse().unwrap());
            phases.entry(phase.clone()).or_default().push(row);
        }
    }
    phases
}

/// Profiles a run on `device`. Checks that the text is that of a run without profile, that table and trace agree, and that the
/// CPU's kernels lie within their steps. Returns the number of calls by phase and kernel.
fn profile(device: &str) -> BTreeMap<String, BTreeMap<String, usize>> {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let plain = stdout(run(&[&RUN[..], &["--device", device]].concat()));
    let output = run(&[&RUN[..], &["--device", device, "--profile", trace.to_str().unwrap()]].concat());
    let errors = stderr(&output);
    assert_eq!(stdout(output), plain);

    let trace: Value = serde_json::from_str(&std::fs::read_to_string(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let mut calls = BTreeMap::<String, BTreeMap<String, usize>>::new();
    let mut times = BTreeMap::<String, f64>::new();
    let mut step_ends = 0.0;
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let (start, duration) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        assert!(start >= 0.0 && duration >= 0.0, "{event}");
        let phase = event["cat"].as_str().unwrap().to_owned();
        if event["tid"] == 1 {
            assert!(start >= step_ends, "steps follow one another");
            step_ends = start + duration;
        } else {
            // A GPU's kernels are timed in a second run of the step, which may take longer.
            let is_timed_apart = device != "cpu";
            assert!(is_timed_apart || start + duration <= step_ends + 1e-3, "kernels lie in their step: {event}");
            *calls.entry(phase.clone()).or_default().entry(event["name"].as_str().unwrap().into()).or_default() += 1;
            *times.entry(phase).or_default() += duration;
        }
    }
    let table = table(&errors);
    assert_eq!(table.len(), 2, "{errors}");
    for (phase, rows) in table {
        let (all, kernels) = rows.split_last().unwrap();
        let from_trace: usize = calls[&phase].values().sum();
        assert_eq!((all.0.as_str(), all.1), ("all kernels", from_trace));
        let in_table: BTreeMap<_, _> = kernels.iter().map(|(kernel, calls, _)| (kernel.clone(), *calls)).collect();
        assert_eq!(in_table, calls[&phase]);
        let total: f64 = kernels.iter().map(|row| row.2).sum();
        // Each line is rounded to a thousandth of a ms.
        let rounding = 0.0005 * (kernels.len() + 1) as f64;
        assert!((total - all.2).abs() <= rounding && (times[&phase] / 1e3 - all.2).abs() <= rounding, "{errors}");
        assert!(kernels.is_sorted_by(|a, b| a.2 >= b.2), "{errors}");
    }
    calls
}

#[test]
fn the_profile_of_the_cpu_has_every_kernel() {
    let calls = profile("cpu");
    // The model has five layers. Prefill is one step, which gives the first token; five decode steps follow.
    for (phase, steps) in [("prefill", 1), ("decode", 5)] {
        let expected: BTreeMap<String, usize> = [
            ("embedding", 1),
            ("rope_table", 1),
            ("norm", 11),
            ("matmul_qkv", 5),
            ("rope_kv_append", 5),
            ("attention", 5),
            ("matmul_attn_output", 5),
            ("matmul_gate_up", 5),
            ("ffn_activation", 5),
            ("matmul_down", 5),
            ("matmul_output", 1),
        ]
        .map(|(kernel, calls)| (kernel.to_owned(), calls * steps))
        .into();
        assert_eq!(calls[phase], expected, "{phase}");
    }
}

#[test]
fn sequences_evaluated_in_parallel_have_rows_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let args = ["bench", "--device", "cpu", "-t", "2", "--seq-lengths", "0", "--gen-length", "3", "--batch", "4"];
    let flags = ["--iterations", "1", "--profile", trace.to_str().unwrap()];
    let output = run(&[&args[..], &flags].concat());
    let errors = stderr(&output);
    assert!(output.status.success(), "{errors}");
    assert!(errors.contains("decode: 3 steps, 12 tokens, "), "{errors}");
    assert!(errors.contains(" ms, in 2 parts side by side, whose times are added up\n"), "{errors}");
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let in_row = |row: u32| events.iter().filter(|e| e["ph"] == "X" && e["tid"] == row).collect::<Vec<_>>();
    let (steps, kernels) = (in_row(1), [in_row(2), in_row(3)]);
    assert_eq!((steps.len(), kernels[0].len(), in_row(4).len()), (3, kernels[1].len(), 0));
    let times = |e: &Value| (e["ts"].as_f64().unwrap(), e["ts"].as_f64().unwrap() + e["dur"].as_f64().unwrap());
    for row in kernels {
        let per_step = row.len() / steps.len();
        for (run, i) in row.iter().zip(0..) {
            let (step, kernel) = (times(steps[i / per_step]), times(run));
            assert!(step.0 <= kernel.0 && kernel.1 <= step.1 + 1e-3, "kernels lie in their step: {run}");
        }
    }
}

#[test]
fn the_file_is_optional_and_cannot_be_stdin() {
    let output = run(&[&RUN[..], &["--device", "cpu", "--profile"]].concat());
    assert_eq!(table(&stderr(&output)).len(), 2);
    assert!(output.status.success());
    let output = run(&["run", "--profile", "-"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("put - before --profile"), "{}", stderr(&output));
    let missing = run(&[&RUN[..], &["--device", "cpu", "--profile", "/no/such/folder/trace.json"]].concat());
    assert_eq!(missing.status.code(), Some(1));
    assert!(stderr(&missing).contains("/no/such/folder/trace.json"), "{}", stderr(&missing));
}

#[cfg(feature = "wgpu")]
#[test]
fn the_profile_of_a_gpu_has_every_dispatch() {
    use std::sync::Arc;

    use metal_attention::wgpu::{WgpuDevice, WgpuOptions};
    use metal_attention::{Model, SessionOptions, WgpuExecutor};

    if !has_gpu() {
        return;
    }
    let gpu = Arc::new(WgpuDevice::open(&WgpuOptions::default()).unwrap());
    if let Err(error) = gpu.clock() {
        let output = run(&[&RUN[..], &["--gpu", "--profile"]].concat());
        assert_eq!(output.status.code(), Some(4));
        assert!(stderr(&output).contains(&error.to_string()), "{}", stderr(&output));
        return;
    }
    let calls = profile("gpu");
    let output = run(&[&RUN[..], &["--gpu", "--profile"]].concat());
    assert!(stderr(&output).contains("without a profile greedy steps are queued ahead"), "{}", stderr(&output));
    let model = Model::built_in().unwrap();
    let options = SessionOptions { n_ctx: 64, ..Default::default() };
    let pass = WgpuExecutor::session(gpu, model.loaded(), &options).unwrap();
    // Prefill of five tokens, then decode steps. The context is too short for split-KV, so no merge kernels run.
    for (phase, n_tokens, steps) in [("prefill", 5, 1), ("decode", 1, 5)] {
        let mut expected = BTreeMap::<String, usize>::new();
        for kernel in pass.dispatches(n_tokens).into_iter().filter(|kernel| !kernel.ends_with("_merge")) {
            *expected.entry(kernel.to_owned()).or_default() += steps;
        }
        assert_eq!(calls[phase], expected, "{phase}");
        assert_eq!(pass.launches(n_tokens, 9) * steps, calls[phase].values().sum::<usize>());
    }
}
