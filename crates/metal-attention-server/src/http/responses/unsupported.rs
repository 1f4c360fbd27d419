//! The fields of the Responses interface, and those that other servers add to it, which this server refuses or ignores.

use crate::http::ApiError;
use crate::http::body::Object;
use crate::http::notes::Notes;
use crate::http::unsupported::Neutral::{Number, Word};
use crate::http::unsupported::{self, RefusedField, refused};

const FORMAT: &str = "use text.format with a JSON schema";
const LEAVE_OUT: &str = "leave it out";

/// All refused fields.
const REFUSED: &[RefusedField] = &[
    refused("background", &[], "send the request without it, and read the stream"),
    refused("conversation", &[], "use previous_response_id, or send the items in input"),
    refused("prompt", &[], "put the prompt's text into instructions or input"),
    refused("context_management", &[], "this server compacts no conversations: send a shorter one"),
    refused("moderation", &[], LEAVE_OUT),
    refused("n", &[Number(1.0)], "send the request several times"),
    refused("best_of", &[Number(1.0)], LEAVE_OUT),
    refused("prompt_logprobs", &[], "use /v1/chat/completions"),
    refused("response_format", &[Word("text")], FORMAT),
    refused("grammar", &[], "use a custom tool with a grammar, and tool_choice"),
    refused("guided_json", &[], FORMAT),
    refused("guided_regex", &[], "use a custom tool with a grammar, and tool_choice"),
    refused("guided_choice", &[], "use text.format with a JSON schema that has an enum"),
    refused("guided_grammar", &[], "use a custom tool with a grammar, and tool_choice"),
    refused("structured_outputs", &[], FORMAT),
    refused("modalities", &[Word("text")], "text is all that is written"),
    refused("audio", &[], "text is all that is written"),
    refused("messages", &[], "send the conversation in input, or use /v1/chat/completions"),
];

/// Fields that do not change the text. They are ignored, and reported in the response header `x-ignored` if they would
/// have an effect.
#[rustfmt::skip]
const IGNORED: &[&str] = &[
    "user", "safety_identifier", "metadata", "service_tier", "client_metadata", "max_tool_calls", "personality",
    "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_prompt", "id_slot", "request_id", "priority",
];

/// Refuses a request that uses a refused field. Notes the ignored fields.
pub fn check(object: &Object<'_>) -> Result<Notes, ApiError> {
    unsupported::check(object, REFUSED, IGNORED)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn fields_are_refused_where_they_have_an_effect() {
        let check = |request: &Value| check(&Object::split(request.to_string().as_bytes())?);
        for field in REFUSED {
            for value in [json!(null), json!(false), json!(""), json!([]), json!({})] {
                assert!(check(&json!({field.name: value})).is_ok(), "{} {value}", field.name);
            }
            let error = check(&json!({field.name: {"id": "x"}})).unwrap_err();
            assert!(error.message().starts_with(&format!("{} is not supported: ", field.name)));
        }
        assert!(check(&json!({"background": true})).is_err() && check(&json!({"n": 1})).is_ok());
        let mut notes = Notes::default();
        notes.ignored("user");
        assert_eq!(check(&json!({"user": "me", "metadata": {}, "nobody": "knows"})), Ok(notes));
    }
}
