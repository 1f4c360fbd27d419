//! The marks of each format of tool calls, as data.

use super::ToolFormat;

/// The mark that begins code, and sometimes a JSON call, in answers of Llama 3.
pub(super) const PYTHON_TAG: &str = "<|python_tag|>";
/// The mark around a code block.
pub(super) const FENCE: &str = "```";
/// The mark that begins a call whose arguments are in tags.
pub(super) const FUNCTION: &str = "<function=";
/// The marks between a call's name, id and arguments.
pub(super) const ARGS: &str = "[ARGS]";
pub(super) const CALL_ID: &str = "[CALL_ID]";
pub(super) const DEEPSEEK_SEPARATOR: &str = "<｜tool▁sep｜>";
/// The marks around calls in Python's notation.
pub(crate) const PYTHONIC_START: &str = "<|tool_call_start|>";
pub(crate) const PYTHONIC_END: &str = "<|tool_call_end|>";
/// The mark around a string in Gemma's notation.
pub(super) const GEMMA_QUOTE: &str = "<|\"|>";

/// The marks of a format. Marks that are control tokens decode to nothing; the parser gets their spelling instead.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Syntax {
    /// The openings: marks that announce a call within text, alone or one after another.
    pub openings: &'static [&'static str],
    /// Marks that may follow a call and are dropped.
    pub closings: &'static [&'static str],
    /// Marks within a call.
    pub inner: &'static [&'static str],
    /// Whether a call may be the whole answer, without an opening.
    pub bare: bool,
}

impl Syntax {
    /// All marks.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        [self.openings, self.closings, self.inner].into_iter().flatten().copied()
    }
}

impl ToolFormat {
    /// The marks of this format.
    pub(super) fn syntax(self) -> &'static Syntax {
        const NONE: Syntax = Syntax { openings: &[], closings: &[], inner: &[], bare: false };
        const HERMES: Syntax = Syntax { openings: &["<tool_call>"], closings: &["</tool_call>"], ..NONE };
        const DEEPSEEK: Syntax = Syntax {
            openings: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
            closings: &["```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
            inner: &[DEEPSEEK_SEPARATOR],
            // Some templates of this format do not describe tools. They are described as text then, and the model
            // writes calls without marks.
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
                        // Earlier calls are put into texts, without marks.
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
