//! Rendering of unusual conversations, as agents send them, with all templates: several system messages, calls without
//! results, malformed arguments.

use metal_attention_chat::{ChatTemplate, Message, RenderRequest, Tool};
use serde_json::{Value, json};

/// The templates of published models, by name.
fn templates() -> Vec<(String, ChatTemplate)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/templates");
    let template = |path: std::path::PathBuf| {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let template = ChatTemplate::new(&std::fs::read_to_string(path).unwrap()).unwrap();
        (name, template.with_token("bos_token", "<s>").with_token("eos_token", "</s>"))
    };
    let all = std::fs::read_dir(folder).unwrap().map(|file| template(file.unwrap().path()));
    // `python` is a test of Jinja2's features and does not render messages.
    all.filter(|(name, _)| name != "python").collect()
}

/// A message of the assistant with a call of `now`.
fn called(id: &Value, arguments: &Value) -> Value {
    json!({"role": "assistant", "content": null,
        "tool_calls": [{"id": id, "type": "function", "function": {"name": "now", "arguments": arguments}}]})
}

fn messages(json: Value) -> Vec<Message> {
    serde_json::from_value(json).unwrap_or_else(|e| panic!("{e}"))
}

/// Conversations: a name, the messages, and texts that the prompt must contain.
fn conversations() -> Vec<(&'static str, Value, Vec<&'static str>)> {
    let user = json!({"role": "user", "content": "Question?"});
    let answer = json!({"role": "assistant", "content": "Reply."});
    let result = json!({"role": "tool", "tool_call_id": "call_abcdefghijkl", "content": "12:00"});
    let id = json!("call_abcdefghijkl");
    let system = |text: &str| json!({"role": "system", "content": text});
    let two = json!({"role": "assistant", "content": "", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{\"a\": 1}"}}]});
    let mut all = vec![
        ("two systems", json!([system("First."), system("Second."), user]), vec!["First.", "Second."]),
        (
            "system in the middle",
            json!([system("First."), user, answer, system("Second."), user]),
            vec!["First.", "Second."],
        ),
        ("system after the user", json!([user, system("Second.")]), vec!["Second."]),
        ("system at the end", json!([system("First."), user, answer, system("Second.")]), vec!["First.", "Second."]),
        ("developer", json!([{"role": "developer", "content": "First."}, user]), vec!["First."]),
        (
            "developer later",
            json!([system("First."), {"role": "developer", "content": "Second."}, user]),
            vec!["First.", "Second."],
        ),
        (
            "two users",
            json!([user, {"role": "user", "content": [{"type": "text", "text": "Again?"}]}]),
            vec!["Question?", "Again?"],
        ),
        (
            "two assistants",
            json!([user, answer, {"role": "assistant", "content": "More."}, user]),
            vec!["Reply.", "More."],
        ),
        ("assistant first", json!([answer, user]), vec!["Question?"]),
        (
            "no id in the answer",
            json!([user, called(&id, &json!("{}")), {"role": "tool", "content": "12:00"}]),
            vec!["12:00"],
        ),
        (
            "two calls",
            json!([user, two, {"role": "tool", "tool_call_id": "call_2", "content": "A2"}, {"role": "tool", "tool_call_id": "call_1", "content": "A1"}]),
            vec![],
        ),
        ("an answer to no call", json!([user, result, user]), vec!["Question?"]),
        ("a call without an answer", json!([user, called(&id, &json!("{}")), user]), vec!["Question?"]),
        (
            "unknown fields",
            json!([{"role": "user", "content": "Question?", "cache_control": {"type": "ephemeral"}, "id": 7}]),
            vec!["Question?"],
        ),
        ("empty", json!([{"role": "user", "content": null}]), vec![]),
    ];
    let arguments =
        [json!(""), json!(null), json!({}), json!("{\"a\": "), json!("[1]"), json!("text"), json!("\"x\""), json!(5)];
    for arguments in arguments {
        for id in [&id, &json!(null), &json!("")] {
            all.push(("arguments", json!([user, called(id, &arguments), result, user]), vec!["Question?"]));
        }
    }
    all
}

#[test]
fn awkward_conversations_are_rendered() {
    let tools = [
        json!({"type": "function", "function": {"name": "now"}}),
        json!({"type": "function", "function": {"name": "now", "description": null, "parameters": null, "strict": null}}),
        json!({"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}),
        json!({"type": "function", "function": {"name": "now", "parameters": {}}}),
    ];
    let mut failed = Vec::new();
    for (template_name, template) in templates() {
        for (name, conversation, texts) in conversations() {
            let messages = messages(conversation.clone());
            for tools in [&[][..], &tools] {
                for tool in tools.iter().map(Some).chain(tools.is_empty().then_some(None)) {
                    let tools: Vec<_> = tool.into_iter().map(|tool| Tool::try_from(tool.clone()).unwrap()).collect();
                    let request = RenderRequest {
                        messages: &messages,
                        tools: &tools,
                        add_generation_prompt: true,
                        ..Default::default()
                    };
                    match template.render(&request) {
                        Err(error) => failed.push(format!("{template_name}: {name} {conversation}: {error}")),
                        Ok(prompt) => {
                            for text in texts.iter().filter(|text| !prompt.text.contains(**text)) {
                                failed.push(format!("{template_name}: {name}: {text} is missing: {}", prompt.text));
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
}

/// All notations of a call without arguments give the same prompt.
#[test]
fn empty_arguments_are_an_empty_object() {
    for (name, template) in templates() {
        let render = |arguments: Value| {
            let conversation = json!([{"role": "user", "content": "Time?"}, called(&json!("call00001"), &arguments),
                {"role": "tool", "tool_call_id": "call00001", "name": "now", "content": "12:00"}]);
            let messages = messages(conversation);
            template.render(&RenderRequest { messages: &messages, ..Default::default() }).unwrap().text
        };
        let expected = render(json!("{}"));
        for arguments in [json!(""), json!(null), json!({}), json!(" "), json!("null")] {
            assert_eq!(render(arguments), expected, "{name}");
        }
    }
}

/// A conversation that the template accepts is rendered without changes.
#[test]
fn accepted_conversations_stay_as_they_are() {
    let template = ChatTemplate::new("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}").unwrap();
    let conversation = json!([{"role": "system", "content": "a"}, {"role": "system", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "user", "content": "d"}, {"role": "system", "content": "e"}]);
    let prompt = template.render(&RenderRequest { messages: &messages(conversation), ..Default::default() });
    assert_eq!(prompt.unwrap().text, "[system]a[system]b[user]c[user]d[system]e");
}

/// If every adapted form of the conversation is rejected, the error is that of the form which got furthest.
#[test]
fn the_error_is_that_of_the_most_successful_form() {
    let source = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('order') }}{% endif %}\n\
                  {% endfor %}\n{{ raise_exception('never') }}";
    let conversation = json!([{"role": "user", "content": "c"}, {"role": "system", "content": "e"}]);
    let template = ChatTemplate::new(source).unwrap();
    let error =
        template.render(&RenderRequest { messages: &messages(conversation), ..Default::default() }).unwrap_err();
    assert_eq!(error.to_string(), "the model's chat template refuses this conversation: never");
}
