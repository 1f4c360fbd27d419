//! GLM-4.1V, GLM-4.5V (arXiv 2507.01006), GLM-OCR and GLM-5V: patches merged by a convolution, and a gated projector.

use metal_attention_pictures::{Layout, PixelRange};

use crate::vision::{
    Angles, Clamp, Encoder, EncoderActivation, EncoderFeedForward, EncoderReader, FileWeights, Interpolation,
    MergeOrder, RowOrder, Stage, VisionModel,
};
use crate::{ModelError, NormKind};

/// The texts around a picture.
const MARKERS: &[[&str; 2]] = &[["<|begin_of_image|>", "<|end_of_image|>"]];
/// Epsilon of the projector's norm.
const EPS: f32 = 1e-5;

pub(super) fn glm4v(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.spatial_merge_size", 2)?;
    let model = VisionModel::new(encoder(r, side, None)?, r.kept(side, [8, 4096]));
    Ok(model.with_markers(MARKERS))
}

/// GLM-5V: the same with limits on the gates and the other inputs of its feed-forwards.
pub(super) fn glm5v(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.spatial_merge_size", 2)?;
    let limit = r.keys.opt_positive_f32("vision.swiglu_clamp")?;
    let layout = Layout::Canvas { multiple: r.patch * side, pixels: r.pixels(PixelRange::ALL)? };
    Ok(VisionModel::new(encoder(r, side, limit)?, layout).with_markers(MARKERS))
}

/// Limits the gate of a gated feed-forward to at most `limit`, and its other input to at most that far from zero.
fn set_limit(feed_forward: &mut EncoderFeedForward<FileWeights>, limit: Option<f32>) {
    let any = [f32::NEG_INFINITY, f32::INFINITY];
    if let (EncoderFeedForward::Gated { gate, up, .. }, Some(limit)) = (feed_forward, limit) {
        gate.clamp = Some(Clamp { input: any, output: [f32::NEG_INFINITY, limit] });
        up.clamp = Some(Clamp { input: any, output: [-limit, limit] });
    }
}

fn encoder(r: &EncoderReader<'_>, side: usize, limit: Option<f32>) -> Result<Encoder<FileWeights>, ModelError> {
    let angles = Angles::of_halves(r.head_dim());
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel];
    if let Some(norm) = r.opt_norm("v.norm_embd", r.width, NormKind::Rms, r.eps)? {
        stages.push(Stage::Norm(norm));
    }
    // GLM-OCR has no learned positions.
    if r.has("v.position_embd.weight") {
        stages.push(Stage::positions(r.positions(0, Interpolation::Cubic)?));
    }
    stages.push(Stage::Reorder(RowOrder::Blocks(side as u32)));
    stages.extend(r.blocks(r.n_block, NormKind::Rms, |_, block| {
        block.attention.rope = Some(angles.clone());
        set_limit(&mut block.feed_forward, limit);
    })?);
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Rms, r.eps)?));
    stages.push(Stage::Merge { side, order: MergeOrder::ValueFirst });
    stages.push(Stage::Linear(r.patch_kernel("mm.patch_merger", side * side * r.width, r.n_embd)?));
    stages.push(Stage::Linear(r.linear("mm.model.fc", r.n_embd, Some(r.n_embd))?));
    stages.push(Stage::Norm(r.norm("mm.post_norm", r.n_embd, NormKind::Layer, EPS)?));
    stages.push(Stage::Activation(EncoderActivation::GeluErf));
    let mut feed_forward = r.feed_forward("mm.", [r.n_embd, r.n_embd], r.activation)?;
    set_limit(&mut feed_forward, limit);
    stages.push(Stage::FeedForward(feed_forward));
    Ok(r.encoder(patch, stages))
}
