//! Small templates, compared with the output of Python's Jinja2 (recorded by `tools/render-jinja`).

use std::time::{Duration, UNIX_EPOCH};

use metal_attention_chat::{ChatTemplate, Message, RenderRequest};
use serde_json::{Map, Value};

/// `tests/data/jinja.json` maps each template to its text, or to `null` if Python raises an error.
#[test]
fn small_templates_render_as_in_python() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/jinja.json");
    let cases: Map<String, Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let messages = [Message::user("x")];
    let now = Some(UNIX_EPOCH + Duration::from_secs(1_721_995_200));
    let request = RenderRequest { messages: &messages, now, ..Default::default() };
    let mut wrong = Vec::new();
    for (source, expected) in &cases {
        let result = ChatTemplate::new(source).and_then(|template| template.render(&request));
        match (&result, expected.as_str()) {
            (Ok(prompt), Some(expected)) if prompt.text == expected => {}
            (Err(_), None) => {}
            (Ok(prompt), _) => wrong.push(format!("{source:?}\n    is {:?}\n  want {expected}", prompt.text)),
            (Err(error), _) => wrong.push(format!("{source:?}\n    is {error}\n  want {expected}")),
        }
    }
    assert!(wrong.is_empty(), "{} of {} are wrong:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}
