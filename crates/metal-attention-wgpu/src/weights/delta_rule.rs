//! Weights of a gated delta rule.

use metal_attention_model::DeltaRuleWeights;
use wgpu::Buffer;

use super::rwkv::transposed;
use super::{Uploads, WgpuLinear, concat};
use crate::{WgpuDevice, WgpuError};

/// Weights of a gated delta rule.
#[derive(Debug)]
pub(crate) struct WgpuDeltaRule {
    /// Queries, keys and values, then, where [`low_rank`](Self::low_rank) has none, the gate of the result, one below the other;
    /// then what `beta` and the decay come of, unless others have them.
    pub(crate) inputs: WgpuLinear,
    /// What `beta` and, without low-rank products, the decay come of, where files have them in another type: matrix units may
    /// not take that.
    pub(crate) gates: Option<WgpuLinear>,
    /// What decay and gate come of, where they are low-rank products.
    pub(crate) low_rank: Option<WgpuLowRank>,
    /// F32 `[n_tap, n_channels]`, the oldest token's first.
    pub(crate) taps: Buffer,
    /// F32 `[n_decays]`
    pub(crate) dt_bias: Buffer,
    /// F32 `[n_head_v]`
    pub(crate) a: Buffer,
    /// F32 `[value_dim]`
    pub(crate) norm: Buffer,
    pub(crate) out: WgpuLinear,
}

/// Two low-rank products, of the decay and of the gate.
#[derive(Debug)]
pub(crate) struct WgpuLowRank {
    /// The first matrices, one below the other.
    pub(crate) down: WgpuLinear,
    /// The second ones, a row for each row of the first, F32 `[2 rank, n_values]`.
    pub(crate) up: Buffer,
}

impl WgpuDeltaRule {
    pub(super) fn new(gpu: &WgpuDevice, w: &DeltaRuleWeights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        let mut inputs = vec![&w.q, &w.k, &w.v];
        let gates = match &w.before {
            None => {
                inputs.push(&w.gate);
                vec![&w.beta, &w.decay]
            }
            Some(_) => vec![&w.beta],
        };
        let ty = inputs[inputs.len() - 1].weight.ty();
        let together = gates.iter().all(|gate| gate.weight.ty() == ty);
        if together {
            inputs.extend(&gates);
        }
        let inputs = concat(gpu, "the inputs of a delta rule", &inputs, uploads)?;
        let gates = (!together).then(|| concat(gpu, "the gates of a delta rule", &gates, uploads)).transpose()?;
        let low_rank = match &w.before {
            None => None,
            Some([decay, gate]) => Some(WgpuLowRank {
                down: concat(gpu, "the low-rank matrices", &[decay, gate], uploads)?,
                up: gpu.upload("the low-rank matrices", &transposed(&[&w.decay, &w.gate]))?,
            }),
        };
        Ok(Self {
            inputs,
            gates,
            low_rank,
            taps: gpu.upload("the taps of a convolution", &w.taps)?,
            dt_bias: gpu.upload("the bias of a decay", &w.dt_bias)?,
            a: gpu.upload("the rates of a decay", &w.a)?,
            norm: gpu.upload("a norm", &w.norm)?,
            out: concat(gpu, "the delta rule's output matrix", &[&w.out], uploads)?,
        })
    }
}
