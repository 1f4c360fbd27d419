//! The interface of llama.cpp's server: `/completion`, `/tokenize`, `/apply-template`, `/props`, `/slots`, and OpenAI's paths
//! without `/v1`.

use metal_attention_server::http::HttpOptions;
use serde_json::{Value, json};

use crate::client::{Answer, Server};
use crate::monitoring::server_with_gate;
use crate::{PROMPT, STORY, chat, server};

/// A request for a greedy completion of eight tokens. `more`: further fields.
fn request(more: &Value) -> Value {
    let mut request = json!({"prompt": PROMPT, "temperature": 0, "n_predict": 8});
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

/// The response to [`request`].
fn complete(server: &Server, more: &Value) -> Value {
    let answer = server.post("/completion", &request(more));
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

/// The status, type and field of an error in llama.cpp's form.
fn error(answer: &Answer) -> (u16, Value, Value) {
    let error = &answer.json()["error"];
    assert_eq!(error["code"], answer.status, "{answer:?}");
    assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{answer:?}");
    (answer.status, error["type"].clone(), error["param"].clone())
}

#[test]
fn completions_have_the_fields_of_llama_cpp() {
    let server = server();
    let mut answer = complete(&server, &json!({"return_tokens": true}));
    let timings = answer["timings"].take();
    let settings = answer["generation_settings"].take();
    assert_eq!(
        answer,
        json!({"index": 0, "content": STORY, "tokens": [432, 383, 286, 261, 376, 298, 315, 421], "id_slot": -1, "stop": true,
            "tokens_predicted": 8, "tokens_evaluated": 5, "model": "stories", "generation_settings": null, "prompt":
            "<s> Once upon a time", "has_new_line": false, "truncated": false, "stop_type": "limit", "stopping_word": "",
            "tokens_cached": 0, "timings": null})
    );
    assert_eq!((&timings["prompt_n"], &timings["predicted_n"], &timings["cache_n"]), (&json!(5), &json!(8), &json!(0)));
    let per_second = |n: &str, ms: &str| timings[n].as_f64().unwrap() * 1e3 / timings[ms].as_f64().unwrap();
    // Numbers that are read from JSON may be off by a unit in the last place.
    let equal = |rate: &str, expected: f64| (timings[rate].as_f64().unwrap() / expected - 1.0).abs() < 1e-14;
    assert!(equal("predicted_per_second", per_second("predicted_n", "predicted_ms")), "{timings}");
    assert!(equal("prompt_per_second", per_second("prompt_n", "prompt_ms")), "{timings}");
    for (name, value) in
        [("temperature", json!(0.0)), ("n_predict", json!(8)), ("n_probs", json!(0)), ("stop", json!([]))]
    {
        assert_eq!(settings[name], value, "{name}");
    }
    let again = complete(&server, &json!({}));
    assert_eq!((&again["tokens"], &again["tokens_cached"]), (&json!([]), &json!(4)));

    let stopped = complete(&server, &json!({"stop": ["xyz", " little"], "n_predict": -1}));
    assert_eq!(
        (&stopped["content"], &stopped["stop_type"], &stopped["stopping_word"]),
        (&json!(", there was a"), &json!("word"), &json!(" little"))
    );
    let whole = complete(&server, &json!({"n_predict": -1, "stream": false, "ignore_eos": true}));
    assert_eq!((&whole["stop_type"], &whole["truncated"]), (&json!("limit"), &json!(true)));
    assert_eq!(whole["has_new_line"], whole["content"].as_str().unwrap().contains('\n'));
    // With `n_predict` 0 only the prompt is evaluated.
    let warm = complete(&server, &json!({"n_predict": 0, "prompt": "Tim and"}));
    assert_eq!(
        (&warm["content"], &warm["tokens_predicted"], &warm["stop_type"]),
        (&json!(""), &json!(0), &json!("limit"))
    );
    assert_eq!(complete(&server, &json!({"max_tokens": 3, "n_predict": null}))["tokens_predicted"], 3);
}

#[test]
fn prompts_may_be_texts_ids_or_lists_of_them() {
    let server = server();
    let content = |prompt: Value| complete(&server, &json!({"prompt": prompt}))["content"].clone();
    let ids = json!([1, 403, 407, 261, 378]);
    for prompt in [
        json!(PROMPT),
        ids.clone(),
        json!([PROMPT]),
        json!([ids]),
        json!([1, 403, 407, " a time"]),
        json!({"prompt_string": PROMPT}),
        json!([[1, 403, 407, " a time"]]),
    ] {
        assert_eq!(content(prompt.clone()), STORY, "{prompt}");
    }
    let several = complete(&server, &json!({"prompt": [PROMPT, ids, {"prompt_string": "Tim"}], "n_cmpl": 2}));
    let several = several.as_array().unwrap();
    let indices: Vec<_> = several.iter().map(|answer| answer["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3, 4, 5]);
    assert!(several[..4].iter().all(|answer| answer["content"] == STORY));
    assert_eq!((&several[4]["content"], &several[5]["prompt"]), (&several[5]["content"], &json!("<s> Tim")));
}

#[test]
fn completions_are_streamed_as_objects() {
    let server = server();
    let answer = server.post("/completion", &request(&json!({"stream": true, "n_predict": 3, "n_probs": 2})));
    assert!(answer.headers.contains("content-type: text/event-stream"), "{}", answer.headers);
    let events: Vec<Value> = answer
        .body
        .split_terminator("\n\n")
        .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
        .collect();
    let texts: Vec<_> = events.iter().map(|event| event["content"].as_str().unwrap()).collect();
    assert_eq!(texts, [",", " there", " was", ""]);
    let stops: Vec<_> = events.iter().map(|event| event["stop"].as_bool().unwrap()).collect();
    assert_eq!(stops, [false, false, false, true]);
    let counts: Vec<_> = events.iter().map(|event| event["tokens_predicted"].as_u64().unwrap()).collect();
    assert_eq!(counts, [1, 2, 3, 3]);
    assert!(events[..3].iter().all(|event| event["tokens"].as_array().unwrap().len() == 1));
    assert!(events[..3].iter().all(|event| event["completion_probabilities"].as_array().unwrap().len() == 1));
    assert!(events[3]["timings"]["predicted_n"] == 3 && events[0].get("timings").is_none());
    let first = &events[0]["completion_probabilities"][0];
    assert_eq!((&first["id"], &first["token"], &first["bytes"]), (&json!(432), &json!(","), &json!([44])));
    assert_eq!(first["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(first["top_logprobs"][0]["logprob"], first["logprob"]);

    let two = server.stream("/completion", &request(&json!({"stream": true, "prompt": [PROMPT, PROMPT]})));
    let mut texts = [String::new(), String::new()];
    for event in two.map(|data| serde_json::from_str::<Value>(&data).unwrap()) {
        texts[event["index"].as_u64().unwrap() as usize] += event["content"].as_str().unwrap();
    }
    assert_eq!(texts, [STORY, STORY]);
}

#[test]
fn response_fields_select_the_fields() {
    let server = server();
    let fields = |fields: Value| complete(&server, &json!({"response_fields": fields}));
    assert_eq!(
        fields(json!([
            "content",
            "generation_settings/n_predict",
            "timings/predicted_n",
            "content/x",
            "none",
            "stop/"
        ])),
        json!({"content": STORY, "generation_settings/n_predict": 8, "timings/predicted_n": 8})
    );
    assert_eq!(fields(json!(["none"])), json!({}));
    assert_eq!(fields(json!([]))["content"], STORY);
    let several = complete(&server, &json!({"response_fields": ["index"], "prompt": [PROMPT, PROMPT]}));
    assert_eq!(several, json!([{"index": 0}, {"index": 1}]));
}

#[test]
fn completions_match_grammars_and_schemas() {
    let server = server();
    let content = |more: Value| complete(&server, &more)["content"].as_str().unwrap().to_owned();
    assert_eq!(content(json!({"grammar": "root ::= \" the end\""})), " the end");
    assert_eq!(content(json!({"guided_choice": [", there is", "x"]})), ", there is");
    assert_eq!(content(json!({"regex": " [0-9]{3}"})).trim().len(), 3);
    let schema = json!({"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]});
    let json: Value = serde_json::from_str(&content(json!({"json_schema": schema, "n_predict": 60}))).unwrap();
    assert_eq!(json, json!({"a": 7}));
    // OpenAI's completions and chats accept these fields, too.
    let body = request(&json!({"grammar": "root ::= \" the end\"", "max_tokens": 20}));
    assert_eq!(server.post("/v1/completions", &body).json()["choices"][0]["text"], " the end");
    let answer = server.post("/v1/chat/completions", &chat(&json!({"guided_regex": "yes|no"}))).json();
    assert!(["yes", "no"].contains(&answer["choices"][0]["message"]["content"].as_str().unwrap()), "{answer}");
    for (more, field) in [
        (json!({"grammar": "root ::= ("}), "grammar"),
        (json!({"grammar": 1}), "grammar"),
        (json!({"json_schema": {"type": 5}}), "json_schema"),
        (json!({"json_schema": "x"}), "json_schema"),
        (json!({"regex": "a("}), "regex"),
        (json!({"regex": "a", "grammar": "root ::= \"b\""}), "regex"),
    ] {
        let answer = server.post("/completion", &request(&more));
        assert_eq!(error(&answer), (400, json!("invalid_request_error"), json!(field)), "{more}");
    }
    let schema = json!({"type": "array", "uniqueItems": true});
    let answer = server.post("/completion", &request(&json!({"json_schema": schema})));
    assert!(answer.headers.contains("\nx-schema-unsupported: #/uniqueItems\r\n"), "{}", answer.headers);
}

#[test]
fn errors_have_the_form_of_llama_cpp() {
    let server = server();
    let error_of = |more: Value| error(&server.post("/completion", &request(&more)));
    let invalid = |field: Value| (400, json!("invalid_request_error"), field);
    for (more, field) in [
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [512]}), "prompt"),
        (json!({"prompt": [1, [2]]}), "prompt"),
        (json!({"prompt": vec!["a"; 257]}), "prompt"),
        (json!({"prompt": vec![1; (1 << 20) + 257]}), "prompt"),
        (json!({"prompt": {"prompt_string": "a", "multimodal_data": ["eA=="]}}), "prompt"),
        (json!({"n_predict": "x"}), "n_predict"),
        (json!({"n_cmpl": 17}), "n_cmpl"),
        (json!({"n_probs": 21}), "n_probs"),
        (json!({"n_probs": 1, "post_sampling_probs": true}), "post_sampling_probs"),
        (json!({"stop": ["x".repeat(1025)]}), "stop"),
        (json!({"response_fields": vec!["content"; 64]}), "response_fields"),
        (json!({"response_fields": "content"}), "response_fields"),
        (json!({"grammar": "x".repeat((256 << 10) + 1)}), "grammar"),
        (json!({"mirostat": 2}), "mirostat"),
        (json!({"lora": [{"id": 0, "scale": 1}]}), "lora"),
        (json!({"image_data": [{"data": "eA==", "id": 1}]}), "image_data"),
        (json!({"messages": [{"role": "user", "content": "x"}]}), "messages"),
    ] {
        assert_eq!(error_of(more.clone()), invalid(json!(field)), "{field}");
    }
    assert_eq!(error(&server.post("/completion", &json!({"n_predict": 2}))), invalid(Value::Null));
    for body in ["", "{", "[]", "1", "null", "{\"prompt\":"] {
        let answer = server.send("POST", "/completion", &["Content-Type: application/json"], body.as_bytes());
        assert_eq!(error(&answer), invalid(Value::Null), "{body}");
    }
    let long = server.post("/completion", &request(&json!({"prompt": "a b ".repeat(1000)})));
    assert_eq!(error(&long), (400, json!("exceed_context_size_error"), Value::Null));
    let error = &long.json()["error"];
    assert!(error["n_ctx"] == 512 && error["n_prompt_tokens"].as_u64().unwrap() > 1000, "{error}");
    // Neutral values are ignored. Settings without an effect here are named in a header.
    let neutral = json!({"mirostat": 0, "adaptive_target": -0.01, "mirostat_tau": 5, "lora": [], "image_data": [], "cache_prompt": true, "id_slot": -1,
        "post_sampling_probs": true, "grammar": "", "json_schema": null, "response_fields": null, "no_such_field": 1});
    let answer = server.post("/completion", &request(&neutral));
    assert_eq!((answer.status, &answer.json()["content"]), (200, &json!(STORY)), "{answer:?}");
    assert!(answer.headers.contains("\nx-ignored: id_slot, mirostat_tau\r\n"), "{}", answer.headers);
    // OpenAI's paths have errors in OpenAI's form.
    let openai = server.post("/v1/completions", &json!({"prompt": [512]}));
    assert_eq!(openai.json()["error"]["code"], Value::Null);
}

#[test]
fn t_max_predict_ms_ends_the_text_at_a_line_break() {
    let server = server();
    let more = json!({"n_predict": 400, "t_max_predict_ms": 1, "ignore_eos": true});
    let answer = complete(&server, &more);
    let content = answer["content"].as_str().unwrap();
    assert!(content.ends_with('\n') && content.len() > 20, "{content:?}");
    assert_eq!((&answer["stop_type"], &answer["has_new_line"]), (&json!("limit"), &json!(true)));
    let without = complete(&server, &json!({"n_predict": 400, "ignore_eos": true, "t_max_predict_ms": 0}));
    assert!(without["content"].as_str().unwrap().len() > content.len());
}

#[test]
fn tokenize_returns_pieces() {
    let server = server();
    let tokens = |more: Value| server.post("/tokenize", &more).json()["tokens"].clone();
    assert_eq!(tokens(json!({"content": "a time"})), json!([261, 378]));
    assert_eq!(
        tokens(json!({"content": "a time", "with_pieces": true, "add_special": true})),
        json!([{"id": 1, "piece": "<s>"}, {"id": 261, "piece": " a"}, {"id": 378, "piece": " time"}])
    );
    let pieces = tokens(json!({"content": "\u{1f642}", "with_pieces": true}));
    let bytes: Vec<_> = pieces.as_array().unwrap().iter().map(|token| &token["piece"]).collect();
    assert_eq!(bytes, [&json!(" "), &json!([240]), &json!([159]), &json!([153]), &json!([130])]);
    assert_eq!(tokens(json!({"content": "", "with_pieces": true})), json!([]));
    let wrong = server.post("/detokenize", &json!({"tokens": [512]}));
    assert_eq!(error(&wrong), (400, json!("invalid_request_error"), json!("tokens")));
}

#[test]
fn apply_template_renders_the_prompt() {
    let server = server();
    let apply = |more: Value| server.post("/apply-template", &chat(&more));
    assert_eq!(apply(json!({})).json(), json!({"prompt": "User: Hello\nAssistant:"}));
    assert_eq!(apply(json!({"add_generation_prompt": false})).json(), json!({"prompt": "User: Hello\n"}));
    assert_eq!(error(&apply(json!({"messages": []}))), (400, json!("invalid_request_error"), json!("messages")));
}

#[test]
fn props_and_models_describe_the_server() {
    let server = server();
    let props = server.get("/props?model=stories").json();
    assert_eq!((&props["total_slots"], &props["model_alias"]), (&json!(4), &json!("stories")));
    assert_eq!((&props["engine"], &props["version"]), (&json!("metal-attention"), &json!(env!("CARGO_PKG_VERSION"))));
    assert_eq!((&props["bos_token"], &props["eos_token"]), (&json!("<s>"), &json!("</s>")));
    assert_eq!(props["modalities"], json!({"vision": false, "audio": false}));
    // The built-in model has no path.
    assert_eq!(props["model_path"], "");
    let defaults = &props["default_generation_settings"];
    assert_eq!((&defaults["n_ctx"], &defaults["params"]["n_predict"]), (&json!(512), &json!(-1)));
    assert!(
        props["chat_template"].is_string() && props["build_info"].as_str().unwrap().starts_with("metal-attention ")
    );
    assert_eq!(error(&server.post("/props", &json!({}))).0, 405);
    assert_eq!(error(&server.get("/props?model=a&model=b")).0, 400);

    let meta = &server.get("/v1/models").json()["data"][0]["meta"];
    let expected = json!({"n_ctx": 512, "n_ctx_train": 512, "n_vocab": 512, "n_embd": 64, "n_params": 260_032, "size": 1_040_128,
            "vision": false, "vocab_type": 1});
    assert_eq!(*meta, expected);
    assert_eq!(server.get("/v1/health").json(), json!({"status": "ok"}));
}

#[test]
fn slots_show_the_running_sequences() {
    let (server, controls) = server_with_gate(HttpOptions::default());
    server.wait_until_ready();
    let slots = || server.get("/slots").json();
    let idle = |id: usize| {
        json!({"id": id, "n_ctx": 512, "is_processing": false, "speculative": false, "n_prompt_tokens": 0,
            "n_prompt_tokens_processed": 0, "n_prompt_tokens_cache": 0,
            "next_token": [{"has_next_token": false, "n_decoded": 0, "n_remain": -1}]})
    };
    assert_eq!(slots(), json!([idle(0), idle(1)]));
    let held = controls.gate.close();
    let body = request(&json!({"n_predict": 50, "prompt": [PROMPT, "Tim"], "ignore_eos": true})).to_string();
    let answer = server.send_only("POST", "/completion", &["Content-Type: application/json"], body.as_bytes());
    while slots()[1]["is_processing"] == false {
        held.let_one_step_pass();
    }
    let busy = slots();
    for (slot, n_prompt) in busy.as_array().unwrap().iter().zip([5, 2]) {
        assert_eq!((&slot["is_processing"], &slot["n_prompt_tokens"]), (&json!(true), &json!(n_prompt)), "{slot}");
        assert!(slot["n_prompt_tokens_processed"].as_i64().unwrap() <= n_prompt, "{slot}");
        let next = &slot["next_token"][0];
        assert_eq!(next["n_decoded"].as_i64().unwrap() + next["n_remain"].as_i64().unwrap(), 50, "{slot}");
    }
    assert!(!busy.to_string().contains("Once"));
    let full = server.get("/slots?fail_on_no_slot=1");
    assert_eq!(error(&full), (503, json!("unavailable_error"), Value::Null));
    drop(held);
    assert_eq!(Answer::read(answer).status, 200);
    while slots() != json!([idle(0), idle(1)]) {
        std::thread::yield_now();
    }
    assert_eq!(server.get("/slots?fail_on_no_slot=1").status, 200);
}

#[test]
fn openai_paths_exist_without_v1() {
    let server = server();
    let answer = server.post("/chat/completions", &chat(&json!({}))).json();
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["choices"], server.post("/v1/chat/completions", &chat(&json!({}))).json()["choices"]);
    assert_eq!(server.get("/models").json(), server.get("/v1/models").json());
    let input = json!({"input": PROMPT});
    assert_eq!(server.post("/embeddings", &input).json(), server.post("/v1/embeddings", &input).json());
    for path in ["/rerank", "/reranking", "/v1/reranking"] {
        let answer = server.post(path, &json!({"query": "a", "documents": ["b"]}));
        assert_eq!(answer.error(), (400, Value::Null, json!("unsupported_by_model")), "{path}");
    }
    // `/completions` is llama.cpp's path, not OpenAI's.
    assert_eq!(server.post("/completions", &request(&json!({}))).json()["content"], STORY);
    let api = server.get("/openapi.json").json();
    assert_eq!(
        api["paths"]["/completion"]["post"]["responses"]["400"]["content"]["application/json"]["schema"]["$ref"],
        "#/components/schemas/LlamaCppErrorBody"
    );
    assert_ne!(
        api["paths"]["/chat/completions"]["post"]["operationId"],
        api["paths"]["/v1/chat/completions"]["post"]["operationId"]
    );
}
