//! The command `draft`: the drafts of prediction heads and of drafters in files of their own, as lists of ids, as JSON, and with their logits.

use std::path::{Path, PathBuf};

use metal_attention_testing::models::{with_drafters, with_heads};
use serde_json::Value;

use crate::common::{ids, reference, run, stderr, stdout};

/// Writes a model with prediction heads to `folder`.
fn model(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, with_heads(name)).unwrap();
    path
}

/// The first case of a model.
fn case(name: &str) -> Value {
    let cases = reference("heads");
    cases["cases"].as_array().unwrap().iter().find(|case| case["model"] == name).unwrap().clone()
}

fn list(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[test]
fn drafts_are_printed_and_their_logits_written() {
    let folder = tempfile::tempdir().unwrap();
    // A head that proposes all drafts, and a chain of three heads, which proposes no more than three.
    for (name, n) in [("qwen35.gguf", 4), ("step35.gguf", 3)] {
        let (path, case) = (model(folder.path(), name), case(name));
        let (tokens, drafts) = (list(&ids(&case["tokens"])), ids(&case["drafts"]));
        let common = ["draft", "-m", path.to_str().unwrap(), "--tokens", &tokens, "--device", "cpu"];
        let exact = ["--cache-type", "f32", "-n", "4"];
        assert_eq!(stdout(run(&[&common[..], &exact].concat())), format!("{}\n", list(&drafts)));
        let out = folder.path().join("logits.npy");
        let to_file = ["--json", "-o", out.to_str().unwrap()];
        let json: Value = serde_json::from_str(&stdout(run(&[&common[..], &exact, &to_file].concat()))).unwrap();
        assert_eq!(ids(&json["drafts"]), drafts, "{name}");
        let bytes = std::fs::read(&out).unwrap();
        assert_eq!(bytes.len(), 128 + 4 * n * 320, "{name}");
        let row = |i: usize| bytes[128 + 4 * 320 * i..].chunks_exact(4).take(320);
        for (i, &draft) in drafts.iter().enumerate() {
            let logits: Vec<_> = row(i).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            assert!(logits.iter().all(|&x| x <= logits[draft as usize]), "{name}, draft {i}");
        }
        // A single token, which the target does not read.
        assert_eq!(
            stdout(run(&["draft", "-m", path.to_str().unwrap(), "--tokens", "1", "-n", "1"])).lines().count(),
            1
        );
    }
}

#[test]
fn a_model_without_a_head_is_refused() {
    let output = run(&["draft", "-p", "Once upon a time"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("has no prediction head"), "{}", stderr(&output));
    assert!(output.stdout.is_empty());
}

/// Writes a target or a drafter that reads its hidden rows to `folder`.
fn drafter(folder: &Path, name: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, with_drafters(name)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_draft_file_may_need_its_target() {
    let folder = tempfile::tempdir().unwrap();
    let target = drafter(folder.path(), "eagle3.gguf");
    for case in reference("eagle3")["cases"].as_array().unwrap() {
        let draft = drafter(folder.path(), case["drafter"].as_str().unwrap());
        let (tokens, drafts) = (list(&ids(&case["tokens"])), ids(&case["drafts"]));
        let out = folder.path().join("logits.npy");
        let args = ["draft", "-m", &target, "--draft", &draft, "--tokens", &tokens, "-n", "4", "--device", "cpu"];
        let exact = ["--cache-type", "f32", "-o", out.to_str().unwrap()];
        assert_eq!(stdout(run(&[&args[..], &exact].concat())), format!("{}\n", list(&drafts)));
        let rows = std::fs::read(&out).unwrap()[128..].to_vec();
        let logits: Vec<_> = rows.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let n_finite = logits.iter().filter(|logit| logit.is_finite()).count();
        let n_known = if case["drafter"] == "eagle3-drafter.gguf" { 200 } else { 320 };
        assert_eq!((logits.len(), n_finite), (4 * 320, 4 * n_known));
    }
    let draft = drafter(folder.path(), "eagle3-drafter.gguf");
    // The target reads nothing of one token, so that nothing is known of it.
    assert_eq!(stdout(run(&["draft", "-m", &target, "--draft", &draft, "--tokens", "1", "--device", "cpu"])), "\n");
    // The text does not depend on the drafter.
    let text = |more: &[&str]| {
        let args = ["run", "-m", &target, "-p", "a", "-n", "60", "--temp", "0", "--device", "cpu", "--ignore-eos"];
        run(&[&args[..], more].concat())
    };
    let plain = stdout(text(&["--spec", "off"]));
    for more in [&["--model-draft", &draft][..], &["--model-draft", &draft, "--spec", "eagle3"]] {
        assert_eq!(stdout(text(more)), plain);
    }
    for (more, why) in [
        (&["--spec", "ngram", "--model-draft", &draft][..], "has a drafter of the kind \"eagle3\""),
        (&["--spec", "eagle3"], "name that file, too"),
        (&["--model-draft", &draft, "--device-draft", "cpu"], "runs on the model's device"),
        (&["--model-draft", &target, "--spec", "eagle3"], "has a drafter of the kind \"draft\""),
    ] {
        let output = text(more);
        assert!(!output.status.success() && stderr(&output).contains(why), "{}", stderr(&output));
    }
    // Alone it is no model, and the error says what to do.
    let output = run(&["run", "-m", &draft, "-p", "a"]);
    assert!(stderr(&output).contains("--model-draft"), "{}", stderr(&output));
}
