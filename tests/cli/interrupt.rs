//! Ctrl-C (SIGINT) while a model loads, within a micro-batch, and in a conversation at a terminal. Exit code 130 is that of
//! an interrupted command.
#![cfg(target_os = "linux")]

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{program, stderr};
use metal_attention::gguf::{GgufFile, GgufWriter, TensorDecl, TensorType};
use metal_attention_model::{ModelShape, ModelSpec};

/// The limit of every wait, with a margin for a busy machine.
const TIME_LIMIT: Duration = Duration::from_secs(300);

/// Writes a sparse file: only the first write (the GGUF header) is stored; the bytes of later ones become a hole, which
/// takes no disk space and reads as zeros.
struct Sparse {
    file: File,
    /// Whether the first write is done.
    has_header: bool,
}

impl Write for Sparse {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if std::mem::replace(&mut self.has_header, true) {
            self.file.seek(SeekFrom::Current(bytes.len() as i64))?;
            Ok(bytes.len())
        } else {
            self.file.write_all(bytes).map(|()| bytes.len())
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        let len = self.file.stream_position()?;
        self.file.set_len(len)
    }
}

/// Writes a model whose weights are all zero.
fn write_model(path: &Path, n_layer: usize, n_embd: usize) {
    let shape = ModelShape {
        n_layer,
        n_embd,
        n_head: n_embd / 64,
        n_head_kv: n_embd / 256,
        n_ff: 4 * n_embd,
        n_vocab: 512,
        n_ctx_train: 8192,
        ..ModelShape::named("custom").unwrap().clone()
    };
    let mut metadata = shape.metadata();
    let built_in = GgufFile::from_bytes(metal_attention::BUILT_IN_MODEL).unwrap();
    for (key, value) in built_in.metadata().iter().filter(|(key, _)| key.starts_with("tokenizer.")) {
        metadata.set(key, value.clone());
    }
    let spec = ModelSpec::from_metadata(&metadata).unwrap();
    let declare = |tensor: &metal_attention_model::TensorSpec| TensorDecl {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        ty: if tensor.is_matrix() { TensorType::F16 } else { TensorType::F32 },
    };
    let tensors: Vec<_> = shape.tensors(&spec).iter().map(declare).collect();
    let out = Sparse { file: File::create(path).unwrap(), has_header: false };
    let mut writer = GgufWriter::new(out, 3, &metadata, &tensors).unwrap();
    for tensor in &tensors {
        writer.write(&vec![0; tensor.ty.row_bytes(tensor.shape.iter().product())]).unwrap();
    }
    writer.finish().unwrap();
}

/// Writes a model with zero weights into a new folder. Returns the folder and the model's path.
fn model(n_layer: usize, n_embd: usize) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("zeros.gguf");
    write_model(&path, n_layer, n_embd);
    (folder, path)
}

fn interrupt(child: &Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
}

/// Polls `done` until it is true. Fails if the program exits before or the time limit passes; `what` is named then. The last output
/// of a program may be read a moment after its end.
fn wait_for(child: &mut Child, what: &str, mut done: impl FnMut() -> bool) {
    let (start, mut end) = (Instant::now(), None);
    while !done() {
        if end.is_none() && child.try_wait().unwrap().is_some() {
            end = Some(Instant::now() + Duration::from_secs(2));
        }
        assert!(end.is_none_or(|end| Instant::now() < end), "it ended before {what}");
        assert!(start.elapsed() < TIME_LIMIT, "{what} never came");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The running program with stdout and stderr in files, so that it never blocks on a full pipe.
struct Running {
    child: Child,
    folder: tempfile::TempDir,
}

impl Running {
    fn start(args: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| File::create(folder.path().join(name)).unwrap();
        // Nothing is written to this pipe; `chat` waits on it for messages.
        let child = program()
            .args(args)
            .env("METAL_ATTENTION_CACHE", "off")
            .stdin(Stdio::piped())
            .stdout(file("out"))
            .stderr(file("err"))
            .spawn()
            .unwrap();
        Self { child, folder }
    }

    fn wait_for_stderr(&mut self, text: &str) {
        let path = self.folder.path().join("err");
        wait_for(&mut self.child, text, || std::fs::read_to_string(&path).unwrap().contains(text));
    }

    /// Waits until the program has mapped the file, that is, begins to load it.
    fn wait_for_opened(&mut self, path: &Path) {
        let maps = format!("/proc/{}/maps", self.child.id());
        let path = path.to_str().unwrap();
        wait_for(&mut self.child, "the model", || std::fs::read_to_string(&maps).is_ok_and(|maps| maps.contains(path)));
    }

    /// Waits until the program exits and reads its output.
    fn end(mut self) -> Output {
        let status = self.child.wait().unwrap();
        let read = |name: &str| std::fs::read(self.folder.path().join(name)).unwrap();
        Output { status, stdout: read("out"), stderr: read("err") }
    }
}

#[test]
fn loading_a_model_is_interrupted() {
    // About 800 MiB.
    let (_folder, path) = model(6, 2048);
    let text = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&text, "Once upon a time there was a little girl. ".repeat(100)).unwrap();
    let (model, text) = (path.to_str().unwrap(), text.path().to_str().unwrap());
    for args in [
        &["run", "-p", "x"][..],
        &["chat"],
        &["perplexity", "-f", text, "-c", "64"],
        &["logits", "-p", "x"],
        &["bench", "--iterations", "1"],
        &["bench", "roofline"],
        &["compare", "-p", "x", "--devices", "cpu,cpu"],
        &["serve", "--port", "0"],
    ] {
        let mut args = [args, &["-v", "-m", model]].concat();
        if args[0] != "compare" {
            args.extend(["--device", "cpu"]);
        }
        let mut running = Running::start(&args);
        running.wait_for_opened(&path);
        interrupt(&running.child);
        let output = running.end();
        let errors = stderr(&output);
        assert_eq!(output.status.code(), Some(130), "{args:?}: {errors}");
        assert!(!errors.contains("repacked weights"), "{args:?} loaded the model to the end: {errors}");
        assert_eq!(output.stdout, b"", "{args:?}");
    }
}

#[test]
fn loading_a_model_to_the_gpu_is_interrupted() {
    if !crate::common::has_gpu() {
        return;
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tales-4m-q4_0.gguf");
    let model = path.to_str().unwrap();
    // The signal arrives at different stages, from finding drivers to compiling pipelines.
    for pause in [0, 30, 100, 300] {
        let mut running = Running::start(&["run", "-v", "--gpu", "-m", model, "-p", "x", "-n", "100000"]);
        running.wait_for_opened(&path);
        std::thread::sleep(Duration::from_millis(pause));
        interrupt(&running.child);
        let output = running.end();
        assert_eq!(output.status.code(), Some(130), "after {pause} ms: {}", stderr(&output));
    }
}

/// A prompt whose prefill in one micro-batch takes seconds, also on a fast machine.
fn long_prompt() -> String {
    "a ".repeat(3000)
}

#[test]
fn prefill_is_interrupted_within_a_micro_batch() {
    let (_folder, path) = model(8, 1024);
    let (model, text) = (path.to_str().unwrap(), long_prompt());
    let args = ["run", "-v", "--device", "cpu", "-m", model, "-c", "8192", "--ubatch-size", "8192", "-p", &text];
    let mut running = Running::start(&args);
    running.wait_for_stderr("seed: ");
    std::thread::sleep(Duration::from_millis(500));
    interrupt(&running.child);
    let output = running.end();
    let errors = stderr(&output);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(130), &b""[..]), "{errors}");
    // The statistics do not count the interrupted micro-batch.
    assert!(errors.contains("\nprompt               0 tokens\n"), "{errors}");
    assert!(errors.contains("\ngenerated            0 tokens\n"), "{errors}");
}

#[test]
fn results_so_far_are_printed() {
    let (_folder, path) = model(8, 1024);
    let model = path.to_str().unwrap();
    let text = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&text, "a ".repeat(20_000)).unwrap();
    // A chunk takes about a second. The second one is being evaluated when the first one's result is printed.
    let args = ["perplexity", "--device", "cpu", "-m", model, "-f", text.path().to_str().unwrap(), "-c", "256"];
    let mut running = Running::start(&args);
    let out = running.folder.path().join("out");
    wait_for(&mut running.child, "a chunk", || std::fs::read_to_string(&out).unwrap().contains('\n'));
    interrupt(&running.child);
    let output = running.end();
    let lines = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(130), "{lines}");
    assert!(lines.starts_with("   1/"), "{lines}");
    assert!(lines.lines().last().unwrap().starts_with("perplexity 512.0000 +/- "), "{lines}");

    let rows = text.path().to_str().unwrap();
    let mut running = Running::start(&["logits", "--device", "cpu", "-m", model, "-f", rows, "--ubatch-size", "8"]);
    let out = running.folder.path().join("out");
    wait_for(&mut running.child, "a row", || std::fs::read_to_string(&out).unwrap().contains("\"logits\":[["));
    interrupt(&running.child);
    let output = running.end();
    assert_eq!(output.status.code(), Some(130));
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let (n_tokens, n_rows) =
        (document["tokens"].as_array().unwrap().len(), document["logits"].as_array().unwrap().len());
    assert!(0 < n_rows && n_rows < n_tokens, "{n_rows} of {n_tokens}");

    // The header of a file has the number of rows that follow. A smaller model fills the file's buffer sooner.
    write_model(&path, 4, 512);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("logits.npy");
    let to = file.to_str().unwrap();
    let args = ["logits", "--device", "cpu", "-m", model, "-f", rows, "--ubatch-size", "8", "-o", to];
    let mut running = Running::start(&args);
    let written =
        || folder.path().read_dir().unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum::<u64>();
    wait_for(&mut running.child, "a row", || written() > 128);
    interrupt(&running.child);
    assert_eq!(running.end().status.code(), Some(130));
    let bytes = std::fs::read(&file).unwrap();
    let n_rows = (bytes.len() - 128) / (4 * 512);
    assert_eq!(bytes.len(), 128 + n_rows * 4 * 512);
    assert!(0 < n_rows && n_rows < n_tokens, "{n_rows} of {n_tokens}");
    let header = String::from_utf8_lossy(&bytes[10..128]);
    assert!(header.contains(&format!("'shape': ({n_rows}, 512)")), "{header}");
}

#[test]
fn unfinished_output_files_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (_folder, path) = model(6, 2048);
    let target = folder.path().join("out.gguf");
    let target = target.to_str().unwrap();
    for args in [
        &["quantize", path.to_str().unwrap(), target, "q6_k"][..],
        &["synth", "llama-3.2-3b", "--type", "q6_k", "-o", target],
    ] {
        let mut running = Running::start(args);
        wait_for(&mut running.child, "the file", || folder.path().read_dir().unwrap().count() > 0);
        interrupt(&running.child);
        let output = running.end();
        assert_eq!(output.status.code(), Some(130), "{args:?}: {}", stderr(&output));
        assert_eq!(folder.path().read_dir().unwrap().count(), 0, "{args:?}");
    }
}

/// The program in a pseudo-terminal.
struct InTerminal {
    child: Child,
    /// The keyboard: bytes written here arrive on the program's stdin.
    keys: File,
    /// The output that was not consumed by a wait yet.
    shown: Arc<Mutex<String>>,
}

impl InTerminal {
    fn start(args: &[&str]) -> Self {
        Self::with(args, |_| {})
    }

    /// Starts the program with what `set` changes of its environment.
    fn with(args: &[&str], set: impl FnOnce(&mut Command)) -> Self {
        let terminal = nix::pty::openpty(None, None).unwrap();
        let end = || Stdio::from(terminal.slave.try_clone().unwrap());
        let mut command = program();
        command.args(args).env("TERM", "xterm").stdin(end()).stdout(end()).stderr(end());
        set(&mut command);
        let child = command.spawn().unwrap();
        drop(command);
        let shown = Arc::new(Mutex::new(String::new()));
        let keys = File::from(OwnedFd::try_clone(&terminal.master).unwrap());
        let (mut screen, all) = (File::from(terminal.master), Arc::clone(&shown));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = screen.read(&mut bytes) {
                all.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..n]));
            }
        });
        Self { child, keys, shown }
    }

    /// Waits until the terminal shows `text`. Consumes and returns the output up to its end.
    fn wait_for(&mut self, text: &str) -> String {
        self.wait_for_any(&[text])
    }

    /// Waits until the terminal shows one of `texts`. Consumes and returns the output up to the end of the first one.
    fn wait_for_any(&mut self, texts: &[&str]) -> String {
        let shown = Arc::clone(&self.shown);
        let first_end = || {
            let shown = shown.lock().unwrap();
            texts.iter().filter_map(|text| Some(shown.find(text)? + text.len())).min()
        };
        wait_for(&mut self.child, &texts.join(" or "), || first_end().is_some());
        let end = first_end().unwrap();
        shown.lock().unwrap().drain(..end).collect()
    }

    fn type_line(&mut self, text: &str) {
        write!(self.keys, "{text}\r").unwrap();
    }
}

/// A model is chosen at a terminal: of three to download, or of those that are here.
#[test]
fn a_terminal_offers_models_where_none_is_named() {
    let home = tempfile::tempdir().unwrap();
    let start = |args: &[&str]| {
        InTerminal::with(args, |command| {
            command.env("HF_HOME", home.path()).env_remove("HF_HUB_CACHE").env("HF_HUB_OFFLINE", "1");
        })
    };
    let mut terminal = start(&["run", "--device", "cpu"]);
    let offer = terminal.wait_for("Number of the model");
    assert!(offer.contains("none is on this machine yet") && offer.contains("\n  3  "), "{offer}");
    terminal.type_line("4");
    terminal.wait_for("4 is none of 1 to 3.");
    terminal.wait_for("Number of the model");
    terminal.type_line("1");
    // It is not here, and the hub may not be asked.
    terminal.wait_for("HF_HUB_OFFLINE forbids");
    let mut terminal = start(&["chat", "--device", "cpu"]);
    terminal.wait_for("Number of the model");
    terminal.type_line("");
    terminal.wait_for("using the built-in model");
    terminal.wait_for("/help lists the commands");
    // A text to continue, and output for programs, keep the built-in model.
    for args in [&["run", "-p", "Once", "-n", "1"][..], &["chat", "-p", "Once", "-n", "1"]] {
        let shown =
            start(&[args, &["--device", "cpu"]].concat()).wait_for_any(&["using the built-in model", "Number of"]);
        assert!(shown.ends_with("using the built-in model"), "{shown}");
    }
    // What is here is listed instead.
    let folder = home.path().join("hub/models--tester--tiny-GGUF");
    std::fs::create_dir_all(folder.join("refs")).unwrap();
    std::fs::write(folder.join("refs/main"), "0123456789abcdef0123456789abcdef01234567").unwrap();
    let snapshot = folder.join("snapshots/0123456789abcdef0123456789abcdef01234567");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::write(snapshot.join("tiny-Q8_0.gguf"), metal_attention::BUILT_IN_MODEL).unwrap();
    let mut terminal = start(&["chat", "--device", "cpu"]);
    let list = terminal.wait_for("Number of the model");
    assert!(list.contains("  1  hf:tester/tiny-GGUF:Q8_0"), "{list}");
    terminal.type_line("1");
    terminal.wait_for("/help lists the commands");
}

#[test]
fn a_conversation_continues_after_ctrl_c() {
    let (_folder, path) = model(8, 1024);
    let (model, text) = (path.to_str().unwrap(), long_prompt());
    // With this seed the first token does not end the answer.
    let seed = ["--seed", "1"];
    let args = ["chat", "--device", "cpu", "-m", model, "-c", "8192", "--ubatch-size", "8192", "--system", &text];
    let mut terminal = InTerminal::start(&[&args[..], &seed].concat());
    terminal.wait_for("/help lists the commands");
    terminal.wait_for("> ");
    terminal.type_line("Hello");
    // The progress bar appears after a moment and counts the finished part of the micro-batch.
    let bar = terminal.wait_for("left");
    assert!(bar.contains("reading the conversation ["), "{bar}");
    interrupt(&terminal.child);
    terminal.wait_for("not answered");
    terminal.wait_for("> ");
    // An interrupted answer stays in the conversation.
    terminal.type_line("/system none");
    terminal.wait_for("> ");
    // On a busy machine there may be no token yet.
    let generated = (0..4).any(|tries| {
        terminal.type_line("Hello");
        std::thread::sleep(Duration::from_millis(700 << tries));
        interrupt(&terminal.child);
        terminal.wait_for("> ");
        terminal.type_line("/stats");
        !terminal.wait_for("peak memory").contains("generated            0 tokens")
    });
    assert!(generated, "no answer has a token");
    terminal.type_line("/exit");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(0));
}

#[test]
fn turns_are_not_dropped_if_the_answer_is_interrupted() {
    let (folder, path) = model(8, 1024);
    let message = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let messages = [
        message("user", &"a ".repeat(4500)),
        message("assistant", "a"),
        message("user", &long_prompt()),
        message("assistant", "a"),
    ];
    let (before, after) = (folder.path().join("before.json"), folder.path().join("after.json"));
    std::fs::write(&before, serde_json::to_string(&messages).unwrap()).unwrap();
    let (model, load) = (path.to_str().unwrap(), before.to_str().unwrap());
    let args = ["chat", "--device", "cpu", "-m", model, "-c", "8192", "--ubatch-size", "8192", "--load", load];
    let mut terminal = InTerminal::start(&args);
    terminal.wait_for("/help lists the commands");
    terminal.wait_for("> ");
    terminal.type_line("Hello");
    terminal.wait_for("dropped the oldest 1 turn");
    terminal.wait_for("left");
    interrupt(&terminal.child);
    terminal.wait_for("not answered");
    terminal.wait_for("> ");
    terminal.type_line(&format!("/save {}", after.display()));
    terminal.wait_for("wrote ");
    let saved: Vec<serde_json::Value> = serde_json::from_slice(&std::fs::read(&after).unwrap()).unwrap();
    assert_eq!(saved, messages);
    terminal.type_line("/exit");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_terminal_shows_the_progress_of_prefill() {
    let (_folder, path) = model(8, 1024);
    let (model, text) = (path.to_str().unwrap(), long_prompt());
    let args = ["run", "--device", "cpu", "-m", model, "-c", "8192", "--ubatch-size", "8192", "-p", &text];
    let mut terminal = InTerminal::start(&args);
    terminal.wait_for("reading the prompt [");
    // The prompt is one micro-batch, so progress above 0 is progress within it.
    let shown = "reading the prompt [".to_owned() + &terminal.wait_for("s left");
    let line = shown.rsplit("reading the prompt [").next().unwrap();
    let done: usize = line.split("] ").nth(1).unwrap().split('/').next().unwrap().parse().unwrap();
    assert!(done > 0, "{shown}");
    interrupt(&terminal.child);
    terminal.wait_for("time to first token");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(130));
}

#[test]
fn a_server_shows_that_it_loads_a_model() {
    fn serve(path: &Path) -> [&str; 7] {
        ["serve", "--device", "cpu", "--port", "0", "-m", path.to_str().unwrap()]
    }
    let (_folder, path) = model(6, 2048);
    let mut running = Running::start(&serve(&path));
    running.wait_for_stderr(&format!("loading {}", path.display()));
    running.child.kill().unwrap();
    running.child.wait().unwrap();
    // A terminal shows no progress of a short load. On a fast machine only the largest of these models loads slowly enough.
    let shows_progress = |n_layer| {
        let (_folder, path) = model(n_layer, 2048);
        let mut terminal = InTerminal::start(&serve(&path));
        let shown = terminal.wait_for_any(&["loading the model [", "ready: "]);
        terminal.child.kill().unwrap();
        terminal.child.wait().unwrap();
        !shown.contains("ready: ")
    };
    assert!([6, 24, 72].into_iter().any(shows_progress));
}
