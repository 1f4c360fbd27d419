//! Sampling flags. They have llama.cpp's names and defaults; a model's file may recommend other defaults.

use std::num::ParseIntError;
use std::str::FromStr;

use metal_attention::sampling::{SamplerKind, SamplerOptions};
use metal_attention::{Error, Model};

use crate::cli_error::CliError;

/// The flags of the samplers. A flag that is `None` has the default of the model's file.
#[derive(clap::Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Seed of the random numbers: the same seed gives the same text; below 0: a new one each time
    #[arg(short, long, value_name = "N", default_value = "-1", allow_negative_numbers = true)]
    seed: Seed,

    /// Temperature; 0 chooses the likeliest token [default: the file's, else 0.8]
    #[arg(long, alias = "temperature", value_name = "T", allow_negative_numbers = true)]
    temp: Option<f32>,

    /// Keep the K likeliest tokens; 0 or less: all [default: the file's, else 40]
    #[arg(long, value_name = "K", value_parser = parse_top_k, allow_negative_numbers = true)]
    top_k: Option<usize>,

    /// Keep the likeliest tokens up to this total probability; 1: all [default: the file's, else 0.95]
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,

    /// Keep tokens at least this likely relative to the likeliest; 0: all [default: the file's, else 0.05]
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,

    /// Keep the most typical tokens up to this total probability; 1: all
    #[arg(long, alias = "typical-p", value_name = "P", default_value_t = SamplerOptions::default().typical_p)]
    typical: f32,

    /// Keep logits within N standard deviations of the highest; 0 or less: all
    #[arg(long, value_name = "N", default_value_t = SamplerOptions::default().top_n_sigma, allow_negative_numbers = true)]
    top_nsigma: f32,

    /// The least number of tokens that the samplers by probability leave
    #[arg(long, value_name = "N", default_value_t = SamplerOptions::default().min_keep)]
    min_keep: usize,

    /// How often XTC leaves out the likeliest tokens; 0: never [default: the file's, else 0]
    #[arg(long, value_name = "P")]
    xtc_probability: Option<f32>,

    /// How likely a token must be for XTC to leave it out [default: the file's, else 0.1]
    #[arg(long, value_name = "P")]
    xtc_threshold: Option<f32>,

    /// Tokens the penalties look back; 0: none, -1: the whole text [default: the file's, else 64]
    #[arg(long, value_name = "N", value_parser = parse_last_n, allow_negative_numbers = true)]
    repeat_last_n: Option<usize>,

    /// Divides the logits of tokens seen; 1: off [default: the file's, else 1]
    #[arg(long, alias = "repetition-penalty", value_name = "F")]
    repeat_penalty: Option<f32>,

    /// Subtracted from the logits of tokens seen
    #[arg(long, value_name = "X", default_value_t = SamplerOptions::default().presence_penalty, allow_negative_numbers = true)]
    presence_penalty: f32,

    /// Subtracted from a token's logit for each time it was seen
    #[arg(long, value_name = "X", default_value_t = SamplerOptions::default().frequency_penalty, allow_negative_numbers = true)]
    frequency_penalty: f32,

    /// DRY penalty on repeating a sequence; 0: off
    #[arg(long, value_name = "X", default_value_t = SamplerOptions::default().dry_multiplier)]
    dry_multiplier: f32,

    /// Growth of the DRY penalty with each repeated token
    #[arg(long, value_name = "X", default_value_t = SamplerOptions::default().dry_base)]
    dry_base: f32,

    /// Repeated tokens without a DRY penalty
    #[arg(long, value_name = "N", default_value_t = SamplerOptions::default().dry_allowed_length)]
    dry_allowed_length: usize,

    /// Tokens DRY looks back; 0: none, -1: the whole text
    #[arg(long, value_name = "N", default_value = "64", value_parser = parse_last_n, allow_negative_numbers = true)]
    dry_penalty_last_n: usize,

    /// A string that ends a repetition for DRY, in the place of the default ones (repeatable); none: nothing ends one
    #[arg(long, value_name = "TEXT")]
    dry_sequence_breaker: Vec<String>,

    /// Half the width of the dynamic temperature's range; 0: off
    #[arg(long, value_name = "X", default_value_t = SamplerOptions::default().dynatemp_range)]
    dynatemp_range: f32,

    /// Exponent of the dynamic temperature
    #[arg(long, value_name = "X", default_value_t = SamplerOptions::default().dynatemp_exponent)]
    dynatemp_exp: f32,

    /// Add to a token's logit, as in 15043+1 or 15043-0.5; 15043-inf forbids it (repeatable)
    #[arg(short = 'l', long, value_name = "ID+V", value_parser = parse_logit_bias)]
    logit_bias: Vec<(u32, f32)>,

    // A literal, because rustdoc's marks for code would appear in the help.
    #[arg(
        long,
        value_name = "NAMES",
        help = "The samplers to apply, first to last, separated by ; [default: the file's, else \
                penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature]"
    )]
    samplers: Option<String>,
}

/// A seed. `None`: a random one for each run.
#[derive(Clone)]
pub struct Seed(pub Option<u64>);

impl FromStr for Seed {
    type Err = ParseIntError;

    /// Parses a seed; a negative number becomes `None`.
    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        if text.parse::<i64>().is_ok_and(|n| n < 0) { Ok(Self(None)) } else { text.parse().map(|n| Self(Some(n))) }
    }
}

impl SamplingArgs {
    /// The sampler's options for `model`, whose file gives some of the defaults. An error if a value is out of range.
    pub fn options(&self, model: &Model) -> Result<SamplerOptions, CliError> {
        let n_vocab = model.spec().n_vocab;
        if let Some((id, _)) = self.logit_bias.iter().find(|(id, _)| *id as usize >= n_vocab) {
            return Err(CliError::Usage(format!("--logit-bias {id}: the vocabulary has only {n_vocab} tokens")));
        }
        let defaults = model.sampling();
        let options = SamplerOptions {
            temperature: self.temp.unwrap_or(defaults.temperature),
            dynatemp_range: self.dynatemp_range,
            dynatemp_exponent: self.dynatemp_exp,
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            min_keep: self.min_keep,
            typical_p: self.typical,
            top_n_sigma: self.top_nsigma,
            xtc_probability: self.xtc_probability.unwrap_or(defaults.xtc_probability),
            xtc_threshold: self.xtc_threshold.unwrap_or(defaults.xtc_threshold),
            penalty_last_n: self.repeat_last_n.unwrap_or(defaults.penalty_last_n),
            repeat_penalty: self.repeat_penalty.unwrap_or(defaults.repeat_penalty),
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            dry_multiplier: self.dry_multiplier,
            dry_base: self.dry_base,
            dry_allowed_length: self.dry_allowed_length,
            dry_penalty_last_n: self.dry_penalty_last_n,
            dry_sequence_breakers: match self.dry_sequence_breaker.as_slice() {
                [] => defaults.dry_sequence_breakers,
                [none] if none == "none" => Vec::new(),
                breakers => breakers.to_vec(),
            },
            logit_bias: self.logit_bias.clone(),
            order: match &self.samplers {
                Some(names) => SamplerKind::parse_order(names).map_err(Error::from)?,
                None => defaults.order,
            },
            seed: self.seed.0,
        };
        options.validate().map_err(Error::from)?;
        Ok(options)
    }
}

/// Parses the value of `--top-k`; 0 or less becomes 0, which keeps all tokens.
fn parse_top_k(text: &str) -> Result<usize, String> {
    let k: i64 = text.parse().map_err(|e: ParseIntError| e.to_string())?;
    Ok(usize::try_from(k).unwrap_or(0))
}

/// Parses a number of tokens; -1 becomes `usize::MAX`, the whole sequence.
pub fn parse_last_n(text: &str) -> Result<usize, String> {
    if text == "-1" { Ok(usize::MAX) } else { text.parse().map_err(|e: ParseIntError| e.to_string()) }
}

/// Parses `ID+V` or `ID-V` into the id and the signed value.
pub fn parse_logit_bias(text: &str) -> Result<(u32, f32), String> {
    let parse = || {
        let at = text.find(['+', '-'])?;
        Some((text[..at].parse().ok()?, text[at..].parse().ok()?))
    };
    parse().ok_or_else(|| "expected a token id, + or -, and a number, as in 15043-0.5".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Flags {
        #[command(flatten)]
        sampling: SamplingArgs,
    }

    fn parse(flags: &[&str]) -> SamplerOptions {
        let flags = <Flags as clap::Parser>::try_parse_from([&["x"], flags].concat()).unwrap_or_else(|e| panic!("{e}"));
        flags.sampling.options(&Model::built_in().unwrap()).unwrap()
    }

    #[test]
    fn no_flags_are_the_default_options() {
        assert_eq!(parse(&[]), SamplerOptions::default());
    }

    #[test]
    fn flags_reach_their_options() {
        let options = parse(&[
            "--temp",
            "0.5",
            "--repeat-last-n",
            "-1",
            "--presence-penalty",
            "-0.25",
            "-l",
            "15-inf",
            "--logit-bias",
            "7+1.5",
            "--samplers",
            "top_k;temperature",
            "-s",
            "42",
            "--top-k",
            "3",
        ]);
        let expected = SamplerOptions {
            temperature: 0.5,
            penalty_last_n: usize::MAX,
            presence_penalty: -0.25,
            logit_bias: vec![(15, f32::NEG_INFINITY), (7, 1.5)],
            order: vec![SamplerKind::TopK, SamplerKind::Temperature],
            seed: Some(42),
            top_k: 3,
            ..Default::default()
        };
        assert_eq!(options, expected);
    }

    #[test]
    fn every_seed_can_be_given() {
        assert_eq!(parse(&["-s", "18446744073709551615"]).seed, Some(u64::MAX));
        assert_eq!(parse(&["--seed", "0"]).seed, Some(0));
        assert_eq!(parse(&["--seed", "-7"]).seed, None);
        assert!("18446744073709551616".parse::<Seed>().is_err() && "x".parse::<Seed>().is_err());
    }

    #[test]
    fn logit_biases_that_cannot_be_parsed_are_refused() {
        for text in ["", "7", "+1", "x+1", "7+x", "-1+2"] {
            assert!(parse_logit_bias(text).is_err(), "{text}");
        }
    }
}
