//! The tools of a request: read from the field `tools`, and converted to functions for the model. A custom tool
//! (free-text input) becomes a function with one argument; a tool of a namespace becomes a function with both names.

use metal_attention_chat::Tool;
use serde_json::{Map, Value, json};

use crate::http::ApiError;
use crate::http::job::tool_choice::{AllowedCalls, ToolChoice};
use crate::http::notes::Notes;
use metal_attention_grammar::ResponseFormat;

/// A tool, with the function that the model sees.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponseTool {
    /// The function that stands for it.
    function: Tool,
    /// The tool's own name.
    pub name: String,
    /// Its namespace.
    pub namespace: Option<String>,
    /// The kind.
    pub kind: ToolKind,
}

/// The kind of a tool.
#[derive(Debug, Clone, PartialEq)]
pub enum ToolKind {
    /// A function.
    Function,
    /// A tool with a text as its input, which may have to follow a grammar. Its function has one argument, `input`.
    Custom(Option<ResponseFormat>),
}

/// The tools of a request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ResponseTools(Vec<ResponseTool>);

/// The tools that the answer may or must call.
#[derive(Debug)]
pub struct ToolSelection {
    /// The functions.
    pub calls: AllowedCalls,
    /// The custom tool whose input is the whole generated text, with the grammar of that text; `None`: calls as usual.
    pub input_tool: Option<(ResponseTool, ResponseFormat)>,
}

/// The name of the function that stands for a tool of a namespace.
pub fn offered_name(namespace: Option<&str>, name: &str) -> String {
    match namespace.filter(|namespace| !namespace.is_empty()) {
        None => name.to_owned(),
        Some(namespace) if namespace.ends_with("__") => format!("{namespace}{name}"),
        Some(namespace) => format!("{namespace}__{name}"),
    }
}

impl ResponseTools {
    /// Reads the field `tools`. Notes the ignored types: tools that OpenAI's servers run themselves.
    pub fn read(list: &[Value], notes: &mut Notes) -> Result<Self, ApiError> {
        let mut tools = Self::default();
        for (i, tool) in list.iter().enumerate() {
            tools.add(tool, None, &format!("tools[{i}]"), notes)?;
        }
        Ok(tools)
    }

    /// Adds a tool, or all tools of a namespace. `place`: the path in the request, for errors.
    fn add(&mut self, tool: &Value, namespace: Option<&str>, place: &str, notes: &mut Notes) -> Result<(), ApiError> {
        let wrong = |problem: &str| ApiError::field(place, format!("{place}: {problem}"));
        let fields = tool.as_object().ok_or_else(|| wrong("a tool must be an object"))?;
        // The chat API nests a tool's fields in an object.
        let nested = |kind: &str| fields.get(kind).and_then(Value::as_object).unwrap_or(fields);
        let kind = match fields.get("type") {
            Some(Value::String(kind)) => kind,
            None | Some(Value::Null) => "function",
            Some(_) => return Err(wrong("its type must be a text")),
        };
        match kind {
            "function" => {
                let fields = nested("function");
                self.0.push(ResponseTool::new(fields, namespace, ToolKind::Function, fields).map_err(|e| wrong(&e))?);
            }
            "custom" => {
                let fields = nested("custom");
                let (response_format, description) = format(fields).map_err(|e| wrong(&e))?;
                let input = json!({"description": description, "parameters": {"type": "object",
                    "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": false}});
                let input = input.as_object().unwrap_or(fields);
                self.0.push(
                    ResponseTool::new(fields, namespace, ToolKind::Custom(response_format), input)
                        .map_err(|e| wrong(&e))?,
                );
            }
            "namespace" if namespace.is_none() => {
                let name = fields.get("name").and_then(Value::as_str).ok_or_else(|| wrong("its name is missing"))?;
                let inner = fields.get("tools").and_then(Value::as_array);
                for (i, tool) in inner.into_iter().flatten().enumerate() {
                    self.add(tool, Some(name), &format!("{place}.tools[{i}]"), notes)?;
                }
            }
            other => notes.ignored(format!("tools.{other}")),
        }
        Ok(())
    }

    /// The tool of the function `name`.
    pub fn find(&self, name: &str) -> Option<&ResponseTool> {
        self.0.iter().find(|tool| tool.function.name() == name)
    }

    /// Restricts the tools by `choice`, the field `tool_choice`. `parallel`: whether the request allows several calls.
    pub fn select(&self, choice: &Value, parallel: bool) -> Result<ToolSelection, ApiError> {
        let mut choice = choice.clone();
        // Ignored tools have no name here.
        if let Some(Value::Array(allowed)) = choice.get_mut("tools") {
            allowed.retain(|tool| tool["name"].is_string() || tool["function"]["name"].is_string());
        }
        let offered = |name: String| {
            let named = self.find(&name).or_else(|| self.0.iter().find(|tool| tool.name == name));
            named.map_or(name, |tool| tool.function.name().to_owned())
        };
        let choice = match serde_json::from_value::<Option<ToolChoice>>(choice.clone()) {
            Ok(Some(ToolChoice::Named(name))) => Some(ToolChoice::Named(offered(name))),
            Ok(Some(ToolChoice::Allowed { names, required })) => {
                Some(ToolChoice::Allowed { names: names.into_iter().map(offered).collect(), required })
            }
            Ok(choice @ (Some(ToolChoice::None | ToolChoice::Auto | ToolChoice::Required) | None)) => choice,
            Err(error) => {
                let message = match choice["type"].as_str() {
                    Some(kind) => format!("tool_choice demands {kind:?}, which is no tool of this server"),
                    None => format!("tool_choice: {error}"),
                };
                return Err(ApiError::field("tool_choice", message));
            }
        };
        let functions = self.0.iter().map(|tool| tool.function.clone()).collect();
        let calls = AllowedCalls::new(functions, choice.as_ref(), parallel)?;
        if let Some(ToolChoice::Named(name)) = &choice
            && let Some(tool) = self.find(name)
            && let ToolKind::Custom(Some(response_format)) = &tool.kind
        {
            let input_tool = Some((tool.clone(), response_format.clone()));
            return Ok(ToolSelection { calls: AllowedCalls { required: false, ..calls }, input_tool });
        }
        Ok(ToolSelection { calls, input_tool: None })
    }
}

impl ResponseTool {
    /// The tool with the name in `fields` and the description and parameters in `more`.
    fn new(
        fields: &Map<String, Value>,
        namespace: Option<&str>,
        kind: ToolKind,
        more: &Map<String, Value>,
    ) -> Result<Self, String> {
        let name = fields.get("name").and_then(Value::as_str).unwrap_or_default();
        if name.is_empty() {
            return Err("its name is missing".into());
        }
        let mut function = Map::from_iter([("name".to_owned(), Value::from(offered_name(namespace, name)))]);
        for field in ["description", "parameters", "strict"] {
            if let Some(value) = more.get(field).filter(|value| !value.is_null()) {
                function.insert(field.into(), value.clone());
            }
        }
        let function = Tool::try_from(json!({"type": "function", "function": function})).map_err(|e| e.to_string())?;
        Ok(Self { function, name: name.to_owned(), namespace: namespace.map(str::to_owned), kind })
    }
}

/// The format of a custom tool's input, and a description of it for the model.
fn format(fields: &Map<String, Value>) -> Result<(Option<ResponseFormat>, String), String> {
    let description = fields.get("description").and_then(Value::as_str).unwrap_or_default();
    let Some(Value::Object(format)) = fields.get("format") else { return Ok((None, description.to_owned())) };
    let grammar = format.get("grammar").and_then(Value::as_object).unwrap_or(format);
    let word = |name: &str| grammar.get(name).and_then(Value::as_str);
    match format.get("type").and_then(Value::as_str) {
        Some("text") | None => Ok((None, description.to_owned())),
        Some("grammar") => {
            let definition = word("definition").ok_or("its format has no definition")?;
            let (response_format, what) = match word("syntax") {
                Some("lark") => (ResponseFormat::Lark(definition.to_owned()), "Lark grammar"),
                Some("regex") => (ResponseFormat::Regex(definition.to_owned()), "regular expression"),
                Some(_) | None => return Err("the syntax of its format must be lark or regex".into()),
            };
            let line = format!("The input follows this {what}:\n{definition}");
            let description = if description.is_empty() { line } else { format!("{description}\n\n{line}") };
            Ok((Some(response_format), description))
        }
        Some(other) => Err(format!("its format must be of type text or grammar, not {other:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(list: &Value) -> Result<(ResponseTools, Notes), ApiError> {
        let mut notes = Notes::default();
        Ok((ResponseTools::read(list.as_array().unwrap(), &mut notes)?, notes))
    }

    fn function(name: &str) -> Value {
        json!({"type": "function", "name": name, "description": null, "strict": null, "parameters": {"type": "object"}})
    }

    fn pick() -> Value {
        json!({"type": "custom", "name": "pick",
            "format": {"type": "grammar", "syntax": "regex", "definition": "yes|no"}})
    }

    #[test]
    fn tools_become_functions() {
        let (tools, notes) = tools(&json!([
            function("f"), {"type": "web_search"}, pick(), {"type": "custom", "name": "say", "description": "Say it."},
            {"type": "namespace", "name": "mcp__x__", "tools": [function("g"), {"type": "image_generation"}]},
            {"type": "namespace", "name": "agents", "tools": [function("h")]},
            {"type": "function", "function": {"name": "chat"}},
        ]))
        .unwrap();
        let mut wanted = Notes::default();
        wanted.ignored("tools.web_search");
        wanted.ignored("tools.image_generation");
        assert_eq!(notes, wanted);
        let names: Vec<_> = tools.0.iter().map(|tool| (tool.function.name(), tool.name.as_str())).collect();
        let same = |name| (name, name);
        let (inner, agent) = (("mcp__x__g", "g"), ("agents__h", "h"));
        assert_eq!(names, [same("f"), same("pick"), same("say"), inner, agent, same("chat")]);
        let of = |name| &tools.find(name).unwrap().function.as_value()["function"];
        assert_eq!(*of("f"), json!({"name": "f", "parameters": {"type": "object"}}));
        let input = json!({"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
            "additionalProperties": false});
        assert_eq!(*of("say"), json!({"name": "say", "description": "Say it.", "parameters": input}));
        assert_eq!(of("pick")["description"], "The input follows this regular expression:\nyes|no");
        assert_eq!(tools.find("pick").unwrap().kind, ToolKind::Custom(Some(ResponseFormat::Regex("yes|no".into()))));
    }

    #[test]
    fn tool_choices_name_tools() {
        let (tools, _) = tools(&json!([
            function("f"), pick(), {"type": "namespace", "name": "n", "tools": [function("g")]}
        ]))
        .unwrap();
        let choose = |choice: Value| {
            let ToolSelection { calls, input_tool } =
                tools.select(&choice, true).map_err(|e| e.message().to_owned())?;
            let names: Vec<_> = calls.tools.iter().map(|tool| tool.name().to_owned()).collect();
            Ok::<_, String>((names.join(" "), calls.required, input_tool.map(|(tool, _)| tool.name)))
        };
        let some = |names: &str, required| Ok((names.to_owned(), required, None));
        assert_eq!(choose(Value::Null), some("f pick n__g", false));
        assert_eq!(choose(json!("required")), some("f pick n__g", true));
        assert_eq!(choose(json!({"type": "function", "name": "f"})), some("f", true));
        assert_eq!(choose(json!({"type": "function", "name": "g"})), some("n__g", true));
        assert_eq!(choose(json!({"type": "custom", "name": "pick"})), Ok(("pick".into(), false, Some("pick".into()))));
        let allowed = json!({"type": "allowed_tools", "mode": "required",
            "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]});
        assert_eq!(choose(allowed), some("f", true));
        let message = "tool_choice demands \"web_search\", which is no tool of this server";
        assert_eq!(choose(json!({"type": "web_search"})), Err(message.into()));
        assert!(choose(json!({"type": "function", "name": "x"})).is_err() && choose(json!(1)).is_err());
    }

    #[test]
    fn wrong_tools_are_refused() {
        let format = |format: Value| json!({"type": "custom", "name": "c", "format": format});
        for wrong in [
            json!(1),
            json!({"type": 1, "name": "f"}),
            json!({"type": "function"}),
            json!({"type": "function", "name": ""}),
            json!({"type": "function", "name": "f", "parameters": 1}),
            json!({"type": "custom"}),
            json!({"type": "namespace"}),
            json!({"type": "namespace", "name": "n", "tools": [{"type": "function"}]}),
            format(json!({"type": "x"})),
            format(json!({"type": "grammar"})),
            format(json!({"type": "grammar", "syntax": "gbnf", "definition": "x"})),
        ] {
            let message = tools(&json!([function("f"), wrong])).unwrap_err().message().to_owned();
            assert!(message.starts_with("tools[1]"), "{message}");
        }
    }
}
