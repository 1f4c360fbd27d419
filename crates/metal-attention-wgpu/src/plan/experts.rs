//! A mixture of experts: the router's choice, which stays on the GPU, the chosen experts, and what all tokens go through.

use crate::kernels::{self, ExpertsMatrices, FEW_TOKENS, MatvecInput, MatvecOutput, NormShape};
use crate::{Dispatch, GpuError};
use metal_attention_model::Experts;

use super::{Input, PlanBuilder, Product};
use crate::weights::GpuExperts;

impl PlanBuilder<'_> {
    /// `experts_sum`: the weighted sum of each token's experts, and what all tokens go through.
    pub(super) fn experts(
        &self,
        d: &mut Vec<Dispatch>,
        e: &Experts,
        w: &GpuExperts,
        input: Input<'_>,
    ) -> Result<(), GpuError> {
        let s = self.s;
        let scratch = s.experts.as_ref().expect("a model with experts has room for their kernels");
        let input = match input {
            Input::Ready(buffer) => buffer,
            Input::Norm(norm) => {
                d.push(self.norm(norm, NormShape::of_row(norm.n), Some(&s.x), &s.h)?);
                &s.h
            }
        };
        let mut routed = input;
        if let Some(norm) = &w.router_norm {
            d.push(self.norm(norm, NormShape::of_row(norm.n), Some(&s.x), &s.result)?);
            routed = &s.result;
        }
        self.multiply(d, Product::new(&w.router, MatvecOutput::Store, routed, &s.scores))?;
        let sizes = [e.n_expert, e.n_used];
        let (choice_bias, expert_scale) = (w.choice_bias.as_ref(), w.expert_scale.as_ref());
        d.push(kernels::route(self.gpu, &e.router, sizes, &s.scores, choice_bias, expert_scale, scratch)?);
        let mut of_experts = input;
        if let Some([norm, _, _]) = &w.own_norms {
            d.push(self.norm(norm, NormShape::of_row(norm.n), Some(&s.x), &s.result)?);
            of_experts = &s.result;
        }
        let matrices = ExpertsMatrices {
            up: &w.up.weight,
            up_bias: w.up.bias.as_ref(),
            down: &w.down.weight,
            down_bias: w.down.bias.as_ref(),
        };
        let (gpu, n_tokens, sum) = (self.gpu, self.most_tokens(), &s.experts_sum);
        let plain = MatvecInput::Plain;
        d.extend(if n_tokens <= FEW_TOKENS {
            kernels::experts_matvec(gpu, &w.shape, &matrices, plain, of_experts, sum, false, scratch)?
        } else {
            let exact = self.exact;
            kernels::experts_matmul(
                gpu, &w.shape, &matrices, plain, n_tokens, exact, of_experts, sum, false, scratch, self.batch,
            )?
        });
        if let Some([_, norm, _]) = &w.own_norms {
            d.push(self.norm(norm, NormShape::of_row(norm.n), None, sum)?);
        }
        if let (Some(shared), Some(dense)) = (&e.shared, &w.shared) {
            self.gated(d, &shared.dense, dense, Input::Ready(input))?;
            if w.own_norms.is_none() && w.shared_gate.is_none() {
                return self.multiply(d, Product::new(&dense.down, MatvecOutput::Accumulate, &s.gated, sum));
            }
            self.multiply(d, Product::new(&dense.down, MatvecOutput::Store, &s.gated, &s.result))?;
            if let Some(gate) = &w.shared_gate {
                d.push(kernels::row_gate(gpu, self.spec.n_embd, input, gate, &s.result)?);
            }
            self.add(d, &s.result, w.own_norms.as_ref().map(|[_, _, norm]| norm), 1.0, sum)?;
        }
        Ok(())
    }
}
