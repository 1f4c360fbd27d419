//! A mixture of experts: router, chosen experts, and the shared expert that all tokens pass through. The choice stays
//! on the GPU.

use metal_attention_model::{Activation, BatchKind, Experts, ExpertsWeights, NormWeights, Router, SharedExpert};
use wgpu::Buffer;

use super::WgpuDense;
use super::dense::widen_for_dense;
use crate::activations::{ActivationWidths, widen};
use crate::kernels::{
    self, ExpertsMatrices, ExpertsShape, FEW_TOKENS, MAX_EXPERTS, MAX_USED_EXPERTS, MatvecInput, MatvecOutput,
    NormShape,
};
use crate::plan::{BranchInput, BranchOutput, LastProduct, LinearProduct, PlanBuilder};
use crate::weights::{Uploads, WgpuLinear, WgpuNorm, concat, interleave_all};
use crate::{Dispatch, WgpuDevice, WgpuError};

/// A mixture of experts with its weights.
#[derive(Debug)]
pub(crate) struct WgpuExperts {
    /// How a token's experts are chosen and weighted.
    routing: Router,
    /// Sizes and activation of the experts.
    shape: ExpertsShape,
    /// The router, `[n_expert, n_embd]`.
    router: WgpuLinear,
    /// The norm of the router's input, if it differs from the experts'.
    router_norm: Option<WgpuNorm>,
    /// Added to the scores when experts are chosen, but not to their weights, `[n_expert]`.
    choice_bias: Option<Buffer>,
    /// Factor on the result of each expert, `[n_expert]`.
    expert_scale: Option<Buffer>,
    /// Gate and up of all experts with interleaved rows, or up alone, one expert below the other.
    up: WgpuLinear,
    /// The down projections of all experts, stacked.
    down: WgpuLinear,
    /// The shared expert, which all tokens pass through.
    shared: Option<WgpuDense>,
    /// The vector whose product with the input gates the shared expert, `[n_embd]`.
    shared_gate: Option<Buffer>,
    /// Norms of the experts' input, of their sum, and of the shared expert's result.
    expert_norms: Option<[WgpuNorm; 3]>,
}

/// Checks that kernels exist for a mixture of experts; the error is the part without one.
pub(super) fn supports(spec: &Experts) -> Result<(), &'static str> {
    let Experts { n_expert, n_used, expert, biases: _, latent, router, expert_norms: _, shared } = spec;
    if latent.is_some() {
        return Err("experts over a narrower row");
    }
    if *n_used > MAX_USED_EXPERTS || *n_expert > MAX_EXPERTS {
        return Err("more experts than the kernels support");
    }
    let Router { score: _, choice_bias: _, renormalize: _, scale: _, groups: _, weights_inputs: _ } = router;
    match expert.activation {
        Activation::Silu
        | Activation::Gelu
        | Activation::ReluSquared
        | Activation::ClampedSwiglu { limit: _ }
        | Activation::ClampedSilu { limit: _ } => {}
        Activation::SparseGelu { n_std: _ } => return Err("experts with a sparse GELU"),
    }
    match shared {
        Some(SharedExpert { dense: _, gated: _, plain_names: _ }) | None => Ok(()),
    }
}

/// Widens the scratch buffers. `n_embd`: width of the residual stream.
pub(super) fn widen_for_experts(widths: &mut ActivationWidths, spec: &Experts, n_embd: usize) {
    widen(&mut widths.scores, spec.n_expert);
    widen(&mut widths.experts_sum, n_embd);
    let shape = ExpertsShape::new(spec, n_embd);
    if !widths.experts.contains(&shape) {
        widths.experts.push(shape);
    }
    if let Some(shared) = &spec.shared {
        widen_for_dense(widths, &shared.dense);
    }
}

impl WgpuExperts {
    /// Uploads the weights. `n_embd`: width of the residual stream.
    pub(super) fn new(
        gpu: &WgpuDevice,
        w: &ExpertsWeights,
        n_embd: usize,
        uploads: &mut Uploads,
    ) -> Result<Self, WgpuError> {
        let optional = |what: &str, values: &Option<Vec<f32>>| match values {
            Some(values) => gpu.upload(what, values).map(Some),
            None => Ok(None),
        };
        let own_norms = w.spec.expert_norms.as_ref().zip(w.router_scale.as_ref());
        let router_norm = own_norms.map(|(own, scale)| {
            // The model also divides by the square root of the width.
            let factor = 1.0 / (n_embd as f32).sqrt();
            let weight = scale.iter().map(|scale| scale * factor).collect();
            WgpuNorm::new(gpu, &NormWeights { kind: own.input.kind, eps: own.router_eps, weight, bias: None })
        });
        let expert_norms = match &w.expert_norms {
            Some([input, result, shared]) => {
                Some([WgpuNorm::new(gpu, input)?, WgpuNorm::new(gpu, result)?, WgpuNorm::new(gpu, shared)?])
            }
            None => None,
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
            routing: w.spec.router.clone(),
            shape: ExpertsShape::new(&w.spec, n_embd),
            router: concat(gpu, "the router", &[&w.router], uploads)?,
            router_norm: router_norm.transpose()?,
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

impl<'a> PlanBuilder<'a> {
    /// Appends a mixture of experts: the weighted sum of each token's experts and the shared expert. `may_add`: whether
    /// the result may be added to `x`; without norms of its own it then is. Writes
    /// `scores` (of the router), the expert scratch buffers, `experts_sum` unless it adds to `x`, and, for norms of their
    /// own and for the shared expert, `result`.
    pub(crate) fn experts(
        &self,
        dispatches: &mut Vec<Dispatch>,
        w: &'a WgpuExperts,
        input: BranchInput<'a>,
        may_add: bool,
    ) -> Result<BranchOutput<'a>, WgpuError> {
        let scratch = self.scratch;
        let expert_scratch = scratch.experts.as_ref().expect("a model with experts has room for their kernels");
        let accumulate = may_add && w.expert_norms.is_none();
        let (sum, output) = if accumulate {
            (&scratch.x, BranchOutput::Added)
        } else {
            (&scratch.experts_sum, BranchOutput::Sum(&scratch.experts_sum))
        };
        // Several products read the input. The kernels of one token compute its norm in their prologue, unless there is a
        // shared expert: it runs after the others, which may have been added to `x` by then.
        let input = if self.kind != BatchKind::One || w.shared.is_some() {
            BranchInput::Rows(self.rows_of(dispatches, input)?)
        } else {
            input
        };
        let mut routed = input;
        if let Some(norm) = &w.router_norm {
            dispatches.push(self.norm(norm, NormShape::of_row(norm.n), Some(&scratch.x), &scratch.result)?);
            routed = BranchInput::Rows(&scratch.result);
        }
        self.multiply_branch_input(dispatches, routed, &w.router, MatvecOutput::Store, &scratch.scores)?;
        let sizes = [w.shape.n_expert, w.shape.n_used];
        let (choice_bias, expert_scale) = (w.choice_bias.as_ref(), w.expert_scale.as_ref());
        dispatches.push(kernels::route(
            self.gpu,
            &w.routing,
            sizes,
            &scratch.scores,
            choice_bias,
            expert_scale,
            expert_scratch,
        )?);
        let mut of_experts = input;
        if let Some([norm, _, _]) = &w.expert_norms {
            dispatches.push(self.norm(norm, NormShape::of_row(norm.n), Some(&scratch.x), &scratch.result)?);
            of_experts = BranchInput::Rows(&scratch.result);
        }
        let (kind, of_experts) = match of_experts {
            BranchInput::PendingNorm(norm) => {
                (MatvecInput::RmsNorm { weight: &norm.weights, eps: norm.eps }, &scratch.x)
            }
            BranchInput::Rows(x) => (MatvecInput::Plain, x),
        };
        let matrices = ExpertsMatrices {
            up: &w.up.weight,
            up_bias: w.up.bias.as_ref(),
            down: &w.down.weight,
            down_bias: w.down.bias.as_ref(),
        };
        let (gpu, n_tokens) = (self.gpu, self.max_tokens());
        dispatches.extend(if n_tokens <= FEW_TOKENS {
            kernels::experts_matvec(gpu, &w.shape, &matrices, kind, of_experts, sum, accumulate, expert_scratch)?
        } else {
            let exact = self.exact;
            kernels::experts_matmul(
                gpu,
                &w.shape,
                &matrices,
                kind,
                n_tokens,
                exact,
                of_experts,
                sum,
                accumulate,
                expert_scratch,
                self.batch,
            )?
        });
        if let Some([_, norm, _]) = &w.expert_norms {
            dispatches.push(self.norm(norm, NormShape::of_row(norm.n), None, sum)?);
        }
        if let Some(shared) = &w.shared {
            let LastProduct { out, input: gated, norm: _ } = self.dense(dispatches, shared, input)?;
            if w.expert_norms.is_none() && w.shared_gate.is_none() {
                self.multiply(dispatches, LinearProduct::new(out, MatvecOutput::Accumulate, gated, sum))?;
                return Ok(output);
            }
            self.multiply(dispatches, LinearProduct::new(out, MatvecOutput::Store, gated, &scratch.result))?;
            if let Some(gate) = &w.shared_gate {
                let input = self.rows_of(dispatches, input)?;
                dispatches.push(kernels::row_gate(gpu, self.spec.n_embd, input, gate, &scratch.result)?);
            }
            self.add(dispatches, &scratch.result, w.expert_norms.as_ref().map(|[_, _, norm]| norm), 1.0, sum)?;
        }
        Ok(output)
    }
}
