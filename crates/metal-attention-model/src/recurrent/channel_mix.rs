//! RWKV's channel mix: a feed-forward whose input includes the previous token's (arXiv 2404.05892, 2503.14456).

use crate::Linear;
use crate::tensors::{Presence, WeightSource};

/// A feed-forward whose input is interpolated with that of the previous token. With the normalised inputs `x_t` and
/// `x_(t-1)`, `x_m = x_t + (x_(t-1) - x_t) lerp_m` for `k` and `r`: `y = V max(K x_k, 0)^2`, multiplied by
/// `sigmoid(R x_r)` if gated.
///
/// The recurrent state is `x` of the last token, `[n_embd]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChannelMixSpec {
    /// Elements of the input.
    pub n_embd: usize,
    /// Elements between the two matrices.
    pub width: usize,
    /// Whether there is a gate (RWKV-6).
    pub gated: bool,
}

impl ChannelMixSpec {
    /// Number of interpolated inputs: `k`, and `r` if gated.
    pub fn n_mix(&self) -> usize {
        1 + usize::from(self.gated)
    }

    /// F32 elements of the state.
    pub fn state_elements(&self) -> usize {
        self.n_embd
    }
}

/// The weights of a channel mix.
#[derive(Debug, Clone)]
pub struct ChannelMixWeights<L = Linear> {
    /// The specification.
    pub spec: ChannelMixSpec,
    /// Interpolation factors towards the previous token's input: of `k`, and of `r` if gated, `[n_mix, n_embd]`.
    pub lerps: Vec<f32>,
    /// `K`, `[width, n_embd]`.
    pub key: L,
    /// `V`, `[n_embd, width]`.
    pub value: L,
    /// `R`, `[n_embd, n_embd]`, if gated.
    pub receptance: Option<L>,
}

impl<L> ChannelMixWeights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<ChannelMixWeights<M>, E> {
        Ok(ChannelMixWeights {
            spec: self.spec,
            lerps: self.lerps.clone(),
            key: f(&self.key)?,
            value: f(&self.value)?,
            receptance: self.receptance.as_ref().map(&mut *f).transpose()?,
        })
    }
}

/// The weights with the name prefix `p`.
pub(crate) fn build<S: WeightSource>(
    source: &mut S,
    spec: &ChannelMixSpec,
    p: &str,
) -> Result<ChannelMixWeights<S::Linear>, S::Error> {
    let ChannelMixSpec { n_embd, width, gated } = *spec;
    let name = |part: &str| format!("{p}channel_mix_{part}");
    let mut lerps = source.vector(&name("lerp_k.weight"), n_embd, Presence::Required)?.unwrap_or_default();
    if gated {
        lerps.extend(source.vector(&name("lerp_r.weight"), n_embd, Presence::Required)?.unwrap_or_default());
    }
    let key = source.required(&name("key"), [n_embd, width], Presence::None)?;
    let value = source.required(&name("value"), [width, n_embd], Presence::None)?;
    let receptance =
        if gated { Some(source.required(&name("receptance"), [n_embd, n_embd], Presence::None)?) } else { None };
    Ok(ChannelMixWeights { spec: *spec, lerps, key, value, receptance })
}
