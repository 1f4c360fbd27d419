//! Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923), Qwen3-VL and Qwen3.5, EXAONE 4.5 and Ling 3 VL: patches in blocks of 2 x 2, which are
//! merged at the end, and a rotation by row and column.

use super::two_layers;
use crate::vision::{
    Angles, Encoder, EncoderActivation, EncoderFeedForward, EncoderReader, FileWeights, Interpolation, MergeOrder,
    RowOrder, Stage, VisionModel,
};
use crate::{ModelError, NormKind};

/// Least and most tokens of a picture.
const TOKENS: [usize; 2] = [8, 4096];
/// The texts around a picture.
const MARKERS: &[[&str; 2]] = &[["<|vision_start|>", "<|vision_end|>"]];
/// Pixels of the side of a window in Qwen2.5-VL, whatever the file says.
const WINDOW: usize = 112;

pub(super) fn qwen2vl(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.spatial_merge_size", 2)?;
    let angles = Angles::of_halves(r.head_dim());
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::Reorder(RowOrder::Blocks(side as u32))];
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, block| block.attention.rope = Some(angles.clone()))?);
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Layer, r.eps)?));
    stages.push(Stage::Merge { side, order: MergeOrder::PatchFirst });
    stages.extend(two_layers(r, ["mm.0", "mm.2"], side * side * r.width, EncoderActivation::Gelu)?);
    let model = VisionModel::new(r.encoder(patch, stages), r.kept(side, TOKENS));
    Ok(model.with_markers(MARKERS))
}

pub(super) fn qwen25vl(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.spatial_merge_size", 2)?;
    Ok(VisionModel::new(with_windows(r, side)?, r.kept(side, TOKENS)).with_markers(MARKERS))
}

/// EXAONE 4.5: Qwen2.5-VL's encoder, in which heads of queries share those of keys and values.
pub(super) fn exaone45(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.spatial_merge_size", 2)?;
    let model = VisionModel::new(with_windows(r, side)?, r.kept_in_pixels(side)?);
    Ok(model.with_markers(&[["<vision>", "</vision>"]]))
}

/// The encoder of Qwen2.5-VL: windows in all but some blocks.
fn with_windows(r: &EncoderReader<'_>, side: usize) -> Result<Encoder<FileWeights>, ModelError> {
    let every = r.keys.opt_size("vision.n_wa_pattern")?;
    let window = (WINDOW / (r.patch * side)).max(1) * side;
    let angles = Angles::of_halves(r.head_dim());
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel];
    stages.push(Stage::Reorder(RowOrder::Windows { window: window as u32, block: side as u32 }));
    stages.extend(r.blocks(r.n_block, NormKind::Rms, |i, block| {
        block.attention.rope = Some(angles.clone());
        block.attention.window = every.filter(|every| (i + 1) % every != 0).map(|_| window);
    })?);
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Rms, r.eps)?));
    stages.push(Stage::Merge { side, order: MergeOrder::PatchFirst });
    stages.extend(two_layers(r, ["mm.0", "mm.2"], side * side * r.width, EncoderActivation::Gelu)?);
    Ok(r.encoder(patch, stages))
}

/// Ling 3 VL: the tower of Qwen3-VL with a norm before patches are merged.
pub(super) fn ling3vl(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.spatial_merge_size", 2)?;
    let angles = Angles::of_halves(r.head_dim());
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::positions(r.positions(0, Interpolation::Corners)?)];
    stages.push(Stage::Reorder(RowOrder::Blocks(side as u32)));
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, block| block.attention.rope = Some(angles.clone()))?);
    stages.extend(r.opt_norm("v.post_ln", r.width, NormKind::Layer, r.eps)?.map(Stage::Norm));
    stages.push(Stage::Norm(r.norm("mm.input_norm", r.width, NormKind::Layer, r.eps)?));
    stages.push(Stage::Merge { side, order: MergeOrder::PatchFirst });
    stages.extend(two_layers(r, ["mm.0", "mm.2"], side * side * r.width, EncoderActivation::Gelu)?);
    let model = VisionModel::new(r.encoder(patch, stages), r.kept(side, TOKENS));
    Ok(model.with_markers(MARKERS))
}

/// Qwen3-VL: learned positions, and rows of some blocks for the first layers of the text model (deepstack, arXiv 2406.04334).
pub(super) fn qwen3vl(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.spatial_merge_size", 2)?;
    let merged = side * side * r.width;
    let angles = Angles::of_halves(r.head_dim());
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::positions(r.positions(0, Interpolation::Corners)?)];
    stages.push(Stage::Reorder(RowOrder::Blocks(side as u32)));
    let merge = || Stage::Merge { side, order: MergeOrder::PatchFirst };
    let mut n_deepstack = 0;
    let blocks = r.blocks(r.n_block, NormKind::Layer, |_, block| block.attention.rope = Some(angles.clone()))?;
    for (i, block) in blocks.into_iter().enumerate() {
        stages.push(block);
        let name = |part: &str| format!("v.deepstack.{i}.{part}");
        if !r.has(&name("fc1.weight")) {
            continue;
        }
        let up = r.linear(&name("fc1"), merged, None)?;
        let down = r.linear(&name("fc2"), up.n_out, Some(r.n_embd))?;
        let feed_forward = EncoderFeedForward::Plain { up, activation: EncoderActivation::Gelu, down };
        let norm = Stage::Norm(r.norm(&name("norm"), merged, NormKind::Layer, r.eps)?);
        stages.push(Stage::Feature(vec![merge(), norm, Stage::FeedForward(feed_forward)]));
        n_deepstack += 1;
    }
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Layer, r.eps)?));
    stages.push(merge());
    stages.extend(two_layers(r, ["mm.0", "mm.2"], merged, EncoderActivation::Gelu)?);
    stages.push(Stage::JoinFeatures { with_rows: true });
    let encoder = Encoder { n_deepstack, ..r.encoder(patch, stages) };
    Ok(VisionModel::new(encoder, r.kept(side, TOKENS)).with_markers(MARKERS))
}
