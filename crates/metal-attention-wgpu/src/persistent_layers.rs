//! All layers of one token in one dispatch, or in one for each buffer that their weights lie in, on GPUs whose workgroups run
//! side by side.

use metal_attention_model::{BatchToken, ModelSpec};
use wgpu::{Buffer, ComputePassDescriptor};

use crate::kernels::{self, DecodeLayersBuffers, DecodeLayersShape, LayerMatrices};
use crate::parts::{PlainLayer, PlainWeights};
use crate::weights::{WgpuLayer, WgpuWeights, layer_params};
use crate::{BatchBuffer, BatchDims, Dispatch, WgpuDevice, WgpuError};

/// The kernels that run all layers, one after the other.
#[derive(Debug)]
pub(super) struct PersistentLayers {
    pub(super) dispatches: Vec<Dispatch>,
    /// A word: whether a workgroup gave up waiting for another.
    pub(super) timed_out: Buffer,
}

/// What the kernel works on.
pub(super) struct PersistentLayersBuilder<'a> {
    pub(super) gpu: &'a WgpuDevice,
    pub(super) spec: &'a ModelSpec,
    /// All layers, where all are plain.
    pub(super) layers: Option<Vec<(PlainLayer, PlainWeights<'a>)>>,
    pub(super) weights: &'a WgpuWeights,
    pub(super) cache: &'a [(crate::Slice, crate::Slice)],
    pub(super) rope: &'a [Buffer],
    pub(super) x: &'a Buffer,
    pub(super) batch: &'a BatchBuffer,
}

/// NVIDIA's number among the makers of PCI devices.
const NVIDIA: u32 = 0x10de;

/// Workgroups to try on `gpu`, most first. Only makers whose workgroups are known to run side by side, without one having
/// to end before another begins, are asked.
pub(super) fn workgroup_counts_to_try(gpu: &WgpuDevice) -> &'static [usize] {
    if gpu.summary().vendor() == NVIDIA { &[128, 64, 32] } else { &[] }
}

/// Kernels that are yet to be tried.
#[derive(Debug)]
pub(super) struct UntestedLayers {
    pub(super) layers: PersistentLayers,
    /// For each dispatch a word: how many workgroups have ended.
    pub(super) ended: Vec<Buffer>,
    /// How many there are.
    pub(super) groups: usize,
}

impl UntestedLayers {
    /// Whether nothing is to be waited for before they are tried.
    pub(super) fn is_ready(&self, gpu: &WgpuDevice) -> bool {
        self.layers.dispatches.iter().all(|dispatch| dispatch.is_ready(gpu))
    }

    /// The kernels without a trial, where their pipelines could be built: a step that they do not finish is taken again.
    pub(super) fn untested(self, gpu: &WgpuDevice) -> Result<PersistentLayers, WgpuError> {
        self.layers.dispatches.iter().try_for_each(|dispatch| dispatch.ready(gpu))?;
        Ok(self.layers)
    }
}

impl PersistentLayersBuilder<'_> {
    /// The kernels with `groups` workgroups, which are yet to be [tried](Self::try_out); otherwise why the model or the GPU does
    /// not suit them.
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
        // The layers whose weights lie in one buffer, and so do their keys and their values.
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

    /// `first`, where its workgroups run side by side, else the first that do of those with the numbers of workgroups in `others`.
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

    /// Whether all workgroups run side by side, tried on a token at position 0, on page 0.
    fn runs_through(&self, untried: &UntestedLayers) -> Result<bool, WgpuError> {
        let UntestedLayers { layers, ended, groups } = untried;
        let token = BatchToken { id: 0, seq: 0, pos: 0, logits: false };
        self.batch.write_tokens(self.gpu, &[token]);
        let mut encoder = self.gpu.encoder();
        let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
        for dispatch in &layers.dispatches {
            dispatch.record(self.gpu, &mut pass, BatchDims { n_tokens: 1, n_wanted: 0, n_runs: 1, n_splits: 1 });
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
