//! Mixtures of experts: the router chooses a few experts for each token on the device, and the token's result is their weighted
//! sum, with the shared experts' result if the model has them.
//!
//! Kernels: `experts.cu` for the router, activations and sums, and the grouped products of `runner/grouped.rs` over items, where an
//! item is a token at one of its experts, `[n_tokens * n_used]` in the order of tokens.

use metal_attention_gguf::TensorType;
use metal_attention_model::{Experts, ExpertsWeights, Linear, NormKind, Router, RouterScore};

use super::CudaDense;
use super::dense::{activation_code, epilogue_applies, is_elementwise, widen_for_dense};
use crate::CudaError;
use crate::activations::Widths;
use crate::args::{Epilogue, ExpertsActivationArgs, ExpertsSumArgs, FusedRouteArgs, RouteArgs, WeighArgs};
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::matrix::PANEL;
use crate::runner::grouped::{GroupedLinearOp, packed_elements, sorted_elements};
use crate::runner::layer::SublayerOutput;
use crate::runner::linear::{GEMV_TOKENS, LinearInput};
use crate::runner::{MicroBatch, ModelRunner};
use crate::slice::{DevicePtr, DeviceSlice};
use crate::stack::CudaStack;
use crate::weights::{CudaLinear, CudaNorm, CudaVector, Loader, ptr_or_null};

/// Most elements of a row that `route_alone` supports.
const MAX_ROUTED: usize = 4 * 256 * 8;

/// Most experts of a layer.
pub(crate) const MAX_EXPERTS: usize = 1024;
/// Most experts of a token: `MAX_CHOSEN` of `routing.cuh`.
const MAX_CHOSEN: usize = 64;

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
    pub(crate) epilogue_applies_activation: bool,
}

impl CudaExperts {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &ExpertsWeights) -> Result<Self, CudaError> {
        let of = &w.spec;
        let gates: Option<Vec<&Linear>> = w.experts.iter().map(|expert| expert.gate.as_ref()).collect();
        let ups: Vec<_> = w.experts.iter().map(|expert| &expert.up).collect();
        let downs: Vec<_> = w.experts.iter().map(|expert| &expert.down).collect();
        let latent = match &w.latent {
            Some([down, up]) => Some([loader.linear(down)?, loader.linear(up)?]),
            None => None,
        };
        let shared = w.shared.as_ref().map(|shared| CudaDense::new(loader, shared)).transpose()?;
        let router = &w.router.weight;
        let as_they_are = router.ty() == TensorType::F32;
        let router_rows = as_they_are.then(|| loader.vector(&router.to_f32())).transpose()?;
        let (mut router_norm, mut expert_norms) = (None, None);
        if let (Some(own), Some([input, result, shared]), Some(scale)) =
            (&of.expert_norms, &w.expert_norms, &w.router_scale)
        {
            // The router's input is `rms(x) / sqrt(n_embd) * scale`.
            let factor = 1.0 / (scale.len() as f32).sqrt();
            let weight = loader.vector(&scale.iter().map(|s| s * factor).collect::<Vec<_>>())?;
            let (kind, n) = (NormKind::Rms, scale.len());
            router_norm = Some(CudaNorm { kind, weight, bias: None, eps: own.router_eps, n });
            expert_norms =
                Some([CudaNorm::new(loader, input)?, CudaNorm::new(loader, result)?, CudaNorm::new(loader, shared)?]);
        }
        Ok(Self {
            spec: of.clone(),
            router: loader.linear(&w.router)?,
            router_rows,
            router_norm,
            choice_bias: loader.optional(w.choice_bias.as_deref())?,
            latent,
            gate: gates.filter(|_| of.expert.gated).map(|gates| loader.stack(&gates)).transpose()?,
            up: loader.stack(&ups)?,
            down: loader.stack(&downs)?,
            expert_scale: loader.optional(w.expert_scale.as_deref())?,
            shared,
            shared_gate: loader.optional(w.shared_gate.as_deref())?,
            expert_norms,
            activation: activation_code(of.expert.activation),
            epilogue_applies_activation: epilogue_applies(of.expert.activation),
        })
    }

    /// Whether the product of gate and up can apply the activation in its epilogue.
    pub(crate) fn gates_in_product(&self) -> bool {
        let plain = |gate: &CudaStack| gate.pairs_with(&self.up) && gate.bias.is_none() && self.up.bias.is_none();
        self.epilogue_applies_activation && self.gate.as_ref().is_some_and(plain)
    }
}

/// Checks that there are kernels for a mixture of experts; the error is the part without one.
pub(crate) fn supports(spec: &Experts) -> Result<(), &'static str> {
    let Experts { n_expert, n_used, expert, biases: _, latent: _, router, expert_norms: _, shared: _ } = spec;
    let Router { score: _, choice_bias: _, renormalize: _, scale: _, groups: _, weights_inputs: _ } = router;
    if *n_expert > MAX_EXPERTS {
        return Err("more than 1024 experts in a layer");
    }
    if *n_used > MAX_CHOSEN {
        return Err("more than 64 experts for a token");
    }
    if n_used > n_expert {
        return Err("more experts for a token than a layer has");
    }
    if is_elementwise(expert.activation) { Ok(()) } else { Err("experts with sparse GELU") }
}

/// Widens the buffers of intermediate results.
pub(super) fn widen_for_experts(widths: &mut Widths, spec: &Experts, n_embd: usize) {
    if let Some(shared) = &spec.shared {
        widen_for_dense(widths, &shared.dense);
    }
    widths.widen_scratch(|n| elements(spec, n_embd, n));
}

/// Scratch elements (4 bytes each) of a mixture for `n` tokens, part by part. An item is a token at one of its experts.
fn elements(spec: &Experts, n_embd: usize, n: usize) -> [usize; 16] {
    let (n_ff, n_in, n_items) = (spec.expert.n_ff, spec.latent.unwrap_or(n_embd), n.saturating_mul(spec.n_used));
    let weighted_input = if spec.router.weights_inputs { n_items * n_in } else { 0 };
    let own_input = if spec.latent.is_some() || spec.expert_norms.is_some() { n_embd.max(n_in) } else { 0 };
    let [items, work] = sorted_elements(n_items, spec.n_expert);
    let packed = |width: usize| packed_elements(n_items, spec.n_expert, width);
    [
        // Router logits, `[n, n_expert]`.
        n * spec.n_expert,
        // Of each item the chosen expert, u32.
        n_items,
        // The weight of its result.
        n_items,
        // The weight of its input.
        n_items,
        // The input of the router or of the experts, where it is not the normalised residual stream.
        n * own_input,
        // The experts' inputs times their weights, `[n_items, n_in]`.
        weighted_input,
        // Gate and up of each item.
        2 * n_items * n_ff,
        // The same after the activation.
        n_items * n_ff,
        // The experts' results.
        n_items * n_in,
        // The weighted sums, `[n, n_in]`.
        n * n_in.max(n_embd),
        // The weighted sums in the width of the residual stream.
        n * n_embd,
        // The result of the shared experts.
        n * n_embd,
        // Of items sorted by expert, the item at each place.
        items,
        // The list of work of the grouped GEMM.
        work,
        // The packed rows of sorted items, as input of the first product.
        packed(n_in),
        // The same of the last product.
        packed(n_ff),
    ]
}

/// Arguments of the router kernel: it reads the router logits and writes the expert (`chosen`), the weight and the input weight of
/// each item.
pub(crate) fn route_args(
    w: &CudaExperts,
    logits: DeviceSlice<f32>,
    chosen: DeviceSlice<u32>,
    [weights, input_weights]: [DeviceSlice<f32>; 2],
) -> RouteArgs {
    let (spec, router) = (&w.spec, &w.spec.router);
    let groups = router.groups.as_ref().map_or((0, 0), |groups| (groups.n, groups.n_used));
    RouteArgs {
        products: logits.ptr(),
        choice_bias: ptr_or_null(w.choice_bias.as_ref()),
        expert_scale: ptr_or_null(w.expert_scale.as_ref()),
        experts: chosen.ptr(),
        weights: weights.ptr(),
        input_weights: if router.weights_inputs { input_weights.ptr() } else { DevicePtr::NULL },
        n_expert: spec.n_expert as u32,
        n_used: spec.n_used as u32,
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

/// The items' data.
struct ExpertItems {
    /// The expert of each item, u32.
    chosen: DeviceSlice<u32>,
    /// The input rows of the experts, `[n_items / items_a_row, n_in]`.
    x: DeviceSlice<f32>,
    /// Consecutive items that share an input row.
    items_a_row: usize,
    /// Gate and up of each item, `[n_items, 2 * n_ff]`.
    gate_up: DeviceSlice<f32>,
    /// The same after the activation, `[n_items, n_ff]`.
    gated: DeviceSlice<f32>,
    /// The experts' results, `[n_items, n_in]`.
    down: DeviceSlice<f32>,
}

impl ExpertItems {
    /// The product of gate and up, or of up alone, stored to `gate_up`.
    fn gate_and_up<'w>(&self, w: &'w CudaExperts) -> GroupedLinearOp<'w> {
        let (first, second) = w.gate.as_ref().map_or((&w.up, None), |gate| (gate, Some(&w.up)));
        GroupedLinearOp {
            label: "experts' gate and up",
            first,
            second,
            epilogue: Epilogue::Store,
            activation: w.activation.0,
            groups: self.chosen.ptr(),
            x: self.x,
            items_a_row: self.items_a_row,
            x_stride: w.up.n_in(),
            y: self.gate_up,
            y_stride: w.spec.expert.n_ff * if second.is_some() { 2 } else { 1 },
        }
    }

    /// The last product of the experts, stored to `down`.
    fn last<'w>(&self, w: &'w CudaExperts) -> GroupedLinearOp<'w> {
        GroupedLinearOp {
            label: "experts' down",
            first: &w.down,
            second: None,
            epilogue: Epilogue::Store,
            activation: 0,
            groups: self.chosen.ptr(),
            x: self.gated,
            items_a_row: 1,
            x_stride: w.spec.expert.n_ff,
            y: self.down,
            y_stride: w.down.n_rows,
        }
    }
}

impl ModelRunner {
    /// Whether one kernel applies `norm`, computes the router logits and chooses the experts. It also writes the normalised
    /// rows for the experts. Not for `exact` passes, whose bits may not depend on the number of tokens.
    pub(crate) fn router_norms(&self, batch: MicroBatch<'_>, w: &CudaExperts, norm: &CudaNorm) -> bool {
        !self.exact
            && self.uses_f32_inputs(batch.size.n_tokens)
            && w.router_rows.is_some()
            && w.router_norm.is_none()
            && norm.fuses_with_product()
            && norm.n <= MAX_ROUTED
    }

    /// Launches the mixture of experts; the weighted sum is returned, in part not computed yet. `input`: the normalised
    /// residual stream as products read it. `norm`: the norm that the router's kernel has to apply, if `input` is not made yet
    /// ([`router_norms`](Self::router_norms)).
    pub(crate) fn experts<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        w: &'w CudaExperts,
        input: LinearInput,
        norm: Option<&CudaNorm>,
    ) -> Result<SublayerOutput<'w>, CudaError> {
        let (spec, n_embd, n) = (&w.spec, batch.spec.n_embd, batch.size.n_tokens);
        let n_in = spec.latent.unwrap_or(n_embd);
        let [
            logits,
            chosen,
            weights,
            input_weights,
            own_input,
            weighted_input,
            gate_up,
            gated,
            down,
            sum,
            wide_sum,
            shared,
            items,
            work,
            packed,
            packed_gated,
        ] = self.scratch(elements(spec, n_embd, n));
        let (x, h) = (self.buffers.x.slice(), self.buffers.h.slice());
        let chosen = chosen.cast();
        let route = route_args(w, logits, chosen, [weights, input_weights]);
        // The router reads F32 inputs for any number of tokens, so that close choices do not depend on it.
        let mut routed = h;
        if let Some(norm) = &w.router_norm {
            self.norm_rows(batch, x, n_embd, norm, own_input)?;
            routed = own_input;
        }
        // Shared memory of the router: three numbers and two flags for each expert.
        let memory = 14 * spec.n_expert;
        if let (Some(norm), Some(rows)) = (norm, &w.router_rows) {
            let args = FusedRouteArgs {
                route,
                x: x.ptr(),
                norm: norm.weight.ptr(),
                h: h.ptr(),
                router: rows.ptr(),
                bias: w.router.bias(),
                tickets: self.buffers.tickets.ptr(),
                n_in: n_embd as u32,
                eps: norm.eps,
            };
            let grid = LaunchGrid { blocks: [spec.n_expert, n, 1], threads: 256, shared: memory };
            self.launch(kernels::ROUTE_ALONE, "", grid, &args)?;
        } else {
            let routed = LinearInput::rows(routed);
            self.store_all(batch, "router", [&w.router], routed, logits)?;
            self.launch(kernels::ROUTE, "", LaunchGrid { blocks: [n, 1, 1], threads: 32, shared: memory }, &route)?;
        }

        let mut rows = h;
        if let Some([norm, _, _]) = &w.expert_norms {
            self.norm_rows(batch, x, n_embd, norm, own_input)?;
            rows = own_input;
        }
        if let Some([linear, _]) = &w.latent {
            self.store_all(batch, "experts' input", [linear], input, own_input)?;
            rows = own_input;
        }
        let mut items_a_row = spec.n_used;
        if spec.router.weights_inputs {
            let args = WeighArgs {
                x: rows.ptr(),
                weights: input_weights.ptr(),
                out: weighted_input.ptr(),
                n: n_in as u32,
                n_used: spec.n_used as u32,
            };
            let grid = LaunchGrid { blocks: [n * spec.n_used, n_in.div_ceil(256), 1], threads: 256, shared: 0 };
            self.launch(kernels::WEIGH_INPUTS, "", grid, &args)?;
            (rows, items_a_row) = (weighted_input, 1);
        }
        let visits = ExpertItems { chosen, x: rows, items_a_row, gate_up, gated, down };
        if self.uses_grouped_gemm(n, n * spec.n_used, spec.n_expert) {
            self.run_experts_sorted(batch, w, &visits, [items, work], [packed, packed_gated])?;
        } else {
            self.run_experts(batch, w, &visits)?;
        }
        self.sum(batch, w, input, [weights, down, sum, wide_sum, shared])
    }

    /// Computes `down(activation(gate(x)) * up(x))` of each item with grouped GEMVs.
    fn run_experts(&mut self, batch: MicroBatch<'_>, w: &CudaExperts, v: &ExpertItems) -> Result<(), CudaError> {
        let (n_ff, n_items) = (w.spec.expert.n_ff, w.spec.n_used * batch.size.n_tokens);
        let product = v.gate_and_up(w);
        if w.gates_in_product() {
            self.grouped_gemv(
                &GroupedLinearOp { epilogue: Epilogue::Gated, y: v.gated, y_stride: n_ff, ..product },
                n_items,
            )?;
        } else {
            self.grouped_gemv(&product, n_items)?;
            self.experts_activation(w, v, n_items)?;
        }
        self.grouped_gemv(&v.last(w), n_items)
    }

    /// Computes the same with grouped GEMMs over items sorted by expert.
    fn run_experts_sorted(
        &mut self,
        batch: MicroBatch<'_>,
        w: &CudaExperts,
        v: &ExpertItems,
        places: [DeviceSlice<f32>; 2],
        [packed, packed_gated]: [DeviceSlice<f32>; 2],
    ) -> Result<(), CudaError> {
        let (n_ff, n_items) = (w.spec.expert.n_ff, w.spec.n_used * batch.size.n_tokens);
        let n_in = w.up.n_in();
        let sorted = self.sort_by_group(v.chosen.ptr(), n_items, w.spec.n_expert, places)?;
        self.gather_rows(&sorted, (v.x, v.items_a_row, n_in), n_in, packed)?;
        let product = GroupedLinearOp { x: packed, ..v.gate_and_up(w) };
        // The last panel of packed rows has to be padded, which the gated epilogue does not do.
        if w.gates_in_product() && n_ff.is_multiple_of(PANEL) {
            self.grouped_gemm(&GroupedLinearOp { epilogue: Epilogue::Gated, y: packed_gated, ..product }, &sorted)?;
        } else {
            self.grouped_gemm(&product, &sorted)?;
            self.experts_activation(w, v, n_items)?;
            self.gather_rows(&sorted, (v.gated, 1, n_ff), n_ff, packed_gated)?;
        }
        self.grouped_gemm(&GroupedLinearOp { x: packed_gated, ..v.last(w) }, &sorted)
    }

    /// Launches `gated = activation(gate) * up` of all items, or `activation(up)` without a gate.
    fn experts_activation(&mut self, w: &CudaExperts, v: &ExpertItems, n_items: usize) -> Result<(), CudaError> {
        let n_ff = w.spec.expert.n_ff;
        let args = ExpertsActivationArgs {
            x: v.gate_up.ptr(),
            out: v.gated.ptr(),
            n: n_ff as u32,
            gated: u32::from(w.gate.is_some()),
            activation: w.activation.0,
            limit: w.activation.1,
        };
        let grid = LaunchGrid { blocks: [n_items, n_ff.div_ceil(256), 1], threads: 256, shared: 0 };
        self.launch(kernels::EXPERTS_ACTIVATION, "", grid, &args)
    }

    /// Returns the weighted sum over each token's experts, with the shared experts added.
    fn sum<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        w: &'w CudaExperts,
        input: LinearInput,
        [weights, down, sum, wide_sum, shared]: [DeviceSlice<f32>; 5],
    ) -> Result<SublayerOutput<'w>, CudaError> {
        let (spec, n_embd) = (&w.spec, batch.spec.n_embd);
        let n_in = spec.latent.unwrap_or(n_embd);
        let mut args = ExpertsSumArgs {
            y: down.ptr(),
            weights: weights.ptr(),
            shared: DevicePtr::NULL,
            gate: DevicePtr::NULL,
            h: self.buffers.h.ptr(),
            out: sum.ptr(),
            n: n_in as u32,
            n_used: spec.n_used as u32,
            add: 0,
            scale: 1.0,
        };
        if let Some(dense) = &w.shared {
            let SublayerOutput::Product { label, linear, input } = self.dense(batch, dense, input)? else {
                return Err(CudaError::UnsupportedPart { part: "shared experts without a last product" });
            };
            self.store_all(batch, label, [linear], input, shared)?;
            if let Some([_, _, norm]) = &w.expert_norms {
                self.norm_rows(batch, shared, n_embd, norm, shared)?;
            }
            args.shared = shared.ptr();
            args.gate = ptr_or_null(w.shared_gate.as_ref());
        }
        if w.expert_norms.is_none() && w.latent.is_none() {
            return Ok(SublayerOutput::Sum(args));
        }
        // The experts' sum goes through a norm or a product before the shared experts are added, so it is computed here.
        let mut result = sum;
        self.experts_sum(batch, &ExpertsSumArgs { shared: DevicePtr::NULL, gate: DevicePtr::NULL, ..args })?;
        if let Some([_, norm, _]) = &w.expert_norms {
            self.norm_rows(batch, sum, n_in, norm, sum)?;
        }
        if let Some([_, linear]) = &w.latent {
            self.store_rows(batch, "experts' output", linear, sum, wide_sum)?;
            result = wide_sum;
        }
        if !args.shared.is_null() {
            let add_shared = ExpertsSumArgs { out: result.ptr(), n: n_embd as u32, n_used: 0, add: 1, ..args };
            self.experts_sum(batch, &add_shared)?;
        }
        Ok(SublayerOutput::Rows(result))
    }

    /// Launches the weighted sum.
    pub(crate) fn experts_sum(&mut self, batch: MicroBatch<'_>, args: &ExpertsSumArgs) -> Result<(), CudaError> {
        // For a few tokens, several blocks of each, so that all multiprocessors work. With more tokens one block of each: every
        // block computes the product with the shared gate again.
        let n = batch.size.n_tokens;
        let blocks = if n <= GEMV_TOKENS { (args.n as usize).div_ceil(256) } else { 1 };
        self.launch(kernels::EXPERTS_SUM, "", LaunchGrid { blocks: [blocks, n, 1], threads: 256, shared: 0 }, args)
    }
}
