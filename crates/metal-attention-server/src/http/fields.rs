//! What completions and chat completions share: how a text is chosen and when it ends.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Instant;

use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{Client, Constraint, Request};
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::limits::{MAX_CHOICES, MAX_LOGIT_BIAS, MAX_STOP_BYTES, MAX_STOP_STRINGS};
use super::{ApiError, App};

/// Fields that completions and chat completions share.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, ToSchema)]
pub struct GenerationFields {
    /// The model's name, as `/v1/models` lists it. Without it, the one that is served.
    pub model: Option<String>,
    /// 0 takes the likeliest token, always; more varies more.
    #[schema(minimum = 0, maximum = 2, default = 0.8)]
    temperature: Option<f32>,
    /// Keep the likeliest tokens up to this total probability; 1: all.
    #[schema(minimum = 0, maximum = 1, default = 0.95)]
    top_p: Option<f32>,
    /// Keep this many of the likeliest tokens; 0: all.
    #[schema(minimum = 0, maximum = 1000000, default = 40)]
    top_k: Option<u32>,
    /// Keep tokens at least this likely relative to the likeliest; 0: all.
    #[schema(minimum = 0, maximum = 1, default = 0.05)]
    min_p: Option<f32>,
    /// The same seed gives the same text. Without it, another one each time.
    seed: Option<i64>,
    /// Subtracted from the logits of tokens that were seen.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    presence_penalty: Option<f32>,
    /// Subtracted from a token's logit for each time it was seen.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    frequency_penalty: Option<f32>,
    /// Divides the logits of tokens that were seen; 1: off.
    #[schema(minimum = 0.01, maximum = 100, default = 1)]
    #[serde(alias = "repetition_penalty")]
    repeat_penalty: Option<f32>,
    /// Added to the logits of tokens, by their ids.
    logit_bias: Option<BTreeMap<String, f32>>,
    /// End the text before any of these strings.
    stop: Option<Stop>,
    /// Most tokens to generate.
    #[schema(minimum = 0, maximum = 4294967295_u32)]
    pub max_tokens: Option<u32>,
    /// Never choose a token that ends the text.
    ignore_eos: Option<bool>,
    /// How many texts to generate.
    #[schema(minimum = 1, maximum = 16, default = 1)]
    n: Option<u32>,
    /// Send the text as it comes, by server-sent events.
    stream: Option<bool>,
    /// What a stream holds besides the text.
    stream_options: Option<StreamOptions>,
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
        let mut strings = Vec::new();
        while let Some(string) = list.next_element::<String>()? {
            if strings.len() == MAX_STOP_STRINGS {
                return Err(Error::custom(format!("more than {MAX_STOP_STRINGS} strings, which is the most allowed")));
            }
            check_stop(&string)?;
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
        let mut sampling = self.sampling()?;
        sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(u64::from(choice)));
        Ok(Request {
            prompt: Arc::clone(prompt),
            sampling,
            max_tokens: self.max_tokens.map(|n| n as usize),
            stop: Arc::clone(stop),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            min_tokens: 0,
            logit_bias: self.logit_bias(n_vocab)?,
            logprobs: None,
            constraint: None::<Box<dyn Constraint>>,
            logits_processor: None,
            deadline: app.options.timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            whole: !self.stream(),
            client: Client::default(),
        })
    }

    fn sampling(&self) -> Result<SamplerOptions, ApiError> {
        fn take<T: Copy + PartialOrd + fmt::Display>(
            param: &str,
            value: Option<T>,
            range: RangeInclusive<T>,
            into: &mut T,
        ) -> Result<(), ApiError> {
            if let Some(value) = value {
                check(param, value, range)?;
                *into = value;
            }
            Ok(())
        }
        let mut options = SamplerOptions::default();
        take("temperature", self.temperature, 0.0..=2.0, &mut options.temperature)?;
        take("top_p", self.top_p, 0.0..=1.0, &mut options.top_p)?;
        take("top_k", self.top_k.map(|k| k as usize), 0..=1_000_000, &mut options.top_k)?;
        take("min_p", self.min_p, 0.0..=1.0, &mut options.min_p)?;
        take("presence_penalty", self.presence_penalty, -2.0..=2.0, &mut options.presence_penalty)?;
        take("frequency_penalty", self.frequency_penalty, -2.0..=2.0, &mut options.frequency_penalty)?;
        take("repeat_penalty", self.repeat_penalty, 0.01..=100.0, &mut options.repeat_penalty)?;
        options.seed = self.seed.map(i64::cast_unsigned);
        Ok(options)
    }

    fn logit_bias(&self, n_vocab: usize) -> Result<Vec<(u32, f32)>, ApiError> {
        let n = self.logit_bias.as_ref().map_or(0, BTreeMap::len);
        if n > MAX_LOGIT_BIAS {
            let message = format!("logit_bias has {n} tokens; at most {MAX_LOGIT_BIAS} are allowed");
            return Err(ApiError::field("logit_bias", message));
        }
        let bias = self.logit_bias.iter().flatten().map(|(id, &bias)| {
            let param = format!("logit_bias.{id}");
            check(&param, bias, -100.0..=100.0)?;
            let id = id.parse().ok().filter(|&id: &u32| (id as usize) < n_vocab).ok_or_else(|| {
                ApiError::field(&param, format!("{param}: the model has no such token, only 0 to {}", n_vocab - 1))
            })?;
            Ok((id, bias))
        });
        bias.collect()
    }
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
