//! Fields of the Responses interface, and those that other servers add to it, that are not used here.

use crate::http::ApiError;
use crate::http::body::Object;
use crate::http::notes::Notes;
use crate::http::unsupported::Neutral::{self, Number, Word};
use crate::http::unsupported::{self, RefusedField, Unused};

const fn field(name: &'static str, neutral: &'static [Neutral], instead: &'static str) -> RefusedField {
    RefusedField { name, neutral, instead }
}

const FORMAT: &str = "use text.format with a JSON schema";
const LEAVE_OUT: &str = "leave it out";

/// All fields that are refused.
const REFUSED: &[RefusedField] = &[
    field("background", &[], "send the request without it, and read the stream"),
    field("conversation", &[], "use previous_response_id, or send the items in input"),
    field("prompt", &[], "put the prompt's text into instructions or input"),
    field("context_management", &[], "this server compacts no conversations: send a shorter one"),
    field("moderation", &[], LEAVE_OUT),
    field("n", &[Number(1.0)], "send the request several times"),
    field("best_of", &[Number(1.0)], LEAVE_OUT),
    field("prompt_logprobs", &[], "use /v1/chat/completions"),
    field("response_format", &[Word("text")], FORMAT),
    field("grammar", &[], "use a custom tool with a grammar, and tool_choice"),
    field("guided_json", &[], FORMAT),
    field("guided_regex", &[], "use a custom tool with a grammar, and tool_choice"),
    field("guided_choice", &[], "use text.format with a JSON schema that has an enum"),
    field("guided_grammar", &[], "use a custom tool with a grammar, and tool_choice"),
    field("structured_outputs", &[], FORMAT),
    field("modalities", &[Word("text")], "text is all that is written"),
    field("audio", &[], "text is all that is written"),
    field("messages", &[], "send the conversation in input, or use /v1/chat/completions"),
];

/// Fields that change no text. They are passed over, and named in the answer's header `x-ignored` where they ask for something.
#[rustfmt::skip]
const IGNORED: &[&str] = &[
    "user", "safety_identifier", "metadata", "service_tier", "client_metadata", "max_tool_calls", "personality",
    "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_prompt", "id_slot", "request_id", "priority",
];

/// Refuses a request that asks for something this server cannot do. Notes the fields that are passed over.
pub fn check(object: &Object<'_>) -> Result<Notes, ApiError> {
    unsupported::check(object, |name| {
        let refused = REFUSED.iter().find(|field| field.name == name);
        refused.map(Unused::Refused).or_else(|| IGNORED.contains(&name).then_some(Unused::Ignored))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn fields_are_refused_where_they_ask_for_something() {
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
