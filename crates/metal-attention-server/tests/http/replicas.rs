//! A server with two replicas of the model: distribution of requests, and the failure of a replica.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use metal_attention::scheduler::SchedulerOptions;
use metal_attention::{Device, EngineOptions, Model};
use metal_attention_server::http::{HttpOptions, LoadedModel, ServeError};
use serde_json::{Value, json};

use crate::client::{Answer, Server, number};
use crate::support::Controls;
use crate::{STORY, completion};

/// A test's access to the forward pass of a replica.
#[derive(Default, Clone)]
struct ReplicaControls {
    /// See [`Controls::panic_in`].
    panic_in: Arc<AtomicUsize>,
    /// The tokens of each batch.
    log: Arc<Mutex<Vec<Vec<u32>>>>,
}

impl ReplicaControls {
    fn n_tokens(&self) -> usize {
        self.log.lock().unwrap().iter().map(Vec::len).sum()
    }
}

/// A server with `n` replicas of four slots each.
fn server_with_replicas(n: usize) -> (Server, Vec<ReplicaControls>) {
    let controls: Vec<_> = (0..n).map(|_| ReplicaControls::default()).collect();
    let moved = controls.clone();
    let server = Server::with_model(HttpOptions::default(), move || {
        let model = Model::built_in()?;
        let engine = EngineOptions { device: Device::Cpu, n_threads: Some(1), ..Default::default() };
        let options = SchedulerOptions { n_parallel: 4, ..Default::default() };
        let engine = options.engine(&model, &engine);
        let pass =
            |ReplicaControls { panic_in, log }| Controls { panic_in, log, ..Default::default() }.pass(&model, &engine);
        let passes = moved.into_iter().map(|controls| pass(controls).into()).collect();
        Ok(LoadedModel::start_replicas(model.clone(), passes, &options).unwrap())
    });
    server.wait_until_ready();
    // Removes the token that each replica evaluated at its start.
    for control in &controls {
        control.log.lock().unwrap().clear();
    }
    (server, controls)
}

/// The request of the `i`-th client: even ones are greedy, odd ones are sampled with a seed.
fn question(i: usize) -> Value {
    let temperature = if i.is_multiple_of(2) { 0.0 } else { 1.0 };
    let prompt = format!("{} had a dog. One day", ["Lily", "Tom", "Ben", "Mia"][i % 4]);
    json!({"prompt": prompt, "max_tokens": 24, "temperature": temperature, "seed": i, "logprobs": 0})
}

fn choice(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["choices"][0].clone()
}

#[test]
fn two_replicas_give_the_answers_of_one() {
    let (one, _) = server_with_replicas(1);
    let (two, controls) = server_with_replicas(2);
    let expected: Vec<Value> = (0..16).map(|i| choice(&one.post("/v1/completions", &question(i)))).collect();
    let answers: Vec<Value> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..16)
            .map(|i| {
                scope.spawn({
                    let two = &two;
                    move || choice(&two.post("/v1/completions", &question(i)))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(answers, expected);
    assert!(controls.iter().all(|control| control.n_tokens() > 24), "both had work");
    assert_eq!((two.metric("generated_tokens_total"), two.metric("replicas")), (16.0 * 24.0, 2.0));
    let pages = |server: &Server| server.metric("kv_cache_pages_used") + server.metric("kv_cache_pages_free");
    assert_eq!(pages(&two), 2.0 * pages(&one));
    let text = two.get("/metrics").body;
    assert_eq!(number(&text, "vllm:num_requests_running{model_name=\"stories\",engine=\"0\"} "), 0.0);
}

#[test]
fn a_prompt_is_sent_to_the_replica_with_its_prefix() {
    let (server, controls) = server_with_replicas(2);
    let ask = |prompt: &str| {
        let answer = server.post("/v1/completions", &completion(&json!({"prompt": prompt}))).json();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    let stories =
        ["The cat sat on the mat and slept all day. ".repeat(8), "A big red bus came to the park. ".repeat(8)];
    let n_steps = || controls.iter().map(|control| control.log.lock().unwrap().len()).collect::<Vec<_>>();
    // Both replicas are idle: the first one gets the prompt. While that one is busy the second one gets the next prompt.
    assert_eq!(ask(&stories[0]), 0);
    assert!(n_steps()[0] > 0 && n_steps()[1] == 0, "{:?}", n_steps());
    let long = json!({"prompt": "Once", "stream": true, "max_tokens": 400, "ignore_eos": true});
    let mut events = server.stream("/v1/completions", &completion(&long));
    events.next().unwrap();
    assert_eq!(ask(&stories[1]), 0);
    drop(events);
    assert!(n_steps()[1] > 0);
    // Each prompt is sent to the replica that has its prefix, in any order.
    for story in [&stories[1], &stories[0], &stories[1]] {
        assert!(ask(&format!("{story}Then")) >= 64);
    }
    // A prompt shorter than a KV page shares nothing.
    assert!(ask("Once upon a time") < 16);
}

#[test]
fn the_others_serve_after_a_replica_failed() {
    let (mut server, controls) = server_with_replicas(2);
    let ask = || server.post("/v1/completions", &completion(&json!({})));
    // The first of two idle replicas gets the request and panics.
    controls[0].panic_in.store(3, Ordering::Relaxed);
    assert_eq!(ask().error(), (500, Value::Null, json!("engine_failed")));
    assert_eq!((server.metric("replicas"), server.metric("replicas_failed")), (1.0, 1.0));
    for path in ["/health", "/ready"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    for _ in 0..8 {
        assert_eq!(choice(&ask())["text"], STORY);
    }
    let input = json!({"input": "Once upon a time"});
    assert_eq!(server.post("/v1/embeddings", &input).status, 200);
    // The failure of the last replica ends the server.
    controls[1].panic_in.store(3, Ordering::Relaxed);
    assert_eq!(ask().error(), (500, Value::Null, json!("engine_failed")));
    let Err(error) = server.end() else { panic!("the server ended without an error") };
    assert!(matches!(&error, ServeError::Engine(why) if &**why == "a defect in the forward pass"), "{error:?}");
}
