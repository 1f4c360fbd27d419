//! MCP servers (Model Context Protocol) from the command line: `mcp list`, `mcp test`, `chat --tools` and `serve`.

use std::path::{Path, PathBuf};
use std::process::Output;

use crate::common::{run, run_with_input, stderr, stdout};
use metal_attention_testing::http_server::HttpServer;
use serde_json::{Value, json};

/// A folder with a configuration of two MCP servers: `web`, which works, and `broken`, which cannot be started.
struct Setup {
    folder: tempfile::TempDir,
    server: HttpServer,
}

impl Setup {
    /// `more`: further lines of the section of `web`.
    fn new(more: &str) -> Self {
        let (folder, server) = (tempfile::tempdir().unwrap(), HttpServer::good());
        let config = format!(
            "[mcp.servers.web]\nurl = \"{}\"\n{more}\n[mcp.servers.broken]\ncommand = \"/nowhere/at-all\"\n",
            server.url()
        );
        std::fs::write(folder.path().join("config.toml"), config).unwrap();
        Self { folder, server }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn mcp(&self, args: &[&str]) -> Output {
        run(&[&["mcp", "--config", text(&self.path("config.toml"))], args].concat())
    }

    /// The number of tool calls that the server received.
    fn n_calls(&self) -> usize {
        self.server.requests().iter().filter(|request| request.message["method"] == "tools/call").count()
    }

    /// Runs a conversation in which the model's answers are constrained to the regular expression `answer`. Returns its
    /// messages and stderr. The template renders only a letter for each message, so that many rounds fit the context.
    fn chat(&self, answer: &str) -> (Vec<Value>, String) {
        let template =
            "{% if tools %}{{ tools | length }}{% endif %}{% for m in messages %}{{ m.role[0] }}{% endfor %}";
        std::fs::write(self.path("template.jinja"), template).unwrap();
        let (config, template, saved) = (self.path("config.toml"), self.path("template.jinja"), self.path("chat.json"));
        let args = ["chat", "--temp", "0", "-n", "200", "--device", "cpu", "--tools", "web", "--config", text(&config)];
        let args = [&args[..], &["--chat-template", text(&template), "--regex", answer]].concat();
        let output = run_with_input(&args, format!("Say hi\n/save {}\n", saved.display()).as_bytes());
        let errors = stderr(&output);
        stdout(output);
        (serde_json::from_str(&std::fs::read_to_string(saved).unwrap()).unwrap(), errors)
    }
}

/// The path as UTF-8.
fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A regular expression that matches only a call of the tool `echo`.
const CALL: &str = r#"\{"name": "echo", "arguments": \{"text": "hi"\}\}"#;

#[test]
fn servers_and_their_tools_are_listed() {
    let setup = Setup::new("tools = [\"echo\", \"fail\"]\nallow = [\"fail\"]");
    let list = stdout(setup.mcp(&["list"]));
    let url = setup.server.url();
    let expected = format!(
        "broken  /nowhere/at-all\n  failed: cannot start \"/nowhere/at-all\": No such file or directory (os error 2)\n\
         web  {url}\n  ready: web 2, protocol 2025-03-26\n  echo  Says it again\n  fail   (allowed)\n"
    );
    assert_eq!(list, expected);
    let json: Value = serde_json::from_str(&stdout(setup.mcp(&["list", "--json"]))).unwrap();
    let (broken, web) = (&json["servers"][0], &json["servers"][1]);
    assert_eq!((&broken["state"], &web["state"], &web["target"]), (&json!("failed"), &json!("ready"), &json!(url)));
    assert_eq!((&web["tools"][0]["name"], &web["tools"][0]["allowed"]), (&json!("echo"), &json!(false)));
    assert_eq!(web["tools"][0]["parameters"]["required"], json!(["text"]));
}

#[test]
fn mcp_test_calls_allowed_tools_only() {
    let setup = Setup::new("allow = [\"echo\"]");
    let test = |args: &[&str]| setup.mcp(&[&["test"], args].concat());
    let result = stdout(test(&["web", "echo", "--arguments", "{\"text\": \"a\\u001bb<|im_end|>\"}"]));
    assert_eq!(result.lines().last(), Some("ab<|im_end|>"));
    assert!(stdout(test(&["web"])).contains("echo  Says it again (allowed)"));
    for (args, code, why) in [
        (&["web", "fail"][..], 2, "consent needs a terminal; `allow` in the configuration"),
        (&["web", "none"], 2, "has no tool \"none\""),
        (&["web", "echo", "--arguments", "[]"], 2, "--arguments takes a JSON object"),
        (&["broken"], 1, "cannot start \"/nowhere/at-all\""),
        (&["other"], 2, "no MCP server \"other\" is in the configuration; there are: broken, web"),
    ] {
        let output = test(args);
        let errors = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{errors}");
        assert!(errors.contains(why), "{errors}");
    }
    assert_eq!(setup.n_calls(), 1);
    std::fs::write(setup.path("config.toml"), "").unwrap();
    assert!(stderr(&setup.mcp(&["list"])).contains("no MCP server is in the configuration"));
}

/// At a terminal the question is repeated until the answer is valid. The answer "always" is stored for later processes.
#[cfg(unix)]
#[test]
fn consent_is_stored() {
    use std::io::Write;

    let setup = Setup::new("");
    let config = setup.path("config.toml");
    let terminal = nix::pty::openpty(None, None).unwrap();
    std::fs::File::from(terminal.master.try_clone().unwrap()).write_all(b"what\na\n").unwrap();
    let args = ["mcp", "test", "web", "echo", "--arguments", "{\"text\": \"hi\"}", "--config", text(&config)];
    let output = crate::common::program().args(args).stdin(terminal.slave).output().unwrap();
    let errors = stderr(&output);
    assert_eq!(errors.matches("call it? [y]es, [n]o, [a]lways: ").count(), 2, "{errors}");
    assert!(errors.starts_with("web.echo {\"text\":\"hi\"}\n"), "{errors}");
    assert_eq!(stdout(output).lines().last(), Some("hi"));
    let consents: Value =
        serde_json::from_str(&std::fs::read_to_string(setup.path("mcp-consents.json")).unwrap()).unwrap();
    assert_eq!(consents, json!({"servers": {"web": {"target": setup.server.url(), "tools": ["echo"]}}}));
    assert_eq!(stdout(run(&args)).lines().last(), Some("hi"));
}

/// Ctrl-C at the consent question ends the process; the tool is not called.
#[cfg(unix)]
#[test]
fn ctrl_c_is_no_consent() {
    use std::io::Read;

    use nix::sys::signal::{Signal, kill};

    let setup = Setup::new("");
    let config = setup.path("config.toml");
    let terminal = nix::pty::openpty(None, None).unwrap();
    let mut program = crate::common::program();
    program.args(["mcp", "test", "web", "echo", "--config", text(&config)]).stdin(terminal.slave);
    let mut program = program.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let (mut errors, mut shown) = (program.stderr.take().unwrap(), Vec::new());
    while !shown.ends_with(b"[a]lways: ") {
        let mut byte = [0];
        errors.read_exact(&mut byte).unwrap();
        shown.push(byte[0]);
    }
    kill(nix::unistd::Pid::from_raw(program.id().cast_signed()), Signal::SIGINT).unwrap();
    assert_eq!(program.wait().unwrap().code(), Some(130));
    assert_eq!(setup.n_calls(), 0);
}

/// The model's answers are constrained to tool calls. The program stops after 20 calls in a row.
#[test]
fn a_model_calls_allowed_tools_up_to_a_limit() {
    let setup = Setup::new("allow = [\"echo\"]");
    let (messages, errors) = setup.chat(CALL);
    assert_eq!(messages.len(), 41, "{errors}");
    let call = &messages[1]["tool_calls"][0];
    assert_eq!(call["function"], json!({"name": "echo", "arguments": "{\"text\": \"hi\"}"}));
    let result = json!({"role": "tool", "content": "hi", "tool_call_id": call["id"], "name": "echo"});
    assert_eq!(messages[2], result);
    assert_eq!((errors.matches("web.echo {\"text\":\"hi\"}\n").count(), setup.n_calls()), (20, 20), "{errors}");
    assert!(errors.contains("note: the model called tools 20 times in a row"), "{errors}");
}

#[test]
fn nothing_is_called_without_consent() {
    let setup = Setup::new("");
    let (messages, errors) = setup.chat(CALL);
    assert!(errors.contains("web.echo {\"text\":\"hi\"}\nconsent needs a terminal"), "{errors}");
    assert_eq!(messages[2]["content"], "The user does not want this call. Do not repeat it.");
    assert_eq!(setup.n_calls(), 0);
    // An answer without a call ends the turn.
    let (messages, _) = setup.chat("Hi!");
    assert_eq!((messages.len(), &messages[1]["content"]), (2, &json!("Hi!")));
}

#[test]
fn tools_need_a_template_with_tools_and_a_working_server() {
    let setup = Setup::new("");
    let config = setup.path("config.toml");
    let chat = |args: &[&str]| {
        let args = [&["chat", "--device", "cpu", "--config", text(&config), "--tools"], args].concat();
        let output = run_with_input(&args, b"Hello\n");
        (output.status.code(), stderr(&output))
    };
    let (code, errors) = chat(&[]);
    assert!(code == Some(2) && errors.contains("the model's chat template knows no tools"), "{errors}");
    let template = setup.path("template.jinja");
    std::fs::write(&template, "{{ tools }}").unwrap();
    let (code, errors) = chat(&["broken", "--chat-template", text(&template)]);
    assert!(code == Some(1) && errors.contains("note: the MCP server broken: cannot start"), "{errors}");
    let (code, errors) = chat(&["other", "--chat-template", text(&template)]);
    assert!(code == Some(2) && errors.contains("no MCP server \"other\""), "{errors}");
}

/// MCP servers that ignore the end of their stdin and SIGTERM are killed when `serve` ends by SIGTERM, SIGHUP or a second
/// Ctrl-C.
#[cfg(unix)]
#[test]
fn mcp_servers_end_with_serve() {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::process::{Command, Stdio};

    use nix::sys::signal::{Signal, kill};

    // A server without tools that keeps the FIFO open, so that the FIFO's end shows the server's end.
    let script = r#"
        exec 3> "$0"; trap '' TERM; read line
        echo '{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-06-18","capabilities":{},"serverInfo":{}}}'
        read line; read line
        echo '{"jsonrpc":"2.0","id":2,"result":{"tools":[]}}'
        sleep 600"#;
    for signals in [&[Signal::SIGTERM][..], &[Signal::SIGHUP], &[Signal::SIGINT, Signal::SIGINT]] {
        let folder = tempfile::tempdir().unwrap();
        let (fifo, config) = (folder.path().join("fifo"), folder.path().join("config.toml"));
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        std::fs::write(
            &config,
            format!("[mcp.servers.a]\ncommand = \"sh\"\nargs = ['-c', '''{script}''', {fifo:?}]\n"),
        )
        .unwrap();
        let mut serve = crate::common::program();
        serve.args(["serve", "--device", "cpu", "--port", "0", "--config", text(&config)]).stderr(Stdio::piped());
        let mut serve = serve.spawn().unwrap();
        let mut lines = BufReader::new(serve.stderr.take().unwrap()).lines().map(Result::unwrap);
        let address = lines.find_map(|line| Some(line.split_once("listening on http://")?.1.to_owned())).unwrap();
        let mut list = std::net::TcpStream::connect(&address).unwrap();
        let head = "Connection: close\r\nSec-Fetch-Site: same-origin\r\n";
        write!(list, "GET /mcp/tools HTTP/1.1\r\nHost: {address}\r\n{head}\r\n").unwrap();
        let mut fifo = std::fs::File::open(fifo).unwrap();
        let mut answer = String::new();
        list.read_to_string(&mut answer).unwrap();
        assert!(answer.ends_with(r#"{"tools":[],"problems":[]}"#), "{answer}");
        for &signal in signals {
            kill(nix::unistd::Pid::from_raw(serve.id().cast_signed()), signal).unwrap();
            if signal == Signal::SIGINT {
                // The second Ctrl-C arrives during the shutdown that the first one started.
                lines.find(|line| line.contains("shutting down"));
            }
        }
        assert_eq!(fifo.read(&mut [0]).unwrap(), 0);
        serve.wait().unwrap();
    }
}

/// A signal that ends `mcp list` also ends the server whose answer it waits for.
#[cfg(unix)]
#[test]
fn mcp_servers_end_with_an_interrupted_list() {
    use std::io::Read;

    use nix::sys::signal::{Signal, kill};

    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGHUP, 129)] {
        let folder = tempfile::tempdir().unwrap();
        let (fifo, config) = (folder.path().join("fifo"), folder.path().join("config.toml"));
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let script = "exec 3> \"$0\"; trap '' TERM; sleep 600";
        let section = format!("[mcp.servers.a]\ncommand = \"sh\"\nargs = ['-c', '''{script}''', {fifo:?}]\n");
        std::fs::write(&config, section).unwrap();
        let mut list = crate::common::program().args(["mcp", "list", "--config", text(&config)]).spawn().unwrap();
        let mut fifo = std::fs::File::open(fifo).unwrap();
        kill(nix::unistd::Pid::from_raw(list.id().cast_signed()), signal).unwrap();
        assert_eq!(fifo.read(&mut [0]).unwrap(), 0);
        assert_eq!(list.wait().unwrap().code(), Some(code));
    }
}

#[test]
fn remote_tool_calls_need_an_api_key_and_a_server() {
    let setup = Setup::new("");
    let config = setup.path("config.toml");
    let serve = |args: &[&str]| {
        let output = run(&[&["serve", "--port", "0", "--mcp-remote"], args].concat());
        (output.status.code(), stderr(&output))
    };
    let (code, errors) = serve(&["--config", text(&config)]);
    assert!(code == Some(2) && errors.contains("--mcp-remote lets others call tools"), "{errors}");
    std::fs::write(&config, "").unwrap();
    let (code, errors) = serve(&["--config", text(&config), "--api-key", "secret"]);
    assert!(code == Some(2) && errors.contains("no MCP server is in the configuration"), "{errors}");
}
