//! The command `chat` with piped stdin and stdout, on the built-in model and on hybrid models (attention and recurrent
//! layers).

use std::process::Output;

use crate::common::{run_with_input, stderr, stdout};
use metal_attention_testing::models::more_architectures;
use serde_json::{Value, json};

/// Runs `chat` with greedy sampling and `lines` on stdin.
fn chat(args: &[&str], lines: &[&str]) -> Output {
    let args = [&["chat", "--temp", "0", "-n", "12", "--device", "cpu"], args].concat();
    run_with_input(&args, (lines.join("\n") + "\n").as_bytes())
}

/// The messages that `/save` writes after `lines`.
fn saved(args: &[&str], lines: &[&str]) -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("chat.json");
    let save = format!("/save {}", path.display());
    stdout(chat(args, &[lines, &[&save]].concat()));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn roles(messages: &[Value]) -> Vec<&str> {
    messages.iter().map(|m| m["role"].as_str().unwrap()).collect()
}

#[test]
fn stdout_has_only_the_answers() {
    let output = chat(&[], &["Once upon a time", "", "/stats", "And then?"]);
    let errors = stderr(&output);
    let text = stdout(output);
    let messages = saved(&[], &["Once upon a time", "And then?"]);
    assert_eq!(roles(&messages), ["user", "assistant", "user", "assistant"]);
    let answers: String = [1, 3].map(|i| messages[i]["content"].as_str().unwrap().to_owned() + "\n").concat();
    assert_eq!(text, answers);
    assert!(text.len() > 20, "{text}");
    assert!(errors.contains("the model has no chat template"), "{errors}");
    assert!(!text.contains("User:") && !text.contains('\u{1b}') && !errors.contains("> "), "{errors}");
    assert_eq!(stdout(chat(&[], &[])), "");
}

#[test]
fn only_new_tokens_are_evaluated() {
    let errors = stderr(&chat(&["--system", "Tell a story."], &["Once upon a time", "/stats", "The end", "/stats"]));
    let prompts: Vec<&str> = errors.lines().filter(|line| line.starts_with("prompt ")).collect();
    assert_eq!(prompts.len(), 2, "{errors}");
    assert!(!prompts[0].contains("cached"), "{errors}");
    let number = |text: &str| -> usize { text.split_whitespace().next().unwrap().parse().unwrap() };
    let first = number(prompts[0].trim_start_matches("prompt"));
    let (second, cached) = prompts[1].trim_start_matches("prompt").split_once('(').unwrap();
    // The first prompt and its answer of 12 tokens, whose last token was sampled but not evaluated.
    assert_eq!(number(cached), first + 11, "{errors}");
    assert!(number(second) < first, "{errors}");
    assert!(errors.contains(&format!("context              {} of 512 tokens", first + 12)), "{errors}");
}

#[test]
fn slash_commands_change_the_conversation() {
    let messages = saved(&["--system", "a"], &["One", "Two", "/undo", "/system b c", "//x"]);
    assert_eq!(roles(&messages), ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!((&messages[0]["content"], &messages[1]["content"]), (&json!("b c"), &json!("One")));
    assert_eq!(messages[3]["content"], "/x");
    assert_eq!(saved(&["--system", "a"], &["One", "/reset"]), [json!({"role": "system", "content": "a"})]);
    assert_eq!(saved(&["--system", "a"], &["One", "/system none", "/undo"]), [json!(null); 0]);
    let errors = stderr(&chat(&["--system", "a"], &["/system", "/undo", "/regenerate", "/help"]));
    for part in ["\na\n", "there is nothing to take back", "there is nothing to answer", "/exit, "] {
        assert!(errors.contains(part), "{part:?}: {errors}");
    }
    assert_eq!(stdout(chat(&[], &["/exit", "Not read"])), "");
}

/// The template raises an exception with the variable `enable_thinking`, if the program sets it.
#[test]
fn thinking_can_be_switched_on_and_off() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("template.jinja");
    let path = path.to_str().unwrap();
    let source = "{% if enable_thinking is defined %}{{ raise_exception('thinking is ' ~ enable_thinking) }}{% endif %}\
                  {% for m in messages %}{{ m.content }}{% endfor %}";
    std::fs::write(path, source).unwrap();
    let template = ["--chat-template", path];
    for (flags, lines, expected) in [
        (&["--thinking", "false"][..], &["Hello"][..], Some("thinking is False")),
        (&["--think"], &["Hello"], Some("thinking is True")),
        (&[], &["/set nothink", "Hello"], Some("thinking is False")),
        (&[], &["/set think true", "Hello"], Some("thinking is True")),
        (&[], &["Hello"], None),
    ] {
        let output = chat(&[&template, flags].concat(), lines);
        let errors = stderr(&output);
        assert_eq!(output.status.code(), Some(if expected.is_some() { 2 } else { 0 }), "{errors}");
        assert!(expected.is_none_or(|text| errors.contains(text)), "{errors}");
    }
    let unknown = stderr(&chat(&[], &["/set nothink", "/show"]));
    assert!(unknown.contains("note: the model's chat template knows no such setting"), "{unknown}");
    assert!(unknown.contains("reasoning     none"), "{unknown}");
}

#[test]
fn answers_can_be_regenerated() {
    let sampled = ["/set temp 1.5", "/set top_k 0", "/set seed 3"];
    let text = stdout(chat(&[], &[&sampled[..], &["Once upon a time", "/regenerate", "/regenerate"]].concat()));
    let again = stdout(chat(&[], &[&sampled[..], &["Once upon a time", "/regenerate", "/regenerate"]].concat()));
    assert_eq!(text, again);
    let messages = saved(&[], &[&sampled[..], &["Once upon a time", "/regenerate"]].concat());
    assert_eq!(roles(&messages), ["user", "assistant"]);
    let first = saved(&[], &[&sampled[..], &["Once upon a time"]].concat());
    assert_ne!(first[1], messages[1]);
    assert!(text.starts_with(&format!(
        "{}\n{}\n",
        first[1]["content"].as_str().unwrap(),
        messages[1]["content"].as_str().unwrap()
    )));
}

/// The numbers of prompt tokens that `/stats` prints: (evaluated, cached).
fn prompt_tokens(errors: &str) -> Vec<(usize, usize)> {
    let number = |text: &str| text.split_whitespace().next().unwrap().parse().unwrap();
    let lines = errors.lines().filter_map(|line| line.strip_prefix("prompt "));
    lines.map(|line| (number(line), line.split_once('(').map_or(0, |(_, cached)| number(cached)))).collect()
}

/// After `/undo` and `/regenerate` a model with recurrent layers continues from cached states; its answers equal those
/// of a conversation without the removed turns.
#[test]
fn answers_of_a_hybrid_model_can_be_undone_and_regenerated() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lfm2.gguf");
    std::fs::write(&path, &more_architectures()["lfm2.gguf"]).unwrap();
    let args = ["-m", path.to_str().unwrap()];
    let long = "Once upon a time there was a little girl who lived in a small house beside the wood. ".repeat(3);
    // Undo, then another question.
    let undone = saved(&args, &[&long, "And then?", "/undo", "What for?"]);
    assert_eq!(roles(&undone), ["user", "assistant", "user", "assistant"]);
    assert_eq!(undone, saved(&args, &[&long, "What for?"]));
    assert_eq!(saved(&args, &["Hello", "/undo", &long]), saved(&args, &[&long]));
    // A greedy answer is the same when it is regenerated.
    let once = saved(&args, &[&long, "And then?"]);
    assert_eq!(saved(&args, &[&long, "And then?", "/regenerate", "/regenerate"]), once);
    let errors = stderr(&chat(
        &args,
        &[&long, "/stats", "And then?", "/stats", "/regenerate", "/stats", "/undo", "What for?", "/stats"],
    ));
    // In the next prompt the answer is tokenized differently than it was generated, so the second turn continues from the
    // last full KV page before the answer, and the later ones from the last full page of the common prefix.
    assert_eq!(prompt_tokens(&errors), [(115, 0), (87, 64), (23, 128), (23, 128)], "{errors}");
}

#[test]
fn conversations_are_loaded_from_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("chat.json");
    let messages = json!([
        {"role": "system", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "Once"},
        {"role": "assistant", "content": "upon"},
    ]);
    std::fs::write(&path, messages.to_string()).unwrap();
    let path = path.to_str().unwrap();
    for (args, lines) in [(vec![], vec![format!("/load {path}")]), (vec!["--load", path], vec![])] {
        let lines: Vec<_> = lines.iter().map(String::as_str).chain(["a time"]).collect();
        let messages = saved(&args, &lines);
        assert_eq!(roles(&messages), ["system", "user", "assistant", "user", "assistant"]);
        assert_eq!((&messages[0]["content"], &messages[2]["content"]), (&json!("a"), &json!("upon")));
    }
    std::fs::write(path, "{}").unwrap();
    let output = chat(&["--load", path], &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("has no list of messages in JSON"), "{}", stderr(&output));
}

#[test]
fn the_oldest_turns_are_dropped_from_a_full_context() {
    let long = "Once upon a time there was a little girl";
    let lines = [long, long, long, long];
    let output = chat(&["-c", "96", "--system", "Go on."], &lines);
    let errors = stderr(&output);
    assert!(errors.contains("the context of 96 tokens is full: dropped the oldest "), "{errors}");
    assert_eq!(stdout(output).lines().count(), 4);
    let messages = saved(&["-c", "96", "--system", "Go on."], &lines);
    assert_eq!(roles(&messages)[..2], ["system", "user"]);
    assert!(messages.len() < 9, "{messages:?}");

    let output = chat(&["-c", "12"], &[long, long]);
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(2), &b""[..]));
    assert!(stderr(&output).contains("there is nothing else to drop"), "{}", stderr(&output));
}

#[test]
fn templates_from_files_may_reject_a_conversation() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("template.jinja");
    let path = path.to_str().unwrap();
    let source = "{% for m in messages %}{% if 'rude' in m.content %}{{ raise_exception('Be kind, please') }}{% endif %}\
                  {{ m.content }} {% endfor %}";
    std::fs::write(path, source).unwrap();
    let output = chat(&["--chat-template", path], &["Once upon a time"]);
    assert!(!stderr(&output).contains("no chat template"));
    assert!(!stdout(output).is_empty());
    let output = chat(&["--chat-template", path, "--system", "Be rude."], &["Once upon a time"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("refuses this conversation: Be kind, please"), "{}", stderr(&output));
    std::fs::write(path, "{% if %}").unwrap();
    let output = chat(&["--chat-template", path], &["x"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("template.jinja: the chat template does not compile"), "{}", stderr(&output));
}

#[test]
fn an_invalid_line_ends_a_piped_conversation() {
    for (line, message) in [
        ("/rest", "there is no command /rest"),
        ("/set temp hot", "\"hot\" is no value for temp"),
        ("/set top_p 2", "top_p"),
        ("/load", "/load needs the name of a file"),
        ("/load /no/such/file", "cannot read /no/such/file"),
    ] {
        let output = chat(&[], &[line, "Not answered"]);
        assert_eq!(output.status.code(), Some(2), "{line}");
        assert!(stderr(&output).contains(message), "{line}: {}", stderr(&output));
        assert_eq!(output.stdout, b"", "{line}");
    }
}

/// A conversation in two processes has the answers of one in one process, and the second process does not evaluate the
/// first one's tokens again.
#[test]
fn a_session_is_resumed_in_another_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.session");
    let file = path.to_str().unwrap();
    let hybrid = dir.path().join("hybrid.gguf");
    std::fs::write(&hybrid, &more_architectures()["qwen35.gguf"]).unwrap();
    let long = "Once upon a time there was a little girl who lived in a small house beside the wood. ".repeat(3);
    for model in [None, hybrid.to_str()] {
        let model = model.map_or(vec![], |model| vec!["-m", model, "-c", "400"]);
        let args = [&model[..], &["--session", file]].concat();
        let first = chat(&args, &[&long]);
        assert!(!stderr(&first).contains("back"), "{}", stderr(&first));
        let second = chat(&args, &["And then?", "/stats"]);
        let errors = stderr(&second);
        let whole = chat(&model, &[&long, "And then?", "/stats"]);
        assert_eq!(stdout(first) + &stdout(second), stdout(whole.clone()), "{errors}");
        assert_eq!(prompt_tokens(&errors), prompt_tokens(&stderr(&whole)));
        assert!(prompt_tokens(&errors)[0].1 >= 64, "{errors}");
        let back = errors.lines().find(|line| line.ends_with("in the KV cache are back")).unwrap();
        assert!(back.starts_with(&format!("{file}: 2 messages and ")), "{back}");
        // `/undo` works on the restored messages.
        let third = stderr(&chat(&args, &["/undo", "/undo", "/undo", "Hello"]));
        assert!(third.contains("4 messages and") && third.contains("took back: Once upon a time"), "{third}");
        assert!(stderr(&chat(&args, &[])).contains(": 2 messages and "));
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn sessions_of_another_cache_are_distinguished_from_damaged_ones() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.session");
    let file = path.to_str().unwrap();
    stdout(chat(&["--session", file], &["Once upon a time"]));
    let bytes = std::fs::read(&path).unwrap();
    // With another cache type the messages are restored, and their tokens are evaluated again.
    let errors = stderr(&chat(&["--session", file, "--cache-type", "f32"], &["And then?", "/stats"]));
    assert!(errors.contains("2 messages are back, to be read anew: the snapshot is of another KV cache"), "{errors}");
    assert!(!errors.contains("cached"), "{errors}");
    assert!(stderr(&chat(&["--session", file, "--cache-type", "f32"], &[])).contains(": 4 messages and "));
    for (damaged, why) in [
        (&bytes[..bytes.len() - 1], "the session file is cut off"),
        (&bytes[..bytes.len() / 2], "the session file is cut off"),
        (&b"[]"[..], "this is no session file"),
        (
            &[&bytes[..bytes.len() - 1], &[!bytes[bytes.len() - 1]]].concat(),
            "the session file is damaged: its checksum is wrong",
        ),
    ] {
        std::fs::write(&path, damaged).unwrap();
        let output = chat(&["--session", file], &["And then?"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains(&format!("{file}: {why}")), "{}", stderr(&output));
        assert_eq!(std::fs::read(&path).unwrap(), damaged);
    }
    let output = chat(&["--session", file, "--load", file], &[]);
    assert_eq!(output.status.code(), Some(2));
}
