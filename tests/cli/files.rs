//! Hostile model files: unusual metadata, oversized tokens, control characters in texts, files that are truncated or
//! replaced while the program has them mapped.

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Output, Stdio};

use crate::common::{program, run, stderr, stdout};
use metal_attention::gguf::{GgufFile, GgufWriter, Metadata, TensorDecl, Value};
use serde_json::Value as Json;

const TALES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tales-4m-q4_0.gguf");

type Change = Box<dyn Fn(&mut Metadata)>;

fn built_in() -> GgufFile {
    GgufFile::from_bytes(metal_attention::BUILT_IN_MODEL).unwrap()
}

/// Writes the built-in model with changed metadata and with additional tensors, whose values are all 1.
fn write_model(path: &Path, more: &[TensorDecl], change: impl Fn(&mut Metadata)) {
    let model = built_in();
    let mut metadata = model.metadata().clone();
    change(&mut metadata);
    let mut declared: Vec<_> = model.tensors().iter().map(TensorDecl::from).collect();
    declared.extend_from_slice(more);
    let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &declared).unwrap();
    for tensor in model.tensors() {
        writer.write(tensor.bytes()).unwrap();
    }
    for tensor in more {
        let n: usize = tensor.shape.iter().product();
        writer.write(&1f32.to_le_bytes().repeat(n)).unwrap();
    }
    fs::write(path, writer.finish().unwrap()).unwrap();
}

#[test]
fn info_reports_runnable_exactly_for_models_that_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("odd.gguf");
    let rope_freqs =
        |n| TensorDecl { name: "rope_freqs.weight".into(), shape: vec![n], ty: metal_attention::gguf::TensorType::F32 };
    // The built-in model has 5 layers, 8 heads and 4 KV heads of 8 values, and no metadata key for the length of a head.
    let heads_of_last_layer = |head: u32, kv: u32| {
        move |m: &mut Metadata| {
            m.set("llama.attention.head_count", vec![8, 8, 8, 8, head]);
            m.set("llama.attention.head_count_kv", vec![4, 4, 4, 4, kv]);
        }
    };
    let set = |key: &'static str, value: Value| move |m: &mut Metadata| m.set(key, value.clone());
    let (none, four, three) = ([], [rope_freqs(4)], [rope_freqs(3)]);
    let cases: Vec<(&[TensorDecl], Change, Option<&str>)> = vec![
        (&none, Box::new(|_| ()), None),
        (&four, Box::new(heads_of_last_layer(8, 4)), None),
        // Numbers of heads that differ between layers once led to an index out of range.
        (&four, Box::new(heads_of_last_layer(4, 4)), Some("blk.4.attn_q.weight")),
        (&four, Box::new(heads_of_last_layer(4, 2)), Some("blk.4.attn_q.weight")),
        (&four, Box::new(heads_of_last_layer(8, 3)), Some("head_count_kv")),
        (&four, Box::new(heads_of_last_layer(8, 16)), Some("head_count_kv")),
        (&four, Box::new(heads_of_last_layer(0, 4)), Some("head_count")),
        (&three, Box::new(|_| ()), Some("rope_freqs.weight")),
        (&none, Box::new(set("llama.rope.freq_base", f32::NAN.into())), Some("rope.freq_base")),
        (&none, Box::new(set("llama.attention.sliding_window", 0u32.into())), None),
        (&none, Box::new(set("llama.attention.sliding_window", 1u32.into())), None),
        (&none, Box::new(set("llama.context_length", (1u32 << 28).into())), None),
        (&none, Box::new(set("llama.rope.dimension_count", 6u32.into())), None),
        (&none, Box::new(set("llama.rope.dimension_count", 5u32.into())), Some("rope.dimension_count")),
        (&none, Box::new(set("tokenizer.ggml.tokens", vec!["a"; 511].into())), Some("token_embd.weight")),
    ];
    for (i, (more, change, problem)) in cases.into_iter().enumerate() {
        write_model(&path, more, change);
        let file = path.to_str().unwrap();
        let info: Json = serde_json::from_str(&stdout(run(&["info", "--json", "-m", file]))).unwrap();
        let ran = run(&["run", "-m", file, "--device", "cpu", "-p", "Once upon", "-n", "3"]);
        assert_eq!(info["runnable"], problem.is_none(), "{i}: {info}");
        assert_eq!(ran.status.code(), Some(if problem.is_none() { 0 } else { 3 }), "{i}: {}", stderr(&ran));
        if let Some(part) = problem {
            assert!(info["problem"].as_str().unwrap().contains(part), "{i}: {info}");
            assert!(stderr(&ran).contains(part), "{i}: {}", stderr(&ran));
        }
    }
}

#[test]
fn a_token_of_a_megabyte_is_rejected_with_its_id() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long.gguf");
    for (model, token_type) in [("llama", 3), ("llama", 1), ("gpt2", 4), ("t5", 1), ("bert", 1)] {
        write_model(&path, &[], |m| {
            let mut tokens: Vec<_> =
                m.strings("tokenizer.ggml.tokens").unwrap().unwrap().iter().map(str::to_owned).collect();
            let mut types = m.i32s("tokenizer.ggml.token_type").unwrap().unwrap();
            tokens[300] = "a".repeat(1 << 20);
            types[300] = token_type;
            m.set("tokenizer.ggml.tokens", tokens);
            m.set("tokenizer.ggml.token_type", types);
            m.set("tokenizer.ggml.model", model);
            m.set("tokenizer.ggml.pre", "gpt-2");
            m.set("tokenizer.ggml.merges", vec!["a b"]);
        });
        let file = path.to_str().unwrap();
        let message = "token 300 is 1048576 bytes long; at most 1024 are supported";
        for args in [&["run", "-m", file, "-p", "aaaa"][..], &["tokenize", "-m", file, "-p", "aaaa"]] {
            let output = run(args);
            assert_eq!(output.status.code(), Some(3), "{args:?}");
            assert!(stderr(&output).contains(message) && stderr(&output).contains("long.gguf"), "{}", stderr(&output));
        }
        assert!(stdout(run(&["info", "-m", file])).contains(message));
    }
}

#[test]
fn errors_of_a_model_from_the_environment_name_the_variable() {
    let folder = tempfile::tempdir().unwrap();
    let damaged = folder.path().join("damaged.gguf");
    fs::write(&damaged, "GGUF").unwrap();
    for (model, part) in [
        ("xx", "no such file: xx"),
        (damaged.to_str().unwrap(), "damaged.gguf"),
        ("hf:nobody", "OWNER/REPO"),
        (folder.path().to_str().unwrap(), "is a directory"),
    ] {
        for command in [&["run", "-p", "x"][..], &["info"], &["serve"], &["tokenize", "-p", "x"]] {
            let output = program().args(command).env("METAL_ATTENTION_MODEL", model).output().unwrap();
            let errors = stderr(&output);
            assert!(
                errors.contains("error: the model that METAL_ATTENTION_MODEL names: ") && errors.contains(part),
                "{errors}"
            );
            let code = if model == "hf:nobody" { 2 } else { 3 };
            assert_eq!(output.status.code(), Some(code), "{command:?} {errors}");
            // An error of a model from the command line does not.
            let with_flag =
                program().args(command).args(["-m", "yy"]).env("METAL_ATTENTION_MODEL", model).output().unwrap();
            assert!(stderr(&with_flag).contains("error: no such file: yy"), "{}", stderr(&with_flag));
        }
    }
}

#[test]
fn control_characters_of_a_file_do_not_reach_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a\u{202e}b\u{1b}[2J.gguf");
    let odd = "\u{1b}]0;x\u{7}\u{9b}2J\u{202e}\u{2066}\r\n\u{200b}\u{feff}\u{e0041}";
    write_model(&path, &[], |m| {
        m.set("general.name", odd);
        m.set("tokenizer.chat_template", odd);
        m.set(odd, odd);
        m.set("odd.list", vec![odd; 3]);
        m.set("tokenizer.ggml.pre", odd);
        m.set("llama.rope.scaling.type", odd);
        let mut tokens: Vec<_> =
            m.strings("tokenizer.ggml.tokens").unwrap().unwrap().iter().map(str::to_owned).collect();
        tokens[1] = odd.to_owned();
        m.set("tokenizer.ggml.tokens", tokens);
    });
    let file = path.to_str().unwrap();
    let has_control_characters = |text: &str| {
        let odd = |c: char| (c.is_control() && c != '\n') || "\u{202e}\u{2066}\u{200b}\u{feff}\u{e0041}".contains(c);
        text.chars().any(odd)
    };
    for args in [
        &["info", "--metadata", "--tensors", "-m", file][..],
        &["info", "--json", "--metadata", "-m", file],
        &["run", "-p", "x", "-m", file],
        &["run", "-p", "x", "-m", &format!("{file}.none")],
        &["tokenize", "-p", "x", "-m", &format!("{file}/x")],
    ] {
        let output = run(args);
        for text in [String::from_utf8(output.stdout.clone()).unwrap(), stderr(&output)] {
            assert!(!has_control_characters(&text), "{args:?}: {text:?}");
        }
    }
    let info: Json = serde_json::from_str(&stdout(run(&["info", "--json", "-m", file]))).unwrap();
    assert_eq!(info["name"], odd);
    // Piped output has the template unchanged.
    assert_eq!(stdout(run(&["info", "--chat-template", "-m", file])), format!("{odd}\n"));
}

/// Starts a command on a copy of a model in `folder` and waits until it has written `bytes` bytes to stdout.
fn start(folder: &Path, args: &[&str], bytes: usize) -> Child {
    let path = folder.join("model.gguf");
    fs::copy(TALES, &path).unwrap();
    let mut command = program();
    command.args(args).args(["-m", path.to_str().unwrap()]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut vec![0; bytes]).unwrap();
    child
}

/// Truncates the copy of the model.
fn truncate(folder: &Path) {
    OpenOptions::new().write(true).open(folder.join("model.gguf")).unwrap().set_len(4096).unwrap();
}

/// The arguments of a long greedy generation; the prompt follows.
const GENERATE: [&str; 9] = ["run", "--device", "cpu", "--ignore-eos", "--temp", "0", "-n", "400", "-p"];

#[cfg(unix)]
#[test]
fn a_truncated_file_ends_the_program_with_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let child = start(folder.path(), &[&GENERATE[..], &["There was"]].concat(), 20);
    truncate(folder.path());
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    let errors = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(3), "{status} {errors}");
    let path = folder.path().join("model.gguf");
    let message = format!("error: the model file {path:?} was changed or cut short while it was in use; ");
    assert!(errors.contains(&message) && errors.ends_with("--no-mmap to read it into memory first\n"), "{errors}");
}

#[cfg(unix)]
#[test]
fn a_server_whose_file_is_truncated_ends_with_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::copy(TALES, &path).unwrap();
    let mut serve = program();
    serve.args(["serve", "--device", "cpu", "--port", "0", "-m", path.to_str().unwrap()]).stderr(Stdio::piped());
    let mut child = serve.spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stderr.take().unwrap()));
    let address = lines.find_map(|line| line.unwrap().strip_prefix("listening on http://").map(str::to_owned)).unwrap();
    let complete = || {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        let body = r#"{"prompt": "There was a king", "max_tokens": 3}"#;
        let length = body.len();
        let kind = "Content-Type: application/json\r\nConnection: close";
        let head = format!("POST /v1/completions HTTP/1.1\r\nHost: {address}\r\n{kind}");
        write!(stream, "{head}\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
        let mut answer = String::new();
        // A server that exits sends no answer.
        let _ = stream.read_to_string(&mut answer);
        answer
    };
    // While the model loads, requests are rejected with another status.
    let ready = (0..1000).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        complete().contains(" 200 ")
    });
    assert!(ready);
    truncate(folder.path());
    complete();
    assert_eq!(child.wait().unwrap().code(), Some(3));
    let errors: String = lines.map(|line| line.unwrap() + "\n").collect();
    assert!(errors.contains("was changed or cut short while it was in use"), "{errors}");
}

#[test]
fn a_file_read_into_memory_may_be_truncated() {
    let folder = tempfile::tempdir().unwrap();
    let args = [&GENERATE[..], &["There was", "--no-mmap"]].concat();
    let mut child = start(folder.path(), &args, 20);
    truncate(folder.path());
    let mut rest = String::new();
    child.stdout.take().unwrap().read_to_string(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let whole = stdout(run(&[&GENERATE[..], &["There was", "-m", TALES]].concat()));
    assert_eq!(whole[20..], rest);
}

/// A mapped file that is replaced by a rename, as downloads and editors do, keeps its old bytes in the program.
#[cfg(unix)]
#[test]
fn a_replaced_file_does_not_count_as_truncated() {
    let folder = tempfile::tempdir().unwrap();
    let child = start(folder.path(), &[&GENERATE[..], &["There was"]].concat(), 20);
    fs::write(folder.path().join("other"), "GGUF").unwrap();
    fs::rename(folder.path().join("other"), folder.path().join("model.gguf")).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
}

/// A SIGBUS that is no fault in a mapped file ends the program by that signal, as without the handler.
#[cfg(target_os = "linux")]
#[test]
fn other_causes_of_sigbus_have_the_default_effect() {
    use std::os::unix::process::ExitStatusExt;
    let folder = tempfile::tempdir().unwrap();
    let mut child = start(folder.path(), &[&GENERATE[..], &["There was"]].concat(), 20);
    for _ in 0..3 {
        let _ = std::process::Command::new("kill").args(["-BUS", &child.id().to_string()]).status();
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert_eq!(child.wait().unwrap().signal(), Some(7));
}

#[test]
fn every_command_with_a_model_has_the_flag_no_mmap() {
    for command in [
        "run",
        "chat",
        "serve",
        "info",
        "tokenize",
        "detokenize",
        "logits",
        "perplexity",
        "compare",
        "bench",
        "quantize",
    ] {
        let help = stdout(run(&[command, "--help"]));
        assert!(help.contains("--no-mmap"), "{command}");
    }
    let mapped = stdout(run(&["info", "-m", TALES]));
    assert_eq!(stdout(run(&["info", "-m", TALES, "--no-mmap"])), mapped);
}

/// An empty variable has the same effect as one that is not set.
#[test]
fn an_empty_variable_names_no_model() {
    let output = program().args(["info", "--json"]).env("METAL_ATTENTION_MODEL", "").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("using the built-in model"), "{}", stderr(&output));
    let output = program().args(["info", "-m", ""]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("a value is required for '--model <MODEL>'"), "{}", stderr(&output));
}
