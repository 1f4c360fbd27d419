//! The fields that completions and chat completions share, OpenAI's and llama.cpp's: sampling, the end of the text, log
//! probabilities.

use std::time::Instant;

use serde::Deserialize;
use utoipa::ToSchema;

use super::unsupported::{self, Endpoint};
use crate::http::ApiError;
use crate::http::body::Object;
use crate::http::job::generation::{GenerationSettings, MAX_TOP_LOGPROBS, check};
use crate::http::job::logit_bias::LogitBiasMap;
use crate::http::job::sampling::SamplingFields;
use crate::http::job::stop::Stop;
use crate::http::limits::MAX_CHOICES;
use crate::http::notes::Notes;

/// The fields that completions and chat completions share.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, ToSchema)]
pub struct GenerationFields {
    /// The model's name. With an unknown one, or without it, a server of one model answers with that.
    pub model: Option<String>,
    /// The seed of the sampler. Without it, or below 0: random.
    seed: Option<i64>,
    /// An alias of `seed`.
    random_seed: Option<i64>,
    /// An alias of `seed`.
    sampler_seed: Option<i64>,
    /// Added to the logits of tokens, given by their ids or by texts whose tokens are meant: an object, or a list of
    /// pairs. False forbids a token.
    #[schema(value_type = Option<std::collections::BTreeMap<String, f32>>)]
    logit_bias: Option<LogitBiasMap>,
    /// End the text before any of these strings.
    stop: Option<Stop>,
    /// End the text at any of these tokens.
    stop_token_ids: Option<Vec<u32>>,
    /// Maximum generated tokens; below 0: limited by the context only.
    max_tokens: Option<i64>,
    /// An alias of `max_tokens`, and preferred to it.
    max_completion_tokens: Option<i64>,
    /// An alias of `max_tokens`.
    n_predict: Option<i64>,
    /// An alias of `max_tokens`.
    num_predict: Option<i64>,
    /// An alias of `max_tokens`.
    max_new_tokens: Option<i64>,
    /// An alias of `max_tokens`.
    max_output_tokens: Option<i64>,
    /// Minimum generated tokens: the text does not end before.
    min_tokens: Option<u32>,
    /// An alias of `min_tokens`.
    min_new_tokens: Option<u32>,
    /// Report the log probability of each token of the prompt after the first, and of this many most likely ones at its
    /// position; not in streams.
    #[schema(minimum = 0, maximum = 20)]
    prompt_logprobs: Option<u32>,
    /// More than 0: report the log probability of each token and of this many most likely ones.
    #[schema(minimum = 0, maximum = 20)]
    n_probs: Option<u32>,
    /// Never sample a token that ends the text.
    ignore_eos: Option<bool>,
    /// Maximum number of drafts in a decode step; 0: none. The text does not depend on it.
    #[serde(rename = "speculative.n_max")]
    max_drafts: Option<i64>,
    /// The number of choices.
    #[schema(minimum = 1, maximum = 16, default = 1)]
    n: Option<u32>,
    /// An alias of `n`.
    #[schema(minimum = 1, maximum = 16)]
    n_cmpl: Option<u32>,
    /// Send the text as it is generated, as server-sent events.
    stream: Option<bool>,
    /// Options of a stream.
    stream_options: Option<StreamOptions>,
}

/// Options of a stream.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, ToSchema)]
struct StreamOptions {
    /// End the stream with an event that has the number of tokens.
    include_usage: Option<bool>,
}

impl GenerationFields {
    /// Reads the fields of a request to `endpoint`. Notes those without effect.
    pub fn read(endpoint: Endpoint, object: &Object<'_>) -> Result<(Self, Notes), ApiError> {
        Ok((object.parse()?, unsupported::check(endpoint, object)?))
    }

    /// The settings of generation. `sampling`: the request's sampling options; `default_max_tokens`: maximum generated
    /// tokens where the request sets none.
    pub fn generation(
        &self,
        sampling: SamplingFields,
        default_max_tokens: Option<usize>,
    ) -> Result<GenerationSettings, ApiError> {
        let n = self.n.or(self.n_cmpl).unwrap_or(1);
        check(if self.n.is_some() { "n" } else { "n_cmpl" }, n, 1..=MAX_CHOICES)?;
        Ok(GenerationSettings {
            sampling,
            // A seed below 0 means a random one.
            seed: self.seed.or(self.random_seed).or(self.sampler_seed).and_then(|seed| u64::try_from(seed).ok()),
            logit_bias: self.logit_bias.clone(),
            stop: self.stop.clone().map(Stop::into_strings).unwrap_or_default(),
            stop_ids: self.stop_token_ids.clone().unwrap_or_default(),
            max_tokens: self.max_tokens(),
            default_max_tokens,
            min_tokens: self.min_tokens.or(self.min_new_tokens).unwrap_or(0) as usize,
            ignore_eos: self.ignore_eos.unwrap_or(false),
            line_end_after: None,
            n,
            logprobs: self.n_probs()?,
            prompt_logprobs: self.prompt_logprobs()?,
            // Below 0 means 0, as in llama.cpp.
            max_drafts: self.max_drafts.map(|n| usize::try_from(n).unwrap_or(0)),
            prediction: String::new(),
            stream: self.stream(),
            received: Instant::now(),
        })
    }

    /// The first of the limits that is set; `usize::MAX`: unlimited.
    fn max_tokens(&self) -> Option<usize> {
        let given = [
            self.max_completion_tokens,
            self.max_tokens,
            self.n_predict,
            self.num_predict,
            self.max_new_tokens,
            self.max_output_tokens,
        ];
        // Below 0 means unlimited.
        given.into_iter().flatten().next().map(|n| usize::try_from(n).unwrap_or(usize::MAX))
    }

    /// The number of most likely tokens that llama.cpp's `n_probs` requests; `None`: no log probabilities.
    fn n_probs(&self) -> Result<Option<usize>, ApiError> {
        let n = self.n_probs.unwrap_or(0);
        check("n_probs", n, 0..=MAX_TOP_LOGPROBS)?;
        Ok((n > 0).then_some(n as usize))
    }

    /// The number of most likely tokens to report at each position of the prompt; `None`: no log probabilities.
    fn prompt_logprobs(&self) -> Result<Option<usize>, ApiError> {
        let Some(n) = self.prompt_logprobs else { return Ok(None) };
        check("prompt_logprobs", n, 0..=MAX_TOP_LOGPROBS)?;
        if self.stream() {
            let message = "prompt_logprobs are not part of streams: leave out prompt_logprobs or stream";
            return Err(ApiError::field("prompt_logprobs", message));
        }
        Ok(Some(n as usize))
    }

    fn stream(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// Whether a stream ends with the number of tokens.
    pub fn include_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
    }
}
