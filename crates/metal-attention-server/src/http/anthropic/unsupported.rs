//! Fields of Anthropic's interface, and those that clients of other interfaces send by mistake, that are not used here.

use crate::http::ApiError;
use crate::http::body::Object;
use crate::http::notes::Notes;
use crate::http::unsupported::{self, Neutral, RefusedField, refused};

use Neutral::Number;

/// All fields that are refused.
#[rustfmt::skip]
const REFUSED: &[RefusedField] = &[
    refused("mcp_servers", &[], "give the tools of MCP servers in tools, and call them yourself"),
    refused("container", &[], "nothing is run here"),
    // Those of OpenAI's interface.
    refused("max_completion_tokens", &[], "use max_tokens"),
    refused("max_output_tokens", &[], "use max_tokens"),
    refused("stop", &[], "use stop_sequences"),
    refused("response_format", &[Neutral::Word("text")], "use output_config.format"),
    refused("n", &[Number(1.0)], "send the request several times"),
    refused("logprobs", &[], "use /v1/chat/completions"),
    refused("logit_bias", &[], "use /v1/chat/completions"),
    refused("functions", &[], "use tools"),
    refused("prompt", &[], "use messages"),
    refused("input", &[], "use messages"),
];

/// Fields that change no text. They are passed over, and named in the answer's header `x-ignored` where they ask for something.
#[rustfmt::skip]
const IGNORED: &[&str] = &[
    // Whose request it is, where it is answered, and what it costs there.
    "metadata", "service_tier", "inference_geo", "speed", "user_profile_id", "workspace_id", "diagnostics",
    // What is kept is decided by the server; a client's context is its own.
    "cache_control", "context_management",
];

/// Refuses a request that asks for something this server cannot do. Notes the fields that are passed over.
pub fn check(object: &Object<'_>) -> Result<Notes, ApiError> {
    unsupported::check(object, REFUSED, IGNORED)
}
