//! [`ChatTemplate`]: renders conversations with the chat template of a model. On loading, the template is probed: it
//! is rendered with test messages to find out in which form it accepts tool calls and empty contents, and in which
//! format the model writes tool calls.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use metal_attention_gguf::Metadata;
use metal_attention_tokenizer::Tokenizer;
use serde_json::{Map, Value as Json, json};

use crate::environment::NOW;
use crate::exact_json;
use crate::history::{completed, instructs, variants};
use crate::literals::{Marker, PrivateUse};
use crate::program::Program;
use crate::tool_calls::{TemplateToolSupport, ToolPlacement, derived, with_tools_as_text};
use crate::{Message, Prompt, ReasoningMarkers, Role, TemplateError, Tool, ToolCall, ToolCallParser, ToolFormat};

/// The names of the templates in errors.
const DEFAULT: &str = "chat template";
const TOOL_USE: &str = "chat template for tools";

/// The template for models that have none.
const FALLBACK: &str = "\
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}{{ 'User: ' + message.content }}
{%- else %}{{ 'Assistant: ' + message.content }}
{%- endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}";

/// A name that files of RWKV models may have in place of a template, and the template that it stands for.
const RWKV_WORLD: &str = "rwkv-world";
const RWKV_WORLD_TEMPLATE: &str = "\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ 'System: ' }}
{%- elif message.role == 'user' %}{{ 'User: ' }}
{%- else %}{{ 'Assistant: ' }}
{%- endif %}{{ message.content | trim + '\n\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}";

/// A chat template that renders conversations to prompts.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    program: Arc<Program>,
    source: String,
    /// The variant of the template for conversations with tools, and its source.
    tool_use: Option<(Arc<Program>, String)>,
    /// The tokenizer with the control tokens, whose spelling in messages must stay plain text.
    tokenizer: Option<Arc<Tokenizer>>,
    /// The variables with the spelling of special tokens, such as `bos_token`.
    tokens: Map<String, Json>,
    is_fallback: bool,
    /// Whether an assistant message without a text is passed an empty text, because the template does not handle
    /// `none`.
    null_content_is_empty: bool,
    /// Whether the template takes the arguments of calls as JSON text, not as an object.
    arguments_are_text: bool,
    tool_format: ToolFormat,
}

/// A conversation to render, with options.
#[derive(Debug, Clone, Copy, Default)]
pub struct RenderRequest<'a> {
    /// The messages, oldest first.
    pub messages: &'a [Message],
    /// The tools that the model may call.
    pub tools: &'a [Tool],
    /// Whether the prompt ends with the header of a new answer.
    pub add_generation_prompt: bool,
    /// Additional variables of the template, such as `enable_thinking`.
    pub variables: Option<&'a Map<String, Json>>,
    /// The time that the template may write; `None` for the current time.
    pub now: Option<SystemTime>,
}

impl ChatTemplate {
    /// The template in a file's metadata: `tokenizer.chat_template`, and its variant `tool_use` if there is one.
    /// `None` if the file has no template.
    pub fn from_metadata(metadata: &Metadata, tokenizer: Arc<Tokenizer>) -> Result<Option<Self>, TemplateError> {
        let named = |name: &str| metadata.str(&format!("tokenizer.chat_template.{name}"));
        let tool_use = named("tool_use")?;
        let default = metadata.str("tokenizer.chat_template")?.or(named("default")?).or(tool_use);
        let Some(default) = default.map(|source| if source == RWKV_WORLD { RWKV_WORLD_TEMPLATE } else { source })
        else {
            return Ok(None);
        };
        let mut template = Self::compile(default, Some(tokenizer))?;
        if let Some(tool_use) = tool_use {
            template.tool_use = Some((Arc::new(Program::compile(TOOL_USE, tool_use)?), tool_use.to_owned()));
        }
        template.probe()?;
        Ok(Some(template))
    }

    /// The template of a model. If it has none, or one that does not compile, a warning is logged and the result is
    /// [`fallback`](Self::fallback).
    pub fn for_model(metadata: &Metadata, tokenizer: Arc<Tokenizer>) -> Self {
        let problem = match Self::from_metadata(metadata, Arc::clone(&tokenizer)) {
            Ok(Some(template)) => return template,
            Ok(None) => "the model has no chat template".to_owned(),
            Err(error) => error.to_string(),
        };
        tracing::warn!("{problem}: messages become lines of \"User:\" and \"Assistant:\"");
        Self::fallback(tokenizer)
    }

    /// A template that writes lines of "User: " and "Assistant: ", which any model can continue.
    pub fn fallback(tokenizer: Arc<Tokenizer>) -> Self {
        let template = Self::compile(FALLBACK, Some(tokenizer)).expect("the fallback template compiles");
        Self { is_fallback: true, ..template }
    }

    /// Compiles a template without a model: there are no control tokens and no variables like `bos_token`.
    pub fn new(source: &str) -> Result<Self, TemplateError> {
        Self::with_tokenizer(source, None)
    }

    /// Compiles a template for the vocabulary of `tokenizer`.
    pub fn with_tokenizer(source: &str, tokenizer: Option<Arc<Tokenizer>>) -> Result<Self, TemplateError> {
        let mut template = Self::compile(source, tokenizer)?;
        template.probe()?;
        Ok(template)
    }

    fn compile(source: &str, tokenizer: Option<Arc<Tokenizer>>) -> Result<Self, TemplateError> {
        let program = Arc::new(Program::compile(DEFAULT, source)?);
        let mut tokens = Map::new();
        if let Some(tokenizer) = &tokenizer {
            let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id));
            for (name, id) in
                [("bos_token", tokenizer.bos()), ("eos_token", tokenizer.eos()), ("unk_token", tokenizer.unknown())]
            {
                tokens.extend(text(id).map(|text| (name.to_owned(), text.into())));
            }
        }
        let source = source.to_owned();
        Ok(Self {
            program,
            source,
            tool_use: None,
            tokenizer,
            tokens,
            is_fallback: false,
            null_content_is_empty: false,
            arguments_are_text: false,
            tool_format: ToolFormat::Json,
        })
    }

    /// Sets a variable of the template, such as `bos_token`.
    #[must_use]
    pub fn with_token(mut self, name: &str, text: &str) -> Self {
        self.tokens.insert(name.to_owned(), text.into());
        self
    }

    /// The source of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether this is the fallback, because the model has no working template.
    pub fn is_fallback(&self) -> bool {
        self.is_fallback
    }

    /// The strings that end an answer, for a model without a token that does. Only the fallback has some.
    pub fn stop_strings(&self) -> &'static [&'static str] {
        if self.is_fallback { &["\nUser:", "\nAssistant:"] } else { &[] }
    }

    /// Whether the template itself describes tools to the model. If not, [`render`](Self::render) adds a description
    /// as text, which models that were not trained with tools follow badly.
    pub fn knows_tools(&self) -> bool {
        self.takes_functions_as_text()
            || TemplateToolSupport::of_template(self.source_for_tools()).tools != ToolPlacement::Nowhere
    }

    /// The format in which the model writes tool calls.
    pub fn tool_format(&self) -> ToolFormat {
        self.tool_format
    }

    /// The markers of the model's reasoning; `None` if it is not known to reason, or if its reasoning is a message of
    /// its own ([`ToolFormat::Harmony`]).
    pub fn reasoning(&self) -> Option<ReasoningMarkers> {
        let of_model = || ReasoningMarkers::of_model(&self.source, self.tokenizer.as_deref());
        if self.tool_format() == ToolFormat::Harmony { None } else { of_model() }
    }

    /// The markers of the reasoning within which the answer to `prompt` begins; `None` if the prompt does not end with
    /// the start of reasoning.
    pub fn reasoning_begun(&self, prompt: &str) -> Option<ReasoningMarkers> {
        self.reasoning().filter(|markers| markers.begun_in(prompt))
    }

    /// A parser for the model's answer to `prompt`, which this template has rendered with `tools`.
    pub fn answer_parser(&self, prompt: &str, tools: &[Tool]) -> ToolCallParser {
        let parser = ToolCallParser::new(self.tool_format(), tools);
        match self.reasoning() {
            Some(markers) => parser.with_reasoning(markers, markers.begun_in(prompt)),
            None => parser,
        }
    }

    /// The source of the template that renders conversations with tools.
    pub(crate) fn source_for_tools(&self) -> &str {
        self.tool_use.as_ref().map_or(&self.source, |(_, source)| source)
    }

    /// Whether the template reads a variable of this name.
    pub fn reads(&self, name: &str) -> bool {
        let tool_use = self.tool_use.as_ref().map(|(program, _)| program);
        [Some(&self.program), tool_use].into_iter().flatten().any(|program| program.reads(name))
    }

    /// Renders a conversation. Tools that the template does not support are described as text. If the template refuses
    /// the conversation, or leaves out its system messages, variants of it are tried (`history.rs`).
    ///
    /// Returns the error of the variant that got furthest if the template accepts none.
    pub fn render(&self, request: &RenderRequest<'_>) -> Result<Prompt, TemplateError> {
        let messages = completed(request.messages);
        let mut tried: Vec<Vec<Message>> = Vec::new();
        let mut incomplete = None;
        let mut furthest: Option<TemplateError> = None;
        for variant in variants(&messages) {
            if tried.contains(&variant) {
                continue;
            }
            let request = RenderRequest { messages: &variant, ..*request };
            match self.render_variant(&request) {
                Ok(prompt) if self.has_instructions(&messages, &request, &prompt) => return Ok(prompt),
                Ok(prompt) => drop(incomplete.get_or_insert(prompt)),
                Err(error) => {
                    let Some(line) = error.line_of_conversation() else { return Err(error) };
                    if furthest.as_ref().is_none_or(|e| e.line_of_conversation().is_some_and(|before| line > before)) {
                        furthest = Some(error);
                    }
                }
            }
            tried.push(variant);
        }
        match (incomplete, furthest) {
            (Some(prompt), _) => Ok(prompt),
            (None, Some(error)) => Err(error),
            (None, None) => self.render_variant(request),
        }
    }

    /// Whether `prompt` contains the texts of all system messages. `request` is the variant of the conversation
    /// `messages` that `prompt` was rendered from. A text that is missing may be an option that the template
    /// interprets; so if the variant is rendered with plain words as system messages and these appear, that is
    /// sufficient.
    fn has_instructions(&self, messages: &[Message], request: &RenderRequest<'_>, prompt: &Prompt) -> bool {
        let found = |texts: &[&str], mut rest: &str| {
            texts.iter().all(|text| match rest.find(text.trim()) {
                Some(at) => {
                    rest = &rest[at + text.trim().len()..];
                    true
                }
                None => false,
            })
        };
        let texts: Vec<_> = messages.iter().filter(|message| instructs(message)).map(Message::text).collect();
        if found(&texts, &prompt.text) {
            return true;
        }
        let n_system = request.messages.iter().filter(|message| instructs(message)).count();
        if n_system == 0 {
            return false;
        }
        let words: Vec<_> = (0..n_system).map(|i| format!("instruction{i}.")).collect();
        let mut words_left = words.iter();
        let probe = |message: &Message| match message.role {
            Role::System | Role::Developer => Message { content: words_left.next().cloned(), ..message.clone() },
            Role::User | Role::Assistant | Role::Tool => message.clone(),
        };
        let messages: Vec<_> = request.messages.iter().map(probe).collect();
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        self.render_variant(&RenderRequest { messages: &messages, ..*request })
            .is_ok_and(|prompt| found(&words, &prompt.text))
    }

    /// Appends text of a message to `prompt`, with the spellings of control tokens recorded as literals.
    pub(crate) fn append_text(&self, prompt: &mut Prompt, text: &str) {
        let starts = self.tokenizer.as_ref().map_or(Vec::new(), |tokenizer| tokenizer.control_starts(text));
        prompt.literals.extend(starts.into_iter().map(|start| prompt.text.len() + start));
        prompt.text += text;
    }

    /// Renders one variant of a conversation. Tools that the template does not support are described as text.
    pub(crate) fn render_variant(&self, request: &RenderRequest<'_>) -> Result<Prompt, TemplateError> {
        let support = TemplateToolSupport::of_template(self.source_for_tools());
        if self.takes_functions_as_text() {
            return self.render_known(request, None);
        }
        if support.suffices(request.messages, request.tools) {
            return self.render_known(request, None);
        }
        let messages = with_tools_as_text(support, request.messages, request.tools);
        let tools = if support.tools == ToolPlacement::Variable { request.tools } else { &[] };
        let in_message = support.in_system_message(request.tools).filter(|_| !request.tools.is_empty());
        self.render_known(&RenderRequest { messages: &messages, tools, ..*request }, in_message.as_ref())
    }

    /// Renders a conversation in which everything is supported by the template. `system_tools` are tools to be put
    /// into the first message. If the template fails on tools without description or parameters, it is tried again
    /// with empty ones.
    fn render_known(&self, request: &RenderRequest<'_>, system_tools: Option<&Json>) -> Result<Prompt, TemplateError> {
        let result = self.render_as_it_is(request, system_tools);
        let completed: Vec<_> = request.tools.iter().map(Tool::completed).collect();
        if !matches!(result, Err(TemplateError::Render { .. })) || completed.iter().all(Option::is_none) {
            return result;
        }
        let tools =
            request.tools.iter().zip(completed).map(|(tool, completed)| completed.unwrap_or_else(|| tool.clone()));
        let tools: Vec<_> = tools.collect();
        self.render_as_it_is(&RenderRequest { tools: &tools, ..*request }, system_tools)
    }

    /// Renders a conversation unchanged, with marks around untrusted control tokens.
    fn render_as_it_is(
        &self,
        request: &RenderRequest<'_>,
        system_tools: Option<&Json>,
    ) -> Result<Prompt, TemplateError> {
        let mut taken = PrivateUse::default();
        taken.add(&self.source);
        for message in request.messages {
            texts(message).for_each(|text| taken.add(text));
            message.tool_calls.iter().for_each(|call| taken.add_value(&self.arguments(call)));
        }
        request.tools.iter().for_each(|tool| taken.add_value(tool.as_value()));
        if let Some(tools) = system_tools {
            taken.add_value(tools);
        }
        for (name, value) in request.variables.into_iter().flatten() {
            taken.add(name);
            taken.add_value(value);
        }
        let marker = Marker::new(self.tokenizer.as_deref(), &taken);
        let mut context = self.context(request, &marker);
        if let (Some(tools), Some(first)) = (system_tools, context.get_mut("messages").and_then(|m| m.get_mut(0))) {
            first["tools"] = marker.mark_value(tools);
        }
        let tool_use = self.tool_use.as_ref().filter(|_| !request.tools.is_empty());
        let program = tool_use.map_or(&self.program, |(program, _)| program);
        Ok(marker.prompt(&program.run(&context)?))
    }

    /// The variables of a rendering.
    fn context(&self, request: &RenderRequest<'_>, marker: &Marker<'_>) -> Map<String, Json> {
        let mut context = self.tokens.clone();
        let tools: Vec<_> = request.tools.iter().map(|tool| marker.mark_value(tool.as_value())).collect();
        let fields = MessageFields::of(self.source_for_tools());
        context.insert("messages".into(), request.messages.iter().map(|m| self.message(m, fields, marker)).collect());
        context.insert("tools".into(), if tools.is_empty() { Json::Null } else { tools.clone().into() });
        context.insert("documents".into(), Json::Null);
        context.insert("add_generation_prompt".into(), request.add_generation_prompt.into());
        if self.takes_functions_as_text() {
            let text = |tools: &[Json]| serde_json::to_string_pretty(tools).unwrap_or_default();
            context.insert("functions".into(), if tools.is_empty() { "".into() } else { text(&tools).into() });
            context.insert("datetime".into(), date_and_time(request.now).into());
        }
        for (name, value) in request.variables.into_iter().flatten() {
            context.insert(name.clone(), marker.mark_value(value));
        }
        if let Some(now) = request.now {
            let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
            context.insert(NOW.into(), seconds.into());
        }
        context
    }

    /// The JSON of a message as templates expect it: the arguments of calls are objects, and missing fields are
    /// absent.
    fn message(&self, message: &Message, names: MessageFields, marker: &Marker<'_>) -> Json {
        let role = match message.role {
            Role::Developer if !self.source.contains("developer") => Role::System,
            role => role,
        };
        let mut fields = Map::new();
        let role_name = if role == Role::Tool { names.support.role_of_results() } else { role.name() };
        fields.insert("role".into(), role_name.into());
        let content = match &message.content {
            None if message.tool_calls.is_empty() || self.null_content_is_empty => Some(""),
            content => content.as_deref(),
        };
        let content = content.map(|text| marker.mark(text));
        let content = match names.support.in_text(&message.tool_calls) {
            Some([start, calls, end]) => Some(content.unwrap_or_default() + &start + &marker.mark(&calls) + &end),
            None => content,
        };
        fields.insert("content".into(), content.into());
        // Some templates call the reasoning `thinking`. gpt-oss's template accepts no text beside it in a message with
        // calls.
        let has_text = message.content.as_ref().is_some_and(|text| !text.is_empty());
        let excluded = names.either_thinking_or_text && has_text && !message.tool_calls.is_empty();
        let thinking = if names.has_thinking && !excluded { &message.reasoning_content } else { &None };
        for (name, text) in [
            ("reasoning_content", &message.reasoning_content),
            ("thinking", thinking),
            ("tool_call_id", &message.tool_call_id),
            (if role == Role::Assistant { names.support.field_of_name() } else { "name" }, &message.name),
        ] {
            if let Some(text) = text {
                fields.insert(name.into(), marker.mark(text).into());
            }
        }
        if !message.tool_calls.is_empty() {
            let calls = message.tool_calls.iter().map(|call| tool_call(call, &self.arguments(call), marker));
            fields.insert("tool_calls".into(), calls.collect());
        }
        fields.into()
    }

    /// The arguments of a call: an object, or text if they are not an object or the template takes text.
    fn arguments(&self, call: &ToolCall) -> Json {
        let text = match call.function.arguments.trim() {
            "" => "{}",
            _ => &call.function.arguments,
        };
        match exact_json::from_str(text) {
            Ok(object @ Json::Object(_)) if !self.arguments_are_text => object,
            _ => text.into(),
        }
    }

    /// Whether the template takes the tools as JSON text in the variable `functions` (Firefunction).
    fn takes_functions_as_text(&self) -> bool {
        self.tool_use.is_none() && self.program.reads("functions") && !self.program.reads("tools")
    }

    /// Probes the template: finds out in which form it takes the parts of messages, and the format of tool calls.
    fn probe(&mut self) -> Result<(), TemplateError> {
        self.arguments_are_text = self.takes_arguments_as_text()?;
        self.null_content_is_empty = !self.takes_null_content()?;
        let source = self.source_for_tools();
        self.tool_format = match ToolFormat::known(source) {
            Some(format) => format,
            None if source.contains("tool_calls") || source.contains("<function=") => {
                derived(self).map_or(ToolFormat::Json, ToolFormat::Derived)
            }
            None => ToolFormat::Json,
        };
        Ok(())
    }

    /// The template with empty strings for `bos_token` and `eos_token` if they are not set.
    pub(crate) fn with_missing_tokens(&self) -> Self {
        let mut template = self.clone();
        for name in ["bos_token", "eos_token"] {
            template.tokens.entry(name).or_insert_with(|| "".into());
        }
        template
    }

    /// Whether the arguments of a call must be passed as text to be rendered as JSON: some templates concatenate them
    /// with strings.
    fn takes_arguments_as_text(&self) -> Result<bool, TemplateError> {
        const ARGUMENTS: &str = r#"{"probe_key": "probe value"}"#;
        let call = |content: Option<&str>| {
            let tool_calls = vec![ToolCall::new("call00000", "name", ARGUMENTS)];
            Message { content: content.map(str::to_owned), tool_calls, ..Message::assistant("") }
        };
        let result = Message { tool_call_id: Some("call00000".into()), ..Message::new(Role::Tool, "text") };
        let as_text = Self { arguments_are_text: true, ..self.clone() };
        let as_object = Self { arguments_are_text: false, ..self.clone() };
        for content in [None, Some("")] {
            for n in [2, 3] {
                let messages = [Message::user("text"), call(content), result.clone()];
                let request = RenderRequest { messages: &messages[..n], ..Default::default() };
                // A template may quote the arguments in a refusal.
                let rendered = |template: &Self| match template.render_variant(&request) {
                    Ok(prompt) => Ok(prompt.text),
                    Err(TemplateError::Refused { message, .. }) => Ok(message),
                    Err(error @ TemplateError::Limit { .. }) => Err(error),
                    Err(_) => Ok(String::new()),
                };
                let object = rendered(&as_object)?;
                // It was printed as a Python dictionary, which no model was trained on.
                let is_python = object.contains("{'probe_key': 'probe value'}");
                if object.contains("probe_key") && object.contains("probe value") && !is_python {
                    return Ok(false);
                }
                if rendered(&as_text)?.contains(ARGUMENTS) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Whether the template renders a content of `none`, as in a message with calls only, as nothing. Some templates
    /// fail, some write "None". A template that exceeds a limit on these two messages does so on any.
    fn takes_null_content(&self) -> Result<bool, TemplateError> {
        let call = ToolCall::new("call00000", "name", "{}");
        let result = Message { tool_call_id: Some(call.id.clone()), ..Message::new(Role::Tool, "text") };
        let call = Message { content: None, tool_calls: vec![call], ..Message::assistant("") };
        let messages = [Message::user("text"), call, result];
        let request = RenderRequest { messages: &messages[..2], ..Default::default() };
        match self.render_variant(&request) {
            Err(error @ TemplateError::Limit { .. }) => Err(error),
            Err(_) => Ok(false),
            Ok(prompt) if prompt.text.contains("None") => Ok(false),
            // Some templates only check a message that is not the last one. If they refuse that, it has other reasons.
            Ok(_) => {
                let result = self.render_variant(&RenderRequest { messages: &messages, ..request });
                Ok(!matches!(result, Err(TemplateError::Render { .. })))
            }
        }
    }
}

/// The time of a rendering in UTC, in the format of templates that expect `datetime`.
fn date_and_time(now: Option<SystemTime>) -> String {
    let now = jiff::Timestamp::try_from(now.unwrap_or_else(SystemTime::now)).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
    now.strftime("%b %d %Y %H:%M:%S GMT").to_string()
}

/// The names that a template uses for the fields of a message.
#[derive(Debug, Clone, Copy)]
struct MessageFields {
    support: TemplateToolSupport,
    /// Whether the template reads reasoning from `thinking`.
    has_thinking: bool,
    /// Whether a message with calls may have only one of reasoning and text.
    either_thinking_or_text: bool,
}

impl MessageFields {
    /// The names in the template `source`.
    fn of(source: &str) -> Self {
        Self {
            support: TemplateToolSupport::of_template(source),
            has_thinking: source.contains("message.thinking"),
            either_thinking_or_text: ToolFormat::known(source) == Some(ToolFormat::Harmony),
        }
    }
}

/// All texts of a message, except the arguments of its calls.
fn texts(message: &Message) -> impl Iterator<Item = &str> {
    let fields = [&message.content, &message.reasoning_content, &message.tool_call_id, &message.name];
    let calls = message.tool_calls.iter().flat_map(|c| [&*c.id, &*c.kind, &*c.function.name]);
    fields.into_iter().flatten().map(String::as_str).chain(calls)
}

fn tool_call(call: &ToolCall, arguments: &Json, marker: &Marker<'_>) -> Json {
    let mut fields = Map::new();
    if !call.id.is_empty() {
        fields.insert("id".into(), marker.mark(&call.id).into());
    }
    fields.insert("type".into(), marker.mark(&call.kind).into());
    let function = json!({"name": marker.mark(&call.function.name), "arguments": marker.mark_value(arguments)});
    fields.insert("function".into(), function);
    fields.into()
}
