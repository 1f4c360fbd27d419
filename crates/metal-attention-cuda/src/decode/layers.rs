//! Which layers `kernels/decode.cu` takes.

use metal_attention_model::Residual;

use super::args::{Kind, MATRICES};
use crate::matrix::{CudaMatrix, Format};
use crate::parts::AttentionKernels;
use crate::weights::{
    CudaAttention, CudaDense, CudaEmbedding, CudaFeedForward, CudaLayer, CudaLinear, CudaMixer, CudaNorm,
};

/// A layer that the kernel takes: attention and a gated feed-forward behind `RMSNorm`s, and nothing besides.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlainLayer<'a> {
    pub(super) mixer_norm: &'a CudaNorm,
    pub(super) attention: &'a CudaAttention,
    pub(super) qkv: [&'a CudaMatrix; 3],
    pub(super) norm: &'a CudaNorm,
    pub(super) dense: &'a CudaDense,
    pub(super) gate: &'a CudaMatrix,
    pub(super) scale: f32,
}

impl<'a> PlainLayer<'a> {
    pub(super) fn of(layer: &'a CudaLayer) -> Option<Self> {
        let CudaLayer {
            mixer_norm,
            mixer,
            mixer_post_norm,
            feed_forward_norm,
            feed_forward,
            feed_forward_post_norm,
            residual,
            sum_norms,
            own_embedding,
            streams,
            output_scale,
        } = layer;
        let CudaMixer::Attention(attention) = mixer else { return None };
        let CudaFeedForward::Dense(dense) = feed_forward else { return None };
        let scale = match *residual {
            Residual::Sequential { scale } => scale,
            Residual::Parallel | Residual::PostNorm { .. } => return None,
        };
        let results = mixer_post_norm.is_some() || feed_forward_post_norm.is_some() || sum_norms.is_some();
        let more = own_embedding.is_some() || streams.is_some() || *output_scale != 1.0;
        let paged = attention.kernels == AttentionKernels::Paged && attention.inputs_apart.is_none();
        let [q, k, v] = &attention.qkv[..] else { return None };
        let on_the_way = |norm: &'a Option<CudaNorm>| norm.as_ref().filter(|norm| norm.is_on_the_way());
        let layer = Self {
            mixer_norm: on_the_way(mixer_norm)?,
            attention,
            qkv: [q, k, v],
            norm: on_the_way(feed_forward_norm)?,
            dense,
            gate: dense.gate.as_ref()?,
            scale,
        };
        // Inputs of products that go together are made for one kind of codes.
        let alike = |of: &[&CudaMatrix]| of.iter().all(|m| m.format.has_codes() == of[0].format.has_codes());
        let matrices = layer.matrices();
        let fits = alike(&matrices[..3]) && alike(&matrices[4..6]) && matrices.iter().all(|m| known(m));
        (!results && !more && paged && dense.on_the_way && fits).then_some(layer)
    }

    pub(super) fn out(&self) -> &'a CudaLinear {
        &self.attention.out
    }

    pub(super) fn up(&self) -> &'a CudaMatrix {
        &self.dense.up
    }

    pub(super) fn down(&self) -> &'a CudaLinear {
        &self.dense.down
    }

    /// Its matrices, in the kernel's order.
    pub(super) fn matrices(&self) -> [&'a CudaMatrix; MATRICES] {
        let [q, k, v] = self.qkv;
        [q, k, v, &self.out().weight, self.gate, self.up(), &self.down().weight]
    }

    /// The matrices of its steps.
    pub(super) fn steps(&self) -> Vec<(Kind, Vec<&'a CudaMatrix>)> {
        let m = self.matrices();
        let of = |kind, matrices: &[&'a CudaMatrix]| (kind, matrices.to_vec());
        vec![
            of(Kind::Qkv, &m[..3]),
            of(Kind::AttentionOutput, &m[3..4]),
            of(Kind::GateAndUp, &m[4..6]),
            of(Kind::Down, &m[6..]),
        ]
    }
}

/// Whether tokens become rows of a table and nothing besides.
pub(super) fn is_plain(embedding: &CudaEmbedding) -> bool {
    let CudaEmbedding { table: _, token_type, positions, norm, per_layer, streams } = embedding;
    let nothing = token_type.is_none() && positions.is_none() && norm.is_none();
    nothing && per_layer.is_none() && streams.is_none()
}

/// Whether the kernel knows a matrix's format and its rows.
pub(super) fn known(matrix: &CudaMatrix) -> bool {
    let format = match matrix.format {
        Format::Q4_0 | Format::Q4K | Format::Q5K | Format::Q6K | Format::F16 | Format::F32 | Format::Q8_0 => true,
        Format::Codes | Format::CodesAndMins => false,
    };
    format && matrix.n_in.is_multiple_of(4)
}
