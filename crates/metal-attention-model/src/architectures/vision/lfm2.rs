//! LFM2-VL: SigLIP 2 for pictures of any size, whose patches are merged.

use metal_attention_pictures::{Filter, Layout, PixelRange};

use super::two_layers;
use crate::vision::{EncoderActivation, EncoderReader, Interpolation, MergeOrder, Stage, TileMarkers, VisionModel};
use crate::{ModelError, NormKind};

/// Epsilon of the projector's norm.
const EPS: f32 = 1e-5;

pub(super) fn lfm2(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.projector.scale_factor", 2)?;
    let merged = side * side * r.width;
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::positions(r.positions(0, Interpolation::Antialiased)?)];
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, _| ())?);
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Layer, r.eps)?));
    stages.push(Stage::Merge { side, order: MergeOrder::PatchFirst });
    if let Some(norm) = r.opt_norm("mm.input_norm", merged, NormKind::Layer, EPS)? {
        stages.push(Stage::Norm(norm));
    }
    stages.extend(two_layers(r, ["mm.1", "mm.2"], merged, EncoderActivation::Gelu)?);
    let pixels = PixelRange::of_tokens(64, 256, r.patch * side);
    let model = VisionModel::new(r.encoder(patch, stages), Layout::Lfm2 { patch: r.patch, merge: side, pixels });
    let model = model.with_filter(Filter::Bilinear).with_tiles(TileMarkers::Lfm2);
    Ok(model.with_markers(&[["<|image_start|>", "<|image_end|>"]]))
}
