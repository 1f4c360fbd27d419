//! GLM-Edge-V: SigLIP, whose patches are merged by a convolution, and a gated projector, with rows around the picture.

use metal_attention_pictures::Layout;

use super::llava::tower;
use crate::vision::{
    EncoderActivation, EncoderFeedForward, EncoderReader, Interpolation, MergeOrder, Stage, VisionModel,
};
use crate::{ModelError, NormKind};

/// Patches that are merged, along each side.
const SIDE: usize = 2;

pub(super) fn adapter(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let mut encoder = tower(r, Interpolation::None, r.n_block, &[])?;
    let stages = &mut encoder.stages;
    if let Some(norm) = r.opt_norm("v.post_ln", r.width, NormKind::Layer, r.eps)? {
        stages.push(Stage::Norm(norm));
    }
    let n = r.n_embd;
    let linear =
        |part: &str, n_in: usize, n_out: Option<usize>| r.linear(&format!("adapter.linear.{part}"), n_in, n_out);
    let convolution = r.kernel_of("adapter.conv", SIDE * SIDE * r.width)?;
    let merged = convolution.n_out;
    stages.extend([Stage::Merge { side: SIDE, order: MergeOrder::ValueFirst }, Stage::Linear(convolution)]);
    stages.push(Stage::Linear(linear("linear", merged, Some(n))?));
    stages.push(Stage::Norm(r.norm("adapter.linear.norm1", n, NormKind::Layer, r.eps)?));
    stages.push(Stage::Activation(EncoderActivation::Gelu));
    let gate = linear("gate", n, None)?;
    let up = linear("dense_h_to_4h", n, Some(gate.n_out))?;
    let down = linear("dense_4h_to_h", gate.n_out, Some(n))?;
    stages.push(Stage::FeedForward(EncoderFeedForward::Gated { gate, up, activation: EncoderActivation::Silu, down }));
    stages.push(Stage::Others { before: r.values("adapter.boi", n)?, after: r.values("adapter.eoi", n)? });
    Ok(VisionModel::new(encoder, Layout::Square { side: r.image }))
}
