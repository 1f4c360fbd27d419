//! A mixture of experts: router, chosen experts, and the shared expert that all tokens pass through. The choice stays
//! on the GPU.

use crate::kernels::{self, ExpertsMatrices, FEW_TOKENS, MatvecInput, MatvecOutput, NormShape};
use crate::{Dispatch, WgpuError};
use metal_attention_model::Experts;
use wgpu::Buffer;

use super::{BranchInput, LinearProduct, PlanBuilder};
use crate::weights::WgpuExperts;

impl PlanBuilder<'_> {
    /// Appends `sum = ` the weighted sum of each token's experts and the shared expert; with `accumulate` `sum +=`.
    /// Writes `scores` (of the router), the expert scratch buffers and, for norms of their own and for the shared
    /// expert, `result`.
    pub(super) fn experts(
        &self,
        dispatches: &mut Vec<Dispatch>,
        e: &Experts,
        w: &WgpuExperts,
        input: BranchInput<'_>,
        sum: &Buffer,
        accumulate: bool,
    ) -> Result<(), WgpuError> {
        let scratch = self.scratch;
        let expert_scratch = scratch.experts.as_ref().expect("a model with experts has room for their kernels");
        let mut routed = input;
        if let Some(norm) = &w.router_norm {
            dispatches.push(self.norm(norm, NormShape::of_row(norm.n), Some(&scratch.x), &scratch.result)?);
            routed = BranchInput::Rows(&scratch.result);
        }
        self.multiply_branch_input(dispatches, routed, &w.router, MatvecOutput::Store, &scratch.scores)?;
        let sizes = [e.n_expert, e.n_used];
        let (choice_bias, expert_scale) = (w.choice_bias.as_ref(), w.expert_scale.as_ref());
        dispatches.push(kernels::route(
            self.gpu,
            &e.router,
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
        if let (Some(shared), Some(dense)) = (&e.shared, &w.shared) {
            self.gated(dispatches, &shared.dense, dense, input)?;
            if w.expert_norms.is_none() && w.shared_gate.is_none() {
                return self.multiply(
                    dispatches,
                    LinearProduct::new(&dense.down, MatvecOutput::Accumulate, &scratch.gated, sum),
                );
            }
            self.multiply(
                dispatches,
                LinearProduct::new(&dense.down, MatvecOutput::Store, &scratch.gated, &scratch.result),
            )?;
            if let Some(gate) = &w.shared_gate {
                let BranchInput::Rows(input) = input else {
                    panic!("the input of a shared expert is made once: `feed_forward_materialises_norm`")
                };
                dispatches.push(kernels::row_gate(gpu, self.spec.n_embd, input, gate, &scratch.result)?);
            }
            self.add(dispatches, &scratch.result, w.expert_norms.as_ref().map(|[_, _, norm]| norm), 1.0, sum)?;
        }
        Ok(())
    }
}
