//! Derives the format of tool calls from a chat template: the template renders calls whose names, ids, keys and values
//! are unique strings, and the text around these strings is the format.

use serde_json::{Deserializer, Value, json};

use super::call_derived::is_blank_mark;
use super::derived::{CallId, DerivedArguments, DerivedFormat, DerivedMarks, DerivedTags, NUMBER, ValueKindFlag};
use super::{ToolCallParser, ToolFormat};
use crate::{ChatTemplate, Message, RenderRequest, Tool, ToolCall};

const USER: &str = "wquserwq";
const CONTENT: &str = "wqcontentwq";
const NAMES: [&str; 2] = ["wqalphawq", "wqbetawq"];
const IDS: [&str; 2] = ["wqidonewq", "wqidtwowq"];
/// The keys of a string, an integer, an object and a string.
const KEYS: [&str; 4] = ["wqtextwq", "wqintegerwq", "wqobjectwq", "wqlastwq"];
const TEXTS: [&str; 2] = ["wqvalueonewq", "wqvaluetwowq"];
const INTEGER: &str = "74159";

fn arguments() -> Value {
    json!({KEYS[0]: TEXTS[0], KEYS[1]: 74159, KEYS[2]: {"wqinnerwq": "wqdeepwq"}, KEYS[3]: TEXTS[1]})
}

fn tools() -> Vec<Tool> {
    let kinds = ["string", "integer", "object", "string"];
    let properties: serde_json::Map<String, Value> =
        KEYS.iter().zip(kinds).map(|(key, kind)| ((*key).to_owned(), json!({"type": kind}))).collect();
    let tool = |name: &&str| {
        let parameters = json!({"type": "object", "properties": properties, "required": []});
        Tool::try_from(json!({"type": "function", "function": {
            "name": name, "description": "", "parameters": parameters}}))
    };
    NAMES.iter().filter_map(|name| tool(name).ok()).collect()
}

/// The format of `template`; `None` if none is found, or if it does not parse the template's own rendering of calls.
pub(crate) fn derived(template: &ChatTemplate) -> Option<&'static DerivedFormat> {
    let source = template.source_for_tools();
    let functionary = || source.contains("<function=").then(DerivedMarks::functionary)?.format();
    let probe = Probe { template: &template.with_missing_tokens(), tools: tools() };
    let found = [IDS, ["functions.wqalphawq:0", "functions.wqbetawq:1"]].into_iter().find_map(|ids| {
        let mut marks = probe.marks(ids)?;
        if let DerivedArguments::Tags(tags) = &mut marks.arguments {
            tags.cdata = source.contains("<![CDATA[");
        }
        let format = DerivedMarks { python: source.contains("<|python_tag|>"), ..marks }.format()?;
        probe.is_read(format, ids).then_some(format)
    });
    found.or_else(functionary)
}

struct Probe<'a> {
    template: &'a ChatTemplate,
    tools: Vec<Tool>,
}

impl Probe<'_> {
    /// The text of an answer with `n` calls, as the template writes it, after the content of the message.
    fn answer(&self, ids: [&str; 2], n: usize) -> Option<String> {
        let call = |i: usize| ToolCall::new(ids[i], NAMES[i], arguments().to_string());
        let message = Message { tool_calls: (0..n).map(call).collect(), ..Message::assistant(CONTENT) };
        let text = self.render(&[Message::user(USER), message], false)?;
        let rest = &text[text.rfind(USER)? + USER.len()..];
        if let Some(at) = rest.find(CONTENT) {
            return Some(rest[at + CONTENT.len()..].to_owned());
        }
        // The template omits the content of a message with calls.
        let prompt = self.render(&[Message::user(USER)], true)?;
        let prompt = &prompt[prompt.rfind(USER)? + USER.len()..];
        let at = common_prefix(rest, prompt);
        let rest = &rest[at..];
        let at = rest.find('<').filter(|_| !rest.starts_with(['<', '[', '{'])).unwrap_or(0);
        Some(rest[at..].to_owned())
    }

    fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Option<String> {
        let request = RenderRequest { messages, tools: &self.tools, add_generation_prompt, ..Default::default() };
        self.template.render_variant(&request).ok().map(|prompt| prompt.text)
    }

    fn marks(&self, ids: [&str; 2]) -> Option<DerivedMarks> {
        let calls = self.answer(ids, 2).filter(|text| NAMES.iter().all(|name| text.contains(name)));
        let calls = calls.or_else(|| self.answer(ids, 1))?;
        let end_of_turn = self.answer(ids, 0)?;
        RenderedCalls::new(&calls, &end_of_turn).marks(ids)
    }

    /// Whether the format parses the calls that the template writes.
    fn is_read(&self, format: &'static DerivedFormat, ids: [&str; 2]) -> bool {
        let n_calls = |text: &str| {
            let mut parser = ToolCallParser::new(ToolFormat::Derived(format), &self.tools);
            let mut events = parser.push(text);
            events.extend(parser.finish());
            let calls = Message::from_events(events).tool_calls;
            let is_call = |(call, name): (&ToolCall, &&str)| {
                let read = serde_json::from_str::<Value>(&call.function.arguments).ok();
                call.function.name == **name && read == Some(arguments())
            };
            if calls.iter().zip(&NAMES).all(is_call) { calls.len() } else { 0 }
        };
        let one = self.answer(ids, 1).is_some_and(|text| n_calls(&text) == 1);
        let two = self.answer(ids, 2).filter(|text| text.contains(NAMES[1]));
        one && two.is_none_or(|text| n_calls(&text) == 2)
    }
}

/// The length in bytes of the common prefix.
fn common_prefix(a: &str, b: &str) -> usize {
    a.char_indices().zip(b.chars()).find(|((_, a), b)| a != b).map_or(a.len().min(b.len()), |((at, _), _)| at)
}

/// The common suffix, from the first start of a mark in it.
fn common_suffix<'t>(a: &'t str, b: &str) -> &'t str {
    let n: usize = a.chars().rev().zip(b.chars().rev()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
    let at = a.len() - n;
    if n == a.len() || n == b.len() {
        return &a[at..];
    }
    match a[at..].find(['<', '[', '{', '>']).map(|found| (found, &a[at + found..])) {
        // The '>' is the end of another mark.
        Some((_, text)) if text.starts_with('>') => text[1..].find(['<', '[', '{']).map_or("", |at| &text[1 + at..]),
        Some((_, text)) => text,
        None => "",
    }
}

/// The two marks that `text` consists of; `None` if it does not.
fn two_marks(text: &str) -> Option<(String, String)> {
    let (first, second) = text.trim().split_once('>')?;
    let second = second.trim_start();
    let is_mark = |text: &str| text.starts_with('<') && !text[1..].contains('<');
    (is_mark(first) && is_mark(second)).then(|| (format!("{first}>"), second.to_owned()))
}

/// The rendering of an answer with calls, after its content.
struct RenderedCalls<'t> {
    text: &'t str,
    /// The text that the template writes there without calls.
    end_of_turn: &'t str,
}

impl<'t> RenderedCalls<'t> {
    /// The calls may be before or within the text that ends the turn.
    fn new(text: &'t str, end_of_turn: &'t str) -> Self {
        let n = common_prefix(text, end_of_turn);
        let end = &end_of_turn[n..];
        match text[n..].strip_suffix(end).filter(|_| !text.ends_with(end_of_turn)) {
            Some(inner) => Self { text: inner, end_of_turn: "" },
            None => Self { text, end_of_turn },
        }
    }

    fn marks(&self, ids: [&str; 2]) -> Option<DerivedMarks> {
        let text = self.text;
        let key = text.find(KEYS[0])?;
        let name = text[..key].rfind(NAMES[0])?;
        let after_name = name + NAMES[0].len();
        let mut before = &text[..name];
        let mut between = &text[after_name..key];
        let mut id = CallId::None;
        if let Some(at) = before.rfind(ids[0]) {
            id = CallId::Before(before[at + ids[0].len()..].to_owned());
            before = &before[..at];
        } else if let Some(at) = between.find(ids[0]) {
            id = CallId::After(between[..at].to_owned());
            between = &between[at + ids[0].len()..];
        } else if let Some(short) = before.strip_suffix("functions.")
            && let Some(index) = between.strip_prefix(':')
        {
            (before, id) = (short, CallId::Named);
            between = index.trim_start_matches(|c: char| c.is_ascii_digit());
        }
        if before.contains(NAMES[0]) {
            return None;
        }
        // The end of the arguments, and their notation.
        let mut object = None;
        if let Some(brace) = text[..key].rfind('{').filter(|brace| *brace >= after_name) {
            let mut values = Deserializer::from_str(&text[brace..]).into_iter::<Value>();
            if values.next().and_then(Result::ok).is_some_and(|value| value == arguments()) {
                object = Some(brace + values.byte_offset());
            }
        }
        let (tags, end) = if let Some(end) = object {
            between = &between[..between.rfind('{')?];
            (None, end)
        } else {
            let (tags, start) = self.tags(key, between)?;
            between = start;
            let end = text.find(TEXTS[1])? + TEXTS[1].len();
            let end = end + text[end..].find(tags.after_value.trim())? + tags.after_value.trim().len();
            (Some(tags), end)
        };
        let rest = &text[end..];
        let (mut call_start, mut call_end, mut separator, section_end) = self.around(rest, before, ids);
        let mut section_start = before.strip_suffix(&*call_start).unwrap_or_default().to_owned();
        let mut section_end = section_end;
        let mut arguments = tags.map_or(DerivedArguments::Json, DerivedArguments::Tags);
        // {"name": "...", "arguments": {...}}
        if arguments == DerivedArguments::Json
            && let Some(brace) = call_start.rfind('{')
            && call_end.trim_start().starts_with('}')
        {
            let bare = |text: &str| text.split_whitespace().collect::<String>();
            let key = bare(between);
            let key = key.strip_prefix("\",\"").and_then(|key| key.strip_suffix("\":"));
            if bare(&call_start[brace..]) == "{\"name\":\""
                && let Some(key) = key.filter(|key| matches!(*key, "arguments" | "parameters"))
            {
                arguments = DerivedArguments::Object(key.to_owned());
                call_start.truncate(brace);
                call_end.drain(..=call_end.len() - call_end.trim_start().len());
            }
        }
        if section_start.trim().is_empty()
            && let Some((outer, inner)) = two_marks(&call_start)
            && let Some((inner_end, outer_end)) = two_marks(&call_end)
        {
            // The template repeats all marks for each call; a model writes several calls within the outer marks.
            (section_start, section_end) = (outer, outer_end);
            (call_start, call_end) = (inner, inner_end);
        } else if section_start.trim().is_empty() {
            // The mark ends the turn, not the calls.
            section_end.clear();
        }
        if section_start.matches('<').count() == 1
            && let Some((mark, _)) = two_marks(&section_end)
        {
            // The second mark ends the turn.
            section_end = mark;
        }
        let list = section_start.trim_end().ends_with('[') && section_end.trim_start().starts_with(']');
        if list {
            section_start.truncate(section_start.trim_end().len() - 1);
            section_end.drain(..=section_end.len() - section_end.trim_start().len());
        }
        if separator.is_empty() && call_start.trim().is_empty() {
            separator = "\n".into();
        }
        let marks = DerivedMarks {
            section: (section_start, section_end),
            list,
            call: (call_start, call_end),
            separator,
            id,
            between: between.to_owned(),
            arguments,
            python: false,
        };
        let opening = if marks.section.0.trim().is_empty() { &marks.call.0 } else { &marks.section.0 };
        (!is_blank_mark(opening)).then_some(marks)
    }

    /// The start and the end mark of a call, the separator, and the end mark of all calls. `rest` is the text after
    /// the arguments of the first call, `before` the text before its name.
    fn around(&self, rest: &str, before: &str, ids: [&str; 2]) -> (String, String, String, String) {
        let second = rest.find(ids[1]).into_iter().chain(rest.find(NAMES[1])).min();
        let without_turn = |text: &str| {
            let turn = self.end_of_turn;
            text.strip_suffix(turn).or_else(|| text.trim_end().strip_suffix(turn.trim())).unwrap_or(text).to_owned()
        };
        let Some(second) = second else {
            return (before.to_owned(), without_turn(rest), String::new(), String::new());
        };
        let middle = &rest[..second];
        let middle = middle.strip_suffix("functions.").filter(|_| !before.ends_with("functions.")).unwrap_or(middle);
        let start = common_suffix(before, middle);
        let middle = &middle[..middle.len() - start.len()];
        // The last value of the second call is a string, possibly followed by the object's brace.
        let last = rest.rfind(TEXTS[1]).map_or(rest.len(), |at| at + TEXTS[1].len());
        let first = self.text.find(TEXTS[1]).map_or(0, |at| at + TEXTS[1].len());
        let skipped = (self.text.len() - rest.len()).saturating_sub(first);
        let end = without_turn(rest.get(last + skipped..).unwrap_or_default());
        let n = common_prefix(middle, &end);
        // The common prefix is cut to whole marks.
        let n = if n == middle.len() || n == end.len() {
            n
        } else {
            middle[..n].rfind(['>', ']', '}']).map_or(0, |at| at + 1)
        };
        (start.to_owned(), middle[..n].to_owned(), middle[n..].to_owned(), end[n..].to_owned())
    }

    /// The tags of the arguments, and the text between the name and the first tag. `key` is the offset of the first
    /// key.
    fn tags<'b>(&self, key: usize, between: &'b str) -> Option<(DerivedTags, &'b str)> {
        let text = &self.text[key..];
        let part = |from: &str, to: &str| {
            let begin = text.find(from)? + from.len();
            let end = begin + text[begin..].find(to)?;
            Some(&text[begin..end])
        };
        let after_text = part(KEYS[0], TEXTS[0])?;
        let next = part(TEXTS[0], KEYS[1])?;
        let after_integer = part(KEYS[1], INTEGER)?;
        let before_key = common_suffix(between, next);
        let after_value = &next[..next.len() - before_key.len()];
        let between = &between[..between.len() - before_key.len()];
        if [before_key, after_text, after_value].iter().any(|mark| mark.trim().is_empty()) {
            return None;
        }
        let (after_key, flag) = if after_text == after_integer {
            (after_text.to_owned(), None)
        } else {
            let n = common_prefix(after_text, after_integer);
            let n = after_text[..n].rfind('"')? + 1;
            let word = |text: &str| Some(text[n..].split_once('"')?.0.to_owned());
            let (text, other) = (word(after_text)?, word(after_integer)?);
            let after = after_text[n + text.len()..].to_owned();
            (after_text[..n].to_owned(), Some(ValueKindFlag { text, other, after }))
        };
        let tags = DerivedTags {
            before_key: before_key.to_owned(),
            after_key,
            flag,
            after_value: after_value.to_owned(),
            cdata: false,
        };
        (!tags.after_key.contains(NUMBER)).then_some((tags, between))
    }
}
