//! A server with the built-in model in this process, for the targets that are its clients.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, LazyLock, mpsc};
use std::thread;
use std::time::Duration;

use metal_attention::scheduler::SchedulerOptions;
use metal_attention::{Device, EngineOptions, Model};
use metal_attention_server::http::{
    HttpOptions, LoadedModel, ModelCard, ModelSource, ModelsOptions, Placement, SourceError, serve,
};
use serde_json::Value;
use tokio::net::TcpListener;

/// Tokens of each context: few, so that an answer comes soon.
const N_CTX: usize = 128;

/// Longest time that an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);

static ADDRESS: LazyLock<SocketAddr> = LazyLock::new(start);

/// An answer of the server.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

/// Sends a whole request and reads the answer to its end.
pub fn ask(method: &str, path: &str, body: &[u8]) -> Answer {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n"
    );
    let mut stream = connect();
    // The server may answer and close before it has read everything.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    let bytes = read(stream);
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").expect("an answer has a head");
    let (head, body) = (String::from_utf8_lossy(&bytes[..end]), &bytes[end + 4..]);
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("an answer has a status");
    Answer { status, body: if head.contains("transfer-encoding: chunked") { unchunked(body) } else { body.to_vec() } }
}

/// Sends `bytes`, whatever they are, says that nothing follows, and waits until the server is through with them.
pub fn send(bytes: &[u8]) {
    let mut stream = connect();
    let _ = stream.write_all(bytes).and_then(|()| stream.shutdown(Shutdown::Write));
    read(stream);
}

impl Answer {
    /// Checks what holds for every answer of a server that is ready and has one client: it found no fault with itself, and
    /// where it refuses the request it says why.
    pub fn check(&self) {
        assert!(self.status < 500, "{self:?}");
        if self.status >= 400 {
            let error: Value = serde_json::from_slice(&self.body).expect("an error is JSON");
            assert!(error["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{error}");
        }
    }
}

fn connect() -> TcpStream {
    let stream = TcpStream::connect(*ADDRESS).expect("the server listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

fn read(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Err(error) = stream.read_to_end(&mut bytes) {
        use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
        // A server that closes without having read everything resets the connection.
        assert!(matches!(error.kind(), BrokenPipe | ConnectionReset), "no answer: {error}");
    }
    bytes
}

fn unchunked(mut body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Some(end) = body.windows(2).position(|two| two == b"\r\n") {
        let size = std::str::from_utf8(&body[..end]).ok().and_then(|size| usize::from_str_radix(size, 16).ok());
        let size = size.expect("a chunk has a size");
        bytes.extend_from_slice(&body[end + 2..][..size]);
        body = &body[end + 2 + size + 2..];
    }
    bytes
}

/// Starts the server on a free port and waits until it is ready.
fn start() -> SocketAddr {
    let (bound, address) = mpsc::channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
            bound.send(listener.local_addr().expect("its address")).expect("the target waits");
            let models = ModelsOptions::one(vec!["stories".into()], BuiltIn);
            serve(listener, HttpOptions::default(), models, std::future::pending()).await.expect("a model");
        });
        panic!("the server has ended");
    });
    let address = address.recv().expect("a port");
    loop {
        let mut stream = TcpStream::connect(address).expect("the server listens");
        let request = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        stream.write_all(request).expect("the server reads");
        if read(stream).starts_with(b"HTTP/1.1 200") {
            return address;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// The built-in model, with four slots.
struct BuiltIn;

impl ModelSource for BuiltIn {
    fn card(&self) -> Result<Arc<ModelCard>, SourceError> {
        Ok(Arc::new(ModelCard::of(Model::built_in()?.gguf())))
    }

    fn placements(&self) -> Result<Vec<Placement>, SourceError> {
        Ok(Vec::new())
    }

    fn load(&self, _: &Placement) -> Result<LoadedModel, SourceError> {
        let model = Model::built_in()?;
        let engine = EngineOptions {
            device: Device::Cpu,
            n_ctx: Some(N_CTX),
            n_seq: 4,
            n_threads: Some(1),
            ..Default::default()
        };
        let pass = model.forward_pass(&engine)?;
        let options = SchedulerOptions { n_parallel: 4, n_queue: 64, ..Default::default() };
        Ok(LoadedModel::start(model, pass, &options)?)
    }
}
