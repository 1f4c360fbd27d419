//! Mixers that keep a recurrent state of a text in the place of keys and values.
//!
//! A state is a fixed number of F32 elements for each sequence and layer, zeros before the first token: the last inputs
//! of a convolution, and what else a recurrence carries on. [`Mixer::state_elements`](crate::Mixer::state_elements) says
//! how many; how they are laid out is the affair of the backend's kernel. The states of all layers lie one after the
//! other (`StateLayout`), so that one number stands for the whole state of a text at one position.

use std::ops::Range;

use crate::ModelSpec;

/// A gated short convolution (LFM2): `[b, c, x] = W_in h`, `y_t = c_t * sum_j taps[j] * (b x)_(t - n_tap + 1 + j)`, each
/// channel by itself, and then `W_out y`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConvSpec {
    /// Channels.
    pub width: usize,
    /// Tokens that a result sees, its own included; at least 2.
    pub n_tap: usize,
}

impl ShortConvSpec {
    /// Elements of the state: the last inputs of the convolution, oldest first, `[n_tap - 1, width]`.
    pub fn state_elements(&self) -> usize {
        (self.n_tap - 1) * self.width
    }
}

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
        let of_layer = |layer: &crate::LayerSpec| {
            let start = end;
            end = end.saturating_add(layer.mixer.state_elements());
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
