//! A tool of a server.

use serde_json::{Map, Value};

use crate::limits::{MAX_DESCRIPTION, MAX_NAME, MAX_SCHEMA};
use crate::text::{beginning, plain};

/// A tool of a server.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerTool {
    /// Its name on the server.
    pub name: String,
    /// The server's description; empty: there is none.
    pub description: String,
    /// The JSON schema of its arguments, an object.
    pub parameters: Map<String, Value>,
}

impl ServerTool {
    /// Reads a tool of `tools/list`. The error is the reason why it is left out.
    pub(crate) fn read(mut tool: Value) -> Result<Self, String> {
        let name = tool["name"].as_str().unwrap_or_default().to_owned();
        if name.is_empty() || name.len() > MAX_NAME || name.contains(char::is_control) {
            return Err(format!("a tool without a name of 1 to {MAX_NAME} printable bytes is left out"));
        }
        let description =
            beginning(&plain(tool["description"].as_str().unwrap_or_default()), MAX_DESCRIPTION).to_owned();
        let schema = tool.get_mut("inputSchema").map(Value::take).unwrap_or_default();
        let Value::Object(parameters) = schema else {
            return Err(format!("the tool {name} is left out: its inputSchema is no object"));
        };
        let length = serde_json::to_vec(&parameters).map_or(usize::MAX, |schema| schema.len());
        if length > MAX_SCHEMA {
            return Err(format!(
                "the tool {name} is left out: its inputSchema takes {length} bytes of {MAX_SCHEMA} that one may have"
            ));
        }
        Ok(Self { name, description, parameters })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tools_are_limited_in_size() {
        let tool = |name: &str, description: &str, schema: Value| {
            ServerTool::read(json!({"name": name, "description": description, "inputSchema": schema}))
        };
        let good = tool("echo", &format!("a\u{1b}{}", "b".repeat(9000)), json!({"type": "object"})).unwrap();
        assert_eq!((good.name.as_str(), good.description.len()), ("echo", MAX_DESCRIPTION));
        assert!(!good.description.contains('\u{1b}'));
        for (name, schema) in [
            ("", json!({})),
            ("a\nb", json!({})),
            (&*"a".repeat(129), json!({})),
            ("a", json!(null)),
            ("a", json!([])),
            ("a", json!({"x": "y".repeat(MAX_SCHEMA)})),
        ] {
            assert!(tool(name, "", schema).is_err(), "{name}");
        }
        assert!(ServerTool::read(json!(1)).is_err());
    }
}
