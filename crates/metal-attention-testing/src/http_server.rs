//! An HTTP server on a free port of this machine whose responses a test writes. [`HttpServer::good`] plays an MCP server.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

/// One request that a client sent.
#[derive(Debug, Clone)]
pub struct ReceivedRequest {
    /// `GET`, `POST`, ...
    pub method: String,
    /// Its path, with the query.
    pub path: String,
    /// The lines of its head after the first, in lower case.
    pub head: String,
    /// Its body as JSON; null where it is empty or not JSON.
    pub message: Value,
}

/// A running server, which records the requests that it receives.
pub struct HttpServer {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<ReceivedRequest>>>,
}

impl HttpServer {
    /// Starts a server. `answer` is called for each request, on a thread of its own, and writes the response to the stream.
    pub fn start(answer: impl Fn(&ReceivedRequest, &mut TcpStream) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let (address, requests) = (listener.local_addr().unwrap(), Arc::<Mutex<Vec<ReceivedRequest>>>::default());
        let (seen, answer) = (Arc::clone(&requests), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (seen, answer, mut stream) = (Arc::clone(&seen), Arc::clone(&answer), stream.unwrap());
                std::thread::spawn(move || {
                    let Some(request) = read(&mut stream) else { return };
                    seen.lock().unwrap().push(request.clone());
                    answer(&request, &mut stream);
                });
            }
        });
        Self { address, requests }
    }

    /// Starts an MCP server with the tools `echo` and `fail`, whose responses are JSON.
    pub fn good() -> Self {
        Self::start(|request, stream| match result_of(request) {
            Some(result) => {
                let body = json!({"jsonrpc": "2.0", "id": request.message["id"], "result": result}).to_string();
                reply(stream, "200 OK", "Content-Type: application/json\r\nMcp-Session-Id: s-1\r\n", &body);
            }
            None => reply(stream, "202 Accepted", "", ""),
        })
    }

    /// The URL that MCP clients send messages to.
    pub fn url(&self) -> String {
        format!("http://{}/mcp", self.address)
    }

    /// All requests so far, in order of arrival.
    pub fn requests(&self) -> Vec<ReceivedRequest> {
        self.requests.lock().unwrap().clone()
    }
}

/// The JSON-RPC result of an MCP server without faults; `None` if the request is a notification or not JSON-RPC.
pub fn result_of(request: &ReceivedRequest) -> Option<Value> {
    let params = &request.message["params"];
    let text = |text: &Value, is_error| json!({"content": [{"type": "text", "text": text}], "isError": is_error});
    if request.message["id"].is_null() {
        return None;
    }
    Some(match request.message["method"].as_str()? {
        "initialize" => json!({"protocolVersion": "2025-03-26", "capabilities": {},
            "serverInfo": {"name": "web", "version": "2"}}),
        "tools/list" => json!({"tools": [
            {"name": "echo", "description": "Says it again", "inputSchema":
                {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}},
            {"name": "fail", "inputSchema": {"type": "object"}},
        ]}),
        "tools/call" if params["name"] == "echo" => text(&params["arguments"]["text"], false),
        "tools/call" => text(&"no luck".into(), true),
        method => panic!("no method {method}"),
    })
}

/// Writes a response. Errors are ignored: the client may have closed the connection.
pub fn reply(stream: &mut TcpStream, status: &str, headers: &str, body: &str) {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n");
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
}

fn read(stream: &mut TcpStream) -> Option<ReceivedRequest> {
    let mut reader = BufReader::new(stream);
    let (mut first, mut head, mut length) = (String::new(), String::new(), 0);
    reader.read_line(&mut first).ok()?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.parse().ok()?;
        }
        head += &(line + "\n");
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let message = serde_json::from_slice(&body).unwrap_or_default();
    let mut words = first.split(' ').map(str::to_owned);
    Some(ReceivedRequest { method: words.next()?, path: words.next()?, head, message })
}
