//! Health checks, metrics and the shutdown sequence, as probes, Prometheus scrapers and request routers see them.

use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use metal_attention::scheduler::SchedulerOptions;
use metal_attention::{Device, EngineOptions, Model};
use metal_attention_server::http::{ApiKeys, HttpOptions, LoadError, LoadedModel};
use serde_json::{Value, json};

use crate::client::{Answer, Server, number};
use crate::completion;
use crate::support::Controls;

/// Options with an API key.
fn with_key() -> HttpOptions {
    HttpOptions { keys: ApiKeys::new(["secret".to_owned()]).unwrap(), ..Default::default() }
}

/// A server with two slots whose engine is blocked while the returned gate is closed. It is not waited for.
pub fn server_with_gate(options: HttpOptions) -> (Server, Controls) {
    server_with_gate_of(Model::built_in().unwrap(), options)
}

/// Like [`server_with_gate`], with `model`.
pub fn server_with_gate_of(model: Model, options: HttpOptions) -> (Server, Controls) {
    let engine = EngineOptions { device: Device::Cpu, n_seq: 4, n_threads: Some(1), ..Default::default() };
    let controls = Controls::default();
    let pass = controls.pass(&model, &engine);
    let server = Server::with_model(options, move || {
        let options = SchedulerOptions { n_parallel: 2, ..Default::default() };
        Ok(LoadedModel::start(model, pass, &options).unwrap())
    });
    (server, controls)
}

#[test]
fn the_monitoring_port_needs_no_key_and_serves_nothing_else() {
    let server = Server::new(with_key());
    for path in ["/health", "/v1/health", "/ready", "/metrics"] {
        assert_eq!(server.get_monitoring(path).status, 200, "{path}");
    }
    for path in ["/", "/v1/models", "/v1/completions", "/embeddings", "/openapi.json"] {
        assert_eq!(server.get_monitoring(path).error(), (404, Value::Null, json!("route_not_found")), "{path}");
    }
    assert_eq!(server.get("/metrics").status, 401);
    let open = Server::new(HttpOptions { open_metrics: true, ..with_key() });
    assert_eq!((open.get("/metrics").status, open.get("/v1/models").status), (200, 401));
    let paths = &open.get("/openapi.json").json()["paths"];
    let needs_key = |path: &str| paths[path]["get"]["security"].is_array();
    assert!(needs_key("/v1/models") && !needs_key("/metrics") && !needs_key("/health"));
}

/// A sample of Prometheus' text format.
struct Sample {
    /// The metric's type, such as `gauge`.
    kind: String,
    /// Names and values of the labels.
    labels: Vec<(String, String)>,
    value: f64,
}

/// The only sample of the metric `name`, as an endpoint picker reads it.
fn sample(text: &str, name: &str) -> Sample {
    let kind = text.lines().find_map(|line| line.strip_prefix(&format!("# TYPE {name} "))).unwrap();
    let lines = text.lines().filter(|line| line.starts_with(&format!("{name}{{")));
    let [line] = lines.collect::<Vec<_>>()[..] else { panic!("one {name} is expected in\n{text}") };
    let (labels, value) = line[name.len() + 1..].rsplit_once("} ").unwrap();
    let label = |text: &str| {
        let (name, value) = text.split_once('=').unwrap();
        (name.to_owned(), value.strip_prefix('"').unwrap().strip_suffix('"').unwrap().to_owned())
    };
    let labels = labels.split(',').map(label).collect();
    Sample { kind: kind.to_owned(), labels, value: value.parse().unwrap() }
}

impl Sample {
    fn label(&self, name: &str) -> &str {
        &self.labels.iter().find(|(known, _)| known == name).unwrap().1
    }
}

/// The metrics that the endpoint pickers of llm-d and of the Gateway API Inference Extension read from vLLM: three gauges
/// with one sample each, and two information metrics whose labels are whole numbers.
#[test]
fn endpoint_pickers_find_the_metrics_of_vllm() {
    let (server, controls) = server_with_gate(HttpOptions::default());
    server.wait_until_ready();
    let gauges = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"];
    let read = || {
        let text = server.get_monitoring("/metrics").body;
        gauges.map(|name| {
            let sample = sample(&text, name);
            assert_eq!((sample.kind.as_str(), sample.label("model_name")), ("gauge", "stories"));
            sample.value
        })
    };
    assert_eq!(read(), [0.0; 3]);
    let text = server.get_monitoring("/metrics").body;
    let cache = sample(&text, "vllm:cache_config_info");
    assert_eq!((cache.kind.as_str(), cache.label("block_size"), cache.value), ("gauge", "64", 1.0));
    let n_pages: usize = cache.label("num_gpu_blocks").parse().unwrap();
    assert_eq!(n_pages, 4 * 512 / 64);
    let adapters = sample(&text, "vllm:lora_requests_info");
    let labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"].map(|name| adapters.label(name));
    assert_eq!((adapters.kind.as_str(), labels), ("gauge", ["0", "", ""]));

    // Two sequences run, with two KV pages each, of which they share the first. Two wait.
    let prompt: Vec<u32> = (0..65).map(|i| 3 + i).collect();
    let request = |n: usize| completion(&json!({"prompt": prompt, "max_tokens": 60, "n": n, "ignore_eos": true}));
    assert_eq!(server.post("/v1/completions", &request(1)).status, 200);
    let wait_until_idle = || {
        while server.metric("requests_running") > 0.0 {
            std::thread::yield_now();
        }
    };
    wait_until_idle();
    assert_eq!(read(), [0.0; 3], "cached pages of finished sequences do not count as load");
    assert_eq!(server.metric("kv_cache_pages_used"), 2.0);
    let held = controls.gate.close();
    let body = request(4).to_string();
    let answer = server.send_only("POST", "/v1/completions", &["Content-Type: application/json"], body.as_bytes());
    while read() != [2.0, 2.0, 3.0 / n_pages as f64] {
        held.let_one_step_pass();
    }
    drop(held);
    assert_eq!(Answer::read(answer).status, 200);
    wait_until_idle();
    assert_eq!(read(), [0.0; 3]);
}

/// A forward pass that fails at its first token is reported as a load error, before the server becomes ready.
#[test]
fn a_model_whose_first_token_fails_is_not_loaded() {
    let model = Model::built_in().unwrap();
    let engine = EngineOptions { device: Device::Cpu, n_threads: Some(1), ..Default::default() };
    let controls = Controls::default();
    controls.fail.store(true, Ordering::Relaxed);
    let pass = controls.pass(&model, &engine);
    let error = LoadedModel::start(model, pass, &SchedulerOptions::default()).err().unwrap();
    assert!(matches!(error, LoadError::FirstToken(_)), "{error}");
    assert!(error.to_string().contains("the device is gone"), "{error}");
}

#[test]
fn a_server_is_ready_once_it_has_evaluated_a_token() {
    let (server, controls) = server_with_gate(HttpOptions::default());
    server.wait_until_ready();
    assert_eq!(*controls.log.lock().unwrap(), [[0]]);
    // That token is neither cached nor counted in the metrics.
    assert_eq!((server.metric("steps_total"), server.metric("kv_cache_pages_used")), (0.0, 0.0));
}

/// With a drain delay the server reports not ready from the signal on, but accepts requests until the delay is over.
#[test]
fn a_draining_server_accepts_requests_until_the_delay_is_over() {
    let delay = Duration::from_secs(2);
    let mut server = Server::new(HttpOptions { drain_delay: delay, ..Default::default() });
    server.wait_until_ready();
    let begun = Instant::now();
    server.stop();
    while server.get("/ready").status == 200 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(server.get("/ready").error(), (503, Value::Null, json!("shutting_down")));
    let mut answered = 0;
    while begun.elapsed() < delay / 2 {
        assert_eq!(server.post("/v1/completions", &completion(&json!({"max_tokens": 1}))).status, 200);
        answered += 1;
    }
    assert!(answered > 0);
    server.join();
    assert!(begun.elapsed() >= delay, "the server ended after {:?}", begun.elapsed());
}

/// From the signal on the server reports not ready, rejects new requests, finishes running ones, and serves health and
/// metrics to the end.
#[test]
fn a_server_that_shuts_down_rejects_new_requests() {
    let (mut server, controls) = server_with_gate(HttpOptions { grace: Duration::from_secs(60), ..Default::default() });
    server.wait_until_ready();
    let body = completion(&json!({"stream": true, "max_tokens": 480, "ignore_eos": true}));
    let mut running = server.stream("/v1/completions", &body);
    running.next().unwrap();
    let held = controls.gate.close();
    server.stop();
    while server.get_monitoring("/ready").status == 200 {
        std::thread::sleep(Duration::from_millis(1));
    }
    for answer in
        [server.get("/ready"), server.get_monitoring("/ready"), server.post("/v1/completions", &completion(&json!({})))]
    {
        assert_eq!(answer.error(), (503, Value::Null, json!("shutting_down")));
        assert!(answer.headers.contains("retry-after: 1"), "{}", answer.headers);
    }
    // Responses close the connection, so that clients do not reuse it.
    let mut stream = std::net::TcpStream::connect(server.address).unwrap();
    stream.write_all(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let answer = Answer::read(stream);
    assert!(answer.status == 503 && answer.headers.contains("connection: close"), "{answer:?}");
    assert_eq!((server.get("/health").status, server.get_monitoring("/health").status), (200, 200));
    assert_eq!(number(&server.get_monitoring("/metrics").body, "metal_attention_requests_running "), 1.0);
    drop(held);
    let rest: Vec<String> = running.collect();
    assert_eq!(rest.last().unwrap(), "[DONE]");
    assert!(rest[rest.len() - 2].contains("\"finish_reason\":\"length\""), "{}", rest[rest.len() - 2]);
    server.join();
    for address in [server.address, server.monitoring] {
        assert!(std::net::TcpStream::connect(address).is_err(), "the port is closed");
    }
}
