//! `tool_choice`: whether the model calls a tool, and which tools it may call.

use metal_attention_chat::Tool;
use serde::de::{Deserialize, Deserializer, Error};
use serde_json::Value;

use crate::http::ApiError;

/// The request's choice of tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// No call.
    None,
    /// The model decides.
    Auto,
    /// At least one call.
    Required,
    /// A call of this tool.
    Named(String),
    /// Only these tools may be called.
    Allowed {
        /// The tools' names.
        names: Vec<String>,
        /// Whether there must be a call.
        required: bool,
    },
}

impl<'de> Deserialize<'de> for ToolChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::read(&Value::deserialize(deserializer)?).ok_or_else(|| {
            D::Error::custom(
                "expected \"none\", \"auto\", \"required\", \"any\", an object that names a function, or one of type \
                 \"allowed_tools\"",
            )
        })
    }
}

impl ToolChoice {
    /// Reads the forms of the chat API and of the Responses API; `None`: invalid.
    fn read(value: &Value) -> Option<Self> {
        let word = |value: &Value| match value.as_str()? {
            "none" => Some(Self::None),
            "auto" => Some(Self::Auto),
            "required" | "any" => Some(Self::Required),
            _ => None,
        };
        let Some(fields) = value.as_object() else { return word(value) };
        let name = |value: &Value| match (value["name"].as_str(), value["function"]["name"].as_str()) {
            (Some(name), _) | (None, Some(name)) => Some(name.to_owned()),
            (None, None) => None,
        };
        if let Some(choice) = fields.get("type").and_then(word) {
            return Some(choice);
        }
        if value["type"] != "allowed_tools" {
            return name(value).map(Self::Named);
        }
        // The chat API nests the two fields in an object, the Responses API does not.
        let allowed = fields.get("allowed_tools").unwrap_or(value);
        let required = match word(allowed.get("mode").filter(|mode| !mode.is_null()).unwrap_or(&"auto".into()))? {
            Self::Auto => false,
            Self::Required => true,
            Self::None | Self::Named(_) | Self::Allowed { .. } => return None,
        };
        let names = allowed["tools"].as_array()?.iter().map(name).collect::<Option<_>>()?;
        Some(Self::Allowed { names, required })
    }
}

/// The tools that an answer may call.
#[derive(Debug, Clone, PartialEq)]
pub struct AllowedCalls {
    /// The tools in the prompt.
    pub tools: Vec<Tool>,
    /// Whether the answer must be a call.
    pub required: bool,
    /// Whether the answer may have several calls.
    pub parallel: bool,
}

impl AllowedCalls {
    /// Restricts `tools` by `choice`. `parallel`: whether the request allows several calls. Fails for a choice of an
    /// unknown tool, or a required call without tools.
    pub fn new(tools: Vec<Tool>, choice: Option<&ToolChoice>, parallel: bool) -> Result<Self, ApiError> {
        let find = |name: &String| {
            tools.iter().find(|tool| tool.name() == name).cloned().ok_or_else(|| {
                ApiError::field("tool_choice", format!("tool_choice names {name:?}, which is none of the tools"))
            })
        };
        let calls = match choice {
            None | Some(ToolChoice::Auto) => Self { tools, required: false, parallel },
            Some(ToolChoice::None) => Self { tools: Vec::new(), required: false, parallel },
            Some(ToolChoice::Required) => Self { tools, required: true, parallel },
            Some(ToolChoice::Named(name)) => Self { tools: vec![find(name)?], required: true, parallel: false },
            Some(ToolChoice::Allowed { names, required }) => {
                Self { tools: names.iter().map(find).collect::<Result<_, _>>()?, required: *required, parallel }
            }
        };
        if calls.required && calls.tools.is_empty() {
            return Err(ApiError::field("tool_choice", "tool_choice wants a call, but there are no tools"));
        }
        Ok(calls)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn choices_have_many_forms() {
        let named = |name: &str| ToolChoice::Named(name.into());
        for (json, expected) in [
            (json!("none"), ToolChoice::None),
            (json!("auto"), ToolChoice::Auto),
            (json!("required"), ToolChoice::Required),
            (json!("any"), ToolChoice::Required),
            (json!({"type": "auto"}), ToolChoice::Auto),
            (json!({"type": "any", "disable_parallel_tool_use": true}), ToolChoice::Required),
            (json!({"type": "function", "function": {"name": "f"}}), named("f")),
            (json!({"function": {"name": "f"}}), named("f")),
            (json!({"type": "function", "name": "f"}), named("f")),
            (json!({"type": "tool", "name": "f"}), named("f")),
            (
                json!({"type": "allowed_tools", "allowed_tools": {"mode": "required",
                    "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "g"}]}}),
                ToolChoice::Allowed { names: vec!["f".into(), "g".into()], required: true },
            ),
            (
                json!({"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]}),
                ToolChoice::Allowed { names: vec!["f".into()], required: false },
            ),
        ] {
            assert_eq!(serde_json::from_value::<ToolChoice>(json.clone()).ok(), Some(expected), "{json}");
        }
        for wrong in [
            json!("f"),
            json!(1),
            json!({}),
            json!({"type": "function"}),
            json!([]),
            json!({"type": "allowed_tools"}),
            json!({"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}),
        ] {
            assert!(serde_json::from_value::<ToolChoice>(wrong.clone()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn choices_leave_some_tools() {
        let tool = |name: &str| Tool::try_from(json!({"type": "function", "function": {"name": name}})).unwrap();
        let tools = [tool("f"), tool("g")];
        let calls = |choice: ToolChoice| {
            let calls = AllowedCalls::new(tools.to_vec(), Some(&choice), true).ok()?;
            Some((
                calls.tools.iter().map(|t| t.name().to_owned()).collect::<Vec<_>>().join(" "),
                calls.required,
                calls.parallel,
            ))
        };
        let some = |names: &str, required, parallel| Some((names.to_owned(), required, parallel));
        assert_eq!(calls(ToolChoice::Auto), some("f g", false, true));
        assert_eq!(calls(ToolChoice::None), some("", false, true));
        assert_eq!(calls(ToolChoice::Required), some("f g", true, true));
        assert_eq!(calls(ToolChoice::Named("g".into())), some("g", true, false));
        assert_eq!(calls(ToolChoice::Named("h".into())), None);
        let allowed = |name: &str, required| ToolChoice::Allowed { names: vec![name.into()], required };
        assert_eq!(calls(allowed("g", true)), some("g", true, true));
        assert_eq!(calls(allowed("g", false)), some("g", false, true));
        assert_eq!(calls(allowed("h", false)), None);
        assert!(AllowedCalls::new(Vec::new(), Some(&ToolChoice::Required), true).is_err());
        assert!(AllowedCalls::new(Vec::new(), Some(&ToolChoice::Auto), true).is_ok());
    }
}
