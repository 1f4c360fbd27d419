//! An MCP server over stdio for tests: JSON-RPC messages, one a line. Its first argument selects its behaviour.

use std::io::{Lines, StdinLock, Write};
use std::time::Duration;

use serde_json::{Value, json};

/// How the server deviates from the protocol.
#[derive(Clone, Copy, PartialEq)]
enum Behaviour {
    /// It follows the protocol.
    Good,
    /// Its list of tools has infinitely many pages.
    Pages,
    /// It supports only an old version of the protocol.
    Old,
    /// It requires an unknown version of the protocol.
    Unknown,
    /// It writes a banner, and bytes that are no UTF-8, before it speaks the protocol.
    Banner,
    /// It writes much to stderr before each response.
    Noisy,
    /// It responds to each request three times: with an unused id, and twice with the right id.
    Repeating,
    /// It writes text and nothing else.
    Junk,
    /// It writes one endless line.
    Long,
    /// It never answers.
    Silent,
    /// It never reads.
    Deaf,
    /// It sends endless notifications once a tool is called.
    Flood,
    /// It keeps running after the end of its input.
    Stubborn,
}

impl Behaviour {
    /// The behaviour of this name.
    fn named(word: &str) -> Self {
        match word {
            "good" => Self::Good,
            "pages" => Self::Pages,
            "old" => Self::Old,
            "unknown" => Self::Unknown,
            "banner" => Self::Banner,
            "noisy" => Self::Noisy,
            "repeating" => Self::Repeating,
            "junk" => Self::Junk,
            "long" => Self::Long,
            "silent" => Self::Silent,
            "deaf" => Self::Deaf,
            "flood" => Self::Flood,
            "stubborn" => Self::Stubborn,
            word => panic!("no behaviour {word}"),
        }
    }
}

fn main() {
    let word = std::env::args().nth(1).unwrap_or_default();
    if word == "dead" {
        eprintln!("starting\ncannot find the database");
        std::process::exit(3);
    }
    if word == "connected" {
        // Started by the tool `spawn`: the connection ends with this process.
        let port: u16 = std::env::args().nth(2).unwrap().parse().unwrap();
        let _stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        std::thread::sleep(Duration::from_secs(600));
        return;
    }
    let behaviour = Behaviour::named(&word);
    match behaviour {
        Behaviour::Junk => loop {
            write("this is no message");
        },
        Behaviour::Long => loop {
            let _ = std::io::stdout().write_all(&[b'a'; 1 << 14]);
        },
        Behaviour::Deaf => std::thread::sleep(Duration::from_secs(600)),
        Behaviour::Banner => {
            write("Welcome!\n\n{\"level\": \"info\"}");
            std::io::stdout().write_all(b"{\"jsonrpc\": \"2.0\", \"method\": \"\xff\"}\n").unwrap();
        }
        Behaviour::Good
        | Behaviour::Pages
        | Behaviour::Old
        | Behaviour::Unknown
        | Behaviour::Noisy
        | Behaviour::Repeating
        | Behaviour::Silent
        | Behaviour::Flood
        | Behaviour::Stubborn => {}
    }
    let mut server = Server { behaviour, lines: std::io::stdin().lines(), has_more: false, notes: Vec::new() };
    while let Some(message) = server.read() {
        server.answer(&message);
    }
    if behaviour == Behaviour::Stubborn {
        std::thread::sleep(Duration::from_secs(600));
    }
}

/// The running server.
struct Server {
    behaviour: Behaviour,
    /// The messages of the client.
    lines: Lines<StdinLock<'static>>,
    /// Whether the tool `more` was added.
    has_more: bool,
    /// The received notifications, as `method params`.
    notes: Vec<String>,
}

impl Server {
    /// Reads a message. `None`: the input has ended.
    fn read(&mut self) -> Option<Value> {
        let line = self.lines.next()?.ok()?;
        Some(serde_json::from_str(&line).expect("a message"))
    }

    /// Responds to a request, or records a notification.
    fn answer(&mut self, message: &Value) {
        let (id, params) = (&message["id"], &message["params"]);
        let method = message["method"].as_str().unwrap_or_default();
        if id.is_null() {
            self.notes.push(format!("{method} {params}"));
            return;
        }
        if self.behaviour == Behaviour::Silent {
            return;
        }
        if self.behaviour == Behaviour::Noisy {
            std::io::stderr().write_all(&vec![b'e'; 1 << 20]).unwrap();
        }
        let result = match method {
            "initialize" => {
                let version = match self.behaviour {
                    Behaviour::Old => json!("2024-11-05"),
                    Behaviour::Unknown => json!("2099-01-01"),
                    _ => params["protocolVersion"].clone(),
                };
                json!({"protocolVersion": version, "capabilities": {"tools": {"listChanged": true}},
                    "serverInfo": {"name": "test", "version": "1.0"}})
            }
            "ping" => json!({}),
            "tools/list" => self.tools(&params["cursor"]),
            "tools/call" => {
                let Some(result) = self.call(params["name"].as_str().unwrap_or_default(), &params["arguments"]) else {
                    let error = json!({"code": -32602, "message": "Unknown tool"});
                    write(&json!({"jsonrpc": "2.0", "id": id, "error": error}).to_string());
                    return;
                };
                result
            }
            method => panic!("no method {method}"),
        };
        let respond = |id: &Value, result: &Value| {
            write(&json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string());
        };
        if self.behaviour == Behaviour::Repeating {
            respond(&1_000_000.into(), &json!({"tools": []}));
            respond(id, &result);
            respond(id, &json!({}));
            return;
        }
        respond(id, &result);
    }

    /// The page of the list of tools at `cursor`.
    fn tools(&self, cursor: &Value) -> Value {
        if self.behaviour == Behaviour::Pages {
            let page: usize = cursor.as_str().map_or(0, |cursor| cursor.parse().unwrap());
            let tools: Vec<_> = (0..10).map(|i| tool(&format!("t{}", page * 10 + i))).collect();
            return json!({"tools": tools, "nextCursor": (page + 1).to_string()});
        }
        let names = ["echo", "fail", "big", "env", "sleep", "ask", "change", "notes", "die", "image", "spawn"];
        let mut tools: Vec<_> = names.into_iter().chain(self.has_more.then_some("more")).map(tool).collect();
        tools.push(json!({"name": "damaged", "inputSchema": 1}));
        json!({"tools": tools})
    }

    /// The result of a tool; `None`: there is no such tool.
    fn call(&mut self, name: &str, arguments: &Value) -> Option<Value> {
        let argument = |name: &str| arguments[name].as_str().unwrap_or_default().to_owned();
        if self.behaviour == Behaviour::Flood {
            loop {
                write(r#"{"jsonrpc": "2.0", "method": "notifications/message", "params": {}}"#);
            }
        }
        let text = match name {
            "echo" => argument("text"),
            "fail" => return Some(json!({"content": [{"type": "text", "text": "no luck"}], "isError": true})),
            "big" => "x".repeat(1 << 20),
            "env" => std::env::var(argument("name")).unwrap_or_else(|_| "unset".into()),
            "sleep" => {
                std::thread::sleep(Duration::from_millis(arguments["ms"].as_u64().unwrap_or(0)));
                "slept".into()
            }
            "ask" => {
                write(r#"{"jsonrpc": "2.0", "id": "p", "method": "ping"}"#);
                let pong = self.read().unwrap();
                write(r#"{"jsonrpc": "2.0", "id": 7, "method": "roots/list"}"#);
                let rejected = self.read().unwrap();
                format!("{} {} {} {}", pong["id"], pong["result"], rejected["id"], rejected["error"]["code"])
            }
            "change" => {
                self.has_more = true;
                write(r#"{"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}"#);
                "changed".into()
            }
            "notes" => self.notes.join("\n"),
            "die" => {
                eprintln!("fatal: out of luck");
                std::process::exit(7)
            }
            "spawn" => {
                let program = std::env::current_exe().unwrap();
                let child = std::process::Command::new(program).args(["connected", &argument("port")]).spawn();
                child.unwrap().id().to_string()
            }
            "image" => return Some(json!({"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]})),
            _ => return None,
        };
        Some(json!({"content": [{"type": "text", "text": text}]}))
    }
}

fn tool(name: &str) -> Value {
    let schema = json!({"type": "object", "properties": {"text": {"type": "string"}}});
    json!({"name": name, "description": format!("the tool {name}"), "inputSchema": schema})
}

/// Writes a line. If the reader has closed the pipe, the server exits.
fn write(line: &str) {
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
        std::process::exit(0);
    }
}
