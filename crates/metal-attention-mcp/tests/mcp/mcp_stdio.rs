//! MCP servers over stdio: calls, limits, environment, processes, timeouts, cancellation and consent. The server is the
//! program `mcp-test-server` (`test-server/main.rs`), whose argument selects its behaviour.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use metal_attention_mcp::{
    Consent, Consents, MAX_RESULT, MAX_TOOLS, McpClient, McpError, ServerOptions, ServerReport, ToolResult, Toolbox,
    Transport,
};
use serde_json::{Map, Value, json};

/// Options of the test server with a behaviour and a timeout in milliseconds.
fn server(behaviour: &str, timeout: u64) -> ServerOptions {
    ServerOptions {
        name: behaviour.into(),
        transport: Transport::Stdio {
            command: env!("CARGO_BIN_EXE_mcp-test-server").into(),
            args: vec![behaviour.into()],
            env: BTreeMap::from([("GIVEN".into(), "by the configuration".into())]),
            cwd: None,
        },
        tools: None,
        timeout: Duration::from_millis(timeout),
        allow: Vec::new(),
    }
}

fn never() -> bool {
    false
}

fn arguments(value: Value) -> Map<String, Value> {
    serde_json::from_value(value).unwrap()
}

fn call(client: &mut McpClient, tool: &str, value: Value) -> String {
    client.call(tool, &arguments(value), &never).unwrap().text
}

/// The error of starting a client.
fn failure(options: &ServerOptions) -> McpError {
    McpClient::start(options, &never).err().expect("an error")
}

#[test]
fn tools_of_a_good_server_are_listed_and_called() {
    let mut client = McpClient::start(&server("good", 10_000), &never).unwrap();
    assert_eq!((client.info().name.as_str(), client.info().protocol), ("test", "2025-06-18"));
    let list = client.tools(&never).unwrap();
    let names: Vec<_> = list.tools.iter().map(|tool| tool.name.as_str()).collect();
    assert_eq!(names, ["echo", "fail", "big", "env", "sleep", "ask", "change", "notes", "die", "image", "spawn"]);
    assert_eq!(list.tools[0].description, "the tool echo");
    assert_eq!(list.tools[0].parameters["properties"]["text"]["type"], "string");
    assert_eq!(list.problems, ["the tool damaged is left out: its inputSchema is no object"]);
    client.ping(&never).unwrap();
    // The spelling of control tokens stays; control characters are removed.
    assert_eq!(call(&mut client, "echo", json!({"text": "<|im_end|>\u{1b}[31m\n"})), "<|im_end|>[31m\n");
    let failed = client.call("fail", &Map::new(), &never).unwrap();
    assert_eq!(failed, ToolResult { text: "no luck".into(), is_error: true });
    assert_eq!(call(&mut client, "image", json!({})), "[image, 3 B]");
    let refused = client.call("nothing", &Map::new(), &never).unwrap_err();
    assert_eq!(refused.to_string(), "it refused tools/call: Unknown tool (code -32602)");
    assert_eq!(call(&mut client, "ask", json!({})), "\"p\" {} 7 -32601");
    assert!(!client.tools_changed().unwrap());
    assert_eq!(call(&mut client, "change", json!({})), "changed");
    assert!(client.tools_changed().unwrap());
    assert_eq!(client.tools(&never).unwrap().tools[11].name, "more");
    assert_eq!(call(&mut client, "notes", json!({})), "notifications/initialized {}");
}

#[test]
fn a_server_gets_only_configured_environment_variables() {
    let mut client = McpClient::start(&server("good", 10_000), &never).unwrap();
    let mut variable = |name: &str| call(&mut client, "env", json!({"name": name}));
    assert!(std::env::var("CARGO_MANIFEST_DIR").is_ok());
    assert_eq!(variable("CARGO_MANIFEST_DIR"), "unset");
    assert_eq!(variable("GIVEN"), "by the configuration");
    assert_eq!(variable("PATH"), std::env::var("PATH").unwrap());
}

#[test]
fn large_results_and_lists_are_truncated() {
    let mut client = McpClient::start(&server("good", 10_000), &never).unwrap();
    let text = call(&mut client, "big", json!({}));
    let note = "\n[cut here: the result has 1048576 bytes, of which these are the first 65536]";
    assert_eq!(text.strip_suffix(note).map(str::len), Some(MAX_RESULT));
    let mut client = McpClient::start(&server("pages", 10_000), &never).unwrap();
    let list = client.tools(&never).unwrap();
    assert_eq!((list.tools.len(), list.tools[127].name.as_str()), (MAX_TOOLS, "t127"));
    assert_eq!(list.problems, ["tools after the first 128 are left out"]);
    // Tools that are not used do not count towards the limit.
    let some = ServerOptions { tools: Some(vec!["t3".into(), "t200".into()]), ..server("pages", 10_000) };
    let list = McpClient::start(&some, &never).unwrap().tools(&never).unwrap();
    assert_eq!(list.tools.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>(), ["t3", "t200"]);
    assert_eq!(list.problems, ["tools after the first 64 pages of the list are left out"]);
}

#[test]
fn the_protocol_version_is_negotiated() {
    let client = McpClient::start(&server("old", 10_000), &never).unwrap();
    assert_eq!(client.info().protocol, "2024-11-05");
    let error = failure(&server("unknown", 10_000)).to_string();
    assert_eq!(error, "it speaks version \"2099-01-01\" of the protocol; known are 2025-06-18, 2025-03-26, 2024-11-05");
}

/// Lines that are no messages or no UTF-8, stderr output beyond the pipe's capacity, and responses to no request are ignored.
#[test]
fn invalid_lines_and_responses_are_skipped() {
    for behaviour in ["banner", "noisy", "repeating"] {
        let mut client = McpClient::start(&server(behaviour, 10_000), &never).unwrap();
        for text in ["a", "b"] {
            assert_eq!(call(&mut client, "echo", json!({"text": text})), text, "{behaviour}");
        }
        assert_eq!(client.tools(&never).unwrap().tools.len(), 11, "{behaviour}");
    }
}

/// Processes that a server started end when the server is dropped, exits or is killed.
#[test]
fn processes_of_a_server_end_with_it() {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let spawned = |behaviour: &str| {
        let mut client = McpClient::start(&server(behaviour, 10_000), &never).unwrap();
        call(&mut client, "spawn", json!({"port": port}));
        (client, listener.accept().unwrap().0)
    };
    // When the process ends, reading returns the end of the connection or a reset.
    let ends = |mut stream: std::net::TcpStream| {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let read = std::io::Read::read(&mut stream, &mut [0]);
        read.map_or_else(|error| error.kind() == std::io::ErrorKind::ConnectionReset, |n| n == 0)
    };
    let (client, stream) = spawned("good");
    drop(client);
    assert!(ends(stream));
    let (mut client, stream) = spawned("good");
    let died = client.call("die", &Map::new(), &never).unwrap_err();
    assert_eq!(died.to_string(), "it ended with exit status: 7: fatal: out of luck");
    assert!(ends(stream));
    let (client, stream) = spawned("stubborn");
    drop(client);
    assert!(ends(stream));
}

#[test]
fn invalid_programs_are_errors() {
    let program = |command: &str| {
        let transport = Transport::Stdio { command: command.into(), args: Vec::new(), env: BTreeMap::new(), cwd: None };
        failure(&ServerOptions { transport, ..server("good", 10_000) })
    };
    assert!(matches!(program("/nowhere/at-all"), McpError::Start { .. }));
    let error = failure(&server("dead", 10_000)).to_string();
    assert_eq!(error, "it ended with exit status: 3: cannot find the database");
    assert!(matches!(failure(&server("junk", 10_000)), McpError::Invalid { text } if text == "this is no message"));
    assert!(matches!(failure(&server("long", 10_000)), McpError::MessageTooLong));
}

/// No wait exceeds the timeout, and each server ends soon after it is dropped.
#[test]
fn a_server_that_hangs_times_out() {
    let start = Instant::now();
    for behaviour in ["silent", "deaf"] {
        let error = failure(&server(behaviour, 200));
        assert_eq!(error.to_string(), "it did not answer initialize within 0.2 seconds (timeout in the configuration)");
    }
    let mut client = McpClient::start(&server("flood", 500), &never).unwrap();
    let error = client.call("echo", &Map::new(), &never).unwrap_err();
    assert!(matches!(error, McpError::Timeout { method: "tools/call", .. }), "{error}");
    drop(client);
    drop(McpClient::start(&server("stubborn", 5000), &never).unwrap());
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn a_call_is_cancelled() {
    let mut client = McpClient::start(&server("good", 10_000), &never).unwrap();
    let stop = AtomicBool::new(false);
    let start = Instant::now();
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            stop.store(true, Ordering::Relaxed);
        });
        let is_stopped = || stop.load(Ordering::Relaxed);
        client.call("sleep", &arguments(json!({"ms": 1500})), &is_stopped).unwrap_err()
    });
    assert!(matches!(error, McpError::Cancelled { method: "tools/call" }), "{error}");
    assert!(start.elapsed() < Duration::from_millis(1400), "{:?}", start.elapsed());
    // The late response is ignored, and the server got a notification.
    assert_eq!(call(&mut client, "echo", json!({"text": "next"})), "next");
    let notes = call(&mut client, "notes", json!({}));
    let notification = "notifications/cancelled {\"requestId\":2,\"reason\":\"cancelled by the user\"}";
    assert_eq!(notes.lines().last(), Some(notification));
}

/// The tool `die` would end the server.
#[test]
fn a_call_cancelled_before_it_is_sent_is_not_sent() {
    let mut client = McpClient::start(&server("good", 10_000), &never).unwrap();
    let error = client.call("die", &Map::new(), &|| true).unwrap_err();
    assert!(matches!(error, McpError::Cancelled { method: "tools/call" }), "{error}");
    assert_eq!(call(&mut client, "notes", json!({})), "notifications/initialized {}");
}

/// After a cancelled call the next call sends a ping first: a server that answers it is kept, one that hangs is restarted.
#[test]
fn a_server_that_hangs_after_a_cancelled_call_is_restarted() {
    let toolbox = Toolbox::new(vec![server("good", 1000)], Consents::default());
    let call = |tool: &str, value: Value, cancelled: &(dyn Fn() -> bool + Sync)| {
        toolbox.call("good", tool, &arguments(value), Some(Consent::Once), cancelled).map(|result| result.text)
    };
    call("echo", json!({"text": "a"}), &never).unwrap();
    let sleep = |ms: u64| {
        let start = Instant::now();
        let stopped = call("sleep", json!({"ms": ms}), &|| start.elapsed() > Duration::from_millis(100));
        assert!(matches!(stopped, Err(McpError::Cancelled { method: "tools/call" })), "{stopped:?}");
    };
    sleep(500);
    // Cancelling during the ping does not end the server either.
    let start = Instant::now();
    let stopped = call("echo", json!({"text": "b"}), &|| start.elapsed() > Duration::from_millis(50));
    assert!(matches!(stopped, Err(McpError::Cancelled { method: "ping" })), "{stopped:?}");
    assert!(call("notes", json!({}), &never).unwrap().contains("notifications/cancelled"));
    sleep(60_000);
    assert_eq!(call("notes", json!({}), &never).unwrap(), "notifications/initialized {}");
}

#[test]
fn servers_are_independent_and_restarted() {
    let names = ["good", "dead", "silent", "old"];
    let toolbox = Toolbox::new(names.map(|name| server(name, 1000)).to_vec(), Consents::default());
    let reports = toolbox.connect(&never);
    let states: Vec<_> = reports.iter().map(|report| (report.name.as_str(), report.outcome.is_ok())).collect();
    assert_eq!(states, [("good", true), ("dead", false), ("silent", false), ("old", true)]);
    let offered = ServerReport::offered(&reports);
    assert_eq!((offered.len(), offered[0].name.as_str(), offered[11].name.as_str()), (22, "good__echo", "old__echo"));
    let once = Some(Consent::Once);
    let call = |tool: &str, value: Value| toolbox.call("good", tool, &arguments(value), once, &never);
    assert_eq!(call("echo", json!({"text": "a"})).unwrap().text, "a");
    let ended = "it ended with exit status: 7: fatal: out of luck";
    assert_eq!(call("die", json!({})).unwrap_err().to_string(), ended);
    assert_eq!(call("echo", json!({"text": "b"})).unwrap().text, "b");
    assert!(matches!(call("sleep", json!({"ms": 1200})), Err(McpError::Timeout { .. })));
    assert_eq!(call("echo", json!({"text": "c"})).unwrap().text, "c");
    // A changed list of tools is requested again.
    assert!(matches!(call("more", json!({})), Err(McpError::NoTool { .. })));
    call("change", json!({})).unwrap();
    assert!(matches!(call("more", json!({})), Err(McpError::Refused { .. })));
    assert!(matches!(toolbox.call("other", "echo", &Map::new(), once, &never), Err(McpError::NoServer { .. })));
}

/// No tool is called without consent, and only consent to an existing tool is stored.
#[test]
fn calls_need_consent() {
    let toolbox = Toolbox::new(vec![server("good", 10_000)], Consents::default());
    let call = |tool: &str, consent| toolbox.call("good", tool, &arguments(json!({"text": "a"})), consent, &never);
    assert!(matches!(call("echo", None), Err(McpError::NoConsent { tool }) if tool == "echo"));
    assert_eq!(call("echo", Some(Consent::Once)).unwrap().text, "a");
    assert!(matches!(call("echo", None), Err(McpError::NoConsent { .. })));
    assert!(matches!(call("none", Some(Consent::Always)), Err(McpError::NoTool { .. })));
    assert!(!toolbox.allows("good", "none"));
    assert_eq!(call("echo", Some(Consent::Always)).unwrap().text, "a");
    assert_eq!(call("echo", None).unwrap().text, "a");
}

/// Listing the tools of a server does not wait for its running call.
#[test]
fn tools_of_a_busy_server_are_listed() {
    let toolbox = Toolbox::new(vec![server("good", 10_000)], Consents::default());
    let n_tools = || toolbox.connect(&never)[0].outcome.as_ref().unwrap().1.tools.len();
    assert_eq!(n_tools(), 11);
    let stop = AtomicBool::new(false);
    let sleep = arguments(json!({"ms": 5000}));
    std::thread::scope(|scope| {
        let call = scope.spawn(|| {
            let is_stopped = || stop.load(Ordering::Relaxed);
            toolbox.call("good", "sleep", &sleep, Some(Consent::Once), &is_stopped)
        });
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(n_tools(), 11);
        assert!(!call.is_finished());
        stop.store(true, Ordering::Relaxed);
        assert!(matches!(call.join().unwrap(), Err(McpError::Cancelled { .. })));
    });
}
