//! The KV cache in the GPU's memory.

use metal_attention_kernels::kernels::AttentionShape;
use metal_attention_kernels::{Arena, GpuDevice, GpuError, Slice};
use metal_attention_model::{BatchToken, PAGE, PageUse};

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

    /// Copies the first `n` rows of sequence `from` to sequence `to`, which then has so many tokens.
    pub(super) fn share(
        &mut self,
        gpu: &GpuDevice,
        shapes: &[AttentionShape],
        (from, to, n): (usize, usize, usize),
    ) -> Result<(), GpuError> {
        let row = |shape: &AttentionShape| (shape.padded_head_dim() * shape.cache.bytes()) as u64;
        let largest = shapes.iter().map(|shape| row(shape) * n as u64).max().unwrap_or(0);
        if largest > 0 && from != to {
            // A buffer cannot be copied to itself.
            let between = gpu.buffer("rows to share", largest)?;
            let mut encoder = gpu.encoder();
            for (shape, (keys, values)) in shapes.iter().zip(&self.layers) {
                let bytes = row(shape) * n as u64;
                for (slice, head) in [keys, values].into_iter().flat_map(|s| (0..shape.n_head_kv).map(move |h| (s, h)))
                {
                    let at = |seq| slice.offset() + (shape.cache_row(seq, head, 0) * shape.cache.bytes()) as u64;
                    encoder.copy_buffer_to_buffer(slice.buffer(), at(from), &between, 0, bytes);
                    encoder.copy_buffer_to_buffer(&between, 0, slice.buffer(), at(to), bytes);
                }
            }
            gpu.submit(encoder);
        }
        self.n_past[to] = n;
        Ok(())
    }

    /// Pages as if each sequence had `n_ctx` positions of its own.
    pub(super) fn usage(&self, n_ctx: usize) -> PageUse {
        let total = n_ctx.div_ceil(PAGE) * self.n_past.len();
        let used = self.n_past.iter().map(|n| n.div_ceil(PAGE)).sum::<usize>();
        PageUse { page_len: PAGE, total, free: total - used }
    }

    /// Bytes of all layers.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}
