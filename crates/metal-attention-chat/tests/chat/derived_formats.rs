//! Tool-call formats that are derived from a chat template instead of being known by name: parsing of calls as models write
//! them, of truncated calls, and of calls that a grammar forces.

use std::collections::BTreeMap;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use metal_attention_chat::{AnswerEvent, ChatTemplate, Message, Tool, ToolCallParser, ToolFormat};
use serde_json::{Value, json};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// A template in the style of Kimi: all markers surround each call, whose id contains the function's name.
const KIMI: &str = "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% for c in m.tool_calls or [] %}<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments|tojson }}<|tool_call_end|><|tool_calls_section_end|>{% endfor %}{% endfor %}{% if tools %}{{ tools|tojson }}{% endif %}<|im_assistant|>";
const MINIMAX: &str = "{% for m in messages %}]~b]{{ m.content }}[e~[{% for c in m.tool_calls or [] %}<minimax:tool_call><invoke name=\"{{ c.function.name }}\">{% for k, v in c.function.arguments|items %}<parameter name=\"{{ k }}\">{{ v }}</parameter>{% endfor %}</invoke></minimax:tool_call>{% endfor %}{% endfor %}{% if tools %}{{ tools|tojson }}{% endif %}]~b]ai\n";
const FUNCTIONARY: &str = "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' }}{{ m.content }}{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>{{ c.function.arguments|tojson }}</function>{% endfor %}<|eot_id|>{% endfor %}{% if tools %}{{ tools|tojson }}{% endif %}<|start_header_id|>assistant<|end_header_id|>";
/// A template that describes calls only in its system text.
const FUNCTIONARY_IN_WORDS: &str =
    "{{ 'Call with <function=name>{...}</function>' }}{% for m in messages %}{{ m.content }}{% endfor %}";

/// The templates of llama.cpp, by name.
fn published() -> BTreeMap<String, String> {
    let text = metal_attention_testing::unpacked("crates/metal-attention-chat/tests/data/llama.cpp-templates.json");
    serde_json::from_slice(&text).unwrap()
}

fn tools() -> Vec<Tool> {
    let edit = json!({"path": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}});
    [("edit", edit), ("now", json!({}))]
        .into_iter()
        .map(|(name, properties)| {
            let parameters = json!({"type": "object", "properties": properties});
            let function = json!({"name": name, "parameters": parameters});
            Tool::try_from(json!({"type": "function", "function": function})).unwrap()
        })
        .collect()
}

/// Parses `text` in pieces of `size` characters.
fn read(format: ToolFormat, text: &str, size: usize) -> Message {
    let mut parser = ToolCallParser::new(format, &tools());
    let chars: Vec<char> = text.chars().collect();
    let mut events: Vec<AnswerEvent> = Vec::new();
    for piece in chars.chunks(size) {
        events.extend(parser.push(&piece.iter().collect::<String>()));
    }
    events.extend(parser.finish());
    Message::from_events(events)
}

/// The calls as names and arguments.
fn pairs(message: &Message) -> Vec<(String, Value)> {
    let value = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    message.tool_calls.iter().map(|call| (call.function.name.clone(), value(&call.function.arguments))).collect()
}

/// The formats, named by the templates from which they are derived, with two calls as a model writes them: `edit` with all
/// of its arguments, and `now`.
fn formats_and_answers() -> Vec<(String, ToolFormat, String)> {
    let kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>{\"path\": \"a\\n<b\", \"n\": 3, \"o\": {\"k\": [1]}}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>";
    let minimax = "<minimax:tool_call>\n<invoke name=\"edit\">\n<parameter name=\"path\">a\n<b</parameter>\n<parameter name=\"n\">3</parameter>\n<parameter name=\"o\">{\"k\": [1]}</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>";
    let functionary =
        "<function=edit>{\"path\": \"a\\n<b\", \"n\": 3, \"o\": {\"k\": [1]}}</function><function=now>{}</function>";
    let dsml = |section: &str| {
        "<#section>\n<#invoke name=\"edit\">\n<#parameter name=\"path\" string=\"true\">a\n<b</#parameter>\n<#parameter name=\"n\" string=\"false\">3</#parameter>\n<#parameter name=\"o\" string=\"false\">{\"k\": [1]}</#parameter>\n</#invoke>\n<#invoke name=\"now\">\n</#invoke>\n</#section>"
            .replace("section", section)
            .replace('#', "｜DSML｜")
    };
    let hy3 = "<tool_calls#>\n<tool_call#>edit<tool_sep#>\n<arg_key#>path</arg_key#>\n<arg_value#>a\n<b</arg_value#>\n<arg_key#>n</arg_key#>\n<arg_value#>3</arg_value#>\n<arg_key#>o</arg_key#>\n<arg_value#>{\"k\": [1]}</arg_value#>\n</tool_call#>\n<tool_call#>now<tool_sep#>\n</tool_call#>\n</tool_calls#>"
        .replace('#', ":opensource");
    let solar = "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>edit<|tool_call:args|>{\"path\": \"a\\n<b\", \"n\": 3, \"o\": {\"k\": [1]}}<|tool_call:end|><|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>";
    let apertus = "<|tools_prefix|>[{\"edit\": {\"path\": \"a\\n<b\", \"n\": 3, \"o\": {\"k\": [1]}}}, {\"now\": {}}]<|tools_suffix|>";
    let apertus_wide = "<|tools_prefix|> [ { \"edit\" : {\"path\": \"a\\n<b\", \"n\": 3, \"o\": {\"k\": [1]}} },\n {\"now\": {}} ] <|tools_suffix|>";
    let gigachat = "<|function_call|>{\"name\": \"edit\", \"arguments\": {\"path\": \"a\\n<b\", \"n\": 3, \"o\": {\"k\": [1]}}}<|function_call|>{\"name\": \"now\", \"arguments\": {}}";
    let minicpm = "<function name=\"edit\"><param name=\"path\"><![CDATA[a\n<b]]></param><param name=\"n\">3</param><param name=\"o\">{'k': [1]}</param></function>\n<function name=\"now\"></function>";
    let published = published();
    let template_of = |name: &str| published[name].clone();
    [
        ("Kimi", KIMI.to_owned(), kimi.to_owned()),
        ("MiniMax", MINIMAX.to_owned(), minimax.to_owned()),
        ("Functionary", FUNCTIONARY.to_owned(), functionary.to_owned()),
        ("Functionary in words", FUNCTIONARY_IN_WORDS.to_owned(), functionary.to_owned()),
        ("Kimi K2", template_of("Kimi-K2-Instruct"), kimi.to_owned()),
        ("Kimi K2, first", template_of("moonshotai-Kimi-K2"), kimi.to_owned()),
        ("Kimi K2 Thinking", template_of("Kimi-K2-Thinking"), kimi.to_owned()),
        ("MiniMax M2", template_of("MiniMax-M2"), minimax.to_owned()),
        ("MiniMax M2, close", template_of("MiniMax-M2"), minimax.replace(">\n<", "><")),
        ("Functionary 3.1", template_of("meetkai-functionary-medium-v3.1"), functionary.to_owned()),
        ("DeepSeek V3.2", template_of("deepseek-ai-DeepSeek-V3.2"), dsml("function_calls")),
        ("DeepSeek V4", template_of("deepseek-ai-DeepSeek-V4"), dsml("tool_calls")),
        ("Hy 3", template_of("tencent-Hy3"), hy3),
        ("Solar Open", template_of("upstage-Solar-Open-100B"), solar.to_owned()),
        ("Apertus", template_of("Apertus-8B-Instruct"), apertus.to_owned()),
        ("Apertus, wide", template_of("Apertus-8B-Instruct"), apertus_wide.to_owned()),
        ("GigaChat 3.1", template_of("GigaChat3.1-10B-A1.8B"), gigachat.to_owned()),
        ("MiniCPM 5", template_of("openbmb-MiniCPM5-1B"), minicpm.to_owned()),
    ]
    .map(|(name, source, text)| {
        let format = ToolFormat::of_template(&source);
        assert!(matches!(format, ToolFormat::Derived(_)), "{name}: {format:?}");
        assert_eq!(ChatTemplate::new(&source).unwrap().tool_format(), format);
        (name.to_owned(), format, text)
    })
    .to_vec()
}

#[test]
fn calls_are_parsed_as_models_write_them() {
    let edit = json!({"path": "a\n<b", "n": 3, "o": {"k": [1]}});
    let expected = [("edit".to_owned(), edit), ("now".to_owned(), json!({}))];
    for (name, format, text) in formats_and_answers() {
        for size in [1, 2, 3, 5, 8, 13, 1000] {
            let message = read(format, &text, size);
            assert_eq!(pairs(&message), expected, "{name}: {text}");
            assert_eq!(message.content, None, "{name}");
            let message = read(format, &format!("I see. {text}\nDone."), size);
            assert_eq!(pairs(&message), expected, "{name}");
            assert_eq!(
                message.content.unwrap().split_whitespace().collect::<Vec<_>>(),
                ["I", "see.", "Done."],
                "{name}"
            );
        }
    }
}

/// The arguments of a truncated call are completed to valid JSON, and text without a call stays text.
#[test]
fn truncated_calls_are_closed() {
    for (name, format, text) in formats_and_answers() {
        for (at, _) in text.char_indices() {
            let message = read(format, &text[..at], 7);
            assert!(pairs(&message).iter().all(|(_, value)| value.is_object()), "{name}: {:?}", &text[..at]);
            let again = read(format, &text[..at], 1);
            assert_eq!(
                (pairs(&again), &again.content),
                (pairs(&message), &message.content),
                "{name}: {:?}",
                &text[..at]
            );
        }
        for none in ["a < b and [c]", "<|", "{\"edit\": {}}", "<x name=\"edit\">"] {
            assert_eq!(read(format, none, 3).content.as_deref(), Some(none), "{name}");
            assert!(read(format, none, 3).tool_calls.is_empty());
        }
    }
}

/// A long string in the arguments is streamed before it ends.
#[test]
fn long_arguments_are_streamed() {
    let long = "word ".repeat(1000);
    for (name, format, text) in formats_and_answers() {
        let mut parser = ToolCallParser::new(format, &tools());
        let begin = text.find("a\n<b").or_else(|| text.find("a\\n<b")).unwrap();
        parser.push(&text[..begin]);
        let events = parser.push(&long);
        let n: usize =
            events.iter().map(|e| if let AnswerEvent::CallArguments { delta, .. } = e { delta.len() } else { 0 }).sum();
        assert!(n > 4900, "{name}: {n}");
    }
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

/// A text of the grammar, built byte by byte. Grammars of these tests leave no choice but white space.
fn forced(lark: &str) -> String {
    let mut text: Vec<u8> = Vec::new();
    let bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).chain([Vec::new()]).collect();
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(TokTrie::from(&TokRxInfo::new(257, 256), &bytes)));
    let factory = ParserFactory::new_simple(&env).unwrap();
    let parser = factory.create_parser(TopLevelGrammar::from_lark(lark.to_owned())).unwrap();
    let mut matcher = Matcher::new(Ok(parser));
    while !matcher.is_accepting().unwrap() && text.len() < 1000 {
        let mask = matcher.compute_mask().unwrap();
        // Prefers other bytes to white space.
        let next = (0..256).filter(|&byte| mask.is_allowed(byte)).max_by_key(|&byte| byte > 32).unwrap();
        matcher.consume_token(next).unwrap();
        text.push(u8::try_from(next).unwrap());
    }
    String::from_utf8(text).unwrap()
}

#[test]
fn forced_calls_are_parsed() {
    let empty = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let now = Tool::try_from(json!({"type": "function", "function": {"name": "now", "parameters": empty}})).unwrap();
    let path = json!({"type": "object", "properties": {"path": {"type": "string", "enum": ["x"]}}, "required": ["path"],
        "additionalProperties": false});
    let edit = Tool::try_from(json!({"type": "function", "function": {"name": "edit", "parameters": path}})).unwrap();
    for (name, format, _) in formats_and_answers() {
        let lark = format.grammar(std::slice::from_ref(&now), false, None, None);
        let text = forced(&lark);
        assert!(accepts(&lark, &text), "{name}: {text}");
        assert_eq!(pairs(&read(format, &text, 3)), [("now".to_owned(), json!({}))], "{name}: {text}");
        let lark = format.grammar(std::slice::from_ref(&edit), false, None, None);
        let text = forced(&lark);
        assert_eq!(pairs(&read(format, &text, 3)), [("edit".to_owned(), json!({"path": "x"}))], "{name}: {text}");
        assert_eq!(read(format, &text, 3).content, None, "{name}: {text}");
        assert!(!accepts(&lark, "Hello"));
        let several = format.grammar(&[edit.clone(), now.clone()], true, None, None);
        assert!(accepts(&several, &text), "{name}: {several}");
    }
}
