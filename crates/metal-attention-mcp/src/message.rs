//! Messages of JSON-RPC 2.0, as MCP uses them.

use serde_json::{Map, Value, json};

use crate::limits::MAX_QUOTED;
use crate::text::{beginning, plain};

/// Supported versions of the protocol, the newest first.
pub const VERSIONS: [&str; 3] = ["2025-06-18", "2025-03-26", "2024-11-05"];

/// JSON-RPC's code for an unknown method.
const METHOD_NOT_FOUND: i64 = -32601;

/// A message from a server.
#[derive(Debug, PartialEq)]
pub enum Incoming {
    /// The response to a request.
    Response {
        /// The request's id.
        id: u64,
        /// The result, or the error.
        outcome: Result<Value, RpcError>,
    },
    /// A request of the server, which needs a response.
    Request {
        /// Its id, a number or a string.
        id: Value,
        /// The method.
        method: String,
    },
    /// A notification, which has no response.
    Notification {
        /// The method.
        method: String,
    },
}

/// An error response.
#[derive(Debug, PartialEq)]
pub struct RpcError {
    /// JSON-RPC's code.
    pub code: i64,
    /// The server's message.
    pub message: String,
}

/// Parses a message, or a batch of messages (protocol version 2025-03-26); `None`: invalid.
pub fn parse(text: &[u8]) -> Option<Vec<Incoming>> {
    match serde_json::from_slice(text).ok()? {
        Value::Array(messages) if !messages.is_empty() => messages.into_iter().map(read).collect(),
        message => Some(vec![read(message)?]),
    }
}

/// Reads one message; `None`: invalid.
fn read(message: Value) -> Option<Incoming> {
    let Value::Object(mut fields) = message else { return None };
    if fields.get("jsonrpc").and_then(Value::as_str) != Some("2.0") {
        return None;
    }
    let id = fields.remove("id");
    if let Some(Value::String(method)) = fields.remove("method") {
        return Some(match id {
            Some(id) => Incoming::Request { id, method },
            None => Incoming::Notification { method },
        });
    }
    let id = id?.as_u64()?;
    let outcome = match (fields.remove("result"), fields.remove("error")) {
        (Some(result), None) => Ok(result),
        (None, Some(error)) => Err(RpcError {
            code: error["code"].as_i64().unwrap_or_default(),
            message: beginning(&plain(error["message"].as_str().unwrap_or_default()), MAX_QUOTED).to_owned(),
        }),
        (Some(_), Some(_)) | (None, None) => return None,
    };
    Some(Incoming::Response { id, outcome })
}

/// Formats a request.
pub fn request(id: u64, method: &str, params: &Map<String, Value>) -> String {
    json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string()
}

/// Formats a notification.
pub fn notification(method: &str, params: &Map<String, Value>) -> String {
    json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string()
}

/// Formats the response to a request of the server. The client has no capabilities, so every method but `ping` is an
/// error.
pub fn response(id: &Value, method: &str) -> String {
    if method == "ping" {
        return json!({"jsonrpc": "2.0", "id": id, "result": {}}).to_string();
    }
    let error = json!({"code": METHOD_NOT_FOUND, "message": "this client does not offer it"});
    json!({"jsonrpc": "2.0", "id": id, "error": error}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_three_kinds() {
        let one = |text: &str| parse(text.as_bytes()).map(|mut messages| messages.remove(0));
        assert_eq!(
            one(r#"{"jsonrpc": "2.0", "id": 1, "result": {"a": 1}}"#),
            Some(Incoming::Response { id: 1, outcome: Ok(json!({"a": 1})) })
        );
        assert_eq!(
            one(r#"{"jsonrpc": "2.0", "id": 1, "error": {"code": -1, "message": "a\u001b"}}"#),
            Some(Incoming::Response { id: 1, outcome: Err(RpcError { code: -1, message: "a".into() }) })
        );
        assert_eq!(
            one(r#"{"jsonrpc": "2.0", "id": "x", "method": "ping"}"#),
            Some(Incoming::Request { id: "x".into(), method: "ping".into() })
        );
        assert_eq!(
            one(r#"{"jsonrpc": "2.0", "method": "n", "params": {}}"#),
            Some(Incoming::Notification { method: "n".into() })
        );
        let both = r#"[{"jsonrpc": "2.0", "method": "n"}, {"jsonrpc": "2.0", "id": 2, "result": null}]"#;
        assert_eq!(parse(both.as_bytes()).map(|messages| messages.len()), Some(2));
        for junk in [
            "",
            "hello",
            "[]",
            "[1]",
            "1",
            "{}",
            r#"{"jsonrpc": "2.0"}"#,
            r#"{"jsonrpc": "1.0", "method": "n"}"#,
            r#"{"jsonrpc": "2.0", "id": null, "error": {}}"#,
            r#"{"jsonrpc": "2.0", "id": 1}"#,
        ] {
            assert_eq!(one(junk), None, "{junk}");
        }
        assert_eq!(parse("[".repeat(100_000).as_bytes()), None);
    }
}
