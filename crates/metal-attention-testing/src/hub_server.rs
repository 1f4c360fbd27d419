//! A server that plays a model hub (the API of huggingface.co), and a second one for the storage that the hub redirects to.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The repository of [`HubServer::with`].
pub const REPO: &str = "tester/tiny-GGUF";
/// The commit of its main branch.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const TOKEN: &str = "hf_secret";

/// The contents and the faults of a [`HubServer`]. Tests change them while it runs.
#[derive(Default)]
#[allow(clippy::struct_excessive_bools)] // independent faults, not states of one thing
pub struct HubBehaviour {
    /// The only repository, `OWNER/NAME`.
    pub repo: String,
    /// The commit of its main branch.
    pub commit: String,
    /// Names and contents of the repository's files.
    pub files: Vec<(String, Vec<u8>)>,
    /// Whether the hub redirects requests for files to the storage, another origin.
    pub redirects: bool,
    /// Bytes of the body after which each of the next file responses ends.
    pub cuts: VecDeque<usize>,
    /// Bytes of the body after which the next file response stops, with the connection left open.
    pub stall: Option<usize>,
    /// Whether file responses begin with the first byte, whatever range was requested.
    pub ignores_range: bool,
    /// Whether the last byte of file responses is wrong, so that their checksum differs from the listing's.
    pub damages: bool,
    /// The `Content-Length` of file responses; `None`: the true one.
    pub content_length: Option<u64>,
    /// Status and `X-Error-Code` of all responses of the hub to requests without the right token; `None`: it needs no token.
    pub refuses: Option<(u16, &'static str)>,
    /// Status and `X-Error-Code` of the hub's file responses to requests without the right token.
    pub refuses_files: Option<(u16, &'static str)>,
    /// Statuses of the next file responses.
    pub failures: VecDeque<u16>,
    /// Whether the listing lacks sizes and checksums.
    pub bare_list: bool,
}

/// A request that the hub or the storage received.
#[derive(Clone, Debug, PartialEq)]
pub struct ReceivedRequest {
    /// Whether the storage received it, not the hub.
    pub to_storage: bool,
    /// `GET`, `HEAD`, ...
    pub method: String,
    /// The path with its query.
    pub path: String,
    /// The `Range` header.
    pub range: Option<String>,
    /// The `Authorization` header.
    pub authorization: Option<String>,
}

/// A running hub and its storage, which record the requests that they receive.
pub struct HubServer {
    /// The hub's address, `http://127.0.0.1:PORT`.
    pub url: String,
    behaviour: Arc<Mutex<HubBehaviour>>,
    requests: Arc<Mutex<Vec<ReceivedRequest>>>,
}

impl HubServer {
    /// Starts a hub with the repository [`REPO`], which has these files.
    pub fn with(files: &[(&str, &[u8])]) -> Self {
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
        let behaviour = HubBehaviour { repo: REPO.into(), commit: COMMIT.into(), files, ..HubBehaviour::default() };
        let (behaviour, requests) = (Arc::new(Mutex::new(behaviour)), Arc::new(Mutex::new(Vec::new())));
        let hub = TcpListener::bind("127.0.0.1:0").unwrap();
        let storage = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = |listener: &TcpListener| format!("http://{}", listener.local_addr().unwrap());
        let (hub_url, storage_url) = (url(&hub), url(&storage));
        for (listener, is_storage) in [(hub, false), (storage, true)] {
            let (behaviour, requests, storage_url) = (behaviour.clone(), requests.clone(), storage_url.clone());
            // Ends with the process.
            thread::spawn(move || {
                for stream in listener.incoming() {
                    let (behaviour, requests, storage_url) = (behaviour.clone(), requests.clone(), storage_url.clone());
                    thread::spawn(move || {
                        let mut stream = stream.unwrap();
                        if let Some(request) = read_request(&stream, is_storage) {
                            requests.lock().unwrap().push(request.clone());
                            answer(&request, &behaviour, &storage_url, &mut stream);
                        }
                    });
                }
            });
        }
        Self { url: hub_url, behaviour, requests }
    }

    /// Locks the behaviour for changes.
    pub fn change(&self) -> MutexGuard<'_, HubBehaviour> {
        self.behaviour.lock().unwrap()
    }

    /// The requests since the last call of this function.
    pub fn requests(&self) -> Vec<ReceivedRequest> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }
}

/// The SHA-256 checksum in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").unwrap();
        hex
    })
}

fn read_request(stream: &TcpStream, to_storage: bool) -> Option<ReceivedRequest> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut request = ReceivedRequest { to_storage, method, path, range: None, authorization: None };
    for line in lines {
        let line = line.ok()?;
        match line.split_once(": ").map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())) {
            Some((name, value)) if name == "range" => request.range = Some(value),
            Some((name, value)) if name == "authorization" => request.authorization = Some(value),
            Some(_) => {}
            None => return Some(request),
        }
    }
    None
}

fn answer(request: &ReceivedRequest, behaviour: &Mutex<HubBehaviour>, storage: &str, stream: &mut TcpStream) {
    // The lock is released before anything is sent: a test may be waiting for it.
    let mut b = behaviour.lock().unwrap();
    let with_token = request.authorization.as_deref() == Some(&format!("Bearer {TOKEN}"));
    let path = request.path.as_str();
    let resolve = format!("/{}/resolve/{}/", b.repo, b.commit);
    let is_file = path.starts_with(&resolve);
    let refusal = b.refuses.or(b.refuses_files.filter(|_| is_file));
    if let Some((status, code)) = refusal.filter(|_| !request.to_storage && !with_token) {
        drop(b);
        return send(stream, status, &format!("X-Error-Code: {code}\r\n"), b"{}");
    }
    if path == format!("/api/models/{}/revision/main?blobs=true", b.repo) {
        let body = listing(&b).to_string();
        drop(b);
        return send(stream, 200, "", body.as_bytes());
    }
    let name = path.strip_prefix(&resolve).or(path.strip_prefix("/storage/")).unwrap_or_default();
    let Some(bytes) = b.files.iter().find(|(file, _)| file == name).map(|(_, bytes)| bytes.clone()) else {
        drop(b);
        let code = if is_file { "EntryNotFound" } else { "RepoNotFound" };
        return send(stream, 404, &format!("X-Error-Code: {code}\r\n"), b"");
    };
    if is_file && b.redirects {
        let etag = sha256(&bytes);
        let headers = format!(
            "Location: {storage}/storage/{name}\r\nX-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {}\r\n",
            bytes.len()
        );
        drop(b);
        return send(stream, 302, &headers, b"");
    }
    if let Some(status) = b.failures.pop_front() {
        drop(b);
        return send(stream, status, "", b"");
    }
    let total = bytes.len();
    let start = request.range.as_deref().filter(|_| !b.ignores_range);
    let start = start.map(|range| range.trim_start_matches("bytes=").trim_end_matches('-').parse::<usize>().unwrap());
    let mut body = bytes[start.unwrap_or(0).min(total)..].to_vec();
    if b.damages {
        *body.last_mut().unwrap() ^= 1;
    }
    let length = b.content_length.unwrap_or(body.len() as u64);
    let stall = b.stall.take();
    let cut = stall.or_else(|| b.cuts.pop_front()).unwrap_or(usize::MAX).min(body.len());
    drop(b);
    let (status, range) = match start {
        Some(start) => ("206 Partial Content", format!("Content-Range: bytes {start}-{}/{total}\r\n", total - 1)),
        None => ("200 OK", String::new()),
    };
    let etag = sha256(&bytes);
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nETag: \"{etag}\"\r\n{range}Connection: close\r\n\r\n"
    );
    let body = if request.method == "HEAD" { &[] } else { &body[..cut] };
    // Errors are ignored: the client may have closed the connection.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    if stall.is_some() {
        let _ = stream.read(&mut [0; 1]);
    }
    close(stream);
}

fn listing(b: &HubBehaviour) -> Value {
    let file = |(name, bytes): &(String, Vec<u8>)| match (b.bare_list, bytes.len()) {
        (true, _) => json!({"rfilename": name}),
        // Git stores small files itself, larger ones through LFS.
        (false, size @ ..100) => {
            json!({"rfilename": name, "size": size, "blobId": "ce013625030ba8dba906f756967f9e9ca394464a"})
        }
        (false, size) => json!({
            "rfilename": name, "size": size, "blobId": "0".repeat(40),
            "lfs": {"sha256": sha256(bytes), "size": size, "pointerSize": 130},
        }),
    };
    let files: Vec<_> = b.files.iter().map(file).collect();
    json!({"id": b.repo, "sha": b.commit, "gated": false, "siblings": files})
}

fn send(stream: &mut TcpStream, status: u16, headers: &str, body: &[u8]) {
    let length = body.len();
    let head = format!("HTTP/1.1 {status} -\r\nContent-Length: {length}\r\n{headers}Connection: close\r\n\r\n");
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    close(stream);
}

/// Ends the connection after the client has read the response.
fn close(stream: &mut TcpStream) {
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let _ = stream.read(&mut [0; 1]);
}
