//! Sampling options by name: `/set` in a conversation shows them and changes one at a time.

use std::fmt::Display;
use std::str::FromStr;

use metal_attention::sampling::{SamplerKind, SamplerOptions};

use crate::sampling_args::{Seed, parse_last_n, parse_logit_bias};

/// The names of the options, those of the flags, in the order of [`text`].
pub const NAMES: [&str; 22] = [
    "temp",
    "top_k",
    "top_p",
    "min_p",
    "typical",
    "top_n_sigma",
    "min_keep",
    "xtc_probability",
    "xtc_threshold",
    "repeat_last_n",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dynatemp_range",
    "dynatemp_exp",
    "logit_bias",
    "samplers",
    "seed",
];

/// Sets the option `name` to `value`. Both have the form of the flag; - and _ in names are the same. An error describes the
/// problem; `options` may hold the wrong value then. `n_vocab` is the number of tokens in the vocabulary.
pub fn set(options: &mut SamplerOptions, name: &str, value: &str, n_vocab: usize) -> Result<(), String> {
    let o = options;
    match name.trim_start_matches('-').replace('-', "_").as_str() {
        "temp" | "temperature" => o.temperature = number(name, value)?,
        "top_k" => o.top_k = number(name, value)?,
        "top_p" => o.top_p = number(name, value)?,
        "min_p" => o.min_p = number(name, value)?,
        "typical" | "typical_p" => o.typical_p = number(name, value)?,
        "top_n_sigma" | "top_nsigma" => o.top_n_sigma = number(name, value)?,
        "min_keep" => o.min_keep = number(name, value)?,
        "xtc_probability" => o.xtc_probability = number(name, value)?,
        "xtc_threshold" => o.xtc_threshold = number(name, value)?,
        "repeat_last_n" => o.penalty_last_n = parse_last_n(value).map_err(|e| wrong(name, value, &e))?,
        "repeat_penalty" => o.repeat_penalty = number(name, value)?,
        "presence_penalty" => o.presence_penalty = number(name, value)?,
        "frequency_penalty" => o.frequency_penalty = number(name, value)?,
        "dry_multiplier" => o.dry_multiplier = number(name, value)?,
        "dry_base" => o.dry_base = number(name, value)?,
        "dry_allowed_length" => o.dry_allowed_length = number(name, value)?,
        "dry_penalty_last_n" => o.dry_penalty_last_n = parse_last_n(value).map_err(|e| wrong(name, value, &e))?,
        "dynatemp_range" => o.dynatemp_range = number(name, value)?,
        "dynatemp_exp" | "dynatemp_exponent" => o.dynatemp_exponent = number(name, value)?,
        "seed" => o.seed = number::<Seed>(name, value)?.0,
        "samplers" => o.order = SamplerKind::parse_order(value).map_err(|e| e.to_string())?,
        "logit_bias" => {
            let (id, bias) = parse_logit_bias(value).map_err(|e| wrong(name, value, &e))?;
            if id as usize >= n_vocab {
                return Err(format!("the vocabulary has only {n_vocab} tokens, not one of the id {id}"));
            }
            o.logit_bias.retain(|&(other, _)| other != id);
            o.logit_bias.push((id, bias));
        }
        _ => return Err(format!("there is no sampling option {name}; there are {}", NAMES.join(", "))),
    }
    o.validate().map_err(|e| e.to_string())
}

/// All options with their values, one a line, in a form that [`set`] accepts.
pub fn text(o: &SamplerOptions) -> String {
    let last_n = |n: usize| if n == usize::MAX { "-1".into() } else { n.to_string() };
    let bias: Vec<_> = o.logit_bias.iter().map(|(id, bias)| format!("{id}{bias:+}")).collect();
    let values = [
        o.temperature.to_string(),
        o.top_k.to_string(),
        o.top_p.to_string(),
        o.min_p.to_string(),
        o.typical_p.to_string(),
        o.top_n_sigma.to_string(),
        o.min_keep.to_string(),
        o.xtc_probability.to_string(),
        o.xtc_threshold.to_string(),
        last_n(o.penalty_last_n),
        o.repeat_penalty.to_string(),
        o.presence_penalty.to_string(),
        o.frequency_penalty.to_string(),
        o.dry_multiplier.to_string(),
        o.dry_base.to_string(),
        o.dry_allowed_length.to_string(),
        last_n(o.dry_penalty_last_n),
        o.dynatemp_range.to_string(),
        o.dynatemp_exponent.to_string(),
        bias.join(" "),
        o.order.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(";"),
        o.seed.map_or("-1".into(), |seed| seed.to_string()),
    ];
    let lines: Vec<_> = NAMES.iter().zip(values).map(|(name, value)| format!("{name:<19} {value}")).collect();
    lines.join("\n")
}

/// Parses a value of the option `name`.
fn number<T: FromStr<Err: Display>>(name: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|e: T::Err| wrong(name, value, &e.to_string()))
}

/// The message for a wrong value.
fn wrong(name: &str, value: &str, problem: &str) -> String {
    format!("{value:?} is no value for {name}: {problem}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each line of [`text`] can be given to [`set`].
    #[test]
    fn every_option_can_be_shown_and_set() {
        let mut options = SamplerOptions { temperature: 0.25, penalty_last_n: usize::MAX, ..Default::default() };
        options.logit_bias = vec![(7, -1.5)];
        options.seed = Some(3);
        let mut other = SamplerOptions { top_k: 1, order: Vec::new(), ..Default::default() };
        for line in text(&options).lines() {
            let (name, value) = line.split_once(' ').unwrap();
            set(&mut other, name, value.trim(), 512).unwrap_or_else(|e| panic!("{line}: {e}"));
        }
        assert_eq!(other, options);
        assert_eq!(text(&options).lines().count(), NAMES.len());
    }

    #[test]
    fn wrong_names_and_values_are_explained() {
        let error = |name: &str, value: &str| set(&mut SamplerOptions::default(), name, value, 512).unwrap_err();
        assert!(error("tmp", "1").starts_with("there is no sampling option tmp; there are temp, top_k, "));
        assert_eq!(error("temp", "hot"), "\"hot\" is no value for temp: invalid float literal");
        assert!(error("top-p", "2").contains("top_p"), "{}", error("top-p", "2"));
        assert_eq!(error("logit_bias", "512+1"), "the vocabulary has only 512 tokens, not one of the id 512");
    }
}
