//! Anthropic's interface: `/v1/messages` and `/v1/messages/count_tokens`.

use std::time::Duration;

use metal_attention::{Device, EngineOptions, Model};
use metal_attention_chat::ChatTemplate;
use metal_attention_server::http::{ApiKeys, HttpOptions};
use serde_json::{Value, json};

use crate::client::{Answer, Server, load, load_with};
use crate::server;

const PATH: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

/// A chat template whose prompts end with an open `<think>`, so that the answer begins with reasoning.
const THINKS: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}\
    {% if add_generation_prompt %}<think>\n{% if false %}</think>{% endif %}{% endif %}";

/// A request for a greedy answer of eight tokens. `more`: further fields.
fn message(more: &Value) -> Value {
    let mut request = json!({"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8});
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

/// The response to [`message`].
fn ask(server: &Server, more: &Value) -> Value {
    let answer = server.post(PATH, &message(more));
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

/// The events of a streamed answer. Checks that each event's name is its `type`.
fn events(server: &Server, more: &Value) -> Vec<Value> {
    let mut request = message(more);
    request["stream"] = true.into();
    let answer = server.post(PATH, &request);
    assert!(answer.headers.contains("content-type: text/event-stream"), "{answer:?}");
    let event = |event: &str| {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        data
    };
    answer.body.split_terminator("\n\n").map(event).collect()
}

/// The message that clients assemble from the events, without its id.
fn assembled(events: &[Value]) -> Value {
    let mut message = events[0]["message"].clone();
    message.as_object_mut().unwrap().remove("id");
    let mut json = String::new();
    for event in &events[1..] {
        let (index, delta) = (event["index"].as_u64().map(|index| index as usize), &event["delta"]);
        let blocks = message["content"].as_array_mut().unwrap();
        let add = |field: &mut Value, more: &Value| {
            *field = (field.as_str().unwrap().to_owned() + more.as_str().unwrap()).into();
        };
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!(index, Some(blocks.len()));
                blocks.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                let block = &mut blocks[index.unwrap()];
                match delta["type"].as_str().unwrap() {
                    "text_delta" => add(&mut block["text"], &delta["text"]),
                    "thinking_delta" => add(&mut block["thinking"], &delta["thinking"]),
                    "signature_delta" => block["signature"] = delta["signature"].clone(),
                    "input_json_delta" => json += delta["partial_json"].as_str().unwrap(),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" => {
                assert_eq!(index, Some(blocks.len() - 1));
                if !json.is_empty() {
                    blocks[index.unwrap()]["input"] = serde_json::from_str(&std::mem::take(&mut json)).unwrap();
                }
            }
            "message_delta" => {
                let fields = message.as_object_mut().unwrap();
                fields.extend(delta.as_object().unwrap().clone());
                fields.insert("usage".into(), event["usage"].clone());
            }
            "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    message
}

/// A message without its id, and with the sum of evaluated and cached prompt tokens, which may differ between requests.
fn without_id(mut message: Value) -> Value {
    message.as_object_mut().unwrap().remove("id");
    let usage = message["usage"].as_object_mut().unwrap();
    let [evaluated, cached] = ["input_tokens", "cache_read_input_tokens"].map(|name| usage.remove(name).unwrap());
    usage.insert("prompt".into(), (evaluated.as_u64().unwrap() + cached.as_u64().unwrap()).into());
    message
}

/// The status, type and message of an error in Anthropic's form.
fn error(answer: &Answer) -> (u16, String, String) {
    let body = answer.json();
    assert_eq!(body["type"], "error", "{answer:?}");
    let text = |field: &str| body["error"][field].as_str().unwrap().to_owned();
    (answer.status, text("type"), text("message"))
}

/// A server whose model has this chat template.
fn with_template(source: &'static str) -> Server {
    let server = Server::with_model(HttpOptions::default(), move || {
        Ok(load(4, 64)?.with_chat_template(ChatTemplate::new(source).unwrap()))
    });
    server.wait_until_ready();
    server
}

#[test]
fn messages_are_answered() {
    let server = server();
    let answer = server.post(PATH, &message(&json!({"model": "claude-opus-4-6", "metadata": {"user_id": "u"}})));
    let headers = ["x-ignored: metadata\r\n", "x-model: stories\r\n", "\r\nrequest-id: req-"];
    assert!(headers.iter().all(|header| answer.headers.contains(header)), "{}", answer.headers);
    let whole = answer.json();
    let expected = json!({"id": whole["id"], "type": "message", "role": "assistant", "model": "claude-opus-4-6",
        "content": [{"type": "text", "text": " Anna, I a"}], "stop_reason": "max_tokens", "stop_sequence": null,
        "usage": {"input_tokens": 18, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            "output_tokens": 8}});
    assert_eq!(whole, expected);
    let stopped = ask(&server, &json!({"stop_sequences": ["never", " I"]}));
    let fields = [&stopped["content"][0]["text"], &stopped["stop_reason"], &stopped["stop_sequence"]];
    assert_eq!(fields, [&json!(" Anna,"), &json!("stop_sequence"), &json!(" I")]);
    // The context has room for 512 tokens.
    let full = ask(&server, &json!({"max_tokens": null}));
    let fields = [&full["model"], &full["stop_reason"], &full["usage"]["output_tokens"]];
    assert_eq!(fields, [&json!("stories"), &json!("model_context_window_exceeded"), &json!(495)]);
    // Sampling is determined by the seed.
    let seeded = |seed: u32| ask(&server, &json!({"temperature": 1, "top_k": 0, "seed": seed}))["content"].clone();
    assert!(seeded(7) == seeded(7) && seeded(7) != seeded(8));
    assert!(!server.get("/v1/models").headers.contains("\r\nrequest-id: "));
}

#[test]
fn streamed_messages_equal_whole_ones() {
    let server = server();
    let text = events(&server, &json!({}));
    let block = ["content_block_start", "content_block_delta", "content_block_stop"];
    let mut types: Vec<&str> = text.iter().map(|event| event["type"].as_str().unwrap()).collect();
    types.dedup();
    assert_eq!(types, ["message_start", block[0], block[1], block[2], "message_delta", "message_stop"]);
    let start = json!({"input_tokens": 18, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        "output_tokens": 0});
    assert_eq!(text[0]["message"]["usage"], start);
    assert!(text[0]["message"]["id"].as_str().unwrap().starts_with("msg_"));
    for more in [json!({}), json!({"stop_sequences": [" I"]}), json!({"max_tokens": 0}), json!({"max_tokens": 60})] {
        let streamed = assembled(&events(&server, &more));
        assert_eq!(without_id(streamed), without_id(ask(&server, &more)), "{more}");
    }
}

#[test]
fn tools_are_called() {
    let server = server();
    let city = json!({"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]});
    let tools = json!([{"name": "weather", "description": "d", "input_schema": city, "cache_control": {"type": "ephemeral"}},
        {"type": "bash_20250124", "name": "bash"}]);
    let more = json!({"tools": tools, "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 200});
    let answer = server.post(PATH, &message(&more));
    assert!(answer.headers.contains("x-ignored: tools.bash_20250124"), "{}", answer.headers);
    let called = answer.json();
    let id = &called["content"][0]["id"];
    let call = json!([{"type": "tool_use", "id": id, "name": "weather", "input": {"city": "Rome"}}]);
    assert_eq!((&called["content"], &called["stop_reason"]), (&call, &json!("tool_use")));
    assert!(id.as_str().is_some_and(|id| !id.is_empty()));
    let streamed = events(&server, &more);
    let begun = &streamed[1]["content_block"];
    assert_eq!((&begun["name"], &begun["input"]), (&json!("weather"), &json!({})));
    assert_eq!(assembled(&streamed)["content"][0]["input"], json!({"city": "Rome"}));
    // The next turn contains the call and the tool's result.
    let messages = json!([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": called["content"]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "Sunny.", "is_error": false}]}]);
    let next = ask(&server, &json!({"messages": messages, "tools": tools}));
    assert_eq!(next["stop_reason"], "max_tokens");
    let none = json!({"tools": [], "tool_choice": {"type": "any"}});
    let message = "tool_choice wants a call, but there are no tools".to_owned();
    assert_eq!(error(&server.post(PATH, &self::message(&none))), (400, "invalid_request_error".into(), message));
}

#[test]
fn reasoning_is_a_block_with_a_signature() {
    let server = with_template(THINKS);
    let with_display = |display: &str| json!({"max_tokens": 40, "thinking": {"type": "enabled", "budget_tokens": 5, "display": display}});
    let whole = ask(&server, &with_display("summarized"));
    let [reasoning, text] = [&whole["content"][0], &whole["content"][1]];
    assert_eq!(
        (&reasoning["type"], &text["type"], whole["content"].as_array().unwrap().len()),
        (&json!("thinking"), &json!("text"), 2)
    );
    assert!(!reasoning["thinking"].as_str().unwrap().is_empty());
    assert_eq!(reasoning["signature"], "bWV0YWwtYXR0ZW50aW9uIA==");
    let streamed = assembled(&events(&server, &with_display("summarized")));
    assert_eq!(without_id(streamed), without_id(whole.clone()));
    // Reasoning that is omitted from the answer is stored in the signature and restored in the prompt of the next turn.
    let omitted = ask(&server, &with_display("omitted"));
    assert_eq!((&omitted["content"][0]["thinking"], &omitted["content"][1]), (&json!(""), text));
    let streamed = assembled(&events(&server, &with_display("omitted")));
    assert_eq!(without_id(streamed), without_id(omitted.clone()));
    let shows_reasoning = with_template("{{ raise_exception(messages[0].reasoning_content) }}");
    for answer in [&whole, &omitted] {
        let messages = json!([{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "a"}]);
        let (status, kind, message) = error(&shows_reasoning.post(PATH, &message(&json!({"messages": messages}))));
        assert_eq!((status, &*kind), (400, "invalid_request_error"));
        assert!(message.contains(reasoning["thinking"].as_str().unwrap()), "{message}");
    }
    let off = ask(&server, &json!({"thinking": {"type": "disabled"}}));
    assert_eq!(off["content"][0]["type"], "text");
}

#[test]
fn counted_tokens_equal_the_usage() {
    let server = server();
    let tools =
        json!([{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "s"}]);
    for more in [
        json!({}),
        json!({"system": [{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "Be kind."}]}),
        json!({"tools": tools, "tool_choice": {"type": "auto"}}),
        json!({"tools": tools, "tool_choice": {"type": "none"}}),
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once "}]}),
    ] {
        let mut counted = message(&more);
        counted.as_object_mut().unwrap().remove("max_tokens");
        let count = server.post(&format!("{COUNT}?beta=true"), &counted).json();
        assert_eq!(count, json!({"input_tokens": without_id(ask(&server, &more))["usage"]["prompt"]}), "{more}");
    }
    assert_eq!(server.post(COUNT, &message(&json!({}))).json(), json!({"input_tokens": 18}));
}

#[test]
fn a_last_message_of_the_assistant_is_continued() {
    let server = server();
    let continued = |text: &str| {
        let messages = json!([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": text}]);
        ask(&server, &json!({"messages": messages}))["content"][0]["text"].clone()
    };
    let plain = |text: &str| {
        let prompt = json!({"prompt": format!("User: Hello\nAssistant: {text}"), "temperature": 0, "max_tokens": 8});
        server.post("/v1/completions", &prompt).json()["choices"][0]["text"].clone()
    };
    for text in ["Once upon a time", "Once upon a time ", "Once upon\n"] {
        assert_eq!(continued(text), plain(text), "{text:?}");
    }
}

/// Claude Code's billing header, which differs in each request, does not prevent reuse of the prefix.
#[test]
fn a_second_turn_evaluates_only_new_tokens() {
    let engine =
        EngineOptions { device: Device::Cpu, n_ctx: Some(2048), n_seq: 2, n_threads: Some(1), ..Default::default() };
    let server = Server::with_model(HttpOptions::default(), move || load_with(Model::built_in()?, &engine, 2, 8));
    server.wait_until_ready();
    let long = "You tell stories of a little girl and her dog. ".repeat(60);
    let system = |n: u32| {
        let header = format!("x-anthropic-billing-header: cc_version=2.1.{n}; cc_entrypoint=cli; cch={n:05x};");
        json!([{"type": "text", "text": header}, {"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}])
    };
    let tokens = |answer: &Value| {
        let count = |name: &str| answer["usage"][name].as_u64().unwrap();
        (count("input_tokens"), count("cache_read_input_tokens"))
    };
    let first = ask(&server, &json!({"system": system(1)}));
    assert_eq!(tokens(&first), (1279, 0));
    let messages = json!([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": "And then?"}]);
    // All full KV pages of the first turn are reused.
    assert_eq!(tokens(&ask(&server, &json!({"system": system(2), "messages": messages}))), (28, 1280));
    assert_eq!(server.metric("prompt_tokens_total"), 1279.0 + 28.0);
}

#[test]
fn errors_have_the_form_of_anthropic() {
    let server = server();
    let error_of = |more: Value| error(&server.post(PATH, &message(&more)));
    let invalid = |message: &str| (400, "invalid_request_error".to_owned(), message.to_owned());
    let content = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    assert_eq!(error_of(json!({"messages": []})), invalid("messages is empty: give at least one message"));
    assert_eq!(error_of(json!({"max_tokens": -1})), invalid("max_tokens: invalid value: integer `-1`, expected usize"));
    assert_eq!(
        error_of(json!({"mcp_servers": [{"url": "x"}]})),
        invalid("mcp_servers is not supported: give the tools of MCP servers in tools, and call them yourself")
    );
    for (block, expected) in [
        (json!({"type": "teapot"}), "messages[0].content[0]: a block of type \"teapot\" cannot be read"),
        (json!({"type": "image", "source": {}}), "messages[0].content[0]: a picture whose source has the type \"\""),
        (
            json!({"type": "tool_result", "content": [{"type": "image"}]}),
            "messages[0].content[0]: a block of type \"image\" needs a source",
        ),
        (json!({"type": "text", "text": 1}), "messages[0].content[0]: text must be a string"),
        (json!({"type": "tool_use"}), "messages[0].content[0]: a block of type \"tool_use\" has no place"),
    ] {
        let (status, kind, message) = error_of(content(block));
        assert_eq!((status, &*kind), (400, "invalid_request_error"));
        assert!(message.starts_with(expected), "{message}");
    }
    // Claude Code recognises these words and shortens the conversation.
    let long = error_of(json!({"system": "a ".repeat(1000)}));
    assert!(long.2.starts_with("prompt is too long: the prompt has 1019 tokens"), "{long:?}");
    let send = |body: &str| error(&server.send("POST", PATH, &["Content-Type: application/json"], body.as_bytes()));
    assert!(send("{\"messages\": ").2.starts_with("the body is no JSON: "));
    assert_eq!(send("[]"), invalid("the body must be a JSON object"));
    assert_eq!(send("{}"), invalid("missing field `messages`"));
    let unknown = error(&server.get("/v1/messages/x"));
    assert_eq!((unknown.0, &*unknown.1), (404, "not_found_error"));
    let (status, kind, message) =
        error(&with_template("{{ raise_exception('No dogs.') }}").post(PATH, &message(&json!({}))));
    assert_eq!((status, &*kind), (400, "invalid_request_error"));
    assert!(message.contains("No dogs."), "{message}");
}

/// Bodies with excessive depth or numbers of values are rejected before they are processed.
#[test]
fn hostile_bodies_are_rejected() {
    let server = server();
    let rejection = |body: String| {
        let answer = server.send("POST", PATH, &["Content-Type: application/json"], body.as_bytes());
        let (status, kind, message) = error(&answer);
        assert_eq!((status, &*kind), (400, "invalid_request_error"), "{message}");
        message
    };
    let user = |content: &str| format!(r#"{{"messages": [{{"role": "user", "content": {content}}}]}}"#);
    let nested = |n: usize| {
        let block = r#"[{"type":"tool_result","content":"#;
        format!("{}null{}", block.repeat(n), "}]".repeat(n))
    };
    assert!(rejection(user(&nested(20))).contains("only text may stand here"));
    assert!(rejection(user(&nested(100_000))).contains("deep inside each other"));
    let blocks = format!("[{}]", vec!["{}"; 70_000].join(","));
    assert!(rejection(user(&blocks)).contains("holds more than 65536 values"));
    let results = format!("[{}]", vec![r#"{"type":"tool_result"}"#; 5000].join(","));
    assert!(rejection(user(&results)).contains("more than 4096 messages"));
    let schema =
        format!(r#"{{"format": {{"type": "json_schema", "schema": {{"enum": [{}]}}}}}}"#, vec!["1"; 9000].join(","));
    let config = format!(r#"{{"messages": [{{"role": "user", "content": "a"}}], "output_config": {schema}}}"#);
    assert!(rejection(config).contains("output_config holds more than 8192 values"));
    let message = rejection(format!(
        r#"{{"messages": [{{"role": "user", "content": "a"}}], "stop_sequences": ["{}"]}}"#,
        "x".repeat(2000)
    ));
    assert!(message.contains("at most 1024 are allowed"), "{message}");
    assert_eq!(ask(&server, &json!({}))["content"][0]["text"], " Anna, I a");
}

#[test]
fn keys_and_cors_headers_work() {
    let keys = ApiKeys::new(["secret".to_owned()]).unwrap();
    let options = HttpOptions { keys, cors_origin: Some("*".parse().unwrap()), ..Default::default() };
    let server = Server::new(options);
    let send = |method: &str, headers: &[&str]| {
        let headers = [&["Content-Type: application/json", "Origin: https://a.example"], headers].concat();
        server.send(method, PATH, &headers, message(&json!({})).to_string().as_bytes())
    };
    assert_eq!(send("POST", &["x-api-key: secret"]).status, 200);
    for wrong in [&["x-api-key: wrong"][..], &[]] {
        let answer = send("POST", wrong);
        let (status, kind, _) = error(&answer);
        assert_eq!((status, &*kind), (401, "authentication_error"));
        assert!(answer.headers.contains("access-control-allow-origin: *"), "{}", answer.headers);
        assert!(answer.headers.contains(",request-id\r\n"), "{}", answer.headers);
    }
    let wanted = "x-api-key,anthropic-version,anthropic-beta,anthropic-dangerous-direct-browser-access";
    let preflight = ["Access-Control-Request-Method: POST", &format!("Access-Control-Request-Headers: {wanted}")];
    let answer = send("OPTIONS", &preflight).headers;
    assert!(answer.contains(&format!("access-control-allow-headers: {wanted}\r\n")), "{answer}");
    assert!(answer.contains("access-control-allow-methods: GET,HEAD,POST,DELETE\r\n"), "{answer}");
}

#[test]
fn a_failed_stream_ends_with_an_error_event() {
    let mut server = Server::new(HttpOptions { grace: Duration::ZERO, ..Default::default() });
    let mut lines = server.stream(PATH, &message(&json!({"stream": true, "max_tokens": 500})));
    lines.next().unwrap();
    server.stop();
    let last: Value = serde_json::from_str(&lines.last().unwrap()).unwrap();
    let expected = json!({"type": "error", "error": {"type": "overloaded_error",
        "message": "the server is shutting down"}});
    assert_eq!(last, expected);
    server.join();
}

#[test]
fn the_openapi_description_has_the_errors_of_each_interface() {
    let description = server().get("/openapi.json").json();
    let body = |path: &str, status: &str| {
        let responses = &description["paths"][path]["post"]["responses"];
        responses[status]["content"]["application/json"]["schema"]["$ref"].clone()
    };
    for status in ["400", "408", "413", "429", "500", "503", "504"] {
        for path in [PATH, COUNT] {
            assert_eq!(body(path, status), "#/components/schemas/AnthropicErrorBody", "{path} {status}");
        }
        assert_eq!(body("/v1/completions", status), "#/components/schemas/ErrorBody");
    }
    let schemas = description["components"]["schemas"].as_object().unwrap();
    for name in ["AnthropicErrorBody", "AnthropicErrorDetail", "ErrorBody", "OllamaErrorBody", "MessagesFields"] {
        assert!(schemas.contains_key(name), "{name}");
    }
}
