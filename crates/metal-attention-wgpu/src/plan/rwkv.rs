//! RWKV's time mixes and its channel mix, which keep a state and the input of the token before.

use metal_attention_model::{Activation, BatchKind, ChannelMixSpec, RWKV6_MIXES, Rwkv6Spec, Rwkv7Spec};
use wgpu::Buffer;

use super::{Input, PlanBuilder, Product};
use crate::dispatch::Extent;
use crate::kernels::{
    self, Gating, LowRankShape, MatvecOutput, RowsAt, Rwkv6Buffers, Rwkv6Mix, Rwkv6MixBuffers, Rwkv6Output, Rwkv6Shape,
    Rwkv7Buffers, Rwkv7Mix, Rwkv7MixBuffers, Rwkv7Shape, Squash, StatesAt, TOKEN_TILE, TokenShiftBuffers,
    TokenShiftShape,
};
use crate::weights::{WgpuChannelMix, WgpuLinear, WgpuRwkv6, WgpuRwkv7};
use crate::{Bind, Dispatch, WgpuError};

/// What RWKV-7's low-rank products are of, in the order of their results: decay, rate, how much of the first layer's values comes
/// in, gate.
const DECAY: usize = 0;
const RATE: usize = 1;
const FIRST_VALUE: usize = 2;

/// A head is a workgroup's.
const TOO_LARGE: WgpuError = WgpuError::UnsupportedPart { part: "RWKV with heads too large for a workgroup" };

/// RWKV-7's low-rank products.
pub(crate) fn low_rank_of_rwkv7(of: &Rwkv7Spec) -> LowRankShape {
    let first_value = (!of.first).then_some((of.value_rank, Squash::AsItIs));
    let gate = of.gate_rank.map(|rank| (rank, Squash::Sigmoid));
    let decay_and_rate = [(of.decay_rank, Squash::Tanh), (of.rate_rank, Squash::AsItIs)];
    LowRankShape { width: of.width, parts: decay_and_rate.into_iter().chain(first_value).chain(gate).collect() }
}

impl PlanBuilder<'_> {
    /// The time mix of layer `i`, up to the row that the output matrix multiplies.
    pub(super) fn rwkv7(
        &self,
        d: &mut Vec<Dispatch>,
        i: usize,
        of: &Rwkv7Spec,
        w: &WgpuRwkv7,
        input: Input<'_>,
    ) -> Result<(), WgpuError> {
        let (s, r) = (self.s, &self.s.rwkv);
        let shift = Shift { n_out: of.n_mix(), at: of.width * of.head_dim, advance: true };
        self.shift(d, i, input, &shift, &w.lerps, None)?;
        // The first layer's values stay for all others.
        let v = if of.first { &r.first_value } else { &r.v };
        // Mixed inputs are those of r, w, k, v, a, g.
        let [for_r, for_w, for_k, for_v, for_a] = [0, 1, 2, 3, 4].map(|m| &r.mixed[m]);
        for (linear, x, y) in [(&w.receptance, for_r, &r.r), (&w.key, for_k, &r.k), (&w.value, for_v, v)] {
            self.multiply(d, Product::new(linear, MatvecOutput::Store, x, y))?;
        }
        let low_rank = low_rank_of_rwkv7(of);
        let first_value = (!of.first).then_some(for_v);
        let inputs = [Some(for_w), Some(for_a), first_value, of.gate_rank.map(|_| &r.mixed[5])];
        let ranks = low_rank.parts.iter().map(|(rank, _)| *rank);
        let inputs: Vec<_> = ranks.zip(inputs.into_iter().flatten()).collect();
        let tile = if self.kind == BatchKind::One { 1 } else { TOKEN_TILE };
        d.extend(kernels::matvec_of_inputs(self.gpu, &w.down.weight, &inputs, tile, &r.small, self.batch)?);
        self.expand(d, &low_rank, &w.up, &r.large)?;

        let row = RowsAt::whole(of.width);
        let residual = (!of.first).then_some([row, low_rank.result(FIRST_VALUE)]);
        let gate = of.gate_rank.map(|_| low_rank.result(low_rank.parts.len() - 1));
        let mix = Rwkv7Mix { norm_eps: of.norm.then_some(of.norm_eps()), residual, gate };
        let shape = Rwkv7Shape {
            n_head: of.n_head(),
            key_dim: of.head_dim,
            value_dim: of.head_dim,
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
            out: &s.att,
            segments: self.states.segments(),
        };
        let with = Rwkv7MixBuffers {
            weights: &w.of_channels,
            residual: (!of.first).then_some([&r.first_value as &dyn Bind, &r.large]),
            gate: of.gate_rank.map(|_| &r.large as &dyn Bind),
        };
        d.push(kernels::rwkv7_mix(self.gpu, &shape, &mix, &buffers, &with, Extent::Runs)?.ok_or(TOO_LARGE)?);
        Ok(())
    }

    /// The same of RWKV-6.
    pub(super) fn rwkv6(
        &self,
        d: &mut Vec<Dispatch>,
        i: usize,
        of: &Rwkv6Spec,
        w: &WgpuRwkv6,
        input: Input<'_>,
    ) -> Result<(), WgpuError> {
        let (s, r) = (self.s, &self.s.rwkv);
        let at = of.width * of.head_dim;
        // Tokens have a say in how far each goes towards the one before, which is read twice.
        self.shift(d, i, input, &Shift { n_out: 1, at, advance: false }, &w.lerp_x, None)?;
        self.multiply(d, Product::new(&w.mix_down, MatvecOutput::Store, &r.mixed[0], &r.small))?;
        let mixes = LowRankShape { width: of.width, parts: vec![(of.mix_rank, Squash::Tanh); RWKV6_MIXES] };
        self.expand(d, &mixes, &w.mix_up, &r.lerps)?;
        self.shift(d, i, input, &Shift { n_out: RWKV6_MIXES, at, advance: true }, &w.lerps, Some(&r.lerps))?;
        // Mixed inputs are those of w, k, v, r, g.
        let products: [(&WgpuLinear, &Buffer); 5] =
            [(&w.decay_down, &r.small), (&w.key, &r.k), (&w.value, &r.v), (&w.receptance, &r.r), (&w.gate, &r.gate)];
        for ((linear, y), x) in products.into_iter().zip(&r.mixed) {
            self.multiply(d, Product::new(linear, MatvecOutput::Store, x, y))?;
        }
        let decay = LowRankShape { width: of.width, parts: vec![(of.decay_rank, Squash::Tanh)] };
        self.expand(d, &decay, &w.decay_up, &r.large)?;

        let (row, of_kv) = (RowsAt::whole(of.width), RowsAt::whole(of.n_head_kv * of.head_dim));
        let output = if of.bonus {
            Rwkv6Output::Normed { eps: of.norm_eps() }
        } else {
            Rwkv6Output::Linear { share: of.n_head() / of.n_head_kv }
        };
        let shape = Rwkv6Shape {
            n_head: of.n_head(),
            key_dim: of.head_dim,
            value_dim: of.head_dim,
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
            out: &s.att,
            segments: self.states.segments(),
        };
        let with = Rwkv6MixBuffers {
            decay_bias: &w.decay_bias,
            norm: w.norm.as_ref().map(|norm| norm.each_ref().map(|values| values as &dyn Bind)),
            gate: &r.gate,
        };
        let mix = Rwkv6Mix { output, gate: row };
        d.push(kernels::rwkv6_mix(self.gpu, &shape, &mix, &buffers, &with, Extent::Runs)?.ok_or(TOO_LARGE)?);
        Ok(())
    }

    /// The channel mix of layer `i`, up to the activated keys, `gated`, which the last matrix multiplies; where there is a gate
    /// behind that, up to what it gives: in the residual stream where `added`, else in the buffer of the keys of heads.
    pub(super) fn channel_mix(
        &self,
        d: &mut Vec<Dispatch>,
        i: usize,
        of: &ChannelMixSpec,
        w: &WgpuChannelMix,
        input: Input<'_>,
        added: bool,
    ) -> Result<(), WgpuError> {
        let (s, r) = (self.s, &self.s.rwkv);
        let at = self.spec.layers[i].mixer.state_elements();
        self.shift(d, i, input, &Shift { n_out: of.n_mix(), at, advance: true }, &w.lerps, None)?;
        self.multiply(d, Product::new(&w.key, MatvecOutput::Store, &r.mixed[0], &s.gate_up))?;
        d.push(kernels::activation(self.gpu, Activation::ReluSquared, of.width, Gating::None, &s.gate_up, &s.gated)?);
        let Some(receptance) = &w.receptance else { return Ok(()) };
        self.multiply(d, Product::new(receptance, MatvecOutput::Store, &r.mixed[1], &r.gate))?;
        self.multiply(d, Product::new(&w.value, MatvecOutput::Store, &s.gated, &s.result))?;
        let y = if added { &s.x } else { &r.k };
        d.push(kernels::channel_gate(self.gpu, of.n_embd, added, &r.gate, &s.result, y)?);
        Ok(())
    }

    /// `mixed` of what is `input` of layer `i`, with the factors `mu` and what tokens add to them.
    fn shift(
        &self,
        d: &mut Vec<Dispatch>,
        i: usize,
        input: Input<'_>,
        of: &Shift,
        mu: &Buffer,
        mu_of_tokens: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let x = match input {
            Input::Ready(x) => x,
            Input::Norm(norm) => {
                d.push(self.norm(norm, kernels::NormShape::of_row(norm.n), Some(&self.s.x), &self.s.h)?);
                &self.s.h
            }
        };
        let channels = self.spec.n_embd;
        let shape = TokenShiftShape {
            channels,
            n_out: of.n_out,
            x: RowsAt::whole(channels),
            mu_of_tokens: mu_of_tokens.map(|_| RowsAt::whole(of.n_out * channels)),
            states: self.states_at(i, of.at),
            advance: of.advance,
        };
        let out: Vec<_> = self.s.rwkv.mixed[..of.n_out].iter().map(|out| out as &dyn Bind).collect();
        let buffers = TokenShiftBuffers {
            x,
            mu,
            mu_of_tokens: mu_of_tokens.map(|mu| mu as &dyn Bind),
            states: self.states.of_layer(i),
            out: &out,
            segments: self.states.segments(),
        };
        d.push(kernels::token_shift(self.gpu, &shape, &buffers, Extent::Runs)?);
        Ok(())
    }

    /// What comes of `small` through second matrices of low-rank products.
    pub(super) fn expand(
        &self,
        d: &mut Vec<Dispatch>,
        of: &LowRankShape,
        up: &Buffer,
        y: &Buffer,
    ) -> Result<(), WgpuError> {
        let one = self.kind == BatchKind::One;
        d.push(kernels::low_rank(self.gpu, of, one, &self.s.rwkv.small, up, y, self.batch)?);
        Ok(())
    }

    /// The states of layer `i` from element `at` on.
    fn states_at(&self, i: usize, at: usize) -> StatesAt {
        StatesAt { n_slots: self.states.n_slots(), stride: self.spec.layers[i].state_elements(), at }
    }
}

/// A token shift.
struct Shift {
    /// Inputs that it makes of one.
    n_out: usize,
    /// Where the row of the token before lies in the layer's state.
    at: usize,
    /// Whether that goes on.
    advance: bool,
}
