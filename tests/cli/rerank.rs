//! The command `rerank`, which sorts documents by a cross-encoder's score for a query, and the error of `embed` for such a
//! model.

use crate::common::{run, run_with_input, stderr, stdout};
use metal_attention::gguf::GgufFile;
use metal_attention::tokenizer::EncodeOptions;
use metal_attention::{BatchToken, CacheType, Device, EngineOptions, Model, ModelOptions};
use metal_attention_testing::encoder::{N_CTX, N_EMBD, encoder};
use serde_json::{Value, json};
use tempfile::TempDir;

const QUERY: &str = "the moon";
const DOCUMENTS: [&str; 3] = ["of the sun", "it is far", "the moon is far from the sun"];

/// Writes the tests' encoder, with the classifier of a reranker or without it. Returns the file's path.
fn file(dir: &TempDir, is_reranker: bool) -> String {
    let path = dir.path().join(format!("{is_reranker}.gguf"));
    std::fs::write(&path, encoder(is_reranker)).unwrap();
    path.to_str().unwrap().to_owned()
}

/// The expected score: `out(tanh(dense(x)))` of the first token's hidden state `x`, computed here in float64.
fn score(model: &Model, document: &str) -> f64 {
    let tokenizer = model.tokenizer().unwrap();
    let (cls, sep) = (tokenizer.token_id("[CLS]").unwrap(), tokenizer.token_id("[SEP]").unwrap());
    let [query, document] = [QUERY, document].map(|text| tokenizer.encode(text, EncodeOptions::default()));
    let ids = [&[cls][..], &query, &[sep], &document, &[sep]].concat();
    let options = EngineOptions { device: Device::Cpu, cache_type: CacheType::F32, exact: true, ..Default::default() };
    let batch = ids.iter().enumerate().map(|(pos, &id)| BatchToken { id, seq: 0, pos, output: pos == 0 });
    let x = model.forward_pass(&options).unwrap().forward_hidden(&batch.collect::<Vec<_>>()).unwrap();
    assert_eq!(x.len(), N_EMBD);
    let tensor = |name: &str| model.gguf().tensor(name).unwrap().to_f32();
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let (dense, bias) = (tensor("cls.weight"), tensor("cls.bias"));
    let rows = dense.chunks_exact(N_EMBD).zip(&bias);
    let hidden: Vec<f32> = rows.map(|(row, bias)| (dot(row, &x) + f64::from(*bias)).tanh() as f32).collect();
    dot(&tensor("cls.output.weight"), &hidden) + f64::from(tensor("cls.output.bias")[0])
}

#[test]
fn documents_are_sorted_by_the_models_scores() {
    let dir = TempDir::new().unwrap();
    let file = file(&dir, true);
    let gguf = GgufFile::read(&file).unwrap();
    let model = Model::from_gguf(gguf, &ModelOptions::default()).unwrap();
    let mut expected: Vec<(usize, f64)> =
        DOCUMENTS.iter().map(|document| score(&model, document)).enumerate().collect();
    expected.sort_by(|a, b| b.1.total_cmp(&a.1));

    let list = dir.path().join("documents.txt");
    std::fs::write(&list, format!("{}\n\n  \r\n{}\n", DOCUMENTS[1], DOCUMENTS[2])).unwrap();
    let args = ["rerank", "-m", &file, "-q", QUERY, "-d", DOCUMENTS[0], "--device", "cpu", "--exact"];
    let from_file = [&args[..], &["-f", list.to_str().unwrap()]].concat();
    let answer: Value = serde_json::from_str(&stdout(run(&[&from_file[..], &["--json"]].concat()))).unwrap();
    assert_eq!(answer["query"], QUERY);
    let results = answer["results"].as_array().unwrap();
    assert_eq!(results.len(), 3);
    for (result, (index, score)) in results.iter().zip(&expected) {
        assert_eq!((&result["index"], &result["document"]), (&json!(index), &json!(DOCUMENTS[*index])));
        assert!((result["relevance_score"].as_f64().unwrap() - score).abs() < 1e-5, "{result} {score}");
    }

    let lines = |text: String| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let table = lines(stdout(run(&from_file)));
    assert_eq!(table.len(), 3);
    for (rank, (line, (index, score))) in table.iter().zip(&expected).enumerate() {
        let columns: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(columns[0], (rank + 1).to_string());
        assert!((columns[1].parse::<f64>().unwrap() - score).abs() < 1e-4, "{line} {score}");
        assert!(line.ends_with(&format!("  {}", DOCUMENTS[*index])), "{line}");
    }
    let best = [&from_file[..], &["--top-n", "1"]].concat();
    assert_eq!(lines(stdout(run(&best))), table[..1]);
    let stdin = [&args[..], &["-f", "-"]].concat();
    let text = format!("{}\n{}", DOCUMENTS[1], DOCUMENTS[2]);
    assert_eq!(lines(stdout(run_with_input(&stdin, text.as_bytes()))), table);
}

#[test]
fn unsuitable_models_and_documents_are_rejected() {
    let dir = TempDir::new().unwrap();
    let (reranker, encoder) = (file(&dir, true), file(&dir, false));
    let fails = |args: &[&str], parts: &[&str]| {
        let output = run(args);
        let errors = stderr(&output);
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(2), &b""[..]), "{args:?}: {errors}");
        assert!(parts.iter().all(|part| errors.contains(part)), "{args:?}: {errors}");
    };
    let pair = ["-q", "a", "-d", "b"];
    fails(&[&["rerank", "-m", &encoder][..], &pair].concat(), &["no reranker", "`embed`", "cosine"]);
    fails(&[&["rerank"][..], &pair].concat(), &["no reranker"]);
    fails(&["rerank", "-m", &reranker, "-q", "a"], &["there are no documents", "-d TEXT"]);
    fails(&["rerank", "-m", &reranker, "-d", "a"], &["--query"]);
    fails(&[&["rerank", "-m", &reranker, "--top-n", "0"][..], &pair].concat(), &["--top-n"]);
    let long = "far ".repeat(N_CTX);
    fails(&["rerank", "-m", &reranker, "-q", "a", "-d", "b", "-d", &long], &["document 2 (\"far far", "room for 64"]);
    fails(&["embed", "-m", &reranker, "-p", "a"], &["reranker", "use rerank"]);
}
