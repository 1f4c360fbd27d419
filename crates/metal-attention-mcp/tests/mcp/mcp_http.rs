//! MCP servers over HTTP: sessions, streams of events, errors and timeouts. The servers are threads of the test.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use metal_attention_mcp::{Consent, Consents, McpClient, McpError, ServerOptions, Toolbox, Transport};
use metal_attention_testing::http_server::{HttpServer, ReceivedRequest, reply, result_of};
use serde_json::{Map, Value, json};

fn options(url: &str) -> ServerOptions {
    ServerOptions {
        name: "web".into(),
        transport: Transport::Http {
            url: url.into(),
            headers: BTreeMap::from([("Authorization".into(), "Bearer secret".into())]),
        },
        tools: None,
        timeout: Duration::from_millis(500),
        allow: Vec::new(),
    }
}

fn never() -> bool {
    false
}

fn text(text: &str) -> Map<String, Value> {
    serde_json::from_value(json!({"text": text})).unwrap()
}

/// The error of a client's start with a server that responds with `answer`.
fn failure(answer: impl Fn(&ReceivedRequest, &mut TcpStream) + Send + Sync + 'static) -> McpError {
    McpClient::start(&options(&HttpServer::start(answer).url()), &never).err().expect("an error")
}

/// The response to a request as the data of an event.
fn event(request: &ReceivedRequest) -> String {
    let result = result_of(request).unwrap();
    format!("data: {}\n\n", json!({"jsonrpc": "2.0", "id": request.message["id"], "result": result}))
}

#[test]
fn a_session_has_an_id_and_an_end() {
    let server = HttpServer::good();
    let mut client = McpClient::start(&options(&server.url()), &never).unwrap();
    assert_eq!((client.info().name.as_str(), client.info().protocol), ("web", "2025-03-26"));
    assert_eq!(client.tools(&never).unwrap().tools.len(), 2);
    assert_eq!(client.call("echo", &text("a"), &never).unwrap().text, "a");
    assert!(client.call("fail", &Map::new(), &never).unwrap().is_error);
    drop(client);
    let requests = server.requests();
    let methods: Vec<_> = requests.iter().map(|r| (r.method.as_str(), r.message["method"].clone())).collect();
    let post = |method: &str| ("POST", json!(method));
    let expected = [
        post("initialize"),
        post("notifications/initialized"),
        post("tools/list"),
        post("tools/call"),
        post("tools/call"),
        ("DELETE", Value::Null),
    ];
    assert_eq!(methods, expected);
    for (i, request) in requests.iter().enumerate() {
        assert!(request.head.contains("authorization: bearer secret"), "{request:?}");
        assert_eq!(request.head.contains("mcp-session-id: s-1"), i > 0, "{request:?}");
        assert_eq!(request.head.contains("mcp-protocol-version: 2025-03-26"), i > 0, "{request:?}");
    }
    assert!(requests[0].head.contains("accept: application/json, text/event-stream"), "{requests:?}");
}

#[test]
fn answers_are_streams_of_events() {
    let server = HttpServer::start(|request, stream| match request.message["id"].as_u64() {
        Some(_) => {
            let note = json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"});
            let body = format!(": hello\n\nevent: message\ndata: {note}\n\n{}", event(request));
            let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n{body}");
            // The client must use the response although the stream stays open.
            std::thread::sleep(Duration::from_secs(2));
        }
        None => reply(stream, "202 Accepted", "", ""),
    });
    let mut client = McpClient::start(&options(&server.url()), &never).unwrap();
    assert_eq!(client.call("echo", &text("a"), &never).unwrap().text, "a");
    assert!(client.tools_changed().unwrap());
}

#[test]
fn invalid_servers_are_errors() {
    let url = |url: &str| McpClient::start(&options(url), &never).err().expect("an error");
    for wrong in ["", "file:///x", "localhost:80", "http://"] {
        assert!(matches!(url(wrong), McpError::Url { .. }), "{wrong}");
    }
    let unreachable = url("http://me:secret@127.0.0.1:1/mcp?key=secret");
    assert!(
        matches!(&unreachable, McpError::Connection { url, .. } if url == "http://127.0.0.1:1/mcp"),
        "{unreachable}"
    );
    assert!(!unreachable.to_string().contains("secret"), "{unreachable}");
    let mut wrong = options("http://127.0.0.1:1/mcp");
    wrong.transport = Transport::Http {
        url: "http://127.0.0.1:1/mcp".into(),
        headers: BTreeMap::from([("X-Key".into(), "a\nb".into())]),
    };
    assert!(matches!(McpClient::start(&wrong, &never), Err(McpError::Header { name }) if name == "X-Key"));
    let error = failure(|_, stream| reply(stream, "401 Unauthorized", "", "no\u{1b}key"));
    assert!(error.to_string().ends_with("answered with status 401: no key"), "{error}");
    // Redirects are not followed, since the key would be sent to the other server.
    let error = failure(|_, stream| reply(stream, "307 Go", "Location: http://127.0.0.1:1/\r\n", ""));
    assert!(matches!(error, McpError::Status { status: 307, .. }), "{error}");
    let json = "Content-Type: application/json\r\n";
    assert!(matches!(failure(move |_, stream| reply(stream, "200 OK", json, "<html>")), McpError::Ended { .. }));
    assert!(matches!(failure(move |_, stream| reply(stream, "202 Accepted", "", "")), McpError::Ended { .. }));
    let long = "x".repeat(5 << 20);
    assert!(matches!(failure(move |_, stream| reply(stream, "200 OK", json, &long)), McpError::MessageTooLong));
    let cut = |_: &ReceivedRequest, stream: &mut TcpStream| {
        let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {{}}");
    };
    assert!(matches!(failure(cut), McpError::Ended { .. }));
}

#[test]
fn a_server_that_hangs_times_out() {
    let silent = failure(|_, _| std::thread::sleep(Duration::from_secs(2)));
    assert!(matches!(silent, McpError::Timeout { method: "initialize", .. }), "{silent}");
    let flood = failure(|_, stream| {
        let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n");
        let note = json!({"jsonrpc": "2.0", "method": "notifications/message"});
        while write!(stream, "data: {note}\n\n").is_ok() {}
    });
    assert!(matches!(flood, McpError::Timeout { .. }), "{flood}");
    let endless = failure(|_, stream| {
        let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: ");
        while stream.write_all(&[b'a'; 1 << 14]).is_ok() {}
    });
    assert!(matches!(endless, McpError::MessageTooLong | McpError::Timeout { .. }), "{endless}");
}

/// A server that rejects notifications, such as those of cancelled requests, is still used.
#[test]
fn servers_may_reject_notifications() {
    let server = HttpServer::start(|request, stream| match result_of(request) {
        Some(result) => {
            let is_slow = request.message["params"]["arguments"]["text"] == "slow";
            std::thread::sleep(Duration::from_millis(if is_slow { 1000 } else { 0 }));
            let body = json!({"jsonrpc": "2.0", "id": request.message["id"], "result": result}).to_string();
            reply(stream, "200 OK", "Content-Type: application/json\r\n", &body);
        }
        None if request.message["method"] == "notifications/cancelled" => reply(stream, "400 Bad Request", "", "what?"),
        None => reply(stream, "202 Accepted", "", ""),
    });
    let mut client = McpClient::start(&options(&server.url()), &never).unwrap();
    let slow = client.call("echo", &text("slow"), &never);
    assert!(matches!(slow, Err(McpError::Timeout { method: "tools/call", .. })), "{slow:?}");
    std::thread::sleep(Duration::from_millis(100));
    assert!(server.requests().iter().any(|request| request.message["method"] == "notifications/cancelled"));
    assert_eq!(client.call("echo", &text("next"), &never).unwrap().text, "next");
}

/// If the server has ended the session, the next call starts a new one, also if the status is not the protocol's 404.
#[test]
fn an_ended_session_is_started_again() {
    for status in ["404 Not Found", "400 Bad Request"] {
        let is_ended = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&is_ended);
        let server = HttpServer::start(move |request, stream| {
            let has_session = request.head.contains("mcp-session-id");
            match result_of(request) {
                _ if has_session && ended.load(Ordering::Relaxed) => reply(stream, status, "", ""),
                Some(result) => {
                    ended.store(false, Ordering::Relaxed);
                    let body = json!({"jsonrpc": "2.0", "id": request.message["id"], "result": result}).to_string();
                    reply(stream, "200 OK", "Content-Type: application/json\r\nMcp-Session-Id: s\r\n", &body);
                }
                None => reply(stream, "202 Accepted", "", ""),
            }
        });
        let toolbox = Toolbox::new(vec![options(&server.url())], Consents::default());
        let call = || toolbox.call("web", "echo", &text("a"), Some(Consent::Once), &never);
        assert_eq!(call().unwrap().text, "a");
        is_ended.store(true, Ordering::Relaxed);
        assert!(matches!(call(), Err(McpError::SessionEnded | McpError::Status { status: 400, .. })));
        assert_eq!(call().unwrap().text, "a");
    }
}
