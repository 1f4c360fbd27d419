//! The KV cache in the GPU's memory.

use metal_attention_kernels::kernels::AttentionShape;
use metal_attention_kernels::wgpu::Buffer;
use metal_attention_kernels::{Arena, GpuDevice, GpuError, Slice};
use metal_attention_model::{BatchToken, ForwardError, PageCopy, PageTable};

use super::options::GpuForwardPassOptions;

/// Keys and values of every token so far, in pages that sequences share.
#[derive(Debug)]
pub struct GpuKvCache {
    /// Keys and values of each layer, `[n_pages, n_head_kv, PAGE, padded head_dim]` each.
    pub(super) layers: Vec<(Slice, Slice)>,
    /// Which page holds what.
    pub(super) pages: PageTable,
    /// Bytes of a page of each layer's keys, and of its values.
    page_bytes: Vec<u64>,
    /// A page of all layers' keys and values on its way to another: a buffer cannot be copied to itself.
    between: Buffer,
    bytes: u64,
}

impl GpuKvCache {
    pub(super) fn new(
        gpu: &GpuDevice,
        shapes: &[AttentionShape],
        options: &GpuForwardPassOptions,
    ) -> Result<Self, GpuError> {
        let n_pages = options.n_pages();
        let sizes = || shapes.iter().map(|shape| shape.cache_bytes(n_pages));
        let slices = || -> Result<Vec<Slice>, GpuError> {
            let padded: Vec<_> = sizes().map(Arena::padded).collect();
            let mut sizes = sizes();
            let mut slices = Vec::new();
            for (n, mut arena) in Arena::in_runs(gpu, "the KV cache", &padded, options.layers_in_a_buffer)? {
                for bytes in sizes.by_ref().take(n) {
                    slices.push(arena.take(gpu, "the KV cache", bytes)?);
                }
            }
            Ok(slices)
        };
        let layers = slices()?.into_iter().zip(slices()?).collect();
        Ok(Self {
            layers,
            pages: PageTable::new(n_pages, options.n_ctx, options.n_seq),
            page_bytes: shapes.iter().map(|shape| shape.cache_bytes(1)).collect(),
            between: gpu.buffer("a page to copy", copy_bytes(shapes, options.n_seq))?,
            bytes: sizes().map(|bytes| 2 * bytes).sum(),
        })
    }

    /// Checks a batch, finds pages for it and counts its tokens, as [`PageTable::append`] does; what is then to be copied is
    /// copied before the next submission runs.
    pub(super) fn append(&mut self, gpu: &GpuDevice, batch: &[BatchToken], n_vocab: usize) -> Result<(), ForwardError> {
        for PageCopy { from, to } in self.pages.append(batch, n_vocab)? {
            let mut encoder = gpu.encoder();
            let halves = || {
                let layers = self.layers.iter().zip(&self.page_bytes);
                layers.flat_map(|((keys, values), &bytes)| [(keys, bytes), (values, bytes)]).scan(
                    0,
                    |at, (half, bytes)| {
                        *at += bytes;
                        Some((half.buffer(), half.offset(), *at - bytes, bytes))
                    },
                )
            };
            for (buffer, offset, at, bytes) in halves() {
                let from = offset + u64::from(from) * bytes;
                encoder.copy_buffer_to_buffer(buffer, from, &self.between, at, bytes);
            }
            for (buffer, offset, at, bytes) in halves() {
                let to = offset + u64::from(to) * bytes;
                encoder.copy_buffer_to_buffer(&self.between, at, buffer, to, bytes);
            }
            gpu.submit(encoder);
        }
        Ok(())
    }

    /// Bytes of all layers.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Bytes of a page of all layers on its way to another; a single sequence shares nothing.
pub(super) fn copy_bytes(shapes: &[AttentionShape], n_seq: usize) -> u64 {
    if n_seq > 1 { shapes.iter().map(|shape| 2 * shape.cache_bytes(1)).sum() } else { 0 }
}
