//! Weights of a mixture of experts in the GPU's memory.

use metal_attention_model::{Experts, ExpertsWeights, Norm, NormWeights};
use wgpu::Buffer;

use super::{Uploads, WgpuDense, WgpuLinear, WgpuNorm, concat, interleave_all};
use crate::kernels::ExpertsShape;
use crate::{WgpuDevice, WgpuError};

/// Weights of a mixture of experts.
#[derive(Debug)]
pub(crate) struct WgpuExperts {
    pub(crate) shape: ExpertsShape,
    pub(crate) router: WgpuLinear,
    /// Norm of the router's input, where it is not that of the experts.
    pub(crate) router_norm: Option<WgpuNorm>,
    /// Added to the scores for the choice.
    pub(crate) choice_bias: Option<Buffer>,
    /// Factor on each expert's result.
    pub(crate) expert_scale: Option<Buffer>,
    /// Gates and ups of all experts by turns, or ups alone.
    pub(crate) up: WgpuLinear,
    pub(crate) down: WgpuLinear,
    /// What all tokens go through besides.
    pub(crate) shared: Option<WgpuDense>,
    /// The gate of that.
    pub(crate) shared_gate: Option<Buffer>,
    /// Norms of the experts' input, their sum, and the result of what all tokens go through.
    pub(crate) expert_norms: Option<[WgpuNorm; 3]>,
}

impl WgpuExperts {
    pub(super) fn new(
        gpu: &WgpuDevice,
        spec: &Experts,
        w: &ExpertsWeights,
        n_embd: usize,
        uploads: &mut Uploads,
    ) -> Result<Self, WgpuError> {
        let optional = |what: &str, values: &Option<Vec<f32>>| match values {
            Some(values) => gpu.upload(what, values).map(Some),
            None => Ok(None),
        };
        let router_norm = match (&spec.expert_norms, &w.router_scale) {
            (Some(own), Some(scale)) => {
                // Over the square root of the width, too.
                let factor = 1.0 / (n_embd as f32).sqrt();
                let weight = scale.iter().map(|scale| scale * factor).collect();
                let norm = Norm { eps: own.router_eps, bias: false, ..own.input };
                Some(WgpuNorm::new(gpu, &norm, &NormWeights { weight, bias: None })?)
            }
            _ => None,
        };
        let expert_norms = match (&spec.expert_norms, &w.expert_norms) {
            (Some(own), Some([input, result, shared])) => Some([
                WgpuNorm::new(gpu, &own.input, input)?,
                WgpuNorm::new(gpu, &own.result, result)?,
                WgpuNorm::new(gpu, &own.shared_result, shared)?,
            ]),
            _ => None,
        };
        let gates: Vec<_> = w.experts.iter().filter_map(|expert| expert.gate.as_ref()).collect();
        let ups: Vec<_> = w.experts.iter().map(|expert| &expert.up).collect();
        let downs: Vec<_> = w.experts.iter().map(|expert| &expert.down).collect();
        let up = if gates.is_empty() {
            concat(gpu, "the experts' up projections", &ups, uploads)?
        } else {
            interleave_all(gpu, "the experts' gates and ups", &gates, &ups, uploads)?
        };
        Ok(Self {
            shape: ExpertsShape::new(spec, n_embd),
            router: concat(gpu, "the router", &[&w.router], uploads)?,
            router_norm,
            choice_bias: optional("the bias of choices", &w.choice_bias)?,
            expert_scale: optional("the scales of experts", &w.expert_scale)?,
            up,
            down: concat(gpu, "the experts' down projections", &downs, uploads)?,
            shared: w.shared.as_ref().map(|dense| WgpuDense::new(gpu, dense, uploads)).transpose()?,
            shared_gate: optional("the gate of what all tokens go through", &w.shared_gate)?,
            expert_norms,
        })
    }
}
