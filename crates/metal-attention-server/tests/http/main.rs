//! Tests of the server over HTTP: a real server in this process with the built-in model, and requests over TCP. This file
//! has OpenAI's completions, chats, embeddings and what all interfaces share; each module has one interface or subject.

mod abuse;
mod client;
mod context_shift;
mod defects;
mod fairness;
mod llama_cpp;
mod messages;
mod monitoring;
mod nan_logits;
mod null_executor;
mod ollama;
mod ollama_models;
mod page;
mod pictures;
mod ranking;
mod replicas;
mod responses;
mod resumable;
mod several_models;
mod slot_files;
mod speculation;
mod stored_models;
#[path = "../../../metal-attention/tests/engine/scheduler/support.rs"]
mod support;
mod tools;
mod values;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use client::{Answer, Server, load};
use metal_attention_server::http::{ApiKeys, HttpOptions};
use serde_json::{Value, json};

const PROMPT: &str = "Once upon a time";
const STORY: &str = ", there was a little girl";

/// A server with default options, ready.
fn server() -> Server {
    Server::new(HttpOptions::default())
}

/// A request for a greedy completion of eight tokens. `more`: further fields.
fn completion(more: &Value) -> Value {
    let mut request = json!({"prompt": PROMPT, "temperature": 0, "max_tokens": 8});
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

/// A request for a greedy chat answer of eight tokens. `more`: further fields.
fn chat(more: &Value) -> Value {
    let mut request = json!({"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8});
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

#[test]
fn completions_continue_their_prompts() {
    let server = server();
    let complete = |more: Value| {
        let answer = server.post("/v1/completions", &completion(&more));
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    };
    let texts = |answer: &Value| -> Vec<String> {
        let choices = answer["choices"].as_array().unwrap();
        choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
    };
    let answer = complete(json!({}));
    assert_eq!(texts(&answer), [STORY]);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["total_tokens"], 13);
    assert_eq!(texts(&complete(json!({"echo": true}))), [format!("{PROMPT}{STORY}")]);
    assert_eq!(texts(&complete(json!({"stop": [" little"]}))), [", there was a"]);
    assert_eq!(texts(&complete(json!({"prompt": [1, 403, 407, 261, 378]}))), [STORY]);
    assert_eq!(texts(&complete(json!({"prompt": [PROMPT, PROMPT], "n": 2}))), [STORY; 4]);
    let seeded = |seed: u32| texts(&complete(json!({"n": 2, "temperature": 1, "seed": seed})));
    assert_eq!(seeded(7), seeded(7));
    assert_ne!(seeded(7)[0], seeded(7)[1]);
}

#[test]
fn log_probabilities_sum_to_at_most_one() {
    let server = server();
    let answer = server.post("/v1/completions", &completion(&json!({"logprobs": 20, "max_tokens": 4}))).json();
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!([",", " there", " was", " a"]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 7, 11]));
    for (token, top) in logprobs["tokens"].as_array().unwrap().iter().zip(logprobs["top_logprobs"].as_array().unwrap())
    {
        let top = top.as_object().unwrap();
        let sum: f64 = top.values().map(|logprob| logprob.as_f64().unwrap().exp()).sum();
        // The model's distributions are peaked: the twenty most likely of 512 tokens have almost all of the probability.
        assert!((0.98..1.00001).contains(&sum), "{sum}");
        assert_eq!(top.len(), 20);
        let best = top.iter().max_by(|a, b| a.1.as_f64().unwrap().total_cmp(&b.1.as_f64().unwrap())).unwrap();
        assert_eq!(best.0, token.as_str().unwrap());
    }
    let answer = server.post("/v1/chat/completions", &chat(&json!({"logprobs": true, "top_logprobs": 2}))).json();
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 8);
    assert!(content.iter().all(|token| token["top_logprobs"][0]["logprob"] == token["logprob"]));
}

#[test]
fn streams_are_server_sent_events() {
    let server = server();
    let body = completion(&json!({"stream": true, "stream_options": {"include_usage": true}, "max_tokens": 3}));
    let answer = server.post("/v1/completions", &body);
    assert!(answer.headers.contains("content-type: text/event-stream"), "{}", answer.headers);
    assert!(answer.body.ends_with("data: [DONE]\n\n"));
    let events: Vec<&str> = answer.body.split_terminator("\n\n").collect();
    assert!(events.iter().all(|event| event.starts_with("data: ") && !event.contains('\n')), "{events:?}");
    let parse = |event: &&str| serde_json::from_str::<Value>(event.strip_prefix("data: ").unwrap()).unwrap();
    let chunks: Vec<Value> = events[..events.len() - 1].iter().map(parse).collect();
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, ", there was");
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 3);
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"]));

    let deltas = server.stream("/v1/chat/completions", &chat(&json!({"stream": true, "n": 2})));
    let mut texts = [String::new(), String::new()];
    let mut ends = 0;
    for data in deltas.take_while(|data| data != "[DONE]") {
        let choice = serde_json::from_str::<Value>(&data).unwrap()["choices"][0].clone();
        let index = choice["index"].as_u64().unwrap() as usize;
        texts[index] += choice["delta"]["content"].as_str().unwrap_or_default();
        ends += usize::from(choice["finish_reason"] == "length");
    }
    assert_eq!((texts[0].as_str(), ends), (texts[1].as_str(), 2));
    let whole = server.post("/v1/chat/completions", &chat(&json!({}))).json();
    assert_eq!(whole["choices"][0]["message"]["content"], texts[0]);
}

#[test]
fn a_disconnected_client_ends_its_request() {
    let server = server();
    let body = completion(&json!({"stream": true, "max_tokens": 400, "ignore_eos": true}));
    let mut events = server.stream("/v1/completions", &body);
    events.next().unwrap();
    drop(events);
    // The same for a request without streaming.
    let body = completion(&json!({"max_tokens": 480, "ignore_eos": true})).to_string();
    drop(server.send_only("POST", "/v1/completions", &["Content-Type: application/json"], body.as_bytes()));
    while server.metric("requests_running") + server.metric("requests_waiting") > 0.0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(server.post("/v1/completions", &completion(&json!({}))).json()["choices"][0]["text"], STORY);
}

#[test]
fn prompts_with_a_common_prefix_share_the_cache() {
    let server = server();
    let long = json!({"prompt": format!("{PROMPT}{STORY} named Lily. She loved to play outside in the park.")});
    server.post("/v1/completions", &completion(&long));
    let again = server.post("/v1/completions", &completion(&long)).json();
    let cached = again["usage"]["prompt_tokens_details"]["cached_tokens"].as_f64().unwrap();
    assert!(cached >= 16.0, "{again}");
    assert!(server.metric("cached_prompt_tokens_total") >= cached);
}

/// Eight requests at once, of which four run at a time. The first one evaluates the common prefix; the others reuse it.
#[test]
fn the_common_prefix_of_eight_conversations_is_evaluated_once() {
    let server = server();
    let system = json!({"role": "system", "content": "You tell stories of a little girl. ".repeat(12)});
    let ask = |i: usize| {
        let messages = json!([system, {"role": "user", "content": format!("{i} dogs, please.")}]);
        server.post("/v1/chat/completions", &chat(&json!({"messages": messages}))).json()
    };
    let answers: Vec<Value> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|i| scope.spawn(move || ask(i))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let prompts: Vec<f64> = answers.iter().map(|answer| answer["usage"]["prompt_tokens"].as_f64().unwrap()).collect();
    let (evaluated, cached) = (server.metric("prompt_tokens_total"), server.metric("cached_prompt_tokens_total"));
    assert_eq!(evaluated + cached, prompts.iter().sum::<f64>());
    // The prompts have more than 100 tokens and differ in the last 20 or so.
    assert!(prompts.iter().all(|&n| n > 100.0), "{prompts:?}");
    assert!(evaluated <= prompts[0] + 7.0 * 25.0, "{evaluated} of {prompts:?}");
}

#[test]
fn requests_beyond_the_queue_are_rejected() {
    let server = Server::with_model(HttpOptions::default(), || load(1, 2));
    server.wait_until_ready();
    // One sequence runs and two wait: the queue is full.
    let long = completion(&json!({"n": 3, "max_tokens": 400, "ignore_eos": true, "stream": true}));
    let mut stream = server.stream("/v1/completions", &long);
    assert!(stream.next().is_some());
    let answer = server.post("/v1/completions", &completion(&json!({})));
    assert_eq!(answer.error(), (429, Value::Null, json!("queue_full")));
    assert!(answer.headers.contains("retry-after: 1"));
    drop(stream);
    // Ending the stream frees the queue.
    let next = || server.post("/v1/completions", &completion(&json!({}))).status;
    assert_eq!(std::iter::repeat_with(next).find(|status| *status != 429), Some(200));
}

/// A request with more sequences than the queue can ever hold is a client error (400, no retry-after) that names the limit.
#[test]
fn a_request_beyond_the_limits_is_rejected_without_retry() {
    let server = Server::with_model(HttpOptions::default(), || load(1, 2));
    server.wait_until_ready();
    let texts = |n: usize| vec!["a"; n];
    for (path, body) in [
        ("/v1/completions", completion(&json!({"n": 4}))),
        ("/v1/completions", completion(&json!({"prompt": texts(2), "n": 2}))),
        ("/v1/chat/completions", chat(&json!({"n": 4}))),
        ("/v1/embeddings", json!({"input": texts(4)})),
    ] {
        let answer = server.post(path, &body);
        assert_eq!(answer.error(), (400, Value::Null, json!("too_many_texts")), "{path}");
        assert!(answer.body.contains("--parallel") && answer.body.contains("--queue"), "{answer:?}");
        assert!(!answer.headers.contains("retry-after"), "{answer:?}");
    }
    // An idle server accepts as many sequences as the limits allow.
    for _ in 0..20 {
        assert_eq!(server.post("/v1/completions", &completion(&json!({"n": 3, "max_tokens": 1}))).status, 200);
    }
}

#[test]
fn responses_have_the_requested_model_name() {
    let server = server();
    let name = |path: &str, model: Value| {
        let mut body = match path {
            "/v1/embeddings" => json!({"input": "a"}),
            "/v1/completions" => completion(&json!({})),
            _ => chat(&json!({})),
        };
        body["model"] = model;
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 200, "{answer:?}");
        (answer.json()["model"].clone(), answer.headers.contains("x-model: stories"))
    };
    for path in ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"] {
        assert_eq!(name(path, json!("stories")), (json!("stories"), false), "{path}");
        assert_eq!(name(path, json!("gpt-4o")), (json!("gpt-4o"), true), "{path}");
        assert_eq!(name(path, Value::Null), (json!("stories"), false), "{path}");
        assert_eq!(name(path, json!("")), (json!("stories"), false), "{path}");
    }
    let body = completion(&json!({"model": "gpt-4o", "stream": true}));
    let chunk = server.stream("/v1/completions", &body).next().unwrap();
    assert_eq!(serde_json::from_str::<Value>(&chunk).unwrap()["model"], "gpt-4o");
    assert_eq!(server.get("/v1/models/gpt-4o").error(), (404, json!("model"), json!("model_not_found")));
}

#[test]
fn api_keys_are_required_except_for_health_checks() {
    let server = Server::new(HttpOptions { keys: ApiKeys::new(["secret".to_owned()]).unwrap(), ..Default::default() });
    for path in ["/v1/models", "/metrics"] {
        assert_eq!(server.get(path).error(), (401, Value::Null, json!("invalid_api_key")));
        assert_eq!(server.send("GET", path, &["Authorization: Bearer Secret"], b"").status, 401);
        assert_eq!(server.send("GET", path, &["Authorization: Bearer secret"], b"").status, 200);
    }
    for path in ["/health", "/ready", "/", "/openapi.json"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    let description = server.get("/openapi.json").json();
    assert!(description["paths"]["/v1/models"]["get"]["responses"]["401"].is_object());
}

#[test]
fn unknown_host_names_are_rejected() {
    let server = server();
    for (host, status) in [("127.0.0.1:1", 200), ("[::1]", 200), ("evil.example", 403)] {
        assert_eq!(server.send("GET", "/health", &[&format!("Host: {host}")], b"").status, status, "{host}");
    }
    let rejected = server.send("GET", "/v1/models", &["Host: chat.example:443"], b"");
    assert_eq!(rejected.error(), (403, Value::Null, json!("host_not_allowed")));
    assert!(rejected.body.contains("--allowed-host"), "{rejected:?}");
    let server = Server::new(HttpOptions { hosts: vec!["chat.example".into()], ..Default::default() });
    assert_eq!(server.send("GET", "/v1/models", &["Host: chat.example:443"], b"").status, 200);
}

#[test]
fn pages_of_other_origins_need_the_cors_option() {
    let preflight = ["Origin: https://a.example", "Access-Control-Request-Method: POST"];
    assert!(!server().send("OPTIONS", "/v1/completions", &preflight, b"").headers.contains("access-control"));
    let cors_origin = Some("https://a.example".parse().unwrap());
    let server = Server::new(HttpOptions { cors_origin, ..Default::default() });
    let answer = server.send("OPTIONS", "/v1/completions", &preflight, b"");
    assert!(answer.headers.contains("access-control-allow-origin: https://a.example"), "{}", answer.headers);
    assert!(!answer.headers.contains("private-network"), "{}", answer.headers);
    // The preflight of a client library's headers, and of a page in a public network.
    let headers = "Access-Control-Request-Headers: authorization,x-stainless-os";
    let more = [preflight[0], preflight[1], headers, "Access-Control-Request-Private-Network: true"];
    let answer = server.send("OPTIONS", "/v1/completions", &more, b"").headers;
    assert!(answer.contains("access-control-allow-headers: authorization,x-stainless-os"), "{answer}");
    assert!(answer.contains("access-control-allow-private-network: true"), "{answer}");
    let answer = server.send("GET", "/v1/models", &[preflight[0]], b"").headers;
    let exposed = "access-control-expose-headers: x-ignored,x-schema-unsupported,x-truncated,x-dropped-turns,x-model,x-stream-id,\
                   x-model-load-seconds,x-request-id,request-id";
    assert!(answer.contains(exposed), "{answer}");
}

#[test]
fn errors_of_requests_name_the_field() {
    let server = Server::new(HttpOptions { max_body: 10_000, ..Default::default() });
    let wrong = |more: Value| server.post("/v1/completions", &completion(&more)).error();
    let field = |name: &str| (400, json!(name), Value::Null);
    assert_eq!(wrong(json!({"temperature": -0.5})), field("temperature"));
    assert_eq!(wrong(json!({"temperature": "hot"})), field("temperature"));
    assert_eq!(wrong(json!({"n": 17})), field("n"));
    assert_eq!(wrong(json!({"prompt": []})), field("prompt"));
    assert_eq!(wrong(json!({"prompt": [512]})), field("prompt"));
    assert_eq!(wrong(json!({"suffix": "x"})), (400, Value::Null, json!("unsupported_by_model")));
    assert_eq!(wrong(json!({"logit_bias": {"512": 1}})), field("logit_bias.512"));
    assert_eq!(wrong(json!({"prompt": "a ".repeat(1000)})).2, "context_length_exceeded");
    assert_eq!(wrong(json!({"model": "x".repeat(257)})), field("model"));
    assert_eq!(wrong(json!({"prompt": "a".repeat(10_000)})).0, 413);

    let send = |method: &str, path: &str, kind: &str, body: &[u8]| server.send(method, path, &[kind], body).status;
    let json = "Content-Type: application/json";
    assert_eq!(send("POST", "/v1/completions", json, b"{\"prompt\": \"x\""), 400);
    assert_eq!(send("POST", "/v1/completions", json, b"[]"), 400);
    assert_eq!(send("POST", "/v1/completions", json, b"\xff"), 400);
    assert_eq!(send("POST", "/v1/completions", "Content-Type: text/plain", b"{\"prompt\": \"x\"}"), 400);
    assert_eq!(send("POST", "/nothing", json, b"{}"), 404);
    let answer = server.send("DELETE", "/v1/models", &[], b"");
    assert_eq!(answer.error(), (405, Value::Null, json!("method_not_allowed")));
    assert!(answer.headers.contains("allow: GET,HEAD"), "{}", answer.headers);
}

#[test]
fn slow_clients_time_out() {
    let timeout = Duration::from_millis(100);
    let options = HttpOptions { header_timeout: timeout, read_timeout: timeout, ..Default::default() };
    let server = Server::new(options);
    let mut head = TcpStream::connect(server.address).unwrap();
    head.write_all(b"GET /health HT").unwrap();
    assert_eq!(head.read_to_end(&mut Vec::new()).unwrap_or(0), 0, "the connection is closed");
    let mut body = TcpStream::connect(server.address).unwrap();
    body.write_all(
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    )
    .unwrap();
    assert_eq!(Answer::read(body).error().0, 408);
}

#[test]
fn json_answers_match_the_schema() {
    let server = server();
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["name", "age"], "properties": {
        "name": {"enum": ["Lily", "Tom"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "child", "schema": schema}});
    let request = chat(&json!({"response_format": format, "max_tokens": 100, "temperature": 1, "n": 3, "seed": 1}));
    let answer = server.post("/v1/chat/completions", &request).json();
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(choice["finish_reason"], "stop", "{choice}");
        let child: Value = serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
        assert!(["Lily", "Tom"].contains(&child["name"].as_str().unwrap()), "{child}");
        assert!((1..=99).contains(&child["age"].as_i64().unwrap()) && child.as_object().unwrap().len() == 2);
    }
    let broken = json!({"type": "json_schema", "json_schema": {"schema": {"type": 5}}});
    let answer = server.post("/v1/chat/completions", &chat(&json!({"response_format": broken})));
    assert_eq!(answer.error().1, "response_format.json_schema.schema");
}

#[test]
fn a_required_tool_call_is_made() {
    let server = server();
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Bern", "Basel"]}}, "required": ["city"],
        "additionalProperties": false});
    let request = json!({"max_tokens": 100, "tools": [{"type": "function", "function": {"name": "weather",
        "parameters": parameters}}], "tool_choice": {"type": "function", "function": {"name": "weather"}}});
    let answer = server.post("/v1/chat/completions", &chat(&request)).json();
    let choice = &answer["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &Value::Null));
    let function = &choice["message"]["tool_calls"][0]["function"];
    assert_eq!(function["name"], "weather");
    let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
    assert!(["Bern", "Basel"].contains(&arguments["city"].as_str().unwrap()));

    let mut streamed = chat(&request);
    streamed["stream"] = json!(true);
    let mut pieces = String::new();
    let mut reasons = Vec::new();
    for data in server.stream("/v1/chat/completions", &streamed).take_while(|data| data != "[DONE]") {
        let choice = serde_json::from_str::<Value>(&data).unwrap()["choices"][0].clone();
        pieces += choice["delta"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap_or_default();
        reasons.extend(choice["finish_reason"].as_str().map(str::to_owned));
    }
    assert_eq!(serde_json::from_str::<Value>(&pieces).unwrap(), arguments);
    assert_eq!(reasons, ["tool_calls"]);
}

#[test]
fn embeddings_have_length_one() {
    let server = server();
    let embed = |request: Value| server.post("/v1/embeddings", &request).json();
    let floats = embed(json!({"input": ["Hello", "The dog"]}));
    assert_eq!((&floats["data"][1]["index"], &floats["model"]), (&json!(1), &json!("stories")));
    let vector: Vec<f64> =
        floats["data"][0]["embedding"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
    let length: f64 = vector.iter().map(|v| v * v).sum();
    assert!((length - 1.0).abs() < 1e-5, "{length}");
    let base64 = embed(json!({"input": "Hello", "encoding_format": "base64"}));
    assert_eq!(base64["data"][0]["embedding"].as_str().unwrap().len(), (64_usize * 4).div_ceil(3) * 4);
}

#[test]
fn text_is_tokenized_and_detokenized() {
    let server = server();
    let ids = server.post("/tokenize", &json!({"content": PROMPT, "add_special": true})).json();
    assert_eq!(ids["tokens"], json!([1, 403, 407, 261, 378]));
    assert_eq!(server.post("/detokenize", &ids).json(), json!({"content": PROMPT}));
}

#[test]
fn the_server_answers_while_the_model_loads() {
    let (start_loading, start) = std::sync::mpsc::channel::<()>();
    let server = Server::with_model(HttpOptions::default(), move || {
        start.recv().unwrap();
        load(1, 1)
    });
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/ready").error(), (503, Value::Null, json!("loading")));
    assert_eq!(server.post("/v1/completions", &completion(&json!({}))).status, 503);
    assert_eq!(server.get("/v1/models").json()["data"][0]["meta"], Value::Null);
    start_loading.send(()).unwrap();
    server.wait_until_ready();
}

#[test]
fn a_shutdown_waits_for_running_streams() {
    let mut server = server();
    let body = completion(&json!({"stream": true, "max_tokens": 200, "ignore_eos": true}));
    let mut events = server.stream("/v1/completions", &body);
    events.next().unwrap();
    server.stop();
    let rest: Vec<String> = events.collect();
    assert_eq!(rest.last().unwrap(), "[DONE]");
    assert!(rest[rest.len() - 2].contains("\"finish_reason\":\"length\""), "{}", rest[rest.len() - 2]);
    server.join();
    assert!(TcpStream::connect(server.address).is_err(), "the port is closed");
}

#[test]
fn a_shutdown_ends_streams_after_the_grace_period() {
    let mut server = Server::new(HttpOptions { grace: Duration::ZERO, ..Default::default() });
    let body = completion(&json!({"stream": true, "n": 16, "max_tokens": 500, "ignore_eos": true}));
    let mut events = server.stream("/v1/completions", &body);
    events.next().unwrap();
    server.stop();
    let rest: Vec<String> = events.collect();
    assert!(rest[rest.len() - 2].contains("shutting_down"), "{rest:?}");
    server.join();
}

/// Each path and method of the OpenAPI description is routed, and its schemas have the fields that requests accept.
#[test]
fn the_openapi_description_matches_the_routes() {
    let server = server();
    let description = server.get("/openapi.json").json();
    assert_eq!(description["openapi"], "3.1.0");
    let paths: Vec<&str> = description["paths"].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(paths.len(), 46, "{paths:?}");
    for path in paths {
        let item = description["paths"][path].as_object().unwrap();
        for method in item.keys() {
            // The id `stories` names a model, but no stored response and no stream. Slot files need a folder.
            let is_missing = path.starts_with("/v1/responses/{id}") || path == "/v1/streams/{id}";
            let has_no_folder = path == "/slots/{id_slot}";
            let path = path.replace("{id}", "stories");
            let status = server.send(&method.to_uppercase(), &path, &[], b"").status;
            let is_expected_error = is_missing && status == 404 || has_no_folder && status == 501;
            assert!([200, 400].contains(&status) || is_expected_error, "{method} {path}: {status}");
        }
    }
    let schemas = &description["components"]["schemas"];
    for field in ["seed", "stop", "logit_bias", "stream", "stream_options", "speculative.n_max"] {
        assert!(schemas["GenerationFields"]["properties"][field].is_object(), "{field}");
    }
    assert!(schemas["ChatFields"]["properties"]["prediction"].is_object());
    assert_eq!(schemas["Prediction"]["required"], json!(["type", "content"]));
    let sampling = &schemas["SamplingFields"]["properties"];
    assert_eq!((&sampling["top_k"]["default"], &sampling["top_p"]["default"]), (&json!(40), &json!(0.95)));
    for option in metal_attention::sampling::NumberOption::ALL {
        assert_eq!(sampling[option.name]["description"], option.doc);
    }
}

#[test]
fn chats_accept_the_fields_that_agents_send() {
    let server = server();
    let post = |more: Value| server.post("/v1/chat/completions", &chat(&more));
    let user = json!({"role": "user", "content": "Hello"});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": null, "strict": null}});
    for more in [
        json!({"tools": null, "tool_choice": null, "stream_options": null, "functions": null, "reasoning": null,
            "reasoning_effort": null, "thinking": null, "parallel_tool_calls": null, "continue_final_message": null}),
        json!({"tools": [], "tool_choice": "auto"}),
        json!({"tools": [tool], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto",
            "tools": [{"type": "function", "function": {"name": "f"}}]}}}),
        json!({"tools": [tool], "tool_choice": "any", "max_tokens": 1}),
        json!({"messages": [user, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, user]}),
        json!({"messages": [user, {"role": "assistant", "content": null, "tool_calls": [{"id": null,
            "function": {"name": "f", "arguments": "{\"a\""}}]}, {"role": "tool", "content": null}, user]}),
        json!({"add_generation_prompt": false}),
    ] {
        assert_eq!(post(more.clone()).status, 200, "{more}");
    }
    for (more, field) in [
        (json!({"reasoning_effort": "huge"}), "reasoning_effort"),
        (json!({"thinking_budget": -2}), "thinking_budget"),
        (json!({"continue_final_message": true}), "continue_final_message"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tools": [tool], "tool_choice": {"type": "function", "name": "g"}}), "tool_choice"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
            "messages[0].content",
        ),
        (
            json!({"messages": [user, {"role": "assistant", "content": "Hm"}], "response_format": {"type": "json_object"}}),
            "messages",
        ),
    ] {
        let answer = post(more.clone());
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(field)), "{more}");
    }
    let effort = post(json!({"reasoning_effort": "high"}));
    assert!(effort.headers.contains("x-ignored: reasoning_effort"), "{}", effort.headers);
    assert!(!post(json!({"reasoning_effort": "none"})).headers.contains("x-ignored"));
}

#[test]
fn a_last_message_of_the_assistant_is_continued() {
    let server = server();
    let post = |last: Value, more: Value| {
        let messages = json!([{"role": "user", "content": "Hello"}, last]);
        let mut request = chat(&json!({"messages": messages}));
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = server.post("/v1/chat/completions", &request).json();
        let tokens = answer["usage"]["prompt_tokens"].clone();
        (answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned(), tokens)
    };
    let last = json!({"role": "assistant", "content": "Once upon a time"});
    let continued = post(last.clone(), json!({}));
    let prompt = json!({"prompt": "User: Hello\nAssistant: Once upon a time"});
    let plain = server.post("/v1/completions", &completion(&prompt)).json();
    assert_eq!(
        continued,
        (plain["choices"][0]["text"].as_str().unwrap().to_owned(), plain["usage"]["prompt_tokens"].clone())
    );
    assert_eq!(post(last.clone(), json!({"continue_final_message": true, "add_generation_prompt": false})), continued);
    let prefix = json!({"role": "assistant", "content": "Once upon a time", "prefix": true});
    assert_eq!(post(prefix, json!({"continue_final_message": false})), continued);
    assert_ne!(post(last, json!({"continue_final_message": false})).1, continued.1);
    let json = json!({"role": "assistant", "content": "{\"a\": ["});
    let schema = json!({"properties": {"a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}});
    let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
    let (rest, _) = post(json, json!({"response_format": format, "max_tokens": 200}));
    assert!(serde_json::from_str::<Value>(&format!("{{\"a\": [{rest}")).is_ok(), "{rest}");
}
