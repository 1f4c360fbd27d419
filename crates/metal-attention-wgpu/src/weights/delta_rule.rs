//! The weights of a gated delta rule on the GPU.

use metal_attention_model::DeltaRuleWeights;
use wgpu::Buffer;

use super::rwkv::transposed;
use super::{Uploads, WgpuLinear, concat};
use crate::{WgpuDevice, WgpuError};

/// The weights of a gated delta rule.
#[derive(Debug)]
pub(crate) struct WgpuDeltaRule {
    /// The projections to queries, keys and values, and to the gate of the results unless it is a [low-rank
    /// product](Self::low_rank), stacked; below them those of [`gates`](Self::gates) if they have the same type.
    pub(crate) inputs: WgpuLinear,
    /// The projections to `beta` and, unless it is a low-rank product, the decay, if the file stores them in another
    /// type than the others: one matrix of several types may not suit matrix units.
    pub(crate) gates: Option<WgpuLinear>,
    /// The low-rank products of decay and gate, of models that have them.
    pub(crate) low_rank: Option<WgpuLowRank>,
    /// Taps of the convolution, F32 `[n_tap, n_channels]`, the oldest token's first.
    pub(crate) taps: Buffer,
    /// Bias of the decay, F32 `[n_decays]`.
    pub(crate) dt_bias: Buffer,
    /// Decay rate of each head, F32 `[n_head_v]`.
    pub(crate) a: Buffer,
    /// Weight of the norm of the results, F32 `[value_dim]`.
    pub(crate) norm: Buffer,
    /// The output projection.
    pub(crate) out: WgpuLinear,
}

/// Two low-rank products of one input, of the decay and of the gate.
#[derive(Debug)]
pub(crate) struct WgpuLowRank {
    /// Their first matrices, stacked, `[2 rank, n_embd]`.
    pub(crate) down: WgpuLinear,
    /// Their second matrices, transposed, one after the other, F32 `[2 rank, n_values]`.
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
