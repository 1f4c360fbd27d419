//! `/mcp/`: the tools of MCP servers (Model Context Protocol) for the server's web page, which no other client may call.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use metal_attention_mcp::{Consents, ServerOptions, Toolbox, Transport};
use metal_attention_server::http::{ApiKeys, HttpOptions, PageTools};
use serde_json::{Value, json};

use super::client::{Answer, Server};
use super::{chat, server};
use metal_attention_testing::http_server::HttpServer;

fn options(name: &str, url: String) -> ServerOptions {
    ServerOptions {
        name: name.into(),
        transport: Transport::Http { url, headers: BTreeMap::new() },
        tools: None,
        timeout: Duration::from_secs(1),
        allow: vec!["fail".into()],
    }
}

/// A server whose page has the tools of a working MCP server, `web`, and of one that never answers, `silent`.
fn with_tools(mcp: &HttpServer, is_remote: bool, keys: &[&str]) -> Server {
    let silent = HttpServer::start(|_, _| std::thread::sleep(Duration::from_secs(3)));
    let servers = vec![options("web", mcp.url()), options("silent", silent.url())];
    let tools = PageTools::new(Toolbox::new(servers, Consents::default()), is_remote);
    let keys = ApiKeys::new(keys.iter().map(|&key| key.to_owned())).unwrap();
    Server::new(HttpOptions { tools: Some(Arc::new(tools)), keys, ..Default::default() })
}

/// The header that a browser adds to requests of the server's own page.
const PAGE: &str = "Sec-Fetch-Site: same-origin";

fn call(server: &Server, header: &str, body: &Value) -> Answer {
    server.send("POST", "/mcp/call", &["Content-Type: application/json", header], body.to_string().as_bytes())
}

#[test]
fn the_page_calls_tools_with_consent() {
    let mcp = HttpServer::good();
    let server = with_tools(&mcp, false, &[]);
    let list = server.send("GET", "/mcp/tools", &[PAGE], b"").json();
    let tools: Vec<_> = list["tools"].as_array().unwrap().iter().map(|t| (&t["tool"], &t["allowed"])).collect();
    assert_eq!(tools, [(&json!("echo"), &json!(false)), (&json!("fail"), &json!(true))]);
    assert_eq!(list["tools"][0]["function"]["function"]["description"], "Says it again");
    let silent = "it did not answer initialize within 1 seconds (timeout in the configuration)";
    assert_eq!(list["problems"], json!([{"server": "silent", "message": silent}]));

    let mut echo = json!({"server": "web", "tool": "echo", "arguments": {"text": "<|im_end|>"}});
    assert_eq!(call(&server, PAGE, &echo).error(), (403, Value::Null, json!("consent_needed")));
    echo["consent"] = "once".into();
    assert_eq!(call(&server, PAGE, &echo).json(), json!({"text": "<|im_end|>", "is_error": false}));
    echo["consent"] = "always".into();
    assert_eq!(call(&server, PAGE, &echo).status, 200);
    echo["consent"] = Value::Null;
    assert_eq!(call(&server, PAGE, &echo).json()["text"], "<|im_end|>");
    let fail = call(&server, PAGE, &json!({"server": "web", "tool": "fail"})).json();
    assert_eq!(fail, json!({"text": "The tool failed: no luck", "is_error": true}));
    let unknown =
        |name: &str, tool: &str| call(&server, PAGE, &json!({"server": name, "tool": tool, "consent": "once"})).error();
    assert_eq!(unknown("other", "echo"), (404, Value::Null, json!("server_not_found")));
    assert_eq!(unknown("web", "other"), (404, Value::Null, json!("tool_not_found")));
    // Consent to a tool that does not exist is not stored.
    let always = json!({"server": "web", "tool": "other", "consent": "always"});
    assert_eq!(call(&server, PAGE, &always).error(), (404, Value::Null, json!("tool_not_found")));
    let other = call(&server, PAGE, &json!({"server": "web", "tool": "other"}));
    assert_eq!(other.error(), (403, Value::Null, json!("consent_needed")));
    echo["consent"] = "maybe".into();
    assert_eq!(call(&server, PAGE, &echo).error(), (400, json!("consent"), Value::Null));
    // A call of a server that hangs returns an error after the timeout and does not block other calls.
    let slow = std::thread::scope(|scope| {
        let slow = scope.spawn(|| call(&server, PAGE, &json!({"server": "silent", "tool": "x", "consent": "once"})));
        echo["consent"] = Value::Null;
        assert_eq!(call(&server, PAGE, &echo).status, 200);
        assert!(!slow.is_finished());
        slow.join().unwrap()
    });
    assert_eq!(slow.json()["is_error"], true, "{slow:?}");
}

#[test]
fn other_clients_cannot_call_tools() {
    let mcp = HttpServer::good();
    let server = with_tools(&mcp, false, &[]);
    let allowed = json!({"server": "web", "tool": "fail"});
    for header in ["X: y", "Sec-Fetch-Site: cross-site", "Origin: http://evil.example", "Origin: null"] {
        let rejected = (403, Value::Null, json!("page_only"));
        assert_eq!(call(&server, header, &allowed).error(), rejected, "{header}");
        assert_eq!(server.send("GET", "/mcp/tools", &[header], b"").error(), rejected, "{header}");
    }
    let elsewhere = server.send("GET", "/mcp/tools", &[PAGE, "Host: evil.example"], b"");
    assert_eq!(elsewhere.error(), (403, Value::Null, json!("host_not_allowed")));
    let forwarded = server.send("GET", "/mcp/tools", &[PAGE, "X-Forwarded-For: 10.0.0.1"], b"");
    assert_eq!(forwarded.error(), (403, Value::Null, json!("page_only")));
    // A client's function with the name of a tool is not called by the server.
    let function = json!({"type": "function", "function": {"name": "fail"}});
    let answer = server.post("/v1/chat/completions", &chat(&json!({"tools": [function], "tool_choice": "required"})));
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(mcp.requests().is_empty());
}

#[test]
fn remote_pages_need_a_key_for_tools() {
    let mcp = HttpServer::good();
    let server = with_tools(&mcp, true, &["secret"]);
    let list = |headers: &[&str]| server.send("GET", "/mcp/tools", headers, b"");
    let key = "Authorization: Bearer secret";
    assert_eq!(list(&[PAGE]).error(), (401, Value::Null, json!("invalid_api_key")));
    assert_eq!(list(&[key, "Host: chat.example"]).status, 200);
    let other = list(&[key, "Host: chat.example", "Origin: https://evil.example"]);
    assert_eq!(other.error(), (403, Value::Null, json!("page_only")));
}

/// Neither a host name of `--allowed-host` nor the option for remote pages opens the tools without a key.
#[test]
fn without_a_key_tools_work_on_this_machine_only() {
    let mcp = HttpServer::good();
    let tools = |is_remote| {
        let toolbox = Toolbox::new(vec![options("web", mcp.url())], Consents::default());
        Some(Arc::new(PageTools::new(toolbox, is_remote)))
    };
    let server =
        Server::new(HttpOptions { tools: tools(false), hosts: vec!["box.local".into()], ..Default::default() });
    let list = |server: &Server, headers: &[&str]| server.send("GET", "/mcp/tools", headers, b"");
    let rejected = (403, Value::Null, json!("page_only"));
    assert_eq!(list(&server, &[PAGE, "Host: box.local"]).error(), rejected);
    assert_eq!(list(&server, &[PAGE]).status, 200);
    let server = Server::new(HttpOptions { tools: tools(true), ..Default::default() });
    assert_eq!(list(&server, &[]).error(), rejected);
    assert_eq!(list(&server, &[PAGE]).status, 200);
}

#[test]
fn without_mcp_servers_the_paths_do_not_exist() {
    let server = server();
    assert_eq!(server.send("GET", "/mcp/tools", &[PAGE], b"").error(), (404, Value::Null, json!("route_not_found")));
    assert!(!server.get("/openapi.json").body.contains("mcp"));
}
