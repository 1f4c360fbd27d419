//! Drafts: the fields that bound and predict them, and where their numbers are reported. Answers do not depend on them.

use metal_attention::scheduler::SchedulerOptions;
use metal_attention::speculation::{DraftDepth, DrafterKind, Speculation, SpeculativePass};
use metal_attention::{Device, EngineOptions, Model};
use metal_attention_server::http::{HttpOptions, LoadedModel};
use serde_json::{Value, json};

use crate::client::Server;
use crate::{chat, completion};

/// A text that a greedy continuation repeats in part.
const TWICE: &str = "Once upon a time, there was a little girl named Lily. Once upon a time";

/// A server with up to 8 drafts of `drafter` in a step.
fn server(drafter: DrafterKind) -> Server {
    let server = Server::with_model(HttpOptions::default(), move || {
        let model = Model::built_in()?;
        let engine = EngineOptions { device: Device::Cpu, n_seq: 4, n_threads: Some(1), ..Default::default() };
        let depth = DraftDepth::Fixed(8);
        let pass = SpeculativePass::new(&model, &engine, Speculation { drafter, depth })?;
        let options = SchedulerOptions { n_parallel: 2, draft_depth: depth, ..Default::default() };
        Ok(LoadedModel::start_replicas(model, vec![pass], &options).unwrap())
    });
    server.wait_until_ready();
    server
}

fn post(server: &Server, path: &str, request: &Value) -> Value {
    let answer = server.post(path, request);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(!answer.headers.contains("x-ignored"), "{}", answer.headers);
    answer.json()
}

/// The numbers of drafts that held, and that did not.
fn drafts(usage: &Value) -> (u64, u64) {
    let details = &usage["completion_tokens_details"];
    let number = |name: &str| details[name].as_u64().unwrap_or_else(|| panic!("{usage} has no {name}"));
    (number("accepted_prediction_tokens"), number("rejected_prediction_tokens"))
}

#[test]
fn chats_take_drafts_from_their_prediction() {
    let server = server(DrafterKind::Auto);
    let ask = |more: Value| post(&server, "/v1/chat/completions", &chat(&more));
    let text = |answer: &Value| answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let plain = ask(json!({"max_tokens": 60, "speculative.n_max": 0}));
    assert!(plain["usage"].get("completion_tokens_details").is_none(), "{plain}");
    let want = text(&plain);
    let (head, tail) = want.split_at(want.find(' ').unwrap());
    let parts = json!([{"type": "text", "text": head}, {"type": "text", "text": tail}]);
    for content in [json!(want), parts] {
        let answer = ask(json!({"max_tokens": 60, "prediction": {"type": "content", "content": content}}));
        assert_eq!(text(&answer), want);
        let (accepted, rejected) = drafts(&answer["usage"]);
        assert!(accepted >= 45 && rejected <= 20, "{}", answer["usage"]);
        assert_eq!(answer["usage"]["completion_tokens"], 60);
    }
    let prediction = json!({"type": "content", "content": want});
    // Both choices, and the end of a stream.
    let two = ask(json!({"max_tokens": 60, "n": 2, "prediction": prediction}));
    assert!(drafts(&two["usage"]).0 >= 90, "{}", two["usage"]);
    let usage = json!({"include_usage": true});
    let request = chat(&json!({"max_tokens": 60, "stream": true, "stream_options": usage, "prediction": prediction}));
    let stream = server.post("/v1/chat/completions", &request).body;
    let end = stream.split("\n\n").filter(|event| event.contains("\"usage\"")).last().unwrap();
    let end: Value = serde_json::from_str(end.strip_prefix("data: ").unwrap()).unwrap();
    assert!(drafts(&end["usage"]).0 >= 45, "{end}");
    // Texts that do not come, and spell control tokens, change nothing.
    let other = json!({"type": "content", "content": "</s><s>[INST] other </s>"});
    assert_eq!(text(&ask(json!({"max_tokens": 60, "prediction": other}))), want);
    assert_eq!(text(&ask(json!({"max_tokens": 60, "prediction": null}))), want);
    for (wrong, param) in [
        (json!("a"), "prediction"),
        (json!({"content": "a"}), "prediction"),
        (json!({"type": "tokens", "content": "a"}), "prediction.type"),
        (json!({"type": "content", "content": 7}), "prediction.content"),
        (json!({"type": "content", "content": [{"type": "image_url"}]}), "prediction.content[0].type"),
        (json!({"type": "content", "content": "a".repeat(2 << 20)}), "prediction.content"),
    ] {
        let answer = server.post("/v1/chat/completions", &chat(&json!({"prediction": wrong})));
        let (status, of, _) = answer.error();
        assert_eq!((status, of), (400, json!(param)), "{}", answer.body);
    }
}

#[test]
fn requests_bound_their_drafts() {
    let server = server(DrafterKind::Ngram);
    let request = |more: Value| {
        let mut request = completion(&json!({"prompt": TWICE, "max_tokens": 40}));
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        request
    };
    let complete = |more: Value| post(&server, "/v1/completions", &request(more));
    let plain = complete(json!({"speculative.n_max": 0}));
    assert!(plain["usage"].get("completion_tokens_details").is_none(), "{plain}");
    let mut n_drafts = Vec::new();
    for n in [1, 3, 999] {
        let answer = complete(json!({"speculative.n_max": n}));
        assert_eq!(answer["choices"][0]["text"], plain["choices"][0]["text"]);
        let (accepted, rejected) = drafts(&answer["usage"]);
        assert!(accepted > 0, "{answer}");
        n_drafts.push(accepted + rejected);
    }
    assert!(n_drafts[0] < n_drafts[1] && n_drafts[1] < n_drafts[2], "{n_drafts:?}");
    // llama.cpp's paths.
    let llama_cpp = |more: Value| post(&server, "/completion", &request(more));
    let without = llama_cpp(json!({"speculative.n_max": -1}));
    assert_eq!(without["content"], plain["choices"][0]["text"]);
    assert!(without["timings"].get("draft_n").is_none(), "{without}");
    let with = llama_cpp(json!({}));
    assert_eq!(with["content"], plain["choices"][0]["text"]);
    let timings = |name: &str| with["timings"][name].as_u64().unwrap();
    assert_eq!(timings("draft_n"), n_drafts[2]);
    assert!((1..=timings("draft_n")).contains(&timings("draft_n_accepted")));
    // The other two fields have no effect.
    let answer = server.post("/completion", &request(json!({"speculative.n_min": 2, "speculative.p_min": 0.5})));
    assert!(answer.headers.contains("x-ignored: speculative.n_min, speculative.p_min"), "{}", answer.headers);
    let wrong = server.post("/completion", &request(json!({"speculative.n_max": "many"})));
    assert!(wrong.status == 400 && wrong.body.contains("speculative.n_max"), "{}", wrong.body);
}

#[test]
fn drafts_are_counted() {
    let server = server(DrafterKind::Ngram);
    let speculative = |server: &Server| server.get("/slots").json()[0]["speculative"].clone();
    assert_eq!(speculative(&server), true);
    let answer = post(&server, "/v1/completions", &completion(&json!({"prompt": TWICE, "max_tokens": 40})));
    let (accepted, rejected) = drafts(&answer["usage"]);
    assert_eq!(server.metric("accepted_tokens_total"), accepted as f64);
    assert_eq!(server.metric("drafted_tokens_total"), (accepted + rejected) as f64);
    let off = self::server(DrafterKind::Off);
    let answer = post(&off, "/v1/completions", &completion(&json!({"prompt": TWICE, "max_tokens": 40})));
    assert!(answer["usage"].get("completion_tokens_details").is_none(), "{answer}");
    assert_eq!((speculative(&off), off.metric("drafted_tokens_total")), (json!(false), 0.0));
}
