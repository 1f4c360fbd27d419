//! Whether a model thinks before it answers, and how hard: what a chat template is given for it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{ChatTemplate, Continuation, RenderRequest, TemplateError, ToolFormat};

/// Begins the message that is the answer, where thoughts are messages of their own (gpt-oss).
pub const HARMONY_ANSWER: &str = "<|channel|>final<|message|>";

/// How hard a model thinks: the values of OpenAI's `reasoning_effort`, the least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReasoningEffort {
    /// Not at all.
    None,
    /// As little as it can.
    Minimal,
    /// A little.
    Low,
    /// The usual.
    Medium,
    /// Much.
    High,
    /// More.
    Xhigh,
    /// As much as it can.
    Max,
}

impl ReasoningEffort {
    /// All values, the least first.
    pub const ALL: [Self; 7] = [Self::None, Self::Minimal, Self::Low, Self::Medium, Self::High, Self::Xhigh, Self::Max];

    /// The name, as requests have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Minimal => "minimal",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
            Self::Xhigh => "xhigh",
            Self::Max => "max",
        }
    }

    /// The value of the variable `reasoning_effort` for a template that reads it; `None`: it has none for this.
    fn for_template(self, template: &ChatTemplate) -> Option<&'static str> {
        let source = template.source();
        let quoted = |word: &str| source.contains(&format!("'{word}'")) || source.contains(&format!("\"{word}\""));
        let is_harmony = template.tool_format() == ToolFormat::Harmony;
        if self == Self::None {
            // A harmony template has no value for it: the least comes nearest.
            let least = is_harmony.then_some(Self::Low.name());
            return ["none", "no_think"].into_iter().find(|word| quoted(word)).or(least);
        }
        if is_harmony {
            return Some(self.clamp(Self::Low, Self::High).name());
        }
        if quoted(Self::Low.name()) && quoted(Self::High.name()) {
            // A template that lists its values may refuse others.
            let distance = |other: &&Self| (**other as u8).abs_diff(self as u8);
            let listed = Self::ALL[1..].iter().rev().filter(|effort| quoted(effort.name()));
            return listed.min_by_key(distance).map(|effort| effort.name());
        }
        Some(self.name())
    }
}

/// Whether a model thinks, or how hard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thinking {
    /// It does.
    On,
    /// It does so hard; [`ReasoningEffort::None`]: it does not.
    Effort(ReasoningEffort),
}

impl Thinking {
    /// It does not.
    pub const OFF: Self = Self::Effort(ReasoningEffort::None);
}

impl fmt::Display for Thinking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::On => write!(f, "true"),
            Self::Effort(effort) => write!(f, "{}", effort.name()),
        }
    }
}

/// `true` and `false`, as well as the names of efforts.
impl FromStr for Thinking {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "true" | "on" | "yes" => Ok(Self::On),
            "false" | "off" | "no" => Ok(Self::OFF),
            name => match ReasoningEffort::ALL.into_iter().find(|effort| effort.name() == name) {
                Some(effort) => Ok(Self::Effort(effort)),
                None => Err("it is true, false, none, minimal, low, medium, high, xhigh or max".into()),
            },
        }
    }
}

impl ChatTemplate {
    /// Whether the model is known to think.
    pub fn thinks(&self) -> bool {
        self.reasoning().is_some() || self.tool_format() == ToolFormat::Harmony
    }

    /// Sets those of `variables` by which this template has the model think as `thinking` says; what is set already stays.
    /// False: the template reads none of them.
    pub fn set_thinking(&self, thinking: Thinking, variables: &mut Map<String, Value>) -> bool {
        let mut set = |name: &str, value: Value| {
            let reads = self.reads(name);
            if reads {
                variables.entry(name).or_insert(value);
            }
            reads
        };
        match thinking {
            Thinking::On => set("enable_thinking", true.into()) || set("thinking", true.into()),
            Thinking::Effort(ReasoningEffort::None) => {
                let switched = set("enable_thinking", false.into()) || set("thinking", false.into());
                let budget = set("thinking_budget", 0.into());
                let effort = ReasoningEffort::None.for_template(self);
                effort.is_some_and(|value| set("reasoning_effort", value.into())) || switched || budget
            }
            Thinking::Effort(effort) => {
                effort.for_template(self).is_some_and(|value| set("reasoning_effort", value.into()))
            }
        }
    }

    /// The prompt of a conversation whose answer has thoughts as `thinking` says; `None`: as the template has it.
    ///
    /// The prompt of an answer without thoughts ends with empty ones where the template has no variable for it.
    pub fn render_thinking(
        &self,
        request: &RenderRequest<'_>,
        thinking: Option<Thinking>,
    ) -> Result<Continuation, TemplateError> {
        let mut variables = request.variables.cloned().unwrap_or_default();
        if let Some(thinking) = thinking {
            self.set_thinking(thinking, &mut variables);
        }
        let request = RenderRequest { variables: Some(&variables), add_generation_prompt: true, ..*request };
        let mut prompt = self.render(&request)?;
        let begin = prompt.text.len();
        if thinking == Some(Thinking::OFF) {
            self.end_thoughts(&mut prompt.text);
        }
        Ok(Continuation { begin: begin.min(prompt.text.len()), prompt })
    }

    /// Adds thoughts that are empty to a prompt without ones.
    fn end_thoughts(&self, prompt: &mut String) {
        match self.reasoning() {
            Some(markers) if !markers.ended_in(prompt) => {
                if !markers.begun_in(prompt) {
                    *prompt += markers.start;
                }
                prompt.truncate(prompt.trim_end().len());
                *prompt += "\n\n";
                *prompt += markers.end;
                *prompt += "\n\n";
            }
            None if self.tool_format() == ToolFormat::Harmony => *prompt += HARMONY_ANSWER,
            Some(_) | None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Message;

    fn template(name: &str) -> ChatTemplate {
        let path = format!("{}/tests/data/templates/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
        ChatTemplate::new(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    #[test]
    fn thoughts_are_switched_as_templates_know_it() {
        let set = |name: &str, thinking: &str| {
            let mut variables = Map::new();
            let is_read = template(name).set_thinking(thinking.parse().unwrap(), &mut variables);
            (Value::from(variables), is_read)
        };
        assert_eq!(set("qwen3", "false"), (json!({"enable_thinking": false}), true));
        assert_eq!(set("qwen3", "true"), (json!({"enable_thinking": true}), true));
        assert_eq!(set("qwen3", "high"), (json!({}), false));
        assert_eq!(set("granite-3.3", "off"), (json!({"thinking": false}), true));
        assert_eq!(set("seed-oss", "none"), (json!({"thinking_budget": 0}), true));
        assert_eq!(set("gpt-oss", "none"), (json!({"reasoning_effort": "low"}), true));
        assert_eq!(set("gpt-oss", "minimal"), (json!({"reasoning_effort": "low"}), true));
        assert_eq!(set("gpt-oss", "max"), (json!({"reasoning_effort": "high"}), true));
        assert_eq!(set("llama-3.1", "false"), (json!({}), false));
        assert!("maybe".parse::<Thinking>().is_err());
    }

    #[test]
    fn a_template_that_lists_efforts_gets_the_nearest() {
        let source = "{% if reasoning_effort not in ['high', 'low', 'no_think'] %}{% endif %}";
        let listed = ChatTemplate::new(source).unwrap();
        assert_eq!(
            ReasoningEffort::ALL.map(|effort| effort.for_template(&listed)),
            [Some("no_think"), Some("low"), Some("low"), Some("high"), Some("high"), Some("high"), Some("high")]
        );
    }

    #[test]
    fn an_answer_without_thoughts_begins_after_empty_ones() {
        // It begins thoughts, whatever is wanted.
        const BEGUN: &str = "{{ messages[0].content }}{% if '</think>' %}<think>\n{% endif %}";
        let messages = [Message::user("Hi")];
        for (name, end, own) in [
            ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
            ("gpt-oss", "<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>"),
            ("deepseek-r1-distill", "<think>\n</think>", ""),
            ("ministral-3-reasoning", "[THINK]\n\n[/THINK]\n\n", "[THINK]\n\n[/THINK]\n\n"),
            (BEGUN, "<think>\n\n</think>\n\n", "\n</think>\n\n"),
            ("llama-3.1", "assistant<|end_header_id|>\n\n", ""),
        ] {
            let template = if name == BEGUN { ChatTemplate::new(BEGUN).unwrap() } else { template(name) };
            let request = RenderRequest { messages: &messages, ..Default::default() };
            let continuation = template.render_thinking(&request, Some(Thinking::OFF)).unwrap();
            assert!(continuation.prompt.text.ends_with(end), "{name}: {:?}", continuation.prompt.text);
            assert_eq!(&continuation.prompt.text[continuation.begin..], own, "{name}");
            let mut parser = template.continued_parser(&continuation, &[]);
            let mut events = parser.push("Hello!");
            events.extend(parser.finish());
            let message = Message::from_events(events);
            assert_eq!((message.text(), &message.reasoning_content), ("Hello!", &None), "{name}");
        }
    }
}
