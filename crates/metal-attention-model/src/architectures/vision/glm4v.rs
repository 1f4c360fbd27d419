//! GLM-4.1V, GLM-4.5V (arXiv 2507.01006) and GLM-OCR: patches merged by a convolution, and a gated projector.

use crate::vision::{
    Angles, EncoderActivation, EncoderReader, Interpolation, MergeOrder, RowOrder, Stage, VisionModel,
};
use crate::{ModelError, NormKind};

/// Epsilon of the projector's norm.
const EPS: f32 = 1e-5;

pub(super) fn glm4v(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.spatial_merge_size", 2)?;
    let angles = Angles::of_halves(r.head_dim());
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel];
    if let Some(norm) = r.opt_norm("v.norm_embd", r.width, NormKind::Rms, r.eps)? {
        stages.push(Stage::Norm(norm));
    }
    // GLM-OCR has no learned positions.
    if r.has("v.position_embd.weight") {
        stages.push(Stage::Positions(r.positions(0, Interpolation::Cubic)?));
    }
    stages.push(Stage::Reorder(RowOrder::Blocks(side as u32)));
    stages.extend(r.blocks(r.n_block, NormKind::Rms, |_, block| block.attention.rope = Some(angles.clone()))?);
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Rms, r.eps)?));
    stages.push(Stage::Merge { side, order: MergeOrder::ValueFirst });
    stages.push(Stage::Linear(r.patch_kernel("mm.patch_merger", side * side * r.width, r.n_embd)?));
    stages.push(Stage::Linear(r.linear("mm.model.fc", r.n_embd, Some(r.n_embd))?));
    stages.push(Stage::Norm(r.norm("mm.post_norm", r.n_embd, NormKind::Layer, EPS)?));
    stages.push(Stage::Activation(EncoderActivation::GeluErf));
    stages.push(Stage::FeedForward(r.feed_forward("mm.", [r.n_embd, r.n_embd], r.activation)?));
    let model = VisionModel::new(r, r.encoder(patch, stages), r.kept(side, [8, 4096]));
    Ok(model.with_markers(&[["<|begin_of_image|>", "<|end_of_image|>"]]))
}
