//! RWKV-6 (Finch, arXiv 2404.05892), and its variant with gated linear attention (QRWKV-6, arXiv 2505.03005).

use super::low_rank::{self, LowRankWeights};
use crate::Linear;
use crate::tensors::{Presence, WeightSource};

/// Number of interpolated inputs: of the decay, keys, values, receptance, gate.
pub const RWKV6_MIXES: usize = 5;

/// Epsilon of the norm of each head's result, for any head size.
const HEAD_NORM_EPS: f32 = 64e-5;

/// The time mix of RWKV-6 (arXiv 2404.05892, section 4.2). With the normalised input `x_t`, that of the previous token,
/// and `d = x_(t-1) - x_t`:
///
/// - token shift: `x_m = x_t + d (lerp_m + W2_m tanh(W1_m (x_t + d lerp_x)))` for each `m` of `w k v r g`,
/// - `r = R x_r`, `k = K x_k`, `v = V x_v`, gate `g = G x_g`, decay `w = exp(-exp(w0 + D2 tanh(D1 x_w)))`,
/// - each head's state: `o = r (S + diag(u) k^T v)`, `S = diag(w) S + k^T v`, with a bonus `u` for each channel,
/// - `y = silu(g) norm(o)`, norm over each head; then the output matrix.
///
/// Without a bonus it is gated linear attention: `k *= 1 - w`, `S = diag(w) S + k^T v`, `o = r S / head_dim^(1/2)`,
/// `y = sigmoid(g) o`, and several heads may share their keys and values.
///
/// The recurrent state: each head's `S`, `[head_dim, head_dim]`, one row for each element of the key, followed by `x`
/// of the last token, `[width]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rwkv6Spec {
    /// Channels; divided among the heads.
    pub width: usize,
    /// Elements of a head; divides `width`.
    pub head_dim: usize,
    /// KV heads; divides the number of heads. With a bonus, equal to it.
    pub n_head_kv: usize,
    /// Rank of each interpolation of the token shift.
    pub mix_rank: usize,
    /// Rank of the decay's matrices.
    pub decay_rank: usize,
    /// Whether there is a bonus for the present token, and a norm of each head's result. If not, this is gated linear
    /// attention.
    pub bonus: bool,
    /// Whether files have a tensor of `lerp_m` for each `m`, as older ones do.
    pub lerps_apart: bool,
}

impl Rwkv6Spec {
    /// Heads.
    pub fn n_head(&self) -> usize {
        self.width / self.head_dim
    }

    /// Epsilon of the norm of each head's result.
    pub fn norm_eps(&self) -> f32 {
        HEAD_NORM_EPS
    }

    /// F32 elements of the state.
    pub fn state_elements(&self) -> usize {
        self.width.saturating_mul(self.head_dim).saturating_add(self.width)
    }
}

/// The weights of RWKV-6's time mix.
#[derive(Debug, Clone)]
pub struct Rwkv6Weights<L = Linear> {
    /// The specification.
    pub spec: Rwkv6Spec,
    /// `lerp_x`, `[width]`.
    pub lerp_x: Vec<f32>,
    /// `lerp_m` of `w k v r g`, `[5, width]`.
    pub lerps: Vec<f32>,
    /// `W1` of all `m`, stacked, `[5 * mix_rank, n_embd]`.
    pub mix_down: L,
    /// `W2` of each `m`, `[width, mix_rank]`.
    pub mix_up: Vec<L>,
    /// `D1` and `D2`.
    pub decay: LowRankWeights<L>,
    /// `w0`, `[width]`.
    pub decay_bias: Vec<f32>,
    /// `u`, `[n_head, head_dim]`.
    pub bonus: Option<Vec<f32>>,
    /// Receptance, `[width, n_embd]`.
    pub receptance: L,
    /// Keys, `[n_head_kv * head_dim, n_embd]`.
    pub key: L,
    /// Values, `[n_head_kv * head_dim, n_embd]`.
    pub value: L,
    /// Gate, `[width, n_embd]`.
    pub gate: L,
    /// Weight and bias of the norm of each head's result, `[width]` each.
    pub norm: Option<[Vec<f32>; 2]>,
    /// Output, `[n_embd, width]`.
    pub out: L,
}

impl<L> Rwkv6Weights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<Rwkv6Weights<M>, E> {
        Ok(Rwkv6Weights {
            spec: self.spec,
            lerp_x: self.lerp_x.clone(),
            lerps: self.lerps.clone(),
            mix_down: f(&self.mix_down)?,
            mix_up: self.mix_up.iter().map(&mut *f).collect::<Result<_, _>>()?,
            decay: self.decay.map(f)?,
            decay_bias: self.decay_bias.clone(),
            bonus: self.bonus.clone(),
            receptance: f(&self.receptance)?,
            key: f(&self.key)?,
            value: f(&self.value)?,
            gate: f(&self.gate)?,
            norm: self.norm.clone(),
            out: f(&self.out)?,
        })
    }
}

/// The weights with the name prefix `p`.
pub(crate) fn build<S: WeightSource>(
    source: &mut S,
    spec: &Rwkv6Spec,
    p: &str,
    n_embd: usize,
) -> Result<Rwkv6Weights<S::Linear>, S::Error> {
    let Rwkv6Spec { width, head_dim, n_head_kv, mix_rank, decay_rank, bonus, lerps_apart } = *spec;
    let name = |part: &str| format!("{p}time_mix_{part}");
    let values = |source: &mut S, part: &str, shape: &[usize]| {
        let values = source.values(&format!("{p}time_mix_{part}"), shape, Presence::Required)?;
        Ok::<_, S::Error>(values.unwrap_or_default())
    };
    let mix_down = source.required(&name("w1"), [n_embd, RWKV6_MIXES * mix_rank], Presence::None)?;
    let mix_up = source.matrices(&name("w2"), [mix_rank, n_embd, RWKV6_MIXES], Presence::None)?;
    let lerp_x = values(source, "lerp_x.weight", &[n_embd])?;
    let lerps = if lerps_apart {
        let mut all = Vec::new();
        for part in ["w", "k", "v", "r", "g"] {
            all.extend(values(source, &format!("lerp_{part}.weight"), &[n_embd])?);
        }
        all
    } else {
        values(source, "lerp_fused.weight", &[n_embd, 1, 1, RWKV6_MIXES])?
    };
    let u = if bonus { Some(values(source, "first.weight", &[head_dim, width / head_dim])?) } else { None };
    let decay_bias = values(source, "decay.weight", &[width])?;
    let names = ["decay_w1", "decay_w2"].map(name);
    let decay = low_rank::build(source, names, [n_embd, decay_rank, width])?;
    let bias = if bonus { Presence::None } else { Presence::Optional };
    let n_kv = n_head_kv * head_dim;
    let key = source.required(&name("key"), [n_embd, n_kv], bias)?;
    let value = source.required(&name("value"), [n_embd, n_kv], bias)?;
    let receptance = source.required(&name("receptance"), [n_embd, width], bias)?;
    let gate = source.required(&name("gate"), [n_embd, width], Presence::None)?;
    let norm =
        if bonus { Some([values(source, "ln.weight", &[width])?, values(source, "ln.bias", &[width])?]) } else { None };
    Ok(Rwkv6Weights {
        spec: *spec,
        lerp_x,
        lerps,
        mix_down,
        mix_up,
        decay,
        decay_bias,
        bonus: u,
        receptance,
        key,
        value,
        gate,
        norm,
        out: source.required(&name("output"), [width, n_embd], Presence::None)?,
    })
}
