//! Parsing of answers into reasoning, text and tool calls. The result must not depend on how the streamed answer is divided
//! into pieces.

use crate::published::PUBLISHED;
use metal_attention_chat::{
    AnswerEvent, ChatTemplate, Message, ReasoningMarkers, RenderRequest, Tool, ToolCallParser, ToolFormat,
};
use proptest::prelude::*;
use serde_json::json;

/// The tools that answers may call.
fn tools() -> Vec<Tool> {
    let tool = |name: &str| Tool::try_from(json!({"type": "function", "function": {"name": name}})).unwrap();
    vec![tool("get_weather"), tool("add")]
}

/// A format, an answer, and the expected reasoning, text, and calls as `name arguments`.
type Case = (ToolFormat, &'static str, Option<&'static str>, Option<&'static str>, &'static [&'static str]);

const CASES: &[Case] = &[
    (ToolFormat::Hermes, "Hello <b>you</b>\n", None, Some("Hello <b>you</b>\n"), &[]),
    (
        ToolFormat::Hermes,
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>",
        None,
        None,
        &["add {\"a\": 1}"],
    ),
    (
        ToolFormat::Hermes,
        "<think>\nI need two.\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"s\": \"}é</tool_call>\"}}\n\
         </tool_call>\n<tool_call>\n{\"arguments\": {}, \"name\": \"other\"}\n</tool_call>\nDone.",
        Some("I need two."),
        Some("Let me see.\nDone."),
        &["add {\"s\": \"}é</tool_call>\"}", "other {}"],
    ),
    (ToolFormat::Hermes, "<tool_call>never mind", None, Some("<tool_call>never mind"), &[]),
    (ToolFormat::Hermes, "<tool_call>{\"a\": 1}", None, Some("<tool_call>{\"a\": 1}"), &[]),
    (
        ToolFormat::Hermes,
        "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": [1, ",
        None,
        None,
        &["add {\"a\": [1]}"],
    ),
    (ToolFormat::Hermes, "<think>unfinished ", Some("unfinished"), None, &[]),
    (ToolFormat::Hermes, "<think></think>x", None, Some("x"), &[]),
    (ToolFormat::Hermes, "a <think>b</think>", None, Some("a <think>b</think>"), &[]),
    (ToolFormat::Llama3, "{\"name\": \"add\", \"parameters\": {\"a\": \"1\"}}", None, None, &["add {\"a\": \"1\"}"]),
    (
        ToolFormat::Llama3,
        "<|python_tag|>{\"type\": \"function\", \"name\": \"x\", \"parameters\": {}}; {\"name\": \"add\", \"parameters\": {}}",
        None,
        None,
        &["x {}", "add {}"],
    ),
    (ToolFormat::Llama3, "<|python_tag|>search.call(query=\"x\")", None, None, &["search {\"query\":\"x\"}"]),
    (ToolFormat::Llama3, "<|python_tag|>print(1)", None, None, &["python {\"code\":\"print(1)\"}"]),
    (ToolFormat::Llama3, "{\"name\": \"Bob\", \"age\": 7}", None, Some("{\"name\": \"Bob\", \"age\": 7}"), &[]),
    (ToolFormat::Llama3, "{not json} at all", None, Some("{not json} at all"), &[]),
    (ToolFormat::Llama3, "Use {\"name\": \"add\"} for it", None, Some("Use {\"name\": \"add\"} for it"), &[]),
    (
        ToolFormat::MistralList,
        "[TOOL_CALLS] [{\"name\": \"add\", \"arguments\": {\"a\": 1}, \"id\": \"abcdefghi\"}, {\"name\": \"add\", \"arguments\": {}}]",
        None,
        None,
        &["add {\"a\": 1}", "add {}"],
    ),
    (
        ToolFormat::MistralArgs,
        "Well.[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{\"a\": {\"b\": 2}}[TOOL_CALLS]get_weather[ARGS]{}",
        None,
        Some("Well."),
        &["add {\"a\": {\"b\": 2}}", "get_weather {}"],
    ),
    (ToolFormat::MistralArgs, "[TOOL_CALLS]add{\"a\": 1}", None, None, &["add {\"a\": 1}"]),
    (ToolFormat::MistralList, "[TOOL_CALLS] nothing", None, Some("[TOOL_CALLS] nothing"), &[]),
    (ToolFormat::Json, "\n {\"name\": \"add\", \"arguments\": {\"a\": 1}}\n", None, None, &["add {\"a\": 1}"]),
    (ToolFormat::Glm4, "\nadd \n{\"a\": 1}", None, None, &["add {\"a\": 1}"]),
    (ToolFormat::Glm4, "add up\n{\"a\": 1}", None, Some("add up\n{\"a\": 1}"), &[]),
    (ToolFormat::Glm4, "ad", None, Some("ad"), &[]),
    // White space beside markers that do not begin a call.
    (ToolFormat::Hermes, "The tag <tool_call> is used.", None, Some("The tag <tool_call> is used."), &[]),
    (ToolFormat::Hermes, "a\n\n<tool_call>\n\nb", None, Some("a\n\n<tool_call>\n\nb"), &[]),
    (ToolFormat::Hermes, "x  <tool_call>", None, Some("x  <tool_call>"), &[]),
    (ToolFormat::Hermes, "One. <tool_call>{\"name\": \"add\"}</tool_call> Two.", None, Some("One. Two."), &["add {}"]),
    (ToolFormat::MistralList, "[TOOL_CALLS]Sure, {\"a\": 1}", None, Some("[TOOL_CALLS]Sure, {\"a\": 1}"), &[]),
    (ToolFormat::MistralArgs, "[TOOL_CALLS]Sure {x}", None, Some("[TOOL_CALLS]Sure {x}"), &[]),
    // JSON with mistakes that models make.
    (
        ToolFormat::Hermes,
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"p\": \"C:\\dir\nx\", \"b\": True, \"n\": 01,}}\n</tool_call>",
        None,
        None,
        &["add {\"p\": \"C:\\\\dir\\nx\", \"b\": true, \"n\": 1}"],
    ),
    (
        ToolFormat::Hermes,
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}\n</tool_call>",
        None,
        None,
        &["add {\"a\": 1}"],
    ),
    (
        ToolFormat::Hermes,
        "<tool_call>\n{\"name\": \"add\", \"arguments\": [\"x\"]}\n</tool_call>",
        None,
        Some("<tool_call>\n{\"name\": \"add\", \"arguments\": [\"x\"]}\n</tool_call>"),
        &[],
    ),
    (
        ToolFormat::Hermes,
        "<tool_call>{\"name\": \"add\", \"argum",
        None,
        Some("<tool_call>{\"name\": \"add\", \"argum"),
        &[],
    ),
    // Calls in code blocks.
    (
        ToolFormat::Json,
        "Sure:\n```json\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n```\n",
        None,
        Some("Sure:"),
        &["add {\"a\": 1}"],
    ),
    (
        ToolFormat::Llama3,
        "```\n[{\"name\": \"add\", \"parameters\": {}}, {\"name\": \"add\", \"parameters\": {}}]\n```",
        None,
        None,
        &["add {}", "add {}"],
    ),
    (
        ToolFormat::Json,
        "```json\n{\"name\": \"Bob\", \"arguments\": {}}\n```\n",
        None,
        Some("```json\n{\"name\": \"Bob\", \"arguments\": {}}\n```\n"),
        &[],
    ),
    // Calls in reasoning that are never closed.
    (
        ToolFormat::Hermes,
        "<think>I add.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>\n",
        Some("I add."),
        None,
        &["add {}"],
    ),
    (
        ToolFormat::Hermes,
        "<think>Not <tool_call>{\"name\": \"add\"}</tool_call> yet.</think>Done.",
        Some("Not <tool_call>{\"name\": \"add\"}</tool_call> yet."),
        Some("Done."),
        &[],
    ),
    (
        ToolFormat::Hermes,
        "<think>A <tool_call> here, <tool_call>{\"name\": \"other\"}</tool_call>",
        Some("A <tool_call> here, <tool_call>{\"name\": \"other\"}</tool_call>"),
        None,
        &[],
    ),
    // Incomplete or misplaced tags.
    (
        ToolFormat::FunctionTags,
        "<tool_call>\n<function=add>\n<parameter=s>\na </b>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n</function>",
        None,
        None,
        &["add {\"s\": \"a </b>\"}", "get_weather {}"],
    ),
    (
        ToolFormat::FunctionTags,
        "<tool_call>\n<function=add>\n<parameter=s>\n<a></function>\nb\n</parameter>\n</parameter>\n</tool_call>",
        None,
        None,
        &["add {\"s\": \"<a></function>\\nb\"}"],
    ),
    (ToolFormat::FunctionTags, "Use <function=foo> for it.", None, Some("Use <function=foo> for it."), &[]),
    (ToolFormat::FunctionTags, "Use <function=add> for it.", None, Some("Use <function=add> for it."), &[]),
    (
        ToolFormat::Glm,
        "<tool_call>add\n<arg_key>s</arg_key>\na</arg_value>\n<arg_key>t<arg_value>b\n</tool_call>",
        None,
        None,
        &["add {\"s\": \"a\", \"t\": \"b\"}"],
    ),
    (ToolFormat::Json, "  Two\n spaces ", None, Some("  Two\n spaces "), &[]),
];

/// Parses the pieces of an answer. Returns the message and the events.
fn parse(format: ToolFormat, pieces: &[&str], tools: &[Tool]) -> (Message, Vec<AnswerEvent>) {
    let mut parser = ToolCallParser::new(format, tools).with_reasoning(ReasoningMarkers::THINK, false);
    let mut events: Vec<_> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    events.extend(parser.finish());
    (Message::from_events(events.clone()), events)
}

/// Checks the result of a case whose answer arrives in `pieces`.
fn check(case: &Case, pieces: &[&str]) {
    let &(format, answer, reasoning, content, calls) = case;
    let (message, events) = parse(format, pieces, &tools());
    assert_eq!(message.reasoning_content.as_deref(), reasoning, "{answer}");
    assert_eq!(message.content.as_deref(), content.or(if calls.is_empty() { Some("") } else { None }), "{answer}");
    let found: Vec<_> =
        message.tool_calls.iter().map(|c| format!("{} {}", c.function.name, c.function.arguments)).collect();
    assert_eq!(found, calls, "{answer}");
    assert!(message.tool_calls.iter().all(|c| c.id.len() == 9 && c.id.bytes().all(|b| b.is_ascii_alphanumeric())));
    let ends = events.iter().filter(|event| matches!(event, AnswerEvent::CallEnd { .. })).count();
    assert_eq!(ends, calls.len(), "{answer}");
}

#[test]
fn answers_are_parsed_whole_and_letter_by_letter() {
    for case in CASES {
        check(case, &[case.1]);
        let letters: Vec<String> = case.1.chars().map(String::from).collect();
        check(case, &letters.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

#[test]
fn text_and_arguments_are_streamed_immediately() {
    let mut parser = ToolCallParser::new(ToolFormat::Hermes, &tools());
    assert_eq!(parser.push("Hello"), [AnswerEvent::Content("Hello".into())]);
    assert_eq!(parser.push(" there <tool"), [AnswerEvent::Content(" there".into())]);
    assert_eq!(parser.push("> x"), [AnswerEvent::Content(" <tool> x".into())]);
    assert_eq!(parser.push("\n<tool_call>{\"name\": \"ad"), []);
    let events = parser.push("d\", \"arguments\": {\"a\"");
    assert!(matches!(&events[0], AnswerEvent::CallStart { index: 0, name, .. } if name == "add"), "{events:?}");
    assert_eq!(events[1..], [AnswerEvent::CallArguments { index: 0, delta: "{".into() }]);
    assert_eq!(parser.push(": 1}"), [AnswerEvent::CallArguments { index: 0, delta: "\"a\": 1}".into() }]);
    assert_eq!(parser.push("}"), [AnswerEvent::CallEnd { index: 0 }]);
    assert_eq!(parser.push("</tool_call>"), []);
    assert_eq!((parser.finish(), parser.n_calls()), (vec![], 1));
}

#[test]
fn a_call_at_which_the_answer_is_cut_off_is_left_out() {
    const CALL: &str = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let read = |format, answer: &str| {
        let mut parser = ToolCallParser::new(format, &tools()).with_reasoning(ReasoningMarkers::THINK, false);
        let mut events = parser.push(answer);
        events.extend(parser.cut_off());
        parts(&Message::from_events(events))
    };
    let text = |text: &str| Some(text.to_owned());
    let call = || vec!["add {\"a\": 1}".to_owned()];
    let (hermes, open) = (ToolFormat::Hermes, &CALL[..CALL.find("1}}").unwrap()]);
    assert_eq!(read(hermes, CALL), (None, None, call()));
    assert_eq!(read(hermes, open), (None, text(""), vec![]));
    assert_eq!(read(hermes, &format!("Hm.\n{open}")), (None, text("Hm."), vec![]));
    assert_eq!(read(hermes, &format!("{CALL}\n{open}")), (None, None, call()));
    assert_eq!(read(ToolFormat::Llama3, "<|python_tag|>add(a=1"), (None, text(""), vec![]));
    // A held-back beginning of a marker becomes text, and a possible call in unclosed reasoning becomes reasoning.
    assert_eq!(read(hermes, "Hm. <tool_"), (None, text("Hm. <tool_"), vec![]));
    assert_eq!(read(hermes, &format!("<think>Hm.\n{CALL}")), (text(&format!("Hm.\n{CALL}")), text(""), vec![]));
}

#[test]
fn without_tools_calls_are_plain_text() {
    for &(format, answer, ..) in CASES.iter().filter(|case| !case.1.contains("<think>")) {
        assert_eq!(parse(format, &[answer], &[]).0, Message::assistant(answer));
    }
}

#[test]
fn reasoning_may_begin_in_the_prompt() {
    let mut parser = ToolCallParser::new(ToolFormat::Hermes, &[]).with_reasoning(ReasoningMarkers::THINK, true);
    let mut events = parser.push("\nFirst, ");
    assert_eq!(events, [AnswerEvent::Reasoning("First,".into())]);
    events.extend(parser.push("then.\n</th"));
    events.extend(parser.push("ink>\n\nYes."));
    let message = Message::from_events(events);
    assert_eq!((message.reasoning_content.as_deref(), message.text()), (Some("First, then."), "Yes."));
    let mut parser = ToolCallParser::new(ToolFormat::Hermes, &[]);
    assert_eq!(parser.push("<think>"), [AnswerEvent::Content("<think>".into())]);
}

fn template(name: &str) -> ChatTemplate {
    let path = format!("{}/tests/data/templates/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
    ChatTemplate::new(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The reasoning, text, and calls (as `name arguments`) of a message.
fn parts(message: &Message) -> (Option<String>, Option<String>, Vec<String>) {
    let call = |c: &metal_attention_chat::ToolCall| format!("{} {}", c.function.name, c.function.arguments);
    (message.reasoning_content.clone(), message.content.clone(), message.tool_calls.iter().map(call).collect())
}

/// Each answer is parsed whole, letter by letter, and divided at every place.
#[test]
fn answers_of_published_models_are_parsed_in_any_pieces() {
    let string = json!({"type": "string"});
    let add = json!({"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
        "a": {}, "s": string, "flag": {"type": "boolean"}, "list": {"type": "array"}}}}});
    let weather = json!({"type": "function", "function": {"name": "get_weather"}});
    let tools = [add, weather].map(|tool| Tool::try_from(tool).unwrap());
    for &(name, begun, answer, reasoning, content, calls) in PUBLISHED {
        let template = template(name);
        let variables = json!({"enable_thinking": true});
        let request = RenderRequest {
            messages: &[Message::user("Hi")],
            tools: &tools,
            add_generation_prompt: true,
            variables: variables.as_object().filter(|_| begun),
            ..Default::default()
        };
        let prompt = template.render(&request).unwrap();
        assert_eq!(template.reasoning_begun(&prompt.text).is_some(), begun, "{name}: {}", prompt.text);
        let expected = (
            reasoning.map(str::to_owned),
            content.map(str::to_owned).or_else(|| calls.is_empty().then(String::new)),
            calls.iter().map(|call| (*call).to_owned()).collect::<Vec<_>>(),
        );
        let read = |pieces: &[&str]| {
            let mut parser = template.answer_parser(&prompt.text, &tools);
            let events: Vec<_> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
            let message = Message::from_events(events.into_iter().chain(parser.finish()));
            assert_eq!(parts(&message), expected, "{name}: {pieces:?}");
            let is_object = |text: &str| serde_json::from_str::<serde_json::Map<_, serde_json::Value>>(text).is_ok();
            assert!(message.tool_calls.iter().all(|call| is_object(&call.function.arguments)), "{name}: {pieces:?}");
        };
        read(&[answer]);
        let letters: Vec<String> = answer.chars().map(String::from).collect();
        read(&letters.iter().map(String::as_str).collect::<Vec<_>>());
        for (at, _) in answer.char_indices() {
            read(&[&answer[..at], &answer[at..]]);
        }
    }
}

/// An answer may end anywhere. Its result does not depend on the pieces in which it arrived.
#[test]
fn truncated_answers_do_not_depend_on_their_pieces() {
    for &(name, begun, answer, ..) in PUBLISHED {
        let template = template(name);
        let prompt = if begun { "<think>" } else { "" };
        for (end, _) in answer.char_indices() {
            let read = |pieces: &[&str]| {
                let mut parser = template.answer_parser(prompt, &tools());
                let events: Vec<_> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
                parts(&Message::from_events(events.into_iter().chain(parser.finish())))
            };
            let letters: Vec<String> = answer[..end].chars().map(String::from).collect();
            let letters: Vec<_> = letters.iter().map(String::as_str).collect();
            assert_eq!(read(&letters), read(&[&answer[..end]]), "{name}: {}", &answer[..end]);
        }
    }
}

const FORMATS: &[ToolFormat] = &[
    ToolFormat::Hermes,
    ToolFormat::Glm,
    ToolFormat::Glm4,
    ToolFormat::FunctionTags,
    ToolFormat::Seed,
    ToolFormat::Llama3,
    ToolFormat::MistralList,
    ToolFormat::MistralArgs,
    ToolFormat::DeepSeek,
    ToolFormat::DeepSeekR1,
    ToolFormat::TaggedList,
    ToolFormat::Nemotron,
    ToolFormat::Jamba,
    ToolFormat::Pythonic,
    ToolFormat::CommandR,
    ToolFormat::Gemma,
    ToolFormat::Harmony,
    ToolFormat::Json,
];

const MARKERS: [ReasoningMarkers; 2] = [
    ReasoningMarkers::THINK,
    ReasoningMarkers { start: "[THINK]", end: "[/THINK]", answer: Some(("<response>", "</response>")) },
];

/// The pieces of which random answers are composed, mainly markers and parts of them.
const PIECES: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "{\"name\": \"add\"",
    ", \"arguments\": {",
    "}",
    "[",
    "]",
    "\\",
    "\"",
    ", ",
    "é",
    "{",
    ":",
    "x",
    " ",
    "\n",
    "<",
    "<|",
    "add",
    "add\n",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<function=",
    "<parameter=",
    ">",
    "</parameter>",
    "</function>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "```json",
    "```",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<TOOLCALL>",
    "</TOOLCALL>",
    "<tool_calls>",
    "</tool_calls>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "add(",
    "a=",
    "'",
    "\"\"\"",
    ")",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|tool_call>",
    "call:add{",
    "call:",
    "<|\"|>",
    "a:",
    "<tool_call|>",
    "<|channel|>",
    "analysis",
    "final",
    "commentary to=functions.add",
    "<|message|>",
    "<|end|>",
    "<|start|>",
    "assistant",
    "<|call|>",
    "to=",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<response>",
    "</response>",
    "                                                                                                                ",
];

/// The reasoning, text and calls of an answer that arrives in `pieces`.
fn parse_as(
    format: ToolFormat,
    markers: ReasoningMarkers,
    pieces: &[&str],
    tools: &[Tool],
) -> (Option<String>, Option<String>, Vec<String>) {
    let parser = ToolCallParser::new(format, tools);
    let mut parser = if format == ToolFormat::Harmony { parser } else { parser.with_reasoning(markers, false) };
    let events: Vec<_> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    parts(&Message::from_events(events.into_iter().chain(parser.finish())))
}

/// The time for a piece does not grow with the length of the answer.
#[test]
fn endless_answers_take_time_proportional_to_their_length() {
    for &format in FORMATS {
        for (opening, endless) in [
            ("", " "),
            ("x", "\n"),
            ("<think>", " "),
            ("<think>x", "\n"),
            ("<tool_call>", "a"),
            ("<tool_call>", " "),
            ("<tool_call><function=", "a"),
            ("<tool_call><function=add><parameter=s>", "\\\""),
            ("<tool_call>{\"name\": \"add\", \"arguments\": ", "["),
            ("[TOOL_CALLS]", "a"),
            ("[TOOL_CALLS]", "["),
            ("<|tool_call>call:add{a:", "["),
            ("<|tool_call>call:add{a:\"", "\\\""),
            ("<|tool_call>call:add{", " "),
            ("<|channel|>", "a"),
            ("", "<|start|>"),
            ("<|channel|>final<|message|>", "<"),
            ("<|python_tag|>", " "),
            ("<|tool_call_start|>", "["),
            ("<|tool_call_start|>[", "a"),
            ("<|tool_call_start|>[add(a=", "["),
            ("<|tool_call_start|>[add(a='", "' "),
            ("<|tool_call_start|>[add(a=", "'"),
            ("<|tool_call_start|>[add(", ","),
            ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        ] {
            let mut parser = ToolCallParser::new(format, &tools());
            if format != ToolFormat::Harmony {
                parser = parser.with_reasoning(ReasoningMarkers::THINK, false);
            }
            let begun = std::time::Instant::now();
            parser.push(opening);
            let piece = endless.repeat(16);
            for _ in 0..20_000 {
                parser.push(&piece);
            }
            parser.finish();
            assert!(begun.elapsed().as_secs() < 10, "{format:?}: {opening}{endless}");
        }
    }
}

proptest! {
    /// The result does not depend on the pieces.
    #[test]
    fn pieces_make_no_difference(case in 0..CASES.len(), cuts in prop::collection::vec(0..200_usize, 0..6)) {
        let answer = CASES[case].1;
        let mut cuts: Vec<_> = cuts.into_iter().filter(|&at| at < answer.len() && answer.is_char_boundary(at)).collect();
        cuts.extend([0, answer.len()]);
        cuts.sort_unstable();
        let pieces: Vec<_> = cuts.windows(2).map(|cut| &answer[cut[0]..cut[1]]).collect();
        check(&CASES[case], &pieces);
    }

    /// No text makes the parser panic; the result does not depend on the pieces; without tools and reasoning the text is
    /// unchanged.
    #[test]
    fn any_text_is_parsed(
        format in prop::sample::select(FORMATS),
        markers in prop::sample::select(&MARKERS[..]),
        pieces in prop::collection::vec(prop::sample::select(PIECES), 0..14),
    ) {
        let answer = pieces.concat();
        let letters: Vec<String> = answer.chars().map(String::from).collect();
        let letters: Vec<_> = letters.iter().map(String::as_str).collect();
        let read = |pieces: &[&str]| parse_as(format, markers, pieces, &tools());
        let whole = read(&[&answer]);
        prop_assert_eq!(&read(&pieces), &whole);
        prop_assert_eq!(&read(&letters), &whole);
        if format != ToolFormat::Harmony {
            let mut parser = ToolCallParser::new(format, &[]);
            let events: Vec<_> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
            let message = Message::from_events(events.into_iter().chain(parser.finish()));
            prop_assert_eq!(message, Message::assistant(answer));
        }
    }
}
