//! The command `serve`: its flags, its log and its shutdown. The HTTP interfaces have tests in the server's crate.
#![cfg(unix)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use crate::common::{program, run, stderr};
use crate::server::{Server, status};
use serde_json::json;

#[test]
fn sigterm_ends_the_server_with_exit_code_0() {
    let server = Server::start(&[]);
    assert_eq!(server.status("/v1/models", ""), 200);
    server.signal("TERM");
    let address = server.address.clone();
    assert_eq!(server.end().0, Some(0));
    assert!(TcpStream::connect(&address).is_err());
}

#[test]
fn a_second_signal_ends_the_server_at_once() {
    let server = Server::start(&["-m", "models/tales-4m-q4_0.gguf", "--grace", "600"]);
    server.wait_until_ready();
    let body =
        json!({"prompt": "Once upon a time", "max_tokens": 100_000, "ignore_eos": true, "n": 16, "stream": true});
    let mut stream = server.send_only("/v1/completions", Some(&body));
    // The stream has begun. The client reads no more of it, so that the answer cannot finish.
    stream.read_exact(&mut [0; 512]).unwrap();
    server.signal("TERM");
    while server.status("/ready", "") != 503 {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(server.status("/health", ""), 200, "running requests are still served");
    server.signal("TERM");
    assert_eq!(server.end().0, Some(130));
}

#[test]
fn api_keys_are_read_from_a_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, "one\n two \n").unwrap();
    let server = Server::start(&["--api-key-file", file.path().to_str().unwrap()]);
    for (header, expected) in
        [("", 401), ("Authorization: Bearer two\r\n", 200), ("Authorization: Bearer three\r\n", 401)]
    {
        assert_eq!(server.status("/v1/models", header), expected, "{header}");
    }
}

#[test]
fn the_metrics_port_needs_no_key() {
    let server = Server::start(&["--metrics-port", "0", "--api-key", "secret"]);
    let metrics_address =
        |line: &String| Some(line.strip_prefix("metrics on http://")?.strip_suffix("/metrics")?.to_owned());
    let metrics = server.startup_log.iter().find_map(metrics_address).unwrap();
    assert_eq!((status(&metrics, "/metrics", ""), server.status("/metrics", "")), (200, 401));
    assert_eq!((status(&metrics, "/health", ""), status(&metrics, "/v1/models", "")), (200, 404));
}

#[test]
fn invalid_flags_and_files_are_rejected() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let empty = tempfile::NamedTempFile::new().unwrap();
    let empty = empty.path().to_str().unwrap();
    let gap = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&gap, "one\n\ntwo\n").unwrap();
    let gap = gap.path().to_str().unwrap();
    for (args, code, message) in [
        (["--port", port.as_str()], 1, "--host and --port choose another address"),
        (["--metrics-port", port.as_str()], 1, "--metrics-host and --metrics-port choose another address"),
        (["--metrics-host", "127.0.0.1"], 2, "--metrics-port"),
        (["--model", "nothing.gguf"], 3, "nothing.gguf"),
        (["--api-key-file", empty], 2, "one a line is expected"),
        (["--api-key-file", gap], 2, "line 2 of"),
        (["--api-key", ""], 2, "leave it out to let everybody in"),
        (["--api-key", " "], 2, "leave it out to let everybody in"),
        (["--max-connections", "0"], 2, "must be at least 1"),
        (["--max-connections-per-address", "0"], 2, "must be at least 1"),
        (["--max-bodies", "0"], 2, "must be at least 1"),
        (["--response-store", empty], 1, "cannot keep responses in"),
        (["--parallel", "0"], 2, "must be at least 1"),
        (["--allowed-host", "https://chat.example"], 2, "without scheme and path"),
        (["--cache-disk", empty], 1, "where finished texts are to go"),
        (["--cache-disk", ":5"], 2, "a colon and a number of MiB"),
        (["--cache-ram", "-2"], 2, "-2 is not in -1.."),
    ] {
        let args = ["serve", args[0], args[1]];
        let output = run(&args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn too_many_replicas_are_rejected() {
    for (n, why) in [("9223372036854775808", "64 replicas at most"), ("100000000", "64 replicas at most")] {
        let output = run(&["serve", "--device", "cpu", "--port", "0", "--replicas", n]);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(why) && !stderr(&output).contains("panicked"), "{}", stderr(&output));
    }
}

/// The log has a line for each request, without the URL's query. With `--quiet` it has none.
#[test]
fn requests_have_a_line_in_the_log() {
    for quiet in [false, true] {
        let mut args = vec!["--allowed-host", "chat.example"];
        args.extend(quiet.then_some("--quiet"));
        let server = Server::start(&args);
        server.wait_until_ready();
        let mut stream = TcpStream::connect(&server.address).unwrap();
        let body = json!({"prompt": "Once upon a time", "max_tokens": 3}).to_string();
        let length = body.len();
        write!(
            stream,
            "POST /v1/completions?secret=1 HTTP/1.1\r\nHost: chat.example\r\nConnection: close\r\nContent-Type: \
             application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(server.status("/health", ""), 200);
        server.signal("TERM");
        let (code, lines) = server.end();
        assert_eq!(code, Some(0));
        let ready = lines.iter().find(|line| line.starts_with("ready: ")).unwrap();
        assert!(ready.contains("context 512 tokens a request, KV cache "), "{ready}");
        assert!(ready.ends_with("shared by 4 requests; -c changes it"), "{ready}");
        let found: Vec<_> = lines.iter().filter(|line| line.contains("/v1/completions")).collect();
        assert_eq!(found.len(), usize::from(!quiet), "{lines:?}");
        for line in found {
            assert!(line.contains("POST /v1/completions 200 in ") && line.contains("req-"), "{line}");
            assert!(line.contains(", tokens: 5 in, 0 cached, 3 out, first after "), "{line}");
        }
        assert!(!lines.iter().any(|line| line.contains("secret") || line.contains("/health")), "{lines:?}");
    }
}

/// The number of dropped turns is in a response header and in the log.
#[test]
fn dropped_turns_are_reported() {
    let server = Server::start(&["--context-shift"]);
    server.wait_until_ready();
    let story = "Once upon a time, there was a little girl. ".repeat(16);
    let messages =
        ["user", "assistant", "user", "assistant", "user"].map(|role| json!({"role": role, "content": story}));
    let body = json!({"max_tokens": 3, "messages": messages});
    let mut answer = String::new();
    server.send_only("/v1/chat/completions", Some(&body)).read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("x-dropped-turns: 2\r\n"), "{answer}");
    server.signal("TERM");
    let (code, lines) = server.end();
    let line = lines.iter().find(|line| line.contains("dropped the oldest ")).unwrap();
    assert!(line.contains("dropped the oldest 2 turns, 4 messages of ") && line.ends_with("the context 512"), "{line}");
    assert_eq!(code, Some(0));
}

/// An empty variable is an error, not a server without a key.
#[test]
fn an_empty_key_in_the_environment_is_rejected() {
    let output = program().args(["serve", "--port", "0"]).env("METAL_ATTENTION_API_KEY", "").output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("METAL_ATTENTION_API_KEY"), "{}", stderr(&output));
}

#[test]
fn limits_accept_the_largest_number() {
    let largest = u64::MAX.to_string();
    let options = [
        "--max-connections",
        "--max-connections-per-address",
        "--max-body",
        "--max-bodies",
        "--response-store-bytes",
        "--response-store-count",
        "--grace",
        "--timeout",
        "--queue",
    ];
    let args: Vec<&str> = options.iter().flat_map(|option| [*option, largest.as_str()]).collect();
    let server = Server::start(&args);
    server.wait_until_ready();
    assert_eq!(server.status("/v1/models", ""), 200);
    server.signal("TERM");
    assert_eq!(server.end().0, Some(0));
}

#[test]
fn a_chat_template_comes_from_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("template.jinja");
    let path = path.to_str().unwrap();
    std::fs::write(path, "{{ raise_exception('of the file') }}").unwrap();
    let server = Server::start(&["--chat-template", path]);
    server.wait_until_ready();
    let body = json!({"messages": [{"role": "user", "content": "x"}]});
    let (_, answer) = server.send("/v1/chat/completions", Some(&body));
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("refuses this conversation: of the file"), "{message}");
    std::fs::write(path, "{% if %}").unwrap();
    let output = run(&["serve", "--port", "0", "--chat-template", path]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("template.jinja: the chat template does not compile"), "{}", stderr(&output));
}
