//! Chat with language models: messages, chat templates, tool calls and reasoning.
//!
//! A [`ChatTemplate`] from a GGUF file renders [`Message`]s to the prompt format that a model was trained on, like
//! Python's `transformers`. The resulting [`Prompt`] records which of its text came from messages, so that the
//! spelling of a control token in a message stays plain text when the prompt is encoded. A [`ToolCallParser`] splits
//! the generated answer into reasoning, text and tool calls. [`fit_context`] drops old turns of a conversation that
//! exceeds the context.
//!
//! Templates come with model files and are not trusted. They are compiled from Jinja by `minijinja`, rewritten so that
//! every operation is charged to a meter (`program.rs`, `checked.rs`, `meter.rs`), with Python's semantics of strings,
//! numbers and JSON (`python_*.rs`, `filters.rs`).
//!
//! ```
//! use metal_attention_chat::{ChatTemplate, Message, RenderRequest};
//!
//! let source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
//! let template = ChatTemplate::new(source)?;
//! let messages = [Message::system("Be brief."), Message::user("Hello!")];
//! let prompt = template.render(&RenderRequest { messages: &messages, add_generation_prompt: true, ..Default::default() })?;
//! assert_eq!(prompt.text, "<|system|>Be brief.<|user|>Hello!<|assistant|>");
//! # Ok::<(), metal_attention_chat::TemplateError>(())
//! ```

mod arguments;
mod bound_method;
mod builtins;
mod checked;
mod counters;
mod environment;
mod error;
mod exact_json;
mod filters;
mod fit_context;
mod history;
mod literals;
mod measured;
mod message;
mod message_json;
mod meter;
mod operators;
mod prefill;
mod prices;
mod printf;
mod program;
mod prompt;
mod python_json;
mod python_methods;
mod python_str;
mod reasoning;
mod reasoning_setting;
mod rewritten;
mod scan;
mod template;
mod tool_calls;

pub use error::{TemplateError, TemplateLimit};
pub use fit_context::{ContextBudget, DroppedTurns, FittedPrompt, fit_context};
pub use message::{FunctionCall, Message, Role, Tool, ToolCall, ToolError};
pub use message_json::SentMessage;
pub use prefill::RenderedPrompt;
pub use prompt::Prompt;
pub use reasoning::ReasoningMarkers;
pub use reasoning_setting::{HARMONY_ANSWER, ReasoningEffort, ReasoningSetting};
pub use template::{ChatTemplate, RenderRequest};
pub use tool_calls::{AnswerEvent, DerivedFormat, ToolCallParser, ToolFormat, ToolNameError};
