//! The persistent kernel: all layers of one token in one dispatch, whose workgroups stay resident and wait for each
//! other's results. It only works where the GPU runs all workgroups at the same time, which no API reports: the kernel
//! is tried when a model is loaded, and it times out instead of hanging.
//!
//! Weights in several buffers need one dispatch for each buffer. The kernel itself is `kernels/decode_layers.rs`.

use metal_attention_model::{
    Activation, AttentionWeights, BatchToken, Dense, DenseWeights, FeedForward, Layer, Linear, Loaded, Mixer,
    ModelSpec, NormKind, NormWeights, Residual, Weights,
};
use wgpu::{Buffer, ComputePassDescriptor};

use crate::kernels::{self, AttentionShape, DecodeLayersBuffers, DecodeLayersShape, LayerMatrices};
use crate::parts::{AttentionKernels, WgpuParts};
use crate::weights::{WgpuWeights, bias};
use crate::{BatchBuffer, BatchDims, Dispatch, WgpuDevice, WgpuError};

/// The dispatches of the persistent kernel, in order.
#[derive(Debug)]
pub(super) struct PersistentLayers {
    /// One dispatch for each buffer of weights.
    pub(super) dispatches: Vec<Dispatch>,
    /// One word, not 0 after a workgroup timed out waiting for another.
    pub(super) timed_out: Buffer,
}

/// Everything that the persistent kernel is bound to.
pub(super) struct PersistentLayersBuilder<'a> {
    /// The GPU.
    pub(super) gpu: &'a WgpuDevice,
    /// The model's description.
    pub(super) spec: &'a ModelSpec,
    /// All layers, if every one is a [`PlainLayer`]; else `None`.
    pub(super) layers: Option<Vec<PlainLayer<'a>>>,
    /// Keys and values of each layer.
    pub(super) cache: &'a [(crate::Slice, crate::Slice)],
    /// The RoPE cos/sin table of each layer.
    pub(super) rope: &'a [Buffer],
    /// The residual stream, F32 `[n_embd]`.
    pub(super) x: &'a Buffer,
    /// The batch of one token.
    pub(super) batch: &'a BatchBuffer,
}

/// A layer that the persistent kernel supports: fast attention, then a dense feed-forward gated by `SiLU`, each with an
/// RMSNorm before it and a plain residual join.
#[derive(Debug)]
pub(super) struct PlainLayer<'a> {
    /// Its sizes.
    sizes: PlainSizes,
    /// Its matrices on the GPU.
    matrices: LayerMatrices<'a>,
    /// Weight of the norm before attention, `[n_embd]`.
    mixer_norm: &'a [f32],
    /// Weights of the attention in the file.
    attention: &'a AttentionWeights,
    /// The key projection in the file.
    k: &'a Linear,
    /// The value projection in the file.
    v: &'a Linear,
    /// Weight of the norm before the feed-forward, `[n_embd]`.
    feed_forward_norm: &'a [f32],
    /// The gate projection in the file.
    gate: &'a Linear,
    /// The up projection in the file.
    up: &'a Linear,
    /// The down projection in the file.
    down: &'a Linear,
}

/// The sizes of a [`PlainLayer`], which are the same for all layers that the kernel runs.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PlainSizes {
    /// Sizes of the attention.
    attention: AttentionShape,
    /// Width of the feed-forward.
    n_ff: usize,
    /// Epsilon of both norms.
    norm_eps: f32,
}

impl<'a> PlainLayer<'a> {
    /// All layers of a model, if it has some and every one is plain; else `None`.
    pub(super) fn of_model(gpu: &'a WgpuWeights, file: &'a Weights) -> Option<Vec<Self>> {
        let layers = gpu.layers.iter().zip(&file.layers).map(|(gpu, file)| Self::new(gpu, file));
        layers.collect::<Option<Vec<_>>>().filter(|layers| !layers.is_empty())
    }

    /// A layer with its matrices on the GPU and its weights in the file; `None` if it is not plain.
    fn new(gpu: &'a Layer<WgpuParts>, file: &'a Layer<Loaded>) -> Option<Self> {
        let Layer {
            mixer_norm: Some(mixer_norm),
            mixer_conv: None,
            mixer: Mixer::Attention(attention),
            mixer_post_norm: None,
            feed_forward_norm: Some(feed_forward_norm),
            feed_forward_conv: None,
            feed_forward: FeedForward::Dense(dense),
            feed_forward_post_norm: None,
            residual: Residual::Sequential { scale: 1.0 },
            embedding: None,
            streams: None,
            output_scale: 1.0,
        } = file
        else {
            return None;
        };
        let (Mixer::Attention(gpu_attention), FeedForward::Dense(gpu_dense)) = (&gpu.mixer, &gpu.feed_forward) else {
            return None;
        };
        let rms = |norm: &NormWeights| norm.kind == NormKind::Rms && norm.bias.is_none();
        if !rms(mixer_norm) || !rms(feed_forward_norm) || mixer_norm.eps != feed_forward_norm.eps {
            return None;
        }
        let shape = match &gpu_attention.kernels {
            AttentionKernels::Fast(shape)
                if shape.soft_cap.is_none() && !shape.sinks && !shape.gated && shape.n_trailing == 0 =>
            {
                *shape
            }
            AttentionKernels::Fast(_) | AttentionKernels::General(..) => return None,
        };
        let DenseWeights { spec: Dense { n_ff, gated: true, activation: Activation::Silu, fused: _ }, gate, up, down } =
            dense
        else {
            return None;
        };
        Some(Self {
            sizes: PlainSizes { attention: shape, n_ff: *n_ff, norm_eps: mixer_norm.eps },
            matrices: LayerMatrices {
                qkv: &gpu_attention.qkv.weight,
                out: &gpu_attention.out.weight,
                gate_up: &gpu_dense.gate_up.weight,
                down: &gpu_dense.down.weight,
            },
            mixer_norm: &mixer_norm.weight,
            attention,
            k: attention.k.as_ref()?,
            v: attention.v.as_ref()?,
            feed_forward_norm: &feed_forward_norm.weight,
            gate: gate.as_ref()?,
            up,
            down,
        })
    }
}

/// Norms and biases of all layers, one layer after the other, as `decode_layers` reads them; and which matrices have a
/// bias in any layer: Q, K and V; attention's output; gate and up; down.
fn layer_params(layers: &[PlainLayer<'_>]) -> (Vec<f32>, [bool; 4]) {
    let mut biases = [false; 4];
    for w in layers {
        let a = w.attention;
        let groups: [&[&Linear]; 4] = [&[&a.q, w.k, w.v], &[&a.out], &[w.gate, w.up], &[w.down]];
        for (has, group) in biases.iter_mut().zip(groups) {
            *has |= group.iter().any(|l| l.bias.is_some());
        }
    }
    let mut params = Vec::new();
    for w in layers {
        let a = w.attention;
        params.extend([w.mixer_norm, w.feed_forward_norm].concat());
        if biases[0] {
            params.extend([&a.q, w.k, w.v].into_iter().flat_map(bias));
        }
        if biases[1] {
            params.extend(bias(&a.out));
        }
        if biases[2] {
            params.extend(bias(w.gate).into_iter().zip(bias(w.up)).flat_map(|(gate, up)| [gate, up]));
        }
        if biases[3] {
            params.extend(bias(w.down));
        }
        params.extend([&a.q_norm, &a.k_norm].into_iter().flatten().flat_map(|norm| &norm.weight));
    }
    (params, biases)
}

/// NVIDIA's PCI vendor id.
const NVIDIA: u32 = 0x10de;

/// The numbers of workgroups to try on `gpu`, largest first; none for vendors whose GPUs are not known to run all
/// workgroups of a dispatch at the same time.
pub(super) fn workgroup_counts_to_try(gpu: &WgpuDevice) -> &'static [usize] {
    if gpu.summary().vendor() == NVIDIA { &[128, 64, 32] } else { &[] }
}

/// Persistent kernels that have not been run yet.
#[derive(Debug)]
pub(super) struct UntestedLayers {
    /// The kernels.
    pub(super) layers: PersistentLayers,
    /// A word for each dispatch: the number of workgroups that reached their end.
    pub(super) ended: Vec<Buffer>,
    /// Workgroups of each dispatch.
    pub(super) groups: usize,
}

impl UntestedLayers {
    /// Whether all pipelines are compiled, or could not be.
    pub(super) fn is_ready(&self, gpu: &WgpuDevice) -> bool {
        self.layers.dispatches.iter().all(|dispatch| dispatch.is_ready(gpu))
    }

    /// The kernels without a trial run; an error if a pipeline could not be compiled. A decode step that they time out
    /// in is evaluated again without them.
    pub(super) fn untested(self, gpu: &WgpuDevice) -> Result<PersistentLayers, WgpuError> {
        self.layers.dispatches.iter().try_for_each(|dispatch| dispatch.wait_ready(gpu))?;
        Ok(self.layers)
    }
}

impl PersistentLayersBuilder<'_> {
    /// The kernels with `groups` workgroups, to be [tried](Self::try_out). The inner error is the reason why the model
    /// or the GPU does not suit them.
    pub(super) fn build(&self, groups: usize) -> Result<Result<UntestedLayers, &'static str>, WgpuError> {
        let Some(layers) = &self.layers else {
            return Ok(Err("layers have parts that the kernel for all of them does not know"));
        };
        let alike = |i: usize| layers[i].sizes == layers[0].sizes && self.rope[i] == self.rope[0];
        if !(0..layers.len()).all(alike) {
            return Ok(Err("layers differ in more than the types of their matrices"));
        }
        let PlainSizes { attention, n_ff, norm_eps } = layers[0].sizes;
        let (params, biases) = layer_params(layers);
        let shape =
            |n_layer| DecodeLayersShape { attention, n_layer, n_embd: self.spec.n_embd, n_ff, norm_eps, biases };
        let matrices: Vec<_> = layers.iter().map(|layer| layer.matrices).collect();
        // Consecutive layers share a dispatch if their weights lie in one buffer, their keys in one, and their values
        // in one.
        let buffers = |i: usize| {
            let (keys, values) = &self.cache[i];
            (matrices[i].qkv.parts()[0].buffer.buffer(), keys.buffer(), values.buffer())
        };
        let all: Vec<_> = (0..matrices.len()).collect();
        let timed_out = self.gpu.buffer("whether a workgroup gave up", 4)?;
        let (mut dispatches, mut all_ended) = (Vec::new(), Vec::new());
        for run in all.chunk_by(|&a, &b| buffers(a) == buffers(b)) {
            let (run, shape) = (run[0]..run[0] + run.len(), shape(run.len()));
            let params = &params[run.start * shape.params()..run.end * shape.params()];
            let params = self.gpu.upload("norms and biases", params)?;
            let flow = self.gpu.buffer("what workgroups hand to each other", shape.flow_bytes(groups))?;
            let ended = self.gpu.buffer("the number of workgroups that have ended", 4)?;
            let buffers = DecodeLayersBuffers {
                params: &params,
                x: self.x,
                flow: &flow,
                ended: &ended,
                timed_out: &timed_out,
                rope: &self.rope[0],
                cache: &self.cache[run.clone()],
                batch: self.batch.buffer(),
            };
            match kernels::decode_layers(self.gpu, &shape, groups, &matrices[run], &buffers)? {
                Ok(dispatch) => dispatches.push(dispatch),
                Err(why) => return Ok(Err(why)),
            }
            all_ended.push(ended);
        }
        Ok(Ok(UntestedLayers { layers: PersistentLayers { dispatches, timed_out }, ended: all_ended, groups }))
    }

    /// Tries `first`, then kernels with the numbers of workgroups in `others`; returns the first whose workgroups all
    /// run at the same time. The inner error: none did.
    pub(super) fn try_out(
        &self,
        first: UntestedLayers,
        others: &[usize],
    ) -> Result<Result<PersistentLayers, &'static str>, WgpuError> {
        let mut untried = first;
        let mut others = others.iter();
        loop {
            if self.runs_through(&untried)? {
                return Ok(Ok(untried.layers));
            }
            let Some(&groups) = others.next() else {
                return Ok(Err("workgroups did not run side by side when that was tried"));
            };
            match self.build(groups)? {
                Ok(next) => untried = next,
                Err(why) => return Ok(Err(why)),
            }
        }
    }

    /// Runs the kernels on a token at position 0, on page 0. True if all workgroups ended and none timed out.
    fn runs_through(&self, untried: &UntestedLayers) -> Result<bool, WgpuError> {
        let UntestedLayers { layers, ended, groups } = untried;
        let token = BatchToken { id: 0, seq: 0, pos: 0, output: false };
        self.batch.write_tokens(self.gpu, &[token]);
        let mut encoder = self.gpu.encoder();
        let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
        for dispatch in &layers.dispatches {
            dispatch.record(self.gpu, &mut pass, BatchDims { n_tokens: 1, n_outputs: 0, n_runs: 1, n_splits: 1 });
        }
        drop(pass);
        self.gpu.submit(encoder);
        for ended in ended {
            if self.gpu.read::<u32>(ended, 1)? != [*groups as u32] {
                return Ok(false);
            }
        }
        Ok(self.gpu.read::<u32>(&layers.timed_out, 1)? == [0])
    }
}
