//! The KV cache in the GPU's memory.

use metal_attention_kernels::kernels::AttentionShape;
use metal_attention_kernels::{Arena, GpuDevice, GpuError, Slice};
use metal_attention_model::BatchToken;

/// Keys and values of every token so far, per layer and sequence.
#[derive(Debug)]
pub struct GpuKvCache {
    /// Keys and values of each layer, `[n_seq, n_head_kv, n_ctx, padded head_dim]` each.
    pub(super) layers: Vec<(Slice, Slice)>,
    /// Length of each sequence.
    pub(super) n_past: Vec<usize>,
    bytes: u64,
}

impl GpuKvCache {
    pub(super) fn new(gpu: &GpuDevice, shapes: &[AttentionShape], n_seq: usize) -> Result<Self, GpuError> {
        let sizes = || shapes.iter().map(|shape| shape.cache_bytes(n_seq));
        let padded = sizes().map(Arena::padded).fold(0, u64::saturating_add);
        let mut keys = Arena::new(gpu, "the KV cache", padded)?;
        let mut values = Arena::new(gpu, "the KV cache", padded)?;
        let layers = sizes()
            .map(|bytes| Ok((keys.take(gpu, "the KV cache", bytes)?, values.take(gpu, "the KV cache", bytes)?)))
            .collect::<Result<_, GpuError>>()?;
        Ok(Self { layers, n_past: vec![0; n_seq], bytes: sizes().map(|bytes| 2 * bytes).sum() })
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
