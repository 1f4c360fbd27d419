//! Models of a store, which come, change and go while the server runs.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use metal_attention_server::http::{
    HttpOptions, LoadedModel, MemoryNeed, ModelCard, ModelSource, ModelStore, ModelsOptions, Placement, PullProgress,
    SourceError, StoredModel,
};
use serde_json::{Value, json};

use crate::client::{Answer, Lines, Server, load};
use crate::{PROMPT, STORY};

/// What a store has and what happened to it.
#[derive(Default)]
struct Folder {
    /// The versions of the models by name.
    versions: Mutex<BTreeMap<String, u64>>,
    /// The loads, as `name@version`.
    loads: Mutex<Vec<String>>,
    /// The models whose files were looked at.
    cards: Mutex<Vec<String>>,
    /// Held by a test, looking through the store waits.
    gate: Mutex<()>,
    is_looked_through: AtomicBool,
}

impl Folder {
    fn loads(&self) -> Vec<String> {
        self.loads.lock().unwrap().clone()
    }
}

struct Store(Arc<Folder>);

impl ModelStore for Store {
    fn models(&self) -> Vec<StoredModel> {
        self.0.is_looked_through.store(true, Ordering::SeqCst);
        let _gate = self.0.gate.lock();
        let model = |(name, version): (&String, &u64)| {
            let source = Source { name: name.clone(), version: *version, folder: Arc::clone(&self.0) };
            StoredModel { name: name.clone(), version: *version, open: Box::new(|| Box::new(source)) }
        };
        self.0.versions.lock().unwrap().iter().map(model).collect()
    }

    /// The model's next version.
    fn pull(&self, name: &str, _: &mut dyn FnMut(PullProgress) -> bool) -> Result<(), SourceError> {
        *self.0.versions.lock().unwrap().entry(name.to_owned()).or_default() += 1;
        Ok(())
    }

    fn delete(&self, name: &str) -> Result<(), SourceError> {
        self.0.versions.lock().unwrap().remove(name).ok_or("no such model")?;
        Ok(())
    }
}

/// The built-in model as a version of a stored one.
struct Source {
    name: String,
    version: u64,
    folder: Arc<Folder>,
}

impl ModelSource for Source {
    fn card(&self) -> Result<Arc<ModelCard>, SourceError> {
        self.folder.cards.lock().unwrap().push(self.name.clone());
        Ok(Arc::new(ModelCard::of(metal_attention::Model::built_in()?.gguf())))
    }

    fn placements(&self) -> Result<Vec<Placement>, SourceError> {
        Ok(vec![vec![MemoryNeed { device: "cpu".into(), bytes: 100, capacity: Some(1000) }]])
    }

    fn load(&self, _: &Placement) -> Result<LoadedModel, SourceError> {
        self.folder.loads.lock().unwrap().push(format!("{}@{}", self.name, self.version));
        Ok(load(4, 64)?)
    }
}

/// A server with the models of a store, which has the model `a`.
fn serve() -> (Server, Arc<Folder>) {
    let folder = Arc::<Folder>::default();
    folder.versions.lock().unwrap().insert("a".into(), 1);
    let store = Some(Box::new(Store(Arc::clone(&folder))) as Box<dyn ModelStore>);
    let server = Server::with_models(HttpOptions::default(), ModelsOptions { store, ..Default::default() });
    server.wait_until_ready();
    (server, folder)
}

fn completion(model: &str) -> Value {
    json!({"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8})
}

/// Waits until `done`, for ten seconds at most.
#[track_caller]
fn wait_until(done: impl Fn() -> bool) {
    for _ in 0..2000 {
        if done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("it takes longer than ten seconds");
}

#[test]
fn looking_through_a_store_holds_up_no_other_request() {
    let (server, folder) = serve();
    let gate = folder.gate.lock().unwrap();
    let body = completion("a").to_string();
    let waiting = server.begin("POST", "/v1/completions", &["Content-Type: application/json"], body.as_bytes());
    wait_until(|| folder.is_looked_through.load(Ordering::SeqCst));
    assert_eq!(server.get("/health").status, 200);
    drop(gate);
    let answer = Answer::read(waiting);
    assert_eq!((answer.status, &answer.json()["choices"][0]["text"]), (200, &json!(STORY)));
}

#[test]
fn models_that_are_known_serve_while_a_store_is_looked_through() {
    let (server, folder) = serve();
    assert_eq!(server.post("/v1/completions", &completion("a")).status, 200);
    // What was found holds that long.
    std::thread::sleep(Duration::from_millis(1100));
    folder.is_looked_through.store(false, Ordering::SeqCst);
    let gate = folder.gate.lock().unwrap();
    let body = completion("a").to_string();
    let waiting = server.begin("POST", "/v1/completions", &["Content-Type: application/json"], body.as_bytes());
    wait_until(|| folder.is_looked_through.load(Ordering::SeqCst));
    assert_eq!(server.post("/v1/completions", &completion("a")).status, 200);
    drop(gate);
    assert_eq!(Answer::read(waiting).status, 200);
}

#[test]
fn a_request_without_a_model_gets_one_that_is_there() {
    let (server, folder) = serve();
    assert_eq!(names(&server), ["a"]);
    *folder.versions.lock().unwrap() = BTreeMap::from([("b".into(), 1)]);
    std::thread::sleep(Duration::from_millis(1100));
    let answer = server.post("/v1/completions", &json!({"prompt": PROMPT, "max_tokens": 1}));
    assert_eq!((answer.status, folder.loads()), (200, vec!["b@1".into()]));
}

#[test]
fn only_files_of_loaded_models_are_read_for_what_is_loaded() {
    let (server, folder) = serve();
    assert_eq!(server.post("/api/pull", &json!({"model": "b", "stream": false})).status, 200);
    assert_eq!(server.post("/v1/completions", &completion("a")).status, 200);
    let models = server.get("/api/ps").json()["models"].as_array().unwrap().clone();
    assert_eq!(models.iter().map(|model| &model["name"]).collect::<Vec<_>>(), ["a:latest"]);
    assert_eq!(*folder.cards.lock().unwrap(), ["a"]);
}

/// A server whose model `a` takes no more requests, as long as the answer whose events these are goes on.
fn serve_retiring() -> (Server, Arc<Folder>, Lines) {
    let (server, folder) = serve();
    let long = json!({"model": "a", "prompt": PROMPT, "temperature": 0, "max_tokens": 480, "ignore_eos": true,
        "n": 16, "stream": true});
    let mut events = server.stream("/v1/completions", &long);
    events.next().unwrap();
    let unloaded = server.post("/api/generate", &json!({"model": "a", "keep_alive": 0}));
    assert_eq!(unloaded.status, 200);
    (server, folder, events)
}

/// A request for `a` that waits until it is loaded again.
fn wait_for_model(server: &Server) -> TcpStream {
    let body = completion("a").to_string();
    let waiting = server.begin("POST", "/v1/completions", &["Content-Type: application/json"], body.as_bytes());
    std::thread::sleep(Duration::from_millis(20));
    waiting
}

#[test]
fn a_request_that_waits_gets_the_new_version_of_a_model() {
    let (server, folder, events) = serve_retiring();
    let waiting = wait_for_model(&server);
    assert_eq!(server.post("/api/pull", &json!({"model": "a", "stream": false})).status, 200);
    let answer = Answer::read(waiting);
    assert_eq!((answer.status, &answer.json()["choices"][0]["text"]), (200, &json!(STORY)));
    assert_eq!(folder.loads(), ["a@1", "a@2"]);
    drop(events);
    wait_until(|| server.metric("models_loaded") == 1.0);
}

fn delete(server: &Server, model: &str) -> Answer {
    let body = json!({"model": model}).to_string();
    server.send("DELETE", "/api/delete", &["Content-Type: application/json"], body.as_bytes())
}

fn copy(server: &Server, source: &str, destination: &str) {
    let body = json!({"source": source, "destination": destination});
    assert_eq!(server.post("/api/copy", &body).status, 200);
}

fn names(server: &Server) -> Vec<String> {
    let models = server.get("/v1/models").json();
    models["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect()
}

/// As clients of ollama rename models.
#[test]
fn a_copied_model_that_is_deleted_lives_on_as_the_copy() {
    let (server, folder) = serve();
    copy(&server, "a", "b");
    assert_eq!((delete(&server, "a").status, names(&server)), (200, vec!["b".into()]));
    let answer = server.post("/v1/completions", &completion("b"));
    assert_eq!((answer.status, &answer.json()["choices"][0]["text"]), (200, &json!(STORY)));
    assert_eq!(server.post("/v1/completions", &completion("a")).error().0, 404);
    assert_eq!(delete(&server, "a").status, 404);
    // Its name is free, and nothing of the file goes with a copy of the copy.
    copy(&server, "b", "a");
    assert_eq!((delete(&server, "b").status, names(&server)), (200, vec!["a".into()]));
    assert_eq!(folder.versions.lock().unwrap().len(), 1);
    assert_eq!((delete(&server, "a").status, names(&server)), (200, vec![]));
    assert_eq!(folder.versions.lock().unwrap().len(), 0);
    assert_eq!(folder.loads(), ["a@1"]);
}

#[test]
fn a_deleted_model_is_there_again_where_it_is_pulled_or_changes() {
    let (server, folder) = serve();
    copy(&server, "a", "b");
    assert_eq!(delete(&server, "a").status, 200);
    assert_eq!(server.post("/api/pull", &json!({"model": "a", "stream": false})).status, 200);
    assert_eq!(names(&server), ["b", "a"]);
    // The files are those of another model now.
    assert_eq!((delete(&server, "b").status, names(&server)), (200, vec!["a".into()]));
    assert_eq!(*folder.versions.lock().unwrap(), BTreeMap::from([("a".into(), 2)]));
}

#[test]
fn a_request_that_waits_for_a_model_that_is_deleted_hears_so() {
    let (server, folder, events) = serve_retiring();
    let waiting = wait_for_model(&server);
    assert_eq!(delete(&server, "a").status, 200);
    let answer = Answer::read(waiting);
    assert_eq!(answer.error(), (404, json!("model"), json!("model_not_found")));
    drop(events);
    assert_eq!(folder.loads(), ["a@1"]);
    wait_until(|| server.metric("models_loaded") == 0.0);
}
