//! The command `compare`, which evaluates the same tokens on two devices and reports the deviation of each layer's output
//! and of the logits (NMSE: normalised mean squared error).

use crate::common::{has_gpu, run, stderr};
use serde_json::{Value, json};

const TALES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tales-4m-q4_0.gguf");
const PROMPT: &str = "There was a king who had";

fn compare(args: &[&str]) -> Value {
    let output = run(&[&["compare", "--json"], args].concat());
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", stderr(&output)))
}

fn nmse(deviation: &Value) -> f64 {
    deviation["nmse"].as_f64().unwrap()
}

#[test]
fn a_device_does_not_deviate_from_itself() {
    let found = compare(&["-p", "Once upon a time", "--devices", "cpu,cpu", "--exact", "--cache-type", "f32"]);
    assert_eq!((&found["reference"], &found["ok"]), (&json!("cpu"), &json!(true)));
    assert_eq!(found["tokens"], json!([1, 403, 407, 261, 378]));
    let comparisons = found["comparisons"].as_array().unwrap();
    let ways: Vec<_> = comparisons.iter().map(|c| c["way"].as_str().unwrap()).collect();
    assert_eq!(ways, ["prefill", "decode"]);
    for c in comparisons {
        let nothing = json!({"nmse": 0.0, "position": 0, "max_difference": 0.0});
        assert_eq!((&c["layers"], &c["logits"]), (&json!(vec![nothing.clone(); 5]), &nothing));
        assert_eq!((&c["device"], &c["first_past"], &c["same_choices"]), (&json!("cpu"), &Value::Null, &json!(5)));
        assert_eq!((&c["choice"], &c["reference_choice"]), (&json!(432), &json!(432)));
    }
}

#[test]
fn quantised_activations_deviate_a_little() {
    let args = ["-m", TALES, "-p", PROMPT, "--devices", "cpu,cpu", "--cache-type", "f32"];
    let found = compare(&args);
    assert_eq!(found["ok"], true);
    let comparisons = found["comparisons"].as_array().unwrap();
    for c in comparisons {
        let layers = c["layers"].as_array().unwrap();
        assert_eq!(layers.len(), 4);
        // 8-bit activations with one scale for 32 of them have a relative error of about 1 in 300, that is an NMSE of
        // 1e-5, which grows or shrinks from layer to layer.
        for deviation in layers.iter().chain([&c["logits"]]) {
            assert!((1e-7..1e-3).contains(&nmse(deviation)), "{c}");
        }
        assert_eq!(c["same_choices"], 7);
    }

    // With a tolerance below that error the first layer is named, and the exit code is 1.
    let strict = [&["compare", "--tolerance", "1e-7", "--decode"], &args[..]].concat();
    let output = run(&strict);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("1 comparison past the tolerance of 1e-7"), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("cpu against cpu, 7 tokens one by one\n"), "{text}");
    assert!(text.contains("layer 0 is the first past the tolerance"), "{text}");
    assert!(text.contains("7 of 7 equal"), "{text}");
    assert!(!text.contains("together"), "{text}");
}

#[test]
fn the_gpu_agrees_with_the_cpu() {
    if !has_gpu() {
        return;
    }
    // Short prompts, and one that is long enough for GEMM kernels.
    let long =
        format!("{PROMPT} three daughters, and the youngest of them was so fair that the sun itself stood still");
    for args in [&["-p", "Once upon a time"][..], &["-m", TALES, "-p", PROMPT], &["-m", TALES, "-p", &long]] {
        let found = compare(&[args, &["--devices", "cpu,gpu", "--cache-type", "f32", "--exact"]].concat());
        for c in found["comparisons"].as_array().unwrap() {
            // Both sum in F32, in different orders.
            let layers = c["layers"].as_array().unwrap();
            assert!(layers.iter().chain([&c["logits"]]).all(|d| nmse(d) < 1e-8), "{c}");
        }
    }
    let found = compare(&["-m", TALES, "-p", PROMPT]);
    assert_eq!(found["ok"], true, "{found}");
}

#[test]
fn encoders_are_compared_in_prefill_only() {
    let folder = tempfile::tempdir().unwrap();
    let model = |name: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, &metal_attention_testing::models::more_architectures()[name]).unwrap();
        path.into_os_string().into_string().unwrap()
    };
    // An encoder without an output matrix, and one with it, whose attention is bidirectional.
    for (name, output, n_layer) in [("bert.gguf", "states", 3), ("llama-embed.gguf", "logits", 3)] {
        let path = model(name);
        let args = ["-m", &path, "--tokens", "3,5,7,11", "--devices", "cpu,cpu", "--cache-type", "f32"];
        let found = compare(&args);
        let comparisons = found["comparisons"].as_array().unwrap();
        assert_eq!((&found["ok"], comparisons.len()), (&json!(true), 1), "{name}: {found}");
        let c = &comparisons[0];
        assert_eq!((&c["way"], c["layers"].as_array().unwrap().len()), (&json!("prefill"), n_layer), "{name}");
        let layers = c["layers"].as_array().unwrap();
        // Some products quantise activations to 8 bits even with F32 weights.
        assert!(layers.iter().chain([&c[output]]).all(|d| nmse(d) < 1e-3), "{name}: {c}");
        assert_eq!(c["choice"].is_null(), output == "states", "{name}");
        let one_by_one = run(&[&["compare", "--decode"], &args[..]].concat());
        assert_eq!(one_by_one.status.code(), Some(1), "{name}");
        assert!(stderr(&one_by_one).contains("sees the whole text"), "{name}: {}", stderr(&one_by_one));
    }
}

#[test]
fn invalid_arguments_are_rejected() {
    for (args, code, part) in [
        (&["--devices", "cpu", "-p", "x"][..], 2, "two or more"),
        (&["--devices", "cpu,tpu", "-p", "x"], 2, "\"tpu\" is no device"),
        (&["--devices", "cpu,cpu"], 2, "--tokens"),
        (&["--devices", "cpu,cpu", "--tokens", "1,512"], 2, "512"),
        (&["--devices", "cpu,cpu", "--tokens", "1,2,3", "-c", "2"], 2, "room for 2"),
        (&["--devices", "cpu,cpu", "-p", "x", "--tolerance", "-1"], 2, "0 or more"),
        (&["--devices", "cpu,cpu", "-p", "x", "--prefill", "--decode"], 2, "cannot be used with"),
        (&["--devices", "cpu,gpu:nosuch", "-p", "x"], 4, "gpu"),
    ] {
        let output = run(&[&["compare"], args].concat());
        let errors = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
        assert!(errors.to_lowercase().contains(part), "{args:?}: {errors}");
        assert_eq!(output.stdout, b"");
    }
}
