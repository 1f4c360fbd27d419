//! The coding tools that `launch` starts: the variables and arguments that give each the server's address, the model and the
//! key.

use ArgumentTemplate::{Inner, Text};

/// A coding tool.
pub struct CodingTool {
    /// The name on `launch`'s command line.
    pub name: &'static str,
    /// The name that its makers use.
    pub title: &'static str,
    /// The program.
    pub program: &'static str,
    /// Advice on installing it.
    pub install: &'static str,
    /// Environment variables.
    variables: &'static [(&'static str, ArgumentTemplate)],
    /// The first arguments.
    arguments: &'static [ArgumentTemplate],
    /// Further arguments if the user gives none.
    without_arguments: &'static [&'static str],
}

/// A text with the placeholders `{url}`, `{model}`, `{key}` and `{n_ctx}`.
#[derive(Clone, Copy)]
enum ArgumentTemplate {
    /// The values are inserted as they are.
    Text(&'static str),
    /// The values are inserted within strings of JSON or TOML, escaped.
    Inner(&'static str),
}

/// The server and the model that a tool uses.
pub struct ToolTarget {
    /// The server's address, without a slash at the end.
    pub url: String,
    /// The model's name in requests.
    pub model: String,
    /// The context of the model in tokens.
    pub n_ctx: usize,
    /// The server's key. `None`: it needs none.
    pub key: Option<String>,
}

/// The command that starts a tool.
pub struct ToolCommand {
    /// Environment variables.
    pub variables: Vec<(&'static str, String)>,
    /// The program.
    pub program: &'static str,
    /// The arguments, the user's last.
    pub arguments: Vec<String>,
}

/// The key for a server that needs none, because tools require one.
const NO_KEY: &str = "metal-attention";

const MODEL: ArgumentTemplate = Text("{model}");
const ON: ArgumentTemplate = Text("1");

/// All tools.
pub const TOOLS: &[CodingTool] = &[
    CodingTool {
        name: "claude",
        title: "Claude Code",
        program: "claude",
        install: "npm install -g @anthropic-ai/claude-code",
        variables: &[
            ("ANTHROPIC_BASE_URL", Text("{url}")),
            ("ANTHROPIC_AUTH_TOKEN", Text("{key}")),
            // A key in the environment would be sent in addition to the token.
            ("ANTHROPIC_API_KEY", Text("")),
            ("ANTHROPIC_MODEL", MODEL),
            ("ANTHROPIC_DEFAULT_OPUS_MODEL", MODEL),
            ("ANTHROPIC_DEFAULT_SONNET_MODEL", MODEL),
            ("ANTHROPIC_DEFAULT_HAIKU_MODEL", MODEL),
            ("ANTHROPIC_DEFAULT_FABLE_MODEL", MODEL),
            ("ANTHROPIC_SMALL_FAST_MODEL", MODEL),
            ("CLAUDE_CODE_SUBAGENT_MODEL", MODEL),
            ("CLAUDE_CODE_AUTO_MODE_MODEL", MODEL),
            ("CLAUDE_CODE_BG_CLASSIFIER_MODEL", MODEL),
            ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", Text("{n_ctx}")),
            ("CLAUDE_CODE_MAX_OUTPUT_TOKENS", Text("8192")),
            // This line differs in each conversation and comes first, so that the prefix cache could keep nothing.
            ("CLAUDE_CODE_ATTRIBUTION_HEADER", Text("0")),
            ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", ON),
            ("DISABLE_TELEMETRY", ON),
        ],
        arguments: &[],
        without_arguments: &[],
    },
    CodingTool {
        name: "codex",
        title: "Codex",
        program: "codex",
        install: "npm install -g @openai/codex",
        variables: &[("METAL_ATTENTION_LAUNCH_KEY", Text("{key}"))],
        arguments: &[
            Text("-c"),
            Text("model_provider=\"metal-attention\""),
            Text("-c"),
            Text("model_providers.metal-attention.name=\"metal-attention\""),
            Text("-c"),
            Inner("model_providers.metal-attention.base_url=\"{url}/v1\""),
            Text("-c"),
            Text("model_providers.metal-attention.wire_api=\"responses\""),
            Text("-c"),
            Text("model_providers.metal-attention.env_key=\"METAL_ATTENTION_LAUNCH_KEY\""),
            Text("-c"),
            Text("model_context_window={n_ctx}"),
            Text("-c"),
            Inner("review_model=\"{model}\""),
            Text("-c"),
            Inner("memories.extract_model=\"{model}\""),
            Text("-c"),
            Inner("memories.consolidation_model=\"{model}\""),
            Text("-m"),
            MODEL,
        ],
        without_arguments: &[],
    },
    CodingTool {
        name: "opencode",
        title: "opencode",
        program: "opencode",
        install: "npm install -g opencode-ai",
        variables: &[(
            "OPENCODE_CONFIG_CONTENT",
            Inner(
                "{\"model\":\"metal-attention/{model}\",\"small_model\":\"metal-attention/{model}\",\
                 \"provider\":{\"metal-attention\":{\"npm\":\"@ai-sdk/openai-compatible\",\"name\":\"metal-attention\",\
                 \"options\":{\"baseURL\":\"{url}/v1\",\"apiKey\":\"{key}\"},\
                 \"models\":{\"{model}\":{\"limit\":{\"context\":{n_ctx},\"output\":8192}}}}}}",
            ),
        )],
        arguments: &[],
        without_arguments: &[],
    },
    CodingTool {
        name: "qwen",
        title: "Qwen Code",
        program: "qwen",
        install: "npm install -g @qwen-code/qwen-code",
        variables: &[("OPENAI_BASE_URL", Text("{url}/v1")), ("OPENAI_API_KEY", Text("{key}")), ("OPENAI_MODEL", MODEL)],
        arguments: &[Text("--auth-type"), Text("openai"), Text("--model"), MODEL],
        without_arguments: &[],
    },
    CodingTool {
        name: "goose",
        title: "goose",
        program: "goose",
        install: "see https://goose-docs.ai for its installer",
        variables: &[
            ("GOOSE_PROVIDER", Text("openai")),
            ("GOOSE_MODEL", MODEL),
            ("GOOSE_CONTEXT_LIMIT", Text("{n_ctx}")),
            ("OPENAI_HOST", Text("{url}")),
            ("OPENAI_BASE_PATH", Text("v1/chat/completions")),
            ("OPENAI_API_KEY", Text("{key}")),
        ],
        arguments: &[],
        without_arguments: &["session"],
    },
    CodingTool {
        name: "aider",
        title: "aider",
        program: "aider",
        install: "python -m pip install aider-install && aider-install",
        variables: &[
            ("AIDER_OPENAI_API_BASE", Text("{url}/v1")),
            ("AIDER_OPENAI_API_KEY", Text("{key}")),
            ("AIDER_MODEL", Text("openai/{model}")),
            ("AIDER_WEAK_MODEL", Text("openai/{model}")),
            ("AIDER_EDITOR_MODEL", Text("openai/{model}")),
            ("AIDER_SHOW_MODEL_WARNINGS", Text("false")),
        ],
        arguments: &[],
        without_arguments: &[],
    },
];

/// The tool called `name`.
pub fn tool(name: &str) -> Option<&'static CodingTool> {
    TOOLS.iter().find(|tool| tool.name == name)
}

impl CodingTool {
    /// The command that starts the tool with `target`. `given` are the user's arguments.
    pub fn command(&self, target: &ToolTarget, given: &[String]) -> ToolCommand {
        let variables = self.variables.iter().map(|(name, value)| (*name, value.fill(target))).collect();
        let mut arguments: Vec<_> = self.arguments.iter().map(|template| template.fill(target)).collect();
        if given.is_empty() {
            arguments.extend(self.without_arguments.iter().map(|&argument| argument.to_owned()));
        }
        arguments.extend_from_slice(given);
        ToolCommand { variables, program: self.program, arguments }
    }
}

impl ArgumentTemplate {
    /// Replaces the placeholders. Text of values is not searched for further placeholders.
    fn fill(self, target: &ToolTarget) -> String {
        let (Text(mut rest) | Inner(mut rest)) = self;
        let n_ctx = target.n_ctx.to_string();
        let values = [
            ("{url}", target.url.as_str()),
            ("{model}", &target.model),
            ("{key}", target.key.as_deref().unwrap_or(NO_KEY)),
            ("{n_ctx}", &n_ctx),
        ];
        let mut filled = String::new();
        while let Some(brace) = rest.find('{') {
            let (before, from) = rest.split_at(brace);
            filled.push_str(before);
            if let Some((name, value)) = values.iter().find(|(name, _)| from.starts_with(name)) {
                match self {
                    Text(_) => filled.push_str(value),
                    Inner(_) => filled.push_str(&escaped(value)),
                }
                rest = &from[name.len()..];
            } else {
                filled.push('{');
                rest = &from[1..];
            }
        }
        filled + rest
    }
}

/// `text` as the inside of a string of JSON or TOML.
fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use super::*;

    fn target() -> ToolTarget {
        let (url, model) = ("http://127.0.0.1:8080".to_owned(), "a \"{url}\" b".to_owned());
        ToolTarget { url, model, n_ctx: 32768, key: None }
    }

    #[test]
    fn a_name_cannot_break_out_of_its_string() {
        let command = tool("opencode").unwrap().command(&target(), &[]);
        let config: Value = serde_json::from_str(&command.variables[0].1).unwrap();
        let model = "metal-attention/a \"{url}\" b";
        assert_eq!((&config["model"], &config["small_model"]), (&json!(model), &json!(model)));
        let provider = &config["provider"]["metal-attention"];
        assert_eq!(provider["options"], json!({"baseURL": "http://127.0.0.1:8080/v1", "apiKey": "metal-attention"}));
        assert_eq!(provider["models"]["a \"{url}\" b"]["limit"], json!({"context": 32768, "output": 8192}));

        let command = tool("codex").unwrap().command(&target(), &["exec".into(), "{key}".into()]);
        for pair in command.arguments.chunks(2).take_while(|pair| pair[0] == "-c") {
            assert!(toml::from_str::<toml::Table>(&pair[1]).is_ok(), "{}", pair[1]);
        }
        assert!(command.arguments.contains(&"review_model=\"a \\\"{url}\\\" b\"".to_owned()));
        assert_eq!(command.arguments[command.arguments.len() - 4..], ["-m", "a \"{url}\" b", "exec", "{key}"]);
    }

    #[test]
    fn every_tool_gets_address_model_and_key() {
        let names: BTreeSet<_> = TOOLS.iter().map(|tool| tool.name).collect();
        assert_eq!(names.len(), TOOLS.len());
        let target =
            ToolTarget { url: "http://host:1".into(), model: "name".into(), n_ctx: 40000, key: Some("secret".into()) };
        for tool in TOOLS {
            let command = tool.command(&target, &[]);
            let values: Vec<_> = command.variables.iter().map(|(_, value)| value).chain(&command.arguments).collect();
            for expected in ["http://host:1", "name", "secret"] {
                assert!(values.iter().any(|value| value.contains(expected)), "{}: {expected}", tool.name);
            }
            // Arguments are visible to other users of the machine.
            assert!(!command.arguments.iter().any(|argument| argument.contains("secret")), "{}", tool.name);
        }
    }
}
