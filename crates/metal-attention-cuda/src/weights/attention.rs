//! Weights of attention.

use metal_attention_model::{AttentionSpec, AttentionWeights, Linear, NormWeights};

use super::{CudaLinear, Loader, Vector};
use crate::CudaError;
use crate::args::HeadArgs;
use crate::device::CudaBuffer;
use crate::matrix::CudaMatrix;
use crate::parts::{head_codes, mask_code};

/// What attention is in a layer.
#[derive(Debug)]
pub(crate) struct CudaAttention {
    /// Of queries, keys and values.
    pub(crate) qkv: [CudaMatrix; 3],
    /// Of all three one after the other.
    pub(crate) qkv_bias: Option<Vector>,
    pub(crate) out: CudaLinear,
    pub(crate) n_head: usize,
    pub(crate) n_kv_head: usize,
    pub(crate) head_dim: usize,
    pub(crate) inputs: HeadArgs,
    pub(crate) mask: u32,
    pub(crate) reach: u32,
    pub(crate) soft_cap: f32,
    pub(crate) sinks: Option<Vector>,
    /// Keeps the weights that `inputs` names.
    _norms: [Option<Vector>; 2],
}

impl CudaAttention {
    /// Elements of a row of queries, keys and values.
    pub(crate) fn stride(&self) -> usize {
        (self.n_head + 2 * self.n_kv_head) * self.head_dim
    }
}

impl Loader<'_> {
    pub(super) fn attention(&mut self, of: &AttentionSpec, w: &AttentionWeights) -> Result<CudaAttention, CudaError> {
        let unsupported = |part| CudaError::UnsupportedPart { part };
        let (Some(k), Some(v)) = (&w.k, &w.v) else { return Err(unsupported("keys and values of other layers")) };
        let linears = [&w.q, k, v];
        let qkv_bias = if linears.iter().any(|linear| linear.bias.is_some()) {
            let of = |linear: &&Linear| linear.bias.clone().unwrap_or_else(|| vec![0.0; linear.weight.n_rows()]);
            Some(self.vector(&linears.iter().flat_map(of).collect::<Vec<_>>())?)
        } else {
            None
        };
        let weight = |norm: &Option<NormWeights>| self.optional(norm.as_ref().map(|norm| &norm.weight[..]));
        let norms = [weight(&w.q_norm)?, weight(&w.k_norm)?];
        let (mask, reach) = mask_code(of.mask).map_err(unsupported)?;
        let ptr = |vector: &Option<Vector>| vector.as_ref().map_or(0, CudaBuffer::ptr);
        let inputs = HeadArgs {
            q_norm: ptr(&norms[0]),
            k_norm: ptr(&norms[1]),
            rope: self.rope(of.rope()),
            ..head_codes(of).map_err(unsupported)?
        };
        Ok(CudaAttention {
            qkv: [self.matrix(&w.q)?, self.matrix(k)?, self.matrix(v)?],
            qkv_bias,
            out: self.linear(&w.out)?,
            n_head: of.n_head,
            n_kv_head: of.n_head_kv,
            head_dim: of.head_dim,
            inputs,
            mask,
            reach,
            soft_cap: of.soft_cap.unwrap_or(0.0),
            sinks: self.optional(w.sinks.as_deref())?,
            _norms: norms,
        })
    }
}
