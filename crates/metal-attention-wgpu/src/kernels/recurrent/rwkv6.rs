//! The recurrence of RWKV-6 (Finch, arXiv 2404.05892), alone and with what surrounds it.

use super::bindings::{self, Bindings, ColumnRange, RecurrentBinding, StateRange};
use super::heads::{HeadShape, HeadTile, MOST_BLOCK};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// The sizes of [`rwkv6`], and where its rows and states are. For [`rwkv6_mix`] `decay` is the result of the layer's
/// matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rwkv6Shape {
    /// Heads.
    pub n_head: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Receptances, `[n_head, key_dim]`.
    pub r: ColumnRange,
    /// Keys, `[n_head, key_dim]`.
    pub k: ColumnRange,
    /// Values, `[n_head, value_dim]`.
    pub v: ColumnRange,
    /// The factor on each row of the state, `[n_head, key_dim]`, from 0 to 1.
    pub decay: ColumnRange,
    /// Results, `[n_head, value_dim]`.
    pub out: ColumnRange,
    /// States, `[n_head, key_dim, value_dim]`.
    pub states: StateRange,
}

/// The steps around the recurrence in [`rwkv6_mix`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rwkv6Mix {
    /// The form of the recurrence.
    pub output: Rwkv6Output,
    /// The gate, whose SiLU (in linear attention sigmoid) multiplies the results, `[n_head, value_dim]`.
    pub gate: ColumnRange,
}

/// The form of RWKV-6's recurrence, and what follows it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rwkv6Output {
    /// RWKV-6: with a bonus for the present token, and a layer norm of each head's result.
    Normed {
        /// Epsilon of the norm, added to the variance.
        eps: f32,
    },
    /// Gated linear attention: keys are multiplied by one minus the decay, receptances divided by the square root of
    /// `key_dim`; the results come from the state after the token; several heads share keys and values.
    Linear {
        /// Heads that share keys and values.
        share: usize,
    },
}

/// The buffers of [`rwkv6`]; their rows are those of [`Rwkv6Shape`].
#[derive(Debug, Clone, Copy)]
pub struct Rwkv6Buffers<'a> {
    /// Receptances.
    pub r: &'a dyn Bind,
    /// Keys.
    pub k: &'a dyn Bind,
    /// Values.
    pub v: &'a dyn Bind,
    /// Decays.
    pub decay: &'a dyn Bind,
    /// The factor on a token's own key and value, `[n_head, key_dim]`; `None` in linear attention.
    pub bonus: Option<&'a dyn Bind>,
    /// The states.
    pub states: &'a dyn Bind,
    /// Receives the results.
    pub out: &'a dyn Bind,
    /// The words of [`segment_words`](super::segment_words).
    pub segments: &'a dyn Bind,
}

/// The other buffers of [`rwkv6_mix`].
#[derive(Debug, Clone, Copy)]
pub struct Rwkv6MixBuffers<'a> {
    /// Biases of the decays, `[n_head, key_dim]`.
    pub decay_bias: &'a dyn Bind,
    /// Weight and bias of the norm, `[n_head, value_dim]` each; `None` in linear attention.
    pub norm: Option<[&'a dyn Bind; 2]>,
    /// The gate, as [`Rwkv6Mix::gate`].
    pub gate: &'a dyn Bind,
}

impl Rwkv6Shape {
    fn head(&self) -> HeadShape {
        HeadShape { key_dim: self.key_dim, value_dim: self.value_dim, n_vectors: 3, n_values: 1, n_sums: 2 }
    }

    fn bindings(&self, mix: Option<&Rwkv6Mix>) -> Bindings {
        let (keys, values) = (self.n_head * self.key_dim, self.n_head * self.value_dim);
        let share = linear_share(mix).unwrap_or(1);
        let mut bindings = vec![
            ("segments", RecurrentBinding::Segments),
            ("r", RecurrentBinding::Rows(self.r, keys)),
            ("k", RecurrentBinding::Rows(self.k, keys / share)),
            ("v", RecurrentBinding::Rows(self.v, values / share)),
            ("w", RecurrentBinding::Rows(self.decay, keys)),
            ("state", RecurrentBinding::States(self.states, keys * self.value_dim)),
            ("out", RecurrentBinding::Results(self.out, values)),
        ];
        if linear_share(mix).is_none() {
            bindings.push(("bonus", RecurrentBinding::Floats(keys)));
        }
        if let Some(mix) = mix {
            bindings.push(("w_bias", RecurrentBinding::Floats(keys)));
            bindings.push(("gate", RecurrentBinding::Rows(mix.gate, values)));
            if linear_share(Some(mix)).is_none() {
                bindings.push(("norm_weight", RecurrentBinding::Floats(values)));
                bindings.push(("norm_bias", RecurrentBinding::Floats(values)));
            }
        }
        bindings
    }

    fn key(&self, mix: Option<&Rwkv6Mix>, tile: HeadTile) -> PipelineKey {
        let mut constants = self.head().constants(tile);
        constants.extend([
            ("gates", false.into()),
            ("convolved", false.into()),
            ("fused", false.into()),
            ("mixed", mix.is_some().into()),
            ("norm_eps", mix.map_or(0.0, Rwkv6Mix::eps).into()),
            ("linear", linear_share(mix).is_some().into()),
            ("share", linear_share(mix).unwrap_or(1).into()),
        ]);
        let key = bindings::key("recurrent/rwkv6", &self.bindings(mix), constants);
        if mix.is_some() { key.named("rwkv6_mix") } else { key }
    }

    fn check(&self) -> Result<(), WgpuError> {
        if [self.n_head, self.key_dim, self.value_dim].contains(&0) {
            return Err(WgpuError::Mismatch { what: "an RWKV-6 layer".into(), why: format!("{self:?}") });
        }
        Ok(())
    }
}

impl Rwkv6Mix {
    fn eps(&self) -> f32 {
        match self.output {
            Rwkv6Output::Normed { eps } => eps,
            Rwkv6Output::Linear { share: _ } => 0.0,
        }
    }
}

/// Heads that share keys and values, if this is linear attention.
fn linear_share(mix: Option<&Rwkv6Mix>) -> Option<usize> {
    match mix?.output {
        Rwkv6Output::Normed { eps: _ } => None,
        Rwkv6Output::Linear { share } => Some(share.max(1)),
    }
}

impl<'a> Rwkv6Buffers<'a> {
    fn all(&self) -> Vec<&'a dyn Bind> {
        let all = [self.segments, self.r, self.k, self.v, self.decay, self.states, self.out];
        all.into_iter().chain(self.bonus).collect()
    }
}

/// For each head and each token of the batch's first `runs` runs:
/// `out = r (S + diag(bonus) k^T v); S = diag(decay) S + k^T v`.
pub fn rwkv6(
    gpu: &WgpuDevice,
    shape: &Rwkv6Shape,
    b: &Rwkv6Buffers<'_>,
    runs: GridExtent,
) -> Result<Dispatch, WgpuError> {
    shape.check()?;
    if b.bonus.is_none() {
        return Err(WgpuError::Mismatch { what: "an RWKV-6 layer".into(), why: "it has no bonus".into() });
    }
    let tile = shape.head().scan();
    let columns = GridExtent::Fixed((shape.n_head * shape.value_dim.div_ceil(tile.columns)) as u32);
    bindings::dispatch(
        gpu,
        &shape.key(None, tile),
        &shape.bindings(None),
        &b.all(),
        [columns, runs, GridExtent::Fixed(1)],
    )
}

/// Everything between a layer's matrix products in one dispatch, for runs of any length: [`rwkv6`] with
/// `exp(-exp(decay + decay_bias))` as decay, then a layer norm of each head times SiLU of the gate; or gated linear
/// attention ([`Rwkv6Output`]). `None` if a head does not fit a workgroup.
pub fn rwkv6_mix(
    gpu: &WgpuDevice,
    shape: &Rwkv6Shape,
    mix: &Rwkv6Mix,
    b: &Rwkv6Buffers<'_>,
    with: &Rwkv6MixBuffers<'_>,
    runs: GridExtent,
) -> Result<Option<Dispatch>, WgpuError> {
    shape.check()?;
    let linear = linear_share(Some(mix));
    let shared = linear.is_none_or(|share| shape.n_head.is_multiple_of(share));
    if !shared || b.bonus.is_some() == linear.is_some() || with.norm.is_some() == linear.is_some() {
        return Err(WgpuError::Mismatch { what: "an RWKV-6 layer".into(), why: format!("{shape:?}, {mix:?}") });
    }
    let Some(tile) = shape.head().whole_on(gpu, 0, MOST_BLOCK) else { return Ok(None) };
    let mut buffers = b.all();
    buffers.extend([with.decay_bias, with.gate]);
    buffers.extend(with.norm.into_iter().flatten());
    let grid = [GridExtent::Fixed(shape.n_head as u32), runs, GridExtent::Fixed(1)];
    bindings::dispatch(gpu, &shape.key(Some(mix), tile), &shape.bindings(Some(mix)), &buffers, grid).map(Some)
}

/// The inputs of the twin for one token and head.
#[derive(Debug, Clone, Copy)]
pub struct Rwkv6Token<'a> {
    /// Receptance, `[key_dim]`.
    pub r: &'a [f64],
    /// Key, `[key_dim]`.
    pub k: &'a [f64],
    /// Value, `[value_dim]`.
    pub v: &'a [f64],
    /// Decay, `[key_dim]`.
    pub decay: &'a [f64],
}

/// The scalar twin for one token and head with its `bonus`: the results `[value_dim]`. `state`, `[key_dim, value_dim]`,
/// is replaced by that after it.
pub fn rwkv6_twin(token: &Rwkv6Token<'_>, bonus: &[f64], state: &mut [f64]) -> Vec<f64> {
    let n = token.v.len();
    let column = |c: usize| {
        let mut sum = 0.0;
        for (i, r) in token.r.iter().enumerate() {
            let (s, kv) = (&mut state[i * n + c], token.k[i] * token.v[c]);
            sum += r * (*s + bonus[i] * kv);
            *s = token.decay[i] * *s + kv;
        }
        sum
    };
    (0..n).map(column).collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let (n_head, dim) = (32, 64);
    let row = ColumnRange::whole(n_head * dim);
    let shape = Rwkv6Shape {
        n_head,
        key_dim: dim,
        value_dim: dim,
        r: row,
        k: row,
        v: row,
        decay: row,
        out: row,
        states: StateRange { n_slots: 4, stride: n_head * dim * (dim + 2), at: 2 * n_head * dim },
    };
    let mut keys = vec![shape.key(None, shape.head().scan())];
    let mix = Rwkv6Mix { output: Rwkv6Output::Normed { eps: 64e-5 }, gate: row };
    keys.extend(shape.head().whole_anywhere(0, MOST_BLOCK).map(|tile| shape.key(Some(&mix), tile)));
    keys
}
