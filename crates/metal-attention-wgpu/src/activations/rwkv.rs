//! Scratch buffers of RWKV's time mix and channel mix, and of low-rank products (which the delta rule has, too).

use metal_attention_model::{ChannelMixSpec, RWKV6_MIXES, Rwkv6Spec, Rwkv7Spec};
use wgpu::Buffer;

use crate::WgpuError;
use crate::kernels::{LowRankShape, MAX_INPUTS};

/// The width of each buffer of [`RwkvScratch`]: elements for each token, those of the widest layer; 0 where none uses
/// it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RwkvWidths {
    /// One result of a token shift.
    mixed: usize,
    /// Number of results of a token shift.
    n_mix: usize,
    /// Each of receptances, keys and values.
    heads: usize,
    /// Gates.
    gate: usize,
    /// Results of the first matrices of low-rank products.
    small: usize,
    /// Results of the second matrices of low-rank products.
    large: usize,
    /// The addition of each token to the factors of a token shift.
    lerps: usize,
    /// Values of the first layer.
    first_value: usize,
}

impl RwkvWidths {
    /// Widens the buffers for RWKV-6's time mix.
    pub(super) fn rwkv6(&mut self, of: &Rwkv6Spec) {
        self.widen(of.width, RWKV6_MIXES);
        self.heads = self.heads.max(of.width);
        self.gate = self.gate.max(of.width);
        self.small = self.small.max(of.decay_rank).max(RWKV6_MIXES * of.mix_rank);
        self.large = self.large.max(of.width);
        self.lerps = self.lerps.max(RWKV6_MIXES * of.width);
    }

    /// Widens the buffers for RWKV-7's time mix, whose low-rank products are `low_rank`.
    pub(super) fn rwkv7(&mut self, of: &Rwkv7Spec, low_rank: &LowRankShape) {
        self.widen(of.width, of.n_mix());
        self.heads = self.heads.max(of.width);
        self.low_rank(low_rank);
        self.first_value = self.first_value.max(of.width);
    }

    /// Widens the buffers for low-rank products of any mixer.
    pub(super) fn low_rank(&mut self, of: &LowRankShape) {
        self.small = self.small.max(of.n_in());
        self.large = self.large.max(of.n_out());
    }

    /// Widens the buffers for a channel mix.
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

    /// The widths of all buffers.
    pub(super) fn rows(self) -> impl Iterator<Item = usize> {
        let Self { mixed, n_mix, heads, gate, small, large, lerps, first_value } = self;
        let one_each = [heads, heads, heads, gate, small, large, lerps, first_value];
        one_each.into_iter().chain(std::iter::repeat_n(mixed, n_mix))
    }
}

/// The buffers.
#[derive(Debug)]
pub(crate) struct RwkvScratch {
    /// Results of a token shift: each token's row mixed with that of the token before, `[n_tokens, n_embd]` each.
    pub(crate) mixed: Vec<Buffer>,
    /// Receptances, `[n_tokens, width]`.
    pub(crate) r: Buffer,
    /// Keys, `[n_tokens, width]` at most.
    pub(crate) k: Buffer,
    /// Values, `[n_tokens, width]` at most.
    pub(crate) v: Buffer,
    /// Gates, `[n_tokens, width]`.
    pub(crate) gate: Buffer,
    /// Results of the first matrices of low-rank products, `[n_tokens, sum of ranks]`.
    pub(crate) small: Buffer,
    /// Results of the second matrices, `[n_tokens, n_parts, width]`.
    pub(crate) large: Buffer,
    /// The addition of each token to the factors of a token shift, `[n_tokens, 5, width]`.
    pub(crate) lerps: Buffer,
    /// The first layer's values, which later layers mix into theirs, `[n_tokens, width]`.
    pub(crate) first_value: Buffer,
}

impl RwkvScratch {
    /// Makes the buffers. `rows(n)` makes one of `n` elements for each token.
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
