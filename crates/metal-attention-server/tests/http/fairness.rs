//! Fair scheduling among clients, which are distinguished by their API keys, or without keys by their addresses: many
//! requests of one client do not delay another.

#[cfg(target_os = "linux")]
use std::{io::Write, net::TcpStream};

use std::time::Duration;

use metal_attention_server::http::{ApiKeys, HttpOptions};
use serde_json::{Value, json};

use crate::client::{Answer, Server, load};
use crate::{STORY, completion};

/// A request for 240 long sequences.
fn flood() -> Value {
    completion(&json!({"prompt": vec!["Once"; 16], "n": 15, "max_tokens": 400, "ignore_eos": true}))
}

/// A server with four slots and these API keys.
fn server(keys: &[&str]) -> Server {
    let keys = ApiKeys::new(keys.iter().map(|&key| key.to_owned())).unwrap();
    let server = Server::with_model(HttpOptions { keys, ..Default::default() }, || load(4, 256));
    server.wait_until_ready();
    server
}

/// The number of waiting sequences in the metrics.
fn waiting(metrics: &Answer) -> usize {
    let line = metrics.body.lines().find_map(|line| line.strip_prefix("metal_attention_requests_waiting "));
    line.unwrap().parse().unwrap()
}

#[test]
fn one_key_does_not_delay_another() {
    let server = server(&["first", "second"]);
    let send = |key: &str, method: &str, path: &str, body: &str| {
        let headers = ["Content-Type: application/json", &format!("Authorization: Bearer {key}")];
        server.send_only(method, path, &headers, body.as_bytes())
    };
    let metrics = || Answer::read(send("second", "GET", "/metrics", ""));
    let flood = send("first", "POST", "/v1/completions", &flood().to_string());
    while waiting(&metrics()) < 200 {
        std::thread::sleep(Duration::from_millis(1));
    }
    for _ in 0..3 {
        let short = send("second", "POST", "/v1/completions", &completion(&json!({})).to_string());
        assert_eq!(Answer::read(short).json()["choices"][0]["text"], STORY);
        let input = json!({"input": "Hello"}).to_string();
        assert_eq!(Answer::read(send("second", "POST", "/v1/embeddings", &input)).status, 200);
        assert!(waiting(&metrics()) > 150, "the first client's sequences still wait");
    }
    drop(flood);
    while waiting(&metrics()) > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Linux routes all of 127.0.0.0/8 to the loopback interface, so that a client may have another address.
#[cfg(target_os = "linux")]
#[test]
fn one_address_does_not_delay_another() {
    let server = server(&[]);
    let flood = server.send_only(
        "POST",
        "/v1/completions",
        &["Content-Type: application/json"],
        flood().to_string().as_bytes(),
    );
    while server.metric("requests_waiting") < 200.0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut other = connect_from("127.0.0.2", &server);
    let body = completion(&json!({})).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    other.write_all(head.as_bytes()).unwrap();
    assert_eq!(Answer::read(other).json()["choices"][0]["text"], STORY);
    assert!(server.metric("requests_waiting") > 150.0, "the first client's sequences still wait");
    drop(flood);
}

#[cfg(target_os = "linux")]
fn connect_from(address: &str, server: &Server) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(std::net::SocketAddr::new(address.parse().unwrap(), 0)).unwrap();
        socket.connect(server.address).await.unwrap().into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}
