//! RWKV's channel mix, a feed-forward that sees the token before (arXiv 2404.05892, 2503.14456).

use crate::Linear;
use crate::tensors::{Presence, WeightSource};

/// A feed-forward whose input is mixed with that of the token before. With the normalised inputs `x_t` and `x_(t-1)`,
/// `x_m = x_t + (x_(t-1) - x_t) lerp_m` for `k` and `r`: `y = V max(K x_k, 0)^2`, times `sigmoid(R x_r)` where gated.
///
/// The state: `x` of the last token, `[n_embd]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChannelMixSpec {
    /// Channels of the input.
    pub n_embd: usize,
    /// Channels between the matrices.
    pub width: usize,
    /// Whether there is a gate (RWKV-6).
    pub gated: bool,
}

impl ChannelMixSpec {
    /// Inputs that the token shift makes of one.
    pub fn n_mix(&self) -> usize {
        1 + usize::from(self.gated)
    }

    /// Elements of the state.
    pub fn state_elements(&self) -> usize {
        self.n_embd
    }
}

/// Weights of a channel mix.
#[derive(Debug, Clone)]
pub struct ChannelMixWeights<L = Linear> {
    /// How far each input goes towards that of the token before: of `k`, and of `r` where gated, `[n_mix, n_embd]`.
    pub lerps: Vec<f32>,
    /// `K`, `[width, n_embd]`.
    pub key: L,
    /// `V`, `[n_embd, width]`.
    pub value: L,
    /// `R`, `[n_embd, n_embd]`, where gated.
    pub receptance: Option<L>,
}

impl<L> ChannelMixWeights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<ChannelMixWeights<M>, E> {
        Ok(ChannelMixWeights {
            lerps: self.lerps.clone(),
            key: f(&self.key)?,
            value: f(&self.value)?,
            receptance: self.receptance.as_ref().map(&mut *f).transpose()?,
        })
    }
}

/// The weights whose names begin with `p`, from `source`.
pub(crate) fn build<S: WeightSource>(
    source: &mut S,
    &ChannelMixSpec { n_embd, width, gated }: &ChannelMixSpec,
    p: &str,
) -> Result<ChannelMixWeights<S::Linear>, S::Error> {
    let name = |part: &str| format!("{p}channel_mix_{part}");
    let mut lerps = source.vector(&name("lerp_k.weight"), n_embd, Presence::Required)?.unwrap_or_default();
    if gated {
        lerps.extend(source.vector(&name("lerp_r.weight"), n_embd, Presence::Required)?.unwrap_or_default());
    }
    let key = source.required(&name("key"), [n_embd, width], Presence::None)?;
    let value = source.required(&name("value"), [width, n_embd], Presence::None)?;
    let receptance =
        if gated { Some(source.required(&name("receptance"), [n_embd, n_embd], Presence::None)?) } else { None };
    Ok(ChannelMixWeights { lerps, key, value, receptance })
}
