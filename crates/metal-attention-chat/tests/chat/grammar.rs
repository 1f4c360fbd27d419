//! Grammars that force tool calls, checked with the library llguidance: each text that the grammar accepts is parsed as the
//! call.

use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use metal_attention_chat::{AnswerEvent, Message, ReasoningMarkers, Tool, ToolCallParser, ToolFormat};
use serde_json::json;
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// Two tools; the second one's name has quotes and a blank.
fn tools() -> Vec<Tool> {
    let weather = json!({"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"], "additionalProperties": false,
        "$defs": {"city": {"type": "string", "enum": ["Bern", "Basel"]}},
    }}});
    let now = json!({"type": "function", "function": {"name": "say \"now\""}});
    [weather, now].map(|tool| Tool::try_from(tool).unwrap()).to_vec()
}

/// Whether `text` is a complete sentence of the grammar, with one token for each byte.
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

/// The calls that the parser finds, as `name arguments`.
fn calls(format: ToolFormat, text: &str) -> Vec<String> {
    let mut parser =
        ToolCallParser::new(format, &tools()).with_reasoning(ReasoningMarkers::THINK, text.contains("</think>"));
    let events: Vec<AnswerEvent> = parser.push(text).into_iter().chain(parser.finish()).collect();
    let message = Message::from_events(events);
    assert_eq!(message.content, None, "{text}");
    message.tool_calls.iter().map(|call| format!("{} {}", call.function.name, call.function.arguments)).collect()
}

#[test]
fn forced_calls_are_parsed() {
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
        (
            ToolFormat::Nemotron,
            format!("<TOOLCALL>[{arguments}]</TOOLCALL>"),
            format!("<TOOLCALL>[{arguments}, {now}]</TOOLCALL>"),
        ),
        (
            ToolFormat::Jamba,
            format!("<tool_calls>[{arguments}]</tool_calls>"),
            format!("<tool_calls>[{arguments}, {now}]</tool_calls>"),
        ),
    ] {
        let single = format.grammar(&tools(), false, None, None);
        assert!(accepts(&single, &one), "{format:?}: {one}");
        assert!(!accepts(&single, &two), "{format:?}: {two}");
        assert!(!accepts(&single, &one.replace("Bern", "Rome")) && !accepts(&single, "Hello"));
        assert_eq!(calls(format, &one), [format!("get_weather {bern}")]);
        let several = format.grammar(&tools(), true, None, None);
        assert!(accepts(&several, &one) && accepts(&several, &two), "{format:?}: {two}");
        assert_eq!(calls(format, &two), [format!("get_weather {bern}"), "say \"now\" {}".into()]);
        let reasoning = format.grammar(&tools(), false, Some(ReasoningMarkers::THINK), None);
        let thought = format!("So {{ and \"}} so.\n</think>\n\n{one}");
        assert!(accepts(&reasoning, &thought) && !accepts(&reasoning, &one), "{format:?}: {thought}");
        assert_eq!(calls(format, &thought), [format!("get_weather {bern}")]);
        let named = format.grammar(&tools()[1..], false, None, None);
        assert!(!accepts(&named, &one), "{format:?}: {one}");
    }
}

/// Formats with more markers around a call, and arguments of every JSON type.
#[test]
fn forced_calls_of_other_formats_are_parsed() {
    let trip = json!({"type": "function", "function": {"name": "trip", "parameters": {
        "type": "object", "required": ["city", "days"], "properties": {
            "city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}, "note": {"type": "string"},
            "mode": {"type": "string", "enum": ["rail", "road", ""]}, "via": {"type": "array", "items": {"type": "string"}},
            "seat": {"type": "object", "properties": {"window": {"type": "boolean"}, "row": {"type": "integer"}}}, "any": {},
        }, "$defs": {"city": {"type": "string", "enum": ["Bern", "Basel"]}}}}});
    let now = json!({"type": "function", "function": {"name": "now"}});
    let tools = [trip, now].map(|tool| Tool::try_from(tool).unwrap());
    let bern = r#"{"city": "Bern", "days": 2}"#;
    let all = r#"{"city": "Bern", "days": 2, "note": "a <b>, c", "mode": "rail", "via": ["x"], "seat": {"row": 3}, "any": null}"#;
    let json_call = |tool: &str, key: &str| format!("{{\"name\": \"{tool}\", \"{key}\": ");
    let command = |tool: &str, arguments: &str| {
        format!("{{\"tool_call_id\": \"0\", \"tool_name\": \"{tool}\", \"parameters\": {arguments}}}")
    };
    let tags = |open: &str, close: &str, n: &str, end: &str, arguments: &[(&str, &str)], tool: &str| {
        let argument = |(key, value): &(&str, &str)| format!("<parameter={key}>{n}{value}{n}</parameter>\n");
        let arguments: String = arguments.iter().map(argument).collect();
        format!("{open}\n<function={tool}>\n{arguments}</function>{end}{close}")
    };
    let keys = |arguments: &[(&str, &str)], tool: &str| {
        let argument =
            |(key, value): &(&str, &str)| format!("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n");
        let arguments: String = arguments.iter().map(argument).collect();
        format!("<tool_call>{tool}\n{arguments}</tool_call>")
    };
    let plain = [("city", "Bern"), ("days", "2")];
    let plain_all = [
        ("city", "Bern"),
        ("days", "2"),
        ("note", "a <b>, c"),
        ("mode", "rail"),
        ("via", "[\"x\"]"),
        ("seat", "{\"row\": 3}"),
        ("any", "null"),
    ];
    let coder =
        |arguments: &[(&str, &str)], tool: &str| tags("<tool_call>", "</tool_call>", "\n", "\n", arguments, tool);
    let seed = |arguments: &[(&str, &str)], tool: &str| {
        tags("<seed:tool_call>", "</seed:tool_call>", "", "\n", arguments, tool)
    };
    let gemma = |arguments: &str, tool: &str| format!("<|tool_call>call:{tool}{{{arguments}}}<tool_call|>");
    let gemma_bern = gemma("city:<|\"|>Bern<|\"|>,days:2", "trip");
    let deepseek = |calls: &str| format!("<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>");
    let v3 = |arguments: &str, tool: &str| {
        format!("<｜tool▁call▁begin｜>{tool}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
    };
    let r1 = |arguments: &str, tool: &str| {
        format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{tool}\n```json\n{arguments}\n```<｜tool▁call▁end｜>")
    };
    let harmony = |arguments: &str, tool: &str| {
        format!("<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{arguments}")
    };
    let python = |calls: &str| format!("<|tool_call_start|>[{calls}]<|tool_call_end|>");
    let (listed, listed_now) = (json_call("trip", "arguments"), json_call("now", "arguments"));
    for (format, one, with_all, two) in [
        (
            ToolFormat::TaggedList,
            format!("<|tool_call|>[{listed}{bern}}}]"),
            format!("<|tool_call|>[{listed}{all}}}]"),
            format!("<|tool_call|>[{listed}{bern}}}, {listed_now}{{}}}}]"),
        ),
        (
            ToolFormat::CommandR,
            format!("<|START_ACTION|>[{}]<|END_ACTION|>", command("trip", bern)),
            format!("<|START_ACTION|>[{}]<|END_ACTION|>", command("trip", all)),
            format!("<|START_ACTION|>[{}, {}]<|END_ACTION|>", command("trip", bern), command("now", "{}")),
        ),
        (
            ToolFormat::FunctionTags,
            coder(&plain, "trip"),
            coder(&plain_all, "trip"),
            format!("{}\n{}", coder(&plain, "trip"), coder(&[], "now")),
        ),
        (
            ToolFormat::Seed,
            seed(&plain, "trip"),
            seed(&plain_all, "trip"),
            format!("{}\n{}", seed(&plain, "trip"), seed(&[], "now")),
        ),
        (
            ToolFormat::Glm,
            keys(&plain, "trip"),
            keys(&plain_all, "trip"),
            format!("{}\n{}", keys(&plain, "trip"), keys(&[], "now")),
        ),
        (
            ToolFormat::Pythonic,
            python("trip(city=\"Bern\", days=2)"),
            python(
                "trip(city=\"Bern\", days=2, note=\"a <b>, c\", mode=\"rail\", via=[\"x\"], seat={\"row\": 3}, any=null)",
            ),
            python("trip(city=\"Bern\", days=2), now()"),
        ),
        (
            ToolFormat::Gemma,
            gemma_bern.clone(),
            gemma(
                "city:<|\"|>Bern<|\"|>,days:2,note:<|\"|>a <b>, c<|\"|>,mode:<|\"|>rail<|\"|>,via:[<|\"|>x<|\"|>],seat:{row:3},any:null",
                "trip",
            ),
            gemma_bern.clone() + &gemma("", "now"),
        ),
        (
            ToolFormat::DeepSeek,
            deepseek(&v3(bern, "trip")),
            deepseek(&v3(all, "trip")),
            deepseek(&(v3(bern, "trip") + &v3("{}", "now"))),
        ),
        (
            ToolFormat::DeepSeekR1,
            deepseek(&r1(bern, "trip")),
            deepseek(&r1(all, "trip")),
            deepseek(&(r1(bern, "trip") + "\n" + &r1("{}", "now"))),
        ),
        // Formats in which a call ends the answer, so that there is no second one.
        (ToolFormat::Glm4, format!("trip\n{bern}"), format!("trip\n{all}"), String::new()),
        (ToolFormat::Harmony, harmony(bern, "trip"), harmony(all, "trip"), String::new()),
    ] {
        let read = |text: &str| {
            let parser = ToolCallParser::new(format, &tools);
            let mut parser = match text.find("</think>") {
                Some(_) => parser.with_reasoning(ReasoningMarkers::THINK, true),
                None => parser,
            };
            let events: Vec<AnswerEvent> = parser.push(text).into_iter().chain(parser.finish()).collect();
            let message = Message::from_events(events);
            assert_eq!(message.content, None, "{text}");
            let call = |c: &metal_attention_chat::ToolCall| format!("{} {}", c.function.name, c.function.arguments);
            message.tool_calls.iter().map(call).collect::<Vec<_>>()
        };
        let single = format.grammar(&tools, false, None, None);
        assert!(accepts(&single, &one), "{format:?}: {one}\n{single}");
        assert!(accepts(&single, &with_all), "{format:?}: {with_all}\n{single}");
        assert!(!accepts(&single, &one.replace("Bern", "Rome")) && !accepts(&single, "Hello"), "{format:?}");
        assert!(!accepts(&single, &with_all.replace("rail", "ship")), "{format:?}");
        assert_eq!(read(&one), [format!("trip {bern}")]);
        assert_eq!(read(&with_all), [format!("trip {all}")]);
        if !two.is_empty() {
            assert!(!accepts(&single, &two), "{format:?}: {two}");
            let several = format.grammar(&tools, true, None, None);
            assert!(accepts(&several, &one) && accepts(&several, &two), "{format:?}: {two}");
            assert_eq!(read(&two), [format!("trip {bern}"), "now {}".into()]);
            let reasoning = format.grammar(&tools, false, Some(ReasoningMarkers::THINK), None);
            let thought = format!("So {{ and \"}} so.\n</think>\n\n{one}");
            assert!(accepts(&reasoning, &thought) && !accepts(&reasoning, &one), "{format:?}: {thought}");
            assert_eq!(read(&thought), [format!("trip {bern}")]);
        }
    }
    let thought = format!("<|channel|>analysis<|message|>So.<|end|><|start|>assistant{}", harmony(bern, "trip"));
    assert!(accepts(&ToolFormat::Harmony.grammar(&tools, true, None, None), &thought));
}

/// Python's spelling of scalars (`True`, `None`), and a tool without required arguments.
#[test]
fn forced_pythonic_calls_have_python_scalars() {
    let tool = json!({"type": "function", "function": {"name": "set", "parameters": {"type": "object", "properties": {
        "on": {"type": "boolean"}, "nothing": {"type": "null"}, "level": {"type": "number"},
        "fixed": {"type": "boolean", "const": true}}}}});
    let tools = [Tool::try_from(tool).unwrap()];
    let grammar = ToolFormat::Pythonic.grammar(&tools, false, None, None);
    for (call, arguments) in [
        ("set()", "{}"),
        ("set(on=True)", r#"{"on": true}"#),
        ("set(level=-0.5)", r#"{"level": -0.5}"#),
        ("set(nothing=None, level=1)", r#"{"nothing": null, "level": 1}"#),
        ("set(on=False, fixed=true)", r#"{"on": false, "fixed": true}"#),
    ] {
        let text = format!("<|tool_call_start|>[{call}]<|tool_call_end|>");
        assert!(accepts(&grammar, &text), "{call}\n{grammar}");
        let mut parser = ToolCallParser::new(ToolFormat::Pythonic, &tools);
        let events: Vec<AnswerEvent> = parser.push(&text).into_iter().chain(parser.finish()).collect();
        assert_eq!(Message::from_events(events).tool_calls[0].function.arguments, arguments);
    }
    for call in ["set(on=true)", "set(level=1, on=True)", "set(on=True,)", "set", "get()"] {
        assert!(!accepts(&grammar, &format!("<|tool_call_start|>[{call}]<|tool_call_end|>")), "{call}");
    }
}

/// JSON as the text of an answer follows the reasoning, or is in its Harmony channel.
#[test]
fn forced_json_follows_reasoning() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let text = format!("%json {schema}");
    assert_eq!(ToolFormat::Hermes.text_grammar(&text, None, None), None);
    let reasoning = ToolFormat::Hermes.text_grammar(&text, Some(ReasoningMarkers::THINK), None).unwrap();
    assert!(accepts(&reasoning, "So {.</think>\n\n{\"a\": 1}") && !accepts(&reasoning, "{\"a\": 1}"));
    let harmony = ToolFormat::Harmony.text_grammar(&text, None, None).unwrap();
    let answer = "<|channel|>final<|message|>{\"a\": 1}";
    assert!(accepts(&harmony, answer) && !accepts(&harmony, "{\"a\": 1}"));
    assert!(accepts(&harmony, &format!("<|channel|>analysis<|message|>So.<|end|><|start|>assistant{answer}")));
}

/// Large schemas and schemas with many references to themselves have grammars of limited size.
#[test]
fn grammars_of_hostile_schemas_are_small() {
    let many = |schema: serde_json::Value| -> serde_json::Value {
        (0..2000).map(|i| (format!("p{i}"), schema.clone())).collect::<serde_json::Map<_, _>>().into()
    };
    let itself = json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"},
        "c": {"$ref": "#/$defs/n"}, "d": {"$ref": "#/$defs/n"}, "e": {"type": "array", "items": {"$ref": "#/$defs/n"}}}});
    let loops =
        json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"$ref": "#/$defs/n"}}});
    let nodes = json!({"type": "object", "properties": many(json!({"$ref": "#/$defs/n"})), "$defs": {"n": itself}});
    let large = json!({"type": "object", "properties": many(json!({"$ref": "#/$defs/n"})),
        "$defs": {"n": {"enum": ["x".repeat(100_000)]}}});
    for schema in [loops, nodes, large] {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": schema}});
        let tools = [Tool::try_from(tool).unwrap()];
        for format in
            [ToolFormat::FunctionTags, ToolFormat::Seed, ToolFormat::Glm, ToolFormat::Gemma, ToolFormat::Pythonic]
        {
            let grammar = format.grammar(&tools, true, None, None);
            assert!(grammar.len() < 8 << 20, "{format:?}: {}", grammar.len());
        }
    }
}
