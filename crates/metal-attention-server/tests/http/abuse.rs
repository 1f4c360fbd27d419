//! Abusive clients: oversized fields, half-sent requests, many connections, expensive schemas. Each is limited, and the
//! server still answers others.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use metal_attention_server::http::HttpOptions;
use serde_json::{Value, json};

use crate::client::{Answer, Server, load};
use crate::{STORY, chat, completion};

const JSON: &str = "Content-Type: application/json";

/// Opens a connection and sends `bytes`.
fn connect_and_send(server: &Server, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    // The server may have closed the connection already.
    let _ = stream.write_all(bytes);
    stream
}

/// Checks that the server answers a completion.
fn assert_answers(server: &Server) {
    let answer = server.post("/v1/completions", &completion(&json!({})));
    assert_eq!((answer.status, &answer.json()["choices"][0]["text"]), (200, &json!(STORY)));
}

/// A server with one slot, and a connection on which a long stream has begun and is read by a thread.
fn busy(options: HttpOptions) -> (Server, TcpStream) {
    let server = Server::with_model(options, || load(1, 1000));
    server.wait_until_ready();
    let body = json!({"prompt": vec!["Once"; 8], "n": 16, "max_tokens": 500, "ignore_eos": true, "stream": true});
    let mut stream = server.send_only("POST", "/v1/completions", &[JSON], body.to_string().as_bytes());
    assert!(stream.read(&mut [0; 64]).unwrap() > 0, "the stream has begun");
    let mut rest = stream.try_clone().unwrap();
    std::thread::spawn(move || std::io::copy(&mut rest, &mut std::io::sink()));
    (server, stream)
}

#[test]
fn every_field_has_a_limit() {
    let server = Server::new(HttpOptions::default());
    let assert_rejected = |path: &str, request: Value, field: &str, limit: &str| {
        let answer = server.post(path, &request);
        let code = if path.ends_with("tokenize") { json!(400) } else { Value::Null };
        assert_eq!(answer.error(), (400, json!(field), code), "{}", answer.body);
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(field) && message.contains(limit) && message.len() < 2100, "{message}");
    };
    let complete =
        |more: Value, field: &str, limit: &str| assert_rejected("/v1/completions", completion(&more), field, limit);
    complete(json!({"stop": "x".repeat(1025)}), "stop", "1024");
    complete(json!({"stop": "x".repeat(1 << 20)}), "stop", "1024");
    complete(json!({"stop": vec!["x"; 33]}), "stop", "32");
    complete(json!({"stop": vec!["x".repeat(1000); 17]}), "stop", "16384");
    complete(json!({"stop_token_ids": vec![1; 65]}), "stop_token_ids", "64");
    complete(json!({"samplers": vec!["top_k"; 33]}), "samplers", "32");
    complete(json!({"dry_sequence_breakers": vec!["x"; 33]}), "dry_sequence_breakers", "32");
    complete(json!({"dry_sequence_breakers": ["x".repeat(65)]}), "dry_sequence_breakers", "64");
    complete(json!({"stop": ["x", "y".repeat(1025)]}), "stop", "1024");
    complete(json!({"prompt": vec!["a"; 257]}), "prompt", "256");
    complete(json!({"prompt": vec![[1]; 257]}), "prompt", "256");
    complete(json!({"prompt": vec![1; (1 << 20) + 257]}), "prompt", "1048833");
    let bias: serde_json::Map<_, _> = (0..1025).map(|id| (id.to_string(), json!(1))).collect();
    complete(json!({"logit_bias": bias}), "logit_bias", "1024");
    complete(json!({"logit_bias": vec![(1, 1); 1025]}), "logit_bias", "1024");
    complete(json!({"logit_bias": vec![("x".repeat(1000), 1); 3]}), "logit_bias", "1024");
    complete(json!({"x": vec![vec![Value::Null]; 40_000]}), "x", "65536");
    complete(json!({"grammar": "x".repeat((256 << 10) + 1)}), "grammar", "262144");
    complete(json!({"guided_choice": vec!["x"; 9000]}), "guided_choice", "8192");
    complete(json!({"regex": "x".repeat((64 << 10) + 1)}), "regex", "65536");
    assert_rejected("/v1/embeddings", json!({"input": vec!["a"; 257]}), "input", "256");
    assert_rejected("/tokenize", json!({"content": "x".repeat((1 << 20) + 1)}), "content", "1048576");
    assert_rejected("/detokenize", json!({"tokens": vec![1; (1 << 20) + 1]}), "tokens", "1048577");

    let chats =
        |more: Value, field: &str, limit: &str| assert_rejected("/v1/chat/completions", chat(&more), field, limit);
    let message = json!({"role": "user", "content": "x"});
    chats(json!({"messages": vec![message; 4097]}), "messages", "4096");
    let part = json!({"type": "text", "text": ""});
    chats(json!({"messages": [{"role": "user", "content": vec![part; 30_000]}]}), "messages", "65536");
    let tool = json!({"type": "function", "function": {"name": "f", "description": "x".repeat(600_000)}});
    chats(json!({"tools": [tool]}), "tools", "524288");
    let schema = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}});
    chats(schema(json!({"enum": (0..20_000).collect::<Vec<_>>()})), "response_format", "8192");
    chats(schema(json!({"enum": ["x".repeat(300_000)]})), "response_format", "262144");
    chats(json!({"chat_template_kwargs": {"x": "x".repeat(70_000)}}), "chat_template_kwargs", "65536");

    // Requests exactly at the limits are accepted.
    let at_limit = json!({"stop": vec!["x".repeat(1024); 16], "n": 2});
    assert_eq!(server.post("/v1/completions", &completion(&at_limit)).status, 200);
    assert_eq!(
        server.post("/v1/completions", &completion(&json!({"prompt": vec!["a"; 64], "max_tokens": 1}))).status,
        200
    );
    let bias: serde_json::Map<_, _> = (0..512).map(|id| (id.to_string(), json!(0))).collect();
    assert_eq!(server.post("/v1/completions", &completion(&json!({"logit_bias": bias}))).status, 200);
}

/// Bodies of the maximum length whose values would take many times their bytes in memory.
#[test]
fn long_bodies_of_many_small_values_are_rejected() {
    let server = Server::new(HttpOptions::default());
    let post = |path: &str, start: &str, item: &str, end: &str| {
        let n = ((8 << 20) - start.len() - end.len()) / (item.len() + 1);
        let body = format!("{start}{}{end}", vec![item; n].join(","));
        Answer::read(server.send_only("POST", path, &[JSON], body.as_bytes())).error()
    };
    let field = |name: &str| (400, json!(name), Value::Null);
    assert_eq!(post("/v1/completions", r#"{"prompt": ["#, "[1]", "]}"), field("prompt"));
    assert_eq!(post("/v1/completions", r#"{"prompt": ["#, "[[[]]]", "]}"), field("prompt"));
    assert_eq!(post("/v1/completions", r#"{"prompt": "a", "stop": ["#, r#""""#, "]}"), field("stop"));
    assert_eq!(post("/v1/embeddings", r#"{"input": ["#, r#""""#, "]}"), field("input"));
    assert_eq!(post("/v1/chat/completions", r#"{"messages": ["#, "{}", "]}"), field("messages"));
    assert_eq!(post("/v1/chat/completions", r#"{"tools": [{"x": ["#, "1", "]}]}"), field("tools"));
    let nested = |open: &str, close: &str| {
        let n = (8 << 20) / (open.len() + close.len()) - 20;
        let body = format!(r#"{{"messages": {}1{}}}"#, open.repeat(n), close.repeat(n));
        Answer::read(server.send_only("POST", "/v1/chat/completions", &[JSON], body.as_bytes())).error()
    };
    assert_eq!((nested("[", "]"), nested(r#"{"a":"#, "}")), (field("messages"), field("messages")));
    // A body that ends too early is no JSON.
    let unended = format!(r#"{{"messages": {}"#, "[".repeat((8 << 20) - 20));
    let answer = Answer::read(server.send_only("POST", "/v1/chat/completions", &[JSON], unended.as_bytes()));
    assert_eq!(answer.error(), (400, Value::Null, Value::Null));
    assert_answers(&server);
}

#[test]
fn idle_connections_are_closed_for_new_ones() {
    let server = Server::new(HttpOptions { max_connections: 12, ..Default::default() });
    let half_a_head = b"POST /v1/completions HTTP/1.1\r\nHost:";
    let half_open: Vec<_> = (0..40).map(|i| connect_and_send(&server, &half_a_head[..i % half_a_head.len()])).collect();
    assert_answers(&server);
    let idle = |_| {
        let mut stream = connect_and_send(&server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
        assert!(stream.read(&mut [0; 1024]).unwrap() > 0);
        stream
    };
    let idle: Vec<_> = (0..40).map(idle).collect();
    assert_answers(&server);
    let head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{";
    let uploads: Vec<_> = (0..40).map(|_| connect_and_send(&server, head)).collect();
    assert_answers(&server);
    // All half-open connections were closed for later ones.
    assert_eq!(half_open.into_iter().filter_map(|mut stream| stream.read(&mut [0]).ok()).sum::<usize>(), 0);
    drop((idle, uploads));
    assert!(server.metric("connections_given_up_total") >= 90.0);
    assert_eq!(server.metric("connections_refused_total"), 0.0);
}

#[test]
fn health_and_metrics_are_served_beyond_the_connection_limits() {
    let one_of_one_address = HttpOptions { max_connections_per_address: Some(1), ..Default::default() };
    let one_of_all = HttpOptions { max_connections: 1, max_connections_per_address: Some(9), ..Default::default() };
    for (options, status, option) in
        [(one_of_one_address, 429, "(--max-connections-per-address)"), (one_of_all, 503, "(--max-connections)")]
    {
        let (server, stream) = busy(options);
        for _ in 0..3 {
            let answer = server.get("/v1/models");
            assert_eq!(answer.error(), (status, Value::Null, json!("too_many_connections")));
            assert!(answer.body.contains(option), "{answer:?}");
            assert!(answer.headers.contains("connection: close") && answer.headers.contains("retry-after: 1"));
            for path in ["/health", "/ready", "/metrics"] {
                assert_eq!(server.get(path).status, 200, "{path}");
            }
        }
        stream.shutdown(std::net::Shutdown::Both).unwrap();
        while server.get("/v1/models").status != 200 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn all_bodies_share_one_memory_limit() {
    let options = HttpOptions { max_body: 1 << 20, max_bodies: 1 << 20, ..Default::default() };
    let server = Server::new(options);
    let upload = |length: usize, sent: usize| {
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\nConnection: close\r\n\
             Content-Length: {length}\r\n\r\n"
        );
        connect_and_send(&server, &[head.as_bytes(), &b" ".repeat(sent)].concat())
    };
    let unfinished = upload(900_000, 899_999);
    while server.metric("body_bytes") < 834_463.0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let second = Answer::read(upload(900_000, 900_000));
    assert_eq!(second.error(), (429, Value::Null, json!("too_many_bodies")));
    assert!(second.body.contains("--max-bodies") && second.body.contains("1048576"), "{second:?}");
    assert_answers(&server);
    drop(unfinished);
    // The body is no JSON (400), which shows that it was read completely.
    while Answer::read(upload(900_000, 900_000)).status != 400 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let too_long = Answer::read(upload(1_100_000, 0));
    assert_eq!(too_long.error().2, "body_too_large");
    assert!(too_long.body.contains("--max-body"));
}

/// Schemas of one client are compiled on few threads, and their size is limited.
#[test]
fn large_schemas_do_not_delay_other_requests() {
    let server = Server::new(HttpOptions::default());
    let schema = |i: usize, n: usize| {
        let values: Vec<_> = (0..n).map(|j| format!("{i} {j}")).collect();
        let format = json!({"type": "json_schema", "json_schema": {"schema": {"enum": values}}});
        chat(&json!({"response_format": format, "max_tokens": 1})).to_string()
    };
    let begin = |i, n| server.send_only("POST", "/v1/chat/completions", &[JSON], schema(i, n).as_bytes());
    let pending: Vec<_> = (0..6).map(|i| begin(i, 8_000)).collect();
    assert_answers(&server);
    for stream in pending {
        assert_eq!(Answer::read(stream).status, 200);
    }
    assert_eq!(Answer::read(begin(0, 400_000)).error().1, "response_format");
}

/// Schemas that once overflowed the stack by long chains of references, or took a thread minutes to compile.
#[test]
fn deep_and_combinatorial_schemas_are_compiled_or_rejected() {
    let server = Server::new(HttpOptions::default());
    let ask = |schema: Value| {
        let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
        server.post("/v1/chat/completions", &chat(&json!({"response_format": format, "max_tokens": 1})))
    };
    let chain = |n: usize, link: &dyn Fn(String) -> Value| {
        let links = (0..n).map(|i| (format!("a{i}"), link(format!("#/$defs/a{}", i + 1))));
        let last = (format!("a{n}"), json!({"type": "string"}));
        let definitions: serde_json::Map<_, _> = links.chain([last]).collect();
        json!({"$ref": "#/$defs/a0", "$defs": definitions})
    };
    assert_eq!(ask(chain(4000, &|next| json!({"$ref": next}))).status, 200);
    for link in [
        &|next| json!({"type": "array", "minItems": 1, "items": {"$ref": next}}),
        &|next| json!({"anyOf": [{"$ref": next}]}),
        &|next| json!({"type": "object", "properties": {"a": {"$ref": next}}}),
    ] as [&dyn Fn(String) -> Value; 3]
    {
        // Either result is accepted; the server must survive.
        assert!([200, 400].contains(&ask(chain(1300, link)).status));
    }
    let names =
        |n: usize| (0..n).map(|i| (format!("p{i}"), json!({"type": "string"}))).collect::<serde_json::Map<_, _>>();
    let required: Vec<String> = (0..2500).map(|i| format!("p{i}")).collect();
    let object =
        json!({"type": "object", "properties": names(2500), "required": required, "additionalProperties": false});
    assert_eq!(ask(object).status, 200);
    let assert_rejected = |schema: Value, keyword: &str, limit: &str| {
        let answer = ask(schema);
        assert_eq!(answer.error().1, "response_format.json_schema.schema");
        assert!(answer.body.contains(keyword) && answer.body.contains(limit), "{answer:?}");
    };
    let patterns: serde_json::Map<_, _> =
        (0..200).map(|i| (format!("^{}{i}$", "(a|b)*".repeat(20)), json!({}))).collect();
    assert_rejected(json!({"type": "object", "patternProperties": patterns}), "patternProperties", "at most 16");
    assert_rejected(json!({"allOf": vec![json!({"type": "object"}); 65]}), "allOf", "at most 64");
    assert_rejected(json!({"oneOf": vec![json!({"const": 1}); 513]}), "oneOf", "at most 512");
    assert_answers(&server);
}

#[test]
fn unsupported_patterns_are_ignored_and_named() {
    let server = Server::new(HttpOptions::default());
    let ask = |pattern: &str, strict: Option<bool>| {
        let schema = json!({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}});
        let format = json!({"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}});
        server.post("/v1/chat/completions", &chat(&json!({"response_format": format})))
    };
    for pattern in
        ["a(b".to_owned(), "(".repeat(100_000), "^(?=.*[A-Z]).{8,}$".to_owned(), "(a{1000}){2000}".to_owned()]
    {
        let answer = ask(&pattern, None);
        assert_eq!(answer.status, 200, "{answer:?}");
        assert!(answer.headers.contains("\nx-schema-unsupported: #/properties/a/pattern\r\n"), "{}", answer.headers);
        let rejected = ask(&pattern, Some(true));
        assert_eq!(rejected.error().1, "response_format.json_schema.schema");
        let message = rejected.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("#/properties/a/pattern cannot be enforced") && message.len() < 300, "{message}");
    }
    assert!(!ask("^[a-z]+$", Some(true)).headers.contains("x-schema-unsupported"));
}

/// A server with each option at its maximum works.
#[test]
fn options_at_their_maximum_work() {
    let options = HttpOptions {
        max_body: usize::MAX,
        max_bodies: usize::MAX,
        max_connections: usize::MAX,
        max_connections_per_address: Some(usize::MAX),
        read_timeout: Duration::MAX,
        write_timeout: Duration::MAX,
        timeout: Some(Duration::MAX),
        grace: Duration::MAX,
        ..Default::default()
    };
    let mut server = Server::new(options);
    assert_answers(&server);
    server.stop();
    server.join();
}

#[test]
fn the_header_timeout_covers_the_whole_head() {
    let server = Server::new(HttpOptions { header_timeout: Duration::from_millis(300), ..Default::default() });
    let mut stream = connect_and_send(&server, b"GET /health HTTP/1.1\r\n");
    let start = Instant::now();
    // Further header lines do not extend the deadline.
    while stream.write_all(b"X-Y: z\r\n").is_ok() {
        assert!(start.elapsed() < Duration::from_secs(60), "the head goes on for ever");
        std::thread::sleep(Duration::from_millis(20));
    }
}
