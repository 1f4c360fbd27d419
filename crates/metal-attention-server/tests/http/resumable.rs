//! Streams that a client reads on after its connection has ended.

use std::io::Read;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use metal_attention_server::http::{ApiKeys, HttpOptions};
use serde_json::json;

use crate::chat;
use crate::client::{Answer, Server};
use crate::server;

const RESUMABLE: [&str; 2] = ["Content-Type: application/json", "X-Resumable: 1"];

/// Begins a resumable stream of `n` tokens, reads the head and some of the body, and returns the connection with the stream's id.
fn begin(server: &Server, n: usize, more: &[&str]) -> (TcpStream, String) {
    let body = chat(&json!({"stream": true, "max_tokens": n, "ignore_eos": true})).to_string();
    let headers = [&RESUMABLE[..], more].concat();
    let mut stream = server.send_only("POST", "/v1/chat/completions", &headers, body.as_bytes());
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let id = head.lines().find_map(|line| line.strip_prefix("x-stream-id: ")).unwrap_or_else(|| panic!("{head}"));
    stream.read_exact(&mut [0; 64]).unwrap();
    (stream, id.to_owned())
}

fn get(server: &Server, id: &str, after: usize, headers: &[&str]) -> Answer {
    server.send("GET", &format!("/v1/streams/{id}?after={after}"), headers, b"")
}

#[test]
fn a_stream_goes_on_after_its_connection() {
    let server = server();
    let (stream, id) = begin(&server, 300, &[]);
    drop(stream);
    let whole = get(&server, &id, 0, &[]);
    assert_eq!(whole.status, 200, "{whole:?}");
    assert!(whole.headers.contains("content-type: text/event-stream"), "{whole:?}");
    assert!(whole.body.starts_with("data: {") && whole.body.ends_with("data: [DONE]\n\n"));
    assert!(whole.body.matches("\"content\":").count() > 100, "{whole:?}");
    // Also after its end, from any byte on.
    for after in [1, 1000, whole.body.len() - 3, whole.body.len()] {
        let rest = get(&server, &id, after, &[]);
        assert_eq!((rest.status, &rest.body[..]), (200, &whole.body[after..]), "after {after}");
    }
    let beyond = get(&server, &id, whole.body.len() + 1, &[]);
    assert_eq!(beyond.error(), (404, json!("after"), json!("stream_not_found")));
}

#[test]
fn a_later_reader_takes_the_place_of_an_earlier_one() {
    let server = server();
    let (mut first, id) = begin(&server, 450, &[]);
    let second = get(&server, &id, 0, &[]);
    assert!(second.body.ends_with("data: [DONE]\n\n"));
    let mut rest = Vec::new();
    let _ = first.read_to_end(&mut rest);
    assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
}

#[test]
fn a_stream_ends_when_its_client_ends_it() {
    let server = server();
    let (stream, id) = begin(&server, 450, &[]);
    drop(stream);
    assert_eq!(server.send("DELETE", &format!("/v1/streams/{id}"), &[], b"").status, 204);
    let start = Instant::now();
    while server.metric("requests_running") > 0.0 {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(get(&server, &id, 0, &[]).error(), (404, json!(null), json!("stream_not_found")));
}

#[test]
fn other_streams_end_with_their_connection() {
    let server = server();
    let body = chat(&json!({"stream": true, "max_tokens": 8}));
    let answer = server.post("/v1/chat/completions", &body);
    assert!(!answer.headers.contains("x-stream-id"), "{answer:?}");
    let body = chat(&json!({"max_tokens": 8})).to_string();
    let answer = server.send("POST", "/v1/chat/completions", &RESUMABLE, body.as_bytes());
    assert!(answer.status == 200 && !answer.headers.contains("x-stream-id"), "{answer:?}");
}

#[test]
fn a_stream_belongs_to_its_key() {
    let keys = ApiKeys::new(["one".to_owned(), "two".to_owned()]).unwrap();
    let server = Server::new(HttpOptions { keys, open_metrics: true, ..Default::default() });
    let key = |key: &str| format!("Authorization: Bearer {key}");
    let (stream, id) = begin(&server, 50, &[&key("one")]);
    drop(stream);
    for headers in [&[][..], &[&key("two")[..]]] {
        let answer = get(&server, &id, 0, headers);
        assert!([401, 404].contains(&answer.status) && answer.status != 200, "{answer:?}");
    }
    assert!(get(&server, &id, 0, &[&key("one")]).body.ends_with("data: [DONE]\n\n"));
}

#[test]
fn few_streams_of_a_client_are_kept() {
    let server = server();
    let first = begin(&server, 20, &[]);
    assert!(get(&server, &first.1, 0, &[]).body.ends_with("[DONE]\n\n"));
    let later: Vec<_> = (0..8).map(|_| begin(&server, 20, &[])).collect();
    assert_eq!(get(&server, &first.1, 0, &[]).status, 404, "the oldest makes room");
    for (_, id) in later {
        assert!(get(&server, &id, 0, &[]).body.ends_with("[DONE]\n\n"));
    }
}

#[test]
fn a_wrong_address_is_an_error_in_json() {
    let server = server();
    let cases = [
        ("/v1/streams/0?after=-1", json!("after")),
        ("/v1/responses/0?stream=perhaps", json!("stream")),
        ("/v1/streams/%ff", json!(null)),
        ("/v1/models/%ff", json!(null)),
    ];
    for (path, field) in cases {
        let answer = server.get(path);
        let (status, param, _) = answer.error();
        assert_eq!((status, param), (400, field), "{path}: {answer:?}");
        assert!(answer.headers.contains("content-type: application/json"), "{path}: {answer:?}");
    }
}
