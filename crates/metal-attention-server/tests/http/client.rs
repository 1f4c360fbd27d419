//! Helper of the tests: a server in this process on a free port, and a plain HTTP/1.1 client that shows the raw headers and
//! bodies.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use metal_attention::scheduler::SchedulerOptions;
use metal_attention::{Device, EngineOptions, Error, Model};
use metal_attention_server::http::{
    HttpOptions, Listeners, LoadedModel, ModelCard, ModelSource, ModelsOptions, Placement, ServeError, SourceError,
    serve,
};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// A running server. Dropping it shuts it down and waits for its end.
pub struct Server {
    /// The address for requests.
    pub address: SocketAddr,
    /// The address of the monitoring port: health and metrics only.
    pub monitoring: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

/// Loads the built-in model on one CPU thread. `n_parallel`: sequences that run at once; `n_queue`: sequences that may wait.
pub fn load(n_parallel: usize, n_queue: usize) -> Result<LoadedModel, Error> {
    load_model(Model::built_in()?, n_parallel, n_queue)
}

/// Like [`load`], with `model`.
pub fn load_model(model: Model, n_parallel: usize, n_queue: usize) -> Result<LoadedModel, Error> {
    let engine = EngineOptions { device: Device::Cpu, n_seq: n_parallel, n_threads: Some(1), ..Default::default() };
    load_with(model, &engine, n_parallel, n_queue)
}

/// Like [`load`], with `model` and `engine`.
pub fn load_with(
    model: Model,
    engine: &EngineOptions,
    n_parallel: usize,
    n_queue: usize,
) -> Result<LoadedModel, Error> {
    let pass = model.forward_pass(engine)?;
    let options = SchedulerOptions { n_parallel, n_queue, ..Default::default() };
    Ok(LoadedModel::start(model, pass, &options).unwrap())
}

/// A model source that calls `F` at the first load. A second load fails.
pub struct Once<F>(Mutex<Option<F>>);

impl<F: FnOnce() -> Result<LoadedModel, Error> + Send> ModelSource for Once<F> {
    fn card(&self) -> Result<Arc<ModelCard>, SourceError> {
        Ok(Arc::new(ModelCard::of(Model::built_in()?.gguf())))
    }

    fn placements(&self) -> Result<Vec<Placement>, SourceError> {
        Ok(Vec::new())
    }

    fn load(&self, _: &Placement) -> Result<LoadedModel, SourceError> {
        let load = self.0.lock().unwrap().take().ok_or("the model was loaded before")?;
        Ok(load()?)
    }
}

impl Server {
    /// A server with the built-in model, four slots and a queue of 64, ready.
    pub fn new(options: HttpOptions) -> Self {
        let server = Self::with_model(options, || load(4, 64));
        server.wait_until_ready();
        server
    }

    /// A server whose model, named `stories`, is loaded by `load`, possibly slowly. It is not waited for.
    pub fn with_model(
        options: HttpOptions,
        load: impl FnOnce() -> Result<LoadedModel, Error> + Send + 'static,
    ) -> Self {
        Self::with_models(options, ModelsOptions::one(vec!["stories".into()], Once(Mutex::new(Some(load)))))
    }

    /// A server with these models.
    pub fn with_models(options: HttpOptions, models: ModelsOptions) -> Self {
        let (stop, stopped) = oneshot::channel();
        let (bound, address) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            runtime.block_on(async {
                let requests = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
                let monitoring = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
                bound.send((requests.local_addr().unwrap(), monitoring.local_addr().unwrap())).unwrap();
                let stopped = async {
                    let _ = stopped.await;
                };
                serve(Listeners { requests: vec![requests], monitoring: Some(monitoring) }, options, models, stopped)
                    .await
            })
        });
        let (address, monitoring) = address.recv().unwrap();
        Self { address, monitoring, stop: Some(stop), thread: Some(thread) }
    }

    /// Polls `/ready` until the model is loaded, for two minutes at most.
    pub fn wait_until_ready(&self) {
        let until = Instant::now() + Duration::from_secs(120);
        while self.get("/ready").status != 200 {
            assert!(Instant::now() < until, "the server is not ready after two minutes: {}", self.get("/ready").body);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts the shutdown.
    pub fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    /// Waits until the server has ended, without an error.
    pub fn join(&mut self) {
        self.end().unwrap();
    }

    /// Waits until the server has ended. Returns the result of `serve`.
    pub fn end(&mut self) -> Result<(), ServeError> {
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap())
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, &["Content-Type: application/json"], body.to_string().as_bytes())
    }

    /// Sends a request and reads the response.
    pub fn send(&self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> Answer {
        Answer::read(self.send_only(method, path, headers, body))
    }

    /// Sends a request. The response can be read from the returned stream.
    pub fn send_only(&self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> TcpStream {
        send_only(self.address, method, path, headers, body)
    }

    /// The response to `GET path` on the monitoring port.
    pub fn get_monitoring(&self, path: &str) -> Answer {
        Answer::read(send_only(self.monitoring, "GET", path, &[], b""))
    }

    /// Sends a request for a stream. Returns an iterator over its events as they arrive.
    pub fn stream(&self, path: &str, body: &Value) -> Lines {
        let body = body.to_string();
        let stream = self.send_only("POST", path, &["Content-Type: application/json"], body.as_bytes());
        Lines { reader: BufReader::new(stream) }
    }

    /// The number after `name` in `/metrics`.
    pub fn metric(&self, name: &str) -> f64 {
        number(&self.get("/metrics").body, &format!("metal_attention_{name} "))
    }
}

/// The number after `start` in the first line that begins with `start`.
pub fn number(text: &str, start: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(start));
    line.unwrap_or_else(|| panic!("{start} is not in\n{text}")).parse().unwrap()
}

/// Sends a request. The response can be read from the returned stream.
fn send_only(address: SocketAddr, method: &str, path: &str, headers: &[&str], body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let host = if headers.iter().any(|h| h.starts_with("Host:")) { "" } else { "Host: localhost\r\n" };
    let headers = headers.iter().map(|header| format!("{header}\r\n")).collect::<Vec<_>>().concat();
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\n{host}Connection: close\r\n{headers}Content-Length: {length}\r\n\r\n");
    // The server may answer and close the connection before it has read the body.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    stream
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        if !std::thread::panicking() {
            self.join();
        }
    }
}

/// An HTTP response. A chunked body is decoded; status 0: there was no response.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: String,
    pub body: String,
}

impl Answer {
    pub fn read(mut stream: TcpStream) -> Self {
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        let text = String::from_utf8(bytes).unwrap();
        let (headers, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = headers.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        let is_chunked = headers.contains("transfer-encoding: chunked");
        let body = if is_chunked { unchunked(body) } else { body.to_owned() };
        Self { status, headers: headers.to_owned(), body }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The status, field (`param`) and code of an error in OpenAI's form.
    pub fn error(&self) -> (u16, Value, Value) {
        let error = &self.json()["error"];
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{self:?}");
        assert!(error["type"].is_string());
        (self.status, error["param"].clone(), error["code"].clone())
    }
}

/// Decodes the chunked transfer encoding.
fn unchunked(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        text += &rest[..size];
        body = &rest[size + 2..];
    }
    text
}

/// Iterator over the `data:` lines of a stream of server-sent events.
pub struct Lines {
    reader: BufReader<TcpStream>,
}

impl Iterator for Lines {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.reader.read_line(&mut line).unwrap_or(0) == 0 {
                return None;
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(data.trim_end().to_owned());
            }
        }
    }
}
