//! The parts of a model on the CPU, a file for each, with the same names as in the other backends.

pub(crate) mod attention;
pub(crate) mod block_conv;
pub(crate) mod delta_rule;
mod dense;
mod ends;
pub(crate) mod experts;
pub(crate) mod latent_attention;
pub(crate) mod mamba;
pub(crate) mod rwkv;
mod short_conv;
pub(crate) mod streams;
