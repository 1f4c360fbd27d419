//! The inputs of general attention: clamps, norms and rotates projected queries and keys, writes the queries to a
//! buffer, and appends keys and values to the KV cache.

use half::f16;
use metal_attention_model::{CacheType, NormKind, NormOver, PAGE, QkNorm, RopeLayout};

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Where a layer's keys and values come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvInputs {
    /// Both are projected.
    Own,
    /// The values are the projected keys.
    KeysAsValues,
    /// The layer has none: it reads another layer's KV cache.
    None,
}

/// The sizes of [`attention_inputs`], and what it does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionInputsShape {
    /// Query heads.
    pub n_head: usize,
    /// KV heads.
    pub n_head_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Rotated elements at the start of each head, at most `head_dim`, and which of them form pairs; `None`: no RoPE.
    pub rope: Option<(usize, RopeLayout)>,
    /// The norm of queries and keys. A norm of whole rows comes before RoPE.
    pub qk_norm: Option<QkNorm>,
    /// Whether that norm has a bias.
    pub qk_norm_bias: bool,
    /// Epsilon of the RMSNorm of each value head, if there is one.
    pub value_norm: Option<f32>,
    /// The bound that projections are clamped to, if any.
    pub clamp: Option<f32>,
    /// Where keys and values come from.
    pub kv: KvInputs,
    /// Positions of a sequence at most.
    pub n_ctx: usize,
    /// The cache group of the layer; see [`BatchBuffer`](crate::BatchBuffer).
    pub group: usize,
    /// Element type of the KV cache.
    pub cache: CacheType,
    /// Elements behind them in a token's row: gates, or the inputs of the mixer that runs in parallel with attention.
    pub n_trailing: usize,
}

impl AttentionInputsShape {
    /// Elements of a token's projected queries, keys and values.
    pub fn projected(&self) -> usize {
        let kv = match self.kv {
            KvInputs::Own => 2,
            KvInputs::KeysAsValues => 1,
            KvInputs::None => 0,
        };
        (self.n_head + kv * self.n_head_kv) * self.head_dim
    }

    /// Elements from one token's row to the next.
    pub fn row(&self) -> usize {
        self.projected() + self.n_trailing
    }

    /// Number of weights of the norm of queries and keys.
    pub fn weights_of_norm(&self) -> usize {
        match self.qk_norm.map(|norm| norm.over) {
            None | Some(NormOver::Unweighted) => 0,
            Some(NormOver::Head) => self.head_dim * if self.kv == KvInputs::None { 1 } else { 2 },
            Some(NormOver::EachHead | NormOver::Row) => (self.n_head + self.key_heads()) * self.head_dim,
        }
    }

    fn key_heads(&self) -> usize {
        if self.kv == KvInputs::None { 0 } else { self.n_head_kv }
    }

    fn cache_bytes(&self) -> u64 {
        (self.n_head_kv * PAGE * self.head_dim.next_multiple_of(4) * self.cache.bytes()) as u64
    }

    fn key(&self) -> PipelineKey {
        let (norm, over) = match self.qk_norm {
            None => ("none", "none"),
            Some(norm) => {
                let kind = match norm.kind {
                    NormKind::Rms => "rms",
                    NormKind::Layer => "layer",
                };
                let over = match norm.over {
                    NormOver::Head => "head",
                    NormOver::EachHead => "each_head",
                    NormOver::Unweighted => "unweighted",
                    NormOver::Row => "row",
                };
                (kind, over)
            }
        };
        let (n_rot, layout) = self.rope.unwrap_or((0, RopeLayout::Halves));
        PipelineKey::new(
            "attention_inputs",
            [
                ("n_head", self.n_head.into()),
                ("n_head_kv", self.n_head_kv.into()),
                ("head_dim", self.head_dim.into()),
                ("row", self.row().into()),
                ("n_rot", n_rot.into()),
                ("halves", (layout == RopeLayout::Halves).into()),
                ("norm", norm.into()),
                ("norm_over", over.into()),
                ("eps", self.qk_norm.map_or(0.0, |norm| norm.eps).into()),
                ("after_rope", self.qk_norm.is_some_and(|norm| norm.after_rope).into()),
                ("weights_of_norm", self.weights_of_norm().into()),
                ("bias", (self.qk_norm_bias && self.weights_of_norm() > 0).into()),
                ("value_norm", self.value_norm.is_some().into()),
                ("value_eps", self.value_norm.unwrap_or(0.0).into()),
                ("clamp", self.clamp.is_some().into()),
                ("clamp_to", self.clamp.unwrap_or(0.0).into()),
                ("keys_as_values", (self.kv == KvInputs::KeysAsValues).into()),
                ("owns_cache", (self.kv != KvInputs::None).into()),
                ("n_ctx", self.n_ctx.into()),
                ("page", PAGE.into()),
                ("group", self.group.into()),
                ("cache_f16", (self.cache == CacheType::F16).into()),
                ("threads", self.head_dim.next_power_of_two().clamp(32, 256).into()),
            ],
        )
    }
}

/// The buffers of [`attention_inputs`].
#[derive(Debug, Clone, Copy)]
pub struct AttentionInputsBuffers<'a> {
    /// F32 `[n_tokens, row]`: projected query heads, key heads, value heads.
    pub qkv: &'a wgpu::Buffer,
    /// F32 `[n_tokens, n_head, head_dim]`: receives the queries.
    pub queries: &'a wgpu::Buffer,
    /// F32 `[n_ctx or more, n_rot / 2, 2]`: the RoPE cos/sin table; `Some` exactly if the shape has RoPE.
    pub rope: Option<&'a wgpu::Buffer>,
    /// F32: the norm's weights for queries, those for keys, then as many biases if it has some.
    pub qk_norm: Option<&'a wgpu::Buffer>,
    /// Cached keys and values, `[n_pages, n_head_kv, PAGE, padded head_dim]` each. `None`: the layer has none.
    pub cache: Option<(&'a dyn Bind, &'a dyn Bind)>,
    /// The batch, with page tables.
    pub batch: &'a wgpu::Buffer,
}

/// Clamps, norms and rotates the projections in `qkv` as the shape specifies. Writes the queries to `queries` and
/// appends keys and values to the KV cache.
pub fn attention_inputs(
    gpu: &WgpuDevice,
    shape: &AttentionInputsShape,
    b: &AttentionInputsBuffers<'_>,
) -> Result<Dispatch, WgpuError> {
    let bad_rope = shape.rope.is_some_and(|(n_rot, _)| n_rot > shape.head_dim || !n_rot.is_multiple_of(2));
    let late_row = shape.qk_norm.is_some_and(|norm| norm.over == NormOver::Row && norm.after_rope);
    let bad_cache = b.cache.is_none() == (shape.kv != KvInputs::None);
    if bad_rope || late_row || bad_cache || shape.head_dim == 0 || shape.n_head_kv == 0 {
        let why = format!("{shape:?} asks for what no kernel does");
        return Err(WgpuError::Mismatch { what: "queries, keys and values".into(), why });
    }
    let row = |n: usize| AccessRange::Tokens(4 * n as u64);
    let mut buffers: Vec<(&dyn Bind, AccessRange)> =
        vec![(b.qkv, row(shape.row())), (b.queries, row(shape.n_head * shape.head_dim)), (b.batch, AccessRange::Batch)];
    if let Some((keys, values)) = b.cache {
        // The kernel accesses only the KV pages in the page tables, which `BatchBuffer` checks.
        let page = AccessRange::Fixed(shape.cache_bytes());
        buffers.extend([(keys, page), (values, page)]);
    }
    if let (Some((n_rot, _)), Some(rope)) = (shape.rope, b.rope) {
        buffers.push((rope, AccessRange::floats(shape.n_ctx * n_rot)));
    }
    let n_weights = shape.weights_of_norm() * if shape.qk_norm_bias { 2 } else { 1 };
    buffers.extend(b.qk_norm.filter(|_| n_weights > 0).map(|w| (w as &dyn Bind, AccessRange::floats(n_weights))));
    let heads = shape.n_head + 2 * shape.key_heads();
    Dispatch::new(
        gpu,
        &shape.key(),
        &buffers,
        [GridExtent::Fixed(heads as u32), GridExtent::Tokens(1), GridExtent::Fixed(1)],
    )
}

/// The scalar twin for one token: its queries, keys and values, `[heads, head_dim]` each. `angles`: its position's row
/// of the RoPE table; `weights`: as [`AttentionInputsBuffers::qk_norm`].
pub fn attention_inputs_twin(
    shape: &AttentionInputsShape,
    qkv: &[f32],
    angles: &[f32],
    weights: &[f32],
) -> [Vec<f32>; 3] {
    let dim = shape.head_dim;
    let all: Vec<f64> = qkv.iter().map(|&x| f64::from(shape.clamp.map_or(x, |clamp| x.clamp(-clamp, clamp)))).collect();
    let (q, kv) = all.split_at(shape.n_head * dim);
    let k = &kv[..shape.key_heads() * dim];
    let v = if shape.kv == KvInputs::KeysAsValues { k } else { &kv[k.len()..] };
    let (factors, added) = weights.split_at(shape.weights_of_norm());
    let part_of = |row: &[f64], first_head: usize| -> Vec<f32> {
        let mut row = row.to_vec();
        let normalise = |row: &mut [f64]| {
            let Some(norm) = shape.qk_norm else { return };
            let len = if norm.over == NormOver::Row { row.len() } else { dim };
            for (h, part) in row.chunks_exact_mut(len.max(1)).enumerate() {
                let own = match norm.over {
                    NormOver::Head => usize::from(first_head > 0) * dim,
                    NormOver::EachHead => (first_head + h) * dim,
                    NormOver::Unweighted | NormOver::Row => first_head * dim,
                };
                let n = part.len() as f64;
                let mean = match norm.kind {
                    NormKind::Rms => 0.0,
                    NormKind::Layer => part.iter().sum::<f64>() / n,
                };
                let squares = part.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
                let factor = 1.0 / (squares + f64::from(norm.eps)).sqrt();
                for (e, x) in part.iter_mut().enumerate() {
                    *x = (*x - mean) * factor * factors.get(own + e).map_or(1.0, |&w| f64::from(w));
                    *x += added.get(own + e).map_or(0.0, |&b| f64::from(b));
                }
            }
        };
        let after_rope = shape.qk_norm.is_some_and(|norm| norm.after_rope);
        if !after_rope {
            normalise(&mut row);
        }
        if let Some((n_rot, layout)) = shape.rope {
            row.chunks_exact_mut(dim).for_each(|head| super::rope::rotate_twin(layout, &mut head[..n_rot], angles));
        }
        if after_rope {
            normalise(&mut row);
        }
        row.into_iter().map(|x| x as f32).collect()
    };
    let (q, k) = (part_of(q, 0), part_of(k, shape.n_head));
    let mut v = v.to_vec();
    if let Some(eps) = shape.value_norm {
        for head in v.chunks_exact_mut(dim) {
            let squares = head.iter().map(|x| x * x).sum::<f64>() / dim as f64;
            let length = (squares + f64::from(eps)).sqrt();
            for x in head.iter_mut() {
                *x /= length;
            }
        }
    }
    [q, k, v.into_iter().map(|x| x as f32).collect()]
}

/// A row of elements as the KV cache stores it, in floats.
pub fn cached_row_twin(cache: CacheType, row: &[f32]) -> Vec<f32> {
    match cache {
        CacheType::F16 => row.iter().map(|&x| f16::from_f32(x).to_f32()).collect(),
        CacheType::F32 => row.to_vec(),
    }
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let qk_norm = QkNorm { kind: NormKind::Layer, eps: 1e-5, over: NormOver::EachHead, after_rope: false };
    let shape = AttentionInputsShape {
        n_head: 9,
        n_head_kv: 3,
        head_dim: 64,
        rope: Some((32, RopeLayout::Halves)),
        qk_norm: Some(qk_norm),
        qk_norm_bias: false,
        value_norm: None,
        clamp: None,
        kv: KvInputs::Own,
        n_ctx: 2048,
        group: 0,
        cache: CacheType::F16,
        n_trailing: 0,
    };
    vec![shape.key()]
}
