//! The settings of generation that all interfaces share: sampling, end of the text, number of choices, reported log
//! probabilities.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{Client, Request};
use metal_attention::tokenizer::EncodeOptions;

use super::logit_bias::LogitBiasMap;
use super::sampling::SamplingFields;
use crate::http::limits::{MAX_CHOICES, MAX_STOP_IDS};
use crate::http::models::ModelLease;
use crate::http::{ApiError, App};

/// Maximum number of alternatives of a token whose log probabilities are reported.
pub const MAX_TOP_LOGPROBS: u32 = 20;

/// The settings of all sequences of a job. The default is one choice with the sampling that the model's file
/// recommends, up to its end of text.
#[derive(Debug, Clone)]
pub struct GenerationSettings {
    /// Sampling options of the request.
    pub sampling: SamplingFields,
    /// The seed of the first choice; choice `i` uses `seed + i`. `None`: random.
    pub seed: Option<u64>,
    /// Added to the logits of tokens.
    pub logit_bias: Option<LogitBiasMap>,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Tokens that end the text.
    pub stop_ids: Vec<u32>,
    /// Maximum generated tokens; `usize::MAX`: unlimited except by the context. `None`: the model's default, else
    /// `default_max_tokens`.
    pub max_tokens: Option<usize>,
    /// Maximum generated tokens where neither the request nor the model's defaults set one; `None`: unlimited except by
    /// the context.
    pub default_max_tokens: Option<usize>,
    /// Minimum generated tokens: the text does not end before.
    pub min_tokens: usize,
    /// Whether tokens that end the text are never sampled.
    pub ignore_eos: bool,
    /// The text ends at the first line break after this time since its first token.
    pub line_end_after: Option<Duration>,
    /// Choices for each prompt.
    pub n: u32,
    /// Report the log probability of each token and of this many most likely alternatives; `None`: none.
    pub logprobs: Option<usize>,
    /// Report the log probability of each prompt token after the first and of this many most likely alternatives; `None`:
    /// none.
    pub prompt_logprobs: Option<usize>,
    /// Maximum number of drafts in a decode step; 0: none. `None`: as the server's options say.
    pub max_drafts: Option<usize>,
    /// A text that the answer is likely to repeat; usually empty. Only chats use it.
    pub prediction: String,
    /// Whether the response is streamed.
    pub stream: bool,
    /// When the request was read; the server's timeout counts from here.
    pub received: Instant,
}

impl Default for GenerationSettings {
    fn default() -> Self {
        Self {
            sampling: SamplingFields::default(),
            seed: None,
            logit_bias: None,
            stop: Vec::new(),
            stop_ids: Vec::new(),
            max_tokens: None,
            default_max_tokens: None,
            min_tokens: 0,
            ignore_eos: false,
            line_end_after: None,
            n: 1,
            logprobs: None,
            prompt_logprobs: None,
            max_drafts: None,
            prediction: String::new(),
            stream: false,
            received: Instant::now(),
        }
    }
}

impl GenerationSettings {
    /// The sampling options for `model`: the request's over the model's defaults. Fails for a value outside its range.
    pub fn sampling(&self, model: &ModelLease) -> Result<SamplerOptions, ApiError> {
        let mut sampling = model.default_sampling()?;
        self.sampling.apply(&mut sampling)?;
        Ok(sampling)
    }

    /// Maximum generated tokens for `model`; `None`: unlimited except by the context.
    pub fn max_tokens(&self, model: &ModelLease) -> Option<usize> {
        let max_tokens = self.max_tokens.or(model.defaults().max_tokens).or(self.default_max_tokens);
        max_tokens.filter(|&n| n < usize::MAX)
    }

    /// Maximum prompt tokens that leave room in the context for `max_tokens`, or for half the context if that is less.
    pub fn prompt_room(&self, model: &ModelLease) -> usize {
        let answer = model.n_ctx / 2;
        model.n_ctx - self.max_tokens(model).map_or(answer, |n| n.min(answer))
    }

    /// Returns the scheduler's request for choice `choice` of `prompt`. `stop`: all stop strings. Its constraint and its
    /// prediction are not set.
    pub fn request(
        &self,
        app: &App,
        model: &ModelLease,
        client: Client,
        prompt: &Arc<[u32]>,
        stop: &Arc<[String]>,
        choice: u32,
    ) -> Result<Request, ApiError> {
        check("n", self.n, 1..=MAX_CHOICES)?;
        let mut sampling = self.sampling(model)?;
        sampling.seed = self.seed.map(|seed| seed.wrapping_add(u64::from(choice)));
        Ok(Request {
            client,
            prompt: Arc::clone(prompt),
            spans: Arc::default(),
            sampling,
            max_tokens: self.max_tokens(model),
            stop: Arc::clone(stop),
            stop_ids: self.stop_ids(model)?,
            ignore_eos: self.ignore_eos,
            min_tokens: self.min_tokens,
            line_end_after: self.line_end_after,
            logit_bias: match &self.logit_bias {
                Some(bias) => bias.resolve(&model.tokenizer, model.n_vocab())?,
                None => Vec::new(),
            },
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            constraint: None,
            logits_processor: None,
            deadline: app.options.timeout.and_then(|timeout| self.received.checked_add(timeout)),
            max_drafts: self.max_drafts,
            prediction: Arc::default(),
            buffer_events: !self.stream,
        })
    }

    /// The tokens of the prediction. Control tokens in it are text. Fails if it is too long to tokenise.
    pub fn prediction_ids(&self, model: &ModelLease) -> Result<Arc<[u32]>, ApiError> {
        if self.prediction.is_empty() {
            return Ok(Arc::default());
        }
        model.check_length(&self.prediction, "prediction.content")?;
        Ok(model.tokenizer.encode(&self.prediction, EncodeOptions::default()).into())
    }

    /// All strings that end a text of `model`: the request's, the model's defaults, and `more`.
    pub fn stop(&self, model: &ModelLease, more: &[&str]) -> Arc<[String]> {
        let more = more.iter().map(|&stop| stop.to_owned());
        self.stop.iter().chain(&model.defaults().stop).cloned().chain(more).collect()
    }

    fn stop_ids(&self, model: &ModelLease) -> Result<Arc<[u32]>, ApiError> {
        if self.stop_ids.len() > MAX_STOP_IDS {
            let n = self.stop_ids.len();
            let message = format!("stop_token_ids has {n} tokens; at most {MAX_STOP_IDS} are allowed");
            return Err(ApiError::field("stop_token_ids", message));
        }
        model.check_ids(&self.stop_ids, "stop_token_ids")?;
        Ok(self.stop_ids.as_slice().into())
    }
}

/// The error of a token id in field `param` that the vocabulary does not have.
pub fn no_such_token(param: &str, id: impl fmt::Display, n_vocab: usize) -> ApiError {
    ApiError::field(param, format!("{param}: the model has no token {id}, only 0 to {}", n_vocab - 1))
}

/// Fails where `value` is outside `range`.
pub fn check<T: Copy + PartialOrd + fmt::Display>(
    param: &str,
    value: T,
    range: RangeInclusive<T>,
) -> Result<(), ApiError> {
    if range.contains(&value) {
        return Ok(());
    }
    let (low, high) = (range.start(), range.end());
    Err(ApiError::field(param, format!("{param} is {value}, but it must be from {low} to {high}")))
}
