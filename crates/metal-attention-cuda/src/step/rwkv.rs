//! RWKV's time mixes and its channel mix, which keep a state and the input of the token before.

use bytemuck::Zeroable;
use metal_attention_model::{ChannelMixSpec, RWKV6_MIXES, Rwkv6Spec, Rwkv7Spec};

use super::grouped::Grouped;
use super::layer::Given;
use super::product::{BUSY_WARPS, PANELS_AHEAD, WARPS, power_of_two, shared_of};
use super::walk::Rule;
use super::{Step, Steps};
use crate::CudaError;
use crate::args::{
    Function, GroupNormArgs, GroupNormKind, InputFunction, MAX_SIDE_PRODUCTS, Output, OutputGate, RowsArgs, Rwkv6Args,
    Rwkv7Args, Rwkv7InputsArgs, SideProductArgs, SideProductsArgs, StatesArgs, TokenShiftArgs,
};
use crate::device::CudaBuffer;
use crate::launch::Grid;
use crate::matrix::PANEL;
use crate::weights::{CudaChannelMix, CudaLinear, CudaLowRank, CudaRwkv6, CudaRwkv7};

/// Mixed inputs, what the tokens have a say in these with, before and after it is expanded; receptance, keys, values, gate; decay
/// before and after it is expanded; the heads' results.
pub(super) fn widths6(of: &Rwkv6Spec) -> [usize; 10] {
    let (width, n_kv) = (of.width, of.n_head_kv * of.head_dim);
    let (mixed, given) = (RWKV6_MIXES * width, RWKV6_MIXES * of.mix_rank);
    [mixed, given, mixed, width, n_kv, n_kv, width, of.decay_rank, width, width]
}

/// Mixed inputs; receptance, keys, values; the low-rank products' middles; decay, rate, how much of the first values comes in,
/// gate; removed keys; the heads' results.
pub(super) fn widths7(of: &Rwkv7Spec) -> [usize; 11] {
    let width = of.width;
    let ranks = [of.decay_rank, of.rate_rank, of.value_rank, of.gate_rank.unwrap_or(0)];
    let low = ranks.iter().map(|rank| rank.next_multiple_of(ALIGNED_RANK)).sum();
    [of.n_mix() * width, width, width, width, low, width, width, width, width, width, width]
}

/// Mixed inputs, keys, receptance, result.
pub(super) fn widths_of_channel_mix(of: &ChannelMixSpec) -> [usize; 4] {
    [of.n_mix() * of.n_embd, of.width, of.n_embd, of.n_embd]
}

/// Elements that the middle of a low-rank product begins with a multiple of.
const ALIGNED_RANK: usize = 4;

/// Elements of an input that goes through a function on its way: `MAX_CHANGED`.
const MAX_CHANGED: usize = 1024;

/// A product of one token beside others.
struct SideProduct<'w> {
    linear: &'w CudaLinear,
    x: u64,
    y: u64,
    function: InputFunction,
}

/// A product through a small middle.
struct LowRank<'w> {
    of: &'w CudaLowRank,
    /// What the middle goes through.
    function: Option<Function>,
    x: u64,
    middle: u64,
    y: u64,
}

/// A token shift.
struct Shift {
    states: StatesArgs,
    lerps: u64,
    /// What tokens add to these; 0: nothing.
    more: u64,
    out: u64,
    width: usize,
    n_mix: usize,
    /// Whether the row of the token before goes on.
    advance: bool,
}

/// Where of mixed inputs of `width` those of mix `m` lie.
fn mix(step: Step<'_>, mixed: u64, width: usize, m: usize) -> u64 {
    mixed + 4 * (m * step.size.n_tokens * width) as u64
}

impl<'w> LowRank<'w> {
    fn first(&self) -> SideProduct<'w> {
        SideProduct { linear: &self.of.down, x: self.x, y: self.middle, function: InputFunction::AsItLies }
    }

    fn second(&self) -> SideProduct<'w> {
        let function = match self.function {
            None => InputFunction::AsItLies,
            Some(Function::Tanh) => InputFunction::Tanh,
            Some(Function::Sigmoid) => InputFunction::Sigmoid,
            Some(Function::Squared | Function::SigmoidTimes) => unreachable!("the middle of a low-rank product"),
        };
        SideProduct { linear: &self.of.up, x: self.middle, y: self.y, function }
    }
}

impl SideProduct<'_> {
    /// Whether it can go beside others.
    fn goes_beside(&self) -> bool {
        let n_in = self.linear.weight.n_in;
        let changes = self.function != InputFunction::AsItLies;
        self.linear.bias.is_none() && n_in.is_multiple_of(4) && (n_in <= MAX_CHANGED || !changes)
    }
}

impl Steps {
    /// Products of one token in a launch.
    fn side_products(&mut self, what: &'static str, of: &[SideProduct<'_>]) -> Result<(), CudaError> {
        let n_tiles: usize = of.iter().map(|product| product.linear.weight.n_tiles()).sum();
        let n_sm = self.gpu.summary().n_sm;
        // Warps of a tile, groups of tiles that a block takes at once, and panels of each, of which a block has one after the other.
        let shares = of.iter().map(|product| {
            let matrix = &product.linear.weight;
            let n_panels = matrix.n_in.div_ceil(PANEL);
            let most = (n_panels / PANELS_AHEAD).clamp(1, WARPS);
            let warps_a_tile = power_of_two(BUSY_WARPS.div_ceil(n_tiles).clamp(1, most).next_power_of_two().min(most));
            let groups = matrix.n_tiles().div_ceil(WARPS / warps_a_tile);
            (warps_a_tile, groups, groups * n_panels.div_ceil(warps_a_tile))
        });
        let shares: Vec<_> = shares.collect();
        let work: usize = shares.iter().map(|(_, _, work)| work).sum();
        let mut args = SideProductsArgs::zeroed();
        let (mut n_blocks, mut shared) = (0, 0);
        for ((to, product), (warps_a_tile, groups, own)) in args.products.iter_mut().zip(of).zip(shares) {
            let matrix = &product.linear.weight;
            n_blocks += (n_sm * own).div_ceil(work).clamp(1, groups);
            shared = shared.max(shared_of([matrix.format].into_iter(), matrix.n_in.div_ceil(PANEL), 1));
            *to = SideProductArgs {
                matrix: matrix.args(0),
                x: product.x,
                y: product.y,
                n_in: matrix.n_in as u32,
                end: n_blocks as u32,
                warps_a_tile: warps_a_tile as u32,
                function: product.function as u32,
            };
        }
        assert!(of.len() <= MAX_SIDE_PRODUCTS, "{} products", of.len());
        let grid = Grid { blocks: [n_blocks, 1, 1], threads: 32 * WARPS, shared };
        self.launch("side_products", what, grid, &args)
    }

    /// `out` of the normalised state.
    fn shift(&mut self, step: Step<'_>, of: &Shift) -> Result<(), CudaError> {
        let (runs, _) = Self::runs(step);
        let args = TokenShiftArgs {
            runs,
            states: of.states,
            x: self.s.h.ptr(),
            lerps: of.lerps,
            more: of.more,
            out: of.out,
            width: of.width as u32,
            n_mix: of.n_mix as u32,
            n_tokens: step.size.n_tokens as u32,
            advance: u32::from(of.advance),
        };
        self.launch("token_shift", "", Self::channels_of_runs(step, of.width), &args)
    }

    /// `y = up f(down x)`, through `middle`.
    fn low_rank(
        &mut self,
        step: Step<'_>,
        w: &CudaLowRank,
        function: Option<Function>,
        [x, middle, y]: [u64; 3],
    ) -> Result<(), CudaError> {
        self.store_rows(step, "low rank", &w.down, x, middle)?;
        if let Some(function) = function {
            self.of_each(step, function, middle, 0, w.down.weight.n_rows)?;
        }
        self.store_rows(step, "low rank", &w.up, middle, y)
    }

    /// The time mix of layer `i`, RWKV-6's. Its states are a matrix for each head, then the input of the last token.
    pub(super) fn rwkv6<'w>(&mut self, step: Step<'_>, i: usize, w: &'w CudaRwkv6) -> Result<Given<'w>, CudaError> {
        let of = &w.spec;
        let (width, dim, n_head) = (of.width, of.head_dim, of.n_head());
        let [mixed, given, more, r, k, v, gate, low, decay, heads] = self.areas(step, widths6(of));
        let states = step.states.of_layer(i, width * dim);
        // Tokens have a say in how far each goes towards the one before, which is read twice.
        let once = Shift { states, lerps: w.lerp_x.ptr(), more: 0, out: mixed, width, n_mix: 1, advance: false };
        self.shift(step, &once)?;
        self.store_rows(step, "token shift", &w.mix_down, mixed, given)?;
        self.of_each(step, Function::Tanh, given, 0, RWKV6_MIXES * of.mix_rank)?;
        let up = Grouped {
            what: "token shift",
            first: &w.mix_up,
            second: None,
            output: Output::Store,
            activation: 0,
            groups: 0,
            x: given,
            items_a_row: 1,
            x_stride: of.mix_rank,
            y: more,
            y_stride: width,
        };
        self.grouped(&up, RWKV6_MIXES * step.size.n_tokens)?;
        self.shift(step, &Shift { lerps: w.lerps.ptr(), more, n_mix: RWKV6_MIXES, advance: true, ..once })?;
        // Mixed inputs are those of w, k, v, r, g.
        let of_mix = |m: usize| mix(step, mixed, width, m);
        self.low_rank(step, &w.decay, Some(Function::Tanh), [of_mix(0), low, decay])?;
        for (linear, m, y) in [(&w.key, 1, k), (&w.value, 2, v), (&w.receptance, 3, r), (&w.gate, 4, gate)] {
            self.store_rows(step, "time mix", linear, of_mix(m), y)?;
        }
        let args = Rwkv6Args {
            walk: Self::walk(step, Rule::RWKV6, step.states.of_layer(i, 0), heads, [n_head, dim, dim]),
            r,
            k,
            v,
            decay,
            decay_bias: w.decay_bias.ptr(),
            bonus: w.bonus.as_ref().map_or(0, CudaBuffer::ptr),
            n_head_kv: of.n_head_kv as u32,
            unused: 0,
        };
        self.launch_walk(step, Rule::RWKV6, &args.walk, &args)?;
        let kind = if of.bonus { OutputGate::Silu } else { OutputGate::Sigmoid };
        let norm = GroupNormArgs { x: heads, out: heads, ..of_heads(w.norm.as_ref(), of.norm_eps(), n_head, dim) };
        let norm = GroupNormArgs { gate: RowsArgs::new(gate, width, 0), gate_kind: kind as u32, ..norm };
        self.group_norm(step, &norm)?;
        let input = self.rows_input(step, heads, width, None)?;
        Ok(Given::Product { what: "time mix output", linear: &w.out, input })
    }

    /// The same of RWKV-7.
    pub(super) fn rwkv7<'w>(&mut self, step: Step<'_>, i: usize, w: &'w CudaRwkv7) -> Result<Given<'w>, CudaError> {
        let of = &w.spec;
        let (width, dim, n_head) = (of.width, of.head_dim, of.n_head());
        let [mixed, r, k, v, low, decay, rate, value_mix, gate, kappa, heads] = self.areas(step, widths7(of));
        let states = step.states.of_layer(i, width * dim);
        let lerps = w.lerps.ptr();
        self.shift(step, &Shift { states, lerps, more: 0, out: mixed, width, n_mix: of.n_mix(), advance: true })?;
        // Mixed inputs are those of r, w, k, v, a, g.
        let of_mix = |m: usize| mix(step, mixed, width, m);
        let large = [(&w.receptance, 0, r), (&w.key, 2, k), (&w.value, 3, v)];
        let value = w.first_value.as_ref().map(|(low_rank, _)| low_rank);
        let small = [
            (Some(&w.decay), Some(Function::Tanh), 1, decay),
            (Some(&w.rate), None, 4, rate),
            (value, None, 3, value_mix),
            (w.gate.as_ref(), Some(Function::Sigmoid), 5, gate),
        ];
        let mut at = low;
        let small = small.into_iter().filter_map(|(of, function, m, y)| of.map(|of| (of, function, m, y)));
        let small: Vec<_> = small
            .map(|(of, function, m, y)| {
                let middle = at;
                at += 4 * of.down.weight.n_rows.next_multiple_of(ALIGNED_RANK) as u64;
                LowRank { of, function, x: of_mix(m), middle, y }
            })
            .collect();
        let first =
            large.map(|(linear, m, y)| SideProduct { linear, x: of_mix(m), y, function: InputFunction::AsItLies });
        let first: Vec<_> = first.into_iter().chain(small.iter().map(LowRank::first)).collect();
        let second: Vec<_> = small.iter().map(LowRank::second).collect();
        // `exact` steps have the same bits however many tokens there are.
        if !self.exact && step.size.n_tokens == 1 && first.iter().chain(&second).all(SideProduct::goes_beside) {
            self.side_products("time mix", &first)?;
            self.side_products("low rank", &second)?;
        } else {
            for (linear, m, y) in large {
                self.store_rows(step, "time mix", linear, of_mix(m), y)?;
            }
            for LowRank { of, function, x, middle, y } in small {
                self.low_rank(step, of, function, [x, middle, y])?;
            }
        }
        let inputs = Rwkv7InputsArgs {
            decay,
            rate,
            k,
            v,
            kappa,
            decay_bias: w.decay_bias.ptr(),
            rate_bias: w.rate_bias.ptr(),
            removed: w.removed.ptr(),
            kept: w.kept.ptr(),
            first_value: self.s.first_value.ptr(),
            value_mix: if w.first_value.is_some() { value_mix } else { 0 },
            value_bias: w.first_value.as_ref().map_or(0, |(_, bias)| bias.ptr()),
            n_head: n_head as u32,
            head_dim: dim as u32,
        };
        let grid = Grid { blocks: [n_head.div_ceil(4), step.size.n_tokens, 1], threads: 128, shared: 0 };
        self.launch("rwkv7_inputs", "", grid, &inputs)?;
        let walk = Self::walk(step, Rule::RWKV7, step.states.of_layer(i, 0), heads, [n_head, dim, dim]);
        self.launch_walk(step, Rule::RWKV7, &walk, &Rwkv7Args { walk, r, decay, k, v, a: kappa, b: rate })?;
        let norm = GroupNormArgs {
            x: heads,
            out: heads,
            r,
            k,
            v,
            factor: w.bonus.ptr(),
            ..of_heads(w.norm.as_ref(), of.norm_eps(), n_head, dim)
        };
        let kind = if w.gate.is_some() { OutputGate::AsItIs } else { OutputGate::None };
        let norm = GroupNormArgs { gate: RowsArgs::new(gate, width, 0), gate_kind: kind as u32, ..norm };
        self.group_norm(step, &norm)?;
        let input = self.rows_input(step, heads, width, None)?;
        Ok(Given::Product { what: "time mix output", linear: &w.out, input })
    }

    /// The channel mix of layer `i`.
    pub(super) fn channel_mix<'w>(
        &mut self,
        step: Step<'_>,
        i: usize,
        w: &'w CudaChannelMix,
    ) -> Result<Given<'w>, CudaError> {
        let of = &w.spec;
        let [mixed, keys, receptance, result] = self.areas(step, widths_of_channel_mix(of));
        let states = step.states.of_layer(i, w.state);
        let (lerps, width, n_mix) = (w.lerps.ptr(), of.n_embd, of.n_mix());
        self.shift(step, &Shift { states, lerps, more: 0, out: mixed, width, n_mix, advance: true })?;
        self.store_rows(step, "channel mix keys", &w.key, mixed, keys)?;
        self.of_each(step, Function::Squared, keys, 0, of.width)?;
        let Some(linear) = &w.receptance else {
            let input = self.rows_input(step, keys, of.width, None)?;
            return Ok(Given::Product { what: "channel mix values", linear: &w.value, input });
        };
        self.store_rows(step, "channel mix receptance", linear, mix(step, mixed, width, 1), receptance)?;
        self.store_rows(step, "channel mix values", &w.value, keys, result)?;
        self.of_each(step, Function::SigmoidTimes, result, receptance, of.n_embd)?;
        Ok(Given::Rows(result))
    }
}

/// The norm of each head's result.
fn of_heads(norm: Option<&[CudaBuffer; 2]>, eps: f32, n_head: usize, dim: usize) -> GroupNormArgs {
    let kind = if norm.is_some() { GroupNormKind::Layer } else { GroupNormKind::None };
    let [weight, bias] = norm.map_or([0; 2], |norm| norm.each_ref().map(CudaBuffer::ptr));
    GroupNormArgs {
        weight,
        bias,
        n: dim as u32,
        n_group: n_head as u32,
        of_groups: 1,
        norm: kind as u32,
        eps,
        ..GroupNormArgs::zeroed()
    }
}
