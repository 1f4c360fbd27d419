//! The weights of a model in device memory, and what its parts (`parts.rs`) upload theirs with: matrices, vectors and norms.

use std::sync::Arc;

use metal_attention_gguf::Tensor;
use metal_attention_model::{Linear, ModelSpec, NormKind, NormWeights, Rope, Weights};

use crate::CudaError;
use crate::device::{CudaBuffer, CudaDevice};
use crate::kernels::Kernels;
use crate::matrix::{CudaMatrix, TILE};
use crate::parts::{CudaEmbedding, CudaLayer};
use crate::rope::RopeTables;
use crate::sharding::Shard;
use crate::slice::DevicePtr;
use crate::stack::CudaStack;

/// The weights of a model, or of a rank's shard of it.
#[derive(Debug)]
pub(crate) struct CudaWeights {
    /// The embedding.
    pub(crate) embedding: Arc<CudaEmbedding>,
    /// The layers.
    pub(crate) layers: Vec<CudaLayer>,
    /// The norm before the output head.
    pub(crate) output_norm: Option<Arc<CudaNorm>>,
    /// The output head, `[n_vocab, n_embd]`, which may be the embedding table, and its bias.
    pub(crate) output: Option<(Arc<CudaMatrix>, Option<CudaVector>)>,
    /// The RoPE cos/sin tables, whose addresses the layers have.
    pub(crate) ropes: RopeTables,
    /// The embedding table and an output head of its own, each whole, with its tensor: a second model may share them.
    pub(crate) ends: Vec<(Tensor, Arc<CudaMatrix>)>,
}

/// F32 numbers in device memory.
pub(crate) type CudaVector = CudaBuffer;

/// The weights of `y = W x + b`.
#[derive(Debug)]
pub(crate) struct CudaLinear {
    /// `W`, `[n_out, n_in]`.
    pub(crate) weight: CudaMatrix,
    /// `b`, `[n_out]`.
    pub(crate) bias: Option<CudaVector>,
}

/// The weights of several `y = W x + b` with the same input, whose rows follow each other in `y`. Neighbouring matrices are
/// joined to one where their types allow.
#[derive(Debug)]
pub(crate) struct CudaJoined {
    /// The matrices, as joined.
    pub(crate) parts: Vec<CudaMatrix>,
    /// The bias of all rows.
    pub(crate) bias: Option<CudaVector>,
}

impl CudaJoined {
    /// Elements of `y`.
    pub(crate) fn n_rows(&self) -> usize {
        self.parts.iter().map(|part| part.n_rows).sum()
    }
}

impl CudaLinear {
    /// The bias, or null.
    pub(crate) fn bias(&self) -> DevicePtr<f32> {
        ptr_or_null(self.bias.as_ref())
    }
}

/// A norm of rows.
#[derive(Debug)]
pub(crate) struct CudaNorm {
    /// `RMSNorm` or `LayerNorm`.
    pub(crate) kind: NormKind,
    /// Weights, `[n]`.
    pub(crate) weight: CudaVector,
    /// Bias, `[n]`.
    pub(crate) bias: Option<CudaVector>,
    /// Epsilon.
    pub(crate) eps: f32,
    /// Elements of a row.
    pub(crate) n: usize,
}

impl CudaNorm {
    /// Uploads the weights.
    pub(crate) fn new(loader: &Loader<'_>, w: &NormWeights) -> Result<Self, CudaError> {
        Ok(Self {
            kind: w.kind,
            weight: loader.vector(&w.weight)?,
            bias: loader.optional(w.bias.as_deref())?,
            eps: w.eps,
            n: w.weight.len(),
        })
    }

    /// Whether the GEMV kernels can apply the norm to their input: an RMSNorm without bias, of rows that can be read as
    /// vectors.
    pub(crate) fn fuses_with_product(&self) -> bool {
        match self.kind {
            NormKind::Rms => self.bias.is_none() && self.n.is_multiple_of(4),
            NormKind::Layer => false,
        }
    }
}

/// The norm's number in the kernels: `NormKind` of `norm.cu`.
pub(crate) fn norm_kind(kind: NormKind) -> u32 {
    match kind {
        NormKind::Rms => 1,
        NormKind::Layer => 2,
    }
}

/// The address of a vector, or null.
pub(crate) fn ptr_or_null(vector: Option<&CudaVector>) -> DevicePtr<f32> {
    vector.map_or(DevicePtr::NULL, CudaVector::ptr)
}

/// Uploads weights, and keeps what several layers share.
pub(crate) struct Loader<'a> {
    /// The device.
    gpu: &'a Arc<CudaDevice>,
    /// The repacking kernels.
    kernels: Kernels,
    /// The RoPE cos/sin tables.
    ropes: &'a RopeTables,
    /// Elements of the recurrent state of the current layer's mixer, behind which that of its feed-forward begins.
    pub(crate) mixer_state: usize,
}

impl CudaWeights {
    /// Uploads the weights of `spec`, which [`supports`](crate::support::supports) has accepted, and the RoPE tables. `rope_sizes`:
    /// as of [`RopeTables::new`]. `shard`: under tensor parallelism, this rank's shard; `spec` is that of the shard, `weights` are
    /// the whole model's. `first`: the [`ends`](Self::ends) of another model on `gpu`, which are shared where they are the same.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        spec: &ModelSpec,
        weights: &Weights,
        shard: Option<&Shard>,
        rope_sizes: [usize; 3],
        first: &[(Tensor, Arc<CudaMatrix>)],
    ) -> Result<Self, CudaError> {
        let ropes = RopeTables::new(gpu, spec, weights, rope_sizes)?;
        let mut loader = Loader { gpu, kernels: Kernels::default(), ropes: &ropes, mixer_state: 0 };
        let of_first = |linear: &Linear| {
            first.iter().find(|(tensor, _)| tensor.is_same(&linear.weight)).map(|(_, matrix)| Arc::clone(matrix))
        };
        let mut ends = Vec::new();
        let table = match &weights.token_embd {
            Some(table) => {
                let matrix = of_first(table).map_or_else(|| loader.matrix(table).map(Arc::new), Ok)?;
                ends.push((table.weight.clone(), Arc::clone(&matrix)));
                Some(matrix)
            }
            None => None,
        };
        let embedding = Arc::new(CudaEmbedding::new(&mut loader, weights, table)?);
        let output = match &weights.output {
            None => None,
            Some(head) => {
                let part = shard.filter(|shard| shard.plan.head).map(|shard| shard.head(head));
                let matrix = match (part, weights.own_head(), &embedding.table) {
                    (Some(rows), _, _) => Arc::new(CudaMatrix::new(gpu, &mut loader.kernels, &rows)?),
                    (None, None, Some(table)) => Arc::clone(table),
                    // It is not the table, or there is none.
                    (None, own, _) => {
                        let head = own.unwrap_or(head);
                        let matrix = of_first(head).map_or_else(|| loader.matrix(head).map(Arc::new), Ok)?;
                        ends.push((head.weight.clone(), Arc::clone(&matrix)));
                        matrix
                    }
                };
                Some((matrix, loader.optional(head.bias.as_deref())?))
            }
        };
        let layers = spec.layers.iter().zip(&weights.layers).enumerate().map(|(i, (spec, layer))| {
            loader.mixer_state = spec.mixer.state_elements();
            match shard {
                None => layer.prepare(&mut loader),
                Some(shard) => shard.layer(i, layer).prepare(&mut loader),
            }
        });
        let layers = layers.collect::<Result<_, _>>()?;
        let output_norm = loader.optional_norm(weights.output_norm.as_ref())?.map(Arc::new);
        gpu.wait()?;
        Ok(Self { embedding, layers, output_norm, output, ropes, ends })
    }
}

impl Loader<'_> {
    /// Uploads a matrix, without its bias.
    pub(crate) fn matrix(&mut self, linear: &Linear) -> Result<CudaMatrix, CudaError> {
        CudaMatrix::new(self.gpu, &mut self.kernels, &linear.weight)
    }

    /// Uploads a matrix and its bias.
    pub(crate) fn linear(&mut self, linear: &Linear) -> Result<CudaLinear, CudaError> {
        Ok(CudaLinear { weight: self.matrix(linear)?, bias: self.optional(linear.bias.as_deref())? })
    }

    /// Uploads matrices with the same input, one below the other. Neighbours of one type become one matrix where the upper one
    /// fills whole tiles.
    pub(crate) fn joined(&mut self, linears: &[&Linear]) -> Result<CudaJoined, CudaError> {
        let bias = self.biases(linears)?;
        let together = |a: &&Linear, b: &&Linear| {
            let kind = |linear: &Linear| (linear.weight.ty(), linear.weight.row_len());
            kind(a) == kind(b) && a.weight.n_rows().is_multiple_of(TILE)
        };
        let parts = linears.chunk_by(together).map(|linears| {
            let tensors: Vec<_> = linears.iter().map(|linear| &linear.weight).collect();
            CudaMatrix::joined(self.gpu, &mut self.kernels, &tensors)
        });
        Ok(CudaJoined { parts: parts.collect::<Result<_, _>>()?, bias })
    }

    /// The biases of several matrices, one after the other, with zeros for a matrix without bias; `None` if none has one.
    pub(crate) fn biases(&self, linears: &[&Linear]) -> Result<Option<CudaVector>, CudaError> {
        if linears.iter().all(|linear| linear.bias.is_none()) {
            return Ok(None);
        }
        let of = |linear: &&Linear| linear.bias.clone().unwrap_or_else(|| vec![0.0; linear.weight.n_rows()]);
        Ok(Some(self.vector(&linears.iter().flat_map(of).collect::<Vec<_>>())?))
    }

    /// Uploads F32 numbers.
    pub(crate) fn vector(&self, values: &[f32]) -> Result<CudaVector, CudaError> {
        self.gpu.upload("norms", values)
    }

    /// Uploads F32 numbers, if there are any.
    pub(crate) fn optional(&self, values: Option<&[f32]>) -> Result<Option<CudaVector>, CudaError> {
        values.map(|values| self.vector(values)).transpose()
    }

    /// The RoPE table, or null.
    pub(crate) fn rope(&self, rope: Option<&Rope>) -> DevicePtr<[f32; 2]> {
        self.ropes.ptr(rope)
    }

    /// Uploads a norm, if there is one.
    pub(crate) fn optional_norm(&mut self, norm: Option<&NormWeights>) -> Result<Option<CudaNorm>, CudaError> {
        norm.map(|norm| CudaNorm::new(self, norm)).transpose()
    }

    /// Uploads matrices of one type and shape, with their biases, for grouped products.
    pub(crate) fn stack(&mut self, linears: &[&Linear]) -> Result<CudaStack, CudaError> {
        let tensors: Vec<_> = linears.iter().map(|linear| &linear.weight).collect();
        let biases: Vec<_> = linears.iter().filter_map(|linear| linear.bias.as_deref()).flatten().copied().collect();
        CudaStack::new(self.gpu, &mut self.kernels, &tensors, Some(&biases[..]).filter(|biases| !biases.is_empty()))
    }
}
