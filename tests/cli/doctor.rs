//! The command `doctor`, which examines the machine.

use std::net::TcpListener;

use serde_json::Value;

use crate::common::{program, stderr};

#[test]
fn every_subject_has_a_verdict() {
    let cache = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let doctor = |args: &[&str]| {
        let output = program().env("HF_HOME", cache.path()).arg("doctor").args(args).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let findings: Vec<Value> = serde_json::from_str(&doctor(&["--json", "--port", &port])).unwrap();
    let verdict = |subject: &str| {
        let finding = findings.iter().find(|finding| finding["subject"] == subject);
        finding.unwrap_or_else(|| panic!("{subject}"))["verdict"].as_str().unwrap().to_owned()
    };
    for subject in ["CPU", "GPU", "CUDA", "--device", "memory", "disk"] {
        assert!(["ok", "note"].contains(&&verdict(subject)[..]), "{subject}");
    }
    // There is no model, and a program listens on the port.
    assert_eq!((&verdict("models")[..], &verdict("port")[..]), ("note", "note"));
    let text = doctor(&["--port", &port]);
    assert!(text.contains("\n                      -> metal-attention pull llama3.2 gets one"), "{text}");
    assert!(!text.contains('\x1b'), "{text}");
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0, "nothing is changed");
}

#[cfg(not(feature = "wgpu"))]
#[test]
fn a_build_without_gpus_asks_for_no_driver() {
    let cache = tempfile::tempdir().unwrap();
    let output = program().env("HF_HOME", cache.path()).args(["doctor", "--port", "0"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("install or build the program that has them") && !text.contains("Vulkan driver"), "{text}");
}
