//! Calls rendered by published chat templates, parsed again by the template's own tool-call format.

use std::collections::BTreeMap;

use metal_attention_chat::{
    AnswerEvent, ChatTemplate, Message, RenderRequest, Tool, ToolCall, ToolCallParser, ToolFormat,
};
use serde_json::{Value, json};

const TEXT: &str = "Some words first.";

/// Templates whose rendered calls cannot be parsed, with the reason.
const EXCEPTIONS: &[(&str, &str)] = &[
    ("CohereForAI-c4ai-command-r-plus-tool_use", "it fails without parameters in its own notation"),
    ("meetkai-functionary-medium-v3.2", "the prompt ends with the marker of a call or a text"),
    ("Kimi-K3", "its markers share the text between them"),
    ("MiniMax-M3", "each parameter has a tag of its own name"),
    ("NVIDIA-Nemotron-Nano-v2", "a text and calls are two messages, of which a model writes one"),
    ("nemotron-nano-2", "a text and calls are two messages, of which a model writes one"),
    (
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "calls after a text are rendered as plain words, with the arguments as a string only",
    ),
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "the same as the other distilled model"),
    ("deepseek-r1-distill", "the same as the other distilled model"),
    ("deepseek-ai-DeepSeek-V3.1", "the same as the distilled models of R1"),
    ("deepseek-v3.1", "the same as the distilled models of R1"),
    ("fireworks-ai-llama-3-firefunction-v2", "a plain word instead of a marker begins the list of calls"),
    ("gemma-4", "the text is written after the calls"),
    ("google-gemma-4-31B-it", "the text is written after the calls"),
    ("google-gemma-4-31B-it-interleaved", "the text is written after the calls"),
    ("llama-3.1", "each call is a message of its own"),
    ("llama-3.2", "each call is a message of its own"),
    ("meta-llama-Llama-3.1-8B-Instruct", "each call is a message of its own"),
    ("meta-llama-Llama-3.2-3B-Instruct", "each call is a message of its own"),
    ("meta-llama-Llama-3.3-70B-Instruct", "each call is a message of its own"),
    ("llama-cpp-deepseek-r1", "a message with a text has no calls"),
    ("muse-glimmer", "the name occurs twice in a call, first in the header of its message"),
];

/// The templates of llama.cpp and those of this crate, by name.
fn templates() -> BTreeMap<String, String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/");
    let text = metal_attention_testing::unpacked("crates/metal-attention-chat/tests/data/llama.cpp-templates.json");
    let mut templates: BTreeMap<String, String> = serde_json::from_slice(&text).unwrap();
    for file in std::fs::read_dir(format!("{folder}templates")).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        templates.insert(name, std::fs::read_to_string(path).unwrap());
    }
    templates
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source).unwrap().with_token("bos_token", "").with_token("eos_token", "")
}

fn tools() -> Vec<Tool> {
    let properties = json!({"path": {"type": "string", "description": "p"}, "n": {"type": "integer", "description": "n"},
        "o": {"type": "object", "description": "o"}});
    let tool = |name: &str, properties: Value| {
        let function = json!({"name": name, "description": "d", "parameters": {
            "type": "object", "properties": properties, "required": []}});
        Tool::try_from(json!({"type": "function", "function": function})).unwrap()
    };
    vec![tool("edit", properties), tool("now", json!({}))]
}

fn calls() -> Vec<ToolCall> {
    let arguments = json!({"path": "say \"it\" <b>\nif a < 3", "n": 3, "o": {"a": "x"}});
    vec![
        ToolCall::new("call00000", "edit", arguments.to_string()),
        ToolCall::new("call00001", "now", "{}"),
        ToolCall::new("call00002", "edit", json!({"path": "x"}).to_string()),
    ]
}

/// The rendered turn of the assistant from its text on, without the markers that end it. `None`: the template rejects it.
fn turn(template: &ChatTemplate, content: &str, calls: &[ToolCall]) -> Option<String> {
    let tools = tools();
    let render = |calls: &[ToolCall], content: &str, generation| {
        let assistant = Message { tool_calls: calls.to_vec(), ..Message::assistant(content) };
        let messages = [Message::user("qwerty"), assistant];
        let messages = &messages[..if generation { 1 } else { 2 }];
        let request =
            RenderRequest { messages, tools: &tools, add_generation_prompt: generation, ..Default::default() };
        let text = template.render(&request).ok()?.text;
        Some(text[text.rfind("qwerty")? + 6..].to_owned())
    };
    let with = render(calls, content, false)?;
    let plain = render(&[], TEXT, false)?;
    let end = plain[plain.find(TEXT)? + TEXT.len()..].to_owned();
    let prompt = render(&[], "", true)?;
    // If the template omits the text, the turn begins at the first marker that differs from the generation prompt.
    let begin = with.find(TEXT).unwrap_or_else(|| {
        let same = with.chars().zip(prompt.chars()).take_while(|(a, b)| a == b);
        let same: usize = same.map(|(a, _)| a.len_utf8()).sum();
        let inside = with[..same].rfind(['<', '[']).filter(|at| !with[*at..same].contains(['>', ']']));
        inside.unwrap_or(same)
    });
    let text = &with[begin..];
    let text = text.strip_suffix(&*end).unwrap_or(text);
    // Removes the beginning of the next turn.
    let text = text.split("<|END_OF_TURN_TOKEN|>").next()?.trim_end_matches("<|eom_id|>");
    let text = text.trim_end_matches("<｜hy_eos:opensource｜>");
    Some(text.to_owned())
}

/// Parses `text` in pieces of `size` characters.
fn read(format: ToolFormat, text: &str, size: usize) -> Message {
    let mut parser = ToolCallParser::new(format, &tools());
    let chars: Vec<char> = text.chars().collect();
    let mut events: Vec<AnswerEvent> = Vec::new();
    for piece in chars.chunks(size) {
        events.extend(parser.push(&piece.iter().collect::<String>()));
    }
    events.extend(parser.finish());
    Message::from_events(events)
}

fn pairs(calls: &[ToolCall]) -> Vec<(String, Value)> {
    let value = |call: &ToolCall| serde_json::from_str(&call.function.arguments).unwrap();
    calls.iter().map(|call| (call.function.name.clone(), value(call))).collect()
}

#[test]
fn rendered_calls_are_parsed() {
    let mut failed = Vec::new();
    let (mut n_read, mut skipped) = (0, Vec::new());
    for (name, source) in templates() {
        if !source.contains("tool_calls") || EXCEPTIONS.iter().any(|(other, _)| *other == name) {
            continue;
        }
        let template = template(&source);
        let format = template.tool_format();
        let before = n_read + failed.len();
        for n in [1, 2, 3] {
            let calls = &calls()[..n];
            let Some(text) = turn(&template, TEXT, calls) else { continue };
            for text in [text.replacen(TEXT, "", 1), text] {
                let content = if text.contains(TEXT) { Some(TEXT) } else { None };
                let sizes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 40, 10_000];
                let bad = sizes.into_iter().find(|&size| {
                    let message = read(format, &text, size);
                    // Some templates render only one call a message.
                    let written = if text.contains("now") || n == 1 { n } else { 1 };
                    pairs(&message.tool_calls) != pairs(&calls[..written])
                        || message.content.as_deref().map(str::trim).filter(|text| !text.is_empty()) != content
                });
                match bad {
                    None => n_read += 1,
                    Some(size) => {
                        let message = read(format, &text, size);
                        failed.push(format!(
                            "{name}: {text:?} in {size}: {:?} {:?}",
                            message.content, message.tool_calls
                        ));
                    }
                }
            }
        }
        if n_read + failed.len() == before {
            skipped.push(name);
        }
    }
    assert!(skipped.is_empty(), "{skipped:?}");
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
    assert!(n_read > 300, "{n_read}");
}
