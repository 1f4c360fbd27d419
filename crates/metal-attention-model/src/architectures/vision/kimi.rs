//! Kimi-VL (MoonViT, arXiv 2504.07491) and Kimi K2.5: learned positions with a rotation, patches normed and merged.

use metal_attention_pictures::Layout;

use super::two_layers;
use crate::vision::{Angles, Axis, EncoderActivation, EncoderReader, Interpolation, MergeOrder, Stage, VisionModel};
use crate::{ModelError, NormKind};

/// Epsilon of the projector's norm in Kimi-VL.
const EPS: f32 = 1e-5;

fn kimi(
    r: &EncoderReader<'_>,
    interpolation: Interpolation,
    eps: f32,
    layout: Layout,
) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.projector.scale_factor", 2)?;
    let angles = Angles::of_neighbours(r.head_dim(), [Axis::X, Axis::Y], [0.0, 0.0]);
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::positions(r.positions(0, interpolation)?)];
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, block| block.attention.rope = Some(angles.clone()))?);
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Layer, r.eps)?));
    stages.push(Stage::Norm(r.norm("mm.input_norm", r.width, NormKind::Layer, eps)?));
    stages.push(Stage::Merge { side, order: MergeOrder::PatchFirst });
    stages.extend(two_layers(r, ["mm.1", "mm.2"], side * side * r.width, EncoderActivation::Gelu)?);
    Ok(VisionModel::new(r.encoder(patch, stages), layout))
}

pub(super) fn kimivl(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let layout = r.kept(r.merge_side("vision.projector.scale_factor", 2)?, [8, 1024]);
    Ok(kimi(r, Interpolation::Antialiased, EPS, layout)?.with_markers(&[["<|media_start|>", "<|media_end|>"]]))
}

pub(super) fn kimik25(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let layout = r.kept_in_pixels(r.merge_side("vision.projector.scale_factor", 2)?)?;
    // GLM-5.2-V has the same encoder, with markers of its own.
    let around = &[["<|begin_of_image|>", "<|end_of_image|>"], ["<|media_begin|>", "<|media_end|>"]];
    Ok(kimi(r, Interpolation::Cubic, r.eps, layout)?.with_markers(around))
}
