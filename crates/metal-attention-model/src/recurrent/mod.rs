//! Mixers with a recurrent state, instead of keys and values or beside them: their specs and weights, one file each.
//!
//! A recurrent state is a fixed number of F32 elements for each sequence and layer, zeros before the first token: the
//! last inputs of a convolution, and what the recurrence carries on. [`LayerSpec::state_elements`] is their number;
//! their order is up to the backend's kernel. The states of all layers are concatenated (`StateLayout`), so that one
//! slot holds the whole state of a sequence at one position.

pub(crate) mod channel_mix;
pub(crate) mod delta_rule;
mod low_rank;
pub(crate) mod mamba;
pub(crate) mod mamba2;
pub(crate) mod rwkv6;
pub(crate) mod rwkv7;
pub(crate) mod short_conv;

use std::ops::Range;

use crate::{LayerSpec, ModelSpec};
pub use channel_mix::{ChannelMixSpec, ChannelMixWeights};
pub use delta_rule::{DeltaGates, DeltaRuleSpec, DeltaRuleWeights, KeySharing};
pub use low_rank::LowRankWeights;
pub use mamba::{MambaDecay, MambaNorms, MambaSelection, MambaSpec, MambaWeights};
pub use mamba2::{Mamba2Spec, Mamba2Weights};
pub use rwkv6::{RWKV6_MIXES, Rwkv6Spec, Rwkv6Weights};
pub use rwkv7::{Rwkv7Spec, Rwkv7Weights};
pub use short_conv::{ShortConvSpec, ShortConvWeights};

/// Where each layer's state lies in a sequence's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateLayout {
    /// Range of each layer; empty if it has no state.
    ranges: Vec<Range<usize>>,
}

impl StateLayout {
    /// The layout of `spec`.
    pub fn new(spec: &ModelSpec) -> Self {
        let mut end: usize = 0;
        let of_layer = |layer: &LayerSpec| {
            let start = end;
            end = end.saturating_add(layer.state_elements());
            start..end
        };
        Self { ranges: spec.layers.iter().map(of_layer).collect() }
    }

    /// F32 elements of a sequence's state, over all layers.
    pub fn n_elements(&self) -> usize {
        self.ranges.last().map_or(0, |range| range.end)
    }

    /// The range of layer `i`.
    pub fn of_layer(&self, i: usize) -> Range<usize> {
        self.ranges[i].clone()
    }
}

/// The transpose of `[width, n]`: values of the same tap of all channels are adjacent.
fn taps(of_channels: &[f32], n: usize) -> Vec<f32> {
    (0..n).flat_map(|tap| of_channels.iter().skip(tap).step_by(n)).copied().collect()
}
