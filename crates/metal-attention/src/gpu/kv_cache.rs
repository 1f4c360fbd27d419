//! The KV cache in the GPU's memory.

use metal_attention_kernels::kernels::AttentionShape;
use metal_attention_kernels::wgpu::Buffer;
use metal_attention_kernels::{GpuDevice, GpuError};
use metal_attention_model::BatchToken;

/// Keys and values of every token so far, per layer and sequence.
#[derive(Debug)]
pub struct GpuKvCache {
    /// Keys and values of each layer, `[n_seq, n_head_kv, n_ctx, padded head_dim]` each.
    pub(super) layers: Vec<(Buffer, Buffer)>,
    /// Length of each sequence.
    pub(super) n_past: Vec<usize>,
    bytes: u64,
}

impl GpuKvCache {
    pub(super) fn new(gpu: &GpuDevice, shapes: &[AttentionShape], n_seq: usize) -> Result<Self, GpuError> {
        let mut bytes = 0;
        let layers = shapes
            .iter()
            .map(|shape| {
                let one = shape.cache_bytes(n_seq);
                let both = (gpu.buffer("the KV cache", one)?, gpu.buffer("the KV cache", one)?);
                bytes += 2 * one;
                Ok(both)
            })
            .collect::<Result<_, GpuError>>()?;
        Ok(Self { layers, n_past: vec![0; n_seq], bytes })
    }

    /// Counts the tokens of a batch that was evaluated.
    pub(super) fn append(&mut self, batch: &[BatchToken]) {
        for token in batch {
            self.n_past[token.seq] += 1;
        }
    }

    /// Bytes of all layers.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}
