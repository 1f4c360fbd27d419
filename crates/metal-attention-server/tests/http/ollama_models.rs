//! Ollama's paths that list, show, create, copy, pull and delete models, and `keep_alive`. The model store is a stub.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use metal_attention_server::http::{
    HttpOptions, LoadedModel, MemoryNeed, ModelCard, ModelConfig, ModelDefaults, ModelSource, ModelStore,
    ModelsOptions, Placement, PullProgress, SourceError, StoredModel,
};
use serde_json::{Value, json};

use crate::client::{Answer, Server, load};
use crate::{PROMPT, STORY};

/// A source of the built-in model that reports made-up memory needs.
struct Source;

impl ModelSource for Source {
    fn card(&self) -> Result<Arc<ModelCard>, SourceError> {
        Ok(Arc::new(ModelCard::of(metal_attention::Model::built_in()?.gguf())))
    }

    fn placements(&self) -> Result<Vec<Placement>, SourceError> {
        let need = |device: &str, bytes| MemoryNeed { device: device.into(), bytes, capacity: Some(1000) };
        Ok(vec![vec![need("cpu", 300), need("cuda:0", 50)]])
    }

    fn load(&self, _: &Placement) -> Result<LoadedModel, SourceError> {
        Ok(load(4, 64)?)
    }
}

/// A store in memory that contains the names that were pulled. Pulling `absent` or `broken` fails.
#[derive(Default)]
struct Store(Mutex<Vec<String>>);

impl ModelStore for Store {
    fn models(&self) -> Vec<StoredModel> {
        let model = |name: &String| StoredModel { name: name.clone(), version: 1, open: Box::new(|| Box::new(Source)) };
        self.0.lock().unwrap().iter().map(model).collect()
    }

    fn pull(&self, name: &str, report: &mut dyn FnMut(PullProgress) -> bool) -> Result<(), SourceError> {
        if name == "absent" {
            return Err("the hub has no such model".into());
        }
        for completed in [0, 100] {
            report(PullProgress { status: "pulling a.gguf".into(), total: 100, completed });
        }
        if name == "broken" {
            return Err("the download broke off".into());
        }
        self.0.lock().unwrap().push(name.to_owned());
        Ok(())
    }

    fn delete(&self, name: &str) -> Result<(), SourceError> {
        self.0.lock().unwrap().retain(|known| known != name);
        Ok(())
    }
}

/// A server with the model `stories` and a [`Store`].
fn serve(options: HttpOptions) -> Server {
    let stories = ModelConfig {
        names: vec!["stories".into()],
        source: Box::new(Source),
        resident: false,
        keep_alive: None,
        defaults: ModelDefaults::default(),
    };
    let store = Some(Box::new(Store::default()) as Box<dyn ModelStore>);
    let server = Server::with_models(options, ModelsOptions { models: vec![stories], store, ..Default::default() });
    server.wait_until_ready();
    server
}

fn ok(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{answer:?}");
    if answer.body.is_empty() { Value::Null } else { answer.json() }
}

/// The status and message of an error in Ollama's form.
fn error_of(answer: &Answer) -> (u16, String) {
    (answer.status, answer.json()["error"].as_str().unwrap().to_owned())
}

/// A greedy completion of eight tokens.
fn text(server: &Server, model: &str, more: &Value) -> Value {
    let mut request = json!({"model": model, "prompt": PROMPT, "raw": true, "stream": false,
        "options": {"temperature": 0, "num_predict": 8}});
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ok(&server.post("/api/generate", &request))["response"].clone()
}

/// The loaded models: name, and seconds until they are unloaded.
fn loaded(server: &Server) -> Vec<(String, i64)> {
    let models = ok(&server.get("/api/ps"))["models"].as_array().unwrap().clone();
    let left = |model: &Value| {
        let expires: jiff::Timestamp = model["expires_at"].as_str().unwrap().parse().unwrap();
        (model["name"].as_str().unwrap().to_owned(), expires.as_second() - jiff::Timestamp::now().as_second())
    };
    models.iter().map(left).collect()
}

fn wait_until_unloaded(server: &Server) {
    while !loaded(server).is_empty() {
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn delete(server: &Server, name: &str) -> Answer {
    let body = json!({"model": name}).to_string();
    server.send("DELETE", "/api/delete", &["Content-Type: application/json"], body.as_bytes())
}

fn names(server: &Server) -> Vec<String> {
    let tags = ok(&server.get("/api/tags"));
    tags["models"].as_array().unwrap().iter().map(|model| model["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn models_are_described() {
    let server = serve(HttpOptions::default());
    let tags = ok(&server.get("/api/tags"));
    let [tag] = tags["models"].as_array().unwrap().as_slice() else { panic!("{tags}") };
    assert_eq!((&tag["name"], &tag["model"]), (&json!("stories:latest"), &json!("stories:latest")));
    let details = json!({"parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"],
        "parameter_size": tag["details"]["parameter_size"], "quantization_level": tag["details"]["quantization_level"]});
    assert_eq!(tag["details"], details);
    assert!(details["parameter_size"].as_str().unwrap().ends_with('K'), "{details}");
    assert!(tag["size"].as_u64() > Some(100_000) && tag["digest"].as_str().unwrap().len() == 64);
    for request in [json!({"model": "stories"}), json!({"name": "stories:latest", "verbose": true})] {
        let show = ok(&server.post("/api/show", &request));
        assert_eq!((&show["details"], &show["modified_at"]), (&details, &tag["modified_at"]));
        let info = &show["model_info"];
        assert_eq!((&info["general.architecture"], &info["llama.context_length"]), (&json!("llama"), &json!(512)));
        assert_eq!(show["capabilities"], json!(["completion"]));
        assert_eq!(show["modelfile"], "FROM stories\n");
    }
    assert_eq!(error_of(&server.post("/api/show", &json!({"model": "nope"}))).0, 404);
    assert_eq!(error_of(&server.post("/api/show", &json!({}))).0, 400);
    // Describing a model does not load it.
    assert_eq!(loaded(&server), []);
}

#[test]
fn keep_alive_sets_how_long_a_model_stays_loaded() {
    let server = serve(HttpOptions::default());
    for (keep_alive, seconds) in
        [(Value::Null, 300), (json!("10m"), 600), (json!(120), 120), (json!("1h30m"), 5400), (json!(-1), 3_153_600_000)]
    {
        assert_eq!(text(&server, "stories", &json!({"keep_alive": keep_alive})), STORY);
        let [(name, left)] = &loaded(&server)[..] else { panic!() };
        assert!(name == "stories:latest" && (seconds - 5..=seconds).contains(left), "{keep_alive}: {left}");
    }
    let process = ok(&server.get("/api/ps"))["models"][0].clone();
    assert_eq!(
        (&process["size"], &process["size_vram"], &process["context_length"]),
        (&json!(350), &json!(50), &json!(512))
    );
    assert_eq!(text(&server, "stories", &json!({"keep_alive": 0})), STORY);
    wait_until_unloaded(&server);
    for (path, body) in
        [("generate", json!({"model": "stories"})), ("chat", json!({"model": "stories", "messages": []}))]
    {
        let path = format!("/api/{path}");
        assert_eq!(ok(&server.post(&path, &body))["done_reason"], "load");
        assert_eq!(loaded(&server).len(), 1);
        let mut body = body;
        body["keep_alive"] = json!("0s");
        assert_eq!(ok(&server.post(&path, &body))["done_reason"], "unload");
        wait_until_unloaded(&server);
    }
}

#[test]
fn models_are_created_from_others() {
    let server = serve(HttpOptions::default());
    let create = |more: Value| {
        let mut request = json!({"model": "mario", "from": "stories:latest"});
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/api/create", &request)
    };
    let parameters = json!({"temperature": 0, "stop": [" little"], "num_predict": 6, "num_gpu": 1});
    let created = create(json!({"system": "You are Mario.", "parameters": parameters}));
    let headers = &created.headers;
    assert!(headers.contains("content-type: application/x-ndjson") && headers.contains("x-ignored: num_gpu"));
    assert_eq!(created.body.lines().last(), Some(r#"{"status":"success"}"#));
    assert_eq!(names(&server), ["stories:latest", "mario:latest"]);
    assert_eq!(text(&server, "mario", &json!({"options": {"num_predict": 3}})), ", there was");
    assert_eq!(text(&server, "mario:latest", &json!({"options": null})), ", there was a");
    let show = ok(&server.post("/api/show", &json!({"model": "mario"})));
    assert_eq!(show["system"], "You are Mario.");
    let lines: Vec<_> =
        show["parameters"].as_str().unwrap().lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
    assert_eq!(lines, [vec!["temperature", "0"], vec!["num_predict", "6"], vec!["stop", "\"", "little\""]]);
    // A created model can be the base of another one.
    let created = create(json!({"model": "luigi", "from": "mario", "parameters": {"stop": [" a"]}, "stream": false}));
    assert_eq!(ok(&created), json!({"status": "success"}));
    assert_eq!(text(&server, "luigi", &json!({"options": null})), ", there was");
    assert_eq!(ok(&server.post("/api/show", &json!({"model": "luigi"})))["system"], "You are Mario.");

    assert_eq!(ok(&server.post("/api/copy", &json!({"source": "mario", "destination": "peach"}))), Value::Null);
    assert_eq!(text(&server, "peach", &json!({"options": null})), ", there was a");
    for name in ["mario", "luigi:latest", "peach"] {
        assert_eq!(delete(&server, name).status, 200);
        assert_eq!(error_of(&delete(&server, name)).0, 404);
    }
    assert_eq!(names(&server), ["stories:latest"]);
    assert_eq!(text(&server, "stories", &json!({})), STORY);

    for (more, status, named) in [
        (json!({"from": "nope"}), 404, "nope"),
        (json!({"from": "/etc/passwd"}), 404, "/etc/passwd"),
        (json!({"from": null}), 400, "from"),
        (json!({"model": "stories"}), 400, "stories"),
        (json!({"model": "x".repeat(300)}), 400, "name"),
        (json!({"template": "{{ .Prompt }}"}), 400, "template"),
        (json!({"files": {"a.gguf": "sha256:0"}}), 400, "files"),
        (json!({"quantize": "q4_0"}), 400, "quantize"),
        (json!({"parameters": {"mirostat": 1}}), 400, "mirostat"),
        (json!({"parameters": []}), 400, "object"),
    ] {
        let (got, error) = error_of(&create(more.clone()));
        assert!(got == status && error.contains(named), "{more}: {got} {error}");
    }
    let (status, error) = error_of(&delete(&server, "stories"));
    assert!(status == 400 && error.contains("stories"), "{error}");
    assert_eq!(error_of(&server.post("/api/copy", &json!({"source": "nope", "destination": "x"}))).0, 404);
}

/// The metrics still have those of the only engine.
#[test]
fn a_copy_of_the_only_model_shares_its_engine() {
    let server = Server::new(HttpOptions::default());
    assert_eq!(server.post("/api/copy", &json!({"source": "stories", "destination": "tales"})).status, 200);
    assert_eq!(text(&server, "tales", &json!({})), STORY);
    assert_eq!(server.metric("generated_tokens_total"), 8.0);
}

#[test]
fn models_are_pulled() {
    let server = serve(HttpOptions::default());
    let pull = |name: &str, stream: bool| server.post("/api/pull", &json!({"model": name, "stream": stream}));
    let answer = pull("new:1b", true);
    let reports: Vec<Value> = answer.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let report =
        |completed: u64| json!({"status": "pulling a.gguf", "digest": "a.gguf", "total": 100, "completed": completed});
    assert_eq!(reports, [json!({"status": "pulling manifest"}), report(0), report(100), json!({"status": "success"})]);
    assert_eq!(names(&server), ["stories:latest", "new:1b"]);
    assert_eq!(text(&server, "new:1b", &json!({})), STORY);
    assert_eq!(ok(&pull("other", false)), json!({"status": "success"}));
    assert_eq!(delete(&server, "new:1b").status, 200);
    // A pull that fails before any progress has an error status. A later failure is a line of the stream.
    let (status, error) = error_of(&pull("absent", true));
    assert!(status == 400 && error.contains("the hub has no such model"), "{error}");
    let last: Value = serde_json::from_str(pull("broken", true).body.lines().last().unwrap()).unwrap();
    assert!(last["error"].as_str().unwrap().contains("broke off"), "{last}");
    assert_eq!(error_of(&pull("broken", false)).0, 400);
    // Other requests never download a model.
    let chat = json!({"model": "hf:ggml-org/models", "messages": [{"role": "user", "content": "x"}]});
    assert_eq!(error_of(&server.post("/api/chat", &chat)).0, 404);
}

#[test]
fn servers_open_to_others_reject_changes_of_models() {
    let server = serve(HttpOptions { cors_origin: Some("*".parse().unwrap()), ..Default::default() });
    for (path, body) in [
        ("create", json!({"model": "x", "from": "stories"})),
        ("copy", json!({"source": "stories", "destination": "x"})),
        ("pull", json!({"model": "new"})),
        ("generate", json!({"model": "stories", "keep_alive": 0})),
        ("chat", json!({"model": "stories", "messages": [], "keep_alive": 0})),
    ] {
        let (status, error) = error_of(&server.post(&format!("/api/{path}"), &body));
        assert!(status == 403 && error.contains("--allow-manage"), "{path}: {status} {error}");
    }
    assert_eq!(error_of(&delete(&server, "stories")).0, 403);
    let body = json!({"model": "stories", "prompt": PROMPT, "stream": false, "keep_alive": -1});
    let answer = server.post("/api/generate", &body);
    assert!(answer.status == 200 && answer.headers.contains("x-ignored: keep_alive"), "{answer:?}");
    assert!(loaded(&server)[0].1 <= 300);
    for path in ["/api/push", "/api/blobs/sha256:00"] {
        let (status, error) = error_of(&server.post(path, &json!({"model": "stories"})));
        assert!(status == 400 && error.contains(path), "{error}");
    }
}
