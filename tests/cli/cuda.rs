//! The command line on CUDA devices, and its messages where CUDA cannot be used. The tests run on the software CUDA device
//! (`scripts/software-cuda`), whose environment variables limit its memory, report an older driver, and make an allocation
//! or a launch fail.
#![cfg(all(target_os = "linux", feature = "cuda"))]

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::{program, run, stderr, stdout};
use serde_json::Value;

/// Whether the software CUDA device is found; otherwise the test is recorded as skipped. If `METAL_ATTENTION_TEST_CUDA`
/// is set and there is no CUDA device at all, the test fails.
fn has_software_cuda() -> bool {
    let devices: Value = serde_json::from_str(&stdout(run(&["devices", "--json"]))).unwrap();
    let name = &devices["cuda"][0]["name"];
    if name == "software CUDA device" {
        return true;
    }
    let missing = name.is_null() && std::env::var_os("METAL_ATTENTION_TEST_CUDA").is_some();
    assert!(!missing, "{}", devices["no_cuda"]);
    metal_attention_testing::skip("there is no software CUDA device");
    false
}

/// Runs the program with `settings` of the software device in its environment.
fn run_with(settings: &[(&str, &str)], args: &[&str]) -> Output {
    program().args(args).envs(settings.iter().copied()).output().unwrap()
}

/// The arguments of a short greedy generation with the log on.
const GENERATE: [&str; 8] = ["run", "-v", "-p", "Once upon a time", "-n", "8", "--temp", "0"];

#[test]
fn auto_takes_cuda_where_it_can() {
    if !has_software_cuda() {
        return;
    }
    let output = run_with(&[], &GENERATE);
    let log = stderr(&output);
    assert!(log.contains("auto takes CUDA: software CUDA device has room for "), "{log}");
    assert!(log.contains("device: CUDA, software CUDA device"), "{log}");
    let text = stdout(output);
    // Without a Vulkan driver and without a usable CUDA device, `auto` chooses the CPU, which generates the same text.
    let no_vulkan = [("VK_DRIVER_FILES", "no-such-driver.json"), ("VK_ICD_FILENAMES", "no-such-driver.json")];
    for (setting, value, why) in [
        ("SOFTWARE_CUDA_MEMORY_MIB", "1", "the model needs "),
        (
            "SOFTWARE_CUDA_DRIVER",
            "12080",
            "the NVIDIA driver is too old: it knows CUDA 12.8, and the kernels need 13.0",
        ),
        ("SOFTWARE_CUDA_ALLOCATIONS", "9", "the GPU has no room for "),
    ] {
        let settings = [&no_vulkan[..], &[(setting, value)]].concat();
        let output = run_with(&settings, &GENERATE);
        let log = stderr(&output);
        assert!(log.contains(&format!("auto does not take CUDA: {why}")), "{log}");
        assert!(log.contains("auto takes the CPU: "), "{log}");
        assert_eq!(stdout(output), text, "{setting}");
    }
    let old_driver = run_with(&[("SOFTWARE_CUDA_DRIVER", "12080")], &["devices", "--json"]);
    let devices: Value = serde_json::from_str(&stdout(old_driver)).unwrap();
    assert!(devices["no_cuda"].as_str().unwrap().contains("driver 580 or later"), "{devices}");
    assert_ne!(devices["auto"]["device"], "cuda:0");
}

#[test]
fn roofline_reports_ceilings_of_the_device_and_floors_of_the_model() {
    if !has_software_cuda() {
        return;
    }
    let args = ["bench", "roofline", "--quick", "--n-prompt", "20", "--device", "cuda"];
    let report: Value = serde_json::from_str(&stdout(run(&[&args[..], &["--json"]].concat()))).unwrap();
    assert_eq!(report["device"]["kind"], "cuda");
    assert_eq!(report["ceilings"]["matrix_type"], "half");
    let positive = |value: &Value, keys: &[&str]| {
        for key in keys {
            assert!(value[key].as_f64().is_some_and(|v| v > 0.0 && v.is_finite()), "{key} of {value}");
        }
    };
    positive(&report["ceilings"], &["read_bytes", "copy_bytes", "matrix", "f32"]);
    let launches = &report["ceilings"]["launches"];
    positive(launches, &["kernel_in_graph_us", "kernel_us", "round_trip_us", "graph_us"]);
    for batch in report["batch_scaling"]["batches"].as_array().unwrap() {
        positive(batch, &["n_tokens", "us_per_token", "speedup"]);
    }
    for floor in report["floors"].as_array().unwrap() {
        positive(floor, &["bytes_us", "multiplications_us", "launches_us", "floor_us", "measured_us"]);
        // A decode step is one launch of the persistent kernel. A prefill has separate launches: the embedding; QKV,
        // attention, its output, gate and up, and down in each of five layers; the logits and the argmax.
        let launches = floor["work"]["launches"].as_u64().unwrap();
        assert!(if floor["phase"] == "decode" { launches == 1 } else { launches > 28 }, "{floor}");
    }
    let text = stdout(run(&args));
    assert!(text.starts_with("cuda: software CUDA device, CUDA 13.0\n"), "{text}");
    assert!(text.contains("\n  kernel in a graph "), "{text}");
}

#[test]
fn bench_measures_ranks_of_tensor_parallelism_together() {
    let bench =
        ["bench", "--tensor-parallel", "2", "--seq-lengths", "9", "--gen-length", "2", "--iterations", "1", "--json"];
    let output = run_with(&[], &[&bench[..], &["--device", "cpu"]].concat());
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("shared out among 2 cards through CUDA alone"), "{}", stderr(&output));
    if !has_software_cuda() {
        return;
    }
    let report: Value =
        serde_json::from_str(&stdout(run_with(&[], &[&bench[..], &["--device", "cuda"]].concat()))).unwrap();
    let results = report["results"].as_array().unwrap();
    assert_eq!(results.len(), 2);
    assert!(results.iter().all(|result| result["device_name"] == "2 x software CUDA device"), "{report}");
}

/// Failed allocations and launches end the program with a message and an exit code, without a panic.
#[test]
fn full_device_memory_and_a_lost_device_end_with_a_message() {
    if !has_software_cuda() {
        return;
    }
    let args = [&GENERATE[..], &["--device", "cuda"]].concat();
    for n in ["0", "1", "5", "30", "60"] {
        let output = run_with(&[("SOFTWARE_CUDA_ALLOCATIONS", n)], &args);
        let log = stderr(&output);
        assert_eq!(output.status.code(), Some(5), "{n} pieces: {log}");
        assert!(log.contains("the GPU has no room for ") && !log.contains("panicked"), "{n} pieces: {log}");
    }
    // Launches fail while weights are repacked, in prefill, and in decode, which has one launch for four tokens.
    let args = ["run", "-v", "-p", "Once upon a time", "-n", "96", "--temp", "0", "--device", "cuda"];
    for n in ["0", "20", "60", "95", "105"] {
        let output = run_with(&[("SOFTWARE_CUDA_LAUNCHES", n)], &args);
        let log = stderr(&output);
        assert_eq!(output.status.code(), Some(4), "{n} kernels: {log}");
        assert!(log.contains("CUDA could not ") && !log.contains("panicked"), "{n} kernels: {log}");
        assert!(log.contains("unspecified launch failure"), "{n} kernels: {log}");
    }
}

#[test]
fn ctrl_c_interrupts_prefill_and_decode() {
    if !has_software_cuda() {
        return;
    }
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tales-4m-q4_0.gguf");
    let (model, long) = (model.to_str().unwrap(), "a ".repeat(200));
    // The signal arrives in device initialisation, prefill or decode, depending on the pause in milliseconds.
    for (prompt, pauses) in [(&long[..], [100, 1000, 2000]), ("a", [700, 1500, 2500])] {
        for pause in pauses {
            let folder = tempfile::tempdir().unwrap();
            let file = |name: &str| std::fs::File::create(folder.path().join(name)).unwrap();
            let args = [
                "run",
                "-v",
                "--device",
                "cuda",
                "-m",
                model,
                "-c",
                "100000",
                "-p",
                prompt,
                "-n",
                "100000",
                "--ignore-eos",
                "--ubatch-size",
                "8",
            ];
            let mut child =
                program().args(args).stdin(Stdio::null()).stdout(file("out")).stderr(file("err")).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(pause));
            // On a busy machine the program may not have begun to handle signals, which precedes its first line.
            let start = Instant::now();
            while file_is_empty(&folder.path().join("err")) && start.elapsed() < Duration::from_secs(30) {
                std::thread::sleep(Duration::from_millis(10));
            }
            assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
            let status = child.wait().unwrap();
            let log = std::fs::read_to_string(folder.path().join("err")).unwrap();
            assert_eq!(status.code(), Some(130), "after {pause} ms: {log}");
            assert!(!log.contains("panicked"), "after {pause} ms: {log}");
        }
    }
}

fn file_is_empty(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|file| file.len() == 0)
}
