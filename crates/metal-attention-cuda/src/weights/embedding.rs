//! Weights of the embedding, and of what Gemma 3n adds to it: per-layer embeddings and several residual streams.

use std::sync::Arc;

use metal_attention_model::{LayerEmbeddingWeights, LayerStreamsWeights, Linear, Prepare, ResidualStreams, Weights};

use super::{CudaLinear, CudaNorm, CudaVector, Loader};
use crate::CudaError;
use crate::matrix::CudaMatrix;

/// The weights that make the residual stream from token ids, before the first layer.
#[derive(Debug)]
pub(crate) struct CudaEmbedding {
    /// Token embeddings, `[n_vocab, n_embd]`.
    pub(crate) table: Arc<CudaMatrix>,
    /// The embedding of token type 0, `[n_embd]`, which is added to every token.
    pub(crate) token_type: Option<CudaVector>,
    /// Position embeddings, `[n_positions, n_embd]`.
    pub(crate) positions: Option<CudaMatrix>,
    /// Norm of the sum.
    pub(crate) norm: Option<CudaNorm>,
    /// Per-layer embeddings.
    pub(crate) per_layer: Option<CudaPerLayer>,
    /// Further residual streams.
    pub(crate) streams: Option<CudaStreams>,
}

/// The weights that make the per-layer embeddings of all layers.
#[derive(Debug)]
pub(crate) struct CudaPerLayer {
    /// Embeddings by token id, `[n_vocab, n_layer * width]`.
    pub(crate) table: CudaMatrix,
    /// Projection of the token embedding, `[n_layer * width, n_embd]`.
    pub(crate) model_proj: CudaLinear,
    /// Norm of the projection, `[width]`.
    pub(crate) proj_norm: CudaNorm,
}

/// The projections between the first residual stream and the others.
#[derive(Debug)]
pub(crate) struct CudaStreams {
    /// From the embedding to each further stream, `[n_embd, n_embd]` each.
    pub(crate) proj: Vec<CudaLinear>,
    /// From each further stream back, `[n_embd, n_embd]` each.
    pub(crate) unembd_proj: Vec<CudaLinear>,
}

/// The weights with which a layer adds its per-layer embedding to the residual stream.
#[derive(Debug)]
pub(crate) struct CudaLayerEmbedding {
    /// `[width, n_embd]`.
    pub(crate) gate: CudaLinear,
    /// `[n_embd, width]`.
    pub(crate) proj: CudaLinear,
    /// Norm of the projection, `[n_embd]`.
    pub(crate) post_norm: CudaNorm,
}

/// A layer's weights for several residual streams (AltUp, LAuReL).
#[derive(Debug)]
pub(crate) struct CudaLayerStreams {
    /// Sizes.
    pub(crate) spec: ResidualStreams,
    /// Norm of the router's input.
    pub(crate) router_norm: CudaNorm,
    /// The coefficients of prediction and correction, `[n, n_embd]` for `n` streams.
    pub(crate) router: CudaLinear,
    /// Prediction, F32 `[n * n, n]`.
    pub(crate) predict: CudaVector,
    /// Correction, F32 `[n, n]`.
    pub(crate) correct: CudaVector,
    /// Factors on the corrected first stream, as input of the per-layer embedding, `[n_embd]`.
    pub(crate) correct_scale: CudaVector,
    /// LAuReL's first product, `[laurel_rank, n_embd]`.
    pub(crate) laurel_l: CudaLinear,
    /// LAuReL's second product, `[n_embd, laurel_rank]`.
    pub(crate) laurel_r: CudaLinear,
    /// Norm of its result.
    pub(crate) laurel_norm: CudaNorm,
}

impl Loader<'_> {
    /// Uploads the weights of the embedding.
    pub(super) fn embedding(&mut self, w: &Weights) -> Result<CudaEmbedding, CudaError> {
        let per_layer = match &w.per_layer {
            Some(w) => Some(CudaPerLayer {
                table: self.matrix(&w.token_embd)?,
                model_proj: self.linear(&w.model_proj)?,
                proj_norm: self.norm(&w.proj_norm)?,
            }),
            None => None,
        };
        let streams = match &w.streams {
            Some(w) => Some(CudaStreams { proj: self.linears(&w.proj)?, unembd_proj: self.linears(&w.unembd_proj)? }),
            None => None,
        };
        Ok(CudaEmbedding {
            table: Arc::new(self.matrix(&w.token_embd)?),
            token_type: self.optional(w.token_type.as_deref())?,
            positions: w.positions.as_ref().map(|table| self.matrix(table)).transpose()?,
            norm: self.optional_norm(w.embedding_norm.as_ref())?,
            per_layer,
            streams,
        })
    }

    /// Uploads matrices with their biases.
    fn linears(&mut self, linears: &[Linear]) -> Result<Vec<CudaLinear>, CudaError> {
        linears.iter().map(|linear| self.linear(linear)).collect()
    }

    /// Uploads the weights of a layer's additional embedding.
    pub(super) fn layer_embedding_of(&mut self, w: &LayerEmbeddingWeights) -> Result<CudaLayerEmbedding, CudaError> {
        Ok(CudaLayerEmbedding {
            gate: self.linear(&w.gate)?,
            proj: self.linear(&w.proj)?,
            post_norm: self.norm(&w.post_norm)?,
        })
    }

    /// Uploads a layer's weights for several residual streams.
    pub(super) fn layer_streams_of(&mut self, w: &LayerStreamsWeights) -> Result<CudaLayerStreams, CudaError> {
        Ok(CudaLayerStreams {
            spec: w.spec,
            router_norm: self.norm(&w.router_norm)?,
            router: self.linear(&w.router)?,
            predict: self.vector(&w.predict.weight.to_f32())?,
            correct: self.vector(&w.correct.weight.to_f32())?,
            correct_scale: self.vector(&w.correct_scale)?,
            laurel_l: self.linear(&w.laurel_l)?,
            laurel_r: self.linear(&w.laurel_r)?,
            laurel_norm: self.norm(&w.laurel_norm)?,
        })
    }
}
