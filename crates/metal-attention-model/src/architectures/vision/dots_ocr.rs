//! dots.ocr: a tower for pictures of any size with a rotation.

use super::two_layers;
use crate::vision::{Angles, EncoderActivation, EncoderReader, MergeOrder, Stage, VisionModel};
use crate::{ModelError, NormKind};

/// Epsilon of the projector's norm.
const EPS: f32 = 1e-6;

pub(super) fn dots_ocr(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.projector.scale_factor", 2)?;
    let angles = Angles::of_halves(r.head_dim());
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::Norm(r.norm("v.pre_ln", r.width, NormKind::Rms, r.eps)?)];
    stages.extend(r.blocks(r.n_block, NormKind::Rms, |_, block| block.attention.rope = Some(angles.clone()))?);
    stages.push(Stage::Norm(r.norm("mm.post_norm", r.width, NormKind::Rms, r.eps)?));
    stages.push(Stage::Norm(r.norm("mm.input_norm", r.width, NormKind::Layer, EPS)?));
    stages.push(Stage::Merge { side, order: MergeOrder::PatchFirst });
    stages.extend(two_layers(r, ["mm.0", "mm.2"], side * side * r.width, EncoderActivation::GeluErf)?);
    let model = VisionModel::new(r.encoder(patch, stages), r.kept_in_pixels(side)?);
    Ok(model.with_markers(&[["<|img|>", "<|endofimg|>"]]))
}
