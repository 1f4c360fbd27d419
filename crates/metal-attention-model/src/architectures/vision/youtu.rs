//! Youtu-VL (arXiv 2601.19798): SigLIP 2 for pictures of any size with windows in most blocks, a rotation, and patches merged at the
//! end.

use metal_attention_pictures::{Filter, Layout, PixelRange};

use super::two_layers;
use crate::vision::{
    Angles, EncoderActivation, EncoderReader, MergeOrder, PatchOrder, PatchSpec, RowOrder, Stage, VisionModel,
};
use crate::{ModelError, NormKind};

/// Patches of the side of a merge.
const SIDE: usize = 2;
/// Epsilon of the projector's norm.
const EPS: f32 = 1e-6;
/// Least and most tokens of a picture.
const TOKENS: [usize; 2] = [1, 62_500];

pub(super) fn youtuvl(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let pixels = r.keys.positive("vision.window_size")?;
    let window = pixels / r.patch / SIDE * SIDE;
    r.keys.check("vision.window_size", pixels, window > 0, "must be at least two patches")?;
    // The blocks in which all patches attend to each other; without any there are no windows.
    let global = r.keys.opt_sizes("vision.wa_layer_indexes")?.unwrap_or_default();
    let angles = Angles::of_halves(r.head_dim());
    let patch = PatchSpec { side: r.patch, order: PatchOrder::PixelFirst };
    let kernel = r.patch_kernel("v.patch_embd", 3 * r.patch * r.patch, r.width)?;
    let norm = |name: &str| Ok::<_, ModelError>(r.opt_norm(name, r.width, NormKind::Layer, r.eps)?.map(Stage::Norm));
    let mut stages = vec![Stage::Linear(kernel)];
    stages.extend(norm("v.pre_ln")?);
    stages.push(Stage::Reorder(RowOrder::Windows { window: window as u32, block: SIDE as u32 }));
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |i, block| {
        block.attention.rope = Some(angles.clone());
        block.attention.window = (!global.is_empty() && !global.contains(&i)).then_some(window);
    })?);
    stages.extend(norm("v.post_ln")?);
    stages.push(Stage::Norm(r.norm("mm.input_norm", r.width, NormKind::Rms, EPS)?));
    stages.push(Stage::Merge { side: SIDE, order: MergeOrder::PatchFirst });
    stages.extend(two_layers(r, ["mm.0", "mm.2"], SIDE * SIDE * r.width, EncoderActivation::Gelu)?);
    let multiple = r.patch * SIDE;
    let pixels = PixelRange::of_tokens(TOKENS[0], TOKENS[1], multiple);
    let model = VisionModel::new(r.encoder(patch, stages), Layout::RoundedUp { multiple, pixels });
    Ok(model.with_filter(Filter::Bilinear).with_markers(&[["<|vision_start|>", "<|vision_end|>"]]))
}
