//! Idefics 3 (arXiv 2408.12637) and SmolVLM: SigLIP, whose patches are merged (pixel shuffle).

use metal_attention_pictures::{Filter, Layout};

use crate::vision::{EncoderReader, Interpolation, MergeOrder, Stage, TileMarkers, VisionModel};
use crate::{ModelError, NormKind};

pub(super) fn idefics3(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.projector.scale_factor", 4)?;
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::positions(r.positions(0, Interpolation::None)?)];
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, _| ())?);
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Layer, r.eps)?));
    stages.push(Stage::Merge { side, order: MergeOrder::PatchFirst });
    stages.push(Stage::Linear(r.linear("mm.model.fc", side * side * r.width, Some(r.n_embd))?));
    let longest = r.keys.opt_size("vision.preproc_image_size")?.unwrap_or(r.image);
    let model = VisionModel::new(r.encoder(patch, stages), Layout::Idefics3 { tile: r.image, longest });
    Ok(model.with_filter(Filter::Lanczos).with_tiles(TileMarkers::Idefics3))
}
