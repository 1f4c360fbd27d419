//! Llama 4: a tower with a class token behind the patches, and a rotation beside learned positions.

use metal_attention_pictures::{Candidates, Layout};

use crate::vision::{Angles, Axis, EncoderActivation, EncoderReader, Interpolation, MergeOrder, Stage, VisionModel};
use crate::{ModelError, NormKind};

pub(super) fn llama4(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.projector.scale_factor", 2)?;
    let angles = Angles { first: 1.0, ..Angles::of_neighbours(r.head_dim(), [Axis::X, Axis::Y], [0.0, 0.0]) };
    let (patch, kernel) = r.patches()?;
    let mut positions = r.positions_before(1, Interpolation::None)?;
    let mut row = r.values("v.class_embd", r.width)?;
    let last = positions.rows.split_off(positions.rows.len() - r.width);
    row.iter_mut().zip(&last).for_each(|(v, position)| *v += position);
    let mut stages = vec![kernel, Stage::positions(positions), Stage::Others { before: Vec::new(), after: row }];
    stages.push(Stage::Norm(r.norm("v.pre_ln", r.width, NormKind::Layer, r.eps)?));
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, block| block.attention.rope = Some(angles.clone()))?);
    stages.push(Stage::Norm(r.norm("v.post_ln", r.width, NormKind::Layer, r.eps)?));
    stages.push(Stage::DropOthers);
    stages.push(Stage::Merge { side, order: MergeOrder::Transposed });
    let first = r.linear("mm.model.mlp.1", side * side * r.width, None)?;
    let second = r.linear("mm.model.mlp.2", first.n_out, None)?;
    let last = r.linear("mm.model.fc", second.n_out, Some(r.n_embd))?;
    stages.extend([Stage::Linear(first), Stage::Activation(EncoderActivation::Gelu)]);
    stages.extend([Stage::Linear(second), Stage::Activation(EncoderActivation::Gelu), Stage::Linear(last)]);
    let layout = Layout::Tiled { tile: r.image, candidates: Candidates::up_to_square(r.image, 3) };
    Ok(VisionModel::new(r.encoder(patch, stages), layout).with_markers(&[["<|image_start|>", "<|image_end|>"]]))
}
