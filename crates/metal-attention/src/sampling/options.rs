//! The sampling options: their defaults and valid ranges.

use std::fmt;
use std::str::FromStr;

use super::{DRY_SEQUENCE_BREAKERS, NumberOption, SamplingError};

/// A sampler of the chain, with the name that llama.cpp's `--samplers` gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplerKind {
    /// Repetition, frequency and presence penalties: `penalties`.
    Penalties,
    /// "Don't repeat yourself", a penalty on continuing a repeated sequence: `dry`.
    Dry,
    /// Keep the logits within n standard deviations of the highest: `top_n_sigma`.
    TopNSigma,
    /// Keep the k highest logits: `top_k`.
    TopK,
    /// Keep the most typical tokens, by information content: `typ_p`.
    #[serde(rename = "typ_p")]
    TypicalP,
    /// Keep the most probable tokens up to a total probability: `top_p`.
    TopP,
    /// Keep the tokens at least this probable relative to the most probable: `min_p`.
    MinP,
    /// "Exclude top choices", sometimes remove the most probable tokens: `xtc`.
    Xtc,
    /// Divide the logits by the temperature: `temperature`.
    Temperature,
}

impl SamplerKind {
    /// All samplers, in the default order, which is llama.cpp's.
    pub const ALL: [Self; 9] = [
        Self::Penalties,
        Self::Dry,
        Self::TopNSigma,
        Self::TopK,
        Self::TypicalP,
        Self::TopP,
        Self::MinP,
        Self::Xtc,
        Self::Temperature,
    ];

    /// The sampler's name, as in `top_k`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Penalties => "penalties",
            Self::Dry => "dry",
            Self::TopNSigma => "top_n_sigma",
            Self::TopK => "top_k",
            Self::TypicalP => "typ_p",
            Self::TopP => "top_p",
            Self::MinP => "min_p",
            Self::Xtc => "xtc",
            Self::Temperature => "temperature",
        }
    }

    /// The letter that stands for the sampler in llama.cpp's `--sampling-seq`.
    pub fn letter(self) -> char {
        match self {
            Self::Penalties => 'e',
            Self::Dry => 'd',
            Self::TopNSigma => 's',
            Self::TopK => 'k',
            Self::TypicalP => 'y',
            Self::TopP => 'p',
            Self::MinP => 'm',
            Self::Xtc => 'x',
            Self::Temperature => 't',
        }
    }

    /// Parses an order of samplers as letters, such as `edskypmxt`; `None` if a letter is unknown.
    pub fn parse_letters(text: &str) -> Option<Vec<Self>> {
        text.chars().map(|letter| Self::ALL.into_iter().find(|kind| kind.letter() == letter)).collect()
    }

    /// Parses an order of samplers: names separated by `;`. The empty string is the empty order, which draws from the
    /// model's own distribution.
    ///
    /// ```
    /// use metal_attention::sampling::SamplerKind;
    ///
    /// let order = SamplerKind::parse_order("penalties;top_k;temperature")?;
    /// assert_eq!(order, [SamplerKind::Penalties, SamplerKind::TopK, SamplerKind::Temperature]);
    /// # Ok::<(), metal_attention::sampling::SamplingError>(())
    /// ```
    pub fn parse_order(text: &str) -> Result<Vec<Self>, SamplingError> {
        text.split(';').map(str::trim).filter(|name| !name.is_empty()).map(str::parse).collect()
    }

    /// All names, separated by commas.
    pub(super) fn known_names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

impl fmt::Display for SamplerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SamplerKind {
    type Err = SamplingError;

    /// Parses a name. Case, `-` and `_` do not matter, as in llama.cpp, which also accepts `temp`, `typ` and `nucleus`.
    fn from_str(text: &str) -> Result<Self, SamplingError> {
        let plain = |name: &str| name.replace(['-', '_'], "").to_lowercase();
        let kind = match plain(text).as_str() {
            "temp" => Some(Self::Temperature),
            "nucleus" => Some(Self::TopP),
            "typ" | "typical" | "typicalp" => Some(Self::TypicalP),
            name => Self::ALL.into_iter().find(|kind| plain(kind.name()) == name),
        };
        kind.ok_or_else(|| SamplingError::UnknownSampler { name: text.to_owned() })
    }
}

/// The options of a sampler. The default values and the default order are llama.cpp's.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct SamplerOptions {
    /// Divisor of the logits: below 1 sharpens the distribution, above 1 flattens it. 0 chooses the highest logit after
    /// logit bias, penalties and DRY, whatever the other samplers would do.
    pub temperature: f32,
    /// Half the width of the interval around `temperature` in which the
    /// distribution's entropy picks the temperature; 0 turns it off.
    pub dynatemp_range: f32,
    /// The power of the normalised entropy that maps it into that interval.
    pub dynatemp_exponent: f32,
    /// Keep this many of the highest logits; 0 turns it off.
    pub top_k: usize,
    /// Keep the most probable tokens until their probabilities sum to this; 1
    /// turns it off.
    pub top_p: f32,
    /// Keep the tokens at least this probable relative to the most probable
    /// one; 0 turns it off.
    pub min_p: f32,
    /// Keep the most typical tokens until their probabilities sum to this; 1
    /// turns it off.
    pub typical_p: f32,
    /// Keep the logits within this many standard deviations of the highest; 0 or
    /// less turns it off.
    pub top_n_sigma: f32,
    /// Minimum number of tokens that top-p, min-p, typical-p and XTC keep.
    pub min_keep: usize,
    /// Probability with which the most probable tokens are excluded; 0 turns it off.
    pub xtc_probability: f32,
    /// The probability that a token needs to count among the most probable
    /// ones; above 0.5 turns it off.
    pub xtc_threshold: f32,
    /// Number of last tokens that the three penalties consider; 0 turns them off, `usize::MAX` is the whole sequence.
    pub penalty_last_n: usize,
    /// Positive logits of tokens in the window are divided by it, others multiplied; 1 turns it off.
    pub repeat_penalty: f32,
    /// Subtracted from a token's logit for each occurrence in the window.
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit if it occurs in the window.
    pub presence_penalty: f32,
    /// The DRY penalty of the shortest repetition that is penalised; 0 turns it
    /// off.
    pub dry_multiplier: f32,
    /// The factor by which the DRY penalty grows with each token of the
    /// repetition; below 1 turns it off.
    pub dry_base: f32,
    /// Minimum length in tokens of a repetition that is penalised.
    pub dry_allowed_length: usize,
    /// Number of last tokens that DRY considers; 0 turns it off, `usize::MAX` is the whole sequence.
    pub dry_penalty_last_n: usize,
    /// Strings that end a repetition: DRY does not penalise a token that contains one, nor consider what precedes it.
    pub dry_sequence_breakers: Vec<String>,
    /// Added to the logits of these tokens before any sampler; -inf forbids a
    /// token.
    pub logit_bias: Vec<(u32, f32)>,
    /// The samplers to apply, first to last.
    pub order: Vec<SamplerKind>,
    /// Seed of the random numbers; `None`: drawn from the operating system.
    pub seed: Option<u64>,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            min_keep: 0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            penalty_last_n: 64,
            repeat_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_penalty_last_n: 64,
            dry_sequence_breakers: DRY_SEQUENCE_BREAKERS.map(str::to_owned).to_vec(),
            logit_bias: Vec::new(),
            order: SamplerKind::ALL.to_vec(),
            seed: None,
        }
    }
}

impl SamplerOptions {
    /// Options that always choose the token with the highest logit.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Checks every option against its range.
    pub fn validate(&self) -> Result<(), SamplingError> {
        NumberOption::ALL.iter().try_for_each(|option| option.check(self))?;
        match self.logit_bias.iter().find(|(_, bias)| bias.is_nan() || *bias == f32::INFINITY) {
            Some(&(id, bias)) => Err(SamplingError::LogitBias { id, bias }),
            None => Ok(()),
        }
    }

    /// The samplers of `order` that have an effect with these values.
    pub(super) fn active_samplers(&self) -> Vec<SamplerKind> {
        self.order.iter().copied().filter(|&kind| self.is_active(kind)).collect()
    }

    /// Whether a sampler has an effect with these values.
    fn is_active(&self, kind: SamplerKind) -> bool {
        let greedy = self.temperature == 0.0;
        match kind {
            SamplerKind::Penalties => {
                let neutral =
                    self.repeat_penalty == 1.0 && self.frequency_penalty == 0.0 && self.presence_penalty == 0.0;
                self.penalty_last_n > 0 && !neutral
            }
            SamplerKind::Dry => self.dry_penalty_last_n > 0 && self.dry_multiplier > 0.0 && self.dry_base >= 1.0,
            SamplerKind::TopNSigma => !greedy && self.top_n_sigma > 0.0,
            SamplerKind::TopK => !greedy && self.top_k > 0,
            SamplerKind::TypicalP => !greedy && self.typical_p < 1.0,
            SamplerKind::TopP => !greedy && self.top_p < 1.0,
            SamplerKind::MinP => !greedy && self.min_p > 0.0,
            SamplerKind::Xtc => !greedy && self.xtc_probability > 0.0 && self.xtc_threshold <= 0.5,
            SamplerKind::Temperature => !greedy && (self.temperature != 1.0 || self.dynatemp_range > 0.0),
        }
    }
}
