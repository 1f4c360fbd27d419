#![doc = include_str!("../README.md")]

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
mod pictures;
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
pub use pictures::{
    MessagePicture, PictureSource, PromptPart, TextOrPicture, TextWithPictures, picture_marker, take_pictures,
    without_picture_markers,
};
pub use prefill::RenderedPrompt;
pub use prompt::Prompt;
pub use reasoning::ReasoningMarkers;
pub use reasoning_setting::{HARMONY_ANSWER, ReasoningEffort, ReasoningSetting};
pub use template::{ChatTemplate, RenderRequest};
pub use tool_calls::{AnswerEvent, DerivedFormat, ToolCallParser, ToolFormat, ToolNameError};
