//! The fields of Anthropic's interface, and those of other interfaces that clients send by mistake, which this server
//! refuses or ignores.

use crate::http::ApiError;
use crate::http::body::Object;
use crate::http::notes::Notes;
use crate::http::unsupported::{self, Neutral, RefusedField, refused};

use Neutral::Number;

/// All refused fields.
#[rustfmt::skip]
const REFUSED: &[RefusedField] = &[
    refused("mcp_servers", &[], "give the tools of MCP servers in tools, and call them yourself"),
    refused("container", &[], "nothing is run here"),
    // Fields of OpenAI's interface.
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

/// Fields that do not change the text. They are ignored, and reported in the response header `x-ignored` if they would
/// have an effect.
#[rustfmt::skip]
const IGNORED: &[&str] = &[
    // The origin, the place and the price of the request.
    "metadata", "service_tier", "inference_geo", "speed", "user_profile_id", "workspace_id", "diagnostics",
    // The server decides what is cached; the context is the client's.
    "cache_control", "context_management",
];

/// Refuses a request that uses a refused field. Notes the ignored fields.
pub fn check(object: &Object<'_>) -> Result<Notes, ApiError> {
    unsupported::check(object, REFUSED, IGNORED)
}
