//! DeepSeek-OCR (arXiv 2510.18234): SAM's tower, whose patches two convolutions reduce to a sixteenth, and CLIP's tower over the results,
//! which are put beside each other. DeepSeek-OCR 2 (arXiv 2601.20552): SAM's tower, and a text model's blocks over the results and learned
//! queries behind them.

use metal_attention_pictures::Layout;

use super::class_token;
use crate::vision::{
    Angles, Encoder, EncoderActivation, EncoderAttention, EncoderReader, FileWeights, Interpolation, PatchOrder,
    PatchSpec, RelativeScores, Stage, VisionModel,
};
use crate::{ModelError, NormKind};

/// Pixels of a patch's side, and of the side of the whole picture, whatever the file says.
const PATCH: usize = 16;
const WHOLE: usize = 1024;
/// Pixels of the side of a tile, and the fewest and most tiles, of both versions.
const TILE: usize = 640;
const TILES: [usize; 2] = [2, 9];
const TILE_2: usize = 768;
const TILES_2: [usize; 2] = [2, 6];
/// Base of the rotation in the blocks of version 2.
const ROPE_BASE: f64 = 1e6;
/// Patches that become a row, along each side.
const MERGED: usize = 4;
/// Most tiles that are plausible.
const MAX_TILES: usize = 100;
/// Epsilon of SAM's norms, and of CLIP's.
const SAM_EPS: f32 = 1e-6;
const CLIP_EPS: f32 = 1e-5;
/// The blocks of SAM in which all patches attend to each other; in the others those of a window do.
const GLOBAL: [usize; 4] = [2, 5, 8, 11];

/// The sizes of SAM.
struct Sam {
    width: usize,
    n_block: usize,
    n_head: usize,
    /// Patches along the side of a window.
    window: usize,
}

pub(super) fn deepseekocr(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let patch = PatchSpec { side: PATCH, order: PatchOrder::ColourFirst };
    let mut stages = sam(r, TILE)?;
    stages.push(Stage::Feature(Vec::new()));
    stages.extend(clip(r)?);
    stages.push(Stage::JoinFeatures { with_rows: true });
    stages.push(Stage::Linear(r.linear("mm.model.fc", 2 * r.width, Some(r.n_embd))?));
    let row = |name: &str| r.values(name, r.n_embd);
    let breaks = Stage::RowBreaks { row: row("v.image_newline")?, after_last: true };
    // Behind the whole picture, which is larger than a tile.
    let separator = Stage::Separator { row: row("v.view_seperator")?, ny: WHOLE / PATCH / MERGED };
    let encoder = r.encoder(patch, vec![Stage::Squares(stages), breaks, separator]);
    model(r, encoder, TILE, TILES, true)
}

pub(super) fn deepseekocr2(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let patch = PatchSpec { side: PATCH, order: PatchOrder::ColourFirst };
    let mut stages = sam(r, TILE_2)?;
    let queries = |name: &str, side: usize| r.values(name, (side / PATCH / MERGED).pow(2) * r.width);
    let of_sides = [("v.resample_query_768.weight", TILE_2), ("v.resample_query_1024.weight", WHOLE)];
    let tables = of_sides.into_iter().map(|(name, side)| queries(name, side)).collect::<Result<Vec<_>, _>>()?;
    stages.push(Stage::Queries(tables));
    let angles = Angles::of_rows(r.head_dim(), ROPE_BASE);
    stages.extend(r.blocks(r.n_block, NormKind::Rms, |_, block| {
        block.set_activation(EncoderActivation::Silu);
        block.attention.rope = Some(angles.clone());
        block.attention.causal_others = true;
    })?);
    stages.extend(r.opt_norm("v.post_ln", r.width, NormKind::Rms, r.eps)?.map(Stage::Norm));
    stages.push(Stage::KeepQueries);
    stages.push(Stage::Linear(r.linear("mm.model.fc", r.width, Some(r.n_embd))?));
    // Behind the whole picture, which is larger than a tile.
    let row = r.values("v.view_seperator", r.n_embd)?;
    stages.push(Stage::Separator { row, ny: WHOLE / PATCH / MERGED });
    model(r, r.encoder(patch, stages), TILE_2, TILES_2, false)
}

/// The model with tiles of the side `tile`.
fn model(
    r: &EncoderReader<'_>,
    encoder: Encoder<FileWeights>,
    tile: usize,
    [least, most]: [usize; 2],
    joined: bool,
) -> Result<VisionModel, ModelError> {
    let least = r.keys.opt_size("vision.preproc_min_tiles")?.unwrap_or(least);
    let most = r.keys.opt_size("vision.preproc_max_tiles")?.unwrap_or(most);
    let plausible = (least..=MAX_TILES).contains(&most);
    r.keys.check("vision.preproc_max_tiles", most, plausible, "must be at least preproc_min_tiles and at most 100")?;
    let layout = Layout::DeepSeekOcr { whole: WHOLE, tile, tiles: [least, most], joined };
    Ok(VisionModel::new(encoder, layout).with_fill([127; 3]).with_markers(&[["", "\n"]]))
}

/// SAM's tower with the convolutions behind it, for the whole picture and tiles of the side `tile`.
fn sam(r: &EncoderReader<'_>, tile: usize) -> Result<Vec<Stage<FileWeights>>, ModelError> {
    let size = |key: &str| r.keys.positive(key);
    let sam = Sam {
        width: size("vision.sam.embedding_length")?,
        n_block: size("vision.sam.block_count")?,
        n_head: size("vision.sam.head_count")?,
        window: size("vision.window_size")?,
    };
    r.keys.check("vision.sam.block_count", sam.n_block, sam.n_block <= 1024, "at most 1024 blocks are plausible")?;
    let whole = sam.width.is_multiple_of(sam.n_head) && sam.n_head <= 64;
    let what = "must divide vision.sam.embedding_length, and at most 64 heads are plausible";
    r.keys.check("vision.sam.head_count", sam.n_head, whole, what)?;
    r.keys.check("vision.window_size", sam.window, sam.window <= WHOLE / PATCH, "at most 64 patches are plausible")?;
    let kernel = r.patch_kernel("v.sam.patch_embd", 3 * PATCH * PATCH, sam.width)?;
    let table = r.table("v.sam.pos_embd.weight", sam.width, 0, Interpolation::AntialiasedCubic)?;
    let mut stages = vec![Stage::Linear(kernel), Stage::positions(table)];
    for i in 0..sam.n_block {
        let name = |part: &str| format!("v.sam.blk.{i}.{part}");
        let norm = |part: &str| r.norm(&name(part), sam.width, NormKind::Layer, SAM_EPS).map(Stage::Norm);
        let attention = Stage::Attention(Box::new(sam_attention(r, &sam, i, tile)?));
        let attention =
            if GLOBAL.contains(&i) { attention } else { Stage::Windows { side: sam.window, stages: vec![attention] } };
        let attention = vec![norm("pre_ln")?, attention];
        let up = r.linear(&name("mlp.lin1"), sam.width, None)?;
        let down = r.linear(&name("mlp.lin2"), up.n_out, Some(sam.width))?;
        let feed_forward =
            vec![norm("post_ln")?, Stage::Linear(up), Stage::Activation(r.activation), Stage::Linear(down)];
        stages.extend([attention, feed_forward].map(|added| Stage::Sum([Vec::new(), added])));
    }
    let mut width = sam.width;
    for (name, norm, stride) in [
        ("v.sam.neck.0", Some("v.sam.neck.1"), 1),
        ("v.sam.neck.2", Some("v.sam.neck.3"), 1),
        ("v.sam.net_2", None, 2),
        ("v.sam.net_3", None, 2),
    ] {
        let (side, convolution) = r.convolution(name, width)?;
        width = convolution.n_out;
        stages.push(Stage::Unfold { side, stride, centred: true });
        stages.push(Stage::Linear(convolution));
        if let Some(norm) = norm {
            stages.push(Stage::Norm(r.norm(norm, width, NormKind::Layer, SAM_EPS)?));
        }
    }
    r.keys.check("vision.embedding_length", r.width, r.width == width, "must be the width of SAM's results")?;
    Ok(stages)
}

/// The attention of block `i` of SAM.
fn sam_attention(
    r: &EncoderReader<'_>,
    sam: &Sam,
    i: usize,
    tile: usize,
) -> Result<EncoderAttention<FileWeights>, ModelError> {
    let name = |part: &str| format!("v.sam.blk.{i}.attn.{part}");
    let [q, k, v] = r.fused(&name("qkv"), sam.width, sam.width)?;
    let head_dim = sam.width / sam.n_head;
    let tables = [r.all_values(&name("pos_h.weight"), head_dim)?, r.all_values(&name("pos_w.weight"), head_dim)?];
    let scores = |side: usize| {
        let matrix: Vec<f32> = tables.iter().flat_map(|table| lengthened(table, head_dim, 2 * side - 1)).collect();
        let matrix = r.computed(&name("pos"), [head_dim, 2 * (2 * side - 1)], &matrix)?;
        Ok::<_, ModelError>(RelativeScores { side, matrix })
    };
    let sides = if GLOBAL.contains(&i) { vec![WHOLE / PATCH, tile / PATCH] } else { vec![sam.window] };
    Ok(EncoderAttention {
        q,
        k,
        v,
        q_norm: None,
        k_norm: None,
        v_norm: None,
        n_head: sam.n_head,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        rope: None,
        window: None,
        causal_others: false,
        relative: sides.into_iter().map(scores).collect::<Result<_, _>>()?,
        out: r.linear(&name("out"), sam.width, Some(sam.width))?,
    })
}

/// The rows of a table, `[any, width]`, as `[n, width]`: linear between centres.
fn lengthened(table: &[f32], width: usize, n: usize) -> Vec<f32> {
    let n_rows = table.len() / width;
    if n_rows == n {
        return table.to_vec();
    }
    let last = n_rows.saturating_sub(1);
    let row = |i: usize| {
        let at = ((i as f32 + 0.5) * n_rows as f32 / n as f32 - 0.5).clamp(0.0, last as f32);
        let (first, part) = (at as usize, at.fract());
        let second = (first + 1).min(last);
        (0..width).map(move |j| table[first * width + j] * (1.0 - part) + table[second * width + j] * part)
    };
    (0..n).flat_map(row).collect()
}

/// CLIP's tower over the results of SAM.
fn clip(r: &EncoderReader<'_>) -> Result<Vec<Stage<FileWeights>>, ModelError> {
    let r = &r.with_eps(CLIP_EPS);
    let mut stages = vec![Stage::positions(r.positions(1, Interpolation::AntialiasedCubic)?), class_token(r)?];
    if let Some(norm) = r.opt_norm("v.pre_ln", r.width, NormKind::Layer, r.eps)? {
        stages.push(Stage::Norm(norm));
    }
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, block| block.set_activation(EncoderActivation::QuickGelu))?);
    if let Some(norm) = r.opt_norm("v.post_ln", r.width, NormKind::Layer, r.eps)? {
        stages.push(Stage::Norm(norm));
    }
    stages.push(Stage::DropOthers);
    Ok(stages)
}
