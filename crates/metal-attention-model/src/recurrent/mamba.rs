//! Mamba: a selective state space with a decay for each channel (arXiv 2312.00752).

use crate::Linear;
use crate::tensors::{Presence, WeightSource};

/// Mamba's mixer. With `[x, z] = W_in h`, `x = silu(conv(x) + bias)`, `[dt, B, C] = W_x x` (each normalised if there
/// are norms), and `dt = softplus(W_dt dt + bias)`, each channel has `s = exp(dt A) s + dt B x; y = C s + D x`; then
/// `W_out (y * silu(z))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MambaSpec {
    /// Channels of `x`, `z` and `y`.
    pub width: usize,
    /// Elements of a channel's state, of `B` and of `C`.
    pub d_state: usize,
    /// Elements of `dt` before it is expanded.
    pub dt_rank: usize,
    /// Taps of the convolution: the tokens that it covers, the newest included; at least 2.
    pub n_tap: usize,
    /// Norms of `dt`, `B` and `C`, if any.
    pub norms: Option<MambaNorms>,
    /// Which channels share a decay.
    pub decay: MambaDecay,
}

/// Norms of `dt`, `B` and `C`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MambaNorms {
    /// Whether they have weights (Jamba); Falcon-Mamba's have none.
    pub weights: bool,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// Which channels share `dt`, `A` and `D`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MambaDecay {
    /// None: `dt` and `D` for each channel, `A` for each channel and element of its state.
    Channels,
    /// The channels of a head: `dt`, `A` and `D` for each of this many heads (`PLaMo` 2). The input matrix then has the
    /// rows of `z` and `x` of each head in turn, `W_x` gives `[B, C, dt]`, and the convolution has no bias.
    Heads(usize),
}

impl MambaSpec {
    /// Number of `dt` values of a token.
    pub fn n_dt(&self) -> usize {
        match self.decay {
            MambaDecay::Channels => self.width,
            MambaDecay::Heads(n_head) => n_head,
        }
    }

    /// The layout of `W_x`'s result: where `dt`, `B` and `C` begin.
    pub fn selection(&self) -> MambaSelection {
        let (n_state, n_dt) = (self.d_state, self.dt_rank);
        let n = n_dt + 2 * n_state;
        match self.decay {
            MambaDecay::Channels => MambaSelection { dt: 0, b: n_dt, c: n_dt + n_state, n },
            MambaDecay::Heads(_) => MambaSelection { b: 0, c: n_state, dt: 2 * n_state, n },
        }
    }

    /// F32 elements of the state: the convolution's last inputs, oldest first, `[n_tap - 1, width]`, then
    /// `[d_state, width]`, or with heads `[n_head, d_state, width / n_head]`.
    pub fn state_elements(&self) -> usize {
        (self.n_tap - 1 + self.d_state) * self.width
    }
}

/// The layout of `W_x`'s result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MambaSelection {
    /// First element of `dt`.
    pub dt: usize,
    /// First element of `B`.
    pub b: usize,
    /// First element of `C`.
    pub c: usize,
    /// Elements of all three.
    pub n: usize,
}

/// The weights of Mamba.
#[derive(Debug, Clone)]
pub struct MambaWeights<L = Linear> {
    /// The specification.
    pub spec: MambaSpec,
    /// `x` and `z`, stacked, `[2 * width, n_embd]`; with heads, `z` and `x` of each head in turn.
    pub input: L,
    /// Taps of the convolution, those of the oldest token first, `[n_tap, width]`.
    pub taps: Vec<f32>,
    /// Bias of the convolution, `[width]`.
    pub conv_bias: Option<Vec<f32>>,
    /// `W_x`, `[dt_rank + 2 * d_state, width]`.
    pub select: L,
    /// Weights of the norms of `dt`, `B` and `C`; all ones if they have none.
    pub norms: Option<[Vec<f32>; 3]>,
    /// `W_dt`, `[n_dt, dt_rank]`, with its bias.
    pub dt: L,
    /// `A`, negative: `[d_state, width]`, or with heads `[n_head]`.
    pub a: Vec<f32>,
    /// `D`, `[n_dt]`.
    pub d: Vec<f32>,
    /// Output, `[n_embd, width]`.
    pub out: L,
}

impl<L> MambaWeights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<MambaWeights<M>, E> {
        Ok(MambaWeights {
            spec: self.spec,
            input: f(&self.input)?,
            taps: self.taps.clone(),
            conv_bias: self.conv_bias.clone(),
            select: f(&self.select)?,
            norms: self.norms.clone(),
            dt: f(&self.dt)?,
            a: self.a.clone(),
            d: self.d.clone(),
            out: f(&self.out)?,
        })
    }
}

/// The weights with the name prefix `p`.
pub(crate) fn build<S: WeightSource>(
    source: &mut S,
    spec: &MambaSpec,
    p: &str,
    n_embd: usize,
) -> Result<MambaWeights<S::Linear>, S::Error> {
    let MambaSpec { width, d_state, dt_rank, n_tap, norms, decay } = *spec;
    let input = source.required(&format!("{p}ssm_in"), [n_embd, 2 * width], Presence::None)?;
    let taps = super::taps(&source.channels(&format!("{p}ssm_conv1d.weight"), n_tap, width)?, n_tap);
    let select = source.required(&format!("{p}ssm_x"), [width, spec.selection().n], Presence::None)?;
    let required =
        |source: &mut S, name: &str, n: usize| Ok(source.vector(name, n, Presence::Required)?.unwrap_or_default());
    // Files of models with heads name the norms without `.weight`.
    let (conv_bias, suffix) = match decay {
        MambaDecay::Channels => (Some(required(source, &format!("{p}ssm_conv1d.bias"), width)?), ".weight"),
        MambaDecay::Heads(_) => (None, ""),
    };
    let norms = match norms {
        None => None,
        Some(MambaNorms { weights: false, eps: _ }) => {
            Some([source.ones(dt_rank), source.ones(d_state), source.ones(d_state)])
        }
        Some(MambaNorms { weights: true, eps: _ }) => Some([
            required(source, &format!("{p}ssm_dt_norm{suffix}"), dt_rank)?,
            required(source, &format!("{p}ssm_b_norm{suffix}"), d_state)?,
            required(source, &format!("{p}ssm_c_norm{suffix}"), d_state)?,
        ]),
    };
    let dt = source.required(&format!("{p}ssm_dt"), [dt_rank, spec.n_dt()], Presence::Required)?;
    let a = match decay {
        MambaDecay::Channels => super::taps(&source.channels(&format!("{p}ssm_a"), d_state, width)?, d_state),
        MambaDecay::Heads(n_head) => required(source, &format!("{p}ssm_a"), n_head)?,
    };
    let d = required(source, &format!("{p}ssm_d"), spec.n_dt())?;
    let out = source.required(&format!("{p}ssm_out"), [width, n_embd], Presence::None)?;
    Ok(MambaWeights { spec: *spec, input, taps, conv_bias, select, norms, dt, a, d, out })
}
