//! Answers as models write them, taken apart however they are cut into pieces.

use metal_attention_chat::{AnswerEvent, Message, ReasoningMarkers, Tool, ToolCallParser, ToolFormat};
use proptest::prelude::*;
use serde_json::json;

fn tools() -> Vec<Tool> {
    let tool = |name: &str| Tool::try_from(json!({"type": "function", "function": {"name": name}})).unwrap();
    vec![tool("get_weather"), tool("add")]
}

/// A format, an answer, and what is in it: thoughts, text, and calls as `name arguments`.
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
        Some("Let me see.Done."),
        &["add {\"s\": \"}é</tool_call>\"}", "other {}"],
    ),
    (ToolFormat::Hermes, "<tool_call>never mind", None, Some("<tool_call>never mind"), &[]),
    (ToolFormat::Hermes, "<tool_call>{\"a\": 1}", None, Some("<tool_call>{\"a\": 1}"), &[]),
    (
        ToolFormat::Hermes,
        "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": [1, ",
        None,
        None,
        &["add {\"a\": [1, "],
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
    (ToolFormat::Json, "  Two\n spaces ", None, Some("  Two\n spaces "), &[]),
];

fn parse(format: ToolFormat, pieces: &[&str], tools: &[Tool]) -> (Message, Vec<AnswerEvent>) {
    let mut parser = ToolCallParser::new(format, tools).thinking(ReasoningMarkers::THINK, false);
    let mut events: Vec<_> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    events.extend(parser.finish());
    (Message::from_events(events.clone()), events)
}

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
fn answers_are_taken_apart_whole_and_letter_by_letter() {
    for case in CASES {
        check(case, &[case.1]);
        let letters: Vec<String> = case.1.chars().map(String::from).collect();
        check(case, &letters.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

#[test]
fn text_comes_at_once_and_arguments_as_they_are_written() {
    let mut parser = ToolCallParser::new(ToolFormat::Hermes, &tools());
    assert_eq!(parser.push("Hello"), [AnswerEvent::Content("Hello".into())]);
    assert_eq!(parser.push(" there <tool"), [AnswerEvent::Content(" there".into())]);
    assert_eq!(parser.push("> x"), [AnswerEvent::Content(" <tool> x".into())]);
    assert_eq!(parser.push("\n<tool_call>{\"name\": \"ad"), []);
    let events = parser.push("d\", \"arguments\": {\"a\"");
    assert!(matches!(&events[0], AnswerEvent::CallStart { index: 0, name, .. } if name == "add"), "{events:?}");
    assert_eq!(events[1..], [AnswerEvent::CallArguments { index: 0, delta: "{\"a\"".into() }]);
    assert_eq!(parser.push(": 1}"), [AnswerEvent::CallArguments { index: 0, delta: ": 1}".into() }]);
    assert_eq!(parser.push("}"), [AnswerEvent::CallEnd { index: 0 }]);
    assert_eq!(parser.push("</tool_call>"), []);
    assert_eq!((parser.finish(), parser.n_calls()), (vec![], 1));
}

#[test]
fn without_tools_nothing_is_a_call() {
    for &(format, answer, ..) in CASES.iter().filter(|case| !case.1.contains("<think>")) {
        assert_eq!(parse(format, &[answer], &[]).0, Message::assistant(answer));
    }
}

#[test]
fn thoughts_may_begin_in_the_prompt() {
    let mut parser = ToolCallParser::new(ToolFormat::Hermes, &[]).thinking(ReasoningMarkers::THINK, true);
    let mut events = parser.push("\nFirst, ");
    assert_eq!(events, [AnswerEvent::Reasoning("First,".into())]);
    events.extend(parser.push("then.\n</th"));
    events.extend(parser.push("ink>\n\nYes."));
    let message = Message::from_events(events);
    assert_eq!((message.reasoning_content.as_deref(), message.text()), (Some("First, then."), "Yes."));
    let mut parser = ToolCallParser::new(ToolFormat::Hermes, &[]);
    assert_eq!(parser.push("<think>"), [AnswerEvent::Content("<think>".into())]);
}

proptest! {
    /// However an answer is cut, the same is in it.
    #[test]
    fn pieces_make_no_difference(case in 0..CASES.len(), cuts in prop::collection::vec(0..200_usize, 0..6)) {
        let answer = CASES[case].1;
        let mut cuts: Vec<_> = cuts.into_iter().filter(|&at| at < answer.len() && answer.is_char_boundary(at)).collect();
        cuts.extend([0, answer.len()]);
        cuts.sort_unstable();
        let pieces: Vec<_> = cuts.windows(2).map(|cut| &answer[cut[0]..cut[1]]).collect();
        check(&CASES[case], &pieces);
    }

    /// Whatever a model writes, nothing goes wrong, and text without marks is not changed.
    #[test]
    fn any_text_is_taken(
        format in prop::sample::select(vec![
            ToolFormat::Hermes, ToolFormat::Llama3, ToolFormat::MistralList, ToolFormat::MistralArgs, ToolFormat::Json,
        ]),
        pieces in prop::collection::vec(
            "<tool_call>|</tool_call>|\\[TOOL_CALLS\\]|\\[ARGS\\]|<\\|python_tag\\|>|\\{\"name\": ?\"add\"|, ?\"arguments\": ?\\{|\\}|[\\[\\]\\\\\", é{:x]{0,3}",
            0..12,
        ),
    ) {
        let pieces: Vec<_> = pieces.iter().map(String::as_str).collect();
        parse(format, &pieces, &tools());
        prop_assert_eq!(parse(format, &pieces, &[]).0, Message::assistant(pieces.concat()));
    }
}
