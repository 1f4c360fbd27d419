//! A mixture of experts: the router's choice, which stays on the GPU, the chosen experts, and what all tokens go through.

use crate::kernels::{self, ExpertsMatrices, FEW_TOKENS, MatvecInput, MatvecOutput, NormShape};
use crate::{Dispatch, WgpuError};
use metal_attention_model::Experts;
use wgpu::Buffer;

use super::{Input, PlanBuilder, Product};
use crate::weights::WgpuExperts;

impl PlanBuilder<'_> {
    /// `sum = ` or, to `accumulate`, `sum +=` the weighted sum of each token's experts and what all tokens go through.
    pub(super) fn experts(
        &self,
        d: &mut Vec<Dispatch>,
        e: &Experts,
        w: &WgpuExperts,
        input: Input<'_>,
        sum: &Buffer,
        accumulate: bool,
    ) -> Result<(), WgpuError> {
        let s = self.s;
        let scratch = s.experts.as_ref().expect("a model with experts has room for their kernels");
        let mut routed = input;
        if let Some(norm) = &w.router_norm {
            d.push(self.norm(norm, NormShape::of_row(norm.n), Some(&s.x), &s.result)?);
            routed = Input::Ready(&s.result);
        }
        self.product_of(d, routed, Product::new(&w.router, MatvecOutput::Store, &s.x, &s.scores))?;
        let sizes = [e.n_expert, e.n_used];
        let (choice_bias, expert_scale) = (w.choice_bias.as_ref(), w.expert_scale.as_ref());
        d.push(kernels::route(self.gpu, &e.router, sizes, &s.scores, choice_bias, expert_scale, scratch)?);
        let mut of_experts = input;
        if let Some([norm, _, _]) = &w.expert_norms {
            d.push(self.norm(norm, NormShape::of_row(norm.n), Some(&s.x), &s.result)?);
            of_experts = Input::Ready(&s.result);
        }
        let (kind, of_experts) = match of_experts {
            Input::Norm(norm) => (MatvecInput::RmsNorm { weight: &norm.weights, eps: norm.eps }, &s.x),
            Input::Ready(x) => (MatvecInput::Plain, x),
        };
        let matrices = ExpertsMatrices {
            up: &w.up.weight,
            up_bias: w.up.bias.as_ref(),
            down: &w.down.weight,
            down_bias: w.down.bias.as_ref(),
        };
        let (gpu, n_tokens) = (self.gpu, self.most_tokens());
        d.extend(if n_tokens <= FEW_TOKENS {
            kernels::experts_matvec(gpu, &w.shape, &matrices, kind, of_experts, sum, accumulate, scratch)?
        } else {
            let exact = self.exact;
            kernels::experts_matmul(
                gpu, &w.shape, &matrices, kind, n_tokens, exact, of_experts, sum, accumulate, scratch, self.batch,
            )?
        });
        if let Some([_, norm, _]) = &w.expert_norms {
            d.push(self.norm(norm, NormShape::of_row(norm.n), None, sum)?);
        }
        if let (Some(shared), Some(dense)) = (&e.shared, &w.shared) {
            self.gated(d, &shared.dense, dense, input)?;
            if w.expert_norms.is_none() && w.shared_gate.is_none() {
                return self.multiply(d, Product::new(&dense.down, MatvecOutput::Accumulate, &s.gated, sum));
            }
            self.multiply(d, Product::new(&dense.down, MatvecOutput::Store, &s.gated, &s.result))?;
            if let Some(gate) = &w.shared_gate {
                let Input::Ready(input) = input else {
                    panic!("the input of a shared expert is made once: `feed_forward_shares_input`")
                };
                d.push(kernels::row_gate(gpu, self.spec.n_embd, input, gate, &s.result)?);
            }
            self.add(d, &s.result, w.expert_norms.as_ref().map(|[_, _, norm]| norm), 1.0, sum)?;
        }
        Ok(())
    }
}
