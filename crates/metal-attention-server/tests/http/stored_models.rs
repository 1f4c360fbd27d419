//! Models of a store (a folder of files), which are added, replaced and deleted while the server runs. The store is a stub.

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

/// The content of the stub store, and a record of the calls.
#[derive(Default)]
struct Folder {
    /// The present version of each model, by name.
    versions: Mutex<BTreeMap<String, u64>>,
    /// The loads so far, as `name@version`.
    loads: Mutex<Vec<String>>,
    /// The models whose files were read for their card.
    cards: Mutex<Vec<String>>,
    /// While a test locks this, listing the store blocks.
    gate: Mutex<()>,
    /// Whether listing the store has begun.
    is_listed: AtomicBool,
}

impl Folder {
    fn loads(&self) -> Vec<String> {
        self.loads.lock().unwrap().clone()
    }
}

/// The stub store.
struct Store(Arc<Folder>);

impl ModelStore for Store {
    fn models(&self) -> Vec<StoredModel> {
        self.0.is_listed.store(true, Ordering::SeqCst);
        let _gate = self.0.gate.lock();
        let model = |(name, version): (&String, &u64)| {
            let source = Source { name: name.clone(), version: *version, folder: Arc::clone(&self.0) };
            StoredModel { name: name.clone(), version: *version, open: Box::new(|| Box::new(source)) }
        };
        self.0.versions.lock().unwrap().iter().map(model).collect()
    }

    /// Adds the model's next version.
    fn pull(&self, name: &str, _: &mut dyn FnMut(PullProgress) -> bool) -> Result<(), SourceError> {
        *self.0.versions.lock().unwrap().entry(name.to_owned()).or_default() += 1;
        Ok(())
    }

    fn delete(&self, name: &str) -> Result<(), SourceError> {
        self.0.versions.lock().unwrap().remove(name).ok_or("no such model")?;
        Ok(())
    }
}

/// A version of a stored model; its content is the built-in model.
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

/// A server with a store that has the model `a`.
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

/// Polls `done` until it is true, ten seconds at most.
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
fn listing_a_store_does_not_block_other_requests() {
    let (server, folder) = serve();
    let gate = folder.gate.lock().unwrap();
    let body = completion("a").to_string();
    let waiting = server.send_only("POST", "/v1/completions", &["Content-Type: application/json"], body.as_bytes());
    wait_until(|| folder.is_listed.load(Ordering::SeqCst));
    assert_eq!(server.get("/health").status, 200);
    drop(gate);
    let answer = Answer::read(waiting);
    assert_eq!((answer.status, &answer.json()["choices"][0]["text"]), (200, &json!(STORY)));
}

#[test]
fn known_models_serve_while_a_store_is_listed() {
    let (server, folder) = serve();
    assert_eq!(server.post("/v1/completions", &completion("a")).status, 200);
    // The listing expires after a second.
    std::thread::sleep(Duration::from_millis(1100));
    folder.is_listed.store(false, Ordering::SeqCst);
    let gate = folder.gate.lock().unwrap();
    let body = completion("a").to_string();
    let waiting = server.send_only("POST", "/v1/completions", &["Content-Type: application/json"], body.as_bytes());
    wait_until(|| folder.is_listed.load(Ordering::SeqCst));
    assert_eq!(server.post("/v1/completions", &completion("a")).status, 200);
    drop(gate);
    assert_eq!(Answer::read(waiting).status, 200);
}

#[test]
fn a_request_without_a_model_uses_an_existing_one() {
    let (server, folder) = serve();
    assert_eq!(names(&server), ["a"]);
    *folder.versions.lock().unwrap() = BTreeMap::from([("b".into(), 1)]);
    std::thread::sleep(Duration::from_millis(1100));
    let answer = server.post("/v1/completions", &json!({"prompt": PROMPT, "max_tokens": 1}));
    assert_eq!((answer.status, folder.loads()), (200, vec!["b@1".into()]));
}

#[test]
fn listing_loaded_models_reads_only_their_files() {
    let (server, folder) = serve();
    assert_eq!(server.post("/api/pull", &json!({"model": "b", "stream": false})).status, 200);
    assert_eq!(server.post("/v1/completions", &completion("a")).status, 200);
    let models = server.get("/api/ps").json()["models"].as_array().unwrap().clone();
    assert_eq!(models.iter().map(|model| &model["name"]).collect::<Vec<_>>(), ["a:latest"]);
    assert_eq!(*folder.cards.lock().unwrap(), ["a"]);
}

/// A server whose model `a` is being unloaded: it accepts no more requests, but still runs the answer whose events are
/// returned.
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

/// Sends a request for `a`, which waits until the model is loaded again.
fn wait_for_model(server: &Server) -> TcpStream {
    let body = completion("a").to_string();
    let waiting = server.send_only("POST", "/v1/completions", &["Content-Type: application/json"], body.as_bytes());
    std::thread::sleep(Duration::from_millis(20));
    waiting
}

#[test]
fn a_waiting_request_gets_the_new_version_of_a_model() {
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

/// Ollama's clients rename a model in this way.
#[test]
fn the_copy_of_a_deleted_model_still_works() {
    let (server, folder) = serve();
    copy(&server, "a", "b");
    assert_eq!((delete(&server, "a").status, names(&server)), (200, vec!["b".into()]));
    let answer = server.post("/v1/completions", &completion("b"));
    assert_eq!((answer.status, &answer.json()["choices"][0]["text"]), (200, &json!(STORY)));
    assert_eq!(server.post("/v1/completions", &completion("a")).error().0, 404);
    assert_eq!(delete(&server, "a").status, 404);
    // The name is free again. Deleting one of several copies does not delete the file.
    copy(&server, "b", "a");
    assert_eq!((delete(&server, "b").status, names(&server)), (200, vec!["a".into()]));
    assert_eq!(folder.versions.lock().unwrap().len(), 1);
    assert_eq!((delete(&server, "a").status, names(&server)), (200, vec![]));
    assert_eq!(folder.versions.lock().unwrap().len(), 0);
    assert_eq!(folder.loads(), ["a@1"]);
}

#[test]
fn a_deleted_model_reappears_when_it_is_pulled() {
    let (server, folder) = serve();
    copy(&server, "a", "b");
    assert_eq!(delete(&server, "a").status, 200);
    assert_eq!(server.post("/api/pull", &json!({"model": "a", "stream": false})).status, 200);
    assert_eq!(names(&server), ["b", "a"]);
    // The pulled file belongs to the new model `a`, so deleting `b` does not remove it.
    assert_eq!((delete(&server, "b").status, names(&server)), (200, vec!["a".into()]));
    assert_eq!(*folder.versions.lock().unwrap(), BTreeMap::from([("a".into(), 2)]));
}

#[test]
fn a_request_that_waits_for_a_deleted_model_fails() {
    let (server, folder, events) = serve_retiring();
    let waiting = wait_for_model(&server);
    assert_eq!(delete(&server, "a").status, 200);
    let answer = Answer::read(waiting);
    assert_eq!(answer.error(), (404, json!("model"), json!("model_not_found")));
    drop(events);
    assert_eq!(folder.loads(), ["a@1"]);
    wait_until(|| server.metric("models_loaded") == 0.0);
}
