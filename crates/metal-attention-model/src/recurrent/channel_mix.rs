//! RWKV's channel mix, a feed-forward that sees the token before (arXiv 2404.05892).

use crate::Linear;
use crate::tensors::{Need, Source};

/// A feed-forward whose input is mixed with that of the token before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChannelMixSpec {
    /// Channels.
    pub width: usize,
}

impl ChannelMixSpec {
    /// Elements of the state.
    pub fn state_elements(&self) -> usize {
        self.width
    }
}

/// Weights of such a part.
#[derive(Debug, Clone)]
pub struct ChannelMixWeights<L = Linear> {
    /// Output, `[n_embd, width]`.
    pub out: L,
}

impl<L> ChannelMixWeights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<ChannelMixWeights<M>, E> {
        Ok(ChannelMixWeights { out: f(&self.out)? })
    }
}

/// The weights whose names begin with `p`, from `source`.
pub(crate) fn build<S: Source>(
    source: &mut S,
    spec: &ChannelMixSpec,
    p: &str,
    n_embd: usize,
) -> Result<ChannelMixWeights<S::Linear>, S::Error> {
    Ok(ChannelMixWeights { out: source.required(&format!("{p}channel_mix_value"), [spec.width, n_embd], Need::None)? })
}
