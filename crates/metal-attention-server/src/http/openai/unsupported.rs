//! The fields of OpenAI's interface, and those that vLLM, llama.cpp and others add to it, which this server refuses or
//! ignores.

use crate::http::ApiError;
use crate::http::body::Object;
use crate::http::notes::Notes;
use crate::http::unsupported::{self, Neutral, RefusedField, refused};

/// The endpoints with a table of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/embeddings`
    Embeddings,
    /// `/v1/rerank`
    Rerank,
}

use Endpoint::{Chat, Completions, Embeddings, Rerank};
use Neutral::{Negative, Number, True, Word};

/// A field that is refused, and at which endpoints.
struct EndpointField {
    /// The field.
    field: RefusedField,
    /// The endpoints that refuse it.
    at: &'static [Endpoint],
}

const TEXTS: &[Endpoint] = &[Chat, Completions];
const ALL: &[Endpoint] = &[Chat, Completions, Embeddings, Rerank];
const INFILL: &str = "use /infill, or suffix in /v1/completions";
const LEAVE_OUT: &str = "leave it out";
const FORM: &str = "use response_format, grammar or regex";
const IN_CHATS: &str = "use /v1/chat/completions";
const MAX_TOKENS: &str = "use max_tokens";
const SAMPLING: &str = "use temperature, top_p, top_k and min_p";
const PENALTIES: &str = "use presence_penalty, frequency_penalty or repeat_penalty";

const fn field(
    name: &'static str,
    at: &'static [Endpoint],
    neutral: &'static [Neutral],
    instead: &'static str,
) -> EndpointField {
    EndpointField { field: refused(name, neutral, instead), at }
}

/// All refused fields.
#[rustfmt::skip]
const FIELDS: &[EndpointField] = &[
    // The response format.
    field("grammar_lazy", TEXTS, &[], FORM),
    field("grammar_triggers", TEXTS, &[], FORM),
    field("guided_whitespace_pattern", TEXTS, &[], FORM),
    field("structural_tag", TEXTS, &[], FORM),
    field("format", TEXTS, &[], FORM),
    // The number of choices.
    field("best_of", TEXTS, &[Number(1.0)], LEAVE_OUT),
    field("use_beam_search", TEXTS, &[], LEAVE_OUT),
    field("beam_width", TEXTS, &[Number(1.0)], LEAVE_OUT),
    field("length_penalty", TEXTS, &[Number(1.0)], LEAVE_OUT),
    field("early_stopping", TEXTS, &[], LEAVE_OUT),
    // The end of the text.
    field("min_length", TEXTS, &[Number(0.0)], "use min_tokens"),
    field("max_length", TEXTS, &[], MAX_TOKENS),
    field("t_max_predict_ms", TEXTS, &[Number(0.0), Negative], MAX_TOKENS),
    field("n_indent", TEXTS, &[Number(0.0)], LEAVE_OUT),
    field("stop_regex", TEXTS, &[], "use stop"),
    field("include_stop_str_in_output", TEXTS, &[], LEAVE_OUT),
    field("no_stop_trim", TEXTS, &[], LEAVE_OUT),
    // Sampling.
    field("mirostat", TEXTS, &[Number(0.0)], SAMPLING),
    field("mirostat_mode", TEXTS, &[Number(0.0)], SAMPLING),
    field("adaptive_target", TEXTS, &[Negative], SAMPLING),
    field("smoothing_factor", TEXTS, &[Number(0.0)], SAMPLING),
    field("ban_eos_token", TEXTS, &[], "use ignore_eos"),
    field("options", TEXTS, &[], "put what it holds beside the other fields"),
    field("tfs_z", TEXTS, &[Number(1.0)], SAMPLING),
    field("tfs", TEXTS, &[Number(1.0)], SAMPLING),
    field("top_a", TEXTS, &[Number(0.0)], SAMPLING),
    field("epsilon_cutoff", TEXTS, &[Number(0.0)], SAMPLING),
    field("eta_cutoff", TEXTS, &[Number(0.0)], SAMPLING),
    field("penalty_alpha", TEXTS, &[Number(0.0)], SAMPLING),
    field("no_repeat_ngram_size", TEXTS, &[Number(0.0)], PENALTIES),
    field("encoder_repetition_penalty", TEXTS, &[Number(1.0)], PENALTIES),
    field("do_sample", TEXTS, &[True], "use temperature 0"),
    field("allowed_token_ids", TEXTS, &[], "use logit_bias"),
    field("bad_words", TEXTS, &[], "use logit_bias"),
    field("logits_processors", TEXTS, &[], "use logit_bias"),
    field("custom_logit_processor", TEXTS, &[], "use logit_bias"),
    field("guidance_scale", TEXTS, &[Number(1.0)], LEAVE_OUT),
    field("negative_prompt", TEXTS, &[], LEAVE_OUT),
    // Reported in addition to the text.
    field("post_sampling_probs", TEXTS, &[], "use logprobs"),
    field("top_logprobs", &[Completions], &[Number(0.0)], "use logprobs, a number"),
    field("top_logprobs_num", TEXTS, &[Number(0.0)], "use logprobs"),
    field("return_logprob", TEXTS, &[], "use logprobs"),
    field("return_tokens", TEXTS, &[], "use /tokenize"),
    field("return_token_ids", TEXTS, &[], "use /tokenize"),
    field("return_tokens_as_token_ids", TEXTS, &[], LEAVE_OUT),
    field("return_hidden_states", TEXTS, &[], LEAVE_OUT),
    field("skip_special_tokens", TEXTS, &[True], LEAVE_OUT),
    field("spaces_between_special_tokens", TEXTS, &[True], LEAVE_OUT),
    field("details", TEXTS, &[], LEAVE_OUT),
    field("echo", &[Chat], &[], LEAVE_OUT),
    // The prompt.
    field("continue_final_message", &[Completions], &[], "use /v1/completions to continue a text"),
    field("add_generation_prompt", &[Completions], &[True], "use /v1/completions to continue a text"),
    field("add_special_tokens", &[Completions, Embeddings], &[True], "give token ids as the prompt"),
    field("truncate_prompt_tokens", ALL, &[], "shorten the prompt"),
    field("truncate", ALL, &[Word("NONE")], "shorten the prompt"),
    field("chat_template", TEXTS, &[], "the model's own template is used"),
    field("documents", TEXTS, &[], "put them into messages"),
    field("messages", &[Completions], &[], IN_CHATS),
    field("chat_template_kwargs", &[Completions], &[], IN_CHATS),
    field("prompt", &[Chat], &[], "use /v1/completions"),
    field("suffix", &[Chat], &[], "use /v1/completions"),
    field("input_prefix", TEXTS, &[], INFILL),
    field("input_suffix", TEXTS, &[], INFILL),
    field("input_extra", TEXTS, &[], INFILL),
    field("image_data", TEXTS, &[], "text is all that is read"),
    field("multimodal_data", ALL, &[], "text is all that is read"),
    field("mm_processor_kwargs", ALL, &[], "text is all that is read"),
    field("audio", TEXTS, &[], "text is all that is written"),
    field("modalities", TEXTS, &[Word("text")], "text is all that is written"),
    // Tools and reasoning.
    field("tools", &[Completions], &[], IN_CHATS),
    field("tool_choice", &[Completions], &[Word("none"), Word("auto")], IN_CHATS),
    field("functions", TEXTS, &[], "use tools"),
    field("function_call", TEXTS, &[Word("none"), Word("auto")], "use tool_choice"),
    field("web_search_options", TEXTS, &[], LEAVE_OUT),
    field("parse_tool_calls", TEXTS, &[True], LEAVE_OUT),
    field("enable_thinking", &[Completions], &[True], IN_CHATS),
    field("thinking", &[Completions], &[True, Word("enabled")], IN_CHATS),
    field("think", &[Completions], &[True], IN_CHATS),
    field("thinking_budget", &[Completions], &[], IN_CHATS),
    field("thinking_token_budget", &[Completions], &[], IN_CHATS),
    field("reasoning_budget", &[Completions], &[Negative], IN_CHATS),
    field("thinking_forced_open", TEXTS, &[], LEAVE_OUT),
    field("include_reasoning", TEXTS, &[True], LEAVE_OUT),
    field("separate_reasoning", TEXTS, &[True], LEAVE_OUT),
    field("reasoning_format", TEXTS, &[Word("auto"), Word("deepseek")], LEAVE_OUT),
    // The model, and embeddings.
    field("lora", ALL, &[], LEAVE_OUT),
    field("lora_path", ALL, &[], LEAVE_OUT),
    field("lora_request", ALL, &[], LEAVE_OUT),
    field("cache_salt", ALL, &[], "beginnings of prompts are shared between all clients"),
    field("pooling", &[Embeddings], &[Word("mean")], LEAVE_OUT),
    field("embd_normalize", &[Embeddings], &[Number(2.0)], LEAVE_OUT),
    field("normalize", &[Embeddings], &[True], LEAVE_OUT),
    field("input_type", &[Embeddings], &[], "put what the model expects before a text into the text"),
    field("prompt_name", &[Embeddings], &[], "put what the model expects before a text into the text"),
    // Ranking.
    field("max_tokens_per_doc", &[Rerank], &[], "shorten the documents"),
    field("max_chunks_per_doc", &[Rerank], &[], "shorten the documents"),
    field("overlap_tokens", &[Rerank], &[Number(0.0)], "shorten the documents"),
    field("rank_fields", &[Rerank], &[Word("text")], "put all that counts into the text of a document"),
    field("instruction", &[Rerank], &[], "put it into the query"),
];

/// Fields that do not change the result, or that a server of one model cannot support. They are ignored, and reported
/// in the response header `x-ignored` if they would have an effect.
#[rustfmt::skip]
const IGNORED: &[&str] = &[
    // The origin of the request, and its processing elsewhere.
    "user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "priority", "prediction", "verbosity",
    "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
    // The server: slots, caches, speculation.
    "cache_prompt", "id_slot", "n_keep", "n_discard", "n_cache_reuse", "keep_alive", "backend_sampling",
    "speculative.n_max", "speculative.n_min", "speculative.p_min",
    // Parameters of samplers that are refused, or off.
    "mirostat_tau", "mirostat_eta", "adaptive_decay", "smoothing_curve",
    // The contents and the end of llama.cpp's responses.
    "verbose", "timings_per_token", "return_progress", "response_fields", "sse_ping_interval",
    "t_max_prompt_ms",
];

/// Fields of [`IGNORED`] that some endpoints read.
const READ: &[(&str, &[Endpoint])] = &[("prediction", &[Chat]), ("speculative.n_max", TEXTS)];

/// Refuses a request to `endpoint` that uses a refused field. Notes the ignored fields.
pub fn check(endpoint: Endpoint, object: &Object<'_>) -> Result<Notes, ApiError> {
    let refused = FIELDS.iter().filter(|row| row.at.contains(&endpoint)).map(|row| &row.field);
    let is_read = |name: &str| READ.iter().any(|(read, at)| *read == name && at.contains(&endpoint));
    let ignored: Vec<&str> = IGNORED.iter().copied().filter(|name| !is_read(name)).collect();
    unsupported::check(object, refused, &ignored)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(endpoint: Endpoint, request: &Value) -> Result<Notes, ApiError> {
        check(endpoint, &Object::split(request.to_string().as_bytes())?)
    }

    /// The name of the field that is refused.
    fn refused(endpoint: Endpoint, request: &Value) -> Option<String> {
        let error = read(endpoint, request).err()?;
        let error = serde_json::to_value(error.body()).unwrap();
        assert_eq!(error["error"]["code"], "unsupported_parameter");
        Some(error["error"]["param"].as_str().unwrap().to_owned())
    }

    #[test]
    fn values_without_effect_are_ignored() {
        for EndpointField { field, at } in FIELDS {
            for &endpoint in *at {
                let empty = [json!(null), json!(""), json!([]), json!({})];
                let neutral = field.neutral.iter().map(|neutral| match neutral {
                    True => json!(true),
                    Number(number) => json!(number),
                    Negative => json!(-0.01),
                    Word(word) => json!(word),
                });
                for value in empty.into_iter().chain(neutral) {
                    assert_eq!(refused(endpoint, &json!({field.name: value})), None, "{} {value}", field.name);
                }
                // No value may both have an effect and have none.
                let asks = |value: Value| refused(endpoint, &json!({field.name: value})).is_some();
                assert!(asks(json!(true)) != asks(json!(false)), "{}", field.name);
                assert!(asks(json!("x")) && asks(json!(["x"])) && asks(json!({"x": 1})) && asks(json!(7)));
            }
        }
    }

    #[test]
    fn fields_are_refused_where_they_have_an_effect() {
        for (request, field) in [
            (json!({"best_of": 2}), "best_of"),
            (json!({"best_of": 1.5, "user": "x"}), "best_of"),
            (json!({"n": 2, "min_length": 5}), "min_length"),
            (json!({"grammar_lazy": true, "grammar": "root ::= \"a\""}), "grammar_lazy"),
            (json!({"format": "json"}), "format"),
            (json!({"use_beam_search": true}), "use_beam_search"),
            (json!({"options": {"temperature": 0}}), "options"),
            (json!({"mirostat": 2, "mirostat_tau": 5.0}), "mirostat"),
            (json!({"modalities": ["text", "audio"]}), "modalities"),
            (json!({"function_call": {"name": "f"}}), "function_call"),
            (json!({"skip_special_tokens": false}), "skip_special_tokens"),
        ] {
            for endpoint in [Chat, Completions] {
                assert_eq!(refused(endpoint, &request).as_deref(), Some(field), "{request}");
            }
            assert_eq!(refused(Embeddings, &request), None, "{request}");
        }
        for request in [
            json!({"continue_final_message": true}),
            json!({"add_generation_prompt": false}),
            json!({"enable_thinking": false}),
            json!({"thinking": {"type": "disabled"}}),
        ] {
            assert!(refused(Completions, &request).is_some() && refused(Chat, &request).is_none(), "{request}");
        }
        assert_eq!(refused(Chat, &json!({"echo": true})).as_deref(), Some("echo"));
        assert_eq!(refused(Completions, &json!({"echo": true})), None);
    }

    #[test]
    fn fields_that_change_nothing_are_ignored() {
        let request = json!({"user": "me", "metadata": {"a": "b"}, "store": true, "service_tier": "auto",
            "safety_identifier": "x", "prompt_cache_key": "x", "cache_prompt": true, "id_slot": 3, "verbosity": "low",
            "reasoning_effort": "low", "prediction": {"type": "content"}, "request_id": "x", "mirostat_tau": 5.0,
            "speculative.n_max": 8, "speculative.n_min": 2, "speculative.p_min": 0.5,
            "modalities": ["text"], "tool_choice": "auto", "function_call": "none", "tfs_z": 1, "nobody": "knows"});
        for &endpoint in ALL {
            assert_eq!(refused(endpoint, &request), None);
            let mut notes = Notes::default();
            for name in [
                "user",
                "metadata",
                "store",
                "service_tier",
                "safety_identifier",
                "prompt_cache_key",
                "cache_prompt",
                "id_slot",
                "verbosity",
                "request_id",
                "mirostat_tau",
                "speculative.n_min",
                "speculative.p_min",
            ] {
                notes.ignored(name);
            }
            // Chats read predictions, and both kinds of texts the number of drafts.
            let others =
                [("prediction", &[Completions, Embeddings, Rerank][..]), ("speculative.n_max", &[Embeddings, Rerank])];
            for (name, _) in others.into_iter().filter(|(_, at)| at.contains(&endpoint)) {
                notes.ignored(name);
            }
            assert_eq!(read(endpoint, &request), Ok(notes));
        }
        let nothing = json!({"user": "", "metadata": null, "store": false, "cache_prompt": false});
        assert_eq!(read(Chat, &nothing), Ok(Notes::default()));
    }

    #[test]
    fn each_field_is_listed_once_for_an_endpoint() {
        for (i, row) in FIELDS.iter().enumerate() {
            let same = |other: &EndpointField| {
                other.field.name == row.field.name && other.at.iter().any(|at| row.at.contains(at))
            };
            assert!(!FIELDS[..i].iter().any(same), "{}", row.field.name);
        }
    }
}
