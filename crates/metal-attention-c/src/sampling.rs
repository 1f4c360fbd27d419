//! Sampling options.

use std::ffi::c_char;

use metal_attention::sampling::{SamplerKind, SamplerOptions};

use crate::model::MA_NUL_TERMINATED;
use crate::pointers::{Out, check_struct, strings, text, values};
use crate::status::{Failure, Status, call};

/// A number that is added to the logit of a token.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LogitBias {
    /// The token's id.
    pub id: u32,
    /// The number; minus infinity forbids the token.
    pub bias: f32,
}

/// The options of the sampler. ma_sampling_options_default sets all members, with the values and the order of llama.cpp's samplers.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SamplingOptions {
    /// The size of this struct in bytes.
    pub size: usize,
    /// Not 0: random numbers are those of `seed`; 0: they differ each time.
    pub has_seed: i32,
    /// Divides the logits; 0 chooses the most probable token.
    pub temperature: f32,
    /// The seed; the same seed gives the same text.
    pub seed: u64,
    /// Keeps this many of the most probable tokens; 0: all.
    pub top_k: usize,
    /// Keeps the most probable tokens up to this total probability; 1: all.
    pub top_p: f32,
    /// Keeps tokens whose probability is at least this share of the largest one; 0: all.
    pub min_p: f32,
    /// Keeps the most typical tokens up to this total probability; 1: all.
    pub typical_p: f32,
    /// Keeps logits within this many standard deviations of the highest; 0 or less: all.
    pub top_n_sigma: f32,
    /// The smallest number of tokens that top_p, min_p, typical_p and XTC keep.
    pub min_keep: usize,
    /// The probability, from 0 to 1, that XTC removes the most probable tokens.
    pub xtc_probability: f32,
    /// The probability that a token must have for XTC to remove it.
    pub xtc_threshold: f32,
    /// Half the width of the interval of temperatures from which entropy chooses one; 0: off.
    pub dynatemp_range: f32,
    /// The power of the entropy in this choice.
    pub dynatemp_exponent: f32,
    /// The number of last tokens that the next three penalties consider; SIZE_MAX: all.
    pub penalty_last_n: usize,
    /// Divides the positive logits of tokens that occurred; 1: off.
    pub repeat_penalty: f32,
    /// Subtracted from a token's logit for each occurrence.
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit if it occurred.
    pub presence_penalty: f32,
    /// The penalty of the shortest repetition that DRY penalises; 0: off.
    pub dry_multiplier: f32,
    /// The factor by which DRY's penalty grows with each further token.
    pub dry_base: f32,
    /// The length from which on DRY penalises repetitions.
    pub dry_allowed_length: usize,
    /// The number of last tokens that DRY considers; SIZE_MAX: all.
    pub dry_penalty_last_n: usize,
    /// Strings that end a repetition for DRY; each ends with a NUL. Null: line breaks, colons, quotation marks and asterisks; not
    /// null, with a number of 0: none.
    pub dry_sequence_breakers: *const *const c_char,
    /// The number of these strings.
    pub n_dry_sequence_breakers: usize,
    /// The samplers in their order, such as "penalties;top_k;temperature", with a NUL at its end. Null: all, in the default order.
    pub samplers: *const c_char,
    /// Numbers that are added to logits.
    pub logit_bias: *const LogitBias,
    /// The number of these.
    pub n_logit_bias: usize,
}

impl SamplingOptions {
    /// The members for `options`, except for lists, which are null.
    fn new(options: &SamplerOptions) -> Self {
        // All fields are named, so that a new option of the library does not compile until it is added here.
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

    /// The sampler's options.
    ///
    /// # Safety
    /// `samplers` is null or ends with a NUL; `logit_bias` and `dry_sequence_breakers` are null or point to as many elements as their
    /// numbers say, the latter to strings that are null or end with a NUL.
    pub(crate) unsafe fn sampler(&self) -> Result<SamplerOptions, Failure> {
        let order = if self.samplers.is_null() {
            SamplerKind::ALL.to_vec()
        } else {
            // SAFETY: it ends with a NUL.
            SamplerKind::parse_order(unsafe { text(self.samplers, MA_NUL_TERMINATED, "samplers") }?)?
        };
        // SAFETY: as the caller promises.
        let logit_bias = unsafe { values(self.logit_bias, self.n_logit_bias, "logit_bias") }?;
        let dry_sequence_breakers = if self.dry_sequence_breakers.is_null() && self.n_dry_sequence_breakers == 0 {
            SamplerOptions::default().dry_sequence_breakers
        } else {
            // SAFETY: as the caller promises.
            unsafe { strings(self.dry_sequence_breakers, self.n_dry_sequence_breakers, "dry_sequence_breakers") }?
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

/// Sets all members of `options` to those of `to`.
///
/// # Safety
/// `options` is null or points to memory for `size` bytes.
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
/// `options` is null or points to memory for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_sampling_options_default(options: *mut SamplingOptions, size: usize) -> Status {
    // SAFETY: as the caller promises.
    unsafe { set(options, size, &SamplerOptions::default()) }
}

/// Like ma_sampling_options_default, but always chooses the token with the highest logit.
///
/// # Safety
/// `options` is null or points to memory for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_sampling_options_greedy(options: *mut SamplingOptions, size: usize) -> Status {
    // SAFETY: as the caller promises.
    unsafe { set(options, size, &SamplerOptions::greedy()) }
}
