//! Kimi-VL (MoonViT, arXiv 2504.07491) and Kimi K2.5: learned positions with a rotation, patches normed and merged.

use super::two_layers;
use crate::vision::{
    Angles, Axis, Encoder, EncoderActivation, EncoderReader, FileWeights, Interpolation, MergeOrder, Stage,
};
use crate::{ModelError, NormKind};

/// Epsilon of the projector's norm in Kimi-VL.
const EPS: f32 = 1e-5;

fn kimi(r: &EncoderReader<'_>, interpolation: Interpolation, eps: f32) -> Result<Encoder<FileWeights>, ModelError> {
    let side = r.merge_side("vision.projector.scale_factor", 2)?;
    let angles = Angles::of_neighbours(r.head_dim(), [Axis::X, Axis::Y], [0.0, 0.0]);
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::Positions(r.positions(0, interpolation)?)];
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, block| block.attention.rope = Some(angles.clone()))?);
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Layer, r.eps)?));
    stages.push(Stage::Norm(r.norm("mm.input_norm", r.width, NormKind::Layer, eps)?));
    stages.push(Stage::Merge { side, order: MergeOrder::PatchFirst });
    stages.extend(two_layers(r, ["mm.1", "mm.2"], side * side * r.width, EncoderActivation::Gelu)?);
    Ok(Encoder { patch, stages, n_embd: r.n_embd, n_deepstack: 0 })
}

pub(super) fn kimivl(r: &EncoderReader<'_>) -> Result<Encoder<FileWeights>, ModelError> {
    kimi(r, Interpolation::Antialiased, EPS)
}

pub(super) fn kimik25(r: &EncoderReader<'_>) -> Result<Encoder<FileWeights>, ModelError> {
    kimi(r, Interpolation::Cubic, r.eps)
}
