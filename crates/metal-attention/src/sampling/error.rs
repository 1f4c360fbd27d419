//! Errors of sampling options.

use super::SamplerKind;

/// An invalid sampling option.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// A number outside the range of its option.
    #[error("sampling option {option} is {value}, but it must be {allowed}")]
    OutOfRange {
        /// The option's name, a field of [`SamplerOptions`](super::SamplerOptions).
        option: &'static str,
        /// The number that was given.
        value: f32,
        /// The accepted range, and the value that turns the option off.
        allowed: &'static str,
    },
    /// A logit bias that is not a number, or plus infinity.
    #[error("the logit bias of token {id} is {bias}, but it must be a finite number, or -inf to forbid the token")]
    LogitBias {
        /// The token.
        id: u32,
        /// The bias that was given.
        bias: f32,
    },
    /// The name of an unknown sampler.
    #[error("there is no sampler named {name:?}; use {}", SamplerKind::known_names())]
    UnknownSampler {
        /// The name that was given.
        name: String,
    },
    /// No seed was given, and the operating system provided none.
    #[error("the operating system gave no random seed ({reason}): set a seed")]
    NoSeed {
        /// The error of the operating system.
        reason: String,
    },
}
