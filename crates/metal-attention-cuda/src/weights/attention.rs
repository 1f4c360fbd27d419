//! Weights of softmax attention on the device.

use bytemuck::Zeroable;
use metal_attention_model::{AttentionWeights, KvSource, Linear, NormWeights, Positions, alibi_slopes};

use super::{CudaLinear, CudaVector, Loader};
use crate::CudaError;
use crate::args::{AttentionInputsArgs, HeadArgs};
use crate::device::CudaBuffer;
use crate::matrix::CudaMatrix;
use crate::slice::DevicePtr;
use crate::support::{AttentionKernels, QkvKernels, attention_kernels, head_codes, mask_code, norm_kind};

/// The weights and constants of a layer's attention. Its input product has rows of queries (each with its gate, if there are
/// gates), keys and values, one after the other.
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
    /// Positions of the mask's window or chunk.
    pub(crate) reach: u32,
    /// Bound of the scores, `soft_cap * tanh(score / soft_cap)`; 0: none.
    pub(crate) soft_cap: f32,
    /// Attention sinks, `[n_head]`.
    pub(crate) sinks: Option<CudaVector>,
    /// ALiBi slopes, `[n_head]`.
    pub(crate) slopes: Option<CudaVector>,
    /// Whether each head's query is followed by a gate of its result.
    pub(crate) has_gates: bool,
    /// Owns the norm weights and biases whose addresses are in `inputs` and `separate_inputs`.
    _norms: [Option<CudaVector>; 4],
}

impl CudaAttention {
    /// Elements of a token's row of queries, keys and values.
    pub(crate) fn stride(&self) -> usize {
        self.qkv.iter().map(|matrix| matrix.n_rows).sum()
    }
}

impl Loader<'_> {
    /// Uploads the weights of attention and determines its kernels.
    pub(super) fn softmax_attention(&mut self, w: &AttentionWeights) -> Result<CudaAttention, CudaError> {
        let of = &w.spec;
        let unsupported = |part| CudaError::UnsupportedPart { part };
        let linears: Vec<_> = [Some(&w.q), w.k.as_ref(), w.v.as_ref()].into_iter().flatten().collect();
        let qkv_bias = self.biases(&linears)?;
        let weight = |norm: &Option<NormWeights>| self.optional(norm.as_ref().map(|norm| &norm.weight[..]));
        let bias = |norm: &Option<NormWeights>| self.optional(norm.as_ref().and_then(|norm| norm.bias.as_deref()));
        let norms = [weight(&w.q_norm)?, weight(&w.k_norm)?, bias(&w.q_norm)?, bias(&w.k_norm)?];
        let ptr = |vector: &Option<CudaVector>| vector.as_ref().map_or(DevicePtr::NULL, CudaBuffer::ptr);
        let inputs = HeadArgs {
            q_norm: ptr(&norms[0]),
            k_norm: ptr(&norms[1]),
            rope: self.rope(of.rope()),
            ..head_codes(of).map_err(unsupported)?
        };
        let (mask, reach) = mask_code(of.mask);
        let slopes = match of.positions {
            Positions::None | Positions::Rope(_) => None,
            Positions::Alibi { max_bias } => Some(self.vector(&alibi_slopes(of.n_head, max_bias))?),
        };
        let qkv = linears.into_iter().map(|linear| self.matrix(linear)).collect::<Result<Vec<_>, _>>()?;
        let (input_kernels, kernels) = attention_kernels(of, norms[2].is_some() || norms[3].is_some());
        let separate_inputs = match input_kernels {
            QkvKernels::Fused => None,
            QkvKernels::FusedInDecode | QkvKernels::Separate => {
                let k_at = qkv[0].n_rows;
                let (v_at, owns_cache) = match of.kv {
                    KvSource::Own => (k_at + of.n_head_kv * of.head_dim, true),
                    KvSource::KeysAsValues => (k_at, true),
                    KvSource::Layer(_) => (k_at, false),
                };
                let growth = of.temperature;
                // Longer contexts than u32 counts do not fit in memory.
                let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
                Some(AttentionInputsArgs {
                    inputs,
                    q_bias: ptr(&norms[2]),
                    k_bias: ptr(&norms[3]),
                    n_head: of.n_head as u32,
                    n_head_kv: of.n_head_kv as u32,
                    head_dim: of.head_dim as u32,
                    stride: qkv.iter().map(|matrix| matrix.n_rows).sum::<usize>() as u32,
                    q_step: (of.head_dim * if of.output_gate { 2 } else { 1 }) as u32,
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
        Ok(CudaAttention {
            qkv,
            qkv_bias,
            out: self.linear(&w.out)?,
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
            sinks: self.optional(w.sinks.as_deref())?,
            slopes,
            has_gates: of.output_gate,
            _norms: norms,
        })
    }

    /// The biases of several matrices, one after the other, with zeros for a matrix without bias; `None` if none has one.
    pub(super) fn biases(&self, linears: &[&Linear]) -> Result<Option<CudaVector>, CudaError> {
        if linears.iter().all(|linear| linear.bias.is_none()) {
            return Ok(None);
        }
        let of = |linear: &&Linear| linear.bias.clone().unwrap_or_else(|| vec![0.0; linear.weight.n_rows()]);
        Ok(Some(self.vector(&linears.iter().flat_map(of).collect::<Vec<_>>())?))
    }
}
