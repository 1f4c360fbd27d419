//! The command `devices`, and the device names that other commands accept.

use crate::common::{run, stderr, stdout};
use serde_json::{Value, json};

/// Runs the program as on a machine without GPU drivers: the Vulkan loader is pointed to a missing file, and the software
/// CUDA device reports a driver that is too old. NVIDIA's driver, where installed, is still found.
#[cfg(all(target_os = "linux", feature = "wgpu"))]
fn without_drivers(args: &[&str]) -> std::process::Output {
    let missing = "no-such-driver.json";
    let settings = [("VK_DRIVER_FILES", missing), ("VK_ICD_FILENAMES", missing), ("SOFTWARE_CUDA_DRIVER", "12080")];
    crate::common::program().args(args).envs(settings).output().unwrap()
}

#[test]
fn devices_are_listed_with_the_choice_of_auto() {
    let output = run(&["devices"]);
    assert_eq!(stderr(&output), "");
    let text = stdout(output);
    assert!(text.starts_with("cpu     ") && text.contains(" physical core"), "{text}");
    assert!(text.lines().last().unwrap().starts_with("auto    "), "{text}");

    let json: Value = serde_json::from_str(&stdout(run(&["devices", "--json"]))).unwrap();
    let keys = |v: &Value| {
        let mut keys: Vec<_> = v.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        keys
    };
    assert_eq!(keys(&json), ["auto", "cpu", "cuda", "gpus", "no_cuda", "no_gpu"]);
    let cuda = json["cuda"].as_array().unwrap();
    assert_eq!(cuda.is_empty(), json["no_cuda"].is_string());
    for gpu in cuda {
        assert_eq!(keys(gpu), ["capability", "device", "driver", "memory_bytes", "multiprocessors", "name"]);
    }
    assert_eq!(keys(&json["cpu"]), ["physical_cores", "simd"]);
    assert_eq!(keys(&json["auto"]), ["device", "reason"]);
    let gpus = json["gpus"].as_array().unwrap();
    assert_eq!(gpus.is_empty(), json["no_gpu"].is_string());
    for (i, gpu) in gpus.iter().enumerate() {
        let documented = [
            "backend",
            "cooperative_matrices",
            "device",
            "driver",
            "f16",
            "index",
            "kind",
            "max_binding_bytes",
            "memory_bytes",
            "name",
            "subgroup_sizes",
            "subgroups",
        ];
        assert_eq!(keys(gpu), documented);
        assert_eq!((&gpu["index"], &gpu["device"]), (&json!(i), &json!(format!("gpu:{i}"))));
        assert!(text.contains(&format!("gpu:{i}   {}\n", gpu["name"].as_str().unwrap())), "{text}");
        // Every Vulkan, Metal and DirectX 12 device supports bindings of 128 MiB.
        assert!(gpu["max_binding_bytes"].as_u64().unwrap() >= 128 << 20, "{gpu}");
    }
    let hardware =
        gpus.iter().find(|gpu| gpu["kind"] != "software").map_or("cpu", |gpu| gpu["device"].as_str().unwrap());
    // The CUDA kernels need compute capability 8.0 or later.
    let major = |gpu: &&Value| gpu["capability"].as_str().unwrap().split('.').next().unwrap().parse::<u32>().unwrap();
    let first = cuda.iter().find(|gpu| major(gpu) >= 8).map(|gpu| gpu["device"].as_str().unwrap());
    assert_eq!(json["auto"]["device"], first.unwrap_or(hardware));
}

#[cfg(all(target_os = "linux", feature = "wgpu"))]
#[test]
fn the_list_and_the_log_agree_on_the_choice_of_auto() {
    let programs: [fn(&[&str]) -> std::process::Output; 2] = [run, without_drivers];
    for program in programs {
        let json: Value = serde_json::from_str(&stdout(program(&["devices", "--json"]))).unwrap();
        let log = stderr(&program(&["run", "-v", "-p", "x", "-n", "1"]));
        if json["auto"]["device"] == "cpu" {
            let reason = json["auto"]["reason"].as_str().unwrap();
            assert!(log.contains(&format!("auto takes the CPU: {reason}\n")), "{reason}\n{log}");
        } else {
            let cuda = json["auto"]["device"].as_str().unwrap().starts_with("cuda");
            assert!(log.contains(if cuda { "auto takes CUDA: " } else { "auto takes the GPU: " }), "{log}");
        }
    }
}

#[cfg(all(target_os = "linux", feature = "wgpu"))]
#[test]
fn without_drivers_the_list_names_what_to_install() {
    let devices: Value = serde_json::from_str(&stdout(without_drivers(&["devices", "--json"]))).unwrap();
    if devices["no_cuda"].is_null() {
        metal_attention_testing::skip("this machine has a driver for CUDA");
        return;
    }
    let advice = "install your GPU's Vulkan driver";
    let text = stdout(without_drivers(&["devices"]));
    assert!(text.contains(advice) && text.contains("\nauto    cpu: no GPU "), "{text}");
    assert_eq!((&devices["gpus"], &devices["auto"]["device"]), (&json!([]), &json!("cpu")));
    assert!(devices["no_gpu"].as_str().unwrap().contains(advice), "{devices}");

    let output = without_drivers(&["run", "--gpu", "-p", "x"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(4), 0));
    let errors = stderr(&output);
    assert!(errors.contains(advice) && errors.contains("--device cpu"), "{errors}");
    let text = stdout(without_drivers(&["run", "-p", "Once upon a time", "--temp", "0", "-n", "4"]));
    assert_eq!(text, ", there was a");
}

#[cfg(not(feature = "wgpu"))]
#[test]
fn a_build_without_gpus_reports_it() {
    let text = stdout(run(&["devices"]));
    assert!(text.contains("built without GPUs"), "{text}");
    for device in ["gpu", "gpu:1", "gpu:nvidia"] {
        let output = run(&["run", "-p", "x", "--device", device]);
        assert_eq!(output.status.code(), Some(4));
        let errors = stderr(&output);
        assert!(errors.contains(&format!("{device:?}")) && errors.contains("built without GPUs"), "{errors}");
    }
    let output = run(&["kernels", "rmsnorm", "--emit", "msl"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("built without GPUs"), "{}", stderr(&output));
}

#[test]
fn invalid_device_names_are_rejected() {
    for (args, code, part) in [
        (&["--device", "tpu"][..], 2, "\"tpu\" is no device"),
        (&["--device", "gpu:"], 2, "\"gpu:\" is no device"),
        (&["--gpu", "--device", "cpu"], 2, "cannot be used with"),
        (&["--device", "gpu:99"], 4, if cfg!(feature = "wgpu") { "no GPU" } else { "gpu:99" }),
        (&["--device", "gpu:nosuch"], 4, if cfg!(feature = "wgpu") { "no GPU" } else { "gpu:nosuch" }),
    ] {
        let text = "Once upon a time there was a little girl who lived near a wood ".repeat(2);
        for command in [&["run"][..], &["logits"], &["perplexity", "-c", "16"]] {
            let output = run(&[command, &["-p", &text], args].concat());
            let errors = stderr(&output);
            assert_eq!(output.status.code(), Some(code), "{command:?} {args:?}: {errors}");
            assert!(errors.contains(part), "{command:?} {args:?}: {errors}");
            assert_eq!(output.stdout, b"");
        }
    }
}
