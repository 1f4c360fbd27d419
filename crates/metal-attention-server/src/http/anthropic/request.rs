//! The request of `/v1/messages`, from JSON to a job.

use metal_attention::sampling::SamplerOptions;
use metal_attention_chat::{ReasoningEffort, Tool};
use metal_attention_grammar::ResponseFormat;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::content::Content;
use super::conversation::{InputMessage, conversation};
use super::unsupported;
use crate::http::ApiError;
use crate::http::body::{FromJson, Object, OnlyObject};
use crate::http::job::chat::{ChatJob, PromptEnd};
use crate::http::job::generation::GenerationSettings;
use crate::http::job::reasoning::ReasoningRequest;
use crate::http::job::response_format::RequestedFormat;
use crate::http::job::sampling::SamplingFields;
use crate::http::job::stop::Stop;
use crate::http::job::tool_choice::{self, AllowedCalls};
use crate::http::notes::Notes;
use crate::http::openapi::all_of;
use crate::http::pictures::Conversation;

/// The fields of a request for a message, in addition to the sampling options.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct MessagesFields {
    /// The model's name. With an unknown one, or without it, a server of one model answers with that.
    model: Option<String>,
    /// The conversation, the first message first.
    #[schema(value_type = Vec<super::schema::MessageParam>, min_items = 1)]
    messages: Vec<OnlyObject<InputMessage>>,
    /// Instructions for the conversation: a text, or blocks of text.
    #[schema(value_type = Option<super::schema::Content>)]
    system: Option<Content>,
    /// Maximum generated tokens, reasoning included; default: limited by the context only.
    max_tokens: Option<usize>,
    /// End the text before any of these strings.
    stop_sequences: Option<Stop>,
    /// The tools that the model may call. Tools of other types than `custom`, which Anthropic's servers run, are
    /// ignored.
    #[schema(value_type = Option<Vec<ToolParam>>)]
    tools: Option<Vec<OnlyObject<ToolParam>>>,
    /// Whether the model calls a tool, and which.
    #[schema(value_type = Option<ToolChoice>)]
    tool_choice: Option<OnlyObject<ToolChoice>>,
    /// Whether the model reasons, and the maximum number of tokens.
    #[schema(value_type = Option<Thinking>)]
    thinking: Option<OnlyObject<Thinking>>,
    /// The effort of reasoning, and the response format.
    #[schema(value_type = Option<OutputConfig>)]
    output_config: Option<OnlyObject<OutputConfig>>,
    /// An alias of `output_config.format`.
    output_format: Option<OutputFormat>,
    /// Send the message as it is generated, as server-sent events.
    stream: Option<bool>,
    /// The seed of the sampler. Without it, or below 0: random.
    seed: Option<i64>,
    /// Additional variables of the model's chat template.
    #[schema(value_type = Option<std::collections::BTreeMap<String, Value>>)]
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// A tool that the model may call.
#[derive(Debug, Clone, Deserialize, ToSchema)]
struct ToolParam {
    /// `custom`, also where it is missing.
    #[serde(rename = "type")]
    kind: Option<String>,
    /// Its name.
    name: Option<String>,
    /// Its description.
    description: Option<String>,
    /// The JSON schema of its input.
    #[schema(value_type = Option<std::collections::BTreeMap<String, Value>>)]
    input_schema: Option<Map<String, Value>>,
    /// Whether objects in the input have exactly the declared properties, as in a JSON schema for an answer.
    strict: Option<bool>,
}

/// Whether the model calls a tool, and which.
#[derive(Debug, Clone, Deserialize, ToSchema)]
struct ToolChoice {
    /// Whether the model calls a tool.
    #[serde(rename = "type")]
    kind: ToolChoiceKind,
    /// The tool's name, for the kind `tool`.
    name: Option<String>,
    /// Whether the message ends with its first call.
    disable_parallel_tool_use: Option<bool>,
}

/// Whether the model calls a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ToolChoiceKind {
    /// The model decides.
    Auto,
    /// At least one call.
    Any,
    /// A call of the named tool.
    Tool,
    /// No call.
    None,
}

/// Whether the model reasons, and the maximum number of tokens.
#[derive(Debug, Clone, Deserialize, ToSchema)]
struct Thinking {
    /// Whether the model reasons.
    #[serde(rename = "type")]
    kind: ThinkingKind,
    /// Maximum tokens of reasoning; the server then ends it.
    budget_tokens: Option<usize>,
    /// Whether the message contains the reasoning.
    display: Option<Display>,
}

/// Whether the model reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum ThinkingKind {
    /// The model reasons.
    Enabled,
    /// The model's template decides.
    Adaptive,
    /// The model's template decides.
    BetweenTools,
    /// The model does not reason.
    Disabled,
}

/// Whether a message contains the reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Display {
    /// It contains all of them, not a summary.
    Summarized,
    /// It contains only their signature, which encodes them for the next turn.
    Omitted,
}

/// The effort of reasoning, and the response format.
#[derive(Debug, Clone, Deserialize, ToSchema)]
struct OutputConfig {
    /// The effort: `low`, `medium`, `high`, `xhigh` or `max`.
    #[schema(value_type = Option<super::schema::EffortName>)]
    effort: Option<ReasoningEffort>,
    /// The response format.
    format: Option<OutputFormat>,
}

/// A response format.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
enum OutputFormat {
    /// JSON that follows a schema.
    JsonSchema {
        /// The schema.
        #[schema(value_type = std::collections::BTreeMap<String, Value>)]
        schema: Map<String, Value>,
    },
}

impl MessagesFields {
    /// The tools that the model may call. Notes the types of ignored tools.
    fn calls(&self, notes: &mut Notes) -> Result<AllowedCalls, ApiError> {
        let mut tools = Vec::new();
        for (i, OnlyObject(tool)) in self.tools.iter().flatten().enumerate() {
            match tool.kind.as_deref() {
                None | Some("custom") => tools.push(tool.tool(i)?),
                Some(other) => notes.ignored(format!("tools.{other}")),
            }
        }
        let choice = self.tool_choice.as_ref().map(|OnlyObject(choice)| choice);
        let parallel = choice.is_none_or(|choice| !choice.disable_parallel_tool_use.unwrap_or(false));
        let choice = choice.map(ToolChoice::choice).transpose()?;
        AllowedCalls::new(tools, choice.as_ref(), parallel)
    }

    /// The response format, with the field that requires it.
    fn response_format(&self) -> Option<RequestedFormat> {
        let format = self.output_config.as_ref().and_then(|OnlyObject(config)| config.format.as_ref());
        let formats = [("output_config.format.schema", format), ("output_format.schema", self.output_format.as_ref())];
        formats.into_iter().find_map(|(field, format)| match format? {
            OutputFormat::JsonSchema { schema } => {
                Some((field, ResponseFormat::JsonSchema { schema: Value::Object(schema.clone()), strict: None }))
            }
        })
    }

    /// The settings of reasoning.
    fn reasoning(&self) -> ReasoningRequest {
        let thinking = self.thinking.as_ref().map(|OnlyObject(thinking)| thinking);
        let switch = thinking.and_then(|thinking| match thinking.kind {
            ThinkingKind::Enabled => Some(("thinking", true)),
            ThinkingKind::Disabled => Some(("thinking", false)),
            ThinkingKind::Adaptive | ThinkingKind::BetweenTools => None,
        });
        let budget = thinking.and_then(|thinking| thinking.budget_tokens);
        let effort = self.output_config.as_ref().and_then(|OnlyObject(config)| config.effort);
        ReasoningRequest {
            switch,
            effort: effort.map(|effort| ("output_config.effort", effort)),
            budget: budget.map(|budget| ("thinking.budget_tokens", budget)),
            variables: self.chat_template_kwargs.clone().unwrap_or_default(),
        }
    }
}

impl ToolParam {
    /// Converts tool number `i` to a function.
    fn tool(&self, i: usize) -> Result<Tool, ApiError> {
        let Some(name) = self.name.as_deref().filter(|name| !name.is_empty()) else {
            return Err(ApiError::field(format!("tools[{i}].name"), format!("tools[{i}] has no name")));
        };
        let mut function = json!({"name": name});
        let fields = [
            ("description", self.description.clone().map(Value::from)),
            ("parameters", self.input_schema.clone().map(Value::from)),
            ("strict", self.strict.map(Value::from)),
        ];
        for (field, value) in fields {
            if let Some(value) = value {
                function[field] = value;
            }
        }
        Tool::try_from(json!({"type": "function", "function": function}))
            .map_err(|error| ApiError::field(format!("tools[{i}]"), format!("tools[{i}]: {error}")))
    }
}

impl ToolChoice {
    /// Converts the choice to the form that all interfaces share. Fails for the type `tool` without a name.
    fn choice(&self) -> Result<tool_choice::ToolChoice, ApiError> {
        Ok(match self.kind {
            ToolChoiceKind::Auto => tool_choice::ToolChoice::Auto,
            ToolChoiceKind::Any => tool_choice::ToolChoice::Required,
            ToolChoiceKind::None => tool_choice::ToolChoice::None,
            ToolChoiceKind::Tool => {
                let missing =
                    || ApiError::field("tool_choice.name", "tool_choice of type \"tool\" needs the tool's name");
                tool_choice::ToolChoice::Named(self.name.clone().ok_or_else(missing)?)
            }
        })
    }
}

/// A request for a message.
pub struct MessagesRequest {
    /// The name of the model; `None`: the default one.
    pub model: Option<String>,
    /// The conversation and how to continue it.
    pub job: ChatJob,
    /// Whether the response leaves out the reasoning.
    pub omits_reasoning: bool,
}

impl FromJson for MessagesRequest {
    const MAY_HAVE_PICTURES: bool = true;

    fn picture_bytes(&self) -> usize {
        self.job.conversation.picture_bytes()
    }

    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        let mut notes = unsupported::check(object)?;
        let sampling = SamplingFields::read(object, &mut notes)?;
        // Checked here, since a request that only counts tokens does not use the values.
        sampling.apply(&mut SamplerOptions::default())?;
        let mut fields: MessagesFields = object.parse()?;
        let system = fields.system.take().unwrap_or_default();
        let messages = std::mem::take(&mut fields.messages).into_iter().map(|OnlyObject(message)| message);
        let messages = conversation(system, messages.collect(), &mut notes)?;
        let generation = GenerationSettings {
            sampling,
            // A seed below 0 means a random one.
            seed: fields.seed.and_then(|seed| u64::try_from(seed).ok()),
            stop: fields.stop_sequences.take().map(Stop::into_strings).unwrap_or_default(),
            max_tokens: fields.max_tokens,
            stream: fields.stream.unwrap_or(false),
            ..Default::default()
        };
        let job = ChatJob {
            allowed_calls: fields.calls(&mut notes)?,
            response_format: fields.response_format(),
            reasoning: fields.reasoning(),
            prompt_end: PromptEnd::after(&messages),
            generation,
            drop_oldest: None,
            messages_field: "messages",
            notes,
            conversation: Conversation::new(messages),
        };
        let omits_reasoning =
            fields.thinking.is_some_and(|OnlyObject(thinking)| thinking.display == Some(Display::Omitted));
        Ok(Self { model: fields.model, job, omits_reasoning })
    }
}

all_of!(MessagesRequest, MessagesFields, SamplingFields);

#[cfg(test)]
mod tests {
    use super::*;

    fn read(more: Value) -> Result<MessagesRequest, ApiError> {
        let mut request = json!({"messages": [{"role": "user", "content": "Hello"}]});
        let Value::Object(more) = more else { panic!("{more} is no object") };
        request.as_object_mut().unwrap().extend(more);
        MessagesRequest::from_json(&Object::split(request.to_string().as_bytes())?)
    }

    fn refused(more: Value) -> String {
        read(more).err().unwrap().message().to_owned()
    }

    #[test]
    fn fields_become_a_job() {
        let request =
            read(json!({"model": "m", "max_tokens": 7, "stop_sequences": ["a", "b"], "stream": true, "seed": 3}));
        let MessagesRequest { model, job, omits_reasoning } = request.unwrap();
        assert_eq!((model.as_deref(), omits_reasoning, job.prompt_end), (Some("m"), false, PromptEnd::Answer));
        let GenerationSettings { max_tokens, stop, stream, seed, .. } = job.generation;
        assert_eq!((max_tokens, stop, stream, seed), (Some(7), vec!["a".into(), "b".into()], true, Some(3)));
        let job = read(json!({"max_tokens": null, "seed": -1, "system": null, "tools": null})).unwrap().job;
        assert_eq!((job.generation.max_tokens, job.generation.seed, job.response_format), (None, None, None));
        assert_eq!(job.notes, Notes::default());
    }

    #[test]
    fn tools_become_functions() {
        let schema = json!({"$schema": "x", "type": "object", "properties": {}});
        let custom = json!({"type": "custom", "name": "f", "description": "d", "input_schema": schema, "strict": true,
            "cache_control": {"type": "ephemeral"}, "eager_input_streaming": true, "input_examples": [{}]});
        let tools = json!([custom, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, {"name": "g"},
            {"type": "mcp_toolset", "mcp_server_name": "s"}]);
        let calls = |choice: Value| read(json!({"tools": tools, "tool_choice": choice})).map(|request| request.job);
        let job = calls(json!(null)).unwrap();
        let f = json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": schema, "strict": true}});
        let g = json!({"type": "function", "function": {"name": "g"}});
        let of = |tools: &[&Value], required, parallel| AllowedCalls {
            tools: tools.iter().map(|&tool| Tool::try_from(tool.clone()).unwrap()).collect(),
            required,
            parallel,
        };
        assert_eq!(job.allowed_calls, of(&[&f, &g], false, true));
        let mut notes = Notes::default();
        notes.ignored("tools.web_search_20250305");
        notes.ignored("tools.mcp_toolset");
        assert_eq!(job.notes, notes);
        for (choice, expected) in [
            (json!({"type": "auto"}), of(&[&f, &g], false, true)),
            (json!({"type": "auto", "disable_parallel_tool_use": true}), of(&[&f, &g], false, false)),
            (json!({"type": "any"}), of(&[&f, &g], true, true)),
            (json!({"type": "any", "disable_parallel_tool_use": true}), of(&[&f, &g], true, false)),
            (json!({"type": "tool", "name": "g"}), of(&[&g], true, false)),
            (json!({"type": "none"}), of(&[], false, true)),
        ] {
            assert_eq!(calls(choice.clone()).unwrap().allowed_calls, expected, "{choice}");
        }
        let refused = |choice: Value| calls(choice).err().unwrap().message().to_owned();
        assert_eq!(refused(json!({"type": "tool"})), "tool_choice of type \"tool\" needs the tool's name");
        let unknown = "tool_choice names \"web_search\", which is none of the tools";
        assert_eq!(refused(json!({"type": "tool", "name": "web_search"})), unknown);
        assert_eq!(self::refused(json!({"tools": [{"description": "d"}]})), "tools[0] has no name");
        let none = "tool_choice wants a call, but there are no tools";
        assert_eq!(self::refused(json!({"tools": [], "tool_choice": {"type": "any"}})), none);
    }

    #[test]
    fn reasoning_has_a_switch_a_budget_and_an_effort() {
        let thinking = |more: Value| read(more).unwrap().job.reasoning;
        let of = |switch: Option<bool>, effort: Option<ReasoningEffort>, budget: Option<usize>| ReasoningRequest {
            switch: switch.map(|on| ("thinking", on)),
            effort: effort.map(|effort| ("output_config.effort", effort)),
            budget: budget.map(|budget| ("thinking.budget_tokens", budget)),
            variables: Map::new(),
        };
        let enabled = json!({"thinking": {"type": "enabled", "budget_tokens": 1024}});
        assert_eq!(thinking(enabled), of(Some(true), None, Some(1024)));
        let adaptive = json!({"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}});
        assert_eq!(thinking(adaptive), of(None, Some(ReasoningEffort::Xhigh), None));
        assert_eq!(thinking(json!({"thinking": {"type": "disabled"}})), of(Some(false), None, None));
        assert_eq!(thinking(json!({"thinking": null, "output_config": {"effort": null}})), of(None, None, None));
        let omitted = read(json!({"thinking": {"type": "adaptive", "display": "omitted"}})).unwrap();
        assert!(omitted.omits_reasoning);
        assert!(refused(json!({"thinking": {"type": "maybe"}})).starts_with("thinking.type: unknown variant `maybe`"));
        assert!(
            refused(json!({"thinking": {"type": "enabled", "budget_tokens": -1}}))
                .starts_with("thinking.budget_tokens")
        );
    }

    #[test]
    fn output_formats_become_schemas() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
        let format = json!({"type": "json_schema", "schema": schema});
        let response_format = |more: Value| read(more).unwrap().job.response_format;
        let expected = ResponseFormat::JsonSchema { schema: schema.clone(), strict: None };
        let config = json!({"output_config": {"format": format, "task_budget": {"type": "tokens"}}});
        assert_eq!(response_format(config), Some(("output_config.format.schema", expected.clone())));
        assert_eq!(response_format(json!({"output_format": format})), Some(("output_format.schema", expected)));
        assert!(refused(json!({"output_format": {"type": "xml"}})).contains("unknown variant `xml`"));
    }

    #[test]
    fn other_fields_are_ignored_or_refused() {
        let job =
            read(json!({"metadata": {"user_id": "u"}, "service_tier": "auto", "container": null, "mcp_servers": [],
            "context_management": {"edits": [{}]}, "cache_control": {"type": "ephemeral"}, "whatever": 1}));
        let mut notes = Notes::default();
        for name in ["metadata", "service_tier", "cache_control", "context_management"] {
            notes.ignored(name);
        }
        assert_eq!(job.unwrap().job.notes, notes);
        for (more, field) in [
            (json!({"mcp_servers": [{"type": "url", "url": "https://mcp.example"}]}), "mcp_servers"),
            (json!({"container": "c"}), "container"),
            (json!({"stop": "x"}), "stop"),
            (json!({"n": 2}), "n"),
        ] {
            assert!(refused(more).starts_with(&format!("{field} is not supported: ")), "{field}");
        }
        assert!(refused(json!({"top_p": 2})).starts_with("top_p is 2, but it must be "));
        for more in [
            json!({"thinking": ["enabled"]}),
            json!({"tools": [["custom", "f"]]}),
            json!({"messages": [["user", "a"]]}),
        ] {
            assert!(refused(more.clone()).contains("expected an object"), "{more}");
        }
        assert_eq!(refused(json!({"max_tokens": -1})), "max_tokens: invalid value: integer `-1`, expected usize");
        assert!(refused(json!({"stop_sequences": vec!["x"; 33]})).starts_with("stop_sequences: more than 32 strings"));
    }
}
