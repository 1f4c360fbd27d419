//! Gemma 3 (arXiv 2503.19786): SigLIP with pooling. Gemma 4: blocks of its own with pooling, or without blocks (unified).

use metal_attention_pictures::{Filter, Layout, PixelRange};

use crate::vision::{
    Angles, Colours, Encoder, EncoderNorm, EncoderReader, FileWeights, Interpolation, PatchOrder, PatchSpec,
    PictureAttention, PositionTable, Stage, VisionModel,
};
use crate::{ModelError, NormKind};

/// Least and most tokens of a picture in Gemma 4.
const TOKENS: [usize; 2] = [70, 1120];
/// Widths of the text models of Gemma 4 in which pictures are attended to as text is (E2B, E4B).
const CAUSAL_WIDTHS: [usize; 2] = [1536, 2560];
/// Epsilon of the norms of Gemma 4's unified encoder.
const UNIFIED_EPS: f32 = 1e-5;

pub(super) fn gemma3(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.projector.scale_factor", 4)?;
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::positions(r.positions(0, Interpolation::None)?)];
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, _| ())?);
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Layer, r.eps)?));
    stages.push(Stage::Pool { side });
    stages.push(Stage::Norm(r.norm("mm.soft_emb_norm", r.width, NormKind::Rms, r.eps)?));
    // The file has the matrix as `[n_in, n_out]`.
    let transposed = r.values("mm.input_projection.weight", r.width * r.n_embd)?;
    let matrix: Vec<f32> = (0..r.n_embd).flat_map(|o| transposed.iter().skip(o).step_by(r.n_embd).copied()).collect();
    stages.push(Stage::Linear(r.computed("mm.input_projection", [r.width, r.n_embd], &matrix)?));
    let model = VisionModel::new(r.encoder(patch, stages), Layout::Square { side: r.image });
    let model = model.with_filter(Filter::Bilinear).with_attention(PictureAttention::Bidirectional);
    Ok(model.with_markers(&[["<start_of_image>", "<end_of_image>"]]))
}

/// A norm without weights.
fn plain_norm(width: usize, eps: f32) -> EncoderNorm<FileWeights> {
    EncoderNorm { kind: NormKind::Rms, eps, width, weight: vec![1.0; width], bias: None }
}

/// Positions as the sum of a row for the column and one for the row.
fn axes(r: &EncoderReader<'_>) -> Result<PositionTable, ModelError> {
    let rows = r.all_values("v.position_embd.weight", r.width)?;
    let n = rows.len() / r.width / 2;
    r.keys.check(
        "vision.embedding_length",
        r.width,
        n > 0,
        "v.position_embd.weight must have two tables of positions",
    )?;
    Ok(PositionTable { rows, width: r.width, size: [2, n], interpolation: Interpolation::Axes })
}

/// Gemma 4's place of pictures in a prompt.
fn gemma4(r: &EncoderReader<'_>, encoder: Encoder<FileWeights>, layout: Layout) -> VisionModel {
    let is_causal = CAUSAL_WIDTHS.contains(&r.n_embd);
    let attention = if is_causal { PictureAttention::Causal } else { PictureAttention::BidirectionalInWindows };
    VisionModel::new(encoder, layout).with_attention(attention).with_markers(&[["<|image>", "<image|>"]])
}

pub(super) fn gemma4v(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.projector.scale_factor", 3)?;
    let head_dim = r.head_dim();
    let angles = Angles::within_halves(head_dim, 100.0);
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::positions(axes(r)?)];
    stages.extend(r.blocks(r.n_block, NormKind::Rms, |_, block| {
        block.attention.rope = Some(angles.clone());
        block.attention.v_norm = Some(plain_norm(head_dim, r.eps));
        block.attention.scale = 1.0;
    })?);
    stages.push(Stage::Pool { side });
    stages.push(Stage::Scale((r.width as f32).sqrt()));
    if let (Some(mut bias), Some(scale)) = (r.opt_vector("v.std_bias", r.width)?, r.opt_vector("v.std_scale", r.width)?)
    {
        for v in &mut bias {
            *v = -*v;
        }
        stages.extend([Stage::AddRow(bias), Stage::ScaleColumns(scale)]);
    }
    stages.push(Stage::Norm(plain_norm(r.width, r.eps)));
    stages.push(Stage::Linear(r.linear("mm.input_projection", r.width, Some(r.n_embd))?));
    let mut model = gemma4(r, r.encoder(patch, stages), r.kept(side, TOKENS));
    // The model computes 2 x - 1, which the file does not say.
    model.encoder.colours = Colours { mean: [0.5; 3], std: [0.5; 3] };
    Ok(model)
}

pub(super) fn gemma4uv(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.patch * r.merge_side("vision.projector.scale_factor", 3)?;
    let n_in = 3 * side * side;
    let norm = |i: usize, width: usize| {
        Ok::<_, ModelError>(Stage::Norm(r.norm(&format!("v.patch_norm.{i}"), width, NormKind::Layer, UNIFIED_EPS)?))
    };
    let stages = vec![
        norm(1, n_in)?,
        Stage::Linear(r.linear("v.patch_embd", n_in, Some(r.width))?),
        norm(2, r.width)?,
        Stage::positions(axes(r)?),
        norm(3, r.width)?,
        Stage::Norm(plain_norm(r.width, r.eps)),
        Stage::Linear(r.linear("mm.input_projection", r.width, Some(r.n_embd))?),
    ];
    let patch = PatchSpec { side, order: PatchOrder::ColourFirst };
    let layout = Layout::Kept { multiple: side, pixels: PixelRange::of_tokens(TOKENS[0], TOKENS[1], side) };
    Ok(gemma4(r, r.encoder(patch, stages), layout))
}
