//! A model's weights in the form that the kernels take.

use std::cell::RefCell;

use metal_attention_gguf::Tensor;
use metal_attention_model::{LayerWeights, Linear, ModelSpec, NormWeights, Rope, StreamsWeights, Weights};

use crate::error::CpuError;
use crate::kernels::matmul::WeightMatrix;
use crate::memory::PackedMemory;
use crate::pool::ThreadPool;

/// `y = W x + b`.
pub(crate) struct PreparedLinear {
    /// The matrix's name in the file.
    pub(crate) name: String,
    pub(crate) weight: WeightMatrix,
    pub(crate) bias: Option<Vec<f32>>,
}

/// The whole model's weights, as [`Weights`] with prepared matrices; tables are read row by row from the file.
pub(crate) struct PreparedWeights {
    pub(crate) token_embd: Tensor,
    pub(crate) token_type: Option<Vec<f32>>,
    pub(crate) positions: Option<Tensor>,
    pub(crate) embedding_norm: Option<NormWeights>,
    pub(crate) per_layer: Option<PreparedPerLayer>,
    pub(crate) streams: Option<StreamsWeights<PreparedLinear>>,
    pub(crate) layers: Vec<LayerWeights<PreparedLinear>>,
    pub(crate) output_norm: Option<NormWeights>,
    pub(crate) output: Option<PreparedLinear>,
    /// The different rotations.
    pub(crate) rotations: Vec<Rotation>,
    /// Which of these each layer has.
    pub(crate) rotation_of: Vec<Option<usize>>,
}

/// Tables of the embeddings for each layer.
pub(crate) struct PreparedPerLayer {
    pub(crate) token_embd: Tensor,
    pub(crate) model_proj: PreparedLinear,
    pub(crate) proj_norm: NormWeights,
}

/// How queries and keys turn.
pub(crate) struct Rotation {
    /// Radians per position of each pair, `[n_rot / 2]`.
    pub(crate) frequencies: Vec<f64>,
    /// Factor on the rotated vectors' length.
    pub(crate) length: f64,
}

impl PreparedWeights {
    /// Repacks what is to be repacked; sequences have room for `n_ctx` positions.
    pub(crate) fn new(
        pool: &ThreadPool,
        spec: &ModelSpec,
        weights: &Weights,
        n_ctx: usize,
        exact: bool,
    ) -> Result<Self, CpuError> {
        let memory = RefCell::new(PackedMemory::default());
        let matrix = |tensor: &Tensor| {
            let bytes = tensor.bytes().len() as u64;
            let matrix = WeightMatrix::new(pool, &mut memory.borrow_mut(), tensor, exact)
                .ok_or(CpuError::OutOfMemory { what: "a repacked weight matrix", bytes })?;
            if pool.is_cancelled() { Err(CpuError::Cancelled) } else { Ok(matrix) }
        };
        let linear = |linear: &Linear| -> Result<_, CpuError> {
            let name = linear.weight.name().to_owned();
            Ok(PreparedLinear { name, weight: matrix(&linear.weight)?, bias: linear.bias.clone() })
        };
        // The largest matrix first: while it is repacked, both copies of it are in memory.
        let output = weights.output.as_ref().map(linear).transpose()?;
        let per_layer = match &weights.per_layer {
            Some(p) => Some(PreparedPerLayer {
                token_embd: p.token_embd.weight.clone(),
                model_proj: linear(&p.model_proj)?,
                proj_norm: p.proj_norm.clone(),
            }),
            None => None,
        };
        let all = |linears: &[Linear]| linears.iter().map(linear).collect::<Result<Vec<_>, _>>();
        let streams = match &weights.streams {
            Some(s) => Some(StreamsWeights { proj: all(&s.proj)?, unembd_proj: all(&s.unembd_proj)? }),
            None => None,
        };
        let (rotations, rotation_of) = rotations(spec, weights, n_ctx);
        Ok(Self {
            token_embd: weights.token_embd.weight.clone(),
            token_type: weights.token_type.clone(),
            positions: weights.positions.as_ref().map(|table| table.weight.clone()),
            embedding_norm: weights.embedding_norm.clone(),
            per_layer,
            streams,
            layers: weights.layers.iter().map(|layer| layer.map(&mut |l| linear(l))).collect::<Result<_, _>>()?,
            output_norm: weights.output_norm.clone(),
            output,
            rotations,
            rotation_of,
        })
    }

    /// All matrices.
    fn matrices(&self) -> impl Iterator<Item = &WeightMatrix> {
        let linears = self.layers.iter().flat_map(LayerWeights::linears).chain(&self.output);
        let per_layer = self.per_layer.iter().map(|p| &p.model_proj);
        let streams = self.streams.iter().flat_map(|s| s.proj.iter().chain(&s.unembd_proj));
        linears.chain(per_layer).chain(streams).map(|linear| &linear.weight)
    }

    /// Bytes of all matrices; a token goes through all of them, but for experts that it does not go to.
    pub(crate) fn bytes(&self) -> usize {
        self.matrices().map(WeightMatrix::bytes).sum()
    }

    /// Bytes of repacked matrices.
    pub(crate) fn packed_bytes(&self) -> usize {
        self.matrices().map(WeightMatrix::packed_bytes).sum()
    }
}

/// The different rotations of a model, and which of them each layer has.
fn rotations(spec: &ModelSpec, weights: &Weights, n_ctx: usize) -> (Vec<Rotation>, Vec<Option<usize>>) {
    let mut ropes: Vec<Rope> = Vec::new();
    let mut rotation_of = Vec::with_capacity(spec.n_layer());
    for layer in &spec.layers {
        rotation_of.push(layer.mixer.rope().map(|rope| {
            ropes.iter().position(|r| r == rope).unwrap_or_else(|| {
                ropes.push(*rope);
                ropes.len() - 1
            })
        }));
    }
    let rotation = |rope: &Rope| {
        let (frequencies, length) = rope.frequencies(weights.rope_factors(rope, n_ctx));
        Rotation { frequencies, length }
    };
    (ropes.iter().map(rotation).collect(), rotation_of)
}
