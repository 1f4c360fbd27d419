//! The program on an NVIDIA GPU through CUDA, and what it says where that cannot be: on the software CUDA device
//! (`scripts/software-cuda`), which can be given less memory, an older driver, and an end.
#![cfg(all(target_os = "linux", feature = "cuda"))]

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::common::{program, run, stderr, stdout};
use serde_json::Value;

/// Whether the software CUDA device is there. Where `METAL_ATTENTION_TEST_CUDA` is set some CUDA device has to be.
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

/// Runs the program with settings of the software device.
fn with(settings: &[(&str, &str)], args: &[&str]) -> Output {
    program().args(args).envs(settings.iter().copied()).output().unwrap()
}

const TEXT: [&str; 8] = ["run", "-v", "-p", "Once upon a time", "-n", "8", "--temp", "0"];

#[test]
fn auto_takes_cuda_where_it_can() {
    if !has_software_cuda() {
        return;
    }
    let output = with(&[], &TEXT);
    let log = stderr(&output);
    assert!(log.contains("auto takes CUDA: software CUDA device has room for "), "{log}");
    assert!(log.contains("device: CUDA, software CUDA device"), "{log}");
    let text = stdout(output);
    // Without a Vulkan driver, too, the text is that of the CPU where CUDA cannot be.
    let nowhere = [("VK_DRIVER_FILES", "no-such-driver.json"), ("VK_ICD_FILENAMES", "no-such-driver.json")];
    for (setting, value, why) in [
        ("SOFTWARE_CUDA_MEMORY_MIB", "1", "the model needs "),
        (
            "SOFTWARE_CUDA_DRIVER",
            "12080",
            "the NVIDIA driver is too old: it knows CUDA 12.8, and the kernels need 13.0",
        ),
        ("SOFTWARE_CUDA_ALLOCATIONS", "9", "the GPU has no room for "),
    ] {
        let settings = [&nowhere[..], &[(setting, value)]].concat();
        let output = with(&settings, &TEXT);
        let log = stderr(&output);
        assert!(log.contains(&format!("auto does not take CUDA: {why}")), "{log}");
        assert!(log.contains("auto takes the CPU: "), "{log}");
        assert_eq!(stdout(output), text, "{setting}");
    }
    let of_old = with(&[("SOFTWARE_CUDA_DRIVER", "12080")], &["devices", "--json"]);
    let devices: Value = serde_json::from_str(&stdout(of_old)).unwrap();
    assert!(devices["no_cuda"].as_str().unwrap().contains("driver 580 or later"), "{devices}");
    assert_ne!(devices["auto"]["device"], "cuda:0");
}

#[test]
fn the_device_has_ceilings_and_the_built_in_model_floors() {
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
        // A token is one launch. Of a prompt: an embedding; of each of five layers queries, attention, its output, gate
        // and up, down; logits, the largest.
        let launches = floor["work"]["launches"].as_u64().unwrap();
        assert!(if floor["phase"] == "decode" { launches == 1 } else { launches > 28 }, "{floor}");
    }
    let text = stdout(run(&args));
    assert!(text.starts_with("cuda: software CUDA device, CUDA 13.0\n"), "{text}");
    assert!(text.contains("\n  kernel in a graph "), "{text}");
}

/// What goes wrong on the way ends with a sentence, the exit code that says what it was, and no panic.
#[test]
fn cards_that_share_a_model_are_measured_together() {
    let bench =
        ["bench", "--tensor-parallel", "2", "--seq-lengths", "9", "--gen-length", "2", "--iterations", "1", "--json"];
    let output = with(&[], &[&bench[..], &["--device", "cpu"]].concat());
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("shared out among 2 cards through CUDA alone"), "{}", stderr(&output));
    if !has_software_cuda() {
        return;
    }
    let report: Value =
        serde_json::from_str(&stdout(with(&[], &[&bench[..], &["--device", "cuda"]].concat()))).unwrap();
    let results = report["results"].as_array().unwrap();
    assert_eq!(results.len(), 2);
    assert!(results.iter().all(|result| result["device_name"] == "2 x software CUDA device"), "{report}");
}

#[test]
fn a_full_memory_and_a_lost_device_end_with_a_message() {
    if !has_software_cuda() {
        return;
    }
    let args = [&TEXT[..], &["--device", "cuda"]].concat();
    for n in ["0", "1", "5", "30", "60"] {
        let output = with(&[("SOFTWARE_CUDA_ALLOCATIONS", n)], &args);
        let log = stderr(&output);
        assert_eq!(output.status.code(), Some(5), "{n} pieces: {log}");
        assert!(log.contains("the GPU has no room for ") && !log.contains("panicked"), "{n} pieces: {log}");
    }
    // While weights are packed, in the prompt, in the text, of whose tokens four are a launch.
    let args = ["run", "-v", "-p", "Once upon a time", "-n", "96", "--temp", "0", "--device", "cuda"];
    for n in ["0", "20", "60", "95", "105"] {
        let output = with(&[("SOFTWARE_CUDA_LAUNCHES", n)], &args);
        let log = stderr(&output);
        assert_eq!(output.status.code(), Some(4), "{n} kernels: {log}");
        assert!(log.contains("CUDA could not ") && !log.contains("panicked"), "{n} kernels: {log}");
        assert!(log.contains("unspecified launch failure"), "{n} kernels: {log}");
    }
}

#[test]
fn ctrl_c_ends_a_step() {
    if !has_software_cuda() {
        return;
    }
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tales-4m-q4_0.gguf");
    let (model, long) = (model.to_str().unwrap(), "a ".repeat(200));
    // From setting the device up to the prompt, and the text.
    for (prompt, pauses) in [(&long[..], [100, 1000, 2000]), ("a", [700, 1500, 2500])] {
        for pause in pauses {
            let folder = tempfile::tempdir().unwrap();
            let file = |name: &str| std::fs::File::create(folder.path().join(name)).unwrap();
            let args =
                ["run", "-v", "--device", "cuda", "-m", model, "-p", prompt, "-n", "100000", "--ubatch-size", "8"];
            let mut child =
                program().args(args).stdin(Stdio::null()).stdout(file("out")).stderr(file("err")).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(pause));
            assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
            let status = child.wait().unwrap();
            let log = std::fs::read_to_string(folder.path().join("err")).unwrap();
            assert_eq!(status.code(), Some(130), "after {pause} ms: {log}");
            assert!(!log.contains("panicked"), "after {pause} ms: {log}");
        }
    }
}
