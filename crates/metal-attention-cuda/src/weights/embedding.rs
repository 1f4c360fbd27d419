//! Weights of what a token becomes before the first layer, and of what layers do with embeddings of their own and with several
//! residual streams.

use std::sync::Arc;

use metal_attention_model::{LayerWeights, Linear, ModelSpec, Weights};

use super::{CudaLinear, CudaNorm, CudaVector, Loader};
use crate::CudaError;
use crate::matrix::CudaMatrix;

/// What a token becomes before the first layer.
#[derive(Debug)]
pub(crate) struct CudaEmbedding {
    /// `[n_vocab, n_embd]`.
    pub(crate) table: Arc<CudaMatrix>,
    /// Added to every token's, `[n_embd]`.
    pub(crate) token_type: Option<CudaVector>,
    /// `[n_positions, n_embd]`.
    pub(crate) positions: Option<CudaMatrix>,
    pub(crate) norm: Option<CudaNorm>,
    pub(crate) per_layer: Option<CudaPerLayer>,
    pub(crate) streams: Option<CudaStreams>,
}

/// Tables of the embeddings for each layer.
#[derive(Debug)]
pub(crate) struct CudaPerLayer {
    /// `[n_vocab, n_layer * width]`.
    pub(crate) table: CudaMatrix,
    /// `[n_layer * width, n_embd]`.
    pub(crate) model_proj: CudaLinear,
    pub(crate) proj_norm: CudaNorm,
}

/// What makes residual streams of one, and one of them: of each but the first.
#[derive(Debug)]
pub(crate) struct CudaStreams {
    pub(crate) proj: Vec<CudaLinear>,
    pub(crate) unembd_proj: Vec<CudaLinear>,
}

/// What a layer does with its own embedding.
#[derive(Debug)]
pub(crate) struct CudaOwnEmbedding {
    /// `[width, n_embd]`.
    pub(crate) gate: CudaLinear,
    /// `[n_embd, width]`.
    pub(crate) proj: CudaLinear,
    pub(crate) post_norm: CudaNorm,
}

/// How a layer goes about with several streams.
#[derive(Debug)]
pub(crate) struct CudaLayerStreams {
    pub(crate) router_norm: CudaNorm,
    pub(crate) router: CudaLinear,
    /// F32 `[n * n, n]`.
    pub(crate) predict: CudaVector,
    /// F32 `[n, n]`.
    pub(crate) correct: CudaVector,
    /// Factor on the first stream before its embedding, `[n_embd]`.
    pub(crate) correct_scale: CudaVector,
    pub(crate) laurel_l: CudaLinear,
    pub(crate) laurel_r: CudaLinear,
    pub(crate) laurel_norm: CudaNorm,
}

impl Loader<'_> {
    pub(super) fn embedding(&mut self, spec: &ModelSpec, w: &Weights) -> Result<CudaEmbedding, CudaError> {
        let of = &spec.embedding;
        let per_layer = match (&of.per_layer, &w.per_layer) {
            (Some(of), Some(w)) => Some(CudaPerLayer {
                table: self.matrix(&w.token_embd)?,
                model_proj: self.linear(&w.model_proj)?,
                proj_norm: self.one_norm(&of.proj_norm, &w.proj_norm)?,
            }),
            (Some(_) | None, _) => None,
        };
        let streams = match &w.streams {
            Some(w) => Some(CudaStreams { proj: self.linears(&w.proj)?, unembd_proj: self.linears(&w.unembd_proj)? }),
            None => None,
        };
        Ok(CudaEmbedding {
            table: Arc::new(self.matrix(&w.token_embd)?),
            token_type: self.optional(w.token_type.as_deref())?,
            positions: w.positions.as_ref().map(|table| self.matrix(table)).transpose()?,
            norm: self.norm(of.norm.as_ref(), w.embedding_norm.as_ref())?,
            per_layer,
            streams,
        })
    }

    fn linears(&mut self, linears: &[Linear]) -> Result<Vec<CudaLinear>, CudaError> {
        linears.iter().map(|linear| self.linear(linear)).collect()
    }

    pub(super) fn own_embedding(
        &mut self,
        spec: &ModelSpec,
        w: &LayerWeights,
    ) -> Result<Option<CudaOwnEmbedding>, CudaError> {
        let Some((of, w)) = spec.embedding.per_layer.as_ref().zip(w.per_layer.as_ref()) else { return Ok(None) };
        Ok(Some(CudaOwnEmbedding {
            gate: self.linear(&w.gate)?,
            proj: self.linear(&w.proj)?,
            post_norm: self.one_norm(&of.post_norm, &w.post_norm)?,
        }))
    }

    pub(super) fn layer_streams(
        &mut self,
        spec: &ModelSpec,
        w: &LayerWeights,
    ) -> Result<Option<CudaLayerStreams>, CudaError> {
        let Some((of, w)) = spec.embedding.streams.as_ref().zip(w.streams.as_ref()) else { return Ok(None) };
        Ok(Some(CudaLayerStreams {
            router_norm: self.one_norm(&of.router_norm, &w.router_norm)?,
            router: self.linear(&w.router)?,
            predict: self.vector(&w.predict.weight.to_f32())?,
            correct: self.vector(&w.correct.weight.to_f32())?,
            correct_scale: self.vector(&w.correct_scale)?,
            laurel_l: self.linear(&w.laurel_l)?,
            laurel_r: self.linear(&w.laurel_r)?,
            laurel_norm: self.one_norm(&of.laurel_norm, &w.laurel_norm)?,
        }))
    }
}
