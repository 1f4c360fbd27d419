//! The option `context_shift`: a conversation that exceeds the context of 512 tokens loses its oldest turns. The header
//! `x-dropped-turns` reports their number.

use metal_attention_server::http::HttpOptions;
use serde_json::{Value, json};

use crate::client::{Answer, Server};
use crate::{chat, server};

/// A server with the option.
fn shifting_server() -> Server {
    Server::new(HttpOptions { context_shift: true, ..Default::default() })
}

fn message(role: &str, text: &str) -> Value {
    json!({"role": role, "content": text})
}

/// A system message and `n` turns of about 80 tokens, the last of them without an answer.
fn conversation(n: usize) -> Vec<Value> {
    let story = "Once upon a time, there was a little girl named Lily. ".repeat(2);
    let turn = |i: usize| [message("user", &format!("{i}. {story}")), message("assistant", &story)];
    let turns = (0..n).flat_map(turn).take(2 * n - 1);
    [message("system", "Be kind.")].into_iter().chain(turns).collect()
}

/// The number in the header `x-dropped-turns`. `None`: there is no such header.
fn dropped(answer: &Answer) -> Option<usize> {
    answer.headers.lines().find_map(|line| line.strip_prefix("x-dropped-turns: ")).map(|n| n.parse().unwrap())
}

#[test]
fn the_oldest_turns_are_dropped_and_the_rest_stays_cached() {
    let server = shifting_server();
    let ask = |messages: &[Value]| server.post("/v1/chat/completions", &chat(&json!({"messages": messages})));
    // Of the previous request: dropped turns and prompt tokens.
    let mut previous = (None, 0);
    let mut all_dropped = Vec::new();
    for n in 1..16 {
        let messages = conversation(n);
        let answer = ask(&messages);
        let (n_dropped, usage) = (dropped(&answer), &answer.json()["usage"]);
        let n_prompt = usage["prompt_tokens"].as_u64().unwrap();
        let n_cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        assert!(n_prompt <= 512 - 8, "{answer:?}");
        if n_dropped == previous.0 {
            assert!(n_cached >= previous.1, "the previous prompt is a prefix of this one: {answer:?}");
        }
        // The prompt has the tokens of the remaining messages.
        let left = [&messages[..1], &messages[1 + 2 * n_dropped.unwrap_or(0)..]].concat();
        let alone = ask(&left);
        assert_eq!((dropped(&alone), &alone.json()["usage"]["prompt_tokens"]), (None, &json!(n_prompt)));
        previous = (n_dropped, n_prompt);
        all_dropped.push(n_dropped.unwrap_or(0));
    }
    // Turns are dropped until a multiple of 128 tokens is free, so that the prefix stays the same for several requests.
    assert_eq!(all_dropped, [0, 0, 0, 0, 0, 0, 2, 2, 4, 6, 6, 8, 8, 10, 12]);
}

#[test]
fn without_the_option_long_conversations_are_rejected() {
    let server = server();
    let long = conversation(12);
    let rejected = server.post("/v1/chat/completions", &chat(&json!({"messages": long})));
    assert_eq!((rejected.error().0, rejected.error().2), (400, json!("context_length_exceeded")));
    // A long prompt that is no conversation is rejected with the option, too.
    let server = shifting_server();
    let rejected = server.post("/v1/completions", &json!({"prompt": "Once ".repeat(600)}));
    assert_eq!((rejected.error().0, rejected.error().2), (400, json!("context_length_exceeded")));
    // So is a conversation whose last turn alone is too long.
    let last = [long.as_slice(), &[message("user", &"Once ".repeat(600))]].concat();
    for path in ["/v1/chat/completions", "/v1/messages"] {
        assert_eq!(server.post(path, &chat(&json!({"messages": last}))).status, 400, "{path}");
    }
}

#[test]
fn all_chat_interfaces_drop_turns() {
    let server = shifting_server();
    let long = conversation(12);
    let expected = dropped(&server.post("/v1/chat/completions", &chat(&json!({"messages": long}))));
    assert!(expected > Some(6), "{expected:?}");
    let streamed = server.post("/v1/chat/completions", &chat(&json!({"messages": long, "stream": true})));
    assert_eq!(dropped(&streamed), expected);
    let claude = server.post("/v1/messages", &chat(&json!({"messages": long})));
    assert_eq!((claude.status, dropped(&claude)), (200, expected));
    let ollama = json!({"model": "stories", "messages": long, "stream": false, "options": {"num_predict": 8}});
    assert_eq!(dropped(&server.post("/api/chat", &ollama)), expected);
    let respond = |more: Value| {
        let mut request = json!({"input": long, "max_output_tokens": 8, "temperature": 0});
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/responses", &request)
    };
    let response = respond(json!({}));
    assert_eq!((dropped(&response), &response.json()["truncation"]), (expected, &json!("auto")));
    assert_eq!(respond(json!({"truncation": "disabled"})).error().2, "context_length_exceeded");
}

#[test]
fn responses_with_automatic_truncation_drop_turns() {
    let server = server();
    let respond = |truncation: Value| {
        let request = json!({"input": conversation(12), "max_output_tokens": 8, "truncation": truncation});
        server.post("/v1/responses", &request)
    };
    let response = respond(json!("auto"));
    assert_eq!((response.status, &response.json()["truncation"]), (200, &json!("auto")));
    assert!(dropped(&response) > Some(6), "{response:?}");
    // The stored response has the whole conversation.
    let id = response.json()["id"].as_str().unwrap().to_owned();
    let stored = server.get(&format!("/v1/responses/{id}/input_items?limit=100")).json();
    assert_eq!(stored["data"].as_array().unwrap().len(), 24);
    for truncation in [json!("disabled"), Value::Null] {
        assert_eq!(respond(truncation).error().2, "context_length_exceeded");
    }
}
