//! Panics of the engine: each running and waiting request gets an error, and the server ends.

use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::Duration;

use metal_attention::scheduler::SchedulerOptions;
use metal_attention::{Device, EngineOptions, Model};
use metal_attention_server::http::{HttpOptions, LoadedModel, ServeError};
use serde_json::{Value, json};

use crate::client::{Answer, Server};
use crate::support::Controls;
use crate::{chat, completion};

/// A server whose engine runs two sequences at once, and the controls of its forward pass.
fn server() -> (Server, Controls) {
    let controls = Controls::default();
    let of_engine = controls.clone();
    let server = Server::with_model(HttpOptions::default(), move || {
        let model = Model::built_in()?;
        let engine = EngineOptions { device: Device::Cpu, n_seq: 4, n_threads: Some(1), ..Default::default() };
        let pass = of_engine.pass(&model, &engine);
        let options = SchedulerOptions { n_parallel: 2, ..Default::default() };
        Ok(LoadedModel::start(model, pass, &options).unwrap())
    });
    server.wait_until_ready();
    (server, controls)
}

/// Completions, chats and embeddings, streamed or not, running or waiting, all end with the error `engine_failed`.
#[test]
fn an_engine_panic_fails_all_requests_and_ends_the_server() {
    let (mut server, controls) = server();
    let json = ["Content-Type: application/json"];
    let body = |stream: bool| json!({"stream": stream, "max_tokens": 400, "ignore_eos": true});
    // Connections that are open when the engine panics.
    let monitoring = ["/health", "/ready", "/v1/models"].map(|path| {
        let mut stream = std::net::TcpStream::connect(server.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
            .write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n").as_bytes())
            .unwrap();
        stream
    });
    // No request ends before all have arrived: the first one gets a few tokens, then the engine waits.
    let held = controls.gate.close();
    let mut events = server.stream("/v1/completions", &completion(&body(true)));
    (0..3).for_each(|_| held.let_one_step_pass());
    events.next().unwrap();
    let wait_for = |n: f64| {
        while server.metric("requests_running") + server.metric("requests_waiting") < n {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let mut not_streamed = Vec::new();
    for i in 0..4 {
        let (path, request) = if i % 2 == 0 {
            ("/v1/completions", completion(&body(false)))
        } else {
            ("/v1/chat/completions", chat(&body(false)))
        };
        not_streamed.push(server.send_only("POST", path, &json, request.to_string().as_bytes()));
    }
    let chats = server.stream("/v1/chat/completions", &chat(&body(true)));
    wait_for(6.0);
    let input = json!({"input": vec!["Once upon a time"; 200]}).to_string();
    let embeddings = server.send_only("POST", "/v1/embeddings", &json, input.as_bytes());
    wait_for(10.0);
    controls.panic_in.store(5, Ordering::Relaxed);
    drop(held);

    for answer in not_streamed.into_iter().chain([embeddings]).map(Answer::read) {
        // 503: the request had not reached the engine yet.
        let (status, param, code) = answer.error();
        assert!(matches!(status, 500 | 503), "{status}");
        assert_eq!((param, code), (Value::Null, json!("engine_failed")));
    }
    for events in [events, chats] {
        let events: Vec<String> = events.collect();
        let error: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
        assert_eq!(error["error"]["code"], "engine_failed", "{events:?}");
        assert_eq!(events.last().unwrap(), "[DONE]");
    }
    for (mut stream, status) in monitoring.into_iter().zip([503, 503, 200]) {
        let _ = stream.write_all(b"\r\n");
        let answer = Answer::read(stream);
        assert_eq!(answer.status, status, "{answer:?}");
        assert!(status == 200 || answer.error().2 == "engine_failed");
    }
    let Err(error) = server.end() else { panic!("the server ended without an error") };
    assert!(matches!(&error, ServeError::Engine(why) if &**why == "a defect in the forward pass"), "{error:?}");
    assert!(error.to_string().contains("a defect in the forward pass"), "{error}");
    assert!(std::net::TcpStream::connect(server.address).is_err(), "the port is closed");
}

#[test]
fn a_panic_while_loading_ends_the_server() {
    let mut server = Server::with_model(HttpOptions::default(), || panic!("a defect in the loader"));
    assert!(matches!(server.end(), Err(ServeError::LoadPanicked)));
}
