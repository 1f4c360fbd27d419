//! The texts around calls, as data.

use super::ToolFormat;

/// Begins code in answers of Llama 3, and sometimes a JSON call.
pub(super) const PYTHON_TAG: &str = "<|python_tag|>";
/// Begins and ends a block of code.
pub(super) const FENCE: &str = "```";
/// Begins a call of a function whose arguments are in tags.
pub(super) const FUNCTION: &str = "<function=";
/// Between the call's name and its arguments.
pub(super) const ARGS: &str = "[ARGS]";
pub(super) const CALL_ID: &str = "[CALL_ID]";
pub(super) const DEEPSEEK_SEPARATOR: &str = "<｜tool▁sep｜>";
/// Around calls that are written as Python.
pub(crate) const PYTHONIC_START: &str = "<|tool_call_start|>";
pub(crate) const PYTHONIC_END: &str = "<|tool_call_end|>";
/// Around Gemma's strings.
pub(super) const GEMMA_QUOTE: &str = "<|\"|>";

/// The texts around the calls of a format. Where they are control tokens they write nothing as text, and are put in by
/// their spelling.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Syntax {
    /// Begin calls within other text, alone or one after another.
    pub openings: &'static [&'static str],
    /// Come after a call and mean nothing.
    pub closings: &'static [&'static str],
    /// Stand within a call.
    pub inner: &'static [&'static str],
    /// A call may be all of the answer, without anything that announces it.
    pub bare: bool,
}

impl Syntax {
    /// All the texts.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        [self.openings, self.closings, self.inner].into_iter().flatten().copied()
    }
}

impl ToolFormat {
    /// The texts around calls.
    pub(super) fn syntax(self) -> &'static Syntax {
        const NONE: Syntax = Syntax { openings: &[], closings: &[], inner: &[], bare: false };
        const HERMES: Syntax = Syntax { openings: &["<tool_call>"], closings: &["</tool_call>"], ..NONE };
        const DEEPSEEK: Syntax = Syntax {
            openings: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
            closings: &["```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
            inner: &[DEEPSEEK_SEPARATOR],
            // Templates that do not tell the model of tools leave that to plain words.
            bare: true,
        };
        match self {
            Self::Hermes => &HERMES,
            Self::Glm => {
                const { &Syntax { inner: &["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"], ..HERMES } }
            }
            Self::FunctionTags => const { &Syntax { openings: &["<tool_call>", FUNCTION], ..HERMES } },
            Self::Seed => {
                const { &Syntax { openings: &["<seed:tool_call>", FUNCTION], closings: &["</seed:tool_call>"], ..NONE } }
            }
            Self::Llama3 => const { &Syntax { openings: &[PYTHON_TAG], bare: true, ..NONE } },
            Self::MistralList | Self::MistralArgs => {
                const { &Syntax { openings: &["[TOOL_CALLS]"], inner: &[ARGS, CALL_ID], ..NONE } }
            }
            Self::DeepSeek | Self::DeepSeekR1 => &DEEPSEEK,
            Self::TaggedList => {
                const {
                    &Syntax {
                        openings: &["<|tool_call|>", "<tool_call>"],
                        closings: &["<|/tool_call|>", "</tool_call>"],
                        inner: &[],
                        // Earlier calls are told in plain words.
                        bare: true,
                    }
                }
            }
            Self::Nemotron => const { &Syntax { openings: &["<TOOLCALL>"], closings: &["</TOOLCALL>"], ..NONE } },
            Self::Jamba => const { &Syntax { openings: &["<tool_calls>"], closings: &["</tool_calls>"], ..NONE } },
            Self::Pythonic => const { &Syntax { openings: &[PYTHONIC_START], closings: &[PYTHONIC_END], ..NONE } },
            Self::CommandR => {
                const { &Syntax { openings: &["<|START_ACTION|>"], closings: &["<|END_ACTION|>"], ..NONE } }
            }
            Self::Gemma => {
                const { &Syntax { openings: &["<|tool_call>"], closings: &["<tool_call|>"], inner: &[GEMMA_QUOTE], ..NONE } }
            }
            Self::Harmony => {
                const {
                    &Syntax {
                        closings: &["<|call|>", "<|end|>", "<|return|>"],
                        inner: &["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"],
                        ..NONE
                    }
                }
            }
            Self::Derived(format) => &format.syntax,
            Self::Json | Self::Glm4 => const { &Syntax { bare: true, ..NONE } },
        }
    }
}
