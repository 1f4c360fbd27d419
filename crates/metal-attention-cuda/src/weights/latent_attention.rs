//! Weights of latent attention on the device.

use metal_attention_model::{LatentAttentionSpec, LatentAttentionWeights, Prepare};

use super::{CudaLinear, CudaNorm, CudaVector, Loader};
use crate::CudaError;
use crate::slice::DevicePtr;
use crate::stack::CudaStack;

/// The weights of a layer's latent attention.
#[derive(Debug)]
pub(crate) struct CudaLatentAttention {
    /// Sizes and constants.
    pub(crate) spec: LatentAttentionSpec,
    /// The product to compressed queries, `[q_rank, n_embd]`, and their norm; `None` if queries are not compressed.
    pub(crate) q_a: Option<(CudaLinear, CudaNorm)>,
    /// Queries, `[n_head * head_dim, q_rank or n_embd]`.
    pub(crate) q: CudaLinear,
    /// Compressed rows and the shared part of the keys, `[kv_rank + shared_dim, n_embd]`.
    pub(crate) kv_a: CudaLinear,
    /// Weights of the norm of compressed rows, `[kv_rank]`.
    pub(crate) kv_a_norm: CudaVector,
    /// The key expansion of each head, transposed, `[n_head, kv_rank, n_nope]`.
    pub(crate) k_b: CudaStack,
    /// The value expansion of each head, `[n_head, value_dim, kv_rank]`.
    pub(crate) v_b: CudaStack,
    /// Output, `[n_embd, n_head * value_dim]`.
    pub(crate) out: CudaLinear,
    /// The RoPE cos/sin table, or null.
    pub(crate) rope: DevicePtr<[f32; 2]>,
}

impl Loader<'_> {
    /// Uploads the weights of latent attention.
    pub(super) fn compressed_attention(
        &mut self,
        w: &LatentAttentionWeights,
    ) -> Result<CudaLatentAttention, CudaError> {
        let of = &w.spec;
        let q_a = match &w.q_a {
            Some((linear, norm)) => Some((self.linear(linear)?, self.norm(norm)?)),
            None => None,
        };
        Ok(CudaLatentAttention {
            spec: of.clone(),
            q_a,
            q: self.linear(&w.q)?,
            kv_a: self.linear(&w.kv_a)?,
            kv_a_norm: self.vector(&w.kv_a_norm.weight)?,
            k_b: self.stack(&w.k_b.iter().collect::<Vec<_>>())?,
            v_b: self.stack(&w.v_b.iter().collect::<Vec<_>>())?,
            out: self.linear(&w.out)?,
            rope: self.rope(of.rope.as_ref()),
        })
    }
}
