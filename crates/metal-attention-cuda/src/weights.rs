//! The weights of a model in the device's memory.

use std::sync::Arc;

use metal_attention_model::{
    AttentionSpec, DenseWeights, FeedForward, FeedForwardWeights, LayerSpec, LayerWeights, Linear, Mixer, MixerWeights,
    ModelSpec, NormWeights, Residual, Rope, Weights,
};

use crate::CudaError;
use crate::args::HeadArgs;
use crate::device::{CudaBuffer, CudaDevice, Kernels};
use crate::matrix::CudaMatrix;
use crate::options::distinct_ropes;
use crate::parts::{activation_code, head_codes, mask_code};

/// All of them.
#[derive(Debug)]
pub(crate) struct CudaWeights {
    /// `[n_vocab, n_embd]`.
    pub(crate) token_embd: Arc<CudaMatrix>,
    pub(crate) layers: Vec<CudaLayer>,
    pub(crate) output_norm: Vector,
    pub(crate) output_eps: f32,
    /// `[n_vocab, n_embd]`, and what is added.
    pub(crate) output: Option<(Arc<CudaMatrix>, Option<Vector>)>,
    /// Keeps the tables of rotations.
    _rope: Vec<CudaBuffer>,
}

/// F32 elements that kernels read.
pub(crate) type Vector = CudaBuffer;

/// A layer: attention and a gated feed-forward, each behind an RMSNorm.
#[derive(Debug)]
pub(crate) struct CudaLayer {
    pub(crate) mixer_norm: Vector,
    pub(crate) mixer_eps: f32,
    /// Of queries, keys and values.
    pub(crate) qkv: [CudaMatrix; 3],
    /// Of all three one after the other.
    pub(crate) qkv_bias: Option<Vector>,
    pub(crate) out: CudaMatrix,
    pub(crate) out_bias: Option<Vector>,
    pub(crate) attention: Attention,
    pub(crate) ff_norm: Vector,
    pub(crate) ff_eps: f32,
    pub(crate) gate: CudaMatrix,
    pub(crate) up: CudaMatrix,
    pub(crate) down: CudaMatrix,
    pub(crate) down_bias: Option<Vector>,
    pub(crate) activation: u32,
    /// Factor on what is added to the residual stream.
    pub(crate) scale: f32,
}

/// What attention is in a layer.
#[derive(Debug)]
pub(crate) struct Attention {
    pub(crate) n_head: usize,
    pub(crate) n_kv_head: usize,
    pub(crate) head_dim: usize,
    pub(crate) inputs: HeadArgs,
    pub(crate) mask: u32,
    pub(crate) reach: u32,
    pub(crate) soft_cap: f32,
    pub(crate) sinks: Option<Vector>,
    _norms: [Option<Vector>; 2],
}

impl Attention {
    /// Elements of a row of queries, keys and values.
    pub(crate) fn stride(&self) -> usize {
        (self.n_head + 2 * self.n_kv_head) * self.head_dim
    }
}

struct Loader<'a> {
    gpu: &'a Arc<CudaDevice>,
    kernels: Kernels,
    ropes: Vec<(Rope, CudaBuffer)>,
}

impl CudaWeights {
    /// Uploads those of `spec`, which [`supports`](crate::parts::supports) let through, for contexts of `n_ctx` positions, of
    /// which `n_positions` can be reached.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        spec: &ModelSpec,
        weights: &Weights,
        (n_ctx, n_positions): (usize, usize),
    ) -> Result<Self, CudaError> {
        let ropes = distinct_ropes(spec).into_iter().map(|rope| {
            let table = rope_table(&rope, weights.rope_factors(&rope, n_ctx), n_positions);
            Ok((rope, gpu.upload("the RoPE table", &table)?))
        });
        let ropes = ropes.collect::<Result<_, CudaError>>()?;
        let mut loader = Loader { gpu, kernels: Kernels::default(), ropes };
        let token_embd = Arc::new(loader.matrix(&weights.token_embd)?);
        let output = match &weights.output {
            None => None,
            Some(head) => {
                let matrix = match weights.own_head() {
                    Some(head) => Arc::new(loader.matrix(head)?),
                    None => Arc::clone(&token_embd),
                };
                Some((matrix, loader.optional(head.bias.as_deref())?))
            }
        };
        let layers = spec.layers.iter().zip(&weights.layers);
        let layers = layers.map(|(spec, weights)| loader.layer(spec, weights)).collect::<Result<_, _>>()?;
        let norm = spec.output.norm.as_ref().zip(weights.output_norm.as_ref());
        let (norm, output_norm) = norm.ok_or(CudaError::UnsupportedPart { part: "models without a last norm" })?;
        let output_norm = loader.vector(&output_norm.weight)?;
        let rope = loader.ropes.into_iter().map(|(_, table)| table).collect();
        gpu.wait()?;
        Ok(Self { token_embd, layers, output_norm, output_eps: norm.eps, output, _rope: rope })
    }
}

/// Cosine and sine of every pair at every position, `[n_positions, n_rot / 2, 2]`.
fn rope_table(rope: &Rope, factors: Option<&[f32]>, n_positions: usize) -> Vec<f32> {
    let (frequencies, length) = rope.frequencies(factors);
    (0..n_positions)
        .flat_map(|pos| frequencies.iter().map(move |f| (pos as f64 * f).sin_cos()))
        .flat_map(|(sin, cos)| [(cos * length) as f32, (sin * length) as f32])
        .collect()
}

impl Loader<'_> {
    fn matrix(&mut self, linear: &Linear) -> Result<CudaMatrix, CudaError> {
        CudaMatrix::new(self.gpu, &mut self.kernels, &linear.weight)
    }

    /// A matrix whose product goes through a gate, where nothing is added.
    fn gate(&mut self, linear: &Linear) -> Result<CudaMatrix, CudaError> {
        if linear.bias.is_some() {
            return Err(CudaError::UnsupportedPart { part: "biases of gates" });
        }
        self.matrix(linear)
    }

    fn vector(&self, values: &[f32]) -> Result<Vector, CudaError> {
        self.gpu.upload("norms", values)
    }

    fn optional(&self, values: Option<&[f32]>) -> Result<Option<Vector>, CudaError> {
        values.map(|values| self.vector(values)).transpose()
    }

    fn layer(&mut self, spec: &LayerSpec, weights: &LayerWeights) -> Result<CudaLayer, CudaError> {
        let unsupported = |part| CudaError::UnsupportedPart { part };
        let (Mixer::Attention(of), MixerWeights::Attention(a)) = (&spec.mixer, &weights.mixer) else {
            return Err(unsupported("mixers but for attention"));
        };
        let (FeedForward::Dense(dense), FeedForwardWeights::Dense(ff)) = (&spec.feed_forward, &weights.feed_forward)
        else {
            return Err(unsupported("feed-forwards but for dense ones"));
        };
        let (Some(k), Some(v)) = (&a.k, &a.v) else { return Err(unsupported("keys and values of other layers")) };
        let DenseWeights { gate: Some(gate), up, down } = ff else {
            return Err(unsupported("feed-forwards without a gate"));
        };
        if gate.weight.ty() != up.weight.ty() {
            return Err(unsupported("gate and up of unlike types"));
        }
        let Residual::Sequential { scale } = spec.residual else {
            return Err(unsupported("residual streams but for sequential ones"));
        };
        let norm = |norm: &Option<NormWeights>| match norm {
            Some(norm) => self.vector(&norm.weight),
            None => Err(unsupported("layers without norms of their inputs")),
        };
        let (mixer_norm, ff_norm) = (norm(&weights.mixer_norm)?, norm(&weights.feed_forward_norm)?);
        let eps = |norm: &Option<metal_attention_model::Norm>| norm.map_or(0.0, |norm| norm.eps);
        let linears = [&a.q, k, v];
        let qkv_bias = if linears.iter().any(|linear| linear.bias.is_some()) {
            let of = |linear: &&Linear| linear.bias.clone().unwrap_or_else(|| vec![0.0; linear.weight.n_rows()]);
            Some(self.vector(&linears.iter().flat_map(of).collect::<Vec<_>>())?)
        } else {
            None
        };
        let norms = [self.optional(weight(a.q_norm.as_ref()))?, self.optional(weight(a.k_norm.as_ref()))?];
        let attention = self.attention(of, norms, a.sinks.as_deref())?;
        Ok(CudaLayer {
            mixer_norm,
            mixer_eps: eps(&spec.mixer_norm),
            qkv: [self.matrix(&a.q)?, self.matrix(k)?, self.matrix(v)?],
            qkv_bias,
            out: self.matrix(&a.out)?,
            out_bias: self.optional(a.out.bias.as_deref())?,
            attention,
            ff_norm,
            ff_eps: eps(&spec.feed_forward_norm),
            gate: self.gate(gate)?,
            up: self.gate(up)?,
            down: self.matrix(down)?,
            down_bias: self.optional(down.bias.as_deref())?,
            activation: activation_code(dense.activation).map_err(unsupported)?,
            scale,
        })
    }

    fn attention(
        &self,
        of: &AttentionSpec,
        norms: [Option<Vector>; 2],
        sinks: Option<&[f32]>,
    ) -> Result<Attention, CudaError> {
        let unsupported = |part| CudaError::UnsupportedPart { part };
        let (mask, reach) = mask_code(of.mask).map_err(unsupported)?;
        let table = of.rope().and_then(|rope| self.ropes.iter().find(|(known, _)| known == rope));
        let ptr = |vector: &Option<Vector>| vector.as_ref().map_or(0, CudaBuffer::ptr);
        let inputs = HeadArgs {
            q_norm: ptr(&norms[0]),
            k_norm: ptr(&norms[1]),
            rope: table.map_or(0, |(_, table)| table.ptr()),
            ..head_codes(of).map_err(unsupported)?
        };
        Ok(Attention {
            n_head: of.n_head,
            n_kv_head: of.n_head_kv,
            head_dim: of.head_dim,
            inputs,
            mask,
            reach,
            soft_cap: of.soft_cap.unwrap_or(0.0),
            sinks: self.optional(sinks)?,
            _norms: norms,
        })
    }
}

fn weight(norm: Option<&NormWeights>) -> Option<&[f32]> {
    norm.map(|norm| &norm.weight[..])
}
