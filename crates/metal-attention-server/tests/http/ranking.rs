//! Rerankers and encoders over HTTP: `/v1/rerank`, `/v1/embeddings`, and the errors for what such models cannot do.

use std::time::Duration;

use metal_attention::gguf::GgufFile;
use metal_attention::tokenizer::EncodeOptions;
use metal_attention::{Device, EngineOptions, Model, ModelOptions, Pooler, Reranker};
use metal_attention_server::http::HttpOptions;
use serde_json::{Value, json};

use crate::client::{Server, load_model};
use crate::monitoring::server_with_gate_of;
use crate::{chat, completion, server};
use metal_attention_testing::encoder::{N_CTX, N_EMBD, encoder};

const QUERY: &str = "the moon";
const DOCUMENTS: [&str; 4] = ["of the sun", "it is far", "", "the moon is far from the sun"];

/// The tests' encoder, with the classifier of a reranker or without it.
fn model(is_reranker: bool) -> Model {
    let file = GgufFile::from_bytes(&encoder(is_reranker)).unwrap();
    Model::from_gguf(file, &ModelOptions::default()).unwrap()
}

/// A server with that model, ready.
fn start(is_reranker: bool) -> Server {
    let server = Server::with_model(HttpOptions::default(), move || load_model(model(is_reranker), 2, 300));
    server.wait_until_ready();
    server
}

/// The model's pooled output for one sequence that is evaluated alone, without the server.
fn outputs(model: &Model, ids: &[u32]) -> Vec<f32> {
    let options = EngineOptions { device: Device::Cpu, n_threads: Some(1), ..Default::default() };
    let mut pass = model.forward_pass(&options).unwrap();
    let pooler = Pooler::new(model, None);
    let mut pooled = pooler.begin();
    pooled.add(&pass.forward_hidden(&pooler.batch(ids, 0)).unwrap());
    pooler.finish(pooled)
}

/// A request to rank [`DOCUMENTS`]. `more`: further fields.
fn rank(more: &Value) -> Value {
    let mut request = json!({"query": QUERY, "documents": DOCUMENTS});
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

#[test]
fn documents_are_ranked_by_the_models_scores() {
    let (server, model) = (start(true), model(true));
    let reranker = Reranker::new(&model).unwrap();
    let texts = DOCUMENTS.map(|document| reranker.encode(QUERY, document));
    let scores = texts.each_ref().map(|ids| outputs(&model, ids)[0]);
    for path in ["/v1/rerank", "/rerank"] {
        let answer = server.post(path, &rank(&json!({})));
        assert_eq!(answer.status, 200, "{answer:?}");
        let answer = answer.json();
        assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("stories")));
        let other = server.post(path, &rank(&json!({"model": "rerank-v3"})));
        assert_eq!(other.json()["model"], "rerank-v3");
        assert!(other.headers.contains("x-model: stories"), "{other:?}");
        let n_tokens = texts.iter().map(Vec::len).sum::<usize>();
        assert_eq!(answer["usage"], json!({"prompt_tokens": n_tokens, "total_tokens": n_tokens}));
        let results = answer["results"].as_array().unwrap();
        assert_eq!(results.len(), 4);
        for result in results {
            let expected = f64::from(scores[result["index"].as_u64().unwrap() as usize]);
            assert!((result["relevance_score"].as_f64().unwrap() - expected).abs() < 1e-6, "{result} {expected}");
            assert_eq!(result["document"], Value::Null);
        }
        assert!(results.is_sorted_by(|a, b| a["relevance_score"].as_f64() > b["relevance_score"].as_f64()));
    }
    let objects = DOCUMENTS.map(|text| json!({"text": text}));
    let some = rank(&json!({"documents": objects, "top_n": 2, "return_documents": true, "model": "stories"}));
    let answer = server.post("/v1/rerank", &some).json();
    let results = answer["results"].as_array().unwrap();
    assert_eq!(results.len(), 2);
    for result in results {
        assert_eq!(result["document"]["text"], DOCUMENTS[result["index"].as_u64().unwrap() as usize]);
    }
    assert_eq!(server.post("/v1/rerank", &rank(&json!({"top_n": 99}))).json()["results"].as_array().unwrap().len(), 4);
}

#[test]
fn errors_of_ranking_requests_name_the_field() {
    let server = start(true);
    let wrong = |more: Value| server.post("/v1/rerank", &rank(&more)).error();
    let field = |name: &str| (400, json!(name), Value::Null);
    assert_eq!(wrong(json!({"documents": []})), field("documents"));
    assert_eq!(wrong(json!({"documents": "text"})), field("documents"));
    assert_eq!(wrong(json!({"documents": ["a", {"txt": "b"}]})), field("documents[1]"));
    assert_eq!(wrong(json!({"documents": ["a", {"text": 1}]})), field("documents[1].text"));
    assert_eq!(wrong(json!({"documents": vec!["a"; 257]})), field("documents"));
    assert_eq!(wrong(json!({"documents": vec![json!({"text": "a", "x": vec![1; 1000]}); 100]})), field("documents"));
    assert_eq!(wrong(json!({"query": 1})), field("query"));
    assert_eq!(wrong(json!({"query": null})), field("query"));
    assert_eq!(wrong(json!({"top_n": 0})), field("top_n"));
    assert_eq!(wrong(json!({"top_n": -1})), field("top_n"));
    assert_eq!(wrong(json!({"return_documents": "yes"})), field("return_documents"));
    assert_eq!(wrong(json!({"max_tokens_per_doc": 5})).2, "unsupported_parameter");
    assert_eq!(wrong(json!({"model": "x".repeat(257)})), field("model"));
    let too_long = |name: &str| (400, json!(name), json!("context_length_exceeded"));
    assert_eq!(wrong(json!({"documents": ["a", "far ".repeat(N_CTX)]})), too_long("documents[1]"));
    assert_eq!(wrong(json!({"query": "far ".repeat(N_CTX)})), too_long("documents[0]"));
    // Texts that would take long to tokenize, and deep nesting.
    assert_eq!(wrong(json!({"query": "x ".repeat(1 << 20)})), too_long("query"));
    assert_eq!(wrong(json!({"query": "x ".repeat(1 << 18), "documents": vec!["a"; 256]})), too_long("documents[0]"));
    let mut nested = json!("a");
    for _ in 0..100 {
        nested = json!({"text": nested});
    }
    assert_eq!(wrong(json!({"documents": [nested]})), field("documents"));
    let send = |body: &[u8]| server.send("POST", "/v1/rerank", &["Content-Type: application/json"], body).status;
    for body in [&b""[..], b"[]", b"{", b"\xff", b"{\"query\": \"a\"}", b"{\"documents\": [\"a\"]}"] {
        assert_eq!(send(body), 400, "{}", String::from_utf8_lossy(body));
    }
    assert_eq!(server.post("/v1/rerank", &rank(&json!({"documents": vec!["a"; 256]}))).status, 200);
    assert_eq!(server.post("/v1/rerank", &rank(&json!({}))).status, 200);
}

#[test]
fn unsupported_requests_are_rejected_with_an_alternative() {
    let assert_rejected = |server: &Server, path: &str, request: &Value, instead: &str| {
        let answer = server.post(path, request);
        assert_eq!(answer.error(), (400, Value::Null, json!("unsupported_by_model")), "{path}");
        assert!(answer.body.contains(instead), "{answer:?}");
    };
    let generator = server();
    assert_rejected(&generator, "/v1/rerank", &rank(&json!({})), "/v1/embeddings");
    for is_reranker in [true, false] {
        let server = start(is_reranker);
        for stream in [true, false] {
            assert_rejected(&server, "/v1/completions", &completion(&json!({"stream": stream})), "writes no text");
            assert_rejected(&server, "/v1/completions", &completion(&json!({"max_tokens": 0})), "writes no text");
            assert_rejected(&server, "/v1/chat/completions", &chat(&json!({"stream": stream})), "writes no text");
        }
        let embed = json!({"input": "far"});
        if is_reranker {
            assert_rejected(&server, "/v1/embeddings", &embed, "/v1/rerank");
        } else {
            assert_rejected(&server, "/v1/rerank", &rank(&json!({})), "/v1/embeddings");
        }
        let (path, request) = if is_reranker { ("/v1/rerank", rank(&json!({}))) } else { ("/v1/embeddings", embed) };
        assert_eq!(server.post(path, &request).status, 200);
        assert_eq!(server.get("/health").status, 200);
    }
}

/// An encoder evaluates a sequence in one micro-batch, even if `n_ubatch` is smaller. Its learned positions limit the length.
#[test]
fn an_encoder_embeds_texts_up_to_its_context_length() {
    let engine = EngineOptions {
        device: Device::Cpu,
        n_ctx: Some(10 * N_CTX),
        n_seq: 2,
        n_threads: Some(1),
        n_ubatch: Some(8),
        ..Default::default()
    };
    let load = move || crate::client::load_with(model(false), &engine, 2, 64);
    let server = Server::with_model(HttpOptions::default(), load);
    server.wait_until_ready();
    assert_eq!(server.get("/v1/models").json()["data"][0]["meta"]["n_ctx"], N_CTX);
    let model = model(false);
    let text = |n: usize| "far ".repeat(n - 2);
    let options = EncodeOptions { add_special: true, parse_special: true };
    for n in [3, 40, N_CTX] {
        let ids = model.tokenizer().unwrap().encode(&text(n), options);
        assert_eq!(ids.len(), n);
        let answer = server.post("/v1/embeddings", &json!({"input": [text(n), text(3)], "dimensions": N_EMBD}));
        assert_eq!(answer.status, 200, "{answer:?}");
        let got: Vec<f64> = serde_json::from_value(answer.json()["data"][0]["embedding"].clone()).unwrap();
        let expected = outputs(&model, &ids);
        assert!(got.len() == N_EMBD && got.iter().zip(&expected).all(|(a, &b)| (a - f64::from(b)).abs() < 1e-6));
    }
    let embed = |more: Value| server.post("/v1/embeddings", &more);
    assert_eq!(embed(json!({"input": text(N_CTX + 1)})).error(), (400, Value::Null, json!("context_length_exceeded")));
    assert_eq!(embed(json!({"input": vec![101; 5 * N_CTX]})).error().2, "context_length_exceeded");
    assert_eq!(embed(json!({"input": "far", "dimensions": N_EMBD + 1})).error().1, "dimensions");
    let base64 = embed(json!({"input": "far", "encoding_format": "base64"})).json();
    assert_eq!(base64["data"][0]["embedding"].as_str().unwrap().len(), (N_EMBD * 4).div_ceil(3) * 4);
}

/// The engine is blocked until the response arrives, since a late result that precedes the check of the time is returned.
#[test]
fn requests_beyond_the_time_limit_time_out() {
    let options = || HttpOptions { timeout: Some(Duration::from_millis(1)), ..HttpOptions::default() };
    for (is_reranker, path, request) in [
        (true, "/v1/rerank", json!({"query": QUERY, "documents": DOCUMENTS})),
        (false, "/v1/embeddings", json!({"input": DOCUMENTS})),
    ] {
        let (server, controls) = server_with_gate_of(model(is_reranker), options());
        server.wait_until_ready();
        let held = controls.gate.close();
        let answer = server.post(path, &request);
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (504, &json!("timeout")), "{path}");
        drop(held);
    }
}
