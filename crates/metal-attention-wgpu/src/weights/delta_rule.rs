//! Weights of a gated delta rule.

use metal_attention_model::DeltaRuleWeights;
use wgpu::Buffer;

use super::{GpuLinear, concat};
use crate::{Arena, GpuDevice, GpuError};

/// Weights of a gated delta rule.
#[derive(Debug)]
pub(crate) struct GpuDeltaRule {
    /// Queries, keys, values and the gate of the result, one below the other; then what `beta` and the decay come of, unless
    /// [`gates`](Self::gates) has them.
    pub(crate) inputs: GpuLinear,
    /// What `beta` and the decay come of, where files have them in another type: matrix units may not take that.
    pub(crate) gates: Option<GpuLinear>,
    /// F32 `[n_tap, n_channels]`, the oldest token's first.
    pub(crate) taps: Buffer,
    /// F32 `[n_head_v]`
    pub(crate) dt_bias: Buffer,
    /// F32 `[n_head_v]`
    pub(crate) a: Buffer,
    /// F32 `[value_dim]`
    pub(crate) norm: Buffer,
    pub(crate) out: GpuLinear,
}

impl GpuDeltaRule {
    pub(super) fn new(gpu: &GpuDevice, w: &DeltaRuleWeights, arena: &mut Arena) -> Result<Self, GpuError> {
        let ty = w.gate.weight.ty();
        let together = w.beta.weight.ty() == ty && w.decay.weight.ty() == ty;
        let mut inputs = vec![&w.q, &w.k, &w.v, &w.gate];
        if together {
            inputs.extend([&w.beta, &w.decay]);
        }
        let inputs = concat(gpu, "the inputs of a delta rule", &inputs, arena)?;
        let gates = (!together).then(|| concat(gpu, "the gates of a delta rule", &[&w.beta, &w.decay], arena));
        Ok(Self {
            inputs,
            gates: gates.transpose()?,
            taps: gpu.upload("the taps of a convolution", &w.taps)?,
            dt_bias: gpu.upload("the bias of a decay", &w.dt_bias)?,
            a: gpu.upload("the rates of a decay", &w.a)?,
            norm: gpu.upload("a norm", &w.norm)?,
            out: concat(gpu, "the delta rule's output matrix", &[&w.out], arena)?,
        })
    }
}
