//! The command `launch`, which starts a coding tool with a server: how the server is chosen or started, and the variables
//! and arguments by which the tool finds it. Shell scripts stand in for the tools.
#![cfg(unix)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::{program, stderr, stdout};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A new folder with an executable `name`, a shell script.
fn tool(name: &str, script: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// The command `launch` with the folder `tools` first in PATH, and without the user's configuration and keys.
fn launch(tools: &Path, args: &[&str]) -> Command {
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap());
    let mut command = program();
    command.arg("launch").args(args).env("PATH", path).env("XDG_CONFIG_HOME", tools).env("TMPDIR", tools);
    command.env_remove("METAL_ATTENTION_API_KEY").env_remove("ANTHROPIC_API_KEY");
    command
}

fn output(tools: &Path, args: &[&str]) -> Output {
    launch(tools, args).output().unwrap()
}

/// Starts a server that answers `/v1/models` and `/props` with these objects. Returns its address.
fn server(models: Value, props: Value) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let first = lines.next().unwrap().unwrap();
            let _ = lines.find(|line| line.as_ref().is_ok_and(String::is_empty));
            let body = if first.starts_with("GET /v1/models ") {
                models.to_string()
            } else {
                assert!(first.starts_with("GET /props?model="), "{first}");
                props.to_string()
            };
            let length = body.len();
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}").unwrap();
        }
    });
    url
}

/// A server that answers as metal-attention's does, with these models, whose contexts have `n_ctx` tokens.
fn ours(names: &[&str], n_ctx: usize) -> String {
    let entry = |name: &&str| json!({"id": name, "object": "model", "owned_by": "metal-attention"});
    let models = json!({"object": "list", "data": names.iter().map(entry).collect::<Vec<_>>()});
    server(models, json!({"engine": "metal-attention", "default_generation_settings": {"n_ctx": n_ctx}}))
}

/// A tool's script that writes its environment and arguments to files beside it and exits with code 7.
const RECORD: &str = "env > \"$(dirname \"$0\")/env\"; printf '%s\\n' \"$@\" > \"$(dirname \"$0\")/args\"; exit 7";

#[test]
fn claude_gets_the_server_in_environment_variables() {
    let tools = tool("claude", RECORD);
    let url = ours(&["small"], 40000);
    let args = ["claude", "--server", &format!("{url}/"), "--api-key", "secret", "--", "-p", "Hello there"];
    let run = output(tools.path(), &args);
    assert_eq!((run.status.code(), stderr(&run)), (Some(7), String::new()));
    let env = std::fs::read_to_string(tools.path().join("env")).unwrap();
    for line in [
        format!("ANTHROPIC_BASE_URL={url}").as_str(),
        "ANTHROPIC_AUTH_TOKEN=secret",
        "ANTHROPIC_API_KEY=",
        "ANTHROPIC_MODEL=small",
        "ANTHROPIC_DEFAULT_OPUS_MODEL=small",
        "ANTHROPIC_DEFAULT_SONNET_MODEL=small",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL=small",
        "ANTHROPIC_SMALL_FAST_MODEL=small",
        "CLAUDE_CODE_SUBAGENT_MODEL=small",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS=40000",
        "DISABLE_TELEMETRY=1",
    ] {
        assert!(env.lines().any(|found| found == line), "{line} is not in {env}");
    }
    assert_eq!(std::fs::read_to_string(tools.path().join("args")).unwrap(), "-p\nHello there\n");
}

#[test]
fn codex_gets_the_server_in_arguments() {
    let tools = tool("codex", RECORD);
    let url = ours(&["small", "large"], 32768);
    let run = output(tools.path(), &["codex", "large", "--server", &url, "--", "exec"]);
    assert_eq!(run.status.code(), Some(7), "{}", stderr(&run));
    let args = std::fs::read_to_string(tools.path().join("args")).unwrap();
    for line in [
        "model_provider=\"metal-attention\"",
        format!("model_providers.metal-attention.base_url=\"{url}/v1\"").as_str(),
        "model_providers.metal-attention.wire_api=\"responses\"",
        "model_context_window=32768",
    ] {
        assert!(args.lines().any(|found| found == line), "{line} is not in {args}");
    }
    assert!(args.ends_with("-m\nlarge\nexec\n"), "{args}");
}

#[test]
fn print_shows_the_command_without_running_it() {
    let tools = tool("aider", RECORD);
    let url = ours(&["it's one"], 32768);
    let run = output(tools.path(), &["aider", "--server", &url, "--print", "--", "a file"]);
    let expected = format!(
        "AIDER_OPENAI_API_BASE={url}/v1 AIDER_OPENAI_API_KEY=metal-attention AIDER_MODEL='openai/it'\\''s one' \
         AIDER_WEAK_MODEL='openai/it'\\''s one' AIDER_EDITOR_MODEL='openai/it'\\''s one' AIDER_SHOW_MODEL_WARNINGS=false \
         aider 'a file'\n"
    );
    assert_eq!(stdout(run), expected);
    assert!(!tools.path().join("env").exists());
}

#[test]
fn unusable_tools_servers_and_contexts_are_rejected() {
    let tools = tool("claude", RECORD);
    let (short, several, good) = (ours(&["small"], 4096), ours(&["small", "large"], 32768), ours(&["small"], 32768));
    let list = json!({"data": [{"id": "a", "owned_by": "library"}]});
    let (foreign, llama_cpp) = (server(list, json!({})), ours_without_engine());
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let unreachable = format!("http://{}", silent.local_addr().unwrap());
    drop(silent);
    let garbage = garbage();
    for (args, code, message) in [
        (&["claud", "--server", &good][..], 2, "the tools are claude, codex, opencode, qwen, goose, aider"),
        (&["goose", "--server", &good], 1, "goose is not installed: there is no program goose in the folders of PATH"),
        (&["claude", "--server", &short], 1, "small has a context of 4096 tokens there, and a coding tool needs 32768"),
        (&["claude", "--server", &several], 1, "it has the models \"small\", \"large\": -m names one of them"),
        (&["claude", "tiny", "--server", &several], 1, "it has no model \"tiny\", but \"small\", \"large\""),
        (&["claude", "--server", &foreign], 1, "what answers there is no server of metal-attention"),
        (&["claude", "--server", &llama_cpp], 1, "what answers there is no server of metal-attention"),
        (&["claude", "--server", &garbage], 1, "what answers there is no server of metal-attention"),
        (&["claude", "--server", &unreachable], 1, "nothing answers there"),
        (&["claude", "--server", "not an address"], 1, "this is no address"),
        (&["claude", "-c", "4096"], 2, "a coding tool needs 32768 at least"),
    ] {
        let run = output(tools.path(), args);
        assert_eq!(run.status.code(), Some(code), "{args:?}: {}", stderr(&run));
        assert!(stderr(&run).contains(message), "{args:?}: {}", stderr(&run));
    }
    assert!(!tools.path().join("env").exists());
}

/// A server that lists models as metal-attention's does, but whose `/props` does not name the engine.
fn ours_without_engine() -> String {
    let list = json!({"data": [{"id": "a", "owned_by": "metal-attention"}]});
    server(list, json!({"default_generation_settings": {"n_ctx": 40000}}))
}

/// A server that answers with something other than HTTP. Returns its address.
fn garbage() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(b"220 mail ready\r\n");
        }
    });
    url
}

/// Copies a model into `folder` under a name that no other server on this machine lists. Returns its path.
fn model(folder: &Path) -> String {
    let path = folder.join("launched-by-a-test.gguf");
    std::fs::copy("models/tales-4m-q4_0.gguf", &path).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_server_is_started_and_ends_with_the_tool() {
    let tools = tool("claude", RECORD);
    let model = model(tools.path());
    let run = output(tools.path(), &["claude", &model]);
    assert_eq!(run.status.code(), Some(7), "{}", stderr(&run));
    let env = std::fs::read_to_string(tools.path().join("env")).unwrap();
    let value = |name: &str| env.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    assert_eq!(value("ANTHROPIC_MODEL="), "launched-by-a-test");
    assert_eq!(value("CLAUDE_CODE_MAX_CONTEXT_TOKENS="), "32768");
    assert!(TcpStream::connect(value("ANTHROPIC_BASE_URL=http://")).is_err(), "the server still runs");
    let logs = std::fs::read_dir(tools.path())
        .unwrap()
        .filter(|file| file.as_ref().unwrap().file_name().to_string_lossy().starts_with("metal-attention-serve-"));
    assert_eq!(logs.count(), 0);
}

#[test]
fn the_server_ends_if_launch_is_killed() {
    let tools = tool("claude", "trap 'exit 5' TERM; echo \"$ANTHROPIC_BASE_URL\"; sleep 60 >/dev/null & wait");
    let model = model(tools.path());
    for (signal, code) in [("-TERM", Some(5)), ("-KILL", None)] {
        let mut child = launch(tools.path(), &["claude", &model]).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let url = lines.next().unwrap().unwrap();
        let address = url.strip_prefix("http://").unwrap();
        assert!(TcpStream::connect(address).is_ok());
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), code);
        let begun = Instant::now();
        while TcpStream::connect(address).is_ok() {
            assert!(begun.elapsed() < Duration::from_secs(20), "{signal}: the server still runs");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn a_server_that_cannot_start_leaves_its_log() {
    let tools = tool("claude", RECORD);
    let model = tools.path().join("damaged.gguf");
    std::fs::write(&model, "no model").unwrap();
    let run = output(tools.path(), &["claude", model.to_str().unwrap()]);
    assert_eq!(run.status.code(), Some(1));
    let errors = stderr(&run);
    assert!(errors.contains("the server ended (exit status: 3)") && errors.contains("damaged.gguf"), "{errors}");
    let log = errors.split("its log, ").nth(1).unwrap().split(", ends with").next().unwrap();
    assert!(std::fs::read_to_string(log).unwrap().contains("damaged.gguf"));
}

/// Coding tools need more than the built-in model, so `launch` does not fall back to it.
#[test]
fn the_help_names_no_built_in_model() {
    let help = stdout(program().args(["launch", "--help"]).output().unwrap());
    assert!(help.contains("METAL_ATTENTION_MODEL") && !help.contains("built-in"), "{help}");
}
