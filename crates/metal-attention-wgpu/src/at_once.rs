//! All layers of one token in one dispatch, or in one for each buffer that their weights lie in, on GPUs whose workgroups run
//! side by side.

use metal_attention_model::{BatchToken, ModelSpec};
use wgpu::{Buffer, ComputePassDescriptor};

use crate::kernels::{self, LayerMatrices, LayersBuffers, LayersShape};
use crate::parts::{PlainLayer, PlainWeights};
use crate::weights::{GpuLayer, GpuWeights, layer_params};
use crate::{BatchBuffer, Dispatch, GpuDevice, GpuError, StepSize};

/// The kernels that run all layers, one after the other.
#[derive(Debug)]
pub(super) struct LayersAtOnce {
    pub(super) dispatches: Vec<Dispatch>,
    /// A word: whether a workgroup gave up waiting for another.
    pub(super) gave_up: Buffer,
}

/// What the kernel works on.
pub(super) struct LayersAtOnceBuilder<'a> {
    pub(super) gpu: &'a GpuDevice,
    pub(super) spec: &'a ModelSpec,
    /// All layers, where all are plain.
    pub(super) layers: Option<Vec<(PlainLayer, PlainWeights<'a>)>>,
    pub(super) weights: &'a GpuWeights,
    pub(super) cache: &'a [(crate::Slice, crate::Slice)],
    pub(super) rope: &'a [Buffer],
    pub(super) x: &'a Buffer,
    pub(super) batch: &'a BatchBuffer,
}

/// NVIDIA's number among the makers of PCI devices.
const NVIDIA: u32 = 0x10de;

/// Workgroups to try on `gpu`, most first. Only makers whose workgroups are known to run side by side, without one having
/// to end before another begins, are asked.
pub(super) fn groups_to_try(gpu: &GpuDevice) -> &'static [usize] {
    if gpu.summary().vendor() == NVIDIA { &[128, 64, 32] } else { &[] }
}

impl LayersAtOnceBuilder<'_> {
    /// The first of the numbers of workgroups with which the kernel runs to its end; otherwise why the model or the GPU does
    /// not suit the kernel.
    pub(super) fn build(&self, groups_to_try: &[usize]) -> Result<Result<LayersAtOnce, &'static str>, GpuError> {
        if groups_to_try.is_empty() {
            return Ok(Err("this GPU is not known to run workgroups side by side"));
        }
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
        let shape = |n_layer| LayersShape { attention, n_layer, n_embd: self.spec.n_embd, n_ff, norm_eps, biases };
        let matrices: Vec<LayerMatrices<'_>> = self.weights.layers.iter().filter_map(GpuLayer::matrices).collect();
        // The layers whose weights lie in one buffer, and so do their keys and their values.
        let buffers = |i: usize| {
            let (keys, values) = &self.cache[i];
            (matrices[i].qkv.parts()[0].buffer.buffer(), keys.buffer(), values.buffer())
        };
        let layers: Vec<_> = (0..matrices.len()).collect();
        let runs = layers.chunk_by(|&a, &b| buffers(a) == buffers(b)).map(|run| {
            let (run, shape) = (run[0]..run[0] + run.len(), shape(run.len()));
            let params = &params[run.start * shape.params()..run.end * shape.params()];
            Ok((run, shape, self.gpu.upload("norms and biases", params)?))
        });
        let runs = runs.collect::<Result<Vec<_>, GpuError>>()?;
        for &groups in groups_to_try {
            let gave_up = self.gpu.buffer("whether a workgroup gave up", 4)?;
            let (mut dispatches, mut all_ended) = (Vec::new(), Vec::new());
            for (run, shape, params) in &runs {
                let flow = self.gpu.buffer("what workgroups hand to each other", shape.flow_bytes(groups))?;
                let ended = self.gpu.buffer("the number of workgroups that have ended", 4)?;
                let buffers = LayersBuffers {
                    params,
                    x: self.x,
                    flow: &flow,
                    ended: &ended,
                    gave_up: &gave_up,
                    rope: &self.rope[0],
                    cache: &self.cache[run.clone()],
                    batch: self.batch.buffer(),
                };
                match kernels::decode_layers(self.gpu, shape, groups, &matrices[run.clone()], &buffers)? {
                    Ok(dispatch) => dispatches.push(dispatch),
                    Err(why) => return Ok(Err(why)),
                }
                all_ended.push(ended);
            }
            let layers = LayersAtOnce { dispatches, gave_up };
            if self.runs_through(&layers, &all_ended, groups)? {
                return Ok(Ok(layers));
            }
        }
        Ok(Err("workgroups did not run side by side when that was tried"))
    }

    /// Whether all workgroups run side by side, tried on a token at position 0, on page 0; `ended`: for each dispatch how many
    /// have ended.
    fn runs_through(&self, layers: &LayersAtOnce, ended: &[Buffer], groups: usize) -> Result<bool, GpuError> {
        let token = BatchToken { id: 0, seq: 0, pos: 0, logits: false };
        self.batch.write_tokens(self.gpu, &[token]);
        let mut encoder = self.gpu.encoder();
        let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
        for dispatch in &layers.dispatches {
            dispatch.record(self.gpu, &mut pass, StepSize { n_tokens: 1, n_wanted: 0, n_runs: 1, n_splits: 1 });
        }
        drop(pass);
        self.gpu.submit(encoder);
        for ended in ended {
            if self.gpu.read::<u32>(ended, 1)? != [groups as u32] {
                return Ok(false);
            }
        }
        Ok(self.gpu.read::<u32>(&layers.gave_up, 1)? == [0])
    }
}
