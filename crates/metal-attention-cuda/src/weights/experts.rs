//! Weights of mixtures of experts on the device.

use metal_attention_gguf::TensorType;
use metal_attention_model::{Activation, Experts, ExpertsWeights, Linear, NormKind, Prepare};

use super::{CudaDense, CudaLinear, CudaNorm, CudaVector, Loader};
use crate::CudaError;
use crate::stack::CudaStack;
use crate::support::activation_code;

/// The weights of a mixture of experts. `n_in` is the width that experts work on: that of the residual stream, or of `latent`.
#[derive(Debug)]
pub(crate) struct CudaExperts {
    /// Sizes and rules.
    pub(crate) spec: Experts,
    /// The router, `[n_expert, n_embd]`.
    pub(crate) router: CudaLinear,
    /// The router's rows in their original order, if they are F32, for the kernel that fuses norm and router in decode steps.
    pub(crate) router_rows: Option<CudaVector>,
    /// Norm of the router's input, where it differs from that of the experts'.
    pub(crate) router_norm: Option<CudaNorm>,
    /// Added to the router's scores for the choice of experts only, `[n_expert]`.
    pub(crate) choice_bias: Option<CudaVector>,
    /// Products from the residual stream to the experts' input, and from their sum back.
    pub(crate) latent: Option<[CudaLinear; 2]>,
    /// Gates, `[n_expert, n_ff, n_in]`.
    pub(crate) gate: Option<CudaStack>,
    /// Ups, `[n_expert, n_ff, n_in]`.
    pub(crate) up: CudaStack,
    /// Downs, `[n_expert, n_in, n_ff]`.
    pub(crate) down: CudaStack,
    /// Factors on the experts' results, `[n_expert]`.
    pub(crate) expert_scale: Option<CudaVector>,
    /// The shared experts, which all tokens go through, as one dense feed-forward.
    pub(crate) shared: Option<CudaDense>,
    /// Weights of a sigmoid gate on their result, `[n_embd]`.
    pub(crate) shared_gate: Option<CudaVector>,
    /// Norms of the experts' input, of their sum, and of the shared experts' result.
    pub(crate) expert_norms: Option<[CudaNorm; 3]>,
    /// The experts' activation, by its number in the kernels, and its parameter.
    pub(crate) activation: (u32, f32),
    /// Whether the epilogue of products can apply the activation.
    pub(crate) has_known_activation: bool,
}

impl CudaExperts {
    /// Whether the product of gate and up can apply the activation in its epilogue.
    pub(crate) fn gates_in_product(&self) -> bool {
        let plain = |gate: &CudaStack| gate.pairs_with(&self.up) && gate.bias.is_none() && self.up.bias.is_none();
        self.has_known_activation && self.gate.as_ref().is_some_and(plain)
    }
}

impl Loader<'_> {
    /// Uploads the weights of a mixture of experts.
    pub(super) fn experts_of(&mut self, w: &ExpertsWeights) -> Result<CudaExperts, CudaError> {
        let of = &w.spec;
        let gates: Option<Vec<&Linear>> = w.experts.iter().map(|expert| expert.gate.as_ref()).collect();
        let ups: Vec<_> = w.experts.iter().map(|expert| &expert.up).collect();
        let downs: Vec<_> = w.experts.iter().map(|expert| &expert.down).collect();
        let latent = match &w.latent {
            Some([down, up]) => Some([self.linear(down)?, self.linear(up)?]),
            None => None,
        };
        let shared = w.shared.as_ref().map(|shared| self.dense(shared)).transpose()?;
        let router = &w.router.weight;
        let as_they_are = router.ty() == TensorType::F32;
        let router_rows = as_they_are.then(|| self.vector(&router.to_f32())).transpose()?;
        let (mut router_norm, mut expert_norms) = (None, None);
        if let (Some(own), Some([input, result, shared]), Some(scale)) =
            (&of.expert_norms, &w.expert_norms, &w.router_scale)
        {
            // The router's input is `rms(x) / sqrt(n_embd) * scale`.
            let factor = 1.0 / (scale.len() as f32).sqrt();
            let weight = self.vector(&scale.iter().map(|s| s * factor).collect::<Vec<_>>())?;
            let (kind, n) = (NormKind::Rms, scale.len());
            router_norm = Some(CudaNorm { kind, weight, bias: None, eps: own.router_eps, n });
            expert_norms = Some([self.norm(input)?, self.norm(result)?, self.norm(shared)?]);
        }
        Ok(CudaExperts {
            spec: of.clone(),
            router: self.linear(&w.router)?,
            router_rows,
            router_norm,
            choice_bias: self.optional(w.choice_bias.as_deref())?,
            latent,
            gate: gates.filter(|_| of.expert.gated).map(|gates| self.stack(&gates)).transpose()?,
            up: self.stack(&ups)?,
            down: self.stack(&downs)?,
            expert_scale: self.optional(w.expert_scale.as_deref())?,
            shared,
            shared_gate: self.optional(w.shared_gate.as_deref())?,
            expert_norms,
            activation: activation_code(of.expert.activation),
            has_known_activation: match of.expert.activation {
                Activation::Silu | Activation::Gelu | Activation::ReluSquared => true,
                Activation::ClampedSwiglu { limit: _ } | Activation::SparseGelu { n_std: _ } => false,
            },
        })
    }
}
