//! LFM2-VL: SigLIP 2 for pictures of any size, whose patches are merged.

use super::two_layers;
use crate::vision::{Encoder, EncoderActivation, EncoderReader, FileWeights, Interpolation, MergeOrder, Stage};
use crate::{ModelError, NormKind};

/// Epsilon of the projector's norm.
const EPS: f32 = 1e-5;

pub(super) fn lfm2(r: &EncoderReader<'_>) -> Result<Encoder<FileWeights>, ModelError> {
    let side = r.merge_side("vision.projector.scale_factor", 2)?;
    let merged = side * side * r.width;
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::Positions(r.positions(0, Interpolation::Antialiased)?)];
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, _| ())?);
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Layer, r.eps)?));
    stages.push(Stage::Merge { side, order: MergeOrder::PatchFirst });
    if let Some(norm) = r.opt_norm("mm.input_norm", merged, NormKind::Layer, EPS)? {
        stages.push(Stage::Norm(norm));
    }
    stages.extend(two_layers(r, ["mm.1", "mm.2"], merged, EncoderActivation::Gelu)?);
    Ok(Encoder { patch, stages, n_embd: r.n_embd, n_deepstack: 0 })
}
