//! OpenAI's Responses interface: `/v1/responses`, stored responses and their items.

use metal_attention_server::http::{ApiKeys, HttpOptions, ResponseStore, StoreLimits};
use serde_json::{Value, json};

use crate::client::{Answer, Server};
use crate::server;

const PATH: &str = "/v1/responses";

/// A request for a greedy response of eight tokens. `more`: further fields.
fn request(more: &Value) -> Value {
    let mut request = json!({"input": "Hello", "temperature": 0, "max_output_tokens": 8});
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

/// A function tool with one possible argument.
fn weather() -> Value {
    json!({"type": "function", "name": "weather", "parameters": {"type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome"]}}, "required": ["city"]}})
}

/// A request whose answer must be a call of the custom tool `pick`, whose input has the format.
fn pick(format: &Value) -> Value {
    let tool = json!({"type": "custom", "name": "pick", "format": format});
    request(&json!({"tools": [tool], "tool_choice": {"type": "custom", "name": "pick"}, "max_output_tokens": 60}))
}

/// The events of a stream.
fn stream(server: &Server, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = true.into();
    server.stream(PATH, &body).map(|data| serde_json::from_str(&data).unwrap()).collect()
}

/// The types of the events, separated by spaces; repetitions are left out.
fn event_types(events: &[Value]) -> String {
    let mut types: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    types.dedup();
    types.join(" ")
}

#[test]
fn a_response_has_all_its_fields() {
    let server = server();
    let answer =
        server.post(PATH, &request(&json!({"metadata": {"a": "b"}, "instructions": "Be kind.", "user": "me"})));
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.headers.contains("x-ignored: metadata, user"), "{answer:?}");
    let mut response = answer.json();
    let take = |value: &mut Value| value.take().as_str().unwrap().to_owned();
    let id = take(&mut response["id"]);
    assert!(id.starts_with("resp_") && id.len() == 37, "{id}");
    let item = take(&mut response["output"][0]["id"]);
    assert_eq!(item, format!("msg_{}0000", &id[5..]));
    let text = take(&mut response["output"][0]["content"][0]["text"]);
    assert!(!text.is_empty());
    assert!(response["created_at"].take().as_u64().is_some());
    let usage = response["usage"].take();
    let [input, output, total] =
        ["input_tokens", "output_tokens", "total_tokens"].map(|name| usage[name].as_u64().unwrap());
    assert!(input > 0 && output == 8 && total == input + output, "{usage}");
    assert_eq!(
        response,
        json!({"id": null, "object": "response", "created_at": null, "completed_at": null, "status": "incomplete",
            "error": null, "incomplete_details": {"reason": "max_output_tokens"}, "usage": null, "output": [
                {"type": "message", "id": null, "role": "assistant", "status": "incomplete", "content": [
                    {"type": "output_text", "text": null, "annotations": [], "logprobs": []}]}],
            "model": "stories", "background": false, "instructions": "Be kind.", "max_output_tokens": 8,
            "max_tool_calls": null, "metadata": {"a": "b"}, "parallel_tool_calls": true, "previous_response_id": null,
            "prompt_cache_key": null, "reasoning": {"effort": null, "summary": null}, "safety_identifier": null,
            "service_tier": "default", "store": true, "temperature": 0.0, "text": {"format": {"type": "text"}},
            "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": response["top_p"],
            "truncation": "disabled", "user": "me"})
    );
    // The path without /v1 returns the stored response.
    let stored = server.get(&format!("/responses/{id}")).json();
    assert_eq!((&stored["id"], &stored["output"][0]["content"][0]["text"]), (&json!(id), &json!(text)));
}

#[test]
fn a_stream_has_events_in_order() {
    let server = server();
    let events = stream(&server, &request(&json!({})));
    assert_eq!(
        event_types(&events),
        "response.created response.in_progress response.output_item.added response.content_part.added \
         response.output_text.delta response.output_text.done response.content_part.done response.output_item.done \
         response.incomplete"
    );
    for (i, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], i, "{event}");
    }
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    let text: String = deltas.map(|event| event["delta"].as_str().unwrap()).collect();
    let whole = server.post(PATH, &request(&json!({}))).json();
    assert_eq!(whole["output"][0]["content"][0]["text"], text);
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["output"][0]["content"][0]["text"], text);
    assert_eq!(last["usage"]["output_tokens"], 8);
}

#[test]
fn tool_calls_are_output_items() {
    let server = server();
    let body = request(&json!({"tools": [weather()], "tool_choice": "required", "parallel_tool_calls": false,
        "max_output_tokens": 100}));
    let response = server.post(PATH, &body).json();
    let call = response["output"].as_array().unwrap().last().unwrap();
    assert_eq!(
        (&call["type"], &call["name"], &call["status"]),
        (&json!("function_call"), &json!("weather"), &json!("completed"))
    );
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"city": "Rome"}));
    assert!(call["call_id"].as_str().unwrap().starts_with("call_"));
    let events = stream(&server, &body);
    assert!(
        event_types(&events).ends_with(
            "response.output_item.added response.function_call_arguments.delta response.function_call_arguments.done \
             response.output_item.done response.completed"
        ),
        "{}",
        event_types(&events)
    );
    // A required call has no text to which a format could apply.
    let mut with_format = body.clone();
    with_format["text"] = json!({"format": {"type": "json_object"}});
    let answer = server.post(PATH, &with_format);
    assert!(answer.headers.contains("x-ignored: text.format"), "{answer:?}");
    assert_eq!(answer.json()["output"].as_array().unwrap().last().unwrap()["type"], "function_call");
    // A call of a namespace's function has the function's name and the namespace's.
    let tools = json!([{"type": "namespace", "name": "mcp__sky__", "tools": [weather()]}]);
    let body = request(&json!({"tools": tools, "tool_choice": "required", "parallel_tool_calls": false,
        "max_output_tokens": 100}));
    let response = server.post(PATH, &body).json();
    let call = response["output"].as_array().unwrap().last().unwrap();
    assert_eq!((&call["name"], &call["namespace"]), (&json!("weather"), &json!("mcp__sky__")));
}

#[test]
fn a_call_that_is_cut_off_is_incomplete() {
    let server = server();
    let city = "Llanfairpwllgwyngyllgogerychwyrndrobwllllantysiliogogogoch";
    let mut tool = weather();
    tool["parameters"]["properties"]["city"]["enum"] = json!([city]);
    let call = |tool: Value, kind: &str, field: &str| {
        let body = request(&json!({"tools": [tool], "tool_choice": "required", "max_output_tokens": 60}));
        let events = stream(&server, &body);
        let last = &events.last().unwrap();
        assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.incomplete"), &json!("incomplete")));
        let call = last["response"]["output"].as_array().unwrap().last().unwrap().clone();
        assert_eq!((&call["type"], &call["status"]), (&json!(kind), &json!("incomplete")), "{call}");
        let whole = server.post(PATH, &body).json()["output"].as_array().unwrap().last().unwrap().clone();
        assert_eq!((&whole["status"], &whole[field]), (&call["status"], &call[field]));
        call[field].as_str().unwrap().to_owned()
    };
    let arguments: Value = serde_json::from_str(&call(tool, "function_call", "arguments")).unwrap();
    let begun = arguments["city"].as_str().unwrap();
    assert!(begun.len() > 5 && begun.len() < city.len() && city.starts_with(begun), "{begun}");
    let input = call(json!({"type": "custom", "name": "write"}), "custom_tool_call", "input");
    assert!(!input.is_empty());
}

#[test]
fn a_custom_tool_gets_text_input() {
    let server = server();
    for (format, texts) in [
        (json!({"type": "grammar", "syntax": "regex", "definition": "yes|no"}), ["yes", "no"]),
        (
            json!({"type": "grammar", "syntax": "lark", "definition": "start: \"a/b\" | WORD\nWORD: /cd/"}),
            ["a/b", "cd"],
        ),
    ] {
        let response = server.post(PATH, &pick(&format)).json();
        let [call] = response["output"].as_array().unwrap().as_slice() else { panic!("{response}") };
        assert_eq!((&call["type"], &call["name"]), (&json!("custom_tool_call"), &json!("pick")));
        assert!(texts.contains(&call["input"].as_str().unwrap()), "{call}");
        let events = stream(&server, &pick(&format));
        assert_eq!(
            event_types(&events),
            "response.created response.in_progress response.output_item.added response.custom_tool_call_input.delta \
             response.custom_tool_call_input.done response.output_item.done response.completed"
        );
        assert_eq!(events[events.len() - 3]["input"], call["input"]);
    }
    // Without a grammar the input is free text.
    let response = server.post(PATH, &pick(&json!({"type": "text"}))).json();
    assert_eq!(response["output"][0]["type"], "custom_tool_call", "{response}");
    for (syntax, definition) in [("regex", "("), ("lark", "start: missing"), ("lark", "x")] {
        let format = json!({"type": "grammar", "syntax": syntax, "definition": definition});
        let answer = server.post(PATH, &pick(&format));
        assert_eq!(answer.error(), (400, json!("tools"), Value::Null), "{definition}");
    }
}

#[test]
fn a_response_continues_a_stored_one() {
    let server = server();
    let first = server.post(PATH, &request(&json!({"instructions": "Be kind."}))).json();
    let (id, text) = (first["id"].as_str().unwrap(), first["output"][0]["content"][0]["text"].as_str().unwrap());
    let next = json!({"previous_response_id": id, "input": [{"role": "user", "content": "And?"}]});
    let by_hand = json!({"input": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": text},
        {"role": "user", "content": "And?"}]});
    let referred = json!({"input": [{"role": "user", "content": "Hello"},
        {"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "And?"}]});
    let tokens = |body: &Value| server.post("/v1/responses/input_tokens", body).json();
    let n = tokens(&by_hand);
    assert_eq!(n["object"], "response.input_tokens");
    assert_eq!((tokens(&next), tokens(&referred)), (n.clone(), n.clone()));
    let second = server.post(PATH, &request(&next)).json();
    assert_eq!(second["usage"]["input_tokens"], n["input_tokens"]);
    assert_eq!(second["previous_response_id"], id);

    let items = |query: &str| {
        let answer = server.get(&format!("{PATH}/{}/input_items{query}", second["id"].as_str().unwrap()));
        assert_eq!(answer.status, 200, "{answer:?}");
        let list = answer.json();
        let texts = list["data"].as_array().unwrap().iter().map(|item| item["content"][0]["text"].as_str().unwrap());
        let texts: Vec<String> = texts.map(str::to_owned).collect();
        assert_eq!(list["first_id"], list["data"][0]["id"]);
        (texts, list["has_more"].as_bool().unwrap(), list["last_id"].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(items("").0, ["And?", text, "Hello"]);
    let (texts, more, last) = items("?order=asc&limit=2");
    assert_eq!((texts, more), (vec!["Hello".into(), text.to_owned()], true));
    assert_eq!(items(&format!("?order=asc&after={last}")).0, ["And?"]);
    for query in ["?limit=0", "?limit=101", "?limit=x", "?order=x", "?after=x"] {
        let answer = server.get(&format!("{PATH}/{id}/input_items{query}"));
        assert_eq!(answer.error().0, 400, "{query}");
    }

    assert_eq!(server.post(&format!("{PATH}/{id}/cancel"), &json!({})).error().0, 400);
    assert_eq!(server.get(&format!("{PATH}/{id}?stream=true")).error().0, 400);
    let deleted = server.send("DELETE", &format!("{PATH}/{id}"), &[], b"").json();
    assert_eq!(deleted, json!({"id": id, "object": "response", "deleted": true}));
    let missing = (404, json!("id"), json!("response_not_found"));
    for path in ["", "/input_items"] {
        assert_eq!(server.get(&format!("{PATH}/{id}{path}")).error(), missing);
    }
    assert_eq!(server.send("DELETE", &format!("{PATH}/{id}"), &[], b"").error(), missing);
    assert_eq!(server.post(&format!("{PATH}/{id}/cancel"), &json!({})).error(), missing);
    let answer = server.post(PATH, &request(&next));
    assert_eq!(answer.error(), (400, json!("previous_response_id"), json!("previous_response_not_found")));
    assert!(answer.body.contains(id));
    // The second response has its own copy of the first one's items.
    let third = json!({"previous_response_id": second["id"]});
    assert_eq!(server.post(PATH, &request(&third)).status, 200);
    assert_eq!(server.post(PATH, &request(&referred)).error(), (400, json!("input[1]"), json!("item_not_found")));
}

#[test]
fn stored_responses_belong_to_one_key() {
    let keys = ApiKeys::new(["one".to_owned(), "two".to_owned()]).unwrap();
    let limits = StoreLimits { responses: 2, ..Default::default() };
    let server = Server::new(HttpOptions { keys, responses: ResponseStore::in_memory(limits), ..Default::default() });
    let send = |key: &str, method: &str, path: &str, body: &str| {
        let headers = ["Content-Type: application/json", &format!("Authorization: Bearer {key}")];
        Answer::read(server.send_only(method, path, &headers, body.as_bytes()))
    };
    let make = || send("one", "POST", PATH, &request(&json!({})).to_string()).json()["id"].as_str().unwrap().to_owned();
    let id = make();
    let path = format!("{PATH}/{id}");
    assert_eq!(send("one", "GET", &path, "").status, 200);
    for (method, path) in [("GET", path.clone()), ("DELETE", path.clone()), ("GET", format!("{path}/input_items"))] {
        assert_eq!(send("two", method, &path, "").error().0, 404);
    }
    let next = request(&json!({"previous_response_id": id})).to_string();
    assert_eq!(send("two", "POST", PATH, &next).error().0, 400);
    assert_eq!(send("one", "POST", PATH, &next).status, 200);
    assert_eq!(send("none", "GET", &path, "").status, 401);
    make();
    make();
    assert_eq!(send("one", "GET", &path, "").status, 404, "two later responses are stored instead");
}

#[test]
fn schemas_and_log_probabilities_are_supported() {
    let server = server();
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]});
    let format = json!({"type": "json_schema", "name": "n", "schema": schema, "strict": true});
    let body = request(&json!({"text": {"format": format, "verbosity": "low"}, "max_output_tokens": 60}));
    let response = server.post(PATH, &body).json();
    let text = response["output"][0]["content"][0]["text"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(text).unwrap(), json!({"a": "x"}));
    assert_eq!(response["text"], body["text"]);

    let body = request(&json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2}));
    let part = server.post(PATH, &body).json()["output"][0]["content"][0].clone();
    let list = part["logprobs"].as_array().unwrap();
    let tokens: String = list.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!((list.len(), tokens.trim_start()), (8, part["text"].as_str().unwrap().trim_start()));
    assert!(list.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 2));
    let events = stream(&server, &body);
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    assert_eq!(
        deltas.flat_map(|event| event["logprobs"].as_array().unwrap()).collect::<Vec<_>>(),
        list.iter().collect::<Vec<_>>()
    );
}

#[test]
fn unsupported_and_invalid_fields_are_rejected_by_name() {
    let server = server();
    let error_of = |more: Value| server.post(PATH, &request(&more)).error();
    for field in ["background", "conversation", "prompt", "context_management", "moderation"] {
        assert_eq!(error_of(json!({field: {"id": "x"}})), (400, json!(field), json!("unsupported_parameter")));
    }
    for (more, field) in [
        (json!({"input": []}), "input"),
        (json!({"input": null}), "input"),
        (json!({"input": 1}), "input"),
        (json!({"input": [{"type": "reasoning"}]}), "input"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), "input[0]"),
        (json!({"input": [{"type": "compaction_trigger"}]}), "input[0]"),
        (json!({"input": vec![json!({"role": "user"}); 5000]}), "input"),
        (json!({"input": vec![json!({"role": "user"}); 9000]}), "input"),
        (json!({"tools": [{"type": "function"}]}), "tools[0]"),
        (json!({"tools": [1]}), "tools[0]"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": {"type": "web_search"}}), "tool_choice"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"text": {"format": []}}), "text.format"),
        (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema"),
        (json!({"text": {"format": {"type": "json_schema", "schema": {}, "strict": 1}}}), "text.format.strict"),
        (json!({"top_logprobs": 21}), "top_logprobs"),
        (json!({"truncation": "x"}), "truncation"),
        (json!({"metadata": []}), "metadata"),
        (json!({"reasoning": {"effort": "x"}}), "reasoning.effort"),
        (json!({"previous_response_id": "../../etc/passwd"}), "previous_response_id"),
        (json!({"include": vec!["x"; 100]}), "include"),
    ] {
        let (status, param, _) = error_of(more.clone());
        assert_eq!((status, param), (400, json!(field)), "{}", &more.to_string()[..100.min(more.to_string().len())]);
    }
    assert_eq!(
        server.post("/v1/responses/compact", &json!({})).error(),
        (400, Value::Null, json!("unsupported_endpoint"))
    );
    assert_eq!(server.get(&format!("{PATH}/resp_x")).error().0, 404);
}
