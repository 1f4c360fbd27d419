//! The parts of a model on the GPU: a file for each kind of part.

pub(crate) mod attention;
pub(crate) mod delta_rule;
pub(crate) mod dense;
pub(crate) mod ends;
pub(crate) mod experts;
pub(crate) mod latent_attention;
pub(crate) mod mamba;
pub(crate) mod rwkv;
pub(crate) mod short_conv;
pub(crate) mod streams;
