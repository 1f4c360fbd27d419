//! Scratch memory of RWKV's mixes.

use metal_attention_model::{ChannelMixSpec, RWKV6_MIXES, Rwkv6Spec, Rwkv7Spec};
use wgpu::Buffer;

use crate::WgpuError;
use crate::kernels::{LowRankShape, MAX_INPUTS};

/// Elements a token, 0 of what a model does without: the widest of its layers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RwkvWidths {
    /// Inputs that a token shift makes, of which there are so many at most.
    mixed: usize,
    n_mix: usize,
    /// Receptances, keys and values, and gates, each.
    heads: usize,
    gate: usize,
    /// What the first matrices of low-rank products give.
    small: usize,
    /// What the second ones give.
    large: usize,
    /// What the tokens add to the factors of a token shift.
    lerps: usize,
    /// Values of the first layer.
    first_value: usize,
}

impl RwkvWidths {
    /// Room for RWKV-6's time mix.
    pub(super) fn rwkv6(&mut self, of: &Rwkv6Spec) {
        self.widen(of.width, RWKV6_MIXES);
        self.heads = self.heads.max(of.width);
        self.gate = self.gate.max(of.width);
        self.small = self.small.max(of.decay_rank).max(RWKV6_MIXES * of.mix_rank);
        self.large = self.large.max(of.width);
        self.lerps = self.lerps.max(RWKV6_MIXES * of.width);
    }

    /// Room for RWKV-7's, whose low-rank products are `low_rank`.
    pub(super) fn rwkv7(&mut self, of: &Rwkv7Spec, low_rank: &LowRankShape) {
        self.widen(of.width, of.n_mix());
        self.heads = self.heads.max(of.width);
        self.low_rank(low_rank);
        self.first_value = self.first_value.max(of.width);
    }

    /// Room for low-rank products, also of others.
    pub(super) fn low_rank(&mut self, of: &LowRankShape) {
        self.small = self.small.max(of.n_in());
        self.large = self.large.max(of.n_out());
    }

    /// Room for a channel mix.
    pub(super) fn channel_mix(&mut self, of: &ChannelMixSpec) {
        self.widen(of.n_embd, of.n_mix());
        if of.gated {
            self.heads = self.heads.max(of.n_embd);
            self.gate = self.gate.max(of.n_embd);
        }
    }

    fn widen(&mut self, width: usize, n_mix: usize) {
        self.mixed = self.mixed.max(width);
        self.n_mix = self.n_mix.max(n_mix);
    }

    /// Elements of all buffers.
    pub(super) fn rows(self) -> impl Iterator<Item = usize> {
        let Self { mixed, n_mix, heads, gate, small, large, lerps, first_value } = self;
        let one_each = [heads, heads, heads, gate, small, large, lerps, first_value];
        one_each.into_iter().chain(std::iter::repeat_n(mixed, n_mix))
    }
}

/// Activations of RWKV's mixes.
#[derive(Debug)]
pub(crate) struct RwkvScratch {
    /// Inputs between each token's and that of the one before, `[n_tokens, n_embd]` each.
    pub(crate) mixed: Vec<Buffer>,
    /// Receptances, `[n_tokens, width]`.
    pub(crate) r: Buffer,
    /// Keys, no longer than that.
    pub(crate) k: Buffer,
    /// Values, no longer than that.
    pub(crate) v: Buffer,
    /// Gates, `[n_tokens, width]`.
    pub(crate) gate: Buffer,
    /// What the first matrices of low-rank products give, `[n_tokens, ranks]`.
    pub(crate) small: Buffer,
    /// What the second ones give, `[n_tokens, n_parts, width]`.
    pub(crate) large: Buffer,
    /// What tokens add to the factors of a token shift, `[n_tokens, 5, width]`.
    pub(crate) lerps: Buffer,
    /// The first layer's values, `[n_tokens, width]`.
    pub(crate) first_value: Buffer,
}

impl RwkvScratch {
    /// With `rows` that makes a buffer for so many elements a token.
    pub(super) fn new(of: RwkvWidths, rows: &dyn Fn(usize) -> Result<Buffer, WgpuError>) -> Result<Self, WgpuError> {
        Ok(Self {
            mixed: (0..of.n_mix.min(MAX_INPUTS)).map(|_| rows(of.mixed)).collect::<Result<_, _>>()?,
            r: rows(of.heads)?,
            k: rows(of.heads)?,
            v: rows(of.heads)?,
            gate: rows(of.gate)?,
            small: rows(of.small)?,
            large: rows(of.large)?,
            lerps: rows(of.lerps)?,
            first_value: rows(of.first_value)?,
        })
    }
}
