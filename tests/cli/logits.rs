//! The command `logits`, against reference logits computed in float64.

use crate::common::{ids, reference, run, stderr, stdout};
use metal_attention::gguf::{GgufFile, GgufWriter, Metadata, TensorDecl};
use serde_json::Value;

/// Reads a float32 `.npy` file: its header, and the values row by row.
fn read_npy(bytes: &[u8]) -> (String, Vec<f32>) {
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let header = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    assert_eq!(header % 64, 0);
    let numbers = bytes[header..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    (String::from_utf8(bytes[10..header].to_vec()).unwrap(), numbers)
}

fn argmax(row: &[f32]) -> u32 {
    row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32
}

/// The first prompt of the reference, with its tokens and logits.
fn case() -> Value {
    reference("stories260K")["cases"][0].clone()
}

/// The case's token ids as the value of `--tokens`.
fn tokens(case: &Value) -> String {
    ids(&case["tokens"]).iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[track_caller]
fn assert_near(got: &[f32], expected: &Value) {
    let expected = expected.as_array().unwrap();
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let difference = (f64::from(*got) - expected.as_f64().unwrap()).abs();
        assert!(difference <= 1e-3, "logit {i}: {got} for {expected}");
    }
}

#[test]
fn npy_has_a_row_for_every_token() {
    let case = case();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("logits.npy");
    let args = ["logits", "--tokens", &tokens(&case), "--cache-type", "f32", "-o", path.to_str().unwrap()];
    assert_eq!(stdout(run(&args)), "");
    let (header, numbers) = read_npy(&std::fs::read(&path).unwrap());
    assert!(header.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (5, 512), }"), "{header}");
    assert_eq!(numbers.len(), 5 * 512);
    let argmaxes: Vec<_> = numbers.chunks_exact(512).map(argmax).collect();
    assert_eq!(argmaxes, ids(&case["argmax_all"]));
    assert_near(&numbers[4 * 512..], &case["logits_last"]);

    // The same logits on stdout, from the prompt's text, evaluated in micro-batches of two tokens.
    let prompt = case["prompt"].as_str().unwrap();
    let output = run(&["logits", "-p", prompt, "--cache-type", "f32", "-o", "-", "--ubatch-size", "2"]);
    let (same_header, same) = read_npy(&output.stdout);
    assert_eq!(same_header, header);
    let worst = same.iter().zip(&numbers).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= 1e-4, "{worst}");
}

#[test]
fn json_has_tokens_and_rows() {
    let case = case();
    let json: Value = serde_json::from_str(&stdout(run(&["logits", "--tokens", &tokens(&case), "--last"]))).unwrap();
    assert_eq!(json["tokens"], case["tokens"]);
    let rows = json["logits"].as_array().unwrap();
    assert_eq!(rows.len(), 1);
    let row: Vec<_> = rows[0].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
    // The default KV cache is F16, so the tolerance is larger.
    let expected = case["logits_last"].as_array().unwrap();
    let worst = row.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b.as_f64().unwrap()).abs()).fold(0.0, f64::max);
    assert!(worst <= 0.05, "{worst}");

    let all: Value = serde_json::from_str(&stdout(run(&["logits", "-p", "Once upon a time"]))).unwrap();
    assert_eq!(all["logits"].as_array().unwrap().len(), 5);
    assert_eq!(all["logits"][4], json["logits"][0]);
}

#[test]
fn token_ids_need_no_vocabulary() {
    let original = &metal_attention_testing::models::architectures()["qwen3.gguf"];
    let file = GgufFile::from_bytes(original).unwrap();
    let mut metadata = Metadata::new();
    for (key, value) in file.metadata().iter().filter(|(key, _)| !key.starts_with("tokenizer.")) {
        metadata.set(key, value.clone());
    }
    metadata.set("qwen3.vocab_size", 272u32);
    let tensors: Vec<_> = file.tensors().iter().map(TensorDecl::from).collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &tensors).unwrap();
    for tensor in file.tensors() {
        writer.write(tensor.bytes()).unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.into_os_string().into_string().unwrap()
    };
    let original = write("qwen3.gguf", original);
    let path = write("no-vocabulary.gguf", &writer.finish().unwrap());

    let logits = |model: &str| stdout(run(&["logits", "-m", model, "--tokens", "1,2,3"]));
    assert_eq!(logits(&path), logits(&original));
    let rejected = run(&["run", "-m", &path, "-p", "Once"]);
    assert_eq!(rejected.status.code(), Some(3));
    let message = stderr(&rejected);
    assert!(message.contains("no-vocabulary.gguf") && message.contains("tokenizer.ggml.model"), "{message}");
}
