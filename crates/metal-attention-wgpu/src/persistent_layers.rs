//! The persistent kernel: all layers of one token in one dispatch, whose workgroups stay resident and wait for each
//! other's results. It only works where the GPU runs all workgroups at the same time, which no API reports: the kernel
//! is tried when a model is loaded, and it times out instead of hanging.
//!
//! Weights in several buffers need one dispatch for each buffer. The kernel itself is `kernels/decode_layers.rs`.

use metal_attention_model::{BatchToken, ModelSpec};
use wgpu::{Buffer, ComputePassDescriptor};

use crate::kernels::{self, DecodeLayersBuffers, DecodeLayersShape, LayerMatrices};
use crate::parts::{PlainLayer, PlainWeights};
use crate::weights::{WgpuLayer, WgpuWeights, layer_params};
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
    /// All layers and their weights in the file, if every layer is a [`PlainLayer`]; else `None`.
    pub(super) layers: Option<Vec<(PlainLayer, PlainWeights<'a>)>>,
    /// Weights on the GPU.
    pub(super) weights: &'a WgpuWeights,
    /// Keys and values of each layer.
    pub(super) cache: &'a [(crate::Slice, crate::Slice)],
    /// The RoPE cos/sin table of each layer.
    pub(super) rope: &'a [Buffer],
    /// The residual stream, F32 `[n_embd]`.
    pub(super) x: &'a Buffer,
    /// The batch of one token.
    pub(super) batch: &'a BatchBuffer,
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
        let (plain, file_weights): (Vec<_>, Vec<_>) = layers.iter().copied().unzip();
        let alike = |i: usize| plain[i] == plain[0] && self.rope[i] == self.rope[0];
        if !(0..plain.len()).all(alike) {
            return Ok(Err("layers differ in more than the types of their matrices"));
        }
        let PlainLayer { attention, n_ff, norm_eps } = plain[0];
        let (params, biases) = layer_params(&file_weights);
        let shape =
            |n_layer| DecodeLayersShape { attention, n_layer, n_embd: self.spec.n_embd, n_ff, norm_eps, biases };
        let matrices: Vec<LayerMatrices<'_>> = self.weights.layers.iter().filter_map(WgpuLayer::matrices).collect();
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
