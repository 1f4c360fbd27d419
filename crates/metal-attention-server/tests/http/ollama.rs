//! Ollama's interface: `/api/generate`, `/api/chat`, `/api/embed`, `/api/version`. `ollama_models.rs` has the paths that list
//! and change models.

use metal_attention_server::http::{ApiKeys, HttpOptions};
use serde_json::{Value, json};

use crate::client::{Answer, Server};
use crate::{PROMPT, STORY, server};

/// A request for a greedy raw completion of eight tokens. `more`: further fields.
fn generate(more: &Value) -> Value {
    with(
        json!({"model": "stories", "prompt": PROMPT, "raw": true, "stream": false,
        "options": {"temperature": 0, "num_predict": 8}}),
        more,
    )
}

/// A request for a greedy chat answer of eight tokens. `more`: further fields.
fn chat(more: &Value) -> Value {
    with(
        json!({"model": "stories", "messages": [{"role": "user", "content": "Hello"}], "stream": false,
        "options": {"temperature": 0, "num_predict": 8}}),
        more,
    )
}

/// `request` with further fields.
fn with(mut request: Value, more: &Value) -> Value {
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

/// The JSON of a successful response.
fn ok(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

fn header<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    answer.headers.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

/// The status and message of an error in Ollama's form, whose only field is `error`.
fn error_of(answer: &Answer) -> (u16, String) {
    let body = answer.json();
    assert_eq!(body.as_object().unwrap().len(), 1, "{answer:?}");
    (answer.status, body["error"].as_str().unwrap().to_owned())
}

/// The objects of a stream of JSON lines.
fn lines(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(header(answer, "content-type"), Some("application/x-ndjson"));
    assert!(answer.body.ends_with('\n'));
    answer.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Checks the fields of the last object of an answer: why it ended, token counts, durations.
fn check_end(answer: &Value, reason: &str, prompt: u64, generated: u64) {
    assert_eq!((&answer["done"], &answer["done_reason"]), (&json!(true), &json!(reason)), "{answer}");
    assert_eq!((&answer["prompt_eval_count"], &answer["eval_count"]), (&json!(prompt), &json!(generated)));
    let time = |name: &str| answer[format!("{name}_duration")].as_u64().unwrap();
    assert!(time("total") > time("prompt_eval") + time("eval") && time("total") > time("load"), "{answer}");
}

#[test]
fn a_raw_prompt_is_continued() {
    let server = server();
    for name in ["stories", "stories:latest"] {
        let answer = ok(&server.post("/api/generate", &generate(&json!({"model": name}))));
        assert_eq!((&answer["model"], &answer["response"]), (&json!(name), &json!(STORY)));
        check_end(&answer, "length", 5, 8);
        assert!(answer.get("context").is_none() && answer.get("thinking").is_none());
        // Like 2024-06-19T19:22:45.123456789Z.
        let time = answer["created_at"].as_str().unwrap();
        assert!(time.len() == 30 && time.ends_with('Z') && time.as_bytes()[19] == b'.', "{time}");
    }
    let stopped =
        ok(&server.post("/api/generate", &generate(&json!({"options": {"temperature": 0, "stop": [" girl"]}}))));
    assert_eq!(stopped["response"], ", there was a little");
    check_end(&stopped, "stop", 5, 8);
    // `num_predict` -1: no limit but the context's length.
    let options = json!({"temperature": 0, "num_predict": -1, "stop": [" little"]});
    assert_eq!(ok(&server.post("/api/generate", &generate(&json!({"options": options}))))["response"], ", there was a");
}

#[test]
fn answers_are_streamed_as_json_lines() {
    let server = server();
    let mut request = generate(&json!({}));
    request.as_object_mut().unwrap().remove("stream");
    let texts = lines(&server.post("/api/generate", &request));
    let (last, before) = texts.split_last().unwrap();
    assert_eq!(before.iter().map(|line| line["response"].as_str().unwrap()).collect::<String>(), STORY);
    assert!(before.iter().all(|line| line["done"] == false && line.get("eval_count").is_none()));
    check_end(last, "length", 5, 8);
    assert_eq!(last["response"], "");

    let whole = ok(&server.post("/api/chat", &chat(&json!({}))));
    let texts = lines(&server.post("/api/chat", &chat(&json!({"stream": true}))));
    let text: String = texts.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(json!(text), whole["message"]["content"]);
    assert!(texts.iter().all(|line| line["message"]["role"] == "assistant" && line["model"] == "stories"));
}

#[test]
fn a_context_of_token_ids_is_continued() {
    let server = server();
    let request = |more: Value| generate(&with(json!({"raw": false}), &more));
    let first = ok(&server.post("/api/generate", &request(json!({}))));
    let context = first["context"].as_array().unwrap();
    let prompt = first["prompt_eval_count"].as_u64().unwrap();
    assert_eq!(context.len() as u64, prompt + 8);
    assert_eq!(context[0], 1, "the first token is BOS");
    let second = ok(&server.post("/api/generate", &request(json!({"context": context}))));
    // The second prompt has no BOS of its own.
    assert_eq!(second["prompt_eval_count"], context.len() as u64 + prompt - 1);
    // The oldest tokens are dropped in steps of 128, until prompt and answer (8 tokens) fit the context of 512.
    let long = vec![json!(403); 600];
    let answer = server.post("/api/generate", &request(json!({"context": long})));
    assert_eq!(header(&answer, "x-truncated"), Some("context"));
    let cut = ok(&answer);
    assert_eq!(cut["prompt_eval_count"], 600 - 128 + prompt);
    assert_eq!(cut["context"][0], 1);
    // The steps make the prompt after a slightly longer context begin with the same tokens, which are cached.
    let evaluated = server.metric("prompt_tokens_total");
    let longer = vec![json!(403); 604];
    let answer = ok(&server.post("/api/generate", &request(json!({"context": longer}))));
    assert_eq!(answer["prompt_eval_count"], 604 - 128 + prompt);
    assert_eq!(server.metric("prompt_tokens_total") - evaluated, (4 + prompt - 1) as f64);
    let (status, error) =
        error_of(&server.post("/api/generate", &request(json!({"context": long, "truncate": false}))));
    assert!(status == 400 && error.contains("512"), "{error}");
}

#[test]
fn old_messages_are_dropped_from_a_full_context() {
    let server = server();
    let story = "Once upon a time, there was a little girl. ".repeat(24);
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let messages = json!([
        message("system", "Be kind."),
        message("user", &story),
        message("assistant", &story),
        message("user", &story),
        message("user", "Hello")
    ]);
    let answer = server.post("/api/chat", &chat(&json!({"messages": messages})));
    assert_eq!((header(&answer, "x-dropped-turns"), header(&answer, "x-truncated")), (Some("1"), None));
    let remaining = json!([messages[0], messages[3], messages[4]]);
    let expected = ok(&server.post("/api/chat", &chat(&json!({"messages": remaining}))));
    let answer = ok(&answer);
    assert_eq!(
        (&answer["message"], &answer["prompt_eval_count"]),
        (&expected["message"], &expected["prompt_eval_count"])
    );
    for more in
        [json!({"messages": messages, "truncate": false}), json!({"messages": [message("user", &story.repeat(3))]})]
    {
        let (status, error) = error_of(&server.post("/api/chat", &chat(&more)));
        assert!(status == 400 && error.contains("context"), "{error}");
    }
}

#[test]
fn answers_match_the_requested_format() {
    let server = server();
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]});
    let options = json!({"temperature": 0, "num_predict": 200});
    for (path, request) in [("/api/generate", generate(&json!({}))), ("/api/chat", chat(&json!({})))] {
        let text = |format: Value| {
            let answer = ok(&server.post(path, &with(request.clone(), &json!({"format": format, "options": options}))));
            answer["response"].as_str().or(answer["message"]["content"].as_str()).unwrap().to_owned()
        };
        assert_eq!(serde_json::from_str::<Value>(&text(schema.clone())).unwrap(), json!({"a": "x"}), "{path}");
        assert!(text(json!("json")).starts_with('{'), "{path}");
        assert_eq!(text(json!("")), text(json!(null)));
    }
}

#[test]
fn log_probabilities_are_returned() {
    let server = server();
    let answer = ok(&server.post("/api/generate", &generate(&json!({"logprobs": true, "top_logprobs": 2}))));
    let logprobs = answer["logprobs"].as_array().unwrap();
    let tokens: Vec<&str> = logprobs.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(tokens.concat(), STORY);
    assert!(logprobs.iter().all(|token| token["top_logprobs"][0]["logprob"] == token["logprob"]));
    assert!(logprobs.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 2));
    let streamed = lines(&server.post("/api/chat", &chat(&json!({"logprobs": true, "stream": true}))));
    assert_eq!(streamed.iter().filter_map(|line| line["logprobs"].as_array()).flatten().count(), 8);
    let answer = server.post("/api/generate", &generate(&json!({"top_logprobs": 2})));
    assert_eq!(header(&answer, "x-ignored"), Some("top_logprobs"));
}

#[test]
fn options_without_an_effect_are_named_in_a_header() {
    let server = server();
    let options = json!({"temperature": 0, "num_ctx": 513, "num_gpu": 1, "numa": false, "made_up": 1});
    let answer = server.post("/api/chat", &chat(&json!({"options": options, "shift": true, "think": false})));
    assert_eq!((answer.status, header(&answer, "x-ignored")), (200, Some("num_ctx, num_gpu, shift")));
    let answer = server.post("/api/generate", &generate(&json!({"options": {"num_ctx": 512, "num_predict": 1}})));
    assert_eq!((answer.status, header(&answer, "x-ignored")), (200, None));
}

#[test]
fn unsupported_and_invalid_fields_are_rejected_by_name() {
    let server = server();
    let user = |more: Value| json!({"messages": [with(json!({"role": "user", "content": "x"}), &more)]});
    for (path, more, status, named) in [
        ("chat", json!({"model": "nope"}), 404, "'nope'"),
        ("chat", json!({"model": "nope", "stream": true}), 404, "'nope'"),
        ("chat", json!({"model": "/etc/passwd"}), 404, "/etc/passwd"),
        ("chat", json!({"model": "stories:7b"}), 404, "'stories:7b'"),
        ("chat", json!({"model": ""}), 400, "model is required"),
        ("chat", json!({"model": null}), 400, "model is required"),
        ("chat", json!({"model": 1}), 400, "model"),
        ("chat", json!({"think": true}), 400, "\"stories\" does not support thinking"),
        ("chat", json!({"think": "banana"}), 400, "think"),
        ("chat", json!({"format": "xml"}), 400, "format"),
        ("chat", json!({"format": {"type": 7}}), 400, "format"),
        ("chat", json!({"keep_alive": "soon"}), 400, "keep_alive"),
        ("chat", json!({"options": {"mirostat": 1}}), 400, "mirostat"),
        ("chat", json!({"options": {"temperature": -1}}), 400, "temperature"),
        ("chat", json!({"options": {"top_k": "many"}}), 400, "top_k"),
        ("chat", json!({"options": 1}), 400, "options"),
        ("chat", json!({"top_logprobs": 21}), 400, "top_logprobs"),
        ("chat", user(json!({"images": ["aGk="]})), 400, "sees no pictures"),
        ("chat", user(json!({"role": "robot"})), 400, "messages[0].role"),
        ("chat", user(json!({"content": 1})), 400, "messages[0].content"),
        ("chat", json!({"messages": "x"}), 400, "messages"),
        ("chat", json!({"tools": [{"type": "function"}]}), 400, "tools"),
        ("generate", json!({"template": "{{ .Prompt }}"}), 400, "template"),
        ("generate", json!({"images": ["aGk="]}), 400, "images"),
        ("generate", json!({"system": "Be kind."}), 400, "raw mode"),
        ("generate", json!({"context": [1]}), 400, "raw mode"),
        ("generate", json!({"raw": false, "context": [512]}), 400, "context"),
        ("generate", json!({"raw": false, "context": [-1]}), 400, "context"),
        ("generate", json!({"suffix": "x"}), 400, "filling in the middle"),
        ("generate", json!({"prompt": ["x"]}), 400, "prompt"),
    ] {
        let request = if path == "chat" { chat(&more) } else { generate(&more) };
        let (got, error) = error_of(&server.post(&format!("/api/{path}"), &request));
        assert!(got == status && error.contains(named), "{more}: {got} {error}");
    }
    for body in ["", "{", "[]", "{\"messages\": []}", "{\"model\": \"stories\", \"options\": {\"a\": 1e999}}"] {
        let answer = server.send("POST", "/api/chat", &["Content-Type: application/json"], body.as_bytes());
        assert_eq!(error_of(&answer).0, 400, "{body}");
    }
    assert_eq!(server.get("/api/chat").status, 405);
}

#[test]
fn hostile_bodies_are_rejected() {
    let server = server();
    let list = |n: usize, item: &str| vec![item; n].join(",");
    for body in [
        format!(r#"{{"model": "stories", "messages": [{}]}}"#, list(5000, r#"{"role": "user", "content": "x"}"#)),
        format!(r#"{{"model": "stories", "messages": {}1{}}}"#, "[".repeat(100_000), "]".repeat(100_000)),
        format!(r#"{{"model": "stories", "prompt": "x", "context": [{}]}}"#, list(1_100_000, "1")),
        format!(r#"{{"model": "stories", "prompt": "x", "context": [{}]}}"#, list(1000, "99999999999")),
        format!(r#"{{"model": "{}", "prompt": "x", "messages": []}}"#, "x".repeat(300)),
        format!(r#"{{"model": "stories", "options": {{"stop": [{}]}}}}"#, list(33, "\"x\"")),
        format!(r#"{{"model": "stories", "options": {{{}}}}}"#, list(1100, "\"x\": 1")),
        format!(r#"{{"model": "stories", "format": {{"enum": [{}]}}}}"#, list(9000, "1")),
        format!(r#"{{"model": "stories", "input": [{}]}}"#, list(300, "\"x\"")),
        r#"{"model": "stories", "input": [["x"]]}"#.to_owned(),
        r#"{"model": "stories", "input": "x", "dimensions": 65}"#.to_owned(),
    ] {
        let path = match body {
            _ if body.contains("input") => "/api/embed",
            _ if body.contains("prompt") => "/api/generate",
            _ => "/api/chat",
        };
        let answer = server.send("POST", path, &["Content-Type: application/json"], body.as_bytes());
        assert_eq!(error_of(&answer).0, 400, "{body:.80}: {answer:?}");
    }
    assert_eq!(ok(&server.post("/api/generate", &generate(&json!({}))))["response"], STORY);
}

#[test]
fn texts_are_embedded() {
    let server = server();
    let embed = |more: Value| server.post("/api/embed", &with(json!({"model": "stories"}), &more));
    let vectors = |more: Value| ok(&embed(more))["embeddings"].as_array().unwrap().clone();
    let openai = server.post("/v1/embeddings", &json!({"input": PROMPT})).json();
    let whole = ok(&embed(json!({"input": PROMPT, "options": {"num_ctx": 64}, "keep_alive": "5m"})));
    assert_eq!(whole["embeddings"], json!([openai["data"][0]["embedding"]]));
    assert_eq!((&whole["prompt_eval_count"], &whole["model"]), (&json!(5), &json!("stories")));
    assert!(whole["total_duration"].as_u64() > whole["load_duration"].as_u64());
    let old = ok(&server.post("/api/embeddings", &json!({"model": "stories:latest", "prompt": PROMPT})));
    assert_eq!(old["embedding"], whole["embeddings"][0]);
    assert_eq!(vectors(json!({"input": [PROMPT, PROMPT]})).len(), 2);
    for nothing in [json!(""), json!([]), json!(null)] {
        assert_eq!(vectors(json!({"input": nothing})), Vec::<Value>::new());
    }
    assert_eq!(ok(&server.post("/api/embeddings", &json!({"model": "stories", "prompt": ""})))["embedding"], json!([]));
    let cut = &vectors(json!({"input": PROMPT, "dimensions": 8}))[0];
    let length: f64 = cut.as_array().unwrap().iter().map(|x| x.as_f64().unwrap().powi(2)).sum();
    assert!(cut.as_array().unwrap().len() == 8 && (length - 1.0).abs() < 1e-6, "{cut}");
    // The second input exceeds the context of 512 tokens and is truncated to it.
    let long = json!({"input": ["x", "Once upon a time ".repeat(300)]});
    let answer = embed(long.clone());
    assert_eq!(header(&answer, "x-truncated"), Some("input[1]"));
    assert_eq!(ok(&answer)["prompt_eval_count"], 512 + 3);
    assert_eq!(error_of(&embed(with(long, &json!({"truncate": false})))).0, 400);
}

#[test]
fn a_request_without_a_prompt_loads_the_model() {
    let server = server();
    for (path, more) in [
        ("chat", json!({})),
        ("chat", json!({"messages": []})),
        ("chat", json!({"messages": null, "prompt": "x"})),
        ("generate", json!({})),
        ("generate", json!({"prompt": ""})),
    ] {
        let answer = ok(&server.post(&format!("/api/{path}"), &with(json!({"model": "stories"}), &more)));
        assert_eq!((&answer["done"], &answer["done_reason"]), (&json!(true), &json!("load")), "{path} {more}");
        let text = if path == "chat" { &answer["message"]["content"] } else { &answer["response"] };
        assert!(text == "" && answer.get("eval_count").is_none());
    }
}

#[test]
fn clients_recognise_the_server_as_ollama() {
    let server = server();
    assert_eq!(server.get("/").body, "Ollama is running");
    assert_eq!(server.send("HEAD", "/", &[], b"").status, 200);
    let page = server.send("GET", "/", &["Accept: text/html,application/xhtml+xml"], b"");
    assert!(page.body.contains("<html") && page.headers.contains("content-security-policy"));
    assert_eq!(ok(&server.get("/api/version")), json!({"version": "0.12.11"}));
    // `curl -d` sends this content type. A foreign page could make a browser send it, too, but with an Origin.
    let form = "Content-Type: application/x-www-form-urlencoded";
    let body = generate(&json!({})).to_string();
    assert_eq!(ok(&server.send("POST", "/api/generate", &[form], body.as_bytes()))["response"], STORY);
    let from_page = server.send("POST", "/api/generate", &[form, "Origin: http://evil.example"], body.as_bytes());
    assert_eq!(error_of(&from_page).0, 400);
}

#[test]
fn ollama_paths_need_the_api_key() {
    let server = Server::new(HttpOptions { keys: ApiKeys::new(["secret".to_owned()]).unwrap(), ..Default::default() });
    assert_eq!(error_of(&server.get("/api/version")).0, 401);
    assert_eq!(server.send("GET", "/api/version", &["Authorization: Bearer secret"], b"").status, 200);
    assert_eq!(server.get("/").body, "Ollama is running");
}
