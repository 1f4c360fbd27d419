//! Muse Glimmer: a tower for pictures of any size with windows in most blocks, and a rotation beside learned positions.

use metal_attention_pictures::{Filter, Layout, PixelRange};

use crate::vision::{
    Angles, Axis, EncoderActivation, EncoderReader, Interpolation, MergeOrder, RowOrder, Stage, VisionModel,
};
use crate::{ModelError, NormKind};

/// All patches attend to each other in each block whose number is a multiple of this, and in the last.
const EVERY: usize = 4;
/// Least and most tokens of a picture.
const TOKENS: [usize; 2] = [1, 4096];

pub(super) fn muse_glimmer(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.spatial_merge_size", 2)?;
    let merged = side * side * r.width;
    let angles = Angles { first: 1.0, ..Angles::of_neighbours(r.head_dim(), [Axis::X, Axis::Y], [0.0, 0.0]) };
    let (patch, kernel) = r.patches()?;
    let positions = r.positions(0, Interpolation::Linear)?;
    // Windows have the size of the table of positions.
    let window = positions.size[0];
    let mut stages = vec![kernel, Stage::positions(positions)];
    stages.push(Stage::Reorder(RowOrder::Windows { window: window as u32, block: 1 }));
    let norm = |name: &str| Ok::<_, ModelError>(r.opt_norm(name, r.width, NormKind::Layer, r.eps)?.map(Stage::Norm));
    stages.extend(norm("v.pre_ln")?);
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |i, block| {
        block.set_activation(EncoderActivation::GeluErf);
        block.attention.rope = Some(angles.clone());
        let is_global = i + 1 == r.n_block || (i + 1).is_multiple_of(EVERY);
        block.attention.window = (!is_global).then_some(window);
    })?);
    stages.extend(norm("v.post_ln")?);
    stages.push(Stage::Merge { side, order: MergeOrder::ValueFirst });
    let first = r.linear("mm.0", merged, None)?;
    let second = r.linear("mm.1", first.n_out, None)?;
    let last = r.linear("mm.2", second.n_out, Some(r.n_embd))?;
    stages.extend([Stage::Linear(first), Stage::Activation(EncoderActivation::GeluErf)]);
    stages.extend([Stage::Linear(second), Stage::Activation(EncoderActivation::GeluErf), Stage::Linear(last)]);
    let multiple = r.patch * side;
    let pixels = PixelRange::of_tokens(TOKENS[0], TOKENS[1], multiple);
    let model = VisionModel::new(r.encoder(patch, stages), Layout::NearestRatio { multiple, pixels });
    Ok(model.with_filter(Filter::Lanczos).with_markers(&[["<|image_start|>", "<|image_end|>"]]))
}
