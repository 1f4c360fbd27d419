//! The fields of llama.cpp's completions that this server refuses or ignores. Fields that llama.cpp does not have are
//! ignored without a note.

use crate::http::ApiError;
use crate::http::body::Object;
use crate::http::notes::Notes;
use crate::http::unsupported::{self, Neutral, RefusedField, refused};

use Neutral::{Negative, Number};

const SAMPLING: &str = "use temperature, top_p, top_k and min_p";
const NO_PICTURES: &str = "this model sees no pictures: text is all that is read";

/// All refused fields.
#[rustfmt::skip]
const REFUSED: &[RefusedField] = &[
    // Sampling.
    refused("mirostat", &[Number(0.0)], SAMPLING),
    refused("adaptive_target", &[Negative], SAMPLING),
    refused("grammar_lazy", &[], "a grammar holds from the text's beginning"),
    refused("grammar_triggers", &[], "a grammar holds from the text's beginning"),
    refused("lora", &[], "start the server with a model that has the adapter merged"),
    // The prompt.
    refused("image_data", &[], NO_PICTURES),
    refused("multimodal_data", &[], NO_PICTURES),
    // Fields of other paths.
    refused("suffix", &[], "use input_prefix and input_suffix at /infill"),
    refused("messages", &[], "use /v1/chat/completions, or /apply-template and then /completion"),
    refused("tools", &[], "use /v1/chat/completions"),
];

/// Fields that do not change the text, or that this server does not need. Prefixes of prompts are always cached and
/// shared between all slots (`cache_prompt`).
#[rustfmt::skip]
const IGNORED: &[&str] = &[
    // Slots and caches.
    "id_slot", "n_keep", "n_discard", "n_cache_reuse", "backend_sampling",
    "speculative.n_min", "speculative.p_min",
    // Parameters of samplers that are refused, or off.
    "mirostat_tau", "mirostat_eta", "adaptive_decay",
    // The contents and the end of a response.
    "verbose", "timings_per_token", "return_progress", "sse_ping_interval", "stream_options", "t_max_prompt_ms", "n_indent",
];

/// Refuses a request that uses a refused field. Notes the ignored fields.
pub fn check(object: &Object<'_>) -> Result<Notes, ApiError> {
    unsupported::check(object, REFUSED, IGNORED)
}
