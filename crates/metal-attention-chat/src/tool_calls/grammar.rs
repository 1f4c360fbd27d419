//! Grammars for answers that must call a tool, or that have a required form, in each format of tool calls.

use metal_attention_tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::derived::{DerivedArguments, DerivedMarks};
use super::grammar_values::{ArgumentStyle, ArgumentsGrammar, MAX_EFFORT};
use super::syntax::{ARGS, DEEPSEEK_SEPARATOR, GEMMA_QUOTE, Syntax};
use super::{DerivedFormat, ToolFormat, call_python};
use crate::{ReasoningMarkers, Tool};

impl ToolFormat {
    /// A grammar, in llguidance's Lark, of the answers that call one of `tools` (which must not be empty); with
    /// `parallel` one or more calls. Arguments in JSON follow the tools' JSON schemas; in other notations they follow
    /// the types and enumerations in the schemas.
    ///
    /// `reasoning`: the markers of the reasoning within which the answer begins. With a `tokenizer`, marks that are
    /// control tokens are required as tokens.
    pub fn grammar(
        self,
        tools: &[Tool],
        parallel: bool,
        reasoning: Option<ReasoningMarkers>,
        tokenizer: Option<&Tokenizer>,
    ) -> String {
        let marks = MarkEncoder { tokenizer };
        let mark = |text: &str| marks.mark(text);
        let list = |separator: &str| {
            let more = if parallel { format!(" ({separator}call)*") } else { String::new() };
            format!("call{more}")
        };
        let calls = match self {
            Self::Derived(format) => {
                let DerivedMarks { section, list: in_list, separator, .. } = &format.marks;
                let (open, close) = if *in_list { ("\"[\"", "\"]\"") } else { ("", "") };
                let separator = marks.text(separator) + " ";
                let (start, end) = (marks.text(section.0.trim_start()), marks.text(section.1.trim_end()));
                // Without end marks, only one call is possible.
                format!("{start} {open} {} {close} {end}", list(&separator))
            }
            Self::Hermes | Self::FunctionTags | Self::Seed | Self::Glm | Self::Json => list("\"\\n\" "),
            Self::Llama3 => list("\"; \" "),
            Self::MistralArgs | Self::Gemma => list(""),
            Self::MistralList => format!("{} \"[\" {} \"]\"", mark("[TOOL_CALLS]"), list("\", \" ")),
            Self::TaggedList => format!("{} \"[\" {} \"]\"", mark("<|tool_call|>"), list("\", \" ")),
            Self::CommandR | Self::Nemotron | Self::Jamba | Self::Pythonic => {
                let Syntax { openings, closings, .. } = self.syntax();
                format!("{} \"[\" {} \"]\" {}", mark(openings[0]), list("\", \" "), mark(closings[0]))
            }
            Self::DeepSeek => {
                format!("{} {} {}", mark("<｜tool▁calls▁begin｜>"), list(""), mark("<｜tool▁calls▁end｜>"))
            }
            Self::DeepSeekR1 => {
                format!("{} {} {}", mark("<｜tool▁calls▁begin｜>"), list("\"\\n\" "), mark("<｜tool▁calls▁end｜>"))
            }
            // The answer ends after a call.
            Self::Harmony => "analysis? call".into(),
            Self::Glm4 => "call".into(),
        };
        let mut rules = self.beginning(&calls, reasoning, &marks);
        let names = (0..tools.len()).map(|i| format!("call_{i}")).collect::<Vec<_>>().join(" | ");
        let (open, close) = (mark("<tool_call>"), mark("</tool_call>"));
        rules.push(match self {
            Self::Derived(format) => {
                let DerivedMarks { section, call, .. } = &format.marks;
                let start = if section.0.trim().is_empty() { call.0.trim_start() } else { &call.0 };
                format!("call: {} ({names}) {}", marks.text(start), marks.text(&call.1))
            }
            Self::Hermes | Self::FunctionTags => format!("call: {open} \"\\n\" ({names}) \"\\n\" {close}"),
            Self::Glm => format!("call: {open} ({names}) {close}"),
            Self::Seed => {
                format!("call: {} \"\\n\" ({names}) \"\\n\" {}", mark("<seed:tool_call>"), mark("</seed:tool_call>"))
            }
            Self::Gemma => format!("call: {} ({names}) {}", mark("<|tool_call>"), mark("<tool_call|>")),
            Self::DeepSeek | Self::DeepSeekR1 => {
                format!("call: {} ({names}) {}", mark("<｜tool▁call▁begin｜>"), mark("<｜tool▁call▁end｜>"))
            }
            Self::Llama3
            | Self::MistralList
            | Self::MistralArgs
            | Self::TaggedList
            | Self::Nemotron
            | Self::Jamba
            | Self::Pythonic
            | Self::CommandR
            | Self::Harmony
            | Self::Glm4
            | Self::Json => format!("call: {names}"),
        });
        let mut effort = MAX_EFFORT;
        for (i, tool) in tools.iter().enumerate() {
            let any = json!({"type": "object"});
            let schema = tool.parameters().unwrap_or(&any);
            let call = if let Some(notation) = self.notation(tool.name(), &marks) {
                let mut arguments = ArgumentsGrammar::new(i, schema, notation.style, &marks, effort);
                let expression = arguments.expression();
                effort = arguments.effort;
                rules.append(&mut arguments.rules);
                [marks.text(&notation.before), expression, literal(notation.after)].join(" ")
            } else {
                rules.push(format!("arguments_{i}: %json {schema}"));
                self.json_call(tool.name(), &format!("arguments_{i}"), &marks)
            };
            rules.push(format!("call_{i}: {call}"));
        }
        rules.join("\n") + "\n"
    }

    /// A grammar of the answers whose text matches `text`, a Lark expression such as `%json {...}` or `%lark {...}`;
    /// `None` if nothing precedes that text. `text` is on the first line of the grammar.
    pub fn text_grammar(
        self,
        text: &str,
        reasoning: Option<ReasoningMarkers>,
        tokenizer: Option<&Tokenizer>,
    ) -> Option<String> {
        let marks = MarkEncoder { tokenizer };
        let answer = match (self, reasoning) {
            (Self::Harmony, _) => {
                format!("analysis? {} \"final\" {} text", marks.mark("<|channel|>"), marks.mark("<|message|>"))
            }
            (_, Some(_)) => "text".into(),
            (_, None) => return None,
        };
        let mut rules = vec![format!("text: {text}")];
        rules.append(&mut self.beginning(&answer, reasoning, &marks));
        Some(rules.join("\n") + "\n")
    }

    /// The first rules: reasoning, if there is any, and then `rest`.
    fn beginning(self, rest: &str, reasoning: Option<ReasoningMarkers>, marks: &MarkEncoder<'_>) -> Vec<String> {
        let before = if reasoning.is_some() { "reasoning SPACE " } else { "" };
        let mut rules = vec![format!("start: {before}{rest}")];
        if let Some(markers) = reasoning {
            rules.push(marks.text_up_to("reasoning", markers.end));
            rules.push("SPACE: /[ \\n]{0,4}/".into());
        }
        if self == Self::Harmony {
            let (channel, message) = (marks.mark("<|channel|>"), marks.mark("<|message|>"));
            let next = marks.mark("<|start|>");
            rules.push(format!("analysis: {channel} \"analysis\" {message} analysis_text {next} \"assistant\""));
            rules.push(marks.text_up_to("analysis_text", "<|end|>"));
        }
        rules
    }

    /// The notation of a call of the function `name`, if its arguments are not a JSON object.
    fn notation(self, name: &str, marks: &MarkEncoder<'_>) -> Option<CallNotation> {
        let function = |end_of_key: &str, end| CallNotation {
            before: format!("<function={name}>\n"),
            style: ArgumentStyle::Tags {
                key: (literal("<parameter="), literal(end_of_key)),
                value: String::new(),
                end,
            },
            after: "</function>",
        };
        match self {
            Self::FunctionTags => Some(function(">\n", "\n</parameter>\n")),
            Self::Seed => Some(function(">", "</parameter>\n")),
            Self::Glm => Some(CallNotation {
                before: format!("{name}\n"),
                style: ArgumentStyle::Tags {
                    key: (marks.mark("<arg_key>"), marks.mark("</arg_key>")),
                    value: format!("\"\\n\" {}", marks.mark("<arg_value>")),
                    end: "</arg_value>",
                },
                after: "",
            }),
            Self::Gemma => Some(CallNotation {
                before: format!("call:{name}{{"),
                style: ArgumentStyle::Gemma { quote: GEMMA_QUOTE },
                after: "}",
            }),
            Self::Pythonic if call_python::is_name(name) => {
                Some(CallNotation { before: format!("{name}("), style: ArgumentStyle::Python, after: ")" })
            }
            Self::Derived(DerivedFormat { marks: derived, .. }) => match &derived.arguments {
                DerivedArguments::Tags(tags) => {
                    Some(CallNotation { before: derived.header(name), style: ArgumentStyle::Derived(tags), after: "" })
                }
                DerivedArguments::Json | DerivedArguments::Object(_) => None,
            },
            Self::Hermes
            | Self::Llama3
            | Self::MistralList
            | Self::MistralArgs
            | Self::DeepSeek
            | Self::DeepSeekR1
            | Self::TaggedList
            | Self::Nemotron
            | Self::Jamba
            | Self::CommandR
            | Self::Harmony
            | Self::Glm4
            | Self::Pythonic
            | Self::Json => None,
        }
    }

    /// A Lark expression for a call of the function `name` whose arguments are the JSON object of the rule
    /// `arguments`.
    fn json_call(self, name: &str, arguments: &str, marks: &MarkEncoder<'_>) -> String {
        let mark = |text: &str| marks.mark(text);
        let object = |open: &str, key: &str| {
            let open = literal(&format!("{open}: {}, \"{key}\": ", json!(name)));
            format!("{open} {arguments} \"}}\"")
        };
        match self {
            Self::MistralArgs => {
                format!("{} {} {} {arguments}", mark("[TOOL_CALLS]"), literal(name), mark(ARGS))
            }
            Self::Derived(DerivedFormat { marks: derived, .. }) => match &derived.arguments {
                DerivedArguments::Object(key) => object("{\"name\"", key),
                DerivedArguments::Json | DerivedArguments::Tags(_) => {
                    format!("{} {arguments}", marks.text(&derived.header(name)))
                }
            },
            Self::Glm4 => format!("{} {arguments}", literal(&format!("{name}\n"))),
            Self::DeepSeek => format!("{} {} {arguments}", literal(name), mark(DEEPSEEK_SEPARATOR)),
            Self::DeepSeekR1 => {
                let before = literal(&format!("{name}\n```json\n"));
                format!("\"function\" {} {before} {arguments} \"\\n```\"", mark(DEEPSEEK_SEPARATOR))
            }
            Self::Harmony => {
                let to = literal(&format!("commentary to=functions.{name} "));
                let (channel, constrain, message) = (mark("<|channel|>"), mark("<|constrain|>"), mark("<|message|>"));
                format!("{channel} {to} {constrain} \"json\" {message} {arguments}")
            }
            Self::CommandR => {
                let call = object("\", \"tool_name\"", "parameters");
                format!("{} /[0-9]/ {call}", literal("{\"tool_call_id\": \""))
            }
            Self::Llama3 => object("{\"name\"", "parameters"),
            Self::Hermes
            | Self::FunctionTags
            | Self::Seed
            | Self::Glm
            | Self::Gemma
            | Self::MistralList
            | Self::TaggedList
            | Self::Nemotron
            | Self::Jamba
            | Self::Pythonic
            | Self::Json => object("{\"name\"", "arguments"),
        }
    }
}

/// The notation of a call whose arguments are not a JSON object.
struct CallNotation {
    before: String,
    style: ArgumentStyle,
    after: &'static str,
}

/// A literal in Lark; empty for an empty text.
pub(super) fn literal(text: &str) -> String {
    if text.is_empty() { String::new() } else { Value::from(text).to_string() }
}

/// Writes marks in Lark, as control tokens where the vocabulary has them.
pub(super) struct MarkEncoder<'t> {
    tokenizer: Option<&'t Tokenizer>,
}

impl MarkEncoder<'_> {
    /// A mark: a token by its id if `text` is a control token, else a literal.
    pub fn mark(&self, text: &str) -> String {
        self.token(text).unwrap_or_else(|| literal(text))
    }

    /// A text in which control tokens are written as tokens.
    pub fn text(&self, text: &str) -> String {
        let (mut parts, mut plain, mut at) = (Vec::new(), String::new(), 0);
        while let Some(c) = text[at..].chars().next() {
            let rest = &text[at..];
            let ends = rest.char_indices().take(128).map(|(end, c)| end + c.len_utf8());
            let token = if self.tokenizer.is_some() && matches!(c, '<' | '[' | ']') {
                ends.filter_map(|end| Some((end, self.token(&rest[..end])?))).last()
            } else {
                None
            };
            if let Some((end, token)) = token {
                parts.push(literal(&std::mem::take(&mut plain)));
                parts.push(token);
                at += end;
            } else {
                plain.push(c);
                at += c.len_utf8();
            }
        }
        parts.push(literal(&plain));
        parts.retain(|part| !part.is_empty());
        parts.join(" ")
    }

    fn token(&self, text: &str) -> Option<String> {
        let tokenizer = self.tokenizer?;
        let id = tokenizer.token_id(text).filter(|&id| tokenizer.is_control(id))?;
        Some(format!("<[{id}]>"))
    }

    /// A rule `name` that matches any text up to and including `end`.
    pub fn text_up_to(&self, name: &str, end: &str) -> String {
        match self.token(end) {
            None => format!("{name}[suffix={}]: /(?s:.*)/", literal(end)),
            Some(token) => format!("{name}: /(?s:.*)/ {token}"),
        }
    }
}
