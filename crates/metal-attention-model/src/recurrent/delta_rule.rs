//! The gated delta rule (Gated `DeltaNet`, arXiv 2412.06464), as in Qwen 3.5 and Qwen3-Next, and Kimi Delta Attention
//! (arXiv 2510.26692), with a decay for each channel.

use crate::Linear;
use crate::tensors::{Presence, WeightSource};

/// A gated delta rule. Queries, keys and values go through a causal convolution over each channel, with SiLU. Each head
/// of queries and keys is divided by its length, queries also by `sqrt(key_dim)`. Each value head has a state `S`,
/// `[key_dim, value_dim]`. With `decay = exp(a softplus(W_decay x + dt_bias))` and `beta = sigmoid(W_beta x)`, one
/// token does
///
/// `S = decay S; S = S + k^T beta (v - k S); o = q S`, then `RMSNorm(o) * silu(gate)`, and `W_out` over all heads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaRuleSpec {
    /// Heads of queries, and of keys.
    pub n_head_k: usize,
    /// Heads of values, and of the state; a multiple of `n_head_k`.
    pub n_head_v: usize,
    /// Elements of a query or key head.
    pub key_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// Taps of the convolution: the tokens that it covers, its own included; at least 2.
    pub n_tap: usize,
    /// Which value heads read which key head.
    pub sharing: KeySharing,
    /// Form of the decay and the output gate.
    pub gates: DeltaGates,
    /// Epsilon of the norms.
    pub eps: f32,
}

/// The form of the decay and the output gate of a delta rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaGates {
    /// One decay for each value head. Decay and gate are one product of the input each.
    OfHeads {
        /// Whether files have the matrices of `beta` and of the decay in one, `ssm_ba`: for each key head the rows of
        /// its value heads for `beta`, then those for the decay.
        paired: bool,
    },
    /// One decay for each channel of a key: `S = Diag(decay) S` instead of `decay S`. Decay and gate are two products
    /// each, `W_b (W_a x)`, and the gate is `sigmoid(gate)` instead of `silu(gate)`.
    OfChannels {
        /// Elements between the two products.
        rank: usize,
    },
}

/// Which value heads read which key head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeySharing {
    /// Value head `h` reads key head `h mod n_head_k`.
    Interleaved,
    /// Value head `h` reads key head `h / (n_head_v / n_head_k)`.
    Grouped,
}

impl DeltaRuleSpec {
    /// Elements of a token's queries, and of its keys.
    pub fn n_keys(&self) -> usize {
        self.n_head_k * self.key_dim
    }

    /// Elements of a token's values.
    pub fn n_values(&self) -> usize {
        self.n_head_v * self.value_dim
    }

    /// Channels of the convolution: queries, keys, values.
    pub fn n_channels(&self) -> usize {
        2 * self.n_keys() + self.n_values()
    }

    /// Value heads that read the same key head.
    pub fn n_shared(&self) -> usize {
        self.n_head_v / self.n_head_k
    }

    /// The `i`-th of the value heads that read key head `head`.
    pub fn value_head(&self, head: usize, i: usize) -> usize {
        match self.sharing {
            KeySharing::Interleaved => i * self.n_head_k + head,
            KeySharing::Grouped => head * self.n_shared() + i,
        }
    }

    /// Decays of a token: one for each value head, or one for each channel of each value head's key.
    pub fn n_decays(&self) -> usize {
        match self.gates {
            DeltaGates::OfHeads { paired: _ } => self.n_head_v,
            DeltaGates::OfChannels { rank: _ } => self.n_head_v * self.key_dim,
        }
    }

    /// F32 elements of the state: the last `n_tap - 1` inputs of the convolution, and a matrix for each value head.
    pub fn state_elements(&self) -> usize {
        (self.n_tap - 1) * self.n_channels() + self.n_head_v * self.key_dim * self.value_dim
    }
}

/// The weights of a gated delta rule.
#[derive(Debug, Clone)]
pub struct DeltaRuleWeights<L = Linear> {
    /// The specification.
    pub spec: DeltaRuleSpec,
    /// Queries, `[n_keys, n_embd]`.
    pub q: L,
    /// Keys, `[n_keys, n_embd]`.
    pub k: L,
    /// Values, `[n_values, n_embd]`.
    pub v: L,
    /// Input matrix of `beta`, `[n_head_v, n_embd]`.
    pub beta: L,
    /// Down projections of decay and gate, in this order, `[rank, n_embd]` each, where decay and gate are low-rank: their
    /// results are multiplied by `decay` and `gate`.
    pub before: Option<[L; 2]>,
    /// Matrix of the decay, `[n_decays, n_embd]`, or `[n_decays, rank]` after a down projection.
    pub decay: L,
    /// Matrix of the output gate, `[n_values, n_embd]`, or `[n_values, rank]` after a down projection.
    pub gate: L,
    /// Taps of the convolution, those of the oldest token first, `[n_tap, n_channels]`.
    pub taps: Vec<f32>,
    /// Bias of the decay, `[n_decays]`.
    pub dt_bias: Vec<f32>,
    /// Decay rate `a`, `[n_head_v]`; negative.
    pub a: Vec<f32>,
    /// Weight of the norm of each head's result, `[value_dim]`.
    pub norm: Vec<f32>,
    /// Output, `[n_embd, n_values]`.
    pub out: L,
}

impl<L> DeltaRuleWeights<L> {
    pub(crate) fn map<'a, M, E>(&'a self, f: &mut dyn FnMut(&'a L) -> Result<M, E>) -> Result<DeltaRuleWeights<M>, E> {
        Ok(DeltaRuleWeights {
            spec: self.spec,
            q: f(&self.q)?,
            k: f(&self.k)?,
            v: f(&self.v)?,
            beta: f(&self.beta)?,
            before: match &self.before {
                Some([decay, gate]) => Some([f(decay)?, f(gate)?]),
                None => None,
            },
            decay: f(&self.decay)?,
            gate: f(&self.gate)?,
            taps: self.taps.clone(),
            dt_bias: self.dt_bias.clone(),
            a: self.a.clone(),
            norm: self.norm.clone(),
            out: f(&self.out)?,
        })
    }
}

/// The weights with the name prefix `p`.
pub(crate) fn build<S: WeightSource>(
    source: &mut S,
    spec: &DeltaRuleSpec,
    p: &str,
    n_embd: usize,
) -> Result<DeltaRuleWeights<S::Linear>, S::Error> {
    match spec.gates {
        DeltaGates::OfHeads { paired } => build_with_heads(source, spec, p, n_embd, paired),
        DeltaGates::OfChannels { rank } => build_with_channels(source, spec, p, n_embd, rank),
    }
}

/// The weights with one decay for each head.
fn build_with_heads<S: WeightSource>(
    source: &mut S,
    spec: &DeltaRuleSpec,
    p: &str,
    n_embd: usize,
    paired: bool,
) -> Result<DeltaRuleWeights<S::Linear>, S::Error> {
    let (n_values, n_head_v) = (spec.n_values(), spec.n_head_v);
    let [q, k, v, gate] = inputs(source, spec, p, n_embd)?;
    let [beta, decay] = if paired {
        // The row of a value head's `beta`; its decay's row follows after the `n` rows of the key head's other value
        // heads.
        let n = spec.n_shared();
        let row = move |head: usize| head / n * 2 * n + head % n;
        let parts = [(n_head_v, &row as &dyn Fn(usize) -> usize), (n_head_v, &move |head| row(head) + n)];
        source.reordered(&format!("{p}ssm_ba"), [n_embd, 2 * n_head_v], parts)?
    } else {
        let mut of = |name: &str| source.required(&format!("{p}{name}"), [n_embd, n_head_v], Presence::None);
        [of("ssm_beta")?, of("ssm_alpha")?]
    };
    let of_channels = source.channels(&format!("{p}ssm_conv1d.weight"), spec.n_tap, spec.n_channels())?;
    let mut vector =
        |name: &str, n| Ok(source.vector(&format!("{p}{name}"), n, Presence::Required)?.unwrap_or_default());
    Ok(DeltaRuleWeights {
        spec: *spec,
        q,
        k,
        v,
        beta,
        before: None,
        decay,
        gate,
        taps: transposed(&of_channels, spec.n_tap),
        dt_bias: vector("ssm_dt.bias", n_head_v)?,
        a: vector("ssm_a", n_head_v)?,
        norm: vector("ssm_norm.weight", spec.value_dim)?,
        out: source.required(&format!("{p}ssm_out"), [n_values, n_embd], Presence::None)?,
    })
}

/// The weights with one decay for each channel.
fn build_with_channels<S: WeightSource>(
    source: &mut S,
    spec: &DeltaRuleSpec,
    p: &str,
    n_embd: usize,
    rank: usize,
) -> Result<DeltaRuleWeights<S::Linear>, S::Error> {
    let (n_keys, n_values, n_head_v, n_tap) = (spec.n_keys(), spec.n_values(), spec.n_head_v, spec.n_tap);
    let parts = [("attn_q", n_keys), ("attn_k", n_keys), ("attn_v", n_values)];
    let [q, k, v] = source.parts(p, "attn_qkv", parts, n_embd, Presence::None, false)?;
    let mut of_channels = Vec::new();
    for (name, n) in [("q", n_keys), ("k", n_keys), ("v", n_values)] {
        of_channels.extend(source.single_channels(&format!("{p}ssm_conv1d_{name}.weight"), n_tap, n)?);
    }
    let mut matrix = |name: &str, shape| source.required(&format!("{p}{name}"), shape, Presence::None);
    let (beta, out) = (matrix("ssm_beta", [n_embd, n_head_v])?, matrix("attn_output", [n_values, n_embd])?);
    let before = [matrix("ssm_f_a", [n_embd, rank])?, matrix("ssm_g_a", [n_embd, rank])?];
    let (decay, gate) = (matrix("ssm_f_b", [rank, spec.n_decays()])?, matrix("ssm_g_b", [rank, n_values])?);
    let mut vector =
        |name: &str, n| Ok(source.vector(&format!("{p}{name}"), n, Presence::Required)?.unwrap_or_default());
    let (dt_bias, norm) = (vector("ssm_dt.bias", spec.n_decays())?, vector("ssm_norm.weight", spec.value_dim)?);
    let a = source.channels(&format!("{p}ssm_a"), 1, n_head_v)?;
    let taps = transposed(&of_channels, n_tap);
    Ok(DeltaRuleWeights { spec: *spec, q, k, v, beta, before: Some(before), decay, gate, taps, dt_bias, a, norm, out })
}

/// The transpose of `[channels, n_tap]`.
fn transposed(of_channels: &[f32], n_tap: usize) -> Vec<f32> {
    (0..n_tap).flat_map(|tap| of_channels.iter().skip(tap).step_by(n_tap)).copied().collect()
}

/// Queries, keys, values and gate: in `attn_qkv` and `attn_gate`, or, in older files of models with grouped heads, in
/// one matrix `ssm_in` with the rows of all four for each key head.
fn inputs<S: WeightSource>(
    source: &mut S,
    spec: &DeltaRuleSpec,
    p: &str,
    n_embd: usize,
) -> Result<[S::Linear; 4], S::Error> {
    let (n_keys, n_values) = (spec.n_keys(), spec.n_values());
    let in_one = format!("{p}ssm_in");
    if spec.sharing == KeySharing::Grouped && source.has(&in_one) {
        let (key_dim, of_values) = (spec.key_dim, spec.n_shared() * spec.value_dim);
        let of_head = 2 * (key_dim + of_values);
        let rows = |start: usize, n: usize| move |row: usize| row / n * of_head + start + row % n;
        let (q, k) = (rows(0, key_dim), rows(key_dim, key_dim));
        let (v, gate) = (rows(2 * key_dim, of_values), rows(2 * key_dim + of_values, of_values));
        let parts = [(n_keys, &q as &dyn Fn(usize) -> usize), (n_keys, &k), (n_values, &v), (n_values, &gate)];
        return source.reordered(&in_one, [n_embd, 2 * (n_keys + n_values)], parts);
    }
    let parts = [("attn_q", n_keys), ("attn_k", n_keys), ("attn_v", n_values)];
    let [q, k, v] = source.parts(p, "attn_qkv", parts, n_embd, Presence::None, true)?;
    Ok([q, k, v, source.required(&format!("{p}attn_gate"), [n_embd, n_values], Presence::None)?])
}
