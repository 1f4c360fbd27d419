//! The command `serve` with several models: those of a folder (`--models-dir`), of a configuration file, and of the hub's
//! cache; their names, loading on demand, and deletion.
#![cfg(unix)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;

use crate::common::{run, stderr};
use crate::server::Server;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Requests a greedy answer to `messages`. Returns the number of prompt tokens and the answer.
fn chat(server: &Server, model: &str, messages: &Value) -> (u64, String) {
    let body = json!({"model": model, "messages": messages, "max_tokens": 8, "temperature": 0});
    let (status, answer) = server.send("/v1/chat/completions", Some(&body));
    assert_eq!(status, 200, "{answer}");
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
    (answer["usage"]["prompt_tokens"].as_u64().unwrap(), content.to_owned())
}

const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";

/// A folder with two copies of the built-in model, `models/one.gguf` and `models/below/two.gguf`, and a chat template.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("models/below")).unwrap();
    for name in ["models/one.gguf", "models/below/two.gguf"] {
        std::fs::copy("models/stories260K.gguf", folder.path().join(name)).unwrap();
    }
    std::fs::write(folder.path().join("chat.jinja"), TEMPLATE).unwrap();
    folder
}

/// Writes a configuration file, in which FOLDER stands for the folder. Returns its path.
fn config(folder: &Path, text: &str) -> String {
    let path = folder.join("config.toml");
    std::fs::write(&path, text.replace("FOLDER", folder.to_str().unwrap())).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn models_of_a_folder_are_loaded_on_demand_by_name() {
    let folder = folder();
    let models = folder.path().join("models");
    let config = config(folder.path(), "");
    let server = Server::start(&["--models-dir", models.to_str().unwrap(), "--config", &config]);
    let (status, list) = server.send("/v1/models", None);
    let names: Vec<_> = list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!((status, names, &list["data"][1]["meta"]), (200, vec!["one", "two"], &Value::Null));
    let (status, _) = server.send("/v1/completions", Some(&json!({"model": "two", "prompt": "Once", "max_tokens": 1})));
    assert_eq!((status, &server.send("/v1/models/two", None).1["meta"]["n_ctx_train"]), (200, &json!(512)));
}

#[test]
fn the_configuration_sets_aliases_and_a_system_prompt() {
    let folder = folder();
    let models = folder.path().join("models");
    let config = config(
        folder.path(),
        "[defaults]\nkeep-alive = \"1h\"\nsampling = { temperature = 0.5 }\n\
         [models.teller]\nmodel = \"FOLDER/models/one.gguf\"\naliases = [\"claude-*\", \"story\"]\n\
         system = \"Tell a story.\"\nchat-template = \"FOLDER/chat.jinja\"\nmax-tokens = 3\ncontext = 300\n",
    );
    let server = Server::start(&["--models-dir", models.to_str().unwrap(), "--config", &config]);
    let (status, list) = server.send("/v1/models", None);
    let names: Vec<_> = list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!((status, names), (200, vec!["teller", "story", "one", "two"]));

    let (system, user) =
        (json!({"role": "system", "content": "Tell a story."}), json!({"role": "user", "content": "Hi"}));
    let with_default = chat(&server, "claude-sonnet-5", &json!([user]));
    assert_eq!(with_default, chat(&server, "story:latest", &json!([system, user])));
    let other = json!({"role": "system", "content": ""});
    assert!(chat(&server, "teller", &json!([other, user])).0 < with_default.0);

    let body = json!({"model": "teller", "prompt": "Once upon a time", "ignore_eos": true});
    let (_, answer) = server.send("/v1/completions", Some(&body));
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    let (_, answer) = server.send("/v1/models/claude-opus", None);
    assert_eq!(answer["meta"]["n_ctx"], 300);

    let (status, error) = server.send("/v1/completions", Some(&json!({"model": "three", "prompt": "Once"})));
    assert_eq!((status, &error["error"]["code"]), (404, &json!("model_not_found")));
    let message = "there is no model \"three\" here, only \"teller\", \"one\", \"two\"";
    assert_eq!(error["error"]["message"], message);
}

/// A shutdown waits for running answers, also of models that were loaded on demand.
#[test]
fn ctrl_c_waits_for_running_answers() {
    let server = Server::start(&["--models-dir", "models", "--grace", "600"]);
    let body = json!({"model": "tales-4m-q4_0", "prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true}});
    let mut stream = server.send_only("/v1/completions", Some(&body));
    // The answer has begun.
    stream.read_exact(&mut [0; 512]).unwrap();
    server.signal("INT");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"completion_tokens\":60") && rest.contains("data: [DONE]"), "{rest}");
    assert_eq!(server.end().0, Some(0));
}

#[test]
fn errors_in_the_configuration_name_the_key() {
    let folder = folder();
    for (text, code, message) in [
        ("[models.a]\nmodel = \"a.gguf\"\ncontxt = 1\n", 2, "unknown field `contxt`"),
        ("[models.a]\naliases = []\n", 2, "missing field `model`"),
        ("[defaults]\nkeep-alive = \"soon\"\n", 2, "\"soon\" is no time"),
        ("[defaults]\nsampling = { temprature = 1 }\n", 2, "unknown option `temprature` of sampling"),
        ("[models.a]\nmodel = \"a.gguf\"\ndevice = \"toaster\"\n", 2, "the model \"a\" of the configuration"),
        ("[models.a]\nmodel = \"nothing.gguf\"\nresident = true\n", 3, "nothing.gguf"),
        ("[models\n", 2, "config.toml"),
    ] {
        let config = config(folder.path(), text);
        let output = run(&["serve", "--device", "cpu", "--port", "0", "--config", &config]);
        assert_eq!(output.status.code(), Some(code), "{text}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{text}: {}", stderr(&output));
    }
    let output = run(&["serve", "--config", "nothing.toml"]);
    assert!(output.status.code() == Some(1) && stderr(&output).contains("cannot read the configuration nothing.toml"));
    let output = run(&["serve", "--models-dir", "nothing"]);
    assert!(output.status.code() == Some(2) && stderr(&output).contains("--models-dir nothing: this is no folder"));
}

/// Requests the deletion of the model (`DELETE /api/delete`). Returns the status code.
fn delete(server: &Server, model: &str) -> String {
    let (address, body) = (&server.address, json!({"model": model}).to_string());
    let length = body.len();
    let mut stream = TcpStream::connect(address).unwrap();
    let head = "Connection: close\r\nContent-Type: application/json";
    write!(
        stream,
        "DELETE /api/delete HTTP/1.1\r\nHost: {address}\r\n{head}\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap().to_owned()
}

#[test]
fn deleting_a_model_removes_its_files() {
    let folder = folder();
    let (models, cache) = (folder.path().join("models"), folder.path().join("cache"));
    let broken = models.join("broken.gguf");
    std::fs::write(&broken, "no model").unwrap();
    // A cache in the hub's layout: the model m-Q8_0 in two snapshots, which share a blob, and m-Q4_0 in one.
    let repo = cache.join("models--a--b");
    let (old, new) = ("1".repeat(40), "2".repeat(40));
    for (commit, file, blob) in [(&old, "m-Q8_0.gguf", "8"), (&new, "m-Q8_0.gguf", "8"), (&new, "m-Q4_0.gguf", "4")] {
        let snapshot = repo.join("snapshots").join(commit);
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(repo.join("blobs")).unwrap();
        std::fs::copy("models/stories260K.gguf", repo.join("blobs").join(blob)).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{blob}"), snapshot.join(file)).unwrap();
    }
    std::fs::create_dir_all(repo.join("refs")).unwrap();
    std::fs::write(repo.join("refs/main"), &new).unwrap();

    let variables = [("HF_HUB_CACHE", cache.to_str().unwrap()), ("HF_HUB_OFFLINE", "1")];
    let server = Server::start_in(&["--models-dir", models.to_str().unwrap()], &variables);
    for (name, blob, is_left) in [("a/b:Q4_0", "4", false), ("a/b:Q8_0", "8", true)] {
        let pulled = server.send("/api/pull", Some(&json!({"model": name, "stream": false})));
        assert_eq!(pulled, (200, json!({"status": "success"})));
        let body = json!({"model": name, "prompt": "Once", "max_tokens": 1});
        assert_eq!(server.send("/v1/completions", Some(&body)).0, 200);
        assert_eq!((delete(&server, name), delete(&server, name)), ("200".into(), "404".into()));
        assert_eq!(repo.join("blobs").join(blob).exists(), is_left, "{name}");
    }
    assert_eq!((delete(&server, "broken"), broken.exists()), ("200".into(), false));
    assert_eq!((delete(&server, "one"), models.join("one.gguf").exists()), ("200".into(), false));
    assert!(models.join("below/two.gguf").exists());
}
