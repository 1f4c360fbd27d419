//! Mixtures of experts: each token goes to a few of many feed-forwards, which the device chooses.

use metal_attention_model::{Experts, RouterScore};

use super::grouped::Grouped;
use super::layer::Given;
use super::product::Input;
use super::{Step, Steps};
use crate::CudaError;
use crate::args::{ExpertsActivationArgs, ExpertsSumArgs, Output, RouteArgs, WeighArgs};
use crate::device::CudaBuffer;
use crate::launch::Grid;
use crate::weights::{CudaExperts, CudaNorm};

/// The router's products; the chosen experts, their weights, those of their inputs; the input of router or experts where it is
/// not the normalised state, that times the weights; gates and ups, what comes of them, what experts give; their sum, that as
/// wide as the stream, what all tokens go through.
pub(super) fn widths(of: &Experts, n_embd: usize) -> [usize; 12] {
    let (n, n_ff, n_in) = (of.n_used, of.expert.n_ff, of.latent.unwrap_or(n_embd));
    let weighed = if of.router.weight_input { n * n_in } else { 0 };
    let other = if of.latent.is_some() || of.own_norms.is_some() { n_embd.max(n_in) } else { 0 };
    [of.n_expert, n, n, n, other, weighed, 2 * n * n_ff, n * n_ff, n * n_in, n_in.max(n_embd), n_embd, n_embd]
}

fn ptr(vector: Option<&CudaBuffer>) -> u64 {
    vector.map_or(0, CudaBuffer::ptr)
}

impl Steps {
    /// The weighted experts of the normalised state, and what all tokens go through besides. `input`: that state, as products
    /// take it.
    pub(super) fn experts<'w>(
        &mut self,
        step: Step<'_>,
        w: &'w CudaExperts,
        input: Input,
    ) -> Result<Given<'w>, CudaError> {
        let (of, n_embd, n) = (&w.spec, step.spec.n_embd, step.size.n_tokens);
        let n_in = of.latent.unwrap_or(n_embd);
        let [products, chosen, weights, input_weights, other, weighed, pairs, gated, down, sum, wide, shared] =
            self.rows(step, widths(of, n_embd));
        let (x, h) = (self.s.x.ptr(), self.s.h.ptr());
        let routed = match &w.router_norm {
            None => input,
            Some(norm) => self.rows_input(step, x, n_embd, Some(norm))?,
        };
        self.store(step, "router", [&w.router], routed, products)?;
        self.route(step, w, products, [chosen, weights, input_weights])?;

        let mut rows = h;
        if let Some([norm, _, _]) = &w.own_norms {
            self.norm_rows(step, x, n_embd, of_norm(norm), (0, other))?;
            rows = other;
        }
        if let Some([linear, _]) = &w.latent {
            self.store(step, "experts' input", [linear], input, other)?;
            rows = other;
        }
        let mut items_a_row = of.n_used;
        if of.router.weight_input {
            let args =
                WeighArgs { x: rows, weights: input_weights, out: weighed, n: n_in as u32, n_used: of.n_used as u32 };
            let grid = Grid { blocks: [n_in.div_ceil(256), n * of.n_used, 1], threads: 256, shared: 0 };
            self.launch("weigh_inputs", "", grid, &args)?;
            (rows, items_a_row) = (weighed, 1);
        }
        self.visit(step, w, chosen, (rows, items_a_row), [pairs, gated, down])?;
        self.sum(step, w, input, [weights, down, sum, wide, shared])
    }

    /// Which experts each token goes to, and with what weights.
    fn route(
        &mut self,
        step: Step<'_>,
        w: &CudaExperts,
        products: u64,
        [experts, weights, input_weights]: [u64; 3],
    ) -> Result<(), CudaError> {
        let (of, router) = (&w.spec, &w.spec.router);
        let groups = router.groups.as_ref().map_or((0, 0), |groups| (groups.n, groups.n_used));
        let args = RouteArgs {
            products,
            choice_bias: ptr(w.choice_bias.as_ref()),
            expert_scale: ptr(w.expert_scale.as_ref()),
            experts,
            weights,
            input_weights: if router.weight_input { input_weights } else { 0 },
            n_expert: of.n_expert as u32,
            n_used: of.n_used as u32,
            score: match router.score {
                RouterScore::Softmax => 0,
                RouterScore::Sigmoid => 1,
                RouterScore::SoftmaxOfChosen => 2,
            },
            renormalize: u32::from(router.renormalize),
            n_group: groups.0 as u32,
            n_group_used: groups.1 as u32,
            scale: router.scale,
            unused: 0,
        };
        self.launch("route", "", Grid { blocks: [step.size.n_tokens, 1, 1], threads: 32, shared: 0 }, &args)
    }

    /// `down(activation(gate(x)) * up(x))` of every token at each of its experts.
    fn visit(
        &mut self,
        step: Step<'_>,
        w: &CudaExperts,
        chosen: u64,
        (x, items_a_row): (u64, usize),
        [pairs, gated, down]: [u64; 3],
    ) -> Result<(), CudaError> {
        let (n_ff, n_items) = (w.spec.expert.n_ff, w.spec.n_used * step.size.n_tokens);
        let plain = |what, first, second| Grouped {
            what,
            first,
            second,
            output: Output::Store,
            activation: 0,
            groups: chosen,
            x,
            items_a_row,
            x_stride: w.up.n_in(),
            y: pairs,
            y_stride: 0,
        };
        let what = "experts' gate and up";
        match &w.gate {
            Some(gate)
                if gate.pairs_with(&w.up)
                    && gate.bias.is_none()
                    && w.up.bias.is_none()
                    && w.activation.in_products() =>
            {
                let product = Grouped {
                    output: Output::Gated,
                    activation: w.activation.code,
                    y: gated,
                    y_stride: n_ff,
                    ..plain(what, gate, Some(&w.up))
                };
                self.grouped(&product, n_items)?;
            }
            gate => {
                let n_parts = 1 + usize::from(gate.is_some());
                let (first, second) = gate.as_ref().map_or((&w.up, None), |gate| (gate, Some(&w.up)));
                self.grouped(&Grouped { y_stride: n_parts * n_ff, ..plain(what, first, second) }, n_items)?;
                let args = ExpertsActivationArgs {
                    x: pairs,
                    out: gated,
                    n: n_ff as u32,
                    gated: u32::from(gate.is_some()),
                    activation: w.activation.code,
                    limit: w.activation.limit,
                };
                let grid = Grid { blocks: [n_ff.div_ceil(256), n_items, 1], threads: 256, shared: 0 };
                self.launch("experts_activation", "", grid, &args)?;
            }
        }
        let product = Grouped {
            x: gated,
            items_a_row: 1,
            x_stride: n_ff,
            y: down,
            y_stride: w.down.n_rows,
            ..plain("experts' down", &w.down, None)
        };
        self.grouped(&product, n_items)
    }

    /// The weighted sum of what the experts give, and what all tokens go through besides.
    fn sum<'w>(
        &mut self,
        step: Step<'_>,
        w: &'w CudaExperts,
        input: Input,
        [weights, down, sum, wide, shared]: [u64; 5],
    ) -> Result<Given<'w>, CudaError> {
        let (of, n_embd, n) = (&w.spec, step.spec.n_embd, step.size.n_tokens);
        let n_in = of.latent.unwrap_or(n_embd);
        let mut args = ExpertsSumArgs {
            y: down,
            rows: 0,
            weights,
            shared: 0,
            gate: 0,
            h: self.s.h.ptr(),
            out: sum,
            n: n_in as u32,
            n_used: of.n_used as u32,
            add: 0,
            scale: 1.0,
        };
        let grid = Grid { blocks: [n, 1, 1], threads: 256, shared: 0 };
        if let Some(dense) = &w.shared {
            let Given::Product { what, linear, input } = self.dense(step, dense, input)? else {
                return Err(CudaError::UnsupportedPart { part: "shared experts without a last product" });
            };
            self.store(step, what, [linear], input, shared)?;
            if let Some([_, _, norm]) = &w.own_norms {
                self.norm_rows(step, shared, n_embd, of_norm(norm), (0, shared))?;
            }
            args.shared = shared;
            args.gate = ptr(w.shared_gate.as_ref());
        }
        let mut result = sum;
        let apart = w.own_norms.is_some() || w.latent.is_some();
        if apart {
            // The sum goes through more before what all tokens go through is added.
            self.launch("experts_sum", "", grid, &ExpertsSumArgs { shared: 0, gate: 0, ..args })?;
            if let Some([_, norm, _]) = &w.own_norms {
                self.norm_rows(step, sum, n_in, of_norm(norm), (0, sum))?;
            }
            if let Some([_, linear]) = &w.latent {
                self.store_rows(step, "experts' output", linear, sum, wide)?;
                result = wide;
            }
            if args.shared == 0 {
                return Ok(Given::Rows(result));
            }
            args = ExpertsSumArgs { out: result, n: n_embd as u32, n_used: 0, add: 1, ..args };
        }
        self.launch("experts_sum", "", grid, &args)?;
        Ok(Given::Rows(result))
    }
}

fn of_norm(norm: &CudaNorm) -> (u64, f32) {
    (norm.weight.ptr(), norm.eps)
}
