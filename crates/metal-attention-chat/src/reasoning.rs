//! The markers around a model's reasoning.

use metal_attention_tokenizer::Tokenizer;

/// The strings that delimit the reasoning of a model, and its answer if that is delimited, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReasoningMarkers {
    /// The start of the reasoning.
    pub start: &'static str,
    /// The end of the reasoning.
    pub end: &'static str,
    /// The start and the end of the answer, which are not part of it.
    pub answer: Option<(&'static str, &'static str)>,
}

impl ReasoningMarkers {
    /// `<think>` and `</think>`: Qwen, `DeepSeek`, GLM, `SmolLM` and most others.
    pub const THINK: Self = Self { start: "<think>", end: "</think>", answer: None };

    const COMMAND: Self = Self { start: "<|START_THINKING|>", end: "<|END_THINKING|>", answer: None };

    /// The known markers. If several fit a model, the first one is used.
    const KNOWN: [Self; 8] = [
        // Command R.
        Self { answer: Some(("<|START_RESPONSE|>", "<|END_RESPONSE|>")), ..Self::COMMAND },
        Self { answer: Some(("<|START_TEXT|>", "<|END_TEXT|>")), ..Self::COMMAND },
        Self::COMMAND,
        // Magistral, Ministral.
        Self { start: "[THINK]", end: "[/THINK]", answer: None },
        // Seed-OSS.
        Self { start: "<seed:think>", end: "</seed:think>", answer: None },
        // Gemma 4.
        Self { start: "<|channel>thought", end: "<channel|>", answer: None },
        // Granite 3.
        Self { answer: Some(("<response>", "</response>")), ..Self::THINK },
        Self::THINK,
    ];

    /// The markers that a chat template contains, else those that are tokens of the vocabulary; `None` for a model
    /// that is not known to reason.
    pub fn of_model(template: &str, tokenizer: Option<&Tokenizer>) -> Option<Self> {
        let written = |marker: &str| template.contains(marker);
        let token = |marker: &str| tokenizer.is_some_and(|tokenizer| tokenizer.token_id(marker).is_some());
        // A template that strips reasoning may contain only its end marker.
        let in_template = |m: &&Self| written(m.end) && m.answer.is_none_or(|(start, _)| written(start));
        let in_vocabulary = |m: &&Self| m.texts().all(token);
        Self::KNOWN.iter().find(in_template).or_else(|| Self::KNOWN.iter().find(in_vocabulary)).copied()
    }

    /// Whether `prompt` ends with the start marker, so that the answer begins within reasoning.
    pub fn begun_in(self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.start)
    }

    /// Whether `prompt` ends with the end marker.
    pub fn ended_in(self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.end)
    }

    /// All markers.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &'static str> {
        let answer = self.answer.into_iter().flat_map(|(start, end)| [start, end]);
        [self.start, self.end].into_iter().chain(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_markers_are_those_of_the_template() {
        let path = |name: &str| format!("{}/tests/data/templates/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
        for (name, start) in [
            ("qwen3", Some("<think>")),
            ("smollm3", Some("<think>")),
            ("deepseek-r1-distill", Some("<think>")),
            ("deepseek-v3.1", Some("<think>")),
            ("glm-4.6", Some("<think>")),
            ("granite-3.3", Some("<think>")),
            ("ministral-3-reasoning", Some("[THINK]")),
            ("command-r7b-tool-use", Some("<|START_THINKING|>")),
            ("seed-oss", Some("<seed:think>")),
            ("gemma-4", Some("<|channel>thought")),
            ("gpt-oss", None),
            ("qwen3-coder", None),
            ("granite-4.0", None),
            ("mistral-nemo", None),
            ("llama-3.1", None),
            ("qwen3.5", Some("<think>")),
            ("nemotron-3-nano", Some("<think>")),
            ("nemotron-nano-2", Some("<think>")),
            ("lfm2", None),
            ("lfm2.5", Some("<think>")),
            ("granite-4.1", None),
            ("rwkv-world", Some("<think>")),
        ] {
            let source = std::fs::read_to_string(path(name)).unwrap();
            assert_eq!(ReasoningMarkers::of_model(&source, None).map(|m| m.start), start, "{name}");
        }
    }
}
