//! RWKV's time mixes (versions 6 and 7) and its channel mix. The state of a sequence in a layer is a matrix for each
//! head, followed by the inputs of the last token to the time mix and to the channel mix, which their token shifts mix
//! in.

use metal_attention_model::{
    Activation, BatchKind, ChannelMixSpec, ChannelMixWeights, Linear, RWKV6_MIXES, Rwkv6Spec, Rwkv6Weights, Rwkv7Spec,
    Rwkv7Weights,
};
use wgpu::Buffer;

use crate::activations::{ActivationWidths, widen};
use crate::dispatch::GridExtent;
use crate::kernels::{
    self, ColumnRange, Gating, LowRankActivation, LowRankShape, MatvecOutput, Rwkv6Buffers, Rwkv6Mix, Rwkv6MixBuffers,
    Rwkv6Output, Rwkv6Shape, Rwkv7Buffers, Rwkv7Mix, Rwkv7MixBuffers, Rwkv7Shape, TOKEN_TILE, TokenShiftBuffers,
    TokenShiftShape,
};
use crate::plan::{BranchInput, BranchOutput, LastProduct, LinearProduct, PlanBuilder};
use crate::weights::{Uploads, WgpuLinear, concat, transposed};
use crate::{Bind, Dispatch, WgpuDevice, WgpuError};

/// RWKV-6's time mix with its weights. `width` is the number of channels of all heads.
#[derive(Debug)]
pub(crate) struct WgpuRwkv6 {
    /// Its sizes.
    spec: Rwkv6Spec,
    /// Factors of the first token shift, whose result the other factors depend on, `[width]`.
    lerp_x: Buffer,
    /// Factors of the second token shift for decay, key, value, receptance and gate, `[5, width]`.
    lerps: Buffer,
    /// First matrices of the low-rank products that add to `lerps`, stacked, `[5 * mix_rank, width]`.
    mix_down: WgpuLinear,
    /// Second matrices of the same, transposed, `[5, mix_rank, width]`.
    mix_up: Buffer,
    /// First matrix of the decay, `[decay_rank, width]`.
    decay_down: WgpuLinear,
    /// Second matrix of the decay, transposed, `[decay_rank, width]`.
    decay_up: Buffer,
    /// Bias of the decay, `[width]`.
    decay_bias: Buffer,
    /// Factor on the present token's own key and value, `[width]`.
    bonus: Option<Buffer>,
    /// Receptance, the query of RWKV.
    receptance: WgpuLinear,
    /// Key.
    key: WgpuLinear,
    /// Value.
    value: WgpuLinear,
    /// Gate.
    gate: WgpuLinear,
    /// Weight and bias of the norm of each head's result, `[width]` each.
    norm: Option<[Buffer; 2]>,
    /// The output projection.
    out: WgpuLinear,
}

/// RWKV-7's time mix with its weights.
#[derive(Debug)]
pub(crate) struct WgpuRwkv7 {
    /// Its sizes.
    spec: Rwkv7Spec,
    /// Factors of the token shift, `[n_mix, width]`.
    lerps: Buffer,
    /// Receptance, the query of RWKV.
    receptance: WgpuLinear,
    /// Key.
    key: WgpuLinear,
    /// Value.
    value: WgpuLinear,
    /// Sizes of the low-rank products.
    low_rank: LowRankShape,
    /// First matrices of the low-rank products of decay, learning rate, share of the first layer's values, and gate, as
    /// far as the model has them, stacked.
    down: WgpuLinear,
    /// Second matrices of the same, transposed, one after the other, `[sum of ranks, width]`.
    up: Buffer,
    /// Parameters of each channel, `[8, width]`, in the order of [`Rwkv7MixBuffers`].
    channel_params: Buffer,
    /// The output projection.
    out: WgpuLinear,
}

/// A channel mix with its weights.
#[derive(Debug)]
pub(crate) struct WgpuChannelMix {
    /// Its sizes.
    spec: ChannelMixSpec,
    /// Factors of the token shift, `[n_mix, n_embd]`.
    lerps: Buffer,
    /// The matrix before the activation.
    key: WgpuLinear,
    /// The matrix after the activation.
    value: WgpuLinear,
    /// The projection to the gate of the result, if there is one.
    receptance: Option<WgpuLinear>,
}

impl WgpuRwkv6 {
    /// Uploads the weights.
    pub(super) fn new(gpu: &WgpuDevice, w: &Rwkv6Weights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        let vector = |values: &[f32]| gpu.upload("weights of channels", values);
        let mut matrix = |linear: &Linear| concat(gpu, "a matrix of a time mix", &[linear], uploads);
        Ok(Self {
            spec: w.spec,
            lerp_x: vector(&w.lerp_x)?,
            lerps: vector(&w.lerps)?,
            mix_down: matrix(&w.mix_down)?,
            mix_up: vector(&transposed(&w.mix_up.iter().collect::<Vec<_>>()))?,
            decay_down: matrix(&w.decay.down)?,
            decay_up: vector(&transposed(&[&w.decay.up]))?,
            decay_bias: vector(&w.decay_bias)?,
            bonus: w.bonus.as_deref().map(vector).transpose()?,
            receptance: matrix(&w.receptance)?,
            key: matrix(&w.key)?,
            value: matrix(&w.value)?,
            gate: matrix(&w.gate)?,
            norm: match &w.norm {
                Some([weight, bias]) => Some([vector(weight)?, vector(bias)?]),
                None => None,
            },
            out: matrix(&w.out)?,
        })
    }
}

impl WgpuRwkv7 {
    /// Uploads the weights.
    pub(super) fn new(gpu: &WgpuDevice, w: &Rwkv7Weights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        let first_value = w.first_value.as_ref().map(|(low_rank, _)| low_rank);
        let low_rank: Vec<_> =
            [Some(&w.decay), Some(&w.rate), first_value, w.gate.as_ref()].into_iter().flatten().collect();
        let downs: Vec<_> = low_rank.iter().map(|low_rank| &low_rank.down).collect();
        let ups: Vec<_> = low_rank.iter().map(|low_rank| &low_rank.up).collect();
        let none = vec![0.0; w.spec.width];
        let first_bias = w.first_value.as_ref().map_or(&none, |(_, bias)| bias);
        let [norm_weight, norm_bias] = w.norm.as_ref().map_or([&none, &none], |[weight, bias]| [weight, bias]);
        let channel_params =
            [&w.decay_bias, &w.rate_bias, first_bias, &w.removed, &w.kept, &w.bonus, norm_weight, norm_bias];
        Ok(Self {
            spec: w.spec,
            lerps: gpu.upload("weights of channels", &w.lerps)?,
            receptance: concat(gpu, "the receptances", &[&w.receptance], uploads)?,
            key: concat(gpu, "the keys", &[&w.key], uploads)?,
            value: concat(gpu, "the values", &[&w.value], uploads)?,
            low_rank: low_rank_of_rwkv7(&w.spec),
            down: concat(gpu, "the low-rank matrices", &downs, uploads)?,
            up: gpu.upload("the low-rank matrices", &transposed(&ups))?,
            channel_params: gpu.upload("weights of channels", &channel_params.map(Vec::as_slice).concat())?,
            out: concat(gpu, "the time mix's output matrix", &[&w.out], uploads)?,
        })
    }
}

impl WgpuChannelMix {
    /// Uploads the weights.
    pub(super) fn new(gpu: &WgpuDevice, w: &ChannelMixWeights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        let mut matrix = |linear: &Linear| concat(gpu, "a matrix of a channel mix", &[linear], uploads);
        Ok(Self {
            spec: w.spec,
            key: matrix(&w.key)?,
            value: matrix(&w.value)?,
            receptance: w.receptance.as_ref().map(matrix).transpose()?,
            lerps: gpu.upload("weights of channels", &w.lerps)?,
        })
    }
}

/// Index of the decay among RWKV-7's low-rank products.
const DECAY: usize = 0;
/// Index of the in-context learning rate.
const RATE: usize = 1;
/// Index of the share of the first layer's values in those of later layers. The gate is the last product.
const FIRST_VALUE: usize = 2;

/// The error for heads that one workgroup cannot hold.
const TOO_LARGE: WgpuError = WgpuError::UnsupportedPart { part: "RWKV with heads too large for a workgroup" };

/// The sizes of RWKV-7's low-rank products: decay, learning rate, share of the first layer's values (not in the first
/// layer itself), gate (if the model has one).
fn low_rank_of_rwkv7(spec: &Rwkv7Spec) -> LowRankShape {
    let first_value = (!spec.first).then_some((spec.value_rank, LowRankActivation::AsItIs));
    let gate = spec.gate_rank.map(|rank| (rank, LowRankActivation::Sigmoid));
    let decay_and_rate = [(spec.decay_rank, LowRankActivation::Tanh), (spec.rate_rank, LowRankActivation::AsItIs)];
    LowRankShape { width: spec.width, parts: decay_and_rate.into_iter().chain(first_value).chain(gate).collect() }
}

/// Widens the scratch buffers for RWKV-6's time mix.
pub(super) fn widen_for_rwkv6(widths: &mut ActivationWidths, spec: &Rwkv6Spec) {
    widen(&mut widths.mixer_out, spec.width);
    let rwkv = &mut widths.rwkv;
    rwkv.widen_for_shift(spec.width, RWKV6_MIXES);
    widen(&mut rwkv.heads, spec.width);
    widen(&mut rwkv.gate, spec.width);
    widen(&mut rwkv.small, spec.decay_rank.max(RWKV6_MIXES * spec.mix_rank));
    widen(&mut rwkv.large, spec.width);
    widen(&mut rwkv.lerps, RWKV6_MIXES * spec.width);
}

/// Widens the scratch buffers for RWKV-7's time mix.
pub(super) fn widen_for_rwkv7(widths: &mut ActivationWidths, spec: &Rwkv7Spec) {
    widen(&mut widths.mixer_out, spec.width);
    widths.rwkv.widen_for_shift(spec.width, spec.n_mix());
    widen(&mut widths.rwkv.heads, spec.width);
    widen(&mut widths.rwkv.first_value, spec.width);
    widen_for_low_rank(widths, &low_rank_of_rwkv7(spec));
}

/// Widens the scratch buffers for low-rank products.
pub(super) fn widen_for_low_rank(widths: &mut ActivationWidths, shape: &LowRankShape) {
    widen(&mut widths.rwkv.small, shape.n_in());
    widen(&mut widths.rwkv.large, shape.n_out());
}

/// Widens the scratch buffers for a channel mix.
pub(super) fn widen_for_channel_mix(widths: &mut ActivationWidths, spec: &ChannelMixSpec) {
    widen(&mut widths.gate_up, spec.width);
    widen(&mut widths.gated, spec.width);
    widths.rwkv.widen_for_shift(spec.n_embd, spec.n_mix());
    if spec.gated {
        widen(&mut widths.rwkv.heads, spec.n_embd);
        widen(&mut widths.rwkv.gate, spec.n_embd);
    }
}

impl<'a> PlanBuilder<'a> {
    /// Appends RWKV-7's time mix of layer `i`, whose result is in `mixer_out`. The token shift writes `mixed`, products
    /// of it `r`, `k`, `v` and, through low-rank matrices, `small` and `large` (decay, rate, share, gate). The first
    /// layer writes its values to `first_value`, where later layers read them.
    pub(crate) fn rwkv7(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        w: &'a WgpuRwkv7,
        input: BranchInput<'a>,
    ) -> Result<LastProduct<'a>, WgpuError> {
        let (scratch, r, spec) = (self.scratch, &self.scratch.rwkv, &w.spec);
        let input = self.rows_of(dispatches, input)?;
        let shift = TokenShiftOptions { n_out: spec.n_mix(), at: spec.width * spec.head_dim, advance: true };
        self.shift(dispatches, i, input, &shift, &w.lerps, None)?;
        // The first layer's values stay in their own buffer for all later layers.
        let v = if spec.first { &r.first_value } else { &r.v };
        // The token shift's results are the inputs of r, w, k, v, a, g, in this order.
        let [for_r, for_w, for_k, for_v, for_a] = [0, 1, 2, 3, 4].map(|m| &r.mixed[m]);
        for (linear, x, y) in [(&w.receptance, for_r, &r.r), (&w.key, for_k, &r.k), (&w.value, for_v, v)] {
            self.multiply(dispatches, LinearProduct::new(linear, MatvecOutput::Store, x, y))?;
        }
        let low_rank = &w.low_rank;
        let first_value = (!spec.first).then_some(for_v);
        let inputs = [Some(for_w), Some(for_a), first_value, spec.gate_rank.map(|_| &r.mixed[5])];
        let ranks = low_rank.parts.iter().map(|(rank, _)| *rank);
        let inputs: Vec<_> = ranks.zip(inputs.into_iter().flatten()).collect();
        let tile = if self.kind == BatchKind::One { 1 } else { TOKEN_TILE };
        dispatches.extend(kernels::matvec_of_inputs(self.gpu, &w.down.weight, &inputs, tile, &r.small, self.batch)?);
        self.expand(dispatches, low_rank, &w.up, &r.large)?;

        let row = ColumnRange::whole(spec.width);
        let residual = (!spec.first).then_some([row, low_rank.result(FIRST_VALUE)]);
        let gate = spec.gate_rank.map(|_| low_rank.result(low_rank.parts.len() - 1));
        let mix = Rwkv7Mix { norm_eps: spec.norm.then_some(spec.norm_eps()), residual, gate };
        let shape = Rwkv7Shape {
            n_head: spec.n_head(),
            key_dim: spec.head_dim,
            value_dim: spec.head_dim,
            r: row,
            decay: low_rank.result(DECAY),
            k: row,
            v: row,
            a: low_rank.result(RATE),
            b: row,
            out: row,
            states: self.states_at(i, 0),
        };
        let buffers = Rwkv7Buffers {
            r: &r.r,
            decay: &r.large,
            k: &r.k,
            v,
            a: &r.large,
            b: &r.k,
            states: self.states.of_layer(i),
            out: &scratch.mixer_out,
            segments: self.states.segments(),
        };
        let with = Rwkv7MixBuffers {
            weights: &w.channel_params,
            residual: (!spec.first).then_some([&r.first_value as &dyn Bind, &r.large]),
            gate: spec.gate_rank.map(|_| &r.large as &dyn Bind),
        };
        dispatches
            .push(kernels::rwkv7_mix(self.gpu, &shape, &mix, &buffers, &with, GridExtent::Runs)?.ok_or(TOO_LARGE)?);
        Ok(LastProduct::new(&w.out, &scratch.mixer_out))
    }

    /// Appends RWKV-6's time mix of layer `i`, whose result is in `mixer_out`.
    pub(crate) fn rwkv6(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        w: &'a WgpuRwkv6,
        input: BranchInput<'a>,
    ) -> Result<LastProduct<'a>, WgpuError> {
        let (scratch, r, spec) = (self.scratch, &self.scratch.rwkv, &w.spec);
        let input = self.rows_of(dispatches, input)?;
        let at = spec.width * spec.head_dim;
        // The factors of the second token shift depend on the token: they come from the first one, which must therefore
        // not replace the last token's row in the state yet.
        self.shift(dispatches, i, input, &TokenShiftOptions { n_out: 1, at, advance: false }, &w.lerp_x, None)?;
        self.multiply(dispatches, LinearProduct::new(&w.mix_down, MatvecOutput::Store, &r.mixed[0], &r.small))?;
        let mixes =
            LowRankShape { width: spec.width, parts: vec![(spec.mix_rank, LowRankActivation::Tanh); RWKV6_MIXES] };
        self.expand(dispatches, &mixes, &w.mix_up, &r.lerps)?;
        self.shift(
            dispatches,
            i,
            input,
            &TokenShiftOptions { n_out: RWKV6_MIXES, at, advance: true },
            &w.lerps,
            Some(&r.lerps),
        )?;
        // The token shift's results are the inputs of w, k, v, r, g, in this order.
        let products: [(&WgpuLinear, &Buffer); 5] =
            [(&w.decay_down, &r.small), (&w.key, &r.k), (&w.value, &r.v), (&w.receptance, &r.r), (&w.gate, &r.gate)];
        for ((linear, y), x) in products.into_iter().zip(&r.mixed) {
            self.multiply(dispatches, LinearProduct::new(linear, MatvecOutput::Store, x, y))?;
        }
        let decay = LowRankShape { width: spec.width, parts: vec![(spec.decay_rank, LowRankActivation::Tanh)] };
        self.expand(dispatches, &decay, &w.decay_up, &r.large)?;

        let (row, of_kv) = (ColumnRange::whole(spec.width), ColumnRange::whole(spec.n_head_kv * spec.head_dim));
        let output = if spec.bonus {
            Rwkv6Output::Normed { eps: spec.norm_eps() }
        } else {
            Rwkv6Output::Linear { share: spec.n_head() / spec.n_head_kv }
        };
        let shape = Rwkv6Shape {
            n_head: spec.n_head(),
            key_dim: spec.head_dim,
            value_dim: spec.head_dim,
            r: row,
            k: of_kv,
            v: of_kv,
            decay: row,
            out: row,
            states: self.states_at(i, 0),
        };
        let buffers = Rwkv6Buffers {
            r: &r.r,
            k: &r.k,
            v: &r.v,
            decay: &r.large,
            bonus: w.bonus.as_ref().map(|bonus| bonus as &dyn Bind),
            states: self.states.of_layer(i),
            out: &scratch.mixer_out,
            segments: self.states.segments(),
        };
        let with = Rwkv6MixBuffers {
            decay_bias: &w.decay_bias,
            norm: w.norm.as_ref().map(|norm| norm.each_ref().map(|values| values as &dyn Bind)),
            gate: &r.gate,
        };
        let mix = Rwkv6Mix { output, gate: row };
        dispatches
            .push(kernels::rwkv6_mix(self.gpu, &shape, &mix, &buffers, &with, GridExtent::Runs)?.ok_or(TOO_LARGE)?);
        Ok(LastProduct::new(&w.out, &scratch.mixer_out))
    }

    /// Appends the channel mix of layer `i`. Without a receptance the last product is left. With one, the gated result is
    /// added to `x` if it may be (`may_add`), else written to `rwkv.k`.
    pub(crate) fn channel_mix(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        w: &'a WgpuChannelMix,
        input: BranchInput<'a>,
        may_add: bool,
    ) -> Result<BranchOutput<'a>, WgpuError> {
        let (scratch, r, spec) = (self.scratch, &self.scratch.rwkv, &w.spec);
        let input = self.rows_of(dispatches, input)?;
        let at = self.spec.layers[i].mixer.state_elements();
        self.shift(
            dispatches,
            i,
            input,
            &TokenShiftOptions { n_out: spec.n_mix(), at, advance: true },
            &w.lerps,
            None,
        )?;
        self.multiply(dispatches, LinearProduct::new(&w.key, MatvecOutput::Store, &r.mixed[0], &scratch.gate_up))?;
        dispatches.push(kernels::activation(
            self.gpu,
            Activation::ReluSquared,
            spec.width,
            Gating::None,
            &scratch.gate_up,
            &scratch.gated,
        )?);
        let Some(receptance) = &w.receptance else { return Ok(LastProduct::new(&w.value, &scratch.gated).into()) };
        self.multiply(dispatches, LinearProduct::new(receptance, MatvecOutput::Store, &r.mixed[1], &r.gate))?;
        self.multiply(dispatches, LinearProduct::new(&w.value, MatvecOutput::Store, &scratch.gated, &scratch.result))?;
        let (y, output) = if may_add { (&scratch.x, BranchOutput::Added) } else { (&r.k, BranchOutput::Sum(&r.k)) };
        dispatches.push(kernels::channel_gate(self.gpu, spec.n_embd, may_add, &r.gate, &scratch.result, y)?);
        Ok(output)
    }

    /// Appends a token shift of layer `i`, which mixes the rows of `x` with those of the previous tokens, to `mixed`. `mu`:
    /// the factors of all tokens; `mu_of_tokens`: what each token adds to them.
    fn shift(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        x: &Buffer,
        options: &TokenShiftOptions,
        mu: &Buffer,
        mu_of_tokens: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let channels = self.spec.n_embd;
        let shape = TokenShiftShape {
            channels,
            n_out: options.n_out,
            x: ColumnRange::whole(channels),
            mu_of_tokens: mu_of_tokens.map(|_| ColumnRange::whole(options.n_out * channels)),
            states: self.states_at(i, options.at),
            advance: options.advance,
        };
        let out: Vec<_> = self.scratch.rwkv.mixed[..options.n_out].iter().map(|out| out as &dyn Bind).collect();
        let buffers = TokenShiftBuffers {
            x,
            mu,
            mu_of_tokens: mu_of_tokens.map(|mu| mu as &dyn Bind),
            states: self.states.of_layer(i),
            out: &out,
            segments: self.states.segments(),
        };
        dispatches.push(kernels::token_shift(self.gpu, &shape, &buffers, GridExtent::Runs)?);
        Ok(())
    }

    /// Appends the second matrices `up` of low-rank products, from `rwkv.small` to `y`.
    pub(super) fn expand(
        &self,
        dispatches: &mut Vec<Dispatch>,
        shape: &LowRankShape,
        up: &Buffer,
        y: &Buffer,
    ) -> Result<(), WgpuError> {
        let one = self.kind == BatchKind::One;
        dispatches.push(kernels::low_rank(self.gpu, shape, one, &self.scratch.rwkv.small, up, y, self.batch)?);
        Ok(())
    }
}

/// The properties in which token shifts differ.
struct TokenShiftOptions {
    /// Number of results: each token's row mixed with the one before by different factors.
    n_out: usize,
    /// Where the last token's row lies in the layer's state.
    at: usize,
    /// Whether the row in the state is replaced by the batch's last one.
    advance: bool,
}
