//! Phi 2, 3, 3.5, 4.

use super::decoder::{ExpertDefaults, decoder, experts};
use crate::feed_forward::{Activation, RouterScore};
use crate::metadata_reader::MetadataReader;
use crate::spec::NormKind;
use crate::{HeadMatrix, ModelError, ModelSpec, OutputHead, RopeFactors, RopeLayout};

/// Phi 1, 1.5, 2: attention and feed-forward in parallel from one norm; biases everywhere.
pub(super) fn phi2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Layer, RopeLayout::Halves)?;
    m.no_gate(Activation::Gelu);
    m.side_by_side();
    m.output.head =
        m.output.head.map(|head| OutputHead { may_have_bias: true, matrix: HeadMatrix::OutputTensor, ..head });
    Ok(m)
}

/// Phi 3, 3.5, 4: fused matrices; frequencies are divided by one set of factors in short contexts and by another in
/// long ones. (Sliding windows in files of Phi 3 are ignored, as in llama.cpp.)
pub(super) fn phi3(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.attention_mut().for_each(|(_, a)| a.fused_qkv = true);
    m.dense_mut().for_each(|dense| dense.fused = true);
    factors_by_context(k, &mut m)?;
    Ok(m)
}

/// Phi 3.5 with experts: norms with biases.
pub(super) fn phimoe(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    let defaults = ExpertDefaults { score: RouterScore::Softmax, renormalize: true };
    m.set_experts(0, &experts(k, defaults, k.positive("feed_forward_length")?)?);
    factors_by_context(k, &mut m)?;
    m.set_norm_biases(true);
    m.output.head =
        m.output.head.map(|head| OutputHead { may_have_bias: true, matrix: HeadMatrix::OutputTensor, ..head });
    Ok(m)
}

/// Sets the divisors of frequencies that depend on the context.
fn factors_by_context(k: &MetadataReader<'_>, m: &mut ModelSpec) -> Result<(), ModelError> {
    let n_ctx_orig = k.opt_positive("rope.scaling.original_context_length")?.unwrap_or(m.n_ctx_train);
    m.rope_mut().for_each(|rope| rope.factors = RopeFactors::ByContext { n_ctx_orig });
    Ok(())
}
