//! Pixtral (arXiv 2410.07073), Mistral Small 3 and LightOnOCR: pictures of any size, with a row behind each row of patches.

use super::two_layers;
use crate::vision::{Angles, Axis, Encoder, EncoderActivation, EncoderReader, FileWeights, MergeOrder, Stage};
use crate::{ModelError, NormKind};

pub(super) fn pixtral(r: &EncoderReader<'_>) -> Result<Encoder<FileWeights>, ModelError> {
    let angles = Angles::of_neighbours(r.head_dim(), [Axis::Y, Axis::X], [0.0, 2.0]);
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::Norm(r.norm("v.pre_ln", r.width, NormKind::Rms, r.eps)?)];
    stages.extend(r.blocks(r.n_block, NormKind::Rms, |_, block| block.attention.rope = Some(angles.clone()))?);
    if r.has("mm.patch_merger.weight") {
        let side = r.merge_side("vision.spatial_merge_size", 2)?;
        stages.push(Stage::Norm(r.norm("mm.input_norm", r.width, NormKind::Rms, r.eps)?));
        stages.push(Stage::Merge { side, order: MergeOrder::ValueFirst });
        stages.push(Stage::Linear(r.linear("mm.patch_merger", side * side * r.width, Some(r.width))?));
    }
    stages.extend(two_layers(r, ["mm.1", "mm.2"], r.width, EncoderActivation::Gelu)?);
    if let Some(row) = r.opt_vector("v.token_embd.img_break", r.n_embd)? {
        stages.push(Stage::RowBreaks(row));
    }
    Ok(Encoder { patch, stages, n_embd: r.n_embd, n_deepstack: 0 })
}
