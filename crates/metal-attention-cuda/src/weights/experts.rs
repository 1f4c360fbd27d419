//! Weights of experts.

use metal_attention_gguf::TensorType;
use metal_attention_model::{Activation, Experts, ExpertsWeights, Linear, NormKind};

use super::{CudaDense, CudaLinear, CudaNorm, Loader, Vector};
use crate::CudaError;
use crate::parts::activation_code;
use crate::stack::CudaStack;

/// A mixture of experts.
#[derive(Debug)]
pub(crate) struct CudaExperts {
    pub(crate) spec: Experts,
    pub(crate) router: CudaLinear,
    /// Its rows as they are, where they are F32: a few tokens take them so.
    pub(crate) router_rows: Option<Vector>,
    /// Norm of the router's input, where experts have norms of their own.
    pub(crate) router_norm: Option<CudaNorm>,
    pub(crate) choice_bias: Option<Vector>,
    /// From the stream to the row that experts work on, and back.
    pub(crate) latent: Option<[CudaLinear; 2]>,
    pub(crate) gate: Option<CudaStack>,
    pub(crate) up: CudaStack,
    pub(crate) down: CudaStack,
    pub(crate) expert_scale: Option<Vector>,
    pub(crate) shared: Option<CudaDense>,
    pub(crate) shared_gate: Option<Vector>,
    /// Of the experts' input, their sum, and the result of what all tokens go through.
    pub(crate) expert_norms: Option<[CudaNorm; 3]>,
    /// Of the experts: its number and its parameter.
    pub(crate) activation: (u32, f32),
    /// Whether products know it.
    simple: bool,
}

impl CudaExperts {
    /// Whether a product that has gate and up of each expert takes the activation on its way.
    pub(crate) fn gates_in_product(&self) -> bool {
        let plain = |gate: &CudaStack| gate.pairs_with(&self.up) && gate.bias.is_none() && self.up.bias.is_none();
        self.simple && self.gate.as_ref().is_some_and(plain)
    }
}

impl Loader<'_> {
    pub(super) fn experts(&mut self, of: &Experts, w: &ExpertsWeights) -> Result<CudaExperts, CudaError> {
        let gates: Option<Vec<&Linear>> = w.experts.iter().map(|expert| expert.gate.as_ref()).collect();
        let ups: Vec<_> = w.experts.iter().map(|expert| &expert.up).collect();
        let downs: Vec<_> = w.experts.iter().map(|expert| &expert.down).collect();
        let latent = match &w.latent {
            Some([down, up]) => Some([self.linear(down)?, self.linear(up)?]),
            None => None,
        };
        let shared = match (&of.shared, &w.shared) {
            (Some(shared), Some(weights)) => Some(self.dense(&shared.dense, weights)?),
            (None, _) | (_, None) => None,
        };
        let router = &w.router.weight;
        let as_they_are = router.ty() == TensorType::F32;
        let router_rows = as_they_are.then(|| self.vector(&router.to_f32())).transpose()?;
        let (mut router_norm, mut expert_norms) = (None, None);
        if let (Some(own), Some([input, result, shared]), Some(scale)) =
            (&of.expert_norms, &w.expert_norms, &w.router_scale)
        {
            // rms(x) / sqrt(n_embd) * scale
            let factor = 1.0 / (scale.len() as f32).sqrt();
            let weight = self.vector(&scale.iter().map(|s| s * factor).collect::<Vec<_>>())?;
            let (kind, n) = (NormKind::Rms, scale.len());
            router_norm = Some(CudaNorm { kind, weight, bias: None, eps: own.router_eps, n });
            expert_norms = Some([
                self.one_norm(&own.input, input)?,
                self.one_norm(&own.result, result)?,
                self.one_norm(&own.shared_result, shared)?,
            ]);
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
            simple: match of.expert.activation {
                Activation::Silu | Activation::Gelu | Activation::ReluSquared => true,
                Activation::ClampedSwiglu { limit: _ } | Activation::SparseGelu { n_std: _ } => false,
            },
        })
    }
}
