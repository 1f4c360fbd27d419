//! Fuzz target of JSON schemas in `response_format`. The server either refuses a schema with a message, or constrains the
//! answer to it; an answer with the finish reason `stop` must then be JSON.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use metal_attention_fuzz::ask;
use serde_json::{Value, json};

fuzz_target!(|data: &[u8]| -> Corpus {
    let Ok(schema) = serde_json::from_slice::<Value>(data) else { return Corpus::Reject };
    let request = json!({
        "messages": [{"role": "user", "content": "Once"}],
        "temperature": 0,
        "max_tokens": 48,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    });
    let answer = ask("POST", "/v1/chat/completions", request.to_string().as_bytes());
    answer.check();
    if answer.status == 200 {
        let answer: Value = serde_json::from_slice(&answer.body).expect("an answer is JSON");
        let choice = &answer["choices"][0];
        if choice["finish_reason"] == "stop" {
            let text = choice["message"]["content"].as_str().expect("an answer has a text");
            serde_json::from_str::<Value>(text).expect("a constrained answer is JSON");
        }
    }
    Corpus::Keep
});
