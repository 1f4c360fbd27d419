//! Idefics 3 (arXiv 2408.12637) and SmolVLM: SigLIP, whose patches are merged (pixel shuffle).

use crate::vision::{Encoder, EncoderReader, FileWeights, Interpolation, MergeOrder, Stage};
use crate::{ModelError, NormKind};

pub(super) fn idefics3(r: &EncoderReader<'_>) -> Result<Encoder<FileWeights>, ModelError> {
    let side = r.merge_side("vision.projector.scale_factor", 4)?;
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::Positions(r.positions(0, Interpolation::None)?)];
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, _| ())?);
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Layer, r.eps)?));
    stages.push(Stage::Merge { side, order: MergeOrder::PatchFirst });
    stages.push(Stage::Linear(r.linear("mm.model.fc", side * side * r.width, Some(r.n_embd))?));
    Ok(Encoder { patch, stages, n_embd: r.n_embd, n_deepstack: 0 })
}
