//! The result of a tool call, converted to plain text.

use serde_json::Value;

use crate::limits::MAX_RESULT;
use crate::text::{beginning, plain};

/// The result of a tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolResult {
    /// Plain text without control characters, of at most [`MAX_RESULT`] bytes, plus a note that it was cut.
    pub text: String,
    /// Whether the tool failed; the text explains why.
    pub is_error: bool,
}

impl ToolResult {
    /// Reads the result of `tools/call`; `None`: it has no content.
    pub(crate) fn read(result: &Value) -> Option<Self> {
        let parts = match result.get("content") {
            Some(Value::Array(parts)) => parts.as_slice(),
            Some(_) => return None,
            None => &[],
        };
        let structured = result.get("structuredContent").filter(|_| parts.is_empty());
        if result.get("content").is_none() && structured.is_none() {
            return None;
        }
        let texts = parts.iter().map(text_of).chain(structured.map(Value::to_string));
        let is_error = result.get("isError") == Some(&Value::Bool(true));
        Some(Self { text: bounded(&plain(&texts.collect::<Vec<_>>().join("\n"))), is_error })
    }

    /// The content of the message to the model.
    pub fn for_model(&self) -> String {
        match (self.is_error, self.text.is_empty()) {
            (false, false) => self.text.clone(),
            (false, true) => "(no output)".to_owned(),
            (true, false) => format!("The tool failed: {}", self.text),
            (true, true) => "The tool failed.".to_owned(),
        }
    }
}

/// Converts a content block to text.
fn text_of(part: &Value) -> String {
    let field = |name: &str| part[name].as_str().unwrap_or_default();
    match field("type") {
        "text" => field("text").to_owned(),
        kind @ ("image" | "audio") => format!("[{kind}, {}]", size(field("data"))),
        "resource" => {
            let resource = &part["resource"];
            match (resource["text"].as_str(), resource["blob"].as_str()) {
                (Some(text), _) => text.to_owned(),
                (None, blob) => {
                    let uri = resource["uri"].as_str().unwrap_or_default();
                    format!("[resource {uri}, {}]", size(blob.unwrap_or_default()))
                }
            }
        }
        "resource_link" => format!("[resource {}]", field("uri")),
        "" => "[content of unknown type]".to_owned(),
        kind => format!("[{}]", beginning(kind, 64)),
    }
}

/// The size of base64 data.
fn size(base64: &str) -> String {
    let bytes = base64.trim_end_matches('=').len() * 3 / 4;
    if bytes < 1000 { format!("{bytes} B") } else { format!("{} kB", bytes.div_ceil(1000)) }
}

/// Cuts `text` to [`MAX_RESULT`] bytes, with a note.
fn bounded(text: &str) -> String {
    let shown = beginning(text, MAX_RESULT);
    if shown.len() == text.len() {
        return text.to_owned();
    }
    format!("{shown}\n[cut here: the result has {} bytes, of which these are the first {}]", text.len(), shown.len())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn content_blocks_become_text() {
        let parts = json!([
            {"type": "text", "text": "a\u{1b}[2J\r\n"},
            {"type": "image", "data": "A".repeat(16_000), "mimeType": "image/png"},
            {"type": "audio", "data": "AAAA=="},
            {"type": "resource", "resource": {"uri": "file:///x", "text": "inner"}},
            {"type": "resource", "resource": {"uri": "file:///y", "blob": "AAAA"}},
            {"type": "resource_link", "uri": "file:///z"},
            {"type": "hologram"},
            7,
        ]);
        let text = "a[2J\n\n[image, 12 kB]\n[audio, 3 B]\ninner\n[resource file:///y, 3 B]\n[resource file:///z]\n\
                    [hologram]\n[content of unknown type]";
        let result = |is_error| Some(ToolResult { text: text.into(), is_error });
        assert_eq!(ToolResult::read(&json!({"content": parts})), result(false));
        assert_eq!(ToolResult::read(&json!({"content": parts, "isError": true})), result(true));
        let structured = ToolResult::read(&json!({"structuredContent": {"n": 1}})).unwrap();
        assert_eq!((structured.text.as_str(), structured.is_error), ("{\"n\":1}", false));
        for none in [json!(null), json!({}), json!({"content": "text"}), json!([])] {
            assert_eq!(ToolResult::read(&none), None, "{none}");
        }
    }

    #[test]
    fn long_results_are_cut() {
        let text =
            |n: usize| ToolResult::read(&json!({"content": [{"type": "text", "text": "é".repeat(n)}]})).unwrap().text;
        assert_eq!(text(MAX_RESULT / 2), "é".repeat(MAX_RESULT / 2));
        let cut = text(MAX_RESULT);
        let note = "\n[cut here: the result has 131072 bytes, of which these are the first 65536]";
        assert_eq!(cut.strip_suffix(note), Some(&*"é".repeat(MAX_RESULT / 2)));
    }

    #[test]
    fn the_model_sees_whether_the_tool_failed() {
        let read = |text: &str, is_error| ToolResult { text: text.into(), is_error }.for_model();
        assert_eq!([read("a", false), read("", false)], ["a", "(no output)"]);
        assert_eq!([read("a", true), read("", true)], ["The tool failed: a", "The tool failed."]);
    }
}
