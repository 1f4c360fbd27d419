//! Weights of the recurrent mixers (short convolution, delta rule, Mamba, RWKV) and of RWKV's channel mix on the device.
//! Vectors are F32.

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
    /// Its sizes.
    pub(crate) spec: ShortConvSpec,
    /// Two gates and the input, `[3 * width, n_embd]`.
    pub(crate) input: CudaLinear,
    /// Coefficients of the convolution, those of the oldest token first, `[n_tap, width]`.
    pub(crate) taps: CudaVector,
    /// Output, `[n_embd, width]`.
    pub(crate) out: CudaLinear,
}

/// A gated delta rule.
#[derive(Debug)]
pub(crate) struct CudaDeltaRule {
    /// Its sizes.
    pub(crate) spec: DeltaRuleSpec,
    /// Queries, keys, values and, without `low_rank`, the gate; then beta and, without `low_rank`, the decay; one below the
    /// other.
    pub(crate) inputs: CudaJoined,
    /// Decay and gate, where these are low-rank products.
    pub(crate) low_rank: Option<CudaDeltaRuleGates>,
    /// Coefficients of the convolution, those of the oldest token first, `[n_tap, n_channels]`.
    pub(crate) taps: CudaVector,
    /// Bias of the decay, `[n_decays]`.
    pub(crate) dt_bias: CudaVector,
    /// Rate of the decay, negative, `[n_head_v]`.
    pub(crate) a: CudaVector,
    /// Weights of the norm of each head's result, `[value_dim]`.
    pub(crate) norm: CudaVector,
    /// Output, `[n_embd, n_values]`.
    pub(crate) out: CudaLinear,
}

/// Decay and gate of a delta rule as low-rank products.
#[derive(Debug)]
pub(crate) struct CudaDeltaRuleGates {
    /// The first products of decay and gate, `[rank, n_embd]` each.
    pub(crate) down: [CudaLinear; 2],
    /// The second product of the decay, `[n_decays, rank]`.
    pub(crate) decay: CudaLinear,
    /// The second product of the gate, `[n_values, rank]`.
    pub(crate) gate: CudaLinear,
}

/// A Mamba mixer.
#[derive(Debug)]
pub(crate) struct CudaMamba {
    /// Its sizes.
    pub(crate) spec: MambaSpec,
    /// `x` and `z` one below the other, `[2 * width, n_embd]`; with decays of heads, `z` and `x` of each head.
    pub(crate) input: CudaLinear,
    /// Coefficients of the convolution, those of the oldest token first, `[n_tap, width]`.
    pub(crate) taps: CudaVector,
    /// Bias of the convolution, `[width]`.
    pub(crate) conv_bias: Option<CudaVector>,
    /// The selection `W_x`, `[dt_rank + 2 * d_state, width]`.
    pub(crate) select: CudaLinear,
    /// Weights of the norms of `dt`, `B` and `C`.
    pub(crate) norms: Option<[CudaVector; 3]>,
    /// `W_dt`, `[n_dt, dt_rank]`; the scan adds its bias, not the product.
    pub(crate) dt: CudaLinear,
    /// `A`, negative, `[width, d_state]`, or `[n_head]`.
    pub(crate) a: CudaVector,
    /// `D`, `[n_dt]`.
    pub(crate) d: CudaVector,
    /// Output, `[n_embd, width]`.
    pub(crate) out: CudaLinear,
}

/// A Mamba-2 mixer.
#[derive(Debug)]
pub(crate) struct CudaMamba2 {
    /// Its sizes.
    pub(crate) spec: Mamba2Spec,
    /// `z`, `x`, `B`, `C` and `dt`, one below the other, `[input_width, n_embd]`.
    pub(crate) input: CudaLinear,
    /// Coefficients of the convolution, those of the oldest token first, `[n_tap, conv_width]`.
    pub(crate) taps: CudaVector,
    /// Bias of the convolution, `[conv_width]`.
    pub(crate) conv_bias: Option<CudaVector>,
    /// Bias of `dt`, `[n_head]`.
    pub(crate) dt_bias: CudaVector,
    /// `A`, negative, `[n_head]`.
    pub(crate) a: CudaVector,
    /// `D`, `[n_head]`.
    pub(crate) d: CudaVector,
    /// Norm of the result, over groups or the whole row.
    pub(crate) norm: Option<CudaNorm>,
    /// Output, `[n_embd, width]`.
    pub(crate) out: CudaLinear,
}

/// A low-rank product, `up(down(x))`.
#[derive(Debug)]
pub(crate) struct CudaLowRank {
    /// `[rank, n_in]`.
    pub(crate) down: CudaLinear,
    /// `[n_out, rank]`.
    pub(crate) up: CudaLinear,
}

/// A time mix of RWKV-6. The mixed inputs are those of decay, keys, values, receptance and gate, in that order.
#[derive(Debug)]
pub(crate) struct CudaRwkv6 {
    /// Its sizes.
    pub(crate) spec: Rwkv6Spec,
    /// Interpolation weights of the input of `mix_down`, `[width]`.
    pub(crate) lerp_x: CudaVector,
    /// Interpolation weights of the mixed inputs, `[5, width]`.
    pub(crate) lerps: CudaVector,
    /// The first product of what tokens add to `lerps`, `[5 * mix_rank, n_embd]`.
    pub(crate) mix_down: CudaLinear,
    /// Its second product, `[5, width, mix_rank]`.
    pub(crate) mix_up: CudaStack,
    /// The decay.
    pub(crate) decay: CudaLowRank,
    /// `w0`, `[width]`.
    pub(crate) decay_bias: CudaVector,
    /// `u`, `[n_head, head_dim]`.
    pub(crate) bonus: Option<CudaVector>,
    /// Receptance, `[width, n_embd]`.
    pub(crate) receptance: CudaLinear,
    /// Keys, `[n_head_kv * head_dim, n_embd]`.
    pub(crate) key: CudaLinear,
    /// Values, of the same shape.
    pub(crate) value: CudaLinear,
    /// Gate, `[width, n_embd]`.
    pub(crate) gate: CudaLinear,
    /// Weight and bias of the norm of each head's result, `[width]` each.
    pub(crate) norm: Option<[CudaVector; 2]>,
    /// Output, `[n_embd, width]`.
    pub(crate) out: CudaLinear,
}

/// A time mix of RWKV-7. The mixed inputs are those of receptance, decay, keys, values, rate and, where there is one, gate, in
/// that order.
#[derive(Debug)]
pub(crate) struct CudaRwkv7 {
    /// Its sizes.
    pub(crate) spec: Rwkv7Spec,
    /// Interpolation weights of the mixed inputs, `[n_mix, width]`.
    pub(crate) lerps: CudaVector,
    /// Receptance, `[width, n_embd]`.
    pub(crate) receptance: CudaLinear,
    /// Keys, `[width, n_embd]`.
    pub(crate) key: CudaLinear,
    /// Values, `[width, n_embd]`.
    pub(crate) value: CudaLinear,
    /// The decay.
    pub(crate) decay: CudaLowRank,
    /// `w0`, `[width]`.
    pub(crate) decay_bias: CudaVector,
    /// The in-context learning rate.
    pub(crate) rate: CudaLowRank,
    /// `a0`, `[width]`.
    pub(crate) rate_bias: CudaVector,
    /// The share of the first layer's values, with its bias `v0` `[width]`; `None` in the first layer.
    pub(crate) first_value: Option<(CudaLowRank, CudaVector)>,
    /// The gate, where there is one.
    pub(crate) gate: Option<CudaLowRank>,
    /// `k_k`, `[width]`.
    pub(crate) removed: CudaVector,
    /// `k_a`, `[width]`.
    pub(crate) kept: CudaVector,
    /// `r_k`, `[width]`.
    pub(crate) bonus: CudaVector,
    /// Weight and bias of the norm of each head's result, `[width]` each.
    pub(crate) norm: Option<[CudaVector; 2]>,
    /// Output, `[n_embd, width]`.
    pub(crate) out: CudaLinear,
}

/// A channel mix of RWKV.
#[derive(Debug)]
pub(crate) struct CudaChannelMix {
    /// Its sizes.
    pub(crate) spec: ChannelMixSpec,
    /// The element of the layer's state at which the channel mix's part begins, behind the mixer's.
    pub(crate) state: usize,
    /// Interpolation weights of the mixed inputs (keys, then receptance), `[n_mix, n_embd]`.
    pub(crate) lerps: CudaVector,
    /// Keys, `[width, n_embd]`.
    pub(crate) key: CudaLinear,
    /// Values, `[n_embd, width]`.
    pub(crate) value: CudaLinear,
    /// Receptance, `[n_embd, n_embd]`, where there is one.
    pub(crate) receptance: Option<CudaLinear>,
}

impl Loader<'_> {
    /// Uploads the weights of a short convolution.
    pub(super) fn gated_convolution(&mut self, w: &ShortConvWeights) -> Result<CudaShortConv, CudaError> {
        Ok(CudaShortConv {
            spec: w.spec,
            input: self.linear(&w.input)?,
            taps: self.vector(&w.taps)?,
            out: self.linear(&w.out)?,
        })
    }

    /// Uploads the weights of a delta rule.
    pub(super) fn delta_rule_of(&mut self, w: &DeltaRuleWeights) -> Result<CudaDeltaRule, CudaError> {
        let (inputs, low_rank) = match &w.before {
            None => (self.joined(&[&w.q, &w.k, &w.v, &w.gate, &w.beta, &w.decay])?, None),
            Some([decay, gate]) => {
                let before = [self.linear(decay)?, self.linear(gate)?];
                let (decay, gate) = (self.linear(&w.decay)?, self.linear(&w.gate)?);
                (self.joined(&[&w.q, &w.k, &w.v, &w.beta])?, Some(CudaDeltaRuleGates { down: before, decay, gate }))
            }
        };
        Ok(CudaDeltaRule {
            spec: w.spec,
            inputs,
            low_rank,
            taps: self.vector(&w.taps)?,
            dt_bias: self.vector(&w.dt_bias)?,
            a: self.vector(&w.a)?,
            norm: self.vector(&w.norm)?,
            out: self.linear(&w.out)?,
        })
    }

    /// Uploads the weights of a Mamba mixer.
    pub(super) fn mamba_of(&mut self, w: &MambaWeights) -> Result<CudaMamba, CudaError> {
        let norms = match &w.norms {
            Some([dt, b, c]) => Some([self.vector(dt)?, self.vector(b)?, self.vector(c)?]),
            None => None,
        };
        let a = match w.spec.decay {
            // Transposed to `[width, d_state]`, so that the numbers of a channel are adjacent.
            MambaDecay::Channels => {
                let channel_values = |channel: usize| w.a.iter().skip(channel).step_by(w.spec.width).copied();
                self.vector(&(0..w.spec.width).flat_map(channel_values).collect::<Vec<_>>())?
            }
            MambaDecay::Heads(_) => self.vector(&w.a)?,
        };
        Ok(CudaMamba {
            spec: w.spec,
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

    /// Uploads the weights of a Mamba-2 mixer.
    pub(super) fn mamba2_of(&mut self, w: &Mamba2Weights) -> Result<CudaMamba2, CudaError> {
        let norm = match (w.spec.norm, &w.norm) {
            (Some(eps), Some(weight)) => {
                let (kind, n) = (NormKind::Rms, weight.len());
                Some(CudaNorm { kind, weight: self.vector(weight)?, bias: None, eps, n })
            }
            (None, _) | (_, None) => None,
        };
        Ok(CudaMamba2 {
            spec: w.spec,
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

    /// Uploads the two matrices of a low-rank product.
    fn low_rank(&mut self, w: &LowRankWeights) -> Result<CudaLowRank, CudaError> {
        Ok(CudaLowRank { down: self.linear(&w.down)?, up: self.linear(&w.up)? })
    }

    /// Uploads weight and bias of a norm, if there is one.
    fn pair(&self, pair: Option<&[Vec<f32>; 2]>) -> Result<Option<[CudaVector; 2]>, CudaError> {
        pair.map(|[weight, bias]| Ok([self.vector(weight)?, self.vector(bias)?])).transpose()
    }

    /// Uploads the weights of a time mix of RWKV-6.
    pub(super) fn rwkv6_of(&mut self, w: &Rwkv6Weights) -> Result<CudaRwkv6, CudaError> {
        Ok(CudaRwkv6 {
            spec: w.spec,
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

    /// Uploads the weights of a time mix of RWKV-7.
    pub(super) fn rwkv7_of(&mut self, w: &Rwkv7Weights) -> Result<CudaRwkv7, CudaError> {
        let first_value = match &w.first_value {
            Some((low_rank, bias)) => Some((self.low_rank(low_rank)?, self.vector(bias)?)),
            None => None,
        };
        Ok(CudaRwkv7 {
            spec: w.spec,
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

    /// Uploads the weights of a channel mix; `state` is the first element of its part of the layer's state.
    pub(super) fn channel_mix_at(&mut self, w: &ChannelMixWeights, state: usize) -> Result<CudaChannelMix, CudaError> {
        Ok(CudaChannelMix {
            spec: w.spec,
            state,
            lerps: self.vector(&w.lerps)?,
            key: self.linear(&w.key)?,
            value: self.linear(&w.value)?,
            receptance: w.receptance.as_ref().map(|receptance| self.linear(receptance)).transpose()?,
        })
    }
}
