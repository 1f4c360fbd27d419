//! Controls whether and how much a model reasons, by the variables of its chat template.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{ChatTemplate, RenderRequest, RenderedPrompt, TemplateError, ToolFormat};

/// The header of the final answer in gpt-oss's format, where reasoning is a message of its own.
pub const HARMONY_ANSWER: &str = "<|channel|>final<|message|>";

/// The effort that a model spends on reasoning: the values of OpenAI's `reasoning_effort`, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReasoningEffort {
    /// No reasoning.
    None,
    /// The minimum.
    Minimal,
    /// Little reasoning.
    Low,
    /// The usual amount.
    Medium,
    /// Much reasoning.
    High,
    /// Very much reasoning.
    Xhigh,
    /// The maximum.
    Max,
}

impl ReasoningEffort {
    /// All values, in ascending order.
    pub const ALL: [Self; 7] = [Self::None, Self::Minimal, Self::Low, Self::Medium, Self::High, Self::Xhigh, Self::Max];

    /// The name in requests.
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

    /// The value of the variable `reasoning_effort` for a template that reads it; `None` if the template has no such
    /// value.
    fn for_template(self, template: &ChatTemplate) -> Option<&'static str> {
        let source = template.source();
        let quoted = |word: &str| source.contains(&format!("'{word}'")) || source.contains(&format!("\"{word}\""));
        let is_harmony = template.tool_format() == ToolFormat::Harmony;
        if self == Self::None {
            // A harmony template cannot turn reasoning off; "low" comes nearest.
            let least = is_harmony.then_some(Self::Low.name());
            return ["none", "no_think"].into_iter().find(|word| quoted(word)).or(least);
        }
        if is_harmony {
            return Some(self.clamp(Self::Low, Self::High).name());
        }
        if quoted(Self::Low.name()) && quoted(Self::High.name()) {
            // A template that lists its values may refuse others, so the nearest listed one is used.
            let distance = |other: &&Self| (**other as u8).abs_diff(self as u8);
            let listed = Self::ALL[1..].iter().rev().filter(|effort| quoted(effort.name()));
            return listed.min_by_key(distance).map(|effort| effort.name());
        }
        Some(self.name())
    }
}

/// A setting of reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningSetting {
    /// Reasoning is on.
    On,
    /// Reasoning with this effort; [`ReasoningEffort::None`] turns it off.
    Effort(ReasoningEffort),
}

impl ReasoningSetting {
    /// Reasoning is off.
    pub const OFF: Self = Self::Effort(ReasoningEffort::None);
}

impl fmt::Display for ReasoningSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::On => write!(f, "true"),
            Self::Effort(effort) => write!(f, "{}", effort.name()),
        }
    }
}

/// Parses "true", "false", "on", "off", "yes", "no" and the names of efforts.
impl FromStr for ReasoningSetting {
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
    /// Whether the model is known to reason.
    pub fn can_reason(&self) -> bool {
        self.reasoning().is_some() || self.tool_format() == ToolFormat::Harmony
    }

    /// Sets those `variables` by which this template controls reasoning, unless they are set already. Returns false if
    /// the template reads none of them.
    pub fn set_reasoning(&self, reasoning: ReasoningSetting, variables: &mut Map<String, Value>) -> bool {
        let mut set = |name: &str, value: Value| {
            let reads = self.reads(name);
            if reads {
                variables.entry(name).or_insert(value);
            }
            reads
        };
        match reasoning {
            ReasoningSetting::On => set("enable_thinking", true.into()) || set("thinking", true.into()),
            ReasoningSetting::Effort(ReasoningEffort::None) => {
                let switched = set("enable_thinking", false.into()) || set("thinking", false.into());
                let budget = set("thinking_budget", 0.into());
                let effort = ReasoningEffort::None.for_template(self);
                effort.is_some_and(|value| set("reasoning_effort", value.into())) || switched || budget
            }
            ReasoningSetting::Effort(effort) => {
                effort.for_template(self).is_some_and(|value| set("reasoning_effort", value.into()))
            }
        }
    }

    /// Renders a prompt whose answer reasons as `reasoning` says; `None` leaves it to the template.
    ///
    /// If reasoning is to be off and the template has no variable for it, the prompt ends with empty reasoning.
    pub fn render_with_reasoning(
        &self,
        request: &RenderRequest<'_>,
        reasoning: Option<ReasoningSetting>,
    ) -> Result<RenderedPrompt, TemplateError> {
        let mut variables = request.variables.cloned().unwrap_or_default();
        if let Some(reasoning) = reasoning {
            self.set_reasoning(reasoning, &mut variables);
        }
        let request = RenderRequest { variables: Some(&variables), add_generation_prompt: true, ..*request };
        let mut prompt = self.render(&request)?;
        let answer_start = prompt.text.len();
        if reasoning == Some(ReasoningSetting::OFF) {
            self.end_reasoning(&mut prompt.text);
        }
        Ok(RenderedPrompt { answer_start: answer_start.min(prompt.text.len()), prompt })
    }

    /// Appends empty reasoning to a prompt that does not end with reasoning.
    fn end_reasoning(&self, prompt: &mut String) {
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
    fn reasoning_is_switched_by_the_templates_variable() {
        let set = |name: &str, reasoning: &str| {
            let mut variables = Map::new();
            let is_read = template(name).set_reasoning(reasoning.parse().unwrap(), &mut variables);
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
        assert!("maybe".parse::<ReasoningSetting>().is_err());
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
    fn an_answer_without_reasoning_follows_an_empty_block() {
        // This template always begins reasoning.
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
            let rendered = template.render_with_reasoning(&request, Some(ReasoningSetting::OFF)).unwrap();
            assert!(rendered.prompt.text.ends_with(end), "{name}: {:?}", rendered.prompt.text);
            assert_eq!(&rendered.prompt.text[rendered.answer_start..], own, "{name}");
            let mut parser = template.continued_parser(&rendered, &[]);
            let mut events = parser.push("Hello!");
            events.extend(parser.finish());
            let message = Message::from_events(events);
            assert_eq!((message.text(), &message.reasoning_content), ("Hello!", &None), "{name}");
        }
    }
}
