//! PaddleOCR-VL (arXiv 2510.14528): a tower for pictures of any size, with learned positions and a rotation.

use super::two_layers;
use crate::vision::{Angles, EncoderActivation, EncoderReader, Interpolation, MergeOrder, Stage, VisionModel};
use crate::{ModelError, NormKind};

/// Epsilon of the projector's norm.
const EPS: f32 = 1e-5;

pub(super) fn paddleocr(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.spatial_merge_size", 2)?;
    let angles = Angles::of_halves(r.head_dim());
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::positions(r.positions(0, Interpolation::Antialiased)?)];
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, block| block.attention.rope = Some(angles.clone()))?);
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Layer, r.eps)?));
    stages.push(Stage::Norm(r.norm("mm.input_norm", r.width, NormKind::Layer, EPS)?));
    stages.push(Stage::Merge { side, order: MergeOrder::PatchFirst });
    stages.extend(two_layers(r, ["mm.1", "mm.2"], side * side * r.width, EncoderActivation::Gelu)?);
    let model = VisionModel::new(r.encoder(patch, stages), r.kept_in_pixels(side)?);
    Ok(model.with_markers(&[["<|IMAGE_START|>", "<|IMAGE_END|>"]]))
}
