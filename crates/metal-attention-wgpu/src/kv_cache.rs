//! The KV cache in the GPU's memory.

use crate::{Arena, GpuDevice, GpuError, Slice};
use metal_attention_model::{BatchToken, ForwardError, ModelSpec, PageCopy, PageTable};
use wgpu::Buffer;

use super::options::GpuForwardPassOptions;
use super::parts::MixerKernels;

/// Keys and values of every token so far, in pages that sequences share.
#[derive(Debug)]
pub struct GpuKvCache {
    /// Keys and values that each layer reads, `[n_pages, n_head_kv, PAGE, padded elements of a head]` each.
    pub(super) layers: Vec<(Slice, Slice)>,
    /// Which page holds what.
    pub(super) pages: PageTable,
    /// Keys, or values, of each layer that has its own, with the bytes of a page.
    halves: Vec<(Slice, u64)>,
    /// A page of all layers' keys and values on its way to another: a buffer cannot be copied to itself.
    between: Buffer,
    bytes: u64,
}

impl GpuKvCache {
    pub(super) fn new(
        gpu: &GpuDevice,
        spec: &ModelSpec,
        mixers: &[MixerKernels],
        options: &GpuForwardPassOptions,
    ) -> Result<Self, GpuError> {
        let room = options.capacity(spec);
        let n_pages = room.n_pages();
        let owners: Vec<_> = (0..mixers.len()).filter_map(|i| Some((i, mixers[i].page_bytes()?))).collect();
        let slices = |half: usize| -> Result<Vec<Slice>, GpuError> {
            let sizes: Vec<_> = owners.iter().map(|(_, page)| page[half].saturating_mul(n_pages as u64)).collect();
            let padded: Vec<_> = sizes.iter().map(|&bytes| Arena::padded(bytes)).collect();
            let mut slices = Vec::new();
            for (n, mut arena) in Arena::in_runs(gpu, "the KV cache", &padded, options.layers_in_a_buffer)? {
                for &bytes in &sizes[slices.len()..][..n] {
                    slices.push(arena.take(gpu, "the KV cache", bytes)?);
                }
            }
            Ok(slices)
        };
        let (keys, values) = (slices(0)?, slices(1)?);
        let layers = spec.layers.iter().enumerate().map(|(i, layer)| {
            let source = layer.mixer.cache_of(i);
            let at = owners.iter().position(|(owner, _)| *owner == source).expect("the layer read has its own cache");
            (keys[at].clone(), values[at].clone())
        });
        let halves = keys.iter().zip(&values).zip(&owners);
        Ok(Self {
            layers: layers.collect(),
            pages: PageTable::new(n_pages, room.n_ctx, room.n_seq),
            halves: halves.flat_map(|((k, v), (_, page))| [(k.clone(), page[0]), (v.clone(), page[1])]).collect(),
            between: gpu.buffer("a page to copy", copy_bytes(mixers, options.n_seq))?,
            bytes: cache_bytes(mixers, n_pages),
        })
    }

    /// Checks a batch, finds pages for it and counts its tokens, as [`PageTable::append`] does; what is then to be copied is
    /// copied before the next submission runs.
    pub(super) fn append(&mut self, gpu: &GpuDevice, batch: &[BatchToken], n_vocab: usize) -> Result<(), ForwardError> {
        for PageCopy { from, to } in self.pages.append(batch, n_vocab)? {
            let mut encoder = gpu.encoder();
            let halves = || {
                self.halves.iter().scan(0, |at, &(ref half, bytes)| {
                    *at += bytes;
                    Some((half.buffer(), half.offset(), *at - bytes, bytes))
                })
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

/// Bytes of the keys and values of all layers.
pub(super) fn cache_bytes(mixers: &[MixerKernels], n_pages: usize) -> u64 {
    let pages = mixers.iter().filter_map(MixerKernels::page_bytes).flatten();
    pages.fold(0_u64, |sum, page| sum.saturating_add(page.saturating_mul(n_pages as u64)))
}

/// Bytes of a page of all layers on its way to another; a single sequence shares nothing.
pub(super) fn copy_bytes(mixers: &[MixerKernels], n_seq: usize) -> u64 {
    if n_seq > 1 { cache_bytes(mixers, 1) } else { 0 }
}
