//! Fields of Anthropic's interface, and those that clients of other interfaces send by mistake, that are not used here.

use crate::http::ApiError;
use crate::http::body::Object;
use crate::http::notes::Notes;
use crate::http::unsupported::{self, Neutral, RefusedField, Unused};

use Neutral::Number;

const fn field(name: &'static str, neutral: &'static [Neutral], instead: &'static str) -> RefusedField {
    RefusedField { name, neutral, instead }
}

/// All fields that are refused.
#[rustfmt::skip]
const FIELDS: &[RefusedField] = &[
    field("mcp_servers", &[], "give the tools of MCP servers in tools, and call them yourself"),
    field("container", &[], "nothing is run here"),
    // Those of OpenAI's interface.
    field("max_completion_tokens", &[], "use max_tokens"),
    field("max_output_tokens", &[], "use max_tokens"),
    field("stop", &[], "use stop_sequences"),
    field("response_format", &[Neutral::Word("text")], "use output_config.format"),
    field("n", &[Number(1.0)], "send the request several times"),
    field("logprobs", &[], "use /v1/chat/completions"),
    field("logit_bias", &[], "use /v1/chat/completions"),
    field("functions", &[], "use tools"),
    field("prompt", &[], "use messages"),
    field("input", &[], "use messages"),
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
    unsupported::check(object, |name| {
        let field = FIELDS.iter().find(|field| field.name == name);
        let ignored = || IGNORED.contains(&name).then_some(Unused::Ignored);
        field.map(Unused::Refused).or_else(ignored)
    })
}
