//! The recurrence of RWKV-7 (Goose, arXiv 2503.14456), alone and with what surrounds it.

use super::bindings::{self, Bindings, ColumnRange, RecurrentBinding, StateRange};
use super::heads::{HeadShape, HeadTile, MOST_BLOCK};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// The sizes of [`rwkv7`], and where its rows and states are. For [`rwkv7_mix`] `decay`, `k`, `v` and `a` are the
/// results of the layer's matrices, and `b` is not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rwkv7Shape {
    /// Heads.
    pub n_head: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Receptances, `[n_head, key_dim]`.
    pub r: ColumnRange,
    /// The factor on each row of the state, `[n_head, key_dim]`, from 0 to 1.
    pub decay: ColumnRange,
    /// Keys, `[n_head, key_dim]`.
    pub k: ColumnRange,
    /// Values, `[n_head, value_dim]`.
    pub v: ColumnRange,
    /// The negative of the normalised key that is removed from the state, `[n_head, key_dim]`.
    pub a: ColumnRange,
    /// The normalised key times the learning rates, `[n_head, key_dim]`.
    pub b: ColumnRange,
    /// Results, `[n_head, value_dim]`.
    pub out: ColumnRange,
    /// States, `[n_head, key_dim, value_dim]`.
    pub states: StateRange,
}

/// The steps around the recurrence in [`rwkv7_mix`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rwkv7Mix {
    /// Epsilon of the norm of each head's result; `None`: there is no norm.
    pub norm_eps: Option<f32>,
    /// The first layer's values, and their share in this layer's before bias and sigmoid, `[n_head, value_dim]` each.
    pub residual: Option<[ColumnRange; 2]>,
    /// The gate that multiplies the results, `[n_head, value_dim]`; `None`: there is none.
    pub gate: Option<ColumnRange>,
}

/// The buffers of [`rwkv7`]; their rows are those of [`Rwkv7Shape`].
#[derive(Debug, Clone, Copy)]
pub struct Rwkv7Buffers<'a> {
    /// Receptances.
    pub r: &'a dyn Bind,
    /// Decays.
    pub decay: &'a dyn Bind,
    /// Keys.
    pub k: &'a dyn Bind,
    /// Values.
    pub v: &'a dyn Bind,
    /// Negative removed keys, or for [`rwkv7_mix`] learning rates.
    pub a: &'a dyn Bind,
    /// Removed keys times learning rates.
    pub b: &'a dyn Bind,
    /// The states.
    pub states: &'a dyn Bind,
    /// Receives the results.
    pub out: &'a dyn Bind,
    /// The words of [`segment_words`](super::segment_words).
    pub segments: &'a dyn Bind,
}

/// The other buffers of [`rwkv7_mix`].
#[derive(Debug, Clone, Copy)]
pub struct Rwkv7MixBuffers<'a> {
    /// `[8, channels]`: the biases of decay (w0), learning rate (a0) and share of the first layer's values (v0;
    /// arbitrary if there is none), the factors of the removed key (`k_k`) and of the key (`k_a`), the bonus (`r_k`),
    /// weight and bias of the norm (arbitrary if there is none).
    pub weights: &'a dyn Bind,
    /// The first layer's values and their share, as [`Rwkv7Mix::residual`].
    pub residual: Option<[&'a dyn Bind; 2]>,
    /// The gate, as [`Rwkv7Mix::gate`].
    pub gate: Option<&'a dyn Bind>,
}

impl Rwkv7Shape {
    fn head(&self, mixed: bool) -> HeadShape {
        let n_sums = if mixed { 6 } else { 4 };
        HeadShape { key_dim: self.key_dim, value_dim: self.value_dim, n_vectors: 5, n_values: 1, n_sums }
    }

    fn bindings(&self, mix: Option<&Rwkv7Mix>) -> Bindings {
        let (keys, values) = (self.n_head * self.key_dim, self.n_head * self.value_dim);
        let mut bindings = vec![
            ("segments", RecurrentBinding::Segments),
            ("r", RecurrentBinding::Rows(self.r, keys)),
            ("w", RecurrentBinding::Rows(self.decay, keys)),
            ("k", RecurrentBinding::Rows(self.k, keys)),
            ("v", RecurrentBinding::Rows(self.v, values)),
            ("a", RecurrentBinding::Rows(self.a, keys)),
            ("state", RecurrentBinding::States(self.states, keys * self.value_dim)),
            ("out", RecurrentBinding::Results(self.out, values)),
        ];
        match mix {
            None => bindings.push(("b", RecurrentBinding::Rows(self.b, keys))),
            Some(mix) => {
                bindings.push(("weights", RecurrentBinding::Floats(8 * keys)));
                if let Some([first, much]) = mix.residual {
                    bindings.push(("first_v", RecurrentBinding::Rows(first, values)));
                    bindings.push(("v_mix", RecurrentBinding::Rows(much, values)));
                }
                bindings.extend(mix.gate.map(|gate| ("gate", RecurrentBinding::Rows(gate, values))));
            }
        }
        bindings
    }

    fn key(&self, mix: Option<&Rwkv7Mix>, tile: HeadTile) -> PipelineKey {
        let mut constants = self.head(mix.is_some()).constants(tile);
        constants.extend([
            ("gates", false.into()),
            ("convolved", false.into()),
            ("fused", false.into()),
            ("n_head", self.n_head.into()),
            ("mixed", mix.is_some().into()),
            ("residual", mix.is_some_and(|mix| mix.residual.is_some()).into()),
            ("gated", mix.is_some_and(|mix| mix.gate.is_some()).into()),
            ("normed", mix.is_some_and(|mix| mix.norm_eps.is_some()).into()),
            ("norm_eps", mix.and_then(|mix| mix.norm_eps).unwrap_or(0.0).into()),
        ]);
        let key = bindings::key("recurrent/rwkv7", &self.bindings(mix), constants);
        if mix.is_some() { key.named("rwkv7_mix") } else { key }
    }

    fn check(&self) -> Result<(), WgpuError> {
        if [self.n_head, self.key_dim, self.value_dim].contains(&0) {
            return Err(WgpuError::Mismatch { what: "an RWKV-7 layer".into(), why: format!("{self:?}") });
        }
        Ok(())
    }
}

/// For each head and each token of the batch's first `runs` runs: `S = diag(decay) S + b^T (a S) + k^T v; out = r S`.
pub fn rwkv7(
    gpu: &WgpuDevice,
    shape: &Rwkv7Shape,
    b: &Rwkv7Buffers<'_>,
    runs: GridExtent,
) -> Result<Dispatch, WgpuError> {
    shape.check()?;
    let tile = shape.head(false).scan();
    let buffers = [b.segments, b.r, b.decay, b.k, b.v, b.a, b.states, b.out, b.b];
    let columns = GridExtent::Fixed((shape.n_head * shape.value_dim.div_ceil(tile.columns)) as u32);
    bindings::dispatch(
        gpu,
        &shape.key(None, tile),
        &shape.bindings(None),
        &buffers,
        [columns, runs, GridExtent::Fixed(1)],
    )
}

/// Everything between a layer's matrix products in one dispatch, for runs of any length: [`rwkv7`] with
/// `decay = exp(-0.606531 sigmoid(decay + w0))`, `rate = sigmoid(a + a0)`, `kk = k k_k` scaled to length 1, `a = -kk`,
/// `b = kk rate`, `k (1 + (rate - 1) k_a)` for `k` and `v + (first - v) sigmoid(share + v0)` for `v`; then a layer norm
/// of each head, `+ (r . k r_k) v`, and the gate. `None` if a head does not fit a workgroup.
pub fn rwkv7_mix(
    gpu: &WgpuDevice,
    shape: &Rwkv7Shape,
    mix: &Rwkv7Mix,
    b: &Rwkv7Buffers<'_>,
    with: &Rwkv7MixBuffers<'_>,
    runs: GridExtent,
) -> Result<Option<Dispatch>, WgpuError> {
    shape.check()?;
    let fits = mix.residual.is_some() == with.residual.is_some() && mix.gate.is_some() == with.gate.is_some();
    if shape.key_dim != shape.value_dim || !fits {
        return Err(WgpuError::Mismatch { what: "an RWKV-7 layer".into(), why: format!("{shape:?}, {mix:?}") });
    }
    let Some(tile) = shape.head(true).whole_on(gpu, 0, MOST_BLOCK) else { return Ok(None) };
    let mut buffers = vec![b.segments, b.r, b.decay, b.k, b.v, b.a, b.states, b.out, with.weights];
    buffers.extend(with.residual.into_iter().flatten());
    buffers.extend(with.gate);
    let grid = [GridExtent::Fixed(shape.n_head as u32), runs, GridExtent::Fixed(1)];
    bindings::dispatch(gpu, &shape.key(Some(mix), tile), &shape.bindings(Some(mix)), &buffers, grid).map(Some)
}

/// The inputs of the twin for one token and head.
#[derive(Debug, Clone, Copy)]
pub struct Rwkv7Token<'a> {
    /// Receptance, `[key_dim]`.
    pub r: &'a [f64],
    /// Decay, `[key_dim]`.
    pub decay: &'a [f64],
    /// Key, `[key_dim]`.
    pub k: &'a [f64],
    /// Value, `[value_dim]`.
    pub v: &'a [f64],
    /// Negative removed key, `[key_dim]`.
    pub a: &'a [f64],
    /// Removed key times learning rate, `[key_dim]`.
    pub b: &'a [f64],
}

/// The scalar twin for one token and head: the results `[value_dim]`. `state`, `[key_dim, value_dim]`, is replaced by
/// that after it.
pub fn rwkv7_twin(token: &Rwkv7Token<'_>, state: &mut [f64]) -> Vec<f64> {
    let n = token.v.len();
    let column = |c: usize| {
        let removed: f64 = token.a.iter().enumerate().map(|(i, a)| a * state[i * n + c]).sum();
        let mut sum = 0.0;
        for (i, r) in token.r.iter().enumerate() {
            let s = &mut state[i * n + c];
            *s = token.decay[i] * *s + token.b[i] * removed + token.k[i] * token.v[c];
            sum += r * *s;
        }
        sum
    };
    (0..n).map(column).collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let (n_head, dim) = (32, 64);
    let row = ColumnRange::whole(n_head * dim);
    let shape = Rwkv7Shape {
        n_head,
        key_dim: dim,
        value_dim: dim,
        r: row,
        decay: row,
        k: row,
        v: row,
        a: row,
        b: row,
        out: row,
        states: StateRange { n_slots: 4, stride: n_head * dim * (dim + 2), at: 2 * n_head * dim },
    };
    let mix = Rwkv7Mix { norm_eps: Some(64e-5), residual: Some([row; 2]), gate: Some(row) };
    let mut keys = vec![shape.key(None, shape.head(false).scan())];
    keys.extend(shape.head(true).whole_anywhere(0, MOST_BLOCK).map(|tile| shape.key(Some(&mix), tile)));
    keys
}
