//! RWKV-7 (Goose, arXiv 2503.14456).

use super::low_rank::{self, LowRankWeights};
use crate::Linear;
use crate::tensors::{Presence, WeightSource};

/// Epsilon of the norm of each head's result, for any head size.
const HEAD_NORM_EPS: f32 = 64e-5;

/// The time mix of RWKV-7 (arXiv 2503.14456, section 4). With the normalised input `x_t`, and that of the previous
/// token:
///
/// - token shift: `x_m = x_t + (x_(t-1) - x_t) lerp_m` for each `m` of `r w k v a g`,
/// - `r = R x_r`, `k = K x_k`, `v = V x_v`,
/// - decay `w = exp(-e^(-1/2) sigmoid(w0 + W2 tanh(W1 x_w)))`, rate `a = sigmoid(a0 + A2 A1 x_a)`, gate
///   `g = G2 sigmoid(G1 x_g)`,
/// - in all layers but the first `v += (v_first - v) sigmoid(v0 + V2 V1 x_v)`, with the first layer's values,
/// - `kappa = k k_k`, each head of it divided by its length; `k *= 1 + (a - 1) k_a`,
/// - each head's state: `S = diag(w) S - (a kappa)^T (kappa S) + k^T v`, `o = r S`,
/// - `y = g (norm(o) + v sum(r k r_k))`, norm and sum over each head; then the output matrix.
///
/// The recurrent state: each head's `S`, `[head_dim, head_dim]`, one row for each element of the key, followed by `x`
/// of the last token, `[width]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rwkv7Spec {
    /// Channels; divided among the heads.
    pub width: usize,
    /// Elements of a head; divides `width`.
    pub head_dim: usize,
    /// Rank of the decay's matrices.
    pub decay_rank: usize,
    /// Rank of the rate's matrices.
    pub rate_rank: usize,
    /// Rank of the matrices for the first layer's share of the values.
    pub value_rank: usize,
    /// Rank of the gate's matrices; `None`: no gate.
    pub gate_rank: Option<usize>,
    /// Whether each head's result is normalised.
    pub norm: bool,
    /// Whether this is the first layer, whose values enter those of all others.
    pub first: bool,
}

impl Rwkv7Spec {
    /// Heads.
    pub fn n_head(&self) -> usize {
        self.width / self.head_dim
    }

    /// Number of interpolated inputs.
    pub fn n_mix(&self) -> usize {
        5 + usize::from(self.gate_rank.is_some())
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

/// The weights of RWKV-7's time mix.
#[derive(Debug, Clone)]
pub struct Rwkv7Weights<L = Linear> {
    /// The specification.
    pub spec: Rwkv7Spec,
    /// Interpolation factors towards the previous token's input: of `r w k v a`, and `g` if there is a gate,
    /// `[n_mix, width]`.
    pub lerps: Vec<f32>,
    /// Receptance, `[width, n_embd]`.
    pub receptance: L,
    /// Keys, `[width, n_embd]`.
    pub key: L,
    /// Values, `[width, n_embd]`.
    pub value: L,
    /// `W1` and `W2`.
    pub decay: LowRankWeights<L>,
    /// `w0`, `[width]`.
    pub decay_bias: Vec<f32>,
    /// `A1` and `A2`.
    pub rate: LowRankWeights<L>,
    /// `a0`, `[width]`.
    pub rate_bias: Vec<f32>,
    /// `V1`, `V2` and `v0`, `[width]`: the first layer's share of the values; `None` in the first layer.
    pub first_value: Option<(LowRankWeights<L>, Vec<f32>)>,
    /// `G1` and `G2`.
    pub gate: Option<LowRankWeights<L>>,
    /// `k_k`, `[width]`.
    pub removed: Vec<f32>,
    /// `k_a`, `[width]`.
    pub kept: Vec<f32>,
    /// `r_k`, `[width]`.
    pub bonus: Vec<f32>,
    /// Weight and bias of the norm of each head's result, `[width]` each.
    pub norm: Option<[Vec<f32>; 2]>,
    /// Output, `[n_embd, width]`.
    pub out: L,
}

impl<L> Rwkv7Weights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<Rwkv7Weights<M>, E> {
        let first_value = match &self.first_value {
            Some((low_rank, bias)) => Some((low_rank.map(f)?, bias.clone())),
            None => None,
        };
        Ok(Rwkv7Weights {
            spec: self.spec,
            lerps: self.lerps.clone(),
            receptance: f(&self.receptance)?,
            key: f(&self.key)?,
            value: f(&self.value)?,
            decay: self.decay.map(f)?,
            decay_bias: self.decay_bias.clone(),
            rate: self.rate.map(f)?,
            rate_bias: self.rate_bias.clone(),
            first_value,
            gate: self.gate.as_ref().map(|gate| gate.map(f)).transpose()?,
            removed: self.removed.clone(),
            kept: self.kept.clone(),
            bonus: self.bonus.clone(),
            norm: self.norm.clone(),
            out: f(&self.out)?,
        })
    }
}

/// The weights with the name prefix `p`.
pub(crate) fn build<S: WeightSource>(
    source: &mut S,
    spec: &Rwkv7Spec,
    p: &str,
    n_embd: usize,
) -> Result<Rwkv7Weights<S::Linear>, S::Error> {
    let width = spec.width;
    let name = |part: &str| format!("{p}time_mix_{part}");
    let vector = |source: &mut S, part: &str| {
        let vector = source.vector(&format!("{p}time_mix_{part}"), width, Presence::Required)?;
        Ok::<_, S::Error>(vector.unwrap_or_default())
    };
    let low_rank = |source: &mut S, part: char, rank: usize| {
        let names = [1, 2].map(|i| format!("{p}time_mix_{part}{i}"));
        low_rank::build(source, names, [n_embd, rank, width])
    };
    let lerps = source.values(&name("lerp_fused.weight"), &[n_embd, 1, 1, spec.n_mix()], Presence::Required)?;
    let decay_bias = vector(source, "w0.weight")?;
    let decay = low_rank(source, 'w', spec.decay_rank)?;
    let rate_bias = vector(source, "a0.weight")?;
    let rate = low_rank(source, 'a', spec.rate_rank)?;
    // Files have these in the first layer as well, with the rate's rank; they are not used.
    let value_rank = if spec.first { spec.rate_rank } else { spec.value_rank };
    let first_value = (vector(source, "v0.weight")?, low_rank(source, 'v', value_rank)?);
    let gate = spec.gate_rank.map(|rank| low_rank(source, 'g', rank)).transpose()?;
    let [removed, kept] = [vector(source, "k_k.weight")?, vector(source, "k_a.weight")?];
    let bonus = vector(source, "r_k.weight")?;
    let norm = if spec.norm { Some([vector(source, "ln.weight")?, vector(source, "ln.bias")?]) } else { None };
    Ok(Rwkv7Weights {
        spec: *spec,
        lerps: lerps.unwrap_or_default(),
        receptance: source.required(&name("receptance"), [n_embd, width], Presence::None)?,
        key: source.required(&name("key"), [n_embd, width], Presence::None)?,
        value: source.required(&name("value"), [n_embd, width], Presence::None)?,
        decay,
        decay_bias,
        rate,
        rate_bias,
        first_value: Some(first_value).filter(|_| !spec.first).map(|(bias, low_rank)| (low_rank, bias)),
        gate,
        removed,
        kept,
        bonus,
        norm,
        out: source.required(&name("output"), [width, n_embd], Presence::None)?,
    })
}
