//! A server over a [`NullExecutor`](metal_attention::NullExecutor): every layer above the backends, without the arithmetic of a
//! model. The vocabulary and the chat template are those of the built-in model.

use metal_attention::scheduler::SchedulerOptions;
use metal_attention::{Device, EngineOptions, Model};
use metal_attention_server::http::{HttpOptions, LoadedModel};
use serde_json::{Value, json};

use crate::client::{Answer, Server};
use crate::support::{Controls, encode, greedy, null};
use crate::{chat, completion};

fn engine() -> EngineOptions {
    EngineOptions { device: Device::Cpu, n_ctx: Some(256), n_seq: 6, ..Default::default() }
}

#[test]
fn completions_chats_and_streams_of_hashes() {
    let controls = Controls::default();
    let steps = controls.log.clone();
    let server = Server::with_model(HttpOptions::default(), move || {
        let model = Model::built_in()?;
        let pass = controls.null_pass(&model, &engine());
        let options = SchedulerOptions { n_parallel: 4, ..Default::default() };
        Ok(LoadedModel::start(model, pass, &options).unwrap())
    });
    server.wait_until_ready();
    // The texts that a generator alone gives, from requests that run at the same time.
    let model = Model::built_in().unwrap();
    let prompts = ["Once upon a time", "The cat", "One day", "Lily", "Tom", "Once upon a time there"];
    let body =
        |prompt: &str| completion(&json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true}));
    let json = ["Content-Type: application/json"];
    let sent: Vec<_> = prompts
        .iter()
        .map(|prompt| server.send_only("POST", "/v1/completions", &json, body(prompt).to_string().as_bytes()))
        .collect();
    let mut texts = Vec::new();
    for (prompt, answer) in prompts.into_iter().zip(sent.into_iter().map(Answer::read)) {
        assert_eq!(answer.status, 200, "{answer:?}");
        let answer = answer.json();
        let request = metal_attention::scheduler::Request { ignore_eos: true, ..greedy(encode(&model, prompt), 12) };
        let (_, want) = null::reference_in(&model, &engine(), &request);
        assert_eq!(answer["choices"][0]["text"], want, "{prompt}");
        assert_eq!(answer["usage"]["completion_tokens"], 12);
        texts.push(want);
    }
    assert!(texts.iter().skip(1).all(|text| *text != texts[0]), "{texts:?}");
    // The same text as a stream.
    let mut streamed = body(prompts[0]);
    streamed["stream"] = json!(true);
    let events: Vec<String> = server.stream("/v1/completions", &streamed).collect();
    let text =
        |event: &String| serde_json::from_str::<Value>(event).ok()?["choices"][0]["text"].as_str().map(str::to_owned);
    assert_eq!(events.iter().filter_map(text).collect::<String>(), texts[0]);
    // A chat, and embeddings.
    let answer = server.post("/v1/chat/completions", &chat(&json!({"max_tokens": 5, "ignore_eos": true}))).json();
    assert_eq!(answer["usage"]["completion_tokens"], 5, "{answer}");
    let answer = server.post("/v1/embeddings", &json!({"input": "Once upon a time"})).json();
    assert_eq!(answer["data"][0]["embedding"].as_array().unwrap().len(), model.spec().n_embd, "{answer}");
    assert!(steps.lock().unwrap().len() > 12);
}
