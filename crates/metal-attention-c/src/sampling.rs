//! How tokens are chosen.

use std::ffi::c_char;

use metal_attention::sampling::{SamplerKind, SamplerOptions};

use crate::model::MA_NUL_TERMINATED;
use crate::pointers::{Out, check_struct, text, texts, values};
use crate::status::{Failure, Status, call};

/// A number that is added to the logit of a token.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LogitBias {
    /// The token.
    pub id: u32,
    /// The number; minus infinity forbids the token.
    pub bias: f32,
}

/// How tokens are chosen. ma_sampling_options_default sets all members: names, values and order of llama.cpp's samplers.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SamplingOptions {
    /// Bytes of this struct.
    pub size: usize,
    /// Not 0: random numbers begin from `seed`; 0: from the system's.
    pub has_seed: i32,
    /// Divides the logits; 0 takes the highest.
    pub temperature: f32,
    /// Where the same text is to come again.
    pub seed: u64,
    /// Keeps so many of the highest logits; 0: all.
    pub top_k: usize,
    /// Keeps the most probable tokens up to this total probability; 1: all.
    pub top_p: f32,
    /// Keeps tokens at least so probable relative to the most probable; 0: all.
    pub min_p: f32,
    /// Keeps the most typical tokens up to this total probability; 1: all.
    pub typical_p: f32,
    /// Keeps logits within so many standard deviations of the highest; 0 or less: all.
    pub top_n_sigma: f32,
    /// The least number of tokens that top_p, min_p, typical_p and XTC leave.
    pub min_keep: usize,
    /// How often, from 0 to 1, the most probable tokens are excluded.
    pub xtc_probability: f32,
    /// The probability that a token needs to be among these.
    pub xtc_threshold: f32,
    /// Half the width of the interval of temperatures of which entropy picks one; 0: none.
    pub dynatemp_range: f32,
    /// The power of the entropy that picks it.
    pub dynatemp_exponent: f32,
    /// Of how many of the last tokens the next three take note; SIZE_MAX: of all.
    pub penalty_last_n: usize,
    /// Divides the positive logits of tokens that were there; 1: nothing.
    pub repeat_penalty: f32,
    /// Subtracted for each time that a token was there.
    pub frequency_penalty: f32,
    /// Subtracted where a token was there.
    pub presence_penalty: f32,
    /// The penalty of the shortest repetition that DRY penalises; 0: none.
    pub dry_multiplier: f32,
    /// The factor by which it grows with each token.
    pub dry_base: f32,
    /// The length from which repetitions are penalised.
    pub dry_allowed_length: usize,
    /// At how many of the last tokens DRY looks; SIZE_MAX: at all.
    pub dry_penalty_last_n: usize,
    /// Strings that end a repetition for DRY, each of which ends with a NUL. Null: line breaks, colons, quotation marks and
    /// asterisks; not null, and none of them: none.
    pub dry_sequence_breakers: *const *const c_char,
    /// How many.
    pub n_dry_sequence_breakers: usize,
    /// The samplers in their order, such as "penalties;top_k;temperature". Null: all.
    pub samplers: *const c_char,
    /// Numbers that are added to logits.
    pub logit_bias: *const LogitBias,
    /// How many.
    pub n_logit_bias: usize,
}

impl SamplingOptions {
    fn new(options: &SamplerOptions) -> Self {
        // All are named: an option that the library learns does not compile before it is here.
        let &SamplerOptions {
            temperature,
            dynatemp_range,
            dynatemp_exponent,
            top_k,
            top_p,
            min_p,
            typical_p,
            top_n_sigma,
            min_keep,
            xtc_probability,
            xtc_threshold,
            penalty_last_n,
            repeat_penalty,
            frequency_penalty,
            presence_penalty,
            dry_multiplier,
            dry_base,
            dry_allowed_length,
            dry_penalty_last_n,
            dry_sequence_breakers: _,
            logit_bias: _,
            order: _,
            seed,
        } = options;
        Self {
            size: size_of::<Self>(),
            has_seed: i32::from(seed.is_some()),
            temperature,
            seed: seed.unwrap_or(0),
            top_k,
            top_p,
            min_p,
            typical_p,
            top_n_sigma,
            min_keep,
            xtc_probability,
            xtc_threshold,
            dynatemp_range,
            dynatemp_exponent,
            penalty_last_n,
            repeat_penalty,
            frequency_penalty,
            presence_penalty,
            dry_multiplier,
            dry_base,
            dry_allowed_length,
            dry_penalty_last_n,
            dry_sequence_breakers: std::ptr::null(),
            n_dry_sequence_breakers: 0,
            samplers: std::ptr::null(),
            logit_bias: std::ptr::null(),
            n_logit_bias: 0,
        }
    }

    /// # Safety
    /// `samplers` is null or ends with a NUL; `logit_bias` and `dry_sequence_breakers` are null or lead to so many, strings that are
    /// null or end with a NUL.
    pub(crate) unsafe fn sampler(&self) -> Result<SamplerOptions, Failure> {
        let order = if self.samplers.is_null() {
            SamplerKind::ALL.to_vec()
        } else {
            // SAFETY: it ends with a NUL.
            SamplerKind::parse_order(unsafe { text(self.samplers, MA_NUL_TERMINATED, "samplers") }?)?
        };
        // SAFETY: there are so many.
        let logit_bias = unsafe { values(self.logit_bias, self.n_logit_bias, "logit_bias") }?;
        let dry_sequence_breakers = if self.dry_sequence_breakers.is_null() && self.n_dry_sequence_breakers == 0 {
            SamplerOptions::default().dry_sequence_breakers
        } else {
            // SAFETY: there are so many.
            unsafe { texts(self.dry_sequence_breakers, self.n_dry_sequence_breakers, "dry_sequence_breakers") }?
        };
        Ok(SamplerOptions {
            temperature: self.temperature,
            dynatemp_range: self.dynatemp_range,
            dynatemp_exponent: self.dynatemp_exponent,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            typical_p: self.typical_p,
            top_n_sigma: self.top_n_sigma,
            min_keep: self.min_keep,
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            penalty_last_n: self.penalty_last_n,
            repeat_penalty: self.repeat_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            dry_multiplier: self.dry_multiplier,
            dry_base: self.dry_base,
            dry_allowed_length: self.dry_allowed_length,
            dry_penalty_last_n: self.dry_penalty_last_n,
            dry_sequence_breakers,
            logit_bias: logit_bias.iter().map(|bias| (bias.id, bias.bias)).collect(),
            order,
            seed: (self.has_seed != 0).then_some(self.seed),
        })
    }
}

/// # Safety
/// `options` is null or leads to room for `size` bytes.
unsafe fn set(options: *mut SamplingOptions, size: usize, to: &SamplerOptions) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let out = unsafe { Out::new(options, "options") }?;
        check_struct::<SamplingOptions>(size, "sampling_options")?;
        out.set(SamplingOptions::new(to));
        Ok(())
    })
}

/// Sets all members of `options`; `size` is sizeof(ma_sampling_options).
///
/// # Safety
/// `options` is null or leads to room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_sampling_options_default(options: *mut SamplingOptions, size: usize) -> Status {
    // SAFETY: as the caller promises.
    unsafe { set(options, size, &SamplerOptions::default()) }
}

/// Like ma_sampling_options_default, but always the token with the highest logit.
///
/// # Safety
/// `options` is null or leads to room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_sampling_options_greedy(options: *mut SamplingOptions, size: usize) -> Status {
    // SAFETY: as the caller promises.
    unsafe { set(options, size, &SamplerOptions::greedy()) }
}
