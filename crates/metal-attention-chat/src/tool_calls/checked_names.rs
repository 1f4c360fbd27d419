//! Checks that a format of tool calls can carry the names of tools and of their arguments.

use super::ToolFormat;
use super::derived::DerivedArguments;
use crate::Tool;

/// The error for a tool whose name, or an argument's name, the model's format of tool calls cannot carry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the {kind} {name:?} {problem}: give it another name")]
pub struct ToolNameError {
    /// The index of the tool in the list.
    pub tool: usize,
    /// The name that cannot be carried.
    pub name: String,
    /// Whether it is the name of an argument.
    pub is_argument: bool,
    kind: &'static str,
    problem: String,
}

impl ToolFormat {
    /// Checks that calls of `tools` can be written in this format.
    ///
    /// # Errors
    ///
    /// Returns an error for a name with control characters, with a mark of the format, or with characters that end a
    /// name in the format.
    pub fn check_tools(self, tools: &[Tool]) -> Result<(), ToolNameError> {
        for (tool, described) in tools.iter().enumerate() {
            let error = |name: &str, is_argument, problem| ToolNameError {
                tool,
                name: name.to_owned(),
                is_argument,
                kind: if is_argument { "argument" } else { "function's name" },
                problem,
            };
            let name = described.name();
            if let Some(problem) = self.problem_of_function(name) {
                return Err(error(name, false, problem));
            }
            let properties = described.parameters().and_then(|schema| schema.get("properties")?.as_object());
            for name in properties.into_iter().flat_map(|properties| properties.keys()) {
                if let Some(problem) = self.problem_of_argument(name) {
                    return Err(error(name, true, problem));
                }
            }
        }
        Ok(())
    }

    /// The reason why a function cannot have this name; `None` if it can.
    fn problem_of_function(self, name: &str) -> Option<String> {
        if name.contains(char::is_control) {
            return Some("has a control character".into());
        }
        if let Some(mark) = self.syntax().markers().find(|mark| name.contains(mark)) {
            return Some(format!("has {mark:?}, which stands around the model's tool calls"));
        }
        if name.trim() != name {
            return Some("begins or ends with white space".into());
        }
        let ends_names: &[char] = match self {
            Self::FunctionTags | Self::Seed => &['<', '>'],
            Self::Glm => &['<'],
            Self::Harmony => &['<', ' '],
            Self::Derived(_) => &['<', '>', '{', '"', ':'],
            Self::Gemma | Self::MistralList | Self::MistralArgs | Self::DeepSeek | Self::DeepSeekR1 => &['{'],
            Self::Hermes
            | Self::Glm4
            | Self::Llama3
            | Self::TaggedList
            | Self::Nemotron
            | Self::Jamba
            | Self::Pythonic
            | Self::CommandR
            | Self::Json => &[],
        };
        let found = name.chars().find(|c| ends_names.contains(c));
        found.map(|c| format!("has {c:?}, which ends a name in the model's tool calls"))
    }

    /// The reason why an argument cannot have this name; `None` if it can. JSON and Python dictionaries carry any
    /// name.
    fn problem_of_argument(self, name: &str) -> Option<String> {
        let ends_names: &[&str] = match self {
            Self::FunctionTags | Self::Seed => &[">", "\n"],
            Self::Glm => &["</arg_key>", "<arg_value>"],
            Self::Gemma => &["<|\"|>"],
            Self::Derived(format) => match &format.marks.arguments {
                DerivedArguments::Tags(_) => &["<", ">", "\""],
                DerivedArguments::Json | DerivedArguments::Object(_) => return None,
            },
            Self::Hermes
            | Self::Glm4
            | Self::Llama3
            | Self::MistralList
            | Self::MistralArgs
            | Self::DeepSeek
            | Self::DeepSeekR1
            | Self::TaggedList
            | Self::Nemotron
            | Self::Jamba
            | Self::Pythonic
            | Self::CommandR
            | Self::Harmony
            | Self::Json => return None,
        };
        if name.is_empty() || name.trim() != name {
            return Some("is empty, or begins or ends with white space".into());
        }
        if name.contains('\0') {
            return Some("has a control character".into());
        }
        let found = ends_names.iter().find(|end| name.contains(**end));
        found.map(|end| format!("has {end:?}, which ends a name in the model's tool calls"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(format: ToolFormat, name: &str, argument: &str) -> Option<(String, bool)> {
        let tool = json!({"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "properties": {argument: {}}}}});
        let error = format.check_tools(&[Tool::try_from(tool).unwrap()]).err()?;
        Some((error.name, error.is_argument))
    }

    #[test]
    fn names_that_a_format_cannot_carry_are_refused() {
        for (format, name, argument, is_argument) in [
            (ToolFormat::Hermes, "a\0b", "x", false),
            (ToolFormat::Hermes, "a\nb", "x", false),
            (ToolFormat::Hermes, "a<tool_call>", "x", false),
            (ToolFormat::FunctionTags, "a>b", "x", false),
            (ToolFormat::FunctionTags, "f", "x>y", true),
            (ToolFormat::Glm, "f", "x</arg_key>", true),
            (ToolFormat::Gemma, "f{", "x", false),
            (ToolFormat::Gemma, "f", "x<|\"|>", true),
            (ToolFormat::MistralArgs, "f[ARGS]", "x", false),
            (ToolFormat::Harmony, "say now", "x", false),
        ] {
            let refused = if is_argument { argument } else { name };
            assert_eq!(check(format, name, argument), Some((refused.to_owned(), is_argument)), "{format:?} {name:?}");
        }
        for (format, name, argument) in [
            (ToolFormat::Hermes, "say \"now\"", "a\nb"),
            (ToolFormat::Pythonic, "say now", "x y"),
            (ToolFormat::FunctionTags, "say now", "x y"),
            (ToolFormat::Gemma, "get_weather", "a=b"),
        ] {
            assert_eq!(check(format, name, argument), None, "{format:?} {name:?}");
        }
    }
}
