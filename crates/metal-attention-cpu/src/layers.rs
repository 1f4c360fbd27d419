//! A model's weights in the form that the kernels take.

use metal_attention_gguf::Tensor;
use metal_attention_model::{LayerWeights, Linear, Weights};

use crate::error::CpuError;
use crate::kernels::matmul::Matrix;
use crate::pool::ThreadPool;

/// `y = W x + b`.
pub(crate) struct PreparedLinear {
    /// The matrix's name in the file.
    pub(crate) name: String,
    pub(crate) weight: Matrix,
    pub(crate) bias: Option<Vec<f32>>,
}

/// One layer's weights, as [`LayerWeights`] with prepared matrices.
pub(crate) struct PreparedLayer {
    pub(crate) mixer_norm: Vec<f32>,
    pub(crate) q: PreparedLinear,
    pub(crate) k: PreparedLinear,
    pub(crate) v: PreparedLinear,
    pub(crate) out: PreparedLinear,
    pub(crate) q_norm: Option<Vec<f32>>,
    pub(crate) k_norm: Option<Vec<f32>>,
    pub(crate) feed_forward_norm: Vec<f32>,
    pub(crate) gate: PreparedLinear,
    pub(crate) up: PreparedLinear,
    pub(crate) down: PreparedLinear,
}

/// The whole model's weights.
pub(crate) struct PreparedWeights {
    /// Embedding table, read row by row from the file.
    pub(crate) token_embd: Tensor,
    pub(crate) layers: Vec<PreparedLayer>,
    pub(crate) output_norm: Vec<f32>,
    pub(crate) output: PreparedLinear,
    pub(crate) rope_freqs: Option<Vec<f32>>,
}

impl PreparedWeights {
    /// Repacks what is to be repacked.
    pub(crate) fn new(pool: &ThreadPool, weights: &Weights, exact: bool) -> Result<Self, CpuError> {
        let matrix = |tensor: &Tensor| {
            let bytes = tensor.bytes().len() as u64;
            let matrix = Matrix::new(pool, tensor, exact)
                .ok_or(CpuError::OutOfMemory { what: "a repacked weight matrix", bytes })?;
            if pool.is_cancelled() { Err(CpuError::Cancelled) } else { Ok(matrix) }
        };
        let linear = |linear: &Linear| -> Result<_, CpuError> {
            let name = linear.weight.name().to_owned();
            Ok(PreparedLinear { name, weight: matrix(&linear.weight)?, bias: linear.bias.clone() })
        };
        let layer = |layer: &LayerWeights| -> Result<_, CpuError> {
            let (a, f) = (&layer.attention, &layer.feed_forward);
            Ok(PreparedLayer {
                mixer_norm: layer.mixer_norm.clone(),
                q: linear(&a.q)?,
                k: linear(&a.k)?,
                v: linear(&a.v)?,
                out: linear(&a.out)?,
                q_norm: a.q_norm.clone(),
                k_norm: a.k_norm.clone(),
                feed_forward_norm: layer.feed_forward_norm.clone(),
                gate: linear(&f.gate)?,
                up: linear(&f.up)?,
                down: linear(&f.down)?,
            })
        };
        // The largest matrix first: while it is repacked, both copies of it are in memory.
        let output = linear(&Linear { weight: weights.output.clone(), bias: None })?;
        Ok(Self {
            token_embd: weights.token_embd.clone(),
            layers: weights.layers.iter().map(layer).collect::<Result<_, _>>()?,
            output_norm: weights.output_norm.clone(),
            output,
            rope_freqs: weights.rope_freqs.clone(),
        })
    }

    /// All matrices.
    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let linears = self.layers.iter().flat_map(|l| [&l.q, &l.k, &l.v, &l.out, &l.gate, &l.up, &l.down]);
        linears.chain([&self.output]).map(|linear| &linear.weight)
    }

    /// Bytes of all matrices, which a token goes through.
    pub(crate) fn bytes(&self) -> usize {
        self.matrices().map(Matrix::bytes).sum()
    }

    /// Bytes of repacked matrices.
    pub(crate) fn packed_bytes(&self) -> usize {
        self.matrices().map(Matrix::packed_bytes).sum()
    }
}
