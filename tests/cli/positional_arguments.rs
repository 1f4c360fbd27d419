//! Models and texts as positional arguments: `run MODEL TEXT`, `chat MODEL`, `info MODEL`, ...

use std::path::{Path, PathBuf};
use std::process::Output;

use crate::common::{program, run, run_with_input, stderr, stdout};
use metal_attention::gguf::{GgufFile, GgufWriter, TensorDecl};
use serde_json::Value;

const BUILT_IN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/stories260K.gguf");
const TEXT: &str = "Once upon a time";
/// Flags of a short greedy generation.
const SHORT: [&str; 4] = ["--temp", "0", "-n", "12"];
const NOTE: &str = "note: the text is continued as it is, though the model has a chat template: --chat";

/// Writes the built-in model with a chat template into `folder`. Returns its path.
fn with_template(folder: &Path) -> PathBuf {
    let model = GgufFile::read(BUILT_IN).unwrap();
    let mut metadata = model.metadata().clone();
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";
    metadata.set("tokenizer.chat_template", template.to_owned());
    let declared: Vec<_> = model.tensors().iter().map(TensorDecl::from).collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &declared).unwrap();
    for tensor in model.tensors() {
        writer.write(tensor.bytes()).unwrap();
    }
    let path = folder.join("tiny-chat-Q4_0.gguf");
    std::fs::write(&path, writer.finish().unwrap()).unwrap();
    path
}

/// Runs `command` with `args` and [`SHORT`].
fn run_short(command: &str, args: &[&str]) -> Output {
    run(&[&[command], args, &SHORT].concat())
}

#[test]
fn a_positional_text_is_a_message_if_the_model_has_a_template() {
    let folder = tempfile::tempdir().unwrap();
    let path = with_template(folder.path());
    let model = path.to_str().unwrap();
    let lines = [&["chat", "-m", model], &SHORT[..]].concat();
    let answer = stdout(run_with_input(&lines, format!("{TEXT}\n").as_bytes()));
    let continued = stdout(run_short("run", &["-m", model, "-p", TEXT]));
    assert_ne!(answer.trim(), continued.trim());

    for message in [
        &[model, TEXT][..],
        &[model, "Once", "upon", "a time"],
        &["-m", model, TEXT],
        &["-m", model, "-p", TEXT, "--chat"],
        &["-m", model, "-cnv", TEXT],
    ] {
        let output = run_short("run", message);
        assert!(!stderr(&output).contains("note: "), "{}", stderr(&output));
        assert_eq!(stdout(output), answer, "{message:?}");
    }
    assert_eq!(stdout(run_short("chat", &[model, TEXT])), answer);
    assert_eq!(stdout(run_short("chat", &["-m", model, TEXT])), answer);
    assert_eq!(stdout(run_short("chat", &[model, "-p", TEXT])), answer);
    let piped = |args: &[&str]| run_with_input(&[&["run"], args, &SHORT].concat(), TEXT.as_bytes());
    assert_eq!(stdout(piped(&[model])), answer);
    assert_eq!(stdout(piped(&["-m", model, "-", "--chat"])), answer);

    for plain in [&["-m", model, "-p", TEXT][..], &[model, "-p", TEXT]] {
        let output = run_short("run", plain);
        assert_eq!(stderr(&output).matches(NOTE).count(), 1, "{}", stderr(&output));
        assert_eq!(stdout(output), continued);
    }
    for (output, is_noted) in [
        (piped(&["-m", model, "-"]), true),
        (piped(&[model, "-"]), true),
        (piped(&["-m", model, "-f", "-"]), true),
        (run_short("run", &["-m", model, "--raw", TEXT]), false),
        (run_short("run", &[model, "--raw", "-p", TEXT]), false),
    ] {
        assert_eq!(stderr(&output).contains(NOTE), is_noted, "{}", stderr(&output));
        assert_eq!(stdout(output), continued);
    }

    // With --json the same texts are messages.
    let meta = |args: &[&str]| -> Value {
        let text = stdout(run_short("run", &[args, &["--json"]].concat()));
        serde_json::from_str(text.lines().next().unwrap()).unwrap()
    };
    assert_eq!(meta(&[model, TEXT])["prompt"], format!("user: {TEXT}\nassistant:"));
    assert_eq!(
        meta(&[model, TEXT, "--system", "Be brief."])["prompt"],
        format!("system: Be brief.\nuser: {TEXT}\nassistant:")
    );
    assert_eq!(meta(&[model, "-p", TEXT])["prompt"], TEXT);

    // Without a template the text is continued, without a note.
    let output = run_short("run", &[BUILT_IN, TEXT]);
    assert!(!stderr(&output).contains("note: "), "{}", stderr(&output));
    assert_eq!(stdout(output), stdout(run_short("run", &["-p", TEXT])));
}

#[test]
fn variables_name_a_model_or_a_folder_of_models() {
    let folder = tempfile::tempdir().unwrap();
    let path = with_template(folder.path());
    let with =
        |name: &str, value: &Path, args: &[&str]| program().args(args).args(SHORT).env(name, value).output().unwrap();
    let answer = stdout(run_short("run", &["-m", path.to_str().unwrap(), TEXT]));
    // If the first word names no model, all words are the text, and the model is that of the environment.
    for words in
        [&["run", TEXT][..], &["run", "Once", "upon", "a", "time"], &["run", "-m", path.to_str().unwrap(), TEXT]]
    {
        assert_eq!(stdout(with("METAL_ATTENTION_MODEL", &path, words)), answer, "{words:?}");
    }
    // If the first word names a model, it is used.
    let built_in = stdout(run_short("run", &[BUILT_IN, TEXT]));
    assert_eq!(stdout(with("METAL_ATTENTION_MODEL", &path, &["run", BUILT_IN, TEXT])), built_in);
    // An empty variable has no effect.
    assert_eq!(stdout(with("METAL_ATTENTION_MODEL", Path::new(""), &["run", BUILT_IN, TEXT])), built_in);

    for name in ["tiny-chat", "TINY-chat-q4_0", "tiny-chat:Q4_0", "tiny-chat-Q4_0.gguf"] {
        let output = with("METAL_ATTENTION_MODELS", folder.path(), &["run", name, TEXT]);
        assert_eq!(stdout(output), answer, "{name}");
    }
    let output = with("METAL_ATTENTION_MODELS", folder.path(), &["run", "tiny-chat:Q8_0", TEXT]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
}

#[test]
fn every_command_accepts_a_positional_model() {
    assert!(stdout(run(&["info", BUILT_IN])).contains("stories260K"));
    assert_eq!(stdout(run(&["show", BUILT_IN])), stdout(run(&["info", "-m", BUILT_IN])));
    assert!(stdout(run(&["ls"])).len() > 10);
    let vectors = stdout(run(&["embed", BUILT_IN, "a cat", "a dog"]));
    assert_eq!(vectors, stdout(run(&["embed", "-m", BUILT_IN, "-p", "a cat", "-p", "a dog"])));
    assert_eq!(vectors, stdout(run(&["embed", "a cat", "a dog"])));
    let bench = ["--device", "cpu", "-p", "4", "-n", "2", "-r", "1", "-o", "csv"];
    assert_eq!(stdout(run(&[&["bench", BUILT_IN], &bench[..]].concat())).lines().count(), 3);
    let output = run(&["serve", BUILT_IN, "--replicas", "0"]);
    assert!(stderr(&output).contains("--replicas"), "{}", stderr(&output));
}

#[test]
fn errors_for_an_unknown_model_name_alternatives() {
    let fails = |args: &[&str], code: i32, parts: &[&str]| {
        let output = run(args);
        let errors = stderr(&output);
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(code), &b""[..]), "{args:?}: {errors}");
        for part in parts {
            assert!(errors.contains(part), "{part:?} is not in the message of {args:?}: {errors}");
        }
    };
    let gets = ["  metal-attention pull llama3.2 ", "  metal-attention pull OWNER/REPO "];
    fails(
        &["run", "lama3.2", "hi"],
        3,
        &[&gets[..], &["did you mean llama3.2?", "A text comes after the model"]].concat(),
    );
    fails(&["info", "nothing-like-it"], 3, &gets);
    fails(&["serve", "-m", "nothing-like-it"], 3, &gets);
    fails(&["quantize", "nothing-like-it", "out.gguf", "q4_0"], 3, &gets);
    fails(&["run", "Why is it?"], 2, &["run llama3.2 \"Why is it?\"", "-p \"Why is it?\""]);
    fails(&["run", "llama3.2:70b", "hi"], 2, &["there are llama3.2, llama3.2:3b, llama3.2:1b"]);
    fails(&["run", "stories260k.gguf", "hi"], 3, &["no such file: stories260k.gguf"]);
    fails(&["run", BUILT_IN, "hi", "-p", "hi"], 2, &["the text is given twice"]);
    fails(&["run", "-m", BUILT_IN], 2, &["there is no prompt", "metal-attention run MODEL TEXT"]);
    fails(&["embed", "-m", BUILT_IN, "--tokens", "1", "x"], 2, &["in the place of texts"]);
    fails(&["serve", BUILT_IN, "-m", BUILT_IN], 2, &["cannot be used with"]);
}
