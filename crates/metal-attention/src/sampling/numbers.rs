//! The numeric sampling options: one table of names, ranges and meanings, from which range checks, request fields and
//! their descriptions are derived.

use super::{SamplerOptions, SamplingError};

/// A numeric sampling option.
#[derive(Debug)]
pub struct NumberOption {
    /// The field of [`SamplerOptions`], which is also the name in requests.
    pub name: &'static str,
    /// Other names in requests, as other servers use them.
    pub aliases: &'static [&'static str],
    /// Metadata key by which a file recommends a value, as llama.cpp reads it.
    pub metadata_key: Option<&'static str>,
    /// Description in one sentence.
    pub doc: &'static str,
    /// The values that are accepted, and which of them turns the option off.
    pub allowed: &'static str,
    /// Type and access.
    kind: NumberKind,
}

/// Type of an option, with access to its field.
#[derive(Debug)]
enum NumberKind {
    /// A finite number from `min` to `max`.
    Real { get: fn(&SamplerOptions) -> f32, set: fn(&mut SamplerOptions, f32), min: f32, max: f32 },
    /// A whole number. Negative values mean `negative`; without it they are refused.
    Count { get: fn(&SamplerOptions) -> usize, set: fn(&mut SamplerOptions, usize), negative: Option<usize> },
}

impl NumberOption {
    /// All options.
    pub const ALL: &'static [Self] = ALL;

    /// The option with this name or alias.
    pub fn find(name: &str) -> Option<&'static Self> {
        ALL.iter().find(|option| option.name == name || option.aliases.contains(&name))
    }

    /// Sets the option in `options`. An error, with `options` unchanged, if `value` is outside the range.
    pub fn set(&self, options: &mut SamplerOptions, value: f64) -> Result<(), SamplingError> {
        match self.kind {
            NumberKind::Real { set, .. } => {
                let real = value as f32;
                self.check_real(real)?;
                set(options, real);
            }
            NumberKind::Count { set, negative, .. } => {
                let count = if value < 0.0 { negative } else { Some(value as usize) };
                match count.filter(|_| value.fract() == 0.0) {
                    Some(count) => set(options, count),
                    None => return Err(self.out_of_range(value as f32)),
                }
            }
        }
        Ok(())
    }

    /// Checks the option's value in `options`.
    pub(super) fn check(&self, options: &SamplerOptions) -> Result<(), SamplingError> {
        match self.kind {
            NumberKind::Real { get, .. } => self.check_real(get(options)),
            NumberKind::Count { .. } => Ok(()),
        }
    }

    /// The option's value in `options`.
    pub fn get(&self, options: &SamplerOptions) -> f64 {
        match self.kind {
            NumberKind::Real { get, .. } => f64::from(get(options)),
            NumberKind::Count { get, .. } => get(options) as f64,
        }
    }

    /// Whether the value is a whole number.
    pub fn is_count(&self) -> bool {
        matches!(self.kind, NumberKind::Count { .. })
    }

    /// The smallest accepted value; `None` if there is none.
    pub fn minimum(&self) -> Option<f64> {
        match self.kind {
            NumberKind::Real { min, .. } => Some(f64::from(min)).filter(|_| min > f32::MIN),
            NumberKind::Count { negative, .. } => negative.is_none().then_some(0.0),
        }
    }

    /// The largest accepted value; `None` if there is none.
    pub fn maximum(&self) -> Option<f64> {
        match self.kind {
            NumberKind::Real { max, .. } => Some(f64::from(max)).filter(|_| max < f32::MAX),
            NumberKind::Count { .. } => None,
        }
    }

    /// Checks the range of a real option.
    fn check_real(&self, value: f32) -> Result<(), SamplingError> {
        match self.kind {
            NumberKind::Real { min, max, .. } if (min..=max).contains(&value) => Ok(()),
            NumberKind::Real { .. } | NumberKind::Count { .. } => Err(self.out_of_range(value)),
        }
    }

    /// The error for a value outside the range.
    fn out_of_range(&self, value: f32) -> SamplingError {
        SamplingError::OutOfRange { option: self.name, value, allowed: self.allowed }
    }
}

macro_rules! real {
    ($field:ident, $aliases:expr, $key:expr, $range:expr, $allowed:literal, $doc:literal) => {
        NumberOption {
            name: stringify!($field),
            aliases: &$aliases,
            metadata_key: $key,
            doc: $doc,
            allowed: $allowed,
            kind: NumberKind::Real { get: |o| o.$field, set: |o, v| o.$field = v, min: $range.0, max: $range.1 },
        }
    };
}

macro_rules! count {
    ($field:ident, $aliases:expr, $key:expr, $negative:expr, $allowed:literal, $doc:literal) => {
        NumberOption {
            name: stringify!($field),
            aliases: &$aliases,
            metadata_key: $key,
            doc: $doc,
            allowed: $allowed,
            kind: NumberKind::Count { get: |o| o.$field, set: |o, v| o.$field = v, negative: $negative },
        }
    };
}

/// Any finite number.
const FINITE: (f32, f32) = (f32::MIN, f32::MAX);
/// Finite, and not negative.
const NOT_NEGATIVE: (f32, f32) = (0.0, f32::MAX);
/// Finite, and more than 0.
const POSITIVE: (f32, f32) = (f32::MIN_POSITIVE, f32::MAX);
/// From 0 to 1.
const PROBABILITY: (f32, f32) = (0.0, 1.0);

#[rustfmt::skip]
const ALL: &[NumberOption] = &[
    real!(temperature, ["temp"], Some("general.sampling.temp"), NOT_NEGATIVE, "0 (greedy) or more",
        "0 takes the likeliest token, always; more varies more."),
    real!(dynatemp_range, [], None, NOT_NEGATIVE, "0 (off) or more",
        "Half the width of the interval around the temperature in which the entropy picks the temperature; 0: off."),
    real!(dynatemp_exponent, ["dynatemp_exp"], None, NOT_NEGATIVE, "0 or more",
        "The power of the normalised entropy that maps it into that interval."),
    count!(top_k, [], Some("general.sampling.top_k"), Some(0), "a whole number, 0 or less for off",
        "Keep this many of the likeliest tokens; 0 or less: all."),
    real!(top_p, [], Some("general.sampling.top_p"), PROBABILITY, "from 0 to 1 (off)",
        "Keep the likeliest tokens up to this total probability; 1: all."),
    real!(min_p, [], Some("general.sampling.min_p"), PROBABILITY, "from 0 (off) to 1",
        "Keep tokens at least this likely relative to the likeliest; 0: all."),
    real!(typical_p, ["typical", "typ_p"], None, PROBABILITY, "from 0 to 1 (off)",
        "Keep the most typical tokens up to this total probability; 1: all."),
    real!(top_n_sigma, ["top_nsigma", "nsigma"], None, FINITE, "a finite number, 0 or less for off",
        "Keep logits within this many standard deviations of the highest; 0 or less: all."),
    count!(min_keep, [], None, None, "a whole number, 0 or more",
        "The least number of tokens that top_p, min_p, typical_p and XTC leave."),
    real!(xtc_probability, [], Some("general.sampling.xtc_probability"), PROBABILITY, "from 0 (off) to 1",
        "How often XTC leaves out the likeliest tokens; 0: never."),
    real!(xtc_threshold, [], Some("general.sampling.xtc_threshold"), PROBABILITY, "from 0 to 1, above 0.5 for off",
        "How likely a token must be for XTC to leave it out."),
    count!(penalty_last_n, ["repeat_last_n", "repetition_penalty_range", "rep_pen_range"],
        Some("general.sampling.penalty_last_n"), Some(usize::MAX), "a whole number: 0 for off, below 0 for the whole text",
        "How many of the last tokens the penalties look at; 0: none, below 0: the whole text."),
    real!(repeat_penalty, ["repetition_penalty", "rep_pen"], Some("general.sampling.penalty_repeat"), POSITIVE,
        "more than 0 (1 for off)", "Divides the logits of tokens that were seen; 1: off."),
    real!(frequency_penalty, [], None, FINITE, "a finite number (0 for off)",
        "Subtracted from a token's logit for each time it was seen."),
    real!(presence_penalty, [], None, FINITE, "a finite number (0 for off)",
        "Subtracted from the logits of tokens that were seen."),
    real!(dry_multiplier, [], None, NOT_NEGATIVE, "0 (off) or more",
        "The DRY penalty of the shortest repeated sequence that is penalised; 0: off."),
    real!(dry_base, [], None, NOT_NEGATIVE, "0 or more, below 1 for off",
        "The factor by which the DRY penalty grows with each repeated token."),
    count!(dry_allowed_length, [], None, None, "a whole number, 0 or more",
        "The length in tokens from which DRY penalises a repetition."),
    count!(dry_penalty_last_n, ["dry_range"], None, Some(usize::MAX),
        "a whole number: 0 for off, below 0 for the whole text",
        "How many of the last tokens DRY looks at; 0: none, below 0: the whole text."),
];
