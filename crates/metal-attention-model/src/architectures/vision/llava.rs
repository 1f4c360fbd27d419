//! LLaVA 1.5 and 1.6 (arXiv 2310.03744), Granite Vision, `MobileVLM` V2, Phi-4 and Janus-Pro: CLIP or SigLIP with an MLP.

use metal_attention_pictures::{Candidates, Filter, Layout};

use super::{class_token, two_layers};
use crate::vision::{Encoder, EncoderActivation, EncoderReader, FileWeights, Interpolation, Stage, VisionModel};
use crate::{ModelError, NormKind};

/// The mean colour of CLIP's pictures.
pub(super) const MEAN_COLOUR: [u8; 3] = [122, 116, 104];

/// A tower with a class token (CLIP) or without (SigLIP), up to block `n`. `features`: the numbers of blocks whose outputs are put
/// beside each other.
pub(super) fn tower(
    r: &EncoderReader<'_>,
    interpolation: Interpolation,
    n: usize,
    features: &[usize],
) -> Result<Encoder<FileWeights>, ModelError> {
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel];
    let has_class = r.has("v.class_embd");
    stages.push(Stage::positions(r.positions(usize::from(has_class), interpolation)?));
    if has_class {
        stages.push(class_token(r)?);
    }
    if let Some(norm) = r.opt_norm("v.pre_ln", r.width, NormKind::Layer, r.eps)? {
        stages.push(Stage::Norm(norm));
    }
    let feature = |i: usize| features.contains(&i).then(|| Stage::Feature(Vec::new()));
    stages.extend(feature(0));
    for (i, block) in r.blocks(n, NormKind::Layer, |_, _| ())?.into_iter().enumerate() {
        stages.push(block);
        stages.extend(feature(i + 1));
    }
    if !features.is_empty() {
        stages.push(Stage::JoinFeatures { with_rows: false });
    }
    if has_class {
        stages.push(Stage::DropOthers);
    }
    Ok(r.encoder(patch, stages))
}

/// LLaVA and Granite Vision.
pub(super) fn mlp(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let features = r.keys.opt_sizes("vision.feature_layer")?.unwrap_or_default();
    let n = features.iter().copied().max().unwrap_or(r.n_block.saturating_sub(1));
    r.keys.check("vision.feature_layer", n, n <= r.n_block, "must be at most block_count")?;
    let mut encoder = tower(r, Interpolation::None, n, &features)?;
    let width = features.len().max(1) * r.width;
    encoder.stages.extend(two_layers(r, ["mm.0", "mm.2"], width, EncoderActivation::Gelu)?);
    let Some(sizes) = r.keys.opt_sizes("vision.image_grid_pinpoints")? else {
        return Ok(VisionModel::new(encoder, Layout::Square { side: r.image }).with_fill(MEAN_COLOUR));
    };
    let pairs = sizes.len().is_multiple_of(2) && !sizes.is_empty() && sizes.iter().all(|side| *side > 0);
    r.keys.check("vision.image_grid_pinpoints", sizes.len(), pairs, "must be pairs of a width and a height")?;
    let layout = Layout::Tiled { tile: r.image, candidates: Candidates::listed(&sizes) };
    Ok(VisionModel::new(encoder, layout))
}

/// `MobileVLM` V2 (arXiv 2402.03766): CLIP with two layers, a mean of 2 x 2 patches, and a convolution of each column.
pub(super) fn ldpv2(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let mut encoder = tower(r, Interpolation::None, r.n_block.saturating_sub(1), &[])?;
    encoder.stages.extend(two_layers(r, ["mm.model.mlp.0", "mm.model.mlp.2"], r.width, EncoderActivation::Gelu)?);
    let (side, kernel) = r.depthwise("mm.model.peg.0", r.n_embd)?;
    let convolution = Stage::Depthwise { side, stride: 1, kernel };
    let bias = Stage::AddRow(r.values("mm.model.peg.0.bias", r.n_embd)?);
    encoder.stages.extend([Stage::Pool { side: 2 }, Stage::Sum([Vec::new(), vec![convolution, bias]])]);
    Ok(VisionModel::new(encoder, Layout::Square { side: r.image }).with_fill(MEAN_COLOUR))
}

/// A SigLIP tower with a norm behind its blocks.
fn siglip(
    r: &EncoderReader<'_>,
    interpolation: Interpolation,
    projector: [&str; 2],
) -> Result<Encoder<FileWeights>, ModelError> {
    let mut encoder = tower(r, interpolation, r.n_block, &[])?;
    if let Some(norm) = r.opt_norm("v.post_ln", r.width, NormKind::Layer, r.eps)? {
        encoder.stages.push(Stage::Norm(norm));
    }
    encoder.stages.extend(two_layers(r, projector, r.width, EncoderActivation::Gelu)?);
    Ok(encoder)
}

pub(super) fn phi4(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let encoder = siglip(r, Interpolation::Antialiased, ["mm.0", "mm.2"])?;
    Ok(VisionModel::new(encoder, r.kept_in_pixels(1)?).with_filter(Filter::Bilinear))
}

pub(super) fn janus_pro(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let encoder = siglip(r, Interpolation::None, ["mm.0", "mm.1"])?;
    Ok(VisionModel::new(encoder, Layout::Square { side: r.image }).with_fill([127; 3]))
}
