//! Sampling: from the model's logits to the next token.
//!
//! A [`Sampler`] applies a chain of samplers to the logits, each of which removes tokens or changes logits, and draws
//! from the softmax of what is left. The chain's order is [`SamplerOptions::order`]. By default the order and all
//! values are llama.cpp's: penalties, DRY, top-n-sigma, top-k, typical-p, top-p, min-p, XTC, temperature.
//!
//! Equal seeds, options and logits give equal tokens. Random numbers come from `ChaCha8`, which is defined
//! independently of any library, platform or version; between platforms only the last bit of an exponential may differ.
//! They are not llama.cpp's random numbers. Those of a token depend only on the seed and the token's position, so that
//! a sequence can be continued elsewhere.
//!
//! ```
//! use metal_attention::sampling::{Sampler, SamplerOptions};
//!
//! let mut sampler = Sampler::new(SamplerOptions { seed: Some(7), ..SamplerOptions::default() })?;
//! let logits = [0.1, 5.0, 4.5, -2.0];
//! let id = sampler.sample(&logits);
//! sampler.accept(id);
//! assert!(id == 1 || id == 2);
//! # Ok::<(), metal_attention::sampling::SamplingError>(())
//! ```

mod candidates;
mod dry;
mod error;
mod numbers;
mod options;
mod penalties;
mod random;
mod recommended;
mod sampler;
mod temperature;
mod truncation;

#[cfg(test)]
mod tests;

pub use dry::DRY_SEQUENCE_BREAKERS;
pub use error::SamplingError;
pub use numbers::NumberOption;
pub use options::{SamplerKind, SamplerOptions};
pub use sampler::Sampler;
