//! `CogVLM` (arXiv 2311.03079): EVA-CLIP, whose blocks norm the results of attention and feed-forward, and a gated projector.

use metal_attention_pictures::Layout;

use super::class_token;
use super::llava::MEAN_COLOUR;
use crate::vision::{Block, EncoderActivation, EncoderFeedForward, EncoderReader, Interpolation, Stage, VisionModel};
use crate::{ModelError, NormKind};

/// Epsilon of the projector's norm.
const EPS: f32 = 1e-5;

pub(super) fn cogvlm(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let (patch, kernel) = r.patches()?;
    let mut stages = vec![kernel, Stage::positions(r.positions(1, Interpolation::None)?), class_token(r)?];
    for i in 0..r.n_block {
        let block = r.block(i, NormKind::Layer)?;
        let Block { attention_norm, attention, feed_forward_norm, feed_forward, .. } = block;
        let attention = vec![Stage::Attention(Box::new(attention)), Stage::Norm(attention_norm)];
        let feed_forward = vec![Stage::FeedForward(feed_forward), Stage::Norm(feed_forward_norm)];
        stages.extend([attention, feed_forward].map(|added| Stage::Sum([Vec::new(), added])));
    }
    stages.push(Stage::DropOthers);
    stages.push(Stage::Linear(r.linear("mm.model.fc", r.width, Some(r.n_embd))?));
    stages.push(Stage::Norm(r.norm("mm.post_fc_norm", r.n_embd, NormKind::Layer, EPS)?));
    stages.push(Stage::Activation(EncoderActivation::Gelu));
    let gate = r.linear("mm.gate", r.n_embd, None)?;
    let up = r.linear("mm.up", r.n_embd, Some(gate.n_out))?;
    let down = r.linear("mm.down", gate.n_out, Some(r.n_embd))?;
    stages.push(Stage::FeedForward(EncoderFeedForward::Gated { gate, up, activation: EncoderActivation::Silu, down }));
    let row = |name: &str| r.values(name, r.n_embd);
    stages.push(Stage::Others { before: row("v.boi")?, after: row("v.eoi")? });
    Ok(VisionModel::new(r.encoder(patch, stages), Layout::Square { side: r.image }).with_fill(MEAN_COLOUR))
}
