//! Weights of recurrent mixers and of the channel mix.

use metal_attention_model::{
    ChannelMixSpec, ChannelMixWeights, DeltaRuleSpec, DeltaRuleWeights, LowRankWeights, Mamba2Spec, Mamba2Weights,
    MambaDecay, MambaSpec, MambaWeights, NormKind, Rwkv6Spec, Rwkv6Weights, Rwkv7Spec, Rwkv7Weights, ShortConvSpec,
    ShortConvWeights,
};

use super::{CudaJoined, CudaLinear, CudaNorm, CudaVector, Loader};
use crate::CudaError;
use crate::stack::CudaStack;

/// A gated short convolution.
#[derive(Debug)]
pub(crate) struct CudaShortConv {
    pub(crate) spec: ShortConvSpec,
    pub(crate) input: CudaLinear,
    pub(crate) taps: CudaVector,
    pub(crate) out: CudaLinear,
}

/// A gated delta rule.
#[derive(Debug)]
pub(crate) struct CudaDeltaRule {
    pub(crate) spec: DeltaRuleSpec,
    /// Queries, keys, values, and what stands beside them: beta; before it the gate, and behind it the decay, where these come of
    /// one product each.
    pub(crate) inputs: CudaJoined,
    pub(crate) low_rank: Option<CudaDeltaLowRank>,
    pub(crate) taps: CudaVector,
    pub(crate) dt_bias: CudaVector,
    pub(crate) a: CudaVector,
    pub(crate) norm: CudaVector,
    pub(crate) out: CudaLinear,
}

/// Decay and gate that come of two products each: the first ones, and the second.
#[derive(Debug)]
pub(crate) struct CudaDeltaLowRank {
    pub(crate) before: [CudaLinear; 2],
    pub(crate) decay: CudaLinear,
    pub(crate) gate: CudaLinear,
}

/// Mamba.
#[derive(Debug)]
pub(crate) struct CudaMamba {
    pub(crate) spec: MambaSpec,
    pub(crate) input: CudaLinear,
    pub(crate) taps: CudaVector,
    pub(crate) conv_bias: Option<CudaVector>,
    pub(crate) select: CudaLinear,
    /// Of `dt`, `B` and `C`.
    pub(crate) norms: Option<[CudaVector; 3]>,
    /// Its bias is added where `dt` is read.
    pub(crate) dt: CudaLinear,
    /// `[width, d_state]`, or of each head.
    pub(crate) a: CudaVector,
    pub(crate) d: CudaVector,
    pub(crate) out: CudaLinear,
}

/// Mamba-2.
#[derive(Debug)]
pub(crate) struct CudaMamba2 {
    pub(crate) spec: Mamba2Spec,
    pub(crate) input: CudaLinear,
    pub(crate) taps: CudaVector,
    pub(crate) conv_bias: Option<CudaVector>,
    pub(crate) dt_bias: CudaVector,
    pub(crate) a: CudaVector,
    pub(crate) d: CudaVector,
    /// Of groups of the result, or of all of it.
    pub(crate) norm: Option<CudaNorm>,
    pub(crate) out: CudaLinear,
}

/// Two small matrices in the place of a large one.
#[derive(Debug)]
pub(crate) struct CudaLowRank {
    pub(crate) down: CudaLinear,
    pub(crate) up: CudaLinear,
}

/// RWKV-6's time mix.
#[derive(Debug)]
pub(crate) struct CudaRwkv6 {
    pub(crate) spec: Rwkv6Spec,
    pub(crate) lerp_x: CudaVector,
    pub(crate) lerps: CudaVector,
    pub(crate) mix_down: CudaLinear,
    /// Of each part.
    pub(crate) mix_up: CudaStack,
    pub(crate) decay: CudaLowRank,
    pub(crate) decay_bias: CudaVector,
    pub(crate) bonus: Option<CudaVector>,
    pub(crate) receptance: CudaLinear,
    pub(crate) key: CudaLinear,
    pub(crate) value: CudaLinear,
    pub(crate) gate: CudaLinear,
    pub(crate) norm: Option<[CudaVector; 2]>,
    pub(crate) out: CudaLinear,
}

/// RWKV-7's time mix.
#[derive(Debug)]
pub(crate) struct CudaRwkv7 {
    pub(crate) spec: Rwkv7Spec,
    pub(crate) lerps: CudaVector,
    pub(crate) receptance: CudaLinear,
    pub(crate) key: CudaLinear,
    pub(crate) value: CudaLinear,
    pub(crate) decay: CudaLowRank,
    pub(crate) decay_bias: CudaVector,
    pub(crate) rate: CudaLowRank,
    pub(crate) rate_bias: CudaVector,
    pub(crate) first_value: Option<(CudaLowRank, CudaVector)>,
    pub(crate) gate: Option<CudaLowRank>,
    pub(crate) removed: CudaVector,
    pub(crate) kept: CudaVector,
    pub(crate) bonus: CudaVector,
    pub(crate) norm: Option<[CudaVector; 2]>,
    pub(crate) out: CudaLinear,
}

/// A channel mix.
#[derive(Debug)]
pub(crate) struct CudaChannelMix {
    pub(crate) spec: ChannelMixSpec,
    /// Where its part of the layer's state begins, after the mixer's.
    pub(crate) state: usize,
    pub(crate) lerps: CudaVector,
    pub(crate) key: CudaLinear,
    pub(crate) value: CudaLinear,
    pub(crate) receptance: Option<CudaLinear>,
}

impl Loader<'_> {
    pub(super) fn short_conv(&mut self, spec: ShortConvSpec, w: &ShortConvWeights) -> Result<CudaShortConv, CudaError> {
        Ok(CudaShortConv {
            spec,
            input: self.linear(&w.input)?,
            taps: self.vector(&w.taps)?,
            out: self.linear(&w.out)?,
        })
    }

    pub(super) fn delta_rule(&mut self, spec: DeltaRuleSpec, w: &DeltaRuleWeights) -> Result<CudaDeltaRule, CudaError> {
        let (inputs, low_rank) = match &w.before {
            None => (self.joined(&[&w.q, &w.k, &w.v, &w.gate, &w.beta, &w.decay])?, None),
            Some([decay, gate]) => {
                let before = [self.linear(decay)?, self.linear(gate)?];
                let (decay, gate) = (self.linear(&w.decay)?, self.linear(&w.gate)?);
                (self.joined(&[&w.q, &w.k, &w.v, &w.beta])?, Some(CudaDeltaLowRank { before, decay, gate }))
            }
        };
        Ok(CudaDeltaRule {
            spec,
            inputs,
            low_rank,
            taps: self.vector(&w.taps)?,
            dt_bias: self.vector(&w.dt_bias)?,
            a: self.vector(&w.a)?,
            norm: self.vector(&w.norm)?,
            out: self.linear(&w.out)?,
        })
    }

    pub(super) fn mamba(&mut self, spec: MambaSpec, w: &MambaWeights) -> Result<CudaMamba, CudaError> {
        let norms = match &w.norms {
            Some([dt, b, c]) => Some([self.vector(dt)?, self.vector(b)?, self.vector(c)?]),
            None => None,
        };
        let a = match spec.decay {
            // A channel's side by side.
            MambaDecay::Channels => {
                let of_channel = |channel: usize| w.a.iter().skip(channel).step_by(spec.width).copied();
                self.vector(&(0..spec.width).flat_map(of_channel).collect::<Vec<_>>())?
            }
            MambaDecay::Heads(_) => self.vector(&w.a)?,
        };
        Ok(CudaMamba {
            spec,
            input: self.linear(&w.input)?,
            taps: self.vector(&w.taps)?,
            conv_bias: self.optional(w.conv_bias.as_deref())?,
            select: self.linear(&w.select)?,
            norms,
            dt: self.linear(&w.dt)?,
            a,
            d: self.vector(&w.d)?,
            out: self.linear(&w.out)?,
        })
    }

    pub(super) fn mamba2(&mut self, spec: Mamba2Spec, w: &Mamba2Weights) -> Result<CudaMamba2, CudaError> {
        let norm = match (spec.norm, &w.norm) {
            (Some(eps), Some(weight)) => {
                let (kind, n) = (NormKind::Rms, weight.len());
                Some(CudaNorm { kind, weight: self.vector(weight)?, bias: None, eps, n })
            }
            (None, _) | (_, None) => None,
        };
        Ok(CudaMamba2 {
            spec,
            input: self.linear(&w.input)?,
            taps: self.vector(&w.taps)?,
            conv_bias: self.optional(w.conv_bias.as_deref())?,
            dt_bias: self.vector(&w.dt_bias)?,
            a: self.vector(&w.a)?,
            d: self.vector(&w.d)?,
            norm,
            out: self.linear(&w.out)?,
        })
    }

    fn low_rank(&mut self, w: &LowRankWeights) -> Result<CudaLowRank, CudaError> {
        Ok(CudaLowRank { down: self.linear(&w.down)?, up: self.linear(&w.up)? })
    }

    fn pair(&self, pair: Option<&[Vec<f32>; 2]>) -> Result<Option<[CudaVector; 2]>, CudaError> {
        pair.map(|[weight, bias]| Ok([self.vector(weight)?, self.vector(bias)?])).transpose()
    }

    pub(super) fn rwkv6(&mut self, spec: Rwkv6Spec, w: &Rwkv6Weights) -> Result<CudaRwkv6, CudaError> {
        Ok(CudaRwkv6 {
            spec,
            lerp_x: self.vector(&w.lerp_x)?,
            lerps: self.vector(&w.lerps)?,
            mix_down: self.linear(&w.mix_down)?,
            mix_up: self.stack(&w.mix_up.iter().collect::<Vec<_>>())?,
            decay: self.low_rank(&w.decay)?,
            decay_bias: self.vector(&w.decay_bias)?,
            bonus: self.optional(w.bonus.as_deref())?,
            receptance: self.linear(&w.receptance)?,
            key: self.linear(&w.key)?,
            value: self.linear(&w.value)?,
            gate: self.linear(&w.gate)?,
            norm: self.pair(w.norm.as_ref())?,
            out: self.linear(&w.out)?,
        })
    }

    pub(super) fn rwkv7(&mut self, spec: Rwkv7Spec, w: &Rwkv7Weights) -> Result<CudaRwkv7, CudaError> {
        let first_value = match &w.first_value {
            Some((low_rank, bias)) => Some((self.low_rank(low_rank)?, self.vector(bias)?)),
            None => None,
        };
        Ok(CudaRwkv7 {
            spec,
            lerps: self.vector(&w.lerps)?,
            receptance: self.linear(&w.receptance)?,
            key: self.linear(&w.key)?,
            value: self.linear(&w.value)?,
            decay: self.low_rank(&w.decay)?,
            decay_bias: self.vector(&w.decay_bias)?,
            rate: self.low_rank(&w.rate)?,
            rate_bias: self.vector(&w.rate_bias)?,
            first_value,
            gate: w.gate.as_ref().map(|gate| self.low_rank(gate)).transpose()?,
            removed: self.vector(&w.removed)?,
            kept: self.vector(&w.kept)?,
            bonus: self.vector(&w.bonus)?,
            norm: self.pair(w.norm.as_ref())?,
            out: self.linear(&w.out)?,
        })
    }

    pub(super) fn channel_mix(
        &mut self,
        spec: ChannelMixSpec,
        w: &ChannelMixWeights,
        state: usize,
    ) -> Result<CudaChannelMix, CudaError> {
        Ok(CudaChannelMix {
            spec,
            state,
            lerps: self.vector(&w.lerps)?,
            key: self.linear(&w.key)?,
            value: self.linear(&w.value)?,
            receptance: w.receptance.as_ref().map(|receptance| self.linear(receptance)).transpose()?,
        })
    }
}
