//! The weights of a mixture of experts on the GPU.

use metal_attention_model::{Experts, ExpertsWeights, Norm, NormWeights};
use wgpu::Buffer;

use super::{Uploads, WgpuDense, WgpuLinear, WgpuNorm, concat, interleave_all};
use crate::kernels::ExpertsShape;
use crate::{WgpuDevice, WgpuError};

/// The weights of a mixture of experts.
#[derive(Debug)]
pub(crate) struct WgpuExperts {
    /// Sizes and activation of the experts.
    pub(crate) shape: ExpertsShape,
    /// The router, `[n_expert, n_embd]`.
    pub(crate) router: WgpuLinear,
    /// The norm of the router's input, if it differs from the experts'.
    pub(crate) router_norm: Option<WgpuNorm>,
    /// Added to the scores when experts are chosen, but not to their weights, `[n_expert]`.
    pub(crate) choice_bias: Option<Buffer>,
    /// Factor on the result of each expert, `[n_expert]`.
    pub(crate) expert_scale: Option<Buffer>,
    /// Gate and up of all experts with interleaved rows, or up alone, one expert below the other.
    pub(crate) up: WgpuLinear,
    /// The down projections of all experts, stacked.
    pub(crate) down: WgpuLinear,
    /// The shared expert, which all tokens pass through.
    pub(crate) shared: Option<WgpuDense>,
    /// The vector whose product with the input gates the shared expert, `[n_embd]`.
    pub(crate) shared_gate: Option<Buffer>,
    /// Norms of the experts' input, of their sum, and of the shared expert's result.
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
                // The model also divides by the square root of the width.
                let factor = 1.0 / (n_embd as f32).sqrt();
                let weight = scale.iter().map(|scale| scale * factor).collect();
                let norm = Norm { eps: own.router_eps, has_bias: false, ..own.input };
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
