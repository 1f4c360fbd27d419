//! A model's weights in the form that the kernels read.
//!
//! [`PreparedWeights`] is built once from the tensors of a GGUF file ([`Weights`]): matrices become [`WeightMatrix`], repacked
//! or, in exact mode, left in the mapped file; embedding tables stay in the file and are read row by row; norms and biases are
//! F32 vectors. The angles of RoPE are prepared here, too.

use std::cell::RefCell;
use std::sync::Arc;

use metal_attention_gguf::Tensor;
use metal_attention_model::{
    AssistantWeights, Layer, LayerSpec, Linear, Loaded, LoadedModel, ModelSpec, NormWeights, OutputHead, Rotation,
    StateInputWeights, StreamsWeights, Weights,
};

use crate::error::CpuError;
use crate::kernels::matmul::WeightMatrix;
use crate::memory::PackedMemory;
use crate::pool::ThreadPool;

/// A linear layer, `y = W x + b`.
pub(crate) struct PreparedLinear {
    /// The matrix's name in the file.
    pub(crate) name: String,
    /// `W`, `[n_out, n_in]`.
    pub(crate) weight: WeightMatrix,
    /// `b`, `[n_out]`.
    pub(crate) bias: Option<Vec<f32>>,
}

/// The parts of layers as the CPU computes with them: those of the file, with matrices in the kernels' layouts.
pub(crate) type CpuParts = Loaded<PreparedLinear>;

/// The weights of a whole model.
pub(crate) struct PreparedWeights {
    /// The token embedding table, `[n_vocab, n_embd]`, in the file; `None` if no tokens are read. Of an assistant that of its target,
    /// `[n_vocab, target_width]`.
    pub(crate) token_embd: Option<Tensor>,
    /// The embedding that is added to every token (row 0 of BERT's token types), `[n_embd]`.
    pub(crate) token_type: Option<Vec<f32>>,
    /// The table of learned position embeddings, `[n_positions, n_embd]`, in the file.
    pub(crate) positions: Option<Tensor>,
    /// The norm of the embedding.
    pub(crate) embedding_norm: Option<NormWeights>,
    /// The weights of per-layer embeddings (Gemma 3n, Gemma 4).
    pub(crate) per_layer: Option<PreparedPerLayer>,
    /// The projections between the residual streams (Gemma 3n).
    pub(crate) streams: Option<StreamsWeights<PreparedLinear>>,
    /// What reads states (drafters).
    pub(crate) state: Option<StateInputWeights<PreparedLinear>>,
    /// What leads from the target model to an assistant and back.
    pub(crate) assistant: Option<AssistantWeights<PreparedLinear>>,
    /// The layers, first to last.
    pub(crate) layers: Vec<Layer<CpuParts>>,
    /// The output norm.
    pub(crate) output_norm: Option<NormWeights>,
    /// The output head; `None` for encoders without logits.
    pub(crate) output: Option<PreparedHead>,
    /// The different RoPE rotations of the model.
    pub(crate) rotations: Vec<Rotation>,
    /// The index in `rotations` of each layer's rotation; `None` for layers without RoPE.
    pub(crate) rotation_of: Vec<Option<usize>>,
    /// Whether quantised matrices are left in the mapped file.
    exact: bool,
}

/// The output head.
pub(crate) struct PreparedHead {
    /// The specification.
    pub(crate) spec: OutputHead,
    /// The matrix, `[n_vocab, n_embd]`, with its bias; a second model may share it.
    pub(crate) linear: Arc<PreparedLinear>,
    /// The matrix in the file.
    tensor: Tensor,
    /// Whether `linear` is another model's, which counts its memory.
    is_shared: bool,
}

/// The weights of per-layer embeddings.
pub(crate) struct PreparedPerLayer {
    /// The table, `[n_vocab, n_layer * width]`, in the file.
    pub(crate) token_embd: Tensor,
    /// The projection of the token embedding, `[n_layer * width, n_embd]`.
    pub(crate) model_proj: PreparedLinear,
    /// The norm of the projection.
    pub(crate) proj_norm: NormWeights,
}

impl PreparedWeights {
    /// Repacks the matrices of `model` on the threads of `pool`; in `exact` mode quantised ones stay in the mapped file.
    /// `n_ctx`, the maximum number of positions of a sequence, selects the RoPE factors. `first`: the weights of another model,
    /// whose output head is shared where it is the same.
    ///
    /// # Errors
    ///
    /// Too little memory, or the cancellation of the pool's work.
    pub(crate) fn new(
        pool: &ThreadPool,
        model: &LoadedModel,
        n_ctx: usize,
        exact: bool,
        first: Option<&Self>,
    ) -> Result<Self, CpuError> {
        let weights = model.weights();
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
        let output = match model.output_head() {
            Some((spec, head)) => {
                let of_first = first.and_then(|first| first.head_of(head, exact));
                let is_shared = of_first.is_some();
                let linear = of_first.map_or_else(|| linear(head).map(Arc::new), Ok)?;
                Some(PreparedHead { spec, linear, tensor: head.weight.clone(), is_shared })
            }
            None => None,
        };
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
        let state = weights.state.as_ref().map(|state| state.try_map(linear)).transpose()?;
        let assistant = match &weights.assistant {
            Some(AssistantWeights { spec, pre_projection, post_projection }) => Some(AssistantWeights {
                spec: *spec,
                pre_projection: linear(pre_projection)?,
                post_projection: linear(post_projection)?,
            }),
            None => None,
        };
        let (rotations, rotation_of) = rotations(model.spec(), weights, n_ctx);
        Ok(Self {
            token_embd: weights.token_embd.as_ref().map(|table| table.weight.clone()),
            token_type: weights.token_type.clone(),
            positions: weights.positions.as_ref().map(|table| table.weight.clone()),
            embedding_norm: weights.embedding_norm.clone(),
            per_layer,
            streams,
            state,
            assistant,
            layers: weights.layers.iter().map(|layer| layer.map(&mut |l| linear(l))).collect::<Result<_, _>>()?,
            output_norm: weights.output_norm.clone(),
            output,
            rotations,
            rotation_of,
            exact,
        })
    }

    /// The output head, if it is that of the tensor and the bias of `head`, prepared for `exact` products or not.
    fn head_of(&self, head: &Linear, exact: bool) -> Option<Arc<PreparedLinear>> {
        let own = self.output.as_ref()?;
        let same = self.exact == exact && own.tensor.is_same(&head.weight) && own.linear.bias == head.bias;
        same.then(|| Arc::clone(&own.linear))
    }

    /// All matrices.
    fn matrices(&self) -> impl Iterator<Item = &WeightMatrix> {
        let output = self.output.iter().map(|head| &*head.linear);
        let linears = self.layers.iter().flat_map(Layer::linears).chain(output);
        let per_layer = self.per_layer.iter().map(|p| &p.model_proj);
        let streams = self.streams.iter().flat_map(|s| s.proj.iter().chain(&s.unembd_proj));
        let state = self.state.iter().filter_map(StateInputWeights::linear);
        let assistant = self.assistant.iter().flat_map(|w| [&w.pre_projection, &w.post_projection]);
        linears.chain(per_layer).chain(streams).chain(state).chain(assistant).map(|linear| &linear.weight)
    }

    /// Bytes of all matrices, which is what a token reads, except for experts that are not chosen.
    pub(crate) fn bytes(&self) -> usize {
        self.matrices().map(WeightMatrix::bytes).sum()
    }

    /// Bytes of the repacked matrices, without a shared output head.
    pub(crate) fn packed_bytes(&self) -> usize {
        let shared = self.output.iter().filter(|head| head.is_shared);
        let shared: usize = shared.map(|head| head.linear.weight.packed_bytes()).sum();
        self.matrices().map(WeightMatrix::packed_bytes).sum::<usize>() - shared
    }
}

/// The different rotations of a model, and for each layer the index of its rotation.
fn rotations(spec: &ModelSpec, weights: &Weights, n_ctx: usize) -> (Vec<Rotation>, Vec<Option<usize>>) {
    let ropes = spec.ropes();
    let index = |layer: &LayerSpec| ropes.iter().position(|rope| Some(rope) == layer.mixer.rope());
    let rotations = ropes.iter().map(|rope| rope.rotation(weights.rope_factors(rope, n_ctx)));
    (rotations.collect(), spec.layers.iter().map(index).collect())
}
