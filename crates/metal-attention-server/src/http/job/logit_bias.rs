//! The field `logit_bias`: numbers that are added to the logits of tokens, as an object (OpenAI) or a list of pairs
//! (llama.cpp).

use std::fmt;

use metal_attention::tokenizer::{EncodeOptions, Tokenizer};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::generation::no_such_token;
use crate::http::ApiError;
use crate::http::limits::{MAX_LOGIT_BIAS, MAX_STOP_BYTES};

/// Pairs of a token, by id or text, and the number that is added to its logit.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LogitBiasMap(Vec<(String, f32)>);

impl LogitBiasMap {
    /// Resolves texts to token ids: pairs of a token id and the number that is added to its logit; -inf forbids the
    /// token. Fails for unknown ids, numbers that are not finite, and too many tokens.
    pub fn resolve(&self, tokenizer: &Tokenizer, n_vocab: usize) -> Result<Vec<(u32, f32)>, ApiError> {
        check_number(self.0.len())?;
        let mut tokens = Vec::new();
        for (token, bias) in &self.0 {
            let param = format!("logit_bias.{token}");
            if !bias.is_finite() && *bias != f32::NEG_INFINITY {
                return Err(ApiError::field(&param, format!("{param} is {bias}, but it must be a finite number")));
            }
            if let Ok(id) = token.parse::<i128>() {
                let known = u32::try_from(id).ok().filter(|&id| (id as usize) < n_vocab);
                tokens.push((known.ok_or_else(|| no_such_token(&param, id, n_vocab))?, *bias));
            } else {
                if token.is_empty() || token.len() > MAX_STOP_BYTES {
                    let message = format!("logit_bias: a text must have from 1 to {MAX_STOP_BYTES} bytes");
                    return Err(ApiError::field("logit_bias", message));
                }
                let ids = tokenizer.encode(token, EncodeOptions { add_special: false, parse_special: false });
                tokens.extend(ids.into_iter().map(|id| (id, *bias)));
            }
        }
        check_number(tokens.len())?;
        Ok(tokens)
    }
}

fn check_number(n: usize) -> Result<(), ApiError> {
    if n > MAX_LOGIT_BIAS {
        let message = format!("logit_bias has {n} tokens; at most {MAX_LOGIT_BIAS} are allowed");
        return Err(ApiError::field("logit_bias", message));
    }
    Ok(())
}

impl<'de> Deserialize<'de> for LogitBiasMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LogitBiasMapVisitor)
    }
}

struct LogitBiasMapVisitor;

impl<'de> Visitor<'de> for LogitBiasMapVisitor {
    type Value = LogitBiasMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tokens and numbers, or a list of pairs of them")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LogitBiasMap, A::Error> {
        let mut list = Vec::new();
        while let Some((token, Bias(bias))) = map.next_entry::<String, Bias>()? {
            list.push((token, bias));
        }
        Ok(LogitBiasMap(list))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut pairs: A) -> Result<LogitBiasMap, A::Error> {
        let mut list = Vec::new();
        while let Some((TokenKey(token), Bias(bias))) = pairs.next_element::<(TokenKey, Bias)>()? {
            list.push((token, bias));
        }
        Ok(LogitBiasMap(list))
    }
}

/// A token id, or a text whose tokens are meant, as a string.
struct TokenKey(String);

impl<'de> Deserialize<'de> for TokenKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TokenKeyVisitor)
    }
}

struct TokenKeyVisitor;

impl Visitor<'_> for TokenKeyVisitor {
    type Value = TokenKey;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token id or a text")
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<TokenKey, E> {
        Ok(TokenKey(id.to_string()))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<TokenKey, E> {
        Ok(TokenKey(text.to_owned()))
    }
}

/// A number, or false for -inf, which forbids a token.
struct Bias(f32);

impl<'de> Deserialize<'de> for Bias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BiasVisitor)
    }
}

struct BiasVisitor;

impl Visitor<'_> for BiasVisitor {
    type Value = Bias;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number or false")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Bias, E> {
        if value { Err(E::custom("true is no number; false forbids a token")) } else { Ok(Bias(f32::NEG_INFINITY)) }
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Bias, E> {
        Ok(Bias(value as f32))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Bias, E> {
        Ok(Bias(value as f32))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Bias, E> {
        // Numbers beyond 32 bits become NaN, which `resolve` refuses with the token's name.
        Ok(Bias(if value < f64::from(f32::MIN) { f32::NAN } else { value as f32 }))
    }
}

#[cfg(test)]
mod tests {
    use metal_attention::Model;

    use super::*;

    #[test]
    fn biases_are_an_object_or_pairs() {
        let model = Model::built_in().unwrap();
        let tokenizer = model.tokenizer().unwrap();
        let read = |json: &str| {
            let bias: LogitBiasMap = serde_json::from_str(json).map_err(|e| e.to_string())?;
            bias.resolve(&tokenizer, 512)
                .map_err(|e| serde_json::to_value(e.body()).unwrap()["error"]["param"].as_str().unwrap().to_owned())
        };
        let never = f32::NEG_INFINITY;
        assert_eq!(read(r#"{"7": 1.5, "8": -200, "9": false}"#), Ok(vec![(7, 1.5), (8, -200.0), (9, never)]));
        assert_eq!(read(r#"[[7, 1], ["8", -0.5], [9, false]]"#), Ok(vec![(7, 1.0), (8, -0.5), (9, never)]));
        let once: Vec<_> = tokenizer.encode("Once", EncodeOptions::default()).into_iter().map(|id| (id, 2.0)).collect();
        assert_eq!(read(r#"[["Once", 2]]"#), Ok(once.clone()));
        assert_eq!(read(r#"{"Once": 2}"#), Ok(once));
        for (json, param) in [
            (r#"{"512": 1}"#, "logit_bias.512"),
            (r#"{"-1": 1}"#, "logit_bias.-1"),
            (r#"{"1": 1e300}"#, "logit_bias.1"),
            (r#"{"1": -1e300}"#, "logit_bias.1"),
            (r#"{"": 1}"#, "logit_bias"),
        ] {
            assert_eq!(read(json), Err(param.into()), "{json}");
        }
        for json in ["1", "[1]", "[[1]]", r#"[[1, "x"]]"#, r#"{"1": true}"#, "[[-1, 1]]"] {
            assert!(read(json).is_err(), "{json}");
        }
    }
}
