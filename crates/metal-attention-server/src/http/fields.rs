//! What completions and chat completions share: how a text is chosen and when it ends.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Instant;

use metal_attention::scheduler::{Client, Constraint, Request};
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::body::parse;
use super::limits::{MAX_CHOICES, MAX_STOP_BYTES, MAX_STOP_BYTES_IN_ALL, MAX_STOP_IDS, MAX_STOP_STRINGS};
use super::logit_bias::LogitBias;
use super::logprobs::MAX_TOP_LOGPROBS;
use super::notes::Notes;
use super::sampling::SamplingFields;
use super::unsupported::{self, Endpoint};
use super::{ApiError, App};

/// Fields that completions and chat completions share.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, ToSchema)]
pub struct GenerationFields {
    /// The model's name. With another one, or without it, the model that is served answers.
    pub model: Option<String>,
    /// The same seed gives the same text. Without it, or below 0, another one each time.
    seed: Option<i64>,
    /// The same as `seed`.
    random_seed: Option<i64>,
    /// The same as `seed`.
    sampler_seed: Option<i64>,
    /// Added to the logits of tokens, by their ids, or by texts whose tokens are meant: an object, or a list of pairs. False
    /// forbids a token.
    #[schema(value_type = Option<std::collections::BTreeMap<String, f32>>)]
    logit_bias: Option<LogitBias>,
    /// End the text before any of these strings.
    stop: Option<Stop>,
    /// End the text at any of these tokens.
    stop_token_ids: Option<Vec<u32>>,
    /// Most tokens to generate; below 0: as many as there is room for.
    max_tokens: Option<i64>,
    /// The same as `max_tokens`, and before it where both are there.
    max_completion_tokens: Option<i64>,
    /// The same as `max_tokens`.
    n_predict: Option<i64>,
    /// The same as `max_tokens`.
    num_predict: Option<i64>,
    /// The same as `max_tokens`.
    max_new_tokens: Option<i64>,
    /// The same as `max_tokens`.
    max_output_tokens: Option<i64>,
    /// Do not end the text before it has so many tokens.
    min_tokens: Option<u32>,
    /// The same as `min_tokens`.
    min_new_tokens: Option<u32>,
    /// Tell the log probability of each token of the prompt but the first, and of so many of the likeliest there; not in
    /// streams.
    #[schema(minimum = 0, maximum = 20)]
    prompt_logprobs: Option<u32>,
    /// More than 0: tell the log probability of each token, and of so many of the likeliest.
    #[schema(minimum = 0, maximum = 20)]
    n_probs: Option<u32>,
    /// Never choose a token that ends the text.
    ignore_eos: Option<bool>,
    /// How many texts to generate.
    #[schema(minimum = 1, maximum = 16, default = 1)]
    n: Option<u32>,
    /// Send the text as it comes, by server-sent events.
    stream: Option<bool>,
    /// What a stream holds besides the text.
    stream_options: Option<StreamOptions>,
    /// How tokens are chosen.
    #[serde(skip)]
    sampling: SamplingFields,
    /// How the request was read.
    #[serde(skip)]
    pub notes: Notes,
    /// When it was read.
    #[serde(skip)]
    received: Option<Instant>,
}

/// One string or several.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
enum Stop {
    /// One string.
    One(String),
    /// Any of several.
    Several(Vec<String>),
}

/// What a stream holds besides the text.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, ToSchema)]
struct StreamOptions {
    /// End the stream with an event that has the number of tokens.
    include_usage: Option<bool>,
}

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StopVisitor)
    }
}

struct StopVisitor;

impl<'de> Visitor<'de> for StopVisitor {
    type Value = Stop;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of strings")
    }

    fn visit_str<E: Error>(self, string: &str) -> Result<Stop, E> {
        check_stop(string)?;
        Ok(Stop::One(string.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Stop, A::Error> {
        let (mut strings, mut bytes) = (Vec::new(), 0);
        while let Some(string) = list.next_element::<String>()? {
            if strings.len() == MAX_STOP_STRINGS {
                return Err(Error::custom(format!("more than {MAX_STOP_STRINGS} strings, which is the most allowed")));
            }
            check_stop(&string)?;
            bytes += string.len();
            if bytes > MAX_STOP_BYTES_IN_ALL {
                let message = format!("more than {MAX_STOP_BYTES_IN_ALL} bytes together, which is the most allowed");
                return Err(Error::custom(message));
            }
            strings.push(string);
        }
        Ok(Stop::Several(strings))
    }
}

fn check_stop<E: Error>(string: &str) -> Result<(), E> {
    match string.len() {
        0..=MAX_STOP_BYTES => Ok(()),
        n => Err(E::custom(format!("a string of {n} bytes; at most {MAX_STOP_BYTES} are allowed"))),
    }
}

impl GenerationFields {
    /// Reads the fields out of a request to `endpoint`.
    pub fn read(endpoint: Endpoint, json: &[u8]) -> Result<Self, ApiError> {
        let mut notes = unsupported::check(endpoint, json)?;
        let sampling: SamplingFields = parse(json)?;
        sampling.note(&mut notes);
        Ok(Self { sampling, notes, received: Some(Instant::now()), ..parse(json)? })
    }

    /// Most tokens to generate; `default` where the request does not say.
    pub fn max_tokens(&self, default: Option<usize>) -> Option<usize> {
        let given = [
            self.max_completion_tokens,
            self.max_tokens,
            self.n_predict,
            self.num_predict,
            self.max_new_tokens,
            self.max_output_tokens,
        ];
        match given.into_iter().flatten().next() {
            Some(n) => usize::try_from(n).ok(),
            None => default,
        }
    }

    /// How many of the likeliest tokens llama.cpp's `n_probs` asks for.
    pub fn n_probs(&self) -> Result<Option<usize>, ApiError> {
        let n = self.n_probs.unwrap_or(0);
        check("n_probs", n, 0..=MAX_TOP_LOGPROBS)?;
        Ok((n > 0).then_some(n as usize))
    }

    /// How many of the likeliest tokens are wanted at each place of the prompt.
    pub fn prompt_logprobs(&self) -> Result<Option<usize>, ApiError> {
        let Some(n) = self.prompt_logprobs else { return Ok(None) };
        check("prompt_logprobs", n, 0..=MAX_TOP_LOGPROBS)?;
        if self.stream() {
            let message = "prompt_logprobs are not part of streams: leave out prompt_logprobs or stream";
            return Err(ApiError::field("prompt_logprobs", message));
        }
        Ok(Some(n as usize))
    }

    /// How many texts are wanted.
    pub fn n(&self) -> Result<u32, ApiError> {
        let n = self.n.unwrap_or(1);
        check("n", n, 1..=MAX_CHOICES)?;
        Ok(n)
    }

    /// Whether the text is wanted as it comes.
    pub fn stream(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// Whether a stream ends with the number of tokens.
    pub fn include_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
    }

    /// The strings that end a text, and `more` of them.
    pub fn stop(&self, more: &[&str]) -> Arc<[String]> {
        let own = match &self.stop {
            None => &[],
            Some(Stop::One(string)) => std::slice::from_ref(string),
            Some(Stop::Several(strings)) => strings.as_slice(),
        };
        own.iter().cloned().chain(more.iter().map(|&stop| stop.to_owned())).collect()
    }

    /// The request that these fields describe, for each of the `n` texts after `prompt`, which end before `stop`.
    pub fn request(
        &self,
        app: &App,
        n_vocab: usize,
        prompt: &Arc<[u32]>,
        stop: &Arc<[String]>,
        choice: u32,
    ) -> Result<Request, ApiError> {
        let model = app.model()?;
        let mut sampling = model.sampling();
        self.sampling.apply(&mut sampling)?;
        // Of a seed below 0 the texts are as of none.
        let seed = self.seed.or(self.random_seed).or(self.sampler_seed).and_then(|seed| u64::try_from(seed).ok());
        sampling.seed = seed.map(|seed| seed.wrapping_add(u64::from(choice)));
        Ok(Request {
            prompt: Arc::clone(prompt),
            sampling,
            max_tokens: self.max_tokens(None),
            stop: Arc::clone(stop),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            stop_ids: self.stop_ids(n_vocab)?,
            min_tokens: self.min_tokens.or(self.min_new_tokens).unwrap_or(0) as usize,
            logit_bias: match &self.logit_bias {
                Some(bias) => bias.of_tokens(&model.tokenizer, n_vocab)?,
                None => Vec::new(),
            },
            logprobs: None,
            prompt_logprobs: self.prompt_logprobs()?,
            constraint: None::<Box<dyn Constraint>>,
            logits_processor: None,
            deadline: app.options.timeout.and_then(|timeout| self.received?.checked_add(timeout)),
            whole: !self.stream(),
            client: Client::default(),
        })
    }

    fn stop_ids(&self, n_vocab: usize) -> Result<Arc<[u32]>, ApiError> {
        let ids = self.stop_token_ids.as_deref().unwrap_or_default();
        if ids.len() > MAX_STOP_IDS {
            let message = format!("stop_token_ids has {} tokens; at most {MAX_STOP_IDS} are allowed", ids.len());
            return Err(ApiError::field("stop_token_ids", message));
        }
        match ids.iter().find(|&&id| id as usize >= n_vocab) {
            Some(id) => Err(no_such_token("stop_token_ids", *id, n_vocab)),
            None => Ok(ids.into()),
        }
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
