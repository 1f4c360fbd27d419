//! How a text is generated: how its tokens are chosen, when it ends, and what is reported of it.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{Client, Request};

use super::logit_bias::LogitBias;
use super::sampling::SamplingFields;
use crate::http::limits::{MAX_CHOICES, MAX_STOP_IDS};
use crate::http::models::ModelLease;
use crate::http::{ApiError, App};

/// Most alternatives of a token that a request may ask for.
pub const MAX_TOP_LOGPROBS: u32 = 20;

/// How texts are generated. The default generates one text to its end, as the model's file recommends.
#[derive(Debug, Clone)]
pub struct Generation {
    /// How tokens are chosen.
    pub sampling: SamplingFields,
    /// The same seed gives the same text; without one each text is another.
    pub seed: Option<u64>,
    /// Added to the logits of tokens.
    pub logit_bias: Option<LogitBias>,
    /// Strings that end a text.
    pub stop: Vec<String>,
    /// Tokens that end a text.
    pub stop_ids: Vec<u32>,
    /// Most tokens to generate; `usize::MAX`: up to the text's end, or the context's. `None`: as the model's defaults say, else
    /// as `default_max_tokens`.
    pub max_tokens: Option<usize>,
    /// Most tokens where neither the request nor the model's defaults say; `None`: up to the text's end, or the context's.
    pub default_max_tokens: Option<usize>,
    /// A text does not end before it has this many tokens.
    pub min_tokens: usize,
    /// No token that ends the text is chosen.
    pub ignore_eos: bool,
    /// The text ends at the first line break after this time since its first token.
    pub line_end_after: Option<Duration>,
    /// Texts to generate after each prompt.
    pub n: u32,
    /// Report the log probability of each token and of this many of the likeliest.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// The text is sent as it comes.
    pub stream: bool,
    /// When the request was read. The server's timeout counts from here.
    pub received: Instant,
}

impl Default for Generation {
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
            stream: false,
            received: Instant::now(),
        }
    }
}

impl Generation {
    /// How tokens of `model` are chosen: as the request says, else as the model's defaults do.
    pub fn sampling(&self, model: &ModelLease) -> Result<SamplerOptions, ApiError> {
        let mut sampling = model.default_sampling()?;
        self.sampling.apply(&mut sampling)?;
        Ok(sampling)
    }

    /// Most tokens of a text of `model`; `None`: up to the text's end, or the context's.
    pub fn max_tokens(&self, model: &ModelLease) -> Option<usize> {
        let max_tokens = self.max_tokens.or(model.defaults().max_tokens).or(self.default_max_tokens);
        max_tokens.filter(|&n| n < usize::MAX)
    }

    /// Tokens that a prompt may have where the answer needs room for all that it may take, or for half of the context.
    pub fn prompt_room(&self, model: &ModelLease) -> usize {
        let answer = model.n_ctx / 2;
        model.n_ctx - self.max_tokens(model).map_or(answer, |n| n.min(answer))
    }

    /// The scheduler's request for text number `choice` after `prompt`. `stop` are all strings that end it.
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
            sampling,
            max_tokens: self.max_tokens(model),
            stop: Arc::clone(stop),
            stop_ids: self.stop_ids(model)?,
            ignore_eos: self.ignore_eos,
            min_tokens: self.min_tokens,
            line_end_after: self.line_end_after,
            logit_bias: match &self.logit_bias {
                Some(bias) => bias.of_tokens(&model.tokenizer, model.n_vocab())?,
                None => Vec::new(),
            },
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            constraint: None,
            logits_processor: None,
            deadline: app.options.timeout.and_then(|timeout| self.received.checked_add(timeout)),
            buffer_events: !self.stream,
        })
    }

    /// The strings that end a text of `model`: the request's, the model's, and `more` of them.
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

/// An error: the field `param` has a token that is none.
pub fn no_such_token(param: &str, id: impl fmt::Display, n_vocab: usize) -> ApiError {
    ApiError::field(param, format!("{param}: the model has no token {id}, only 0 to {}", n_vocab - 1))
}

/// Refuses a value outside `range`.
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
