//! Chat templates of published models, compared with the output of Python's Jinja2 (recorded by
//! `tools/render-chat-templates`).

use std::time::{Duration, UNIX_EPOCH};

use metal_attention_chat::{ChatTemplate, Message, Prompt, RenderRequest, Tool};
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Message>,
    #[serde(default)]
    tools: Vec<Tool>,
    #[serde(default)]
    add_generation_prompt: bool,
    variables: Option<Map<String, Value>>,
}

/// The test data `name`.json.
fn data<T: for<'de> Deserialize<'de>>(name: &str) -> T {
    let path = format!("{}/tests/data/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Python's result for each template and conversation.
fn expected() -> Map<String, Value> {
    let text = metal_attention_testing::unpacked("crates/metal-attention-chat/tests/data/expected.json");
    serde_json::from_slice(&text).unwrap()
}

fn template(name: &str) -> ChatTemplate {
    let path = format!("{}/tests/data/templates/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
    let template = ChatTemplate::new(&std::fs::read_to_string(path).unwrap()).unwrap_or_else(|e| panic!("{name}: {e}"));
    let tokens: Map<String, Value> = data("templates");
    let tokens = tokens[name].as_object().unwrap().iter().filter(|(name, _)| *name != "conversations");
    tokens.fold(template, |template, (name, text)| template.with_token(name, text.as_str().unwrap()))
}

/// Each template renders each conversation to Python's text or rejects it as in Python.
///
/// - Where Python fails otherwise, for example because a loop iterates over `None`, nothing is expected.
/// - If a template has no support for tools or calls, the messages describe them in text.
/// - If a template rejects a conversation or omits texts of it, an adapted form that keeps all texts is rendered.
#[test]
fn published_templates_render_as_in_python() {
    let conversations: Map<String, Value> = data("conversations");
    let expected = expected();
    let (mut texts, mut adapted, mut failed, mut in_plain_words) = (0, 0, 0, 0);
    for (name, expected) in &expected {
        let template = template(name);
        for (title, conversation) in conversations.iter().filter(|(title, _)| expected.get(title).is_some()) {
            let conversation = Conversation::deserialize(conversation).unwrap();
            let result = template.render(&RenderRequest {
                messages: &conversation.messages,
                tools: &conversation.tools,
                add_generation_prompt: conversation.add_generation_prompt,
                variables: conversation.variables.as_ref(),
                now: Some(UNIX_EPOCH + Duration::from_secs(1_721_995_200)),
            });
            let with_tools = !conversation.tools.is_empty();
            let with_calls = conversation.messages.iter().any(|message| !message.tool_calls.is_empty());
            let knows = |word: &str| template.source().contains(word);
            if with_calls && knows("tools") && !knows("tool_calls") && name != "phi-4-mini" {
                // The template would omit the calls, so they are rendered as text.
                let text = result.unwrap().text;
                assert!(text.contains("{\"name\": \"get_weather\"") || name == "python", "{name}, {title}: {text}");
                in_plain_words += 1;
                continue;
            }
            if with_tools && (!knows("tools") || name == "phi-4-mini") {
                // The template would omit the tools, so the messages describe them.
                let describes_tools = |prompt: &Prompt| {
                    prompt.text.contains("You can call these functions") || prompt.text.contains("<|tool|>[{")
                };
                assert!(result.is_err() || result.as_ref().is_ok_and(describes_tools), "{name}, {title}: {result:?}");
                in_plain_words += 1;
                continue;
            }
            let expected = &expected[title];
            // Some templates omit the text of messages with calls.
            let without_calls = || conversation.messages.iter().filter(|message| message.tool_calls.is_empty());
            let leaves_out = |text: &str| without_calls().find(|message| !text.contains(message.text().trim()));
            match (&result, expected["text"].as_str(), expected["refused"].as_str()) {
                (Ok(prompt), Some(text), _) if leaves_out(text).is_none() || leaves_out(&prompt.text).is_some() => {
                    assert_eq!(prompt.text, text, "{name}, {title}");
                    assert_eq!(prompt.literals, [0; 0], "{name}, {title}");
                    texts += 1;
                }
                (Ok(prompt), _, _) if expected.get("text").or(expected.get("refused")).is_some() => {
                    assert_eq!(leaves_out(&prompt.text), None, "{name}, {title}: {prompt:?}");
                    adapted += 1;
                }
                (_, None, None) => failed += 1,
                _ => panic!("{name}, {title}: {result:?} in place of {expected}"),
            }
        }
    }
    assert_eq!((texts, adapted, failed, in_plain_words), (341, 24, 12, 55));
}
