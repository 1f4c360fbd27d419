//! Fields of llama.cpp's completions that are not used here. Fields that llama.cpp does not know either are passed over.

use crate::http::ApiError;
use crate::http::body::Object;
use crate::http::notes::Notes;
use crate::http::unsupported::{self, Neutral, RefusedField, refused};

use Neutral::{Negative, Number};

const SAMPLING: &str = "use temperature, top_p, top_k and min_p";
const NO_PICTURES: &str = "this model sees no pictures: text is all that is read";

/// The fields that are refused.
#[rustfmt::skip]
const REFUSED: &[RefusedField] = &[
    // How tokens are chosen.
    refused("mirostat", &[Number(0.0)], SAMPLING),
    refused("adaptive_target", &[Negative], SAMPLING),
    refused("grammar_lazy", &[], "a grammar holds from the text's beginning"),
    refused("grammar_triggers", &[], "a grammar holds from the text's beginning"),
    refused("lora", &[], "start the server with a model that has the adapter merged"),
    // What the prompt is.
    refused("image_data", &[], NO_PICTURES),
    refused("multimodal_data", &[], NO_PICTURES),
    // What belongs to other paths.
    refused("suffix", &[], "use input_prefix and input_suffix at /infill"),
    refused("messages", &[], "use /v1/chat/completions, or /apply-template and then /completion"),
    refused("tools", &[], "use /v1/chat/completions"),
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
    unsupported::check(object, REFUSED, IGNORED)
}
