//! Mixtures of experts: each token goes to a few of many feed-forwards, which the device chooses.

use metal_attention_model::{Experts, RouterScore};

use super::grouped::{Grouped, packed_elements, sorted_elements};
use super::layer::Given;
use super::product::{Input, MATVEC_TOKENS};
use super::{Step, Steps};
use crate::CudaError;
use crate::args::{ExpertsActivationArgs, ExpertsSumArgs, Output, RouteAloneArgs, RouteArgs, WeighArgs};
use crate::device::CudaBuffer;
use crate::launch::Grid;
use crate::matrix::PANEL;
use crate::weights::{CudaExperts, CudaNorm};

/// Elements of a state that `route_alone` has room for.
const MAX_ROUTED: usize = 4 * 256 * 8;

/// Elements, for `n` tokens, of the router's products; the chosen experts, their weights, those of their inputs; the input of
/// router or experts where it is not the normalised state, that times the weights; gates and ups, what comes of them, what experts
/// give; their sum, that as wide as the stream, what all tokens go through; sorted items, two of these; rows of slots as products
/// take them, those of the experts' input and those of their last matrix.
pub(super) fn elements(of: &Experts, n_embd: usize, n: usize) -> [usize; 16] {
    let (n_ff, n_in, n_items) = (of.expert.n_ff, of.latent.unwrap_or(n_embd), n.saturating_mul(of.n_used));
    let weighed = if of.router.weight_input { n_items * n_in } else { 0 };
    let other = if of.latent.is_some() || of.expert_norms.is_some() { n_embd.max(n_in) } else { 0 };
    let [items, work] = sorted_elements(n_items, of.n_expert);
    let packed = |width: usize| packed_elements(n_items, of.n_expert, width);
    [
        n * of.n_expert,
        n_items,
        n_items,
        n_items,
        n * other,
        weighed,
        2 * n_items * n_ff,
        n_items * n_ff,
        n_items * n_in,
        n * n_in.max(n_embd),
        n * n_embd,
        n * n_embd,
        items,
        work,
        packed(n_in),
        packed(n_ff),
    ]
}

fn ptr(vector: Option<&CudaBuffer>) -> u64 {
    vector.map_or(0, CudaBuffer::ptr)
}

/// Which experts each token goes to, and with what weights.
pub(crate) fn route_args(w: &CudaExperts, products: u64, [experts, weights, input_weights]: [u64; 3]) -> RouteArgs {
    let (of, router) = (&w.spec, &w.spec.router);
    let groups = router.groups.as_ref().map_or((0, 0), |groups| (groups.n, groups.n_used));
    RouteArgs {
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
    }
}

/// Every token at each of its experts.
struct Visits {
    /// Where the experts lie.
    chosen: u64,
    /// The input: `items_a_row` visits read the same row.
    x: u64,
    items_a_row: usize,
    /// Gates and ups, what comes of them, and what experts give.
    pairs: u64,
    gated: u64,
    down: u64,
}

impl Visits {
    /// The product of gate and up, to pairs, or of up alone.
    fn gate_and_up<'w>(&self, w: &'w CudaExperts) -> Grouped<'w> {
        let (first, second) = w.gate.as_ref().map_or((&w.up, None), |gate| (gate, Some(&w.up)));
        Grouped {
            what: "experts' gate and up",
            first,
            second,
            output: Output::Store,
            activation: w.activation.0,
            groups: self.chosen,
            x: self.x,
            items_a_row: self.items_a_row,
            x_stride: w.up.n_in(),
            y: self.pairs,
            y_stride: w.spec.expert.n_ff * if second.is_some() { 2 } else { 1 },
        }
    }

    /// The last product.
    fn last<'w>(&self, w: &'w CudaExperts) -> Grouped<'w> {
        Grouped {
            what: "experts' down",
            first: &w.down,
            second: None,
            output: Output::Store,
            activation: 0,
            groups: self.chosen,
            x: self.gated,
            items_a_row: 1,
            x_stride: w.spec.expert.n_ff,
            y: self.down,
            y_stride: w.down.n_rows,
        }
    }
}

impl Steps {
    /// Whether the router takes this norm on its way, and has the normalised state made for the others then. `exact` steps have the
    /// same bits however many tokens there are.
    pub(super) fn router_norms(&self, step: Step<'_>, w: &CudaExperts, norm: &CudaNorm) -> bool {
        !self.exact
            && step.size.n_tokens <= MATVEC_TOKENS
            && w.router_rows.is_some()
            && w.router_norm.is_none()
            && norm.is_on_the_way()
            && norm.n <= MAX_ROUTED
    }

    /// The weighted experts of the normalised state, and what all tokens go through besides. `input`: that state, as products
    /// take it; `norm`: what makes it, where the router does.
    pub(super) fn experts<'w>(
        &mut self,
        step: Step<'_>,
        w: &'w CudaExperts,
        input: Input,
        norm: Option<&CudaNorm>,
    ) -> Result<Given<'w>, CudaError> {
        let (of, n_embd, n) = (&w.spec, step.spec.n_embd, step.size.n_tokens);
        let n_in = of.latent.unwrap_or(n_embd);
        let [
            products,
            chosen,
            weights,
            input_weights,
            other,
            weighed,
            pairs,
            gated,
            down,
            sum,
            wide,
            shared,
            items,
            work,
            packed,
            packed_gated,
        ] = self.places(elements(of, n_embd, n));
        let (x, h) = (self.s.x.ptr(), self.s.h.ptr());
        let route = route_args(w, products, [chosen, weights, input_weights]);
        // As exact as F32 however many tokens there are: close choices stay what they are.
        let mut routed = h;
        if let Some(norm) = &w.router_norm {
            self.norm_rows(step, x, n_embd, norm, other)?;
            routed = other;
        }
        // Three numbers and two flags for each expert.
        let memory = 14 * of.n_expert;
        if let (Some(norm), Some(rows)) = (norm, &w.router_rows) {
            let args = RouteAloneArgs {
                route,
                x,
                norm: norm.weight.ptr(),
                h,
                router: rows.ptr(),
                bias: w.router.bias(),
                tickets: self.s.tickets.ptr(),
                n_in: n_embd as u32,
                eps: norm.eps,
            };
            let grid = Grid { blocks: [of.n_expert, n, 1], threads: 256, shared: memory };
            self.launch("route_alone", "", grid, &args)?;
        } else {
            let routed = Input::Rows { x: routed, norm: 0, eps: 0.0 };
            self.store_all(step, "router", [&w.router], routed, products)?;
            self.launch("route", "", Grid { blocks: [n, 1, 1], threads: 32, shared: memory }, &route)?;
        }

        let mut rows = h;
        if let Some([norm, _, _]) = &w.expert_norms {
            self.norm_rows(step, x, n_embd, norm, other)?;
            rows = other;
        }
        if let Some([linear, _]) = &w.latent {
            self.store_all(step, "experts' input", [linear], input, other)?;
            rows = other;
        }
        let mut items_a_row = of.n_used;
        if of.router.weight_input {
            let args =
                WeighArgs { x: rows, weights: input_weights, out: weighed, n: n_in as u32, n_used: of.n_used as u32 };
            let grid = Grid { blocks: [n * of.n_used, n_in.div_ceil(256), 1], threads: 256, shared: 0 };
            self.launch("weigh_inputs", "", grid, &args)?;
            (rows, items_a_row) = (weighed, 1);
        }
        let visits = Visits { chosen, x: rows, items_a_row, pairs, gated, down };
        if self.sorts(n, n * of.n_used, of.n_expert) {
            self.visit_sorted(step, w, &visits, [items, work], [packed, packed_gated])?;
        } else {
            self.visit(step, w, &visits)?;
        }
        self.sum(step, w, input, [weights, down, sum, wide, shared])
    }

    /// `down(activation(gate(x)) * up(x))` of every token at each of its experts.
    fn visit(&mut self, step: Step<'_>, w: &CudaExperts, v: &Visits) -> Result<(), CudaError> {
        let (n_ff, n_items) = (w.spec.expert.n_ff, w.spec.n_used * step.size.n_tokens);
        let product = v.gate_and_up(w);
        if w.gates_in_product() {
            self.grouped(&Grouped { output: Output::Gated, y: v.gated, y_stride: n_ff, ..product }, n_items)?;
        } else {
            self.grouped(&product, n_items)?;
            self.experts_activation(w, v, n_items)?;
        }
        self.grouped(&v.last(w), n_items)
    }

    /// The same of tokens sorted by expert.
    fn visit_sorted(
        &mut self,
        step: Step<'_>,
        w: &CudaExperts,
        v: &Visits,
        places: [u64; 2],
        [packed, packed_gated]: [u64; 2],
    ) -> Result<(), CudaError> {
        let (n_ff, n_items) = (w.spec.expert.n_ff, w.spec.n_used * step.size.n_tokens);
        let n_in = w.up.n_in();
        let sorted = self.sort(v.chosen, n_items, w.spec.n_expert, places)?;
        self.gather(&sorted, (v.x, v.items_a_row, n_in), n_in, packed)?;
        let product = Grouped { x: packed, ..v.gate_and_up(w) };
        // Packed rows end with a panel, which nobody else fills up.
        if w.gates_in_product() && n_ff.is_multiple_of(PANEL) {
            self.sorted_product(&Grouped { output: Output::Gated, y: packed_gated, ..product }, &sorted)?;
        } else {
            self.sorted_product(&product, &sorted)?;
            self.experts_activation(w, v, n_items)?;
            self.gather(&sorted, (v.gated, 1, n_ff), n_ff, packed_gated)?;
        }
        self.sorted_product(&Grouped { x: packed_gated, ..v.last(w) }, &sorted)
    }

    /// `gated = activation(gate) * up` of pairs.
    fn experts_activation(&mut self, w: &CudaExperts, v: &Visits, n_items: usize) -> Result<(), CudaError> {
        let n_ff = w.spec.expert.n_ff;
        let args = ExpertsActivationArgs {
            x: v.pairs,
            out: v.gated,
            n: n_ff as u32,
            gated: u32::from(w.gate.is_some()),
            activation: w.activation.0,
            limit: w.activation.1,
        };
        let grid = Grid { blocks: [n_items, n_ff.div_ceil(256), 1], threads: 256, shared: 0 };
        self.launch("experts_activation", "", grid, &args)
    }

    /// The weighted sum of what the experts give, and what all tokens go through besides.
    fn sum<'w>(
        &mut self,
        step: Step<'_>,
        w: &'w CudaExperts,
        input: Input,
        [weights, down, sum, wide, shared]: [u64; 5],
    ) -> Result<Given<'w>, CudaError> {
        let (of, n_embd) = (&w.spec, step.spec.n_embd);
        let n_in = of.latent.unwrap_or(n_embd);
        let mut args = ExpertsSumArgs {
            y: down,
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
        if let Some(dense) = &w.shared {
            let Given::Product { what, linear, input } = self.dense(step, dense, input)? else {
                return Err(CudaError::UnsupportedPart { part: "shared experts without a last product" });
            };
            self.store_all(step, what, [linear], input, shared)?;
            if let Some([_, _, norm]) = &w.expert_norms {
                self.norm_rows(step, shared, n_embd, norm, shared)?;
            }
            args.shared = shared;
            args.gate = ptr(w.shared_gate.as_ref());
        }
        if w.expert_norms.is_none() && w.latent.is_none() {
            return Ok(Given::Sum(args));
        }
        // The sum goes through more before what all tokens go through is added.
        let mut result = sum;
        self.experts_sum(step, &ExpertsSumArgs { shared: 0, gate: 0, ..args })?;
        if let Some([_, norm, _]) = &w.expert_norms {
            self.norm_rows(step, sum, n_in, norm, sum)?;
        }
        if let Some([_, linear]) = &w.latent {
            self.store_rows(step, "experts' output", linear, sum, wide)?;
            result = wide;
        }
        if args.shared != 0 {
            let more = ExpertsSumArgs { out: result, n: n_embd as u32, n_used: 0, add: 1, ..args };
            self.experts_sum(step, &more)?;
        }
        Ok(Given::Rows(result))
    }

    /// A weighted sum of what experts give.
    pub(super) fn experts_sum(&mut self, step: Step<'_>, args: &ExpertsSumArgs) -> Result<(), CudaError> {
        // Of a few tokens all multiprocessors have some; each block needs the gate's product.
        let n = step.size.n_tokens;
        let blocks = if n <= MATVEC_TOKENS { (args.n as usize).div_ceil(256) } else { 1 };
        self.launch("experts_sum", "", Grid { blocks: [blocks, n, 1], threads: 256, shared: 0 }, args)
    }
}
