//! Mamba-2: a selective state space with a decay for each head (arXiv 2405.21060).

use crate::Linear;
use crate::tensors::{Presence, WeightSource};

/// Mamba-2's mixer. With `[z, xBC, dt] = W_in h`, `[x, B, C] = silu(conv(xBC) + bias)` and
/// `dt = softplus(dt + dt_bias)`, each head has `S = exp(dt A) S + dt B^T x; y = C S + D x`; then
/// `W_out norm(y * silu(z))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mamba2Spec {
    /// Heads.
    pub n_head: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of `B` and of `C`; rows of a head's state.
    pub d_state: usize,
    /// Groups of heads that share `B` and `C`; divides `n_head`.
    pub n_group: usize,
    /// Taps of the convolution: the tokens that it covers, the newest included; at least 2.
    pub n_tap: usize,
    /// Whether the convolution must have a bias. If not, it may.
    pub conv_bias: bool,
    /// Epsilon of the RMSNorm over each group's channels of the result; `None`: no norm.
    pub norm: Option<f32>,
}

impl Mamba2Spec {
    /// Channels of `x`, `z` and `y`.
    pub fn width(&self) -> usize {
        self.n_head * self.head_dim
    }

    /// Channels of the convolution: `x`, then `B` and `C` of all groups.
    pub fn conv_width(&self) -> usize {
        self.width() + 2 * self.n_group * self.d_state
    }

    /// Rows of the input matrix: `z`, the channels of the convolution, `dt` of each head.
    pub fn input_width(&self) -> usize {
        self.width() + self.conv_width() + self.n_head
    }

    /// F32 elements of the state: the convolution's last inputs, oldest first, `[n_tap - 1, conv_width]`, then that of
    /// each head, `[n_head, d_state, head_dim]`.
    pub fn state_elements(&self) -> usize {
        (self.n_tap - 1) * self.conv_width() + self.width() * self.d_state
    }
}

/// The weights of Mamba-2.
#[derive(Debug, Clone)]
pub struct Mamba2Weights<L = Linear> {
    /// The specification.
    pub spec: Mamba2Spec,
    /// `z`, `x`, `B`, `C` and `dt`, stacked, `[input_width, n_embd]`.
    pub input: L,
    /// Taps of the convolution, those of the oldest token first, `[n_tap, conv_width]`.
    pub taps: Vec<f32>,
    /// Bias of the convolution, `[conv_width]`.
    pub conv_bias: Option<Vec<f32>>,
    /// Added to `dt`, `[n_head]`.
    pub dt_bias: Vec<f32>,
    /// `A`, negative, `[n_head]`.
    pub a: Vec<f32>,
    /// `D`, `[n_head]`.
    pub d: Vec<f32>,
    /// Weight of the norm of the result, `[n_group, width / n_group]`.
    pub norm: Option<Vec<f32>>,
    /// Output, `[n_embd, width]`.
    pub out: L,
}

impl<L> Mamba2Weights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<Mamba2Weights<M>, E> {
        Ok(Mamba2Weights {
            spec: self.spec,
            input: f(&self.input)?,
            taps: self.taps.clone(),
            conv_bias: self.conv_bias.clone(),
            dt_bias: self.dt_bias.clone(),
            a: self.a.clone(),
            d: self.d.clone(),
            norm: self.norm.clone(),
            out: f(&self.out)?,
        })
    }
}

/// The weights with the name prefix `p`.
pub(crate) fn build<S: WeightSource>(
    source: &mut S,
    spec: &Mamba2Spec,
    p: &str,
    n_embd: usize,
) -> Result<Mamba2Weights<S::Linear>, S::Error> {
    let (width, conv_width, n_head) = (spec.width(), spec.conv_width(), spec.n_head);
    let input = source.required(&format!("{p}ssm_in"), [n_embd, spec.input_width()], Presence::None)?;
    let taps = super::taps(&source.channels(&format!("{p}ssm_conv1d.weight"), spec.n_tap, conv_width)?, spec.n_tap);
    let presence = if spec.conv_bias { Presence::Required } else { Presence::Optional };
    let conv_bias = source.vector(&format!("{p}ssm_conv1d.bias"), conv_width, presence)?;
    let dt_bias = source.vector(&format!("{p}ssm_dt.bias"), n_head, Presence::Required)?.unwrap_or_default();
    let a = source.channels(&format!("{p}ssm_a"), 1, n_head)?;
    let d = source.channels(&format!("{p}ssm_d"), 1, n_head)?;
    let norm = match spec.norm {
        Some(_) => Some(source.norm_weight(&format!("{p}ssm_norm.weight"), width, Some(spec.n_group))?),
        None => None,
    };
    let out = source.required(&format!("{p}ssm_out"), [width, n_embd], Presence::None)?;
    Ok(Mamba2Weights { spec: *spec, input, taps, conv_bias, dt_bias, a, d, norm, out })
}
