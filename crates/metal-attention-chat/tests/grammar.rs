//! The grammars of forced tool calls, under llguidance.

use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use metal_attention_chat::{AnswerEvent, Message, ReasoningMarkers, Tool, ToolCallParser, ToolFormat};
use serde_json::json;
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

fn tools() -> Vec<Tool> {
    let weather = json!({"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"], "additionalProperties": false,
        "$defs": {"city": {"type": "string", "enum": ["Bern", "Basel"]}},
    }}});
    let now = json!({"type": "function", "function": {"name": "say \"now\""}});
    [weather, now].map(|tool| Tool::try_from(tool).unwrap()).to_vec()
}

/// Whether `text` is a complete answer of the grammar, token by token, one for each byte.
fn accepts(lark: &str, text: &str) -> bool {
    let bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).chain([Vec::new()]).collect();
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(TokTrie::from(&TokRxInfo::new(257, 256), &bytes)));
    let factory = ParserFactory::new_simple(&env).unwrap();
    let parser =
        factory.create_parser(TopLevelGrammar::from_lark(lark.to_owned())).unwrap_or_else(|e| panic!("{e}\n{lark}"));
    let mut matcher = Matcher::new(Ok(parser));
    let ids: Vec<u32> = text.bytes().map(u32::from).collect();
    matcher.validate_tokens(&ids).unwrap() == ids.len()
        && matcher.consume_tokens(&ids).is_ok()
        && matcher.is_accepting().unwrap()
}

/// The calls that a parser finds, as `name arguments`.
fn calls(format: ToolFormat, text: &str) -> Vec<String> {
    let mut parser = ToolCallParser::new(format, &tools()).thinking(ReasoningMarkers::THINK, text.contains("</think>"));
    let events: Vec<AnswerEvent> = parser.push(text).into_iter().chain(parser.finish()).collect();
    let message = Message::from_events(events);
    assert_eq!(message.content, None, "{text}");
    message.tool_calls.iter().map(|call| format!("{} {}", call.function.name, call.function.arguments)).collect()
}

/// What a grammar takes, the parser reads.
#[test]
fn forced_calls_are_read_as_such() {
    let bern = "{\"city\": \"Bern\"}";
    let json = |key: &str| format!("{{\"name\": \"get_weather\", \"{key}\": {bern}}}");
    let hermes = |call: &str| format!("<tool_call>\n{call}\n</tool_call>");
    let (arguments, parameters) = (json("arguments"), json("parameters"));
    let now = r#"{"name": "say \"now\"", "arguments": {}}"#;
    for (format, one, two) in [
        (ToolFormat::Hermes, hermes(&arguments), format!("{}\n{}", hermes(&arguments), hermes(now))),
        (ToolFormat::Llama3, parameters.clone(), format!("{parameters}; {}", now.replace("arguments", "parameters"))),
        (ToolFormat::MistralList, format!("[TOOL_CALLS][{arguments}]"), format!("[TOOL_CALLS][{arguments}, {now}]")),
        (
            ToolFormat::MistralArgs,
            format!("[TOOL_CALLS]get_weather[ARGS]{bern}"),
            format!("[TOOL_CALLS]get_weather[ARGS]{bern}[TOOL_CALLS]say \"now\"[ARGS]{{}}"),
        ),
        (ToolFormat::Json, arguments.clone(), format!("{arguments}\n{now}")),
    ] {
        let single = format.grammar(&tools(), false, None, None);
        assert!(accepts(&single, &one), "{format:?}: {one}");
        assert!(!accepts(&single, &two), "{format:?}: {two}");
        assert!(!accepts(&single, &one.replace("Bern", "Rome")) && !accepts(&single, "Hello"));
        assert_eq!(calls(format, &one), [format!("get_weather {bern}")]);
        let several = format.grammar(&tools(), true, None, None);
        assert!(accepts(&several, &one) && accepts(&several, &two), "{format:?}: {two}");
        assert_eq!(calls(format, &two), [format!("get_weather {bern}"), "say \"now\" {}".into()]);
        let thinking = format.grammar(&tools(), false, Some(ReasoningMarkers::THINK), None);
        let thought = format!("So {{ and \"}} so.\n</think>\n\n{one}");
        assert!(accepts(&thinking, &thought) && !accepts(&thinking, &one), "{format:?}: {thought}");
        assert_eq!(calls(format, &thought), [format!("get_weather {bern}")]);
        let named = format.grammar(&tools()[1..], false, None, None);
        assert!(!accepts(&named, &one), "{format:?}: {one}");
    }
}
