//! Pixtral (arXiv 2410.07073) and Mistral Small 3: pictures of any size, with a row behind each row of patches. LightOnOCR: the same
//! without that row, scaled to one longest side.

use metal_attention_pictures::{Layout, PixelRange};

use super::two_layers;
use crate::vision::{
    Angles, Axis, Encoder, EncoderActivation, EncoderReader, FileWeights, MergeOrder, Stage, VisionModel,
};
use crate::{ModelError, NormKind};

fn encoder(r: &EncoderReader<'_>) -> Result<(usize, Encoder<FileWeights>), ModelError> {
    // Without a merger of patches there is no side.
    let side = if r.has("mm.patch_merger.weight") { r.merge_side("vision.spatial_merge_size", 2)? } else { 1 };
    let angles = Angles::of_neighbours(r.head_dim(), [Axis::Y, Axis::X], [0.0, 2.0]);
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::Norm(r.norm("v.pre_ln", r.width, NormKind::Rms, r.eps)?)];
    stages.extend(r.blocks(r.n_block, NormKind::Rms, |_, block| block.attention.rope = Some(angles.clone()))?);
    if side > 1 {
        stages.push(Stage::Norm(r.norm("mm.input_norm", r.width, NormKind::Rms, r.eps)?));
        stages.push(Stage::Merge { side, order: MergeOrder::ValueFirst });
        stages.push(Stage::Linear(r.linear("mm.patch_merger", side * side * r.width, Some(r.width))?));
    }
    stages.extend(two_layers(r, ["mm.1", "mm.2"], r.width, EncoderActivation::Gelu)?);
    if let Some(row) = r.opt_vector("v.token_embd.img_break", r.n_embd)? {
        stages.push(Stage::RowBreaks { row, after_last: false });
    }
    Ok((side, r.encoder(patch, stages)))
}

pub(super) fn pixtral(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let (side, encoder) = encoder(r)?;
    Ok(VisionModel::new(encoder, r.kept(side, [8, 1024])).with_markers(&[["", "[IMG_END]"]]))
}

pub(super) fn lightonocr(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let (side, encoder) = encoder(r)?;
    let longest = r.keys.opt_size("vision.preproc_image_size")?.unwrap_or(r.image);
    let layout = Layout::LongestSide { longest, multiple: r.patch * side, pixels: PixelRange::ALL };
    Ok(VisionModel::new(encoder, layout).with_markers(&[["<|im_start|>", "<|im_end|>"]]))
}
