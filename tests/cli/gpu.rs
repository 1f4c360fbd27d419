//! The command line's GPU flags (wgpu), on the first GPU of the machine; a software Vulkan driver suffices.
#![cfg(feature = "wgpu")]

use crate::common::{has_gpu, reference, run, stderr, stdout};

const PROMPT: &str = "Once upon a time";

/// The text of the reference's 128 greedy tokens after [`PROMPT`].
fn story() -> String {
    let case = &reference("stories260K")["cases"][0];
    let ids = crate::common::ids(&case["greedy"]).iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let text = stdout(run(&["detokenize", &format!("1,403,407,261,378,{ids}")]));
    text.strip_prefix(PROMPT).unwrap().to_owned()
}

#[test]
fn every_name_of_the_gpu_generates_the_reference_story() {
    if !has_gpu() {
        return;
    }
    let devices: serde_json::Value = serde_json::from_str(&stdout(run(&["devices", "--json"]))).unwrap();
    let name = devices["gpus"][0]["name"].as_str().unwrap();
    let by_name = format!("gpu:{}", name[..name.len().min(8)].to_uppercase());
    let story = story();
    for flags in [&["--gpu"][..], &["--device", "gpu"], &["--device", "gpu:0"], &["--device", &by_name]] {
        let output = run(&[&["run", "-p", PROMPT, "--temp", "0", "-n", "128", "--cache-type", "f32"], flags].concat());
        assert_eq!(stdout(output), story, "{flags:?}");
    }
}

#[test]
fn verbose_logs_the_gpu_and_the_default_log_does_not() {
    if !has_gpu() {
        return;
    }
    let args = ["run", "--gpu", "-p", PROMPT, "--temp", "0", "-n", "4"];
    let quiet = stderr(&run(&args));
    let labels: Vec<_> = quiet.lines().skip(1).map(|line| line.split("  ").next().unwrap()).collect();
    let expected = ["load time", "prompt", "generated", "time to first token", "peak memory"];
    assert_eq!(labels, expected[..if cfg!(target_os = "linux") { 5 } else { labels.len() }]);

    let verbose = stderr(&run(&[&args[..], &["-v"]].concat()));
    for part in ["device: GPU, ", "weights: ", "KV cache: ", " for 512 tokens", "scratch: ", "pipelines: "] {
        assert!(verbose.contains(part), "{part:?}: {verbose}");
    }
}

#[test]
fn a_context_beyond_the_memory_of_the_gpu_is_5() {
    if !has_gpu() {
        return;
    }
    for n_ctx in ["999999999", "999999999999", "18446744073709551615"] {
        let output = run(&["run", "--gpu", "-p", "x", "-c", n_ctx]);
        let errors = stderr(&output);
        assert_eq!(output.status.code(), Some(5), "{n_ctx}: {errors}");
        assert!(errors.contains("MiB") && errors.contains("-c"), "{errors}");
        assert_eq!(output.stdout, b"");
    }
}

#[test]
fn perplexity_and_logits_agree_on_cpu_and_gpu() {
    if !has_gpu() {
        return;
    }
    let dir = tempfile::TempDir::new().unwrap();
    let held_out = crate::common::held_out(dir.path());
    let perplexity = |device| {
        let args =
            ["perplexity", "-f", &held_out, "-c", "64", "--chunks", "2", "--json", "--cache-type", "f32", "--device"];
        let json: serde_json::Value = serde_json::from_str(&stdout(run(&[&args[..], &[device]].concat()))).unwrap();
        json["perplexity"].as_f64().unwrap()
    };
    let (cpu, gpu) = (perplexity("cpu"), perplexity("gpu"));
    assert!((gpu / cpu - 1.0).abs() < 1e-4, "{gpu} for {cpu}");

    let logits = |device| {
        let text = stdout(run(&["logits", "-p", PROMPT, "--cache-type", "f32", "--device", device]));
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json["logits"].as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap().clone()).collect::<Vec<_>>()
    };
    let (cpu, gpu) = (logits("cpu"), logits("gpu"));
    assert_eq!((cpu.len(), gpu.len()), (5 * 512, 5 * 512));
    for (i, (got, expected)) in gpu.iter().zip(&cpu).enumerate() {
        let difference = (got.as_f64().unwrap() - expected.as_f64().unwrap()).abs();
        assert!(difference <= 1e-3, "logit {i}: {got} for {expected}");
    }
}
