//! Mixers that keep a recurrent state of a text in the place of keys and values, or beside them: what they are and their
//! weights, a file each.
//!
//! A state is a fixed number of F32 elements for each sequence and layer, zeros before the first token: the last inputs
//! of a convolution, and what else a recurrence carries on. [`LayerSpec::state_elements`] says
//! how many; how they are laid out is the affair of the backend's kernel. The states of all layers lie one after the
//! other (`StateLayout`), so that one number stands for the whole state of a text at one position.

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

/// Where the states of a model's layers lie in that of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateLayout {
    /// Of each layer; empty where it has none.
    of_layers: Vec<Range<usize>>,
}

impl StateLayout {
    /// That of `spec`.
    pub fn new(spec: &ModelSpec) -> Self {
        let mut end: usize = 0;
        let of_layer = |layer: &LayerSpec| {
            let start = end;
            end = end.saturating_add(layer.state_elements());
            start..end
        };
        Self { of_layers: spec.layers.iter().map(of_layer).collect() }
    }

    /// Elements of a text's state, over all layers.
    pub fn n_elements(&self) -> usize {
        self.of_layers.last().map_or(0, |range| range.end)
    }

    /// Those of layer `i`.
    pub fn of_layer(&self, i: usize) -> Range<usize> {
        self.of_layers[i].clone()
    }
}

/// Numbers of channels, `[width, n]`, the other way round, `[n, width]`: what stands for the same tap of all channels lies
/// side by side.
fn taps(of_channels: &[f32], n: usize) -> Vec<f32> {
    (0..n).flat_map(|tap| of_channels.iter().skip(tap).step_by(n)).copied().collect()
}
