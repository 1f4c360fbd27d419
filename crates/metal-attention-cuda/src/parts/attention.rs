//! Softmax attention: queries, keys and values; RoPE and norms; the KV cache; attention; without the output product.
//!
//! Three kinds of kernels attend: for each token by itself `attention.cu` and, on tensor cores, `attention_on_units.cu`, which in decode
//! steps also apply norm and RoPE and write the KV cache; for several tokens of a sequence FlashAttention-like kernels on
//! tensor cores over query tiles (`prefill_attention.cu`), after `append_*` or `attention_inputs_*` has written the KV cache;
//! and `general_attention.cu` for every mask, head size and ALiBi. Where there are few blocks, positions are split (split-KV)
//! and the last block of a head merges the partial results.

pub(crate) mod launch;

use bytemuck::Zeroable;
use metal_attention_model::{
    AttentionGate, AttentionSpec, AttentionWeights, GateActivation, GateWidth, KvSource, Mask, NormKind, NormOver,
    NormWeights, Positions, QkNorm, Rope, RopeLayout, alibi_slopes,
};

use crate::CudaError;
use crate::activations::{Widths, widen};
use crate::args::{AttentionInputsArgs, HeadArgs};
use crate::matrix::CudaMatrix;
use crate::slice::DevicePtr;
use crate::weights::{CudaLinear, CudaVector, Loader, norm_kind, ptr_or_null};

/// Most elements of a head for the kernels that load whole KV pages.
const MAX_PAGED_HEAD_DIM: usize = 256;
/// Most elements of a head for the general attention kernel.
const MAX_HEAD_DIM: usize = 512;

/// A gate of attention's result.
#[derive(Debug)]
pub(crate) enum CudaGate {
    /// In the input product, after each head's query.
    InQueries,
    /// The product of a matrix of its own with attention's input.
    Matrix {
        /// The matrix, `[n_head * head_dim, n_embd]` or `[n_head, n_embd]`.
        linear: CudaLinear,
        /// What one of its rows gates.
        width: GateWidth,
        /// From the product to the factor.
        activation: GateActivation,
    },
}

/// The weights and constants of a layer's attention. Its input product has rows of queries (each with its gate, for
/// [`CudaGate::InQueries`]), keys and values, one after the other.
#[derive(Debug)]
pub(crate) struct CudaAttention {
    /// Matrices of queries, keys and values, of those that the layer has, `[.., n_embd]`.
    pub(crate) qkv: Vec<CudaMatrix>,
    /// Their biases, one after the other.
    pub(crate) qkv_bias: Option<CudaVector>,
    /// Output, `[n_embd, n_head * head_dim]`.
    pub(crate) out: CudaLinear,
    /// Query heads.
    pub(crate) n_head: usize,
    /// KV heads.
    pub(crate) n_head_kv: usize,
    /// Elements of a head.
    pub(crate) head_dim: usize,
    /// Norm and RoPE of queries and keys.
    pub(crate) inputs: HeadArgs,
    /// Arguments of the separate kernel that makes queries, keys and values, without a micro-batch's addresses; `None` if the
    /// attention kernel does it.
    pub(crate) separate_inputs: Option<AttentionInputsArgs>,
    /// Whether the attention kernel does it in decode steps, in spite of `separate_inputs`.
    pub(crate) fused_in_decode: bool,
    /// The attention kernels.
    pub(crate) kernels: AttentionKernels,
    /// The mask, by its number in the kernels (`masks.cuh`).
    pub(crate) mask: u32,
    /// The length of the mask's window or chunk; the distance of a symmetric window.
    pub(crate) reach: u32,
    /// Bound of the scores, `soft_cap * tanh(score / soft_cap)`; 0: none.
    pub(crate) soft_cap: f32,
    /// Attention sinks, `[n_head]`.
    pub(crate) sinks: Option<CudaVector>,
    /// ALiBi slopes, `[n_head]`.
    pub(crate) slopes: Option<CudaVector>,
    /// The gate of the result.
    pub(crate) gate: Option<CudaGate>,
    /// Owns the norm weights and biases whose addresses are in `inputs` and `separate_inputs`.
    _norms: [Option<CudaVector>; 4],
}

impl CudaAttention {
    /// Uploads the weights and chooses the kernels.
    pub(super) fn new(loader: &mut Loader<'_>, w: &AttentionWeights) -> Result<Self, CudaError> {
        let of = &w.spec;
        let unsupported = |part| CudaError::UnsupportedPart { part };
        let linears: Vec<_> = [Some(&w.q), w.k.as_ref(), w.v.as_ref()].into_iter().flatten().collect();
        let qkv_bias = loader.biases(&linears)?;
        let weight = |norm: &Option<NormWeights>| loader.optional(norm.as_ref().map(|norm| &norm.weight[..]));
        let bias = |norm: &Option<NormWeights>| loader.optional(norm.as_ref().and_then(|norm| norm.bias.as_deref()));
        let norms = [weight(&w.q_norm)?, weight(&w.k_norm)?, bias(&w.q_norm)?, bias(&w.k_norm)?];
        let inputs = HeadArgs {
            q_norm: ptr_or_null(norms[0].as_ref()),
            k_norm: ptr_or_null(norms[1].as_ref()),
            rope: loader.rope(of.rope()),
            ..head_codes(of).map_err(unsupported)?
        };
        let (mask, reach) = mask_code(of.mask);
        let slopes = match of.positions {
            Positions::None | Positions::Rope(_) => None,
            Positions::Alibi { max_bias } => Some(loader.vector(&alibi_slopes(of.n_head, max_bias))?),
        };
        let qkv = linears.into_iter().map(|linear| loader.matrix(linear)).collect::<Result<Vec<_>, _>>()?;
        let (input_kernels, kernels) = attention_kernels(of, norms[2].is_some() || norms[3].is_some());
        let separate_inputs = match input_kernels {
            QkvKernels::Fused => None,
            QkvKernels::FusedInDecode | QkvKernels::Separate => {
                let k_at = qkv[0].n_rows;
                let (v_at, owns_cache) = match of.kv {
                    KvSource::Own => (k_at + of.n_head_kv * of.head_dim, true),
                    KvSource::KeysAsValues => (k_at, true),
                    KvSource::Layer(_) | KvSource::Target(_) => (k_at, false),
                };
                let growth = of.temperature;
                // Longer contexts than u32 counts do not fit in memory.
                let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
                Some(AttentionInputsArgs {
                    inputs,
                    q_bias: ptr_or_null(norms[2].as_ref()),
                    k_bias: ptr_or_null(norms[3].as_ref()),
                    n_head: of.n_head as u32,
                    n_head_kv: of.n_head_kv as u32,
                    head_dim: of.head_dim as u32,
                    stride: qkv.iter().map(|matrix| matrix.n_rows).sum::<usize>() as u32,
                    q_step: of.query_rows() as u32,
                    k_at: k_at as u32,
                    v_at: v_at as u32,
                    owns_cache: u32::from(owns_cache),
                    kind: of.qk_norm.map_or(0, |norm| norm_kind(norm.kind)),
                    clamp: of.clamp_qkv.unwrap_or(f32::INFINITY),
                    value_eps: of.value_norm.unwrap_or(-1.0),
                    growth: growth.map_or(0.0, |growth| growth.scale),
                    growth_length: growth.map_or(1, |growth| count(growth.length)),
                    growth_offset: growth.map_or(0, |growth| count(growth.offset)),
                    ..AttentionInputsArgs::zeroed()
                })
            }
        };
        let gate = match (of.gate, &w.gate) {
            (Some(AttentionGate::Tensor { width, activation }), Some(gate)) => {
                Some(CudaGate::Matrix { linear: loader.linear(gate)?, width, activation })
            }
            (Some(AttentionGate::InQueries), _) => Some(CudaGate::InQueries),
            (Some(AttentionGate::Tensor { width: _, activation: _ }), None) => {
                return Err(unsupported("a gate of attention's result without its tensor"));
            }
            (None, _) => None,
        };
        Ok(Self {
            qkv,
            qkv_bias,
            out: loader.linear(&w.out)?,
            n_head: of.n_head,
            n_head_kv: of.n_head_kv,
            head_dim: of.head_dim,
            inputs,
            separate_inputs,
            fused_in_decode: input_kernels == QkvKernels::FusedInDecode,
            kernels,
            mask,
            reach,
            soft_cap: of.soft_cap.unwrap_or(0.0),
            sinks: loader.optional(w.sinks.as_deref())?,
            slopes,
            gate,
            _norms: norms,
        })
    }

    /// Elements of a token's row of queries, keys and values.
    pub(crate) fn stride(&self) -> usize {
        self.qkv.iter().map(|matrix| matrix.n_rows).sum()
    }
}

/// The kernel that makes queries, keys and values of their projections: norm, RoPE, and the append to the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QkvKernels {
    /// In decode steps the attention kernel itself; in prefill a small one before it (`append_*`).
    Fused,
    /// In decode steps the attention kernel itself; in prefill the separate kernel, since `append_*` knows no gates between queries.
    FusedInDecode,
    /// A separate kernel that knows all norms, clamps and scales (`attention_inputs.cu`).
    Separate,
}

/// The kernels that compute softmax attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttentionKernels {
    /// Kernels that load whole KV pages: `attention.cu`, `attention_on_units.cu`.
    Paged,
    /// The kernel for every mask and head size, and ALiBi: `general_attention.cu`. Without ALiBi, prefill on tensor cores is
    /// `prefill_attention.cu` in both cases.
    General,
}

/// Checks that there are kernels for an attention; the error is the part without one.
pub(crate) fn supports(a: &AttentionSpec) -> Result<(), &'static str> {
    if a.head_dim > MAX_HEAD_DIM {
        return Err("heads of that many elements");
    }
    head_codes(a).map(|_| ())
}

/// Widens the buffers of intermediate results.
pub(super) fn widen_for_attention(widths: &mut Widths, a: &AttentionSpec) {
    widen(&mut widths.qkv, a.n_head * a.query_rows() + 2 * a.n_head_kv * a.head_dim);
    widen(&mut widths.attention, a.n_head * a.head_dim);
    widen(&mut widths.n_head, a.n_head);
    widen(&mut widths.partial, a.head_dim + 2);
    widths.widen_scratch_rows([a.gate_rows().unwrap_or(0)]);
}

/// The kernels for an attention. `norm_bias`: whether the norms of queries or keys have a bias.
fn attention_kernels(a: &AttentionSpec, norm_bias: bool) -> (QkvKernels, AttentionKernels) {
    let AttentionSpec {
        n_head: _,
        n_head_kv: _,
        head_dim,
        scale: _,
        mask,
        positions,
        soft_cap: _,
        sinks: _,
        qk_norm,
        value_norm,
        clamp_qkv,
        kv,
        temperature,
        qkv_bias: _,
        fused_qkv: _,
        gate,
    } = a;
    let paged = head_dim % 8 == 0
        && *head_dim <= MAX_PAGED_HEAD_DIM
        && mask.is_causal()
        && match positions {
            Positions::None | Positions::Rope(_) => true,
            Positions::Alibi { max_bias: _ } => false,
        };
    let norms = qk_norm.is_none_or(|QkNorm { kind, eps: _, over, after_rope: _ }| {
        kind == NormKind::Rms && over != NormOver::Row && !norm_bias
    });
    let plain = norms && value_norm.is_none() && clamp_qkv.is_none() && temperature.is_none();
    let is_fused = paged && plain && *kv == KvSource::Own;
    (
        match (is_fused, gate) {
            (true, None | Some(AttentionGate::Tensor { width: _, activation: _ })) => QkvKernels::Fused,
            (true, Some(AttentionGate::InQueries)) => QkvKernels::FusedInDecode,
            (false, _) => QkvKernels::Separate,
        },
        if paged { AttentionKernels::Paged } else { AttentionKernels::General },
    )
}

/// The mask's number in the kernels (`masks.cuh`), and the positions of its window or chunk.
fn mask_code(mask: Mask) -> (u32, u32) {
    // Longer contexts than u32 counts do not fit in memory.
    let reach = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    match mask {
        Mask::Causal => (0, 0),
        Mask::Window(n) => (1, reach(n)),
        Mask::Chunk(n) => (2, reach(n)),
        Mask::Full => (3, 0),
        Mask::SymmetricWindow(n) => (4, reach(n)),
    }
}

/// The activation's number in the kernels (`GateActivation` of `heads.cuh`).
fn gate_activation_code(activation: GateActivation) -> u32 {
    match activation {
        GateActivation::Sigmoid => 0,
        GateActivation::Softplus => 1,
    }
}

/// Norm and RoPE of queries and keys, as kernels take them, without the addresses of weights and tables. An error for a
/// combination without a kernel.
fn head_codes(a: &AttentionSpec) -> Result<HeadArgs, &'static str> {
    let (norm, norm_after_rope, eps) = match a.qk_norm {
        None => (0, false, 0.0),
        Some(QkNorm { over: NormOver::Row, after_rope: true, kind: _, eps: _ }) => {
            return Err("norms of whole rows of queries and keys after RoPE");
        }
        Some(QkNorm { kind: _, eps, over, after_rope }) => {
            let norm = match over {
                NormOver::Head => 1,
                NormOver::EachHead => 2,
                NormOver::Unweighted => 3,
                NormOver::Row => 4,
            };
            (norm, after_rope, eps)
        }
    };
    let rope = a.rope();
    Ok(HeadArgs {
        q_norm: DevicePtr::NULL,
        k_norm: DevicePtr::NULL,
        rope: DevicePtr::NULL,
        norm,
        norm_after_rope: u32::from(norm_after_rope),
        rotation: rotation_code(rope),
        n_rot: rope.map_or(0, |rope| rope.n_rot as u32),
        eps,
        scale: a.scale,
    })
}

/// The rotation's number in the kernels (`Rotation` of `heads.cuh`).
pub(super) fn rotation_code(rope: Option<&Rope>) -> u32 {
    match rope.map(|rope| rope.layout) {
        None => 0,
        Some(RopeLayout::Interleaved) => 1,
        Some(RopeLayout::Halves) => 2,
    }
}
