//! Nemotron Nano VL 12B v2 (arXiv 2511.03929): RADIO, a tower with several class tokens, whose patches are merged (pixel shuffle).

use metal_attention_pictures::Layout;

use super::two_layers;
use crate::vision::{EncoderActivation, EncoderReader, Interpolation, MergeOrder, Stage, VisionModel};
use crate::{ModelError, NormKind};

/// Epsilon of the projector's norm.
const EPS: f32 = 1e-6;

pub(super) fn nemotron_v2_vl(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.projector.scale_factor", 2)?;
    let merged = side * side * r.width;
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::positions(r.positions(0, Interpolation::None)?)];
    stages.push(Stage::Others { before: r.all_values("v.class_embd", r.width)?, after: Vec::new() });
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, _| ())?);
    if let Some(norm) = r.opt_norm("v.post_ln", r.width, NormKind::Layer, r.eps)? {
        stages.push(Stage::Norm(norm));
    }
    stages.extend([Stage::DropOthers, Stage::Merge { side, order: MergeOrder::PatchFirst }]);
    stages.push(Stage::Norm(r.norm("mm.model.mlp.0", merged, NormKind::Rms, EPS)?));
    stages.extend(two_layers(r, ["mm.model.mlp.1", "mm.model.mlp.3"], merged, EncoderActivation::SquaredRelu)?);
    Ok(VisionModel::new(r.encoder(patch, stages), Layout::Square { side: r.image }))
}
