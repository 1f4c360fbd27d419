//! Scratch buffers of Mamba and Mamba-2.

use wgpu::Buffer;

use crate::{WgpuDevice, WgpuError};

/// The width of each buffer of [`MambaScratch`]: elements for each token, those of the widest layer; 0 where none uses
/// it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MambaWidths {
    /// Results of the convolution.
    pub(crate) conv: usize,
    /// Results before their norm.
    pub(crate) y: usize,
    /// Results of Mamba-2 in parallel with attention.
    pub(crate) parallel_out: usize,
    /// The low-rank step size.
    pub(crate) low: usize,
    /// The step size dt.
    pub(crate) dt: usize,
    /// `B` and `C`.
    pub(crate) bc: usize,
}

impl MambaWidths {
    /// The widths of all buffers.
    pub(super) fn rows(&self) -> [usize; 7] {
        let Self { conv, y, parallel_out, low, dt, bc } = *self;
        [conv, y, parallel_out, low, dt, bc, bc]
    }

    /// The widths of those buffers that matrices multiply.
    pub(super) fn inputs(&self) -> [usize; 4] {
        [self.conv, self.y, self.parallel_out, self.low]
    }
}

/// The scratch buffers.
#[derive(Debug)]
pub(crate) struct MambaScratch {
    /// Results of the convolution, `[n_tokens, width]`, or Mamba-2's `[n_tokens, conv_width]`.
    pub(crate) conv: Buffer,
    /// Results before their norm, `[n_tokens, width]`.
    pub(crate) y: Buffer,
    /// Results of Mamba-2 in parallel with attention, whose own are in `mixer_out`, `[n_tokens, width]`.
    pub(crate) parallel_out: Buffer,
    /// The low-rank step size, `[n_tokens, dt_rank]`.
    pub(crate) low: Buffer,
    /// The step size dt, `[n_tokens, n_dt]`.
    pub(crate) dt: Buffer,
    /// `B` and `C`, `[n_tokens, 2 * d_state]`.
    pub(crate) bc: Buffer,
    /// `B` and `C` after their norms, of the same shape.
    pub(crate) bc_normed: Buffer,
}

impl MambaScratch {
    /// Makes the buffers, for `n_tokens` tokens.
    pub(super) fn new(gpu: &WgpuDevice, widths: &MambaWidths, n_tokens: usize) -> Result<Self, WgpuError> {
        let rows = |width: usize| gpu.buffer("activations of Mamba", 4 * n_tokens as u64 * width as u64);
        Ok(Self {
            conv: rows(widths.conv)?,
            y: rows(widths.y)?,
            parallel_out: rows(widths.parallel_out)?,
            low: rows(widths.low)?,
            dt: rows(widths.dt)?,
            bc: rows(widths.bc)?,
            bc_normed: rows(widths.bc)?,
        })
    }
}
