//! InternVL 2.5 to 3.5 (arXiv 2412.05271): a tower with a class token and LayerScale, whose patches are merged (pixel shuffle).

use metal_attention_pictures::{Candidates, Layout};

use super::{class_token, two_layers};
use crate::vision::{EncoderActivation, EncoderReader, Interpolation, MergeOrder, Stage, VisionModel};
use crate::{ModelError, NormKind};

/// Epsilon of the projector's norm.
const EPS: f32 = 1e-5;
/// Most tiles of a picture.
const MAX_TILES: usize = 64;

pub(super) fn internvl(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.projector.scale_factor", 2)?;
    let merged = side * side * r.width;
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::positions(r.positions(1, Interpolation::None)?)];
    stages.push(class_token(r)?);
    // The norms of the largest towers are RMS norms, which have no bias.
    let kind = if r.has("v.blk.0.ln1.bias") { NormKind::Layer } else { NormKind::Rms };
    stages.extend(r.blocks(r.n_block, kind, |_, _| ())?);
    stages.push(Stage::DropOthers);
    stages.push(Stage::Merge { side, order: MergeOrder::PatchFirst });
    stages.push(Stage::Norm(r.norm("mm.model.mlp.0", merged, NormKind::Layer, EPS)?));
    stages.extend(two_layers(r, ["mm.model.mlp.1", "mm.model.mlp.3"], merged, EncoderActivation::Gelu)?);
    let most = r.keys.opt_size("vision.preproc_max_tiles")?.unwrap_or(12);
    let least = r.keys.opt_size("vision.preproc_min_tiles")?.unwrap_or(1);
    let plausible = (least..=MAX_TILES).contains(&most);
    r.keys.check("vision.preproc_max_tiles", most, plausible, "must be at least preproc_min_tiles and at most 64")?;
    let layout = Layout::Tiled { tile: r.image, candidates: Candidates::of_tiles(r.image, least, most) };
    Ok(VisionModel::new(r.encoder(patch, stages), layout).with_markers(&[["<img>", "</img>"]]))
}
