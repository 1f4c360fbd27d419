//! Weights of latent attention.

use metal_attention_model::{LatentAttentionSpec, LatentAttentionWeights, NormKind};

use super::{CudaLinear, CudaNorm, CudaVector, Loader};
use crate::CudaError;
use crate::stack::CudaStack;

/// Latent attention.
#[derive(Debug)]
pub(crate) struct CudaLatentAttention {
    pub(crate) spec: LatentAttentionSpec,
    /// Compressed queries and their norm.
    pub(crate) q_a: Option<(CudaLinear, CudaNorm)>,
    pub(crate) q: CudaLinear,
    pub(crate) kv_a: CudaLinear,
    pub(crate) kv_a_norm: CudaVector,
    /// Of each head.
    pub(crate) k_b: CudaStack,
    pub(crate) v_b: CudaStack,
    pub(crate) out: CudaLinear,
    /// Where the table of rotations lies; 0: nowhere.
    pub(crate) rope: u64,
}

impl Loader<'_> {
    pub(super) fn latent_attention(
        &mut self,
        of: &LatentAttentionSpec,
        w: &LatentAttentionWeights,
    ) -> Result<CudaLatentAttention, CudaError> {
        let q_a = match &w.q_a {
            Some((linear, norm)) => {
                let (weight, n) = (self.vector(&norm.weight)?, norm.weight.len());
                let norm = CudaNorm { kind: NormKind::Rms, weight, bias: None, eps: of.eps, n };
                Some((self.linear(linear)?, norm))
            }
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
