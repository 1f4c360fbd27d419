//! Draft models: the command `draft --draft`, and pairs that `synth --mtp-agree` writes.

use std::path::Path;

use metal_attention::gguf::GgufFile;
use metal_attention::{BatchToken, Device, EngineOptions, Model, ModelOptions};
use metal_attention_model::{ModelShape, ModelSpec};
use serde::Deserialize;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{ids, run, stderr, stdout};

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
}

/// What llama.cpp drafts after some tokens.
#[derive(Deserialize)]
struct Case {
    name: String,
    target: String,
    drafter: String,
    tokens: Vec<u32>,
    drafts: Vec<u32>,
    /// The logits from which each draft was taken.
    logits: Option<Vec<Vec<f64>>>,
}

#[test]
fn draft_prints_what_llama_cpp_drafts_and_writes_its_logits() {
    let dir = TempDir::new().unwrap();
    for (name, bytes) in metal_attention_testing::models::draft_models() {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let reference: Reference = metal_attention_testing::reference::read("draft-models");
    for case in reference.cases {
        let (target, drafter, out) = (path(&case.target), path(&case.drafter), path("logits.npy"));
        let tokens: Vec<_> = case.tokens.iter().map(u32::to_string).collect();
        let tokens = tokens.join(",");
        let args = ["draft", "-m", &target, "--draft", &drafter, "--tokens", &tokens, "-n", "4", "--device", "cpu"];
        let json = stdout(run(&[&args[..], &["--cache-type", "f32", "--json", "-o", &out]].concat()));
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(ids(&json["drafts"]), case.drafts, "{}", case.name);
        let file = std::fs::read(&out).unwrap();
        assert!(file[..128].windows(8).any(|text| text == b"(4, 320)"), "{}", case.name);
        let got: Vec<f32> =
            file[128..].chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
        assert_eq!(got.len(), 4 * 320);
        for (row, want) in got.chunks(320).zip(case.logits.iter().flatten()) {
            let error: f64 = row.iter().zip(want).map(|(&g, w)| (f64::from(g) - w).powi(2)).sum();
            let of_want: f64 = want.iter().map(|w| w.powi(2)).sum();
            assert!(error <= 1e-7 * of_want, "{}: {error} of {of_want}", case.name);
        }
        assert_eq!(stdout(run(&args)).trim(), format!("{:?}", case.drafts).replace(['[', ']', ' '], ""));
    }
}

/// The ordinary tokens of the built-in vocabulary.
const ORDINARY: std::ops::RangeInclusive<u32> = 259..=511;

/// The token that comes after an ordinary one.
fn next(id: u32) -> u32 {
    if id == *ORDINARY.end() { *ORDINARY.start() } else { id + 1 }
}

/// The likeliest token after each of `tokens`.
fn choices(file: &Path, tokens: &[u32]) -> Vec<u32> {
    let model = Model::from_gguf(GgufFile::read(file).unwrap(), &ModelOptions::default()).unwrap();
    let options =
        EngineOptions { device: Device::Cpu, n_ctx: Some(tokens.len()), n_threads: Some(1), ..Default::default() };
    let mut pass = model.forward_pass(&options).unwrap();
    let batch: Vec<_> =
        tokens.iter().enumerate().map(|(pos, &id)| BatchToken { id, seq: 0, pos, output: true }).collect();
    let logits = pass.forward(&batch).unwrap();
    (0..tokens.len()).map(|i| metal_attention_model::argmax(logits.row(i))).collect()
}

#[test]
fn synthesised_targets_of_every_architecture_write_the_cycle() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("m.gguf");
    let (mut refused, mut wrong) = (Vec::new(), Vec::new());
    for architecture in ModelShape::architectures() {
        let shape = ModelShape::custom(architecture).unwrap();
        if !ModelSpec::from_metadata(&shape.metadata()).is_ok_and(|spec| spec.generates_text()) {
            continue;
        }
        let args = ["synth", "custom", "--arch", architecture, "--n-vocab", "512", "--mtp-agree", "1", "-o"];
        let output = run(&[&args[..], &[file.to_str().unwrap()]].concat());
        if output.status.code() == Some(2) {
            assert!(stderr(&output).contains("--mtp-agree needs an output matrix of its own"), "{}", stderr(&output));
            refused.push(architecture);
            continue;
        }
        stdout(output);
        // After the tokens that are not ordinary: as after one that is.
        let tokens = [1, 261, 262, 263, 509, 510, 511, 259, 100, 360, 361];
        let want = [261, 262, 263, 264, 510, 511, 259, 260, 360, 361, 362];
        let got = choices(&file, &tokens);
        if got != want {
            wrong.push((architecture, got));
        }
    }
    assert_eq!(wrong, []);
    assert_eq!(refused, ["cohere2", "command-r", "openelm", "plm"]);
}

#[test]
fn a_synthesised_draft_model_agrees_with_the_part_of_the_tokens() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (target, draft) = (path("target.gguf"), path("draft.gguf"));
    stdout(run(&["synth", "custom", "--type", "q4_k_m", "--mtp-agree", "1", "-o", &target]));
    let sizes = ["--n-layer", "2", "--n-embd", "128", "--n-head", "2", "--n-ff", "256", "--seed", "5"];
    let all: Vec<u32> = ORDINARY.collect();
    let want: Vec<u32> = all.iter().map(|&id| next(id)).collect();
    for (part, n) in [("0", 0), ("0.3", 76), ("0.7", 177), ("1", 253)] {
        stdout(run(&[&["synth", "custom", "--mtp-agree", part, "-o", &draft], &sizes[..]].concat()));
        let got = choices(Path::new(&draft), &all);
        assert_eq!(got.iter().zip(&want).filter(|(a, b)| a == b).count(), n, "{part}");
    }
    // The target's greedy text.
    let args = ["run", "-m", &target, "--device", "cpu", "--temp", "0", "-n", "12", "--json", "-p", "Once upon a time"];
    let lines = stdout(run(&args));
    let tokens: Vec<u32> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|line| line["type"] == "token")
        .map(|line| line["id"].as_u64().unwrap() as u32)
        .collect();
    assert_eq!(tokens, (379..391).collect::<Vec<_>>(), "\" time\" is 378");
    // Drafts of a model that always agrees.
    let args = ["draft", "-m", &target, "--draft", &draft, "--tokens", "1,378,379", "-n", "5", "--device", "cpu"];
    assert_eq!(stdout(run(&args)).trim(), "380,381,382,383,384");
    for (args, problem) in [
        ("--mtp-agree 1.5", "must be from 0 to 1"),
        ("--mtp-agree much", "must be a number from 0 to 1"),
        ("--mtp-agree 1 --tied true", "cannot be used with"),
        ("--mtp-agree 1 --arch plm", "needs an output matrix of its own"),
    ] {
        let args: Vec<_> = ["synth", "custom", "-o", &draft].into_iter().chain(args.split(' ')).collect();
        let output = run(&args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(problem), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn synthesised_heads_agree_as_stated() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("m.gguf");
    let path = file.to_str().unwrap();
    let heads = |part: &str, more: &[&str]| {
        stdout(run(&[&["synth", "custom", "--n-vocab", "512", "--mtp-agree", part, "-o", path], more].concat()));
    };
    let draft = |id: u32| {
        let id = format!("1,300,{id}");
        stdout(run(&["draft", "-m", path, "--tokens", &id, "-n", "3", "--device", "cpu"])).trim().to_owned()
    };
    for (architecture, n) in [
        ("deepseek2", "1"),
        ("glm4moe", "1"),
        ("hy_v3", "1"),
        ("nemotron_h_moe", "1"),
        ("qwen35", "1"),
        ("qwen35moe", "1"),
        ("qwen3next", "1"),
        ("step35", "3"),
    ] {
        heads("1", &["--arch", architecture, "--mtp-heads", n]);
        assert_eq!(draft(400), "401,402,403", "{architecture}");
        // As after the token 126 places on.
        heads("0", &["--arch", architecture, "--mtp-heads", n]);
        assert_eq!(draft(300), "427,301,428", "{architecture}");
        assert_eq!(choices(&file, &[1, 300, 301, 511]), [261, 301, 302, 259], "{architecture}: the model itself");
    }
    let output = run(&["synth", "custom", "--mtp-heads", "1", "-o", path]);
    assert!(stderr(&output).contains("the prediction heads of this architecture are not implemented"));
}
