//! MiniCPM-V 2.6 to 4.5 (arXiv 2408.01800): SigLIP with a resampler. MiniCPM-V 4.6: two mergers instead of it.

use metal_attention_pictures::Layout;

use crate::vision::{
    EncoderActivation, EncoderReader, Interpolation, MergeOrder, PositionTable, Resampler, RowOrder, Stage,
    TileMarkers, VisionModel,
};
use crate::{ModelError, NormKind};

/// Rows and columns of the table of positions.
const TABLE: usize = 70;
/// Elements of a head of the resampler.
const HEAD_DIM: usize = 128;

/// Positions by the part of the picture that a patch is in.
fn buckets(r: &EncoderReader<'_>) -> Result<PositionTable, ModelError> {
    let rows = r.values("v.position_embd.weight", TABLE * TABLE * r.width)?;
    Ok(PositionTable { rows, width: r.width, size: [TABLE, TABLE], interpolation: Interpolation::Buckets })
}

pub(super) fn resampler(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let (patch, kernel) = r.patches()?;
    let n = r.n_embd;
    r.keys.check("vision.projection_dim", n, n.is_multiple_of(HEAD_DIM), "must be a multiple of 128")?;
    let mut stages = vec![kernel, Stage::positions(buckets(r)?)];
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, _| ())?);
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Layer, r.eps)?));
    let queries = r.all_values("resampler.query", n)?;
    let query_norm = r.norm("resampler.ln_q", n, NormKind::Layer, r.eps)?;
    let linear = |part: &str| r.linear(&format!("resampler.attn.{part}"), n, Some(n));
    stages.push(Stage::Resampler(Box::new(Resampler {
        queries: queries.chunks_exact(n).flat_map(|row| query_norm.of_row(row)).collect(),
        input: r.linear("resampler.kv", r.width, Some(n))?,
        input_norm: r.norm("resampler.ln_kv", n, NormKind::Layer, r.eps)?,
        q: linear("q")?,
        k: linear("k")?,
        v: linear("v")?,
        n_head: n / HEAD_DIM,
        head_dim: HEAD_DIM,
        out: linear("out")?,
    })));
    stages.push(Stage::Norm(r.norm("resampler.ln_post", n, NormKind::Layer, r.eps)?));
    stages.push(Stage::Linear(r.linear("resampler.proj", n, Some(n))?));
    // Version 2 is MiniCPM-V 2.5.
    let is_first = r.keys.opt_usize("minicpmv_version")? == Some(2);
    let model = VisionModel::new(r.encoder(patch, stages), Layout::MiniCpm { tile: r.image, multiple: r.patch });
    Ok(model.with_tiles(if is_first { TileMarkers::MiniCpm25 } else { TileMarkers::MiniCpm26 }))
}

pub(super) fn minicpmv46(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let merged = 4 * r.width;
    let merge = || Stage::Merge { side: 2, order: MergeOrder::PatchFirst };
    let norm = |name: &str, width: usize| r.norm(name, width, NormKind::Layer, r.eps).map(Stage::Norm);
    let after = r.keys.opt_sizes("vision.wa_layer_indexes")?.and_then(|layers| layers.first().copied()).unwrap_or(0);
    // With half the factor there is no merger among the blocks.
    let has_merger = r.merge_side("vision.projector.scale_factor", 4)? == 4;
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::positions(buckets(r)?), Stage::Reorder(RowOrder::Blocks(2))];
    for (i, block) in r.blocks(r.n_block, NormKind::Layer, |_, _| ())?.into_iter().enumerate() {
        stages.push(block);
        if i != after || !has_merger {
            continue;
        }
        let mut attention = r.attention("v.vit_merger.")?;
        attention.window = Some(2);
        let attention = vec![norm("v.vit_merger.ln1", r.width)?, Stage::Attention(Box::new(attention))];
        let mlp = r.feed_forward("v.vit_merger.ds_ffn_", [merged, r.width], EncoderActivation::Gelu)?;
        let mlp = vec![merge(), norm("v.vit_merger.ds_ln", merged)?, Stage::FeedForward(mlp)];
        stages.extend([Stage::Sum([Vec::new(), attention]), Stage::Sum([vec![Stage::Pool { side: 2 }], mlp])]);
    }
    stages.extend([norm("v.post_ln", r.width)?, merge(), norm("mm.input_norm", merged)?]);
    stages.push(Stage::FeedForward(r.feed_forward("mm.", [merged, r.n_embd], EncoderActivation::GeluErf)?));
    let layout = Layout::MiniCpm { tile: r.image, multiple: 4 * r.patch };
    Ok(VisionModel::new(r.encoder(patch, stages), layout).with_tiles(TileMarkers::MiniCpm26))
}
