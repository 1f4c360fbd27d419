//! Hunyuan-VL and `HunyuanOCR` (arXiv 2511.19575): a tower for pictures of any size, whose patches are merged by convolutions, with rows
//! for the end of each row of patches and around the picture.

use metal_attention_pictures::{Filter, Layout, PixelRange};

use crate::vision::{EncoderActivation, EncoderReader, Interpolation, MergeOrder, Stage, VisionModel};
use crate::{ModelError, NormKind};

pub(super) fn hunyuanvl(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let side = r.merge_side("vision.spatial_merge_size", 2)?;
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::positions(r.positions(0, Interpolation::Lengthened)?)];
    stages.extend(r.blocks(r.n_block, NormKind::Layer, |_, block| block.set_activation(EncoderActivation::Gelu))?);
    if let Some(norm) = r.opt_norm("v.post_ln", r.width, NormKind::Layer, r.eps)? {
        stages.push(Stage::Norm(norm));
    }
    stages.push(Stage::Norm(r.norm("mm.pre_norm", r.width, NormKind::Rms, r.eps)?));
    stages.push(Stage::Merge { side, order: MergeOrder::ValueFirst });
    let first = r.kernel_of("mm.0", side * side * r.width)?;
    let second = r.kernel_of("mm.2", first.n_out)?;
    let width = second.n_out;
    stages.extend([Stage::Linear(first), Stage::Activation(EncoderActivation::Gelu), Stage::Linear(second)]);
    stages.push(Stage::RowBreaks { row: r.values("v.image_newline", width)?, after_last: true });
    stages.push(Stage::Linear(r.linear("mm.model.fc", width, Some(r.n_embd))?));
    let row = |name: &str| r.values(name, r.n_embd);
    stages.push(Stage::Others { before: row("mm.image_begin")?, after: row("mm.image_end")? });
    stages.push(Stage::Norm(r.norm("mm.post_norm", r.n_embd, NormKind::Rms, r.eps)?));
    let multiple = r.patch * side;
    let pixels = r.pixels(PixelRange::of_tokens(256, 16384, multiple))?;
    let layout = Layout::Stretched { multiple, pixels };
    let mut model = VisionModel::new(r.encoder(patch, stages), layout).with_filter(Filter::Lanczos);
    model.has_grid_positions = false;
    Ok(model.with_markers(&[[
        "<\u{ff5c}hy_place\u{2581}holder\u{2581}no\u{2581}100\u{ff5c}>",
        "<\u{ff5c}hy_place\u{2581}holder\u{2581}no\u{2581}101\u{ff5c}>",
    ]]))
}
