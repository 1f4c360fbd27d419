//! Softmax attention.
//!
//! It has two sets of kernels. The *fast* ones (`decode_attention`, or `rope_append` and `prefill_attention`) cover the
//! common variants and read queries, keys and values from `projected`, as the projections leave them. The *general* ones
//! (`attention_inputs`, `general_attention`) cover others, none of which has gates in the matrix of queries: the first of them writes `queries` and
//! stores keys and values in the KV cache. [`AttentionKernels::new`] chooses; [`supports`] refuses what neither set covers.
//! A gate with a matrix of its own is applied to the result of either by `attention_gate`.
//!
//! The rows of the scratch buffer `projected` are: `n_head` gates (if there are any; raw, their sigmoid is applied later),
//! `n_head` query heads, `n_head_kv` key heads, `n_head_kv` value heads, each of `head_dim` elements; then the gates that a
//! matrix of their own produces or the inputs of a parallel Mamba-2, if there are any. Keys and values are missing in a layer that reads another layer's cache, values in a
//! layer whose values are its keys.

use metal_attention_model::{
    AttentionGate, AttentionSpec, AttentionWeights, KvSource, Linear, Mask, NormKind, NormOver, NormWeights, Positions,
    QkNorm, RopeLayout, alibi_slopes,
};
use wgpu::Buffer;

use super::LayerPages;
use crate::activations::{ActivationWidths, widen};
use crate::kernels::{
    self, AttentionBuffers, AttentionGateShape, AttentionInputsBuffers, AttentionInputsShape, AttentionShape,
    GeneralAttention, GeneralAttentionBuffers, KvInputs, MAX_FAST_HEAD_DIM, MatvecOutput,
};
use crate::plan::{BranchInput, LastProduct, LinearProduct, PlanBuilder};
use crate::weights::{Uploads, WgpuLinear, concat};
use crate::{Bind, Dispatch, WgpuDevice, WgpuError};

/// Softmax attention with its weights.
#[derive(Debug)]
pub(crate) struct WgpuAttention {
    /// Its kernels, with their sizes.
    pub(crate) kernels: AttentionKernels,
    /// The projections to gates of heads (if any), queries, keys and values (if the layer has its own), stacked; below
    /// them that to gates with a matrix of their own, or that to the inputs of a parallel Mamba-2.
    pub(crate) qkv: WgpuLinear,
    /// Weights of the norms of queries and of keys, then their biases, as far as there are any.
    qk_norm: Option<Buffer>,
    /// Score of the sink and slope of `ALiBi` for each head, `[n_head, 2]`.
    sinks_and_slopes: Option<Buffer>,
    /// The gate of the result, where a matrix of its own produces it.
    gate: Option<AttentionGateShape>,
    /// The output projection.
    pub(crate) out: WgpuLinear,
}

/// The kernels that run softmax attention, with their sizes; see the top of this file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum AttentionKernels {
    /// `decode_attention`, or `rope_append` and then `prefill_attention`.
    Fast(AttentionShape),
    /// `attention_inputs`, then `general_attention`.
    General(AttentionInputsShape, GeneralAttention),
}

/// Elements of each head that RoPE turns by an angle of 0 in layers without RoPE. The fast kernels need at least one
/// pair.
pub(crate) const UNROTATED_ELEMENTS: usize = 2;

/// Checks that kernels exist for an attention; the error is the part without one.
pub(super) fn supports(spec: &AttentionSpec) -> Result<(), &'static str> {
    match spec.qk_norm {
        Some(QkNorm { over: NormOver::Row, after_rope: true, kind: _, eps: _ }) => {
            return Err("norms of whole rows of queries and keys after RoPE");
        }
        Some(QkNorm {
            over: NormOver::Head | NormOver::EachHead | NormOver::Unweighted | NormOver::Row,
            after_rope: _,
            kind: _,
            eps: _,
        })
        | None => {}
    }
    if spec.gate == Some(AttentionGate::InQueries) && fast_attention(spec, LayerPages::UNKNOWN).is_none() {
        return Err("gates in the matrix of queries, with attention that the general kernels compute");
    }
    Ok(())
}

impl AttentionKernels {
    /// The kernels for an attention whose keys and values are stored in `pages`.
    ///
    /// # Panics
    /// If it has gates that [`supports`] refuses.
    pub(crate) fn new(w: &AttentionWeights, pages: LayerPages) -> Self {
        let a = &w.spec;
        // Their norm of queries and keys is an RMSNorm, which has no bias.
        if let Some(shape) = fast_attention(a, pages) {
            return Self::Fast(shape);
        }
        let AttentionSpec {
            n_head,
            n_head_kv,
            head_dim,
            scale,
            mask,
            positions,
            soft_cap,
            sinks,
            qk_norm,
            value_norm,
            clamp_qkv,
            kv,
            temperature,
            qkv_bias: _,
            fused_qkv: _,
            gate,
        } = *a;
        assert!(
            gate != Some(AttentionGate::InQueries),
            "gates of such attention are refused before its kernels are chosen"
        );
        let has_bias = |norm: &Option<NormWeights>| norm.as_ref().is_some_and(|norm| norm.bias.is_some());
        let qk_norm_bias = has_bias(&w.q_norm) || has_bias(&w.k_norm);
        let (rope, slopes) = match positions {
            Positions::None => (None, false),
            Positions::Rope(rope) => (Some((rope.n_rot, rope.layout)), false),
            Positions::Alibi { max_bias: _ } => (None, true),
        };
        let kv = match kv {
            KvSource::Own => KvInputs::Own,
            KvSource::KeysAsValues => KvInputs::KeysAsValues,
            KvSource::Layer(_) | KvSource::Target(_) => KvInputs::None,
        };
        let LayerPages { n_ctx, group, cache } = pages;
        let inputs = AttentionInputsShape {
            n_head,
            n_head_kv,
            head_dim,
            rope,
            qk_norm,
            qk_norm_bias,
            value_norm,
            clamp: clamp_qkv,
            kv,
            n_ctx,
            group,
            cache,
            n_trailing: a.gate_rows().unwrap_or(0),
        };
        let attention = GeneralAttention {
            n_head,
            n_head_kv,
            key_dim: head_dim,
            value_dim: head_dim,
            scale,
            mask,
            soft_cap,
            sinks,
            slopes,
            temperature,
            n_ctx,
            group,
            cache,
        };
        Self::General(inputs, attention)
    }

    /// Elements of a token's queries, keys and values as they are projected, gates of heads included.
    pub(super) fn qkv_len(&self) -> usize {
        match self {
            Self::Fast(shape) => shape.qkv_len(),
            Self::General(inputs, _) => inputs.projected(),
        }
    }

    /// Elements of a token's row in `projected`.
    fn row_len(&self) -> usize {
        match self {
            Self::Fast(shape) => shape.qkv_row(),
            Self::General(inputs, _) => inputs.row(),
        }
    }

    /// These kernels, for rows of Q, K and V with `n_trailing` more elements behind them: the inputs of the mixer that runs in
    /// parallel with attention.
    fn with_trailing(self, n_trailing: usize) -> Self {
        match self {
            Self::Fast(shape) => Self::Fast(AttentionShape { n_trailing, ..shape }),
            Self::General(inputs, attention) => Self::General(AttentionInputsShape { n_trailing, ..inputs }, attention),
        }
    }

    /// Bytes of a page of the layer's keys, and of its values. `None`: it reads another layer's.
    pub(super) fn page_bytes(&self) -> Option<[u64; 2]> {
        match self {
            Self::Fast(shape) => Some([shape.cache_bytes(1); 2]),
            Self::General(inputs, attention) => (inputs.kv != KvInputs::None).then(|| attention.page_bytes()),
        }
    }

    /// Widens the scratch buffers.
    pub(super) fn widen(&self, widths: &mut ActivationWidths) {
        widen(&mut widths.projected, self.row_len());
        match self {
            Self::Fast(shape) => {
                widen(&mut widths.mixer_out, shape.att_len());
                widen(&mut widths.partial, kernels::partial_len(shape));
            }
            Self::General(_, attention) => widen_for_general_attention(widths, attention),
        }
    }
}

/// Widens the scratch buffers for the general kernel.
pub(super) fn widen_for_general_attention(widths: &mut ActivationWidths, attention: &GeneralAttention) {
    widen(&mut widths.queries, attention.n_head * attention.key_dim);
    widen(&mut widths.mixer_out, attention.n_head * attention.value_dim);
    widen(&mut widths.partial, attention.partial_len());
}

/// The fast kernels for `a`, if they support it: causal attention over keys and values of its own, with or without a window, with
/// RoPE or no positions, of heads of at most [`MAX_FAST_HEAD_DIM`] elements. An RMSNorm of heads before RoPE, with one weight for all
/// heads, is optional; sinks are not combined with it. No norm of values, no clamp, no temperature.
fn fast_attention(a: &AttentionSpec, pages: LayerPages) -> Option<AttentionShape> {
    let AttentionSpec {
        n_head,
        n_head_kv,
        head_dim,
        scale,
        mask,
        positions,
        soft_cap,
        sinks,
        qk_norm,
        value_norm,
        clamp_qkv,
        kv,
        temperature,
        qkv_bias: _,
        fused_qkv: _,
        gate,
    } = *a;
    let gated = match gate {
        Some(AttentionGate::InQueries) => true,
        // `attention_gate` applies a gate with a tensor of its own to the result.
        None | Some(AttentionGate::Tensor { width: _, activation: _ }) => false,
    };
    let window = match mask {
        Mask::Causal => None,
        Mask::Window(window) => Some(window),
        Mask::Chunk(_) | Mask::Full | Mask::SymmetricWindow(_) => return None,
    };
    let (n_rot, rope_layout) = match positions {
        Positions::Rope(rope) => (rope.n_rot, rope.layout),
        Positions::None => (UNROTATED_ELEMENTS, RopeLayout::Halves),
        Positions::Alibi { max_bias: _ } => return None,
    };
    let qk_norm_eps = match qk_norm {
        None => None,
        Some(QkNorm { kind: NormKind::Rms, eps, over: NormOver::Head, after_rope: false }) => Some(eps),
        Some(QkNorm { kind: NormKind::Rms | NormKind::Layer, eps: _, over: _, after_rope: _ }) => return None,
    };
    let own = match kv {
        KvSource::Own => true,
        KvSource::KeysAsValues | KvSource::Layer(_) | KvSource::Target(_) => false,
    };
    let LayerPages { n_ctx, group, cache } = pages;
    let others = value_norm.is_some() || clamp_qkv.is_some() || temperature.is_some() || sinks && qk_norm.is_some();
    let fits = n_rot <= head_dim && head_dim <= MAX_FAST_HEAD_DIM;
    (own && !others && fits).then_some(AttentionShape {
        n_head,
        n_head_kv,
        head_dim,
        scale,
        soft_cap,
        sinks,
        window,
        n_ctx,
        group,
        n_rot,
        rope_layout,
        qk_norm_eps,
        gated,
        cache,
        n_trailing: a.gate_rows().unwrap_or(0),
    })
}

impl WgpuAttention {
    /// Uploads the weights. `parallel`: a matrix of the same input, the input projection of a parallel Mamba-2, that is
    /// stacked below queries, keys and values.
    pub(super) fn new(
        gpu: &WgpuDevice,
        w: &AttentionWeights,
        parallel: Option<&Linear>,
        pages: LayerPages,
        uploads: &mut Uploads,
    ) -> Result<Self, WgpuError> {
        let spec = &w.spec;
        let norms: Vec<_> = [&w.q_norm, &w.k_norm].into_iter().flatten().collect();
        let biases = norms.iter().flat_map(|norm| norm.bias.iter().flatten());
        let qk_norm: Vec<f32> = norms.iter().flat_map(|norm| &norm.weight).chain(biases).copied().collect();
        let slopes = match spec.positions {
            Positions::Alibi { max_bias } => Some(alibi_slopes(spec.n_head, max_bias)),
            Positions::None | Positions::Rope(_) => None,
        };
        let of_head = |h: usize| [&w.sinks, &slopes].map(|all| all.as_ref().map_or(0.0, |all| all[h]));
        let sinks_and_slopes: Vec<_> = (0..spec.n_head).flat_map(of_head).collect();
        let has_some = w.sinks.is_some() || slopes.is_some();
        let of_queries =
            if spec.gate == Some(AttentionGate::InQueries) { gates_and_queries(spec, &w.q) } else { vec![w.q.clone()] };
        let qkv: Vec<_> = of_queries.iter().chain(&w.k).chain(&w.v).chain(&w.gate).chain(parallel).collect();
        let kernels = AttentionKernels::new(w, pages);
        let kernels = match parallel {
            None => kernels,
            // `layer_supports` refuses gates with a matrix of their own beside it.
            Some(linear) => kernels.with_trailing(linear.weight.n_rows()),
        };
        let gate = match spec.gate {
            None | Some(AttentionGate::InQueries) => None,
            Some(AttentionGate::Tensor { width, activation }) => Some(AttentionGateShape {
                n_head: spec.n_head,
                head_dim: spec.head_dim,
                width,
                activation,
                stride: kernels.row_len(),
                first: kernels.qkv_len(),
            }),
        };
        Ok(Self {
            kernels,
            gate,
            qkv: concat(gpu, "Q, K and V", &qkv, uploads)?,
            qk_norm: (!norms.is_empty()).then(|| gpu.upload("the norms of Q and K", &qk_norm)).transpose()?,
            sinks_and_slopes: has_some.then(|| gpu.upload("sinks and slopes", &sinks_and_slopes)).transpose()?,
            out: concat(gpu, "the attention's output matrix", &[&w.out], uploads)?,
        })
    }
}

/// The gates of all heads, then the queries of all heads, from a matrix in which each head's gate follows its query.
fn gates_and_queries(a: &AttentionSpec, q: &Linear) -> Vec<Linear> {
    let rows = |first: usize| Linear {
        weight: q.weight.rows(first..first + a.head_dim),
        bias: q.bias.as_ref().map(|bias| bias[first..first + a.head_dim].to_vec()),
    };
    let heads = |start: usize| (0..a.n_head).map(move |head| rows(2 * head * a.head_dim + start));
    heads(a.head_dim).chain(heads(0)).collect()
}

impl<'a> PlanBuilder<'a> {
    /// Appends softmax attention of layer `i`, up to the input of its output projection.
    pub(crate) fn attention(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        w: &'a WgpuAttention,
        input: BranchInput<'a>,
    ) -> Result<LastProduct<'a>, WgpuError> {
        self.multiply_branch_input(dispatches, input, &w.qkv, MatvecOutput::Store, &self.scratch.projected)?;
        self.attend(dispatches, i, w)
    }

    /// Appends what stores the keys and values of the rows in `x`, context rows of a block drafter, in the KV cache of layer `i`.
    pub(crate) fn store_context(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        w: &'a WgpuAttention,
    ) -> Result<(), WgpuError> {
        let scratch = self.scratch;
        // The product has the queries, too, which are not used: keys and values alone would be another matrix.
        self.multiply(dispatches, LinearProduct::new(&w.qkv, MatvecOutput::Store, &scratch.x, &scratch.projected))?;
        match &w.kernels {
            AttentionKernels::Fast(shape) => {
                let last_seen = self.spans.last_seen(i);
                let buffers = self.fast_buffers(i, w.qk_norm.as_ref(), w.sinks_and_slopes.as_ref(), &last_seen);
                dispatches.push(kernels::rope_append(self.gpu, shape, &buffers)?);
                Ok(())
            }
            AttentionKernels::General(inputs, _) => self.attention_inputs(dispatches, i, inputs, w.qk_norm.as_ref()),
        }
    }

    /// The buffers of the fast kernels in layer `i`.
    fn fast_buffers<'b>(
        &'b self,
        i: usize,
        qk_norm: Option<&'b Buffer>,
        sinks_and_slopes: Option<&'b Buffer>,
        last_seen: &'b dyn Bind,
    ) -> AttentionBuffers<'b> {
        let (keys, values) = self.cache.read_by_layer(i);
        AttentionBuffers {
            qkv: &self.scratch.projected,
            rope: &self.rope[i],
            qk_norm,
            sinks_and_slopes,
            keys,
            values,
            attention_out: &self.scratch.mixer_out,
            partial: &self.scratch.partial,
            last_seen,
            batch: self.batch,
        }
    }

    /// Appends softmax attention of layer `i` after its input product: reads `projected`, stores the batch's keys and
    /// values in the KV cache, attends over the cache, and writes `mixer_out`.
    pub(super) fn attend(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        w: &'a WgpuAttention,
    ) -> Result<LastProduct<'a>, WgpuError> {
        let WgpuAttention { kernels, qkv: _, qk_norm, sinks_and_slopes, gate, out } = w;
        let scratch = self.scratch;
        match kernels {
            AttentionKernels::Fast(shape) => {
                self.fast_attention(dispatches, i, shape, qk_norm.as_ref(), sinks_and_slopes.as_ref())?;
            }
            AttentionKernels::General(inputs_shape, attention_shape) => {
                self.attention_inputs(dispatches, i, inputs_shape, qk_norm.as_ref())?;
                self.general_attention(dispatches, i, attention_shape, sinks_and_slopes.as_ref())?;
            }
        }
        if let Some(gate) = gate {
            dispatches.push(kernels::attention_gate(self.gpu, gate, &scratch.projected, &scratch.mixer_out)?);
        }
        Ok(LastProduct::new(out, &scratch.mixer_out))
    }

    /// Appends attention of layer `i` by the fast kernels. Reads `projected`, writes `mixer_out`. These kernels
    /// are chosen only for layers with a KV cache of their own. There are two dispatches. In a decode step:
    ///
    /// 1. `decode_attention`, with a workgroup for each token, split, and group of query heads that share a KV head:
    ///    norm and RoPE, and attention over the split, to `partial`, or to `mixer_out` if there is only one split. For
    ///    each KV head, one workgroup of the split that contains the token's own position also stores the new key and
    ///    value in the KV cache. Every workgroup attends to its own copy of them, since what another one stores is not
    ///    visible within the dispatch.
    /// 2. `decode_attention_merge`: the results of all splits, from `partial` to `mixer_out`. The number of splits is
    ///    that of the micro-batch; with one split this dispatch has no workgroups.
    ///
    /// In prefill:
    ///
    /// 1. `rope_append`: norm and RoPE, of the queries in place in `projected`; stores keys and values in the KV cache.
    /// 2. `prefill_attention`, on matrix units if the GPU and the shape allow it.
    ///
    /// The kernel that writes `mixer_out` also multiplies each head's result by the sigmoid of its gate, if the layer
    /// has gates.
    ///
    /// `qk_norm`: the weight of the norm of query heads, then that of key heads, `[2, head_dim]`.
    /// `sinks_and_slopes`: `[n_head, 2]`, of which only the sinks are read; the fast kernels do not cover `ALiBi`.
    fn fast_attention(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        shape: &AttentionShape,
        qk_norm: Option<&Buffer>,
        sinks_and_slopes: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let gpu = self.gpu;
        let last_seen = self.spans.last_seen(i);
        let buffers = self.fast_buffers(i, qk_norm, sinks_and_slopes, &last_seen);
        if self.uses_decode_kernels() {
            dispatches.push(kernels::decode_attention(gpu, shape, &buffers)?);
            dispatches.push(kernels::decode_attention_merge(gpu, shape, &buffers)?);
        } else {
            dispatches.push(kernels::rope_append(gpu, shape, &buffers)?);
            // `exact` excludes matrix units that round to 16 bits.
            let on_matrix_units = kernels::prefill_on_matrix_units(gpu.features(), shape, self.exact);
            let attention =
                if on_matrix_units { kernels::prefill_attention_cooperative } else { kernels::prefill_attention };
            dispatches.push(attention(gpu, shape, &buffers)?);
        }
        Ok(())
    }

    /// Appends the kernel before `general_attention`: norms and rotates the projected queries and keys, writes
    /// `queries`, and stores keys and values in the KV cache of layer `i`, unless the layer reads another layer's
    /// cache. Reads `projected`.
    ///
    /// `qk_norm`, concatenated: query weight, key weight, query bias, key bias. Absent ones are left out; `shape` says
    /// which are present. Each covers one head or all heads, as `shape.qk_norm` says.
    fn attention_inputs(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        shape: &AttentionInputsShape,
        qk_norm: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let (scratch, (keys, values)) = (self.scratch, self.cache.read_by_layer(i));
        let buffers = AttentionInputsBuffers {
            qkv: &scratch.projected,
            queries: &scratch.queries,
            rope: shape.rope.map(|_| &self.rope[i]),
            qk_norm,
            cache: if shape.kv == KvInputs::None { None } else { Some((keys, values)) },
            batch: self.batch,
        };
        dispatches.push(kernels::attention_inputs(self.gpu, shape, &buffers)?);
        Ok(())
    }

    /// Appends attention by the general kernels over the KV cache that layer `i` reads (its own, or that of the layer
    /// whose keys and values it shares): from `queries` to `mixer_out`, `[n_tokens, n_head, value_dim]`. A decode step
    /// divides the positions into splits (split-KV) and has a second dispatch, which merges their results from
    /// `partial` to `mixer_out`; it has no workgroups for a single split.
    ///
    /// `sinks_and_slopes`: the sink's score and the `ALiBi` slope of each head, `[n_head, 2]`; `None`: neither.
    pub(super) fn general_attention(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        shape: &GeneralAttention,
        sinks_and_slopes: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let (scratch, (keys, values)) = (self.scratch, self.cache.read_by_layer(i));
        let last_seen = self.spans.last_seen(i);
        let buffers = GeneralAttentionBuffers {
            queries: &scratch.queries,
            keys,
            values,
            sinks_and_slopes,
            attention_out: &scratch.mixer_out,
            partial: &scratch.partial,
            last_seen: &last_seen,
            batch: self.batch,
        };
        let split_kv = self.uses_decode_kernels();
        dispatches.push(kernels::general_attention(self.gpu, shape, split_kv, &buffers)?);
        if split_kv {
            dispatches.push(kernels::general_attention_merge(self.gpu, shape, &buffers)?);
        }
        Ok(())
    }
}
