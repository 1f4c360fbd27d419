//! RWKV's channel mix.

use metal_attention_model::{ChannelMixSpec, ChannelMixWeights};

use super::Run;
use crate::layers::PreparedLinear;

impl Run<'_> {
    /// The channel mix of the normalised state `h`, added to `x`, or instead of what `result` was.
    pub(super) fn channel_mix(
        &mut self,
        spec: &ChannelMixSpec,
        w: &ChannelMixWeights<PreparedLinear>,
        to_stream: bool,
    ) {
        todo!("{spec:?} {} {to_stream}", w.out.name)
    }
}
