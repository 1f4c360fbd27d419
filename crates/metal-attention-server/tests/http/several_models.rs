//! Several models in one server: loading on demand, memory limits and eviction, keep-alive, defaults. Each model is the
//! built-in one under another name, and its source reports a made-up size of a device of 1000 bytes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use metal_attention_server::http::{
    HttpOptions, KeepAlive, LoadedModel, MemoryNeed, ModelCard, ModelConfig, ModelDefaults, ModelSource, ModelsOptions,
    Placement, SamplingFields, SourceError,
};
use serde_json::{Value, json};

use super::STORY;
use super::client::{Server, load};

/// The loads in the order in which they began: `+a` is a load of the model `a`.
type Log = Arc<Mutex<Vec<String>>>;

/// A model source of a test.
struct Source {
    /// The model's name.
    name: &'static str,
    /// The memory that it claims to need.
    bytes: u64,
    /// Whether loading fails.
    fails: bool,
    /// The loads of all sources.
    log: Log,
    /// Loads of all sources that run now, and their maximum so far.
    loading: Arc<(AtomicUsize, AtomicUsize)>,
    /// A load waits until this many loads have run at once, ten seconds at most.
    together: usize,
}

impl ModelSource for Source {
    fn card(&self) -> Result<Arc<ModelCard>, SourceError> {
        Ok(Arc::new(ModelCard::of(metal_attention::Model::built_in()?.gguf())))
    }

    fn placements(&self) -> Result<Vec<Placement>, SourceError> {
        Ok(vec![vec![MemoryNeed { device: "cpu".into(), bytes: self.bytes, capacity: Some(1000) }]])
    }

    fn load(&self, _: &Placement) -> Result<LoadedModel, SourceError> {
        self.log.lock().unwrap().push(format!("+{}", self.name));
        let now = self.loading.0.fetch_add(1, Ordering::SeqCst) + 1;
        self.loading.1.fetch_max(now, Ordering::SeqCst);
        let begun = Instant::now();
        std::thread::sleep(Duration::from_millis(20));
        while self.loading.1.load(Ordering::SeqCst) < self.together && begun.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.loading.0.fetch_sub(1, Ordering::SeqCst);
        if self.fails {
            return Err("the file is damaged".into());
        }
        Ok(load(4, 256)?)
    }
}

/// Builder of a server with several models. The fields are those of each [`Source`].
struct ServerBuilder {
    log: Log,
    loading: Arc<(AtomicUsize, AtomicUsize)>,
    together: usize,
    models: Vec<ModelConfig>,
}

impl ServerBuilder {
    fn new(models: &[(&'static str, u64)]) -> Self {
        let mut this = Self { log: Log::default(), loading: Arc::default(), together: 1, models: Vec::new() };
        for (name, bytes) in models {
            this.add(name, *bytes, false);
        }
        this
    }

    /// Adds a model. Returns its configuration for further changes.
    fn add(&mut self, name: &'static str, bytes: u64, fails: bool) -> &mut ModelConfig {
        let (log, loading) = (Arc::clone(&self.log), Arc::clone(&self.loading));
        let source = Source { name, bytes, fails, log, loading, together: self.together };
        self.models.push(ModelConfig {
            names: vec![name.into()],
            source: Box::new(source),
            resident: false,
            keep_alive: None,
            defaults: ModelDefaults::default(),
        });
        self.models.last_mut().unwrap()
    }

    /// Starts the server and waits until it is ready.
    fn serve(self) -> (Server, Log) {
        let models = ModelsOptions { models: self.models, ..Default::default() };
        let server = Server::with_models(HttpOptions::default(), models);
        server.wait_until_ready();
        (server, self.log)
    }
}

fn completion(model: &str) -> Value {
    json!({"model": model, "prompt": super::PROMPT, "temperature": 0, "max_tokens": 8})
}

/// Requests a completion. Returns the status with the text, or with the error's code and message.
fn complete(server: &Server, model: &str) -> (u16, String) {
    let answer = server.post("/v1/completions", &completion(model));
    let body = answer.json();
    let text = body["choices"][0]["text"].as_str();
    let error =
        || format!("{}: {}", body["error"]["code"].as_str().unwrap(), body["error"]["message"].as_str().unwrap());
    (answer.status, text.map_or_else(error, str::to_owned))
}

#[test]
fn models_are_loaded_when_requests_name_them() {
    let (server, log) = ServerBuilder::new(&[("a", 100), ("b", 100)]).serve();
    assert!(log.lock().unwrap().is_empty(), "none is loaded before a request comes");
    assert_eq!(complete(&server, "b"), (200, STORY.into()));
    assert_eq!(complete(&server, "b"), (200, STORY.into()));
    assert_eq!(*log.lock().unwrap(), ["+b"]);
    let answer = server.post("/v1/completions", &completion("a"));
    assert!(answer.headers.contains("x-model-load-seconds: 0."), "{}", answer.headers);
    assert!(!answer.headers.contains("x-model: "), "{}", answer.headers);
    // On every path the header appears exactly if the request waited for a load, also with an error.
    for (path, mut body) in [
        ("/v1/messages", json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1})),
        ("/v1/embeddings", json!({"input": "Hello"})),
        ("/api/generate", json!({"prompt": "Hello", "stream": false, "options": {"num_predict": 1}})),
        ("/tokenize", json!({"content": "Hello"})),
        ("/v1/rerank", json!({"query": "Hello", "documents": ["Hello"]})),
    ] {
        let (server, _) = ServerBuilder::new(&[("a", 100)]).serve();
        body["model"] = "a".into();
        for waits in [true, false] {
            let answer = server.post(path, &body);
            assert_eq!(answer.headers.contains("x-model-load-seconds: 0."), waits, "{path}: {}", answer.headers);
        }
    }
    // A request without a model's name uses the first model.
    let answer = server.post("/v1/completions", &json!({"prompt": super::PROMPT, "max_tokens": 1}));
    assert_eq!((answer.status, &answer.json()["model"]), (200, &json!("a")));
    let names = server.get("/v1/models").json()["data"].as_array().unwrap().clone();
    assert_eq!(names.iter().map(|model| model["id"].as_str().unwrap()).collect::<Vec<_>>(), ["a", "b"]);
    let (status, error) = complete(&server, "c");
    assert_eq!((status, error.as_str()), (404, "model_not_found: there is no model \"c\" here, only \"a\", \"b\""));
    assert_eq!(complete(&server, "a:latest"), (200, STORY.into()));
}

#[test]
fn the_least_recently_used_model_is_unloaded() {
    let (server, log) =
        ServerBuilder::new(&[("a", 400), ("b", 400), ("c", 400), ("all", 1000), ("more", 1001)]).serve();
    for model in ["a", "b", "a", "c", "a", "b"] {
        assert_eq!(complete(&server, model), (200, STORY.into()));
    }
    // Loading c unloads b, and loading b again unloads c.
    assert_eq!(*log.lock().unwrap(), ["+a", "+b", "+c", "+b"]);
    let models = server.get("/v1/models").json();
    let states: Vec<_> = models["data"].as_array().unwrap().iter().map(|model| &model["status"]["value"]).collect();
    assert_eq!(states, ["loaded", "loaded", "unloaded", "unloaded", "unloaded"]);
    assert_eq!(models["memory"], json!({"total": 1000, "free": 200}));
    assert_eq!(server.get("/v1/models/c").json()["status"], json!({"value": "unloaded"}));
    assert_eq!(complete(&server, "all"), (200, STORY.into()));
    assert_eq!(server.metric("models_loaded"), 1.0);
    let (status, error) = complete(&server, "more");
    assert_eq!(status, 400);
    let expected = "model_too_large: the model \"more\" needs 1001 bytes of cpu, which has 1000 for models: ";
    assert!(error.starts_with(expected), "{error}");
    assert_eq!(log.lock().unwrap().last().unwrap(), "+all", "nothing was unloaded for a model that can never fit");
}

#[test]
fn two_hundred_requests_to_three_models_in_memory_for_two() {
    let models = ServerBuilder::new(&[("a", 500), ("b", 500), ("c", 500)]);
    let loading = Arc::clone(&models.loading);
    let (server, log) = models.serve();
    std::thread::scope(|scope| {
        for client in 0..20 {
            let server = &server;
            scope.spawn(move || {
                for i in 0..10 {
                    let model = ["a", "b", "c"][(client + i) % 3];
                    assert_eq!(complete(server, model), (200, STORY.into()), "{model}");
                }
            });
        }
    });
    assert!(loading.1.load(Ordering::SeqCst) <= 2);
    assert!(log.lock().unwrap().len() >= 4, "models were unloaded for each other");
}

#[test]
fn models_that_fit_together_are_loaded_concurrently() {
    let mut models = ServerBuilder { together: 2, ..ServerBuilder::new(&[]) };
    for name in ["a", "b"] {
        models.add(name, 500, false);
    }
    let loading = Arc::clone(&models.loading);
    let (server, _) = models.serve();
    std::thread::scope(|scope| {
        for model in ["a", "b", "a", "b"] {
            let server = &server;
            scope.spawn(move || assert_eq!(complete(server, model), (200, STORY.into())));
        }
    });
    assert_eq!(loading.1.load(Ordering::SeqCst), 2);
    assert_eq!(server.metric("models_loaded"), 2.0);
}

#[test]
fn a_failed_load_does_not_affect_other_models() {
    let mut models = ServerBuilder::new(&[("a", 500), ("b", 500)]);
    models.add("bad", 400, true);
    let (server, log) = models.serve();
    assert_eq!(complete(&server, "a"), (200, STORY.into()));
    for _ in 0..2 {
        let (status, error) = complete(&server, "bad");
        let expected = "model_not_loaded: the model \"bad\" cannot be loaded: the file is damaged";
        assert_eq!((status, error.as_str()), (500, expected));
    }
    assert_eq!(complete(&server, "a"), (200, STORY.into()));
    assert_eq!(complete(&server, "b"), (200, STORY.into()));
    assert_eq!(*log.lock().unwrap(), ["+a", "+bad", "+bad", "+b"]);
}

#[test]
fn a_model_with_a_running_answer_is_not_unloaded() {
    let (server, log) = ServerBuilder::new(&[("a", 600), ("b", 600)]).serve();
    let mut long = completion("a");
    long["max_tokens"] = json!(400);
    long["ignore_eos"] = json!(true);
    long["stream"] = json!(true);
    long["stream_options"] = json!({"include_usage": true});
    let mut events = server.stream("/v1/completions", &long);
    events.next().unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| complete(&server, "b"));
        let last = events.filter(|data| data != "[DONE]").last().unwrap();
        let last: Value = serde_json::from_str(&last).unwrap();
        assert_eq!(last["usage"]["completion_tokens"], 400, "the answer is complete");
        assert_eq!(other.join().unwrap(), (200, STORY.into()));
    });
    assert_eq!(*log.lock().unwrap(), ["+a", "+b"]);
}

#[test]
fn models_are_unloaded_after_their_keep_alive() {
    let mut models = ServerBuilder::new(&[]);
    models.add("short", 100, false).keep_alive = Some(KeepAlive::For(Duration::from_millis(50)));
    models.add("now", 100, false).keep_alive = Some(KeepAlive::For(Duration::ZERO));
    models.add("long", 100, false);
    let (server, _) = models.serve();
    for model in ["short", "now", "long"] {
        assert_eq!(complete(&server, model), (200, STORY.into()));
    }
    let start = Instant::now();
    while server.metric("models_loaded") > 1.0 {
        assert!(start.elapsed() < Duration::from_secs(10), "two models are unloaded soon");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(complete(&server, "short"), (200, STORY.into()));
}

#[test]
fn resident_models_are_never_unloaded() {
    let mut models = ServerBuilder::new(&[("b", 500), ("c", 300)]);
    models.add("a", 600, false).resident = true;
    let (server, log) = models.serve();
    assert_eq!(complete(&server, "c"), (200, STORY.into()));
    let (status, error) = complete(&server, "b");
    assert_eq!(status, 503);
    let expected = "no_room_for_model: the model \"b\" needs 500 bytes of cpu, which has 1000 for models, and those that \
                    stay loaded leave too few";
    assert!(error.starts_with(expected), "{error}");
    for model in ["a", "c"] {
        assert_eq!(complete(&server, model), (200, STORY.into()));
    }
    assert_eq!(*log.lock().unwrap(), ["+a", "+c"], "nothing was unloaded in vain");
}

#[test]
fn defaults_apply_to_fields_that_requests_omit() {
    let mut models = ServerBuilder::new(&[]);
    let sampling: SamplingFields = serde_json::from_value(json!({"temperature": 0})).unwrap();
    let model = models.add("a", 100, false);
    model.names.push("claude-*".into());
    model.defaults = ModelDefaults { sampling, stop: vec![" girl".into()], max_tokens: Some(20), ..Default::default() };
    let (server, _) = models.serve();
    let request = json!({"model": "claude-9", "messages": [{"role": "user", "content": "Hello"}]});
    let answers: Vec<Value> = (0..2).map(|_| server.post("/v1/chat/completions", &request).json()).collect();
    assert_eq!(answers[0]["choices"], answers[1]["choices"], "greedy");
    assert_eq!(answers[0]["model"], "claude-9");
    assert!(answers[0]["usage"]["completion_tokens"].as_u64().unwrap() <= 20);
    let text = server.post("/v1/completions", &json!({"model": "a", "prompt": super::PROMPT})).json();
    assert_eq!(text["choices"][0]["text"], ", there was a little");
    // Responses report the effective values.
    let response = server.post("/v1/responses", &json!({"model": "a", "input": "Hello"})).json();
    assert_eq!((&response["temperature"], &response["max_output_tokens"]), (&json!(0.0), &json!(20)));
    let unlimited = json!({"model": "a", "input": "Hello", "temperature": 0.5, "max_output_tokens": -1, "stop": "."});
    let response = server.post("/v1/responses", &unlimited).json();
    assert_eq!((&response["temperature"], &response["max_output_tokens"]), (&json!(0.5), &Value::Null));
    let message = json!({"model": "a", "messages": [{"role": "user", "content": "Hello"}], "ignore_eos": true});
    assert_eq!(server.post("/v1/messages", &message).json()["stop_reason"], "max_tokens");
    let props = server.get("/props?model=a").json()["default_generation_settings"]["params"].clone();
    let text = server.post("/completion", &json!({"model": "a", "prompt": super::PROMPT, "stop": ["x"]})).json();
    for (settings, stop) in [(&props, json!([" girl"])), (&text["generation_settings"], json!(["x", " girl"]))] {
        assert_eq!((&settings["temperature"], &settings["n_predict"]), (&json!(0.0), &json!(20)));
        assert_eq!(settings["stop"], stop);
    }
}
