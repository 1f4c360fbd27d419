//! Scratch buffers of RWKV's time mix and channel mix, and of low-rank products (which the delta rule has, too).

use wgpu::Buffer;

use super::widen;
use crate::WgpuError;
use crate::kernels::MAX_INPUTS;

/// The width of each buffer of [`RwkvScratch`]: elements for each token, those of the widest layer; 0 where none uses
/// it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RwkvWidths {
    /// One result of a token shift.
    mixed: usize,
    /// Number of results of a token shift.
    n_mix: usize,
    /// Each of receptances, keys and values.
    pub(crate) heads: usize,
    /// Gates.
    pub(crate) gate: usize,
    /// Results of the first matrices of low-rank products.
    pub(crate) small: usize,
    /// Results of the second matrices of low-rank products.
    pub(crate) large: usize,
    /// The addition of each token to the factors of a token shift.
    pub(crate) lerps: usize,
    /// Values of the first layer.
    pub(crate) first_value: usize,
}

impl RwkvWidths {
    /// Widens the buffers for a token shift with `n_mix` results of `width` elements.
    pub(crate) fn widen_for_shift(&mut self, width: usize, n_mix: usize) {
        widen(&mut self.mixed, width);
        widen(&mut self.n_mix, n_mix);
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
