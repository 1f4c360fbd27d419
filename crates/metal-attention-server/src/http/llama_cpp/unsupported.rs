//! Fields of llama.cpp's completions that are not used here. Fields that llama.cpp does not know either are passed over.

use crate::http::ApiError;
use crate::http::body::Object;
use crate::http::notes::Notes;
use crate::http::unsupported::{self, Neutral, RefusedField, Unused};

use Neutral::{Negative, Number};

const SAMPLING: &str = "use temperature, top_p, top_k and min_p";
const NO_PICTURES: &str = "this model sees no pictures: text is all that is read";

const fn field(name: &'static str, neutral: &'static [Neutral], instead: &'static str) -> RefusedField {
    RefusedField { name, neutral, instead }
}

/// The fields that are refused.
#[rustfmt::skip]
const REFUSED: &[RefusedField] = &[
    // How tokens are chosen.
    field("mirostat", &[Number(0.0)], SAMPLING),
    field("adaptive_target", &[Negative], SAMPLING),
    field("grammar_lazy", &[], "a grammar holds from the text's beginning"),
    field("grammar_triggers", &[], "a grammar holds from the text's beginning"),
    field("lora", &[], "start the server with a model that has the adapter merged"),
    // What the prompt is.
    field("image_data", &[], NO_PICTURES),
    field("multimodal_data", &[], NO_PICTURES),
    // What belongs to other paths.
    field("suffix", &[], "use input_prefix and input_suffix at /infill"),
    field("messages", &[], "use /v1/chat/completions, or /apply-template and then /completion"),
    field("tools", &[], "use /v1/chat/completions"),
];

/// Fields that change no text, or that this server has no use for. Prompts' beginnings are always kept and shared
/// (`cache_prompt`), between all slots.
#[rustfmt::skip]
const IGNORED: &[&str] = &[
    // Slots and caches.
    "id_slot", "n_keep", "n_discard", "n_cache_reuse", "backend_sampling",
    "speculative.n_max", "speculative.n_min", "speculative.p_min",
    // Parts of samplers that are refused, or off.
    "mirostat_tau", "mirostat_eta", "adaptive_decay",
    // What an answer holds besides the text, and when it ends.
    "verbose", "timings_per_token", "return_progress", "sse_ping_interval", "stream_options", "t_max_prompt_ms", "n_indent",
];

/// Refuses a request that asks for something this server cannot do. Notes the fields that are passed over.
pub fn check(object: &Object<'_>) -> Result<Notes, ApiError> {
    unsupported::check(object, |name| match REFUSED.iter().find(|field| field.name == name) {
        Some(field) => Some(Unused::Refused(field)),
        None => IGNORED.contains(&name).then_some(Unused::Ignored),
    })
}
