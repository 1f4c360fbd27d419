//! The KV cache in GPU memory: keys and values of all layers, in pages of 64 positions that sequences may share.
//!
//! Which page belongs to which sequence is kept on the CPU, in the session's page table; the kernels read a copy from
//! the [`BatchBuffer`](crate::BatchBuffer). A cache group is the layers that use the same page numbers.

use crate::{Arena, Slice, WgpuDevice, WgpuError};
use metal_attention_model::{CacheGroups, CacheType, ModelSpec, PageCopy};
use wgpu::Buffer;

/// Keys and values of all positions of all sequences.
#[derive(Debug)]
pub struct WgpuKvCache {
    /// Keys and values that each layer reads: two slices of `[n_pages, n_head_kv, PAGE, padded head_dim]`, with the
    /// pages of the layer's cache group. `None`: the layer has no attention. Layers that share memory have equal
    /// slices.
    pub(super) layers: Vec<Option<(Slice, Slice)>>,
    /// The keys, and the values, of each layer that has memory of its own.
    halves: Vec<LayerKeysOrValues>,
    /// The buffer through which a page of all layers is copied to another page: WebGPU does not copy within a buffer.
    copy_buffer: Buffer,
    /// Element type of keys and values.
    pub(super) cache_type: CacheType,
    /// Bytes of all pages.
    bytes: u64,
}

/// The keys of one layer, or its values.
#[derive(Debug)]
struct LayerKeysOrValues {
    /// `[n_pages, n_head_kv, PAGE, padded head_dim]`.
    slice: Slice,
    /// Bytes of one page.
    page_bytes: u64,
    /// The cache group.
    group: usize,
}

impl WgpuKvCache {
    /// Makes the cache. `page_bytes`: bytes of a page of each layer's keys, and of its values, if it has memory of its own.
    pub(super) fn new(
        gpu: &WgpuDevice,
        spec: &ModelSpec,
        page_bytes: &[Option<[u64; 2]>],
        groups: &CacheGroups,
        cache_type: CacheType,
        layers_in_a_buffer: usize,
    ) -> Result<Self, WgpuError> {
        let owners: Vec<_> = page_bytes.iter().enumerate().filter_map(|(i, page)| Some((i, (*page)?))).collect();
        let slices = |half: usize| -> Result<Vec<Slice>, WgpuError> {
            let bytes = |(i, page): &(usize, [u64; 2])| page[half].saturating_mul(groups.n_pages(*i) as u64);
            let sizes: Vec<_> = owners.iter().map(bytes).collect();
            let padded: Vec<_> = sizes.iter().map(|&bytes| Arena::padded(bytes)).collect();
            let mut slices = Vec::new();
            for (n, mut arena) in Arena::in_runs(gpu, "the KV cache", &padded, layers_in_a_buffer)? {
                for &bytes in &sizes[slices.len()..][..n] {
                    slices.push(arena.take(gpu, "the KV cache", bytes)?);
                }
            }
            Ok(slices)
        };
        let (keys, values) = (slices(0)?, slices(1)?);
        let layers = (0..spec.n_layer()).map(|i| {
            let source = groups.memory_of_layer(i)?;
            let at = owners.iter().position(|(owner, _)| *owner == source).expect("that layer has memory of its own");
            Some((keys[at].clone(), values[at].clone()))
        });
        let halves = keys.iter().zip(&values).zip(&owners).flat_map(|((keys, values), &(i, page))| {
            let half = |(slice, page_bytes)| LayerKeysOrValues { slice, page_bytes, group: groups.of_layer(i) };
            [(keys.clone(), page[0]), (values.clone(), page[1])].map(half)
        });
        Ok(Self {
            layers: layers.collect(),
            halves: halves.collect(),
            copy_buffer: gpu.buffer("a page to copy", copy_bytes(page_bytes, groups.capacity().n_seq))?,
            cache_type,
            bytes: cache_bytes(page_bytes, groups),
        })
    }

    /// The cache of `target` as an assistant with the layers of `groups` reads it, which holds no pages of its own.
    pub(super) fn of_assistant(target: &Self, n_layer: usize, groups: &CacheGroups) -> Self {
        Self {
            layers: (0..n_layer).map(|i| target.layers[groups.memory_of_layer(i)?].clone()).collect(),
            halves: Vec::new(),
            copy_buffer: target.copy_buffer.clone(),
            cache_type: target.cache_type,
            bytes: 0,
        }
    }

    /// The keys and values that layer `i`, which has attention, reads: its own, or an earlier layer's that it shares.
    pub(super) fn read_by_layer(&self, i: usize) -> (&Slice, &Slice) {
        let (keys, values) = self.layers[i].as_ref().expect("a layer with attention reads a cache");
        (keys, values)
    }

    /// Copies a page of all layers of a cache group, before the next submission runs.
    pub(super) fn copy_page(&self, gpu: &WgpuDevice, PageCopy { group, from, to }: PageCopy) {
        let mut encoder = gpu.encoder();
        let halves = || {
            self.halves.iter().filter(|half| half.group == group).scan(0, |at, half| {
                *at += half.page_bytes;
                Some((half.slice.buffer(), half.slice.offset(), *at - half.page_bytes, half.page_bytes))
            })
        };
        for (buffer, offset, at, bytes) in halves() {
            let from = offset + u64::from(from) * bytes;
            encoder.copy_buffer_to_buffer(buffer, from, &self.copy_buffer, at, bytes);
        }
        for (buffer, offset, at, bytes) in halves() {
            let to = offset + u64::from(to) * bytes;
            encoder.copy_buffer_to_buffer(&self.copy_buffer, at, buffer, to, bytes);
        }
        gpu.submit(encoder);
    }

    /// The slices that make up a page of a cache group: layer by layer, its keys and then its values.
    pub(super) fn of_page(&self, group: usize, page: u32) -> impl Iterator<Item = Slice> {
        let of_group = self.halves.iter().filter(move |half| half.group == group);
        of_group.map(move |half| half.slice.part(u64::from(page) * half.page_bytes, half.page_bytes))
    }

    /// Bytes of a page of a cache group, over all its layers.
    pub(super) fn page_bytes(&self, group: usize) -> u64 {
        self.halves.iter().filter(|half| half.group == group).map(|half| half.page_bytes).sum()
    }

    /// Bytes of all pages of all layers.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Bytes of the keys and values of all layers. `page_bytes`: as for [`WgpuKvCache::new`].
pub(super) fn cache_bytes(page_bytes: &[Option<[u64; 2]>], groups: &CacheGroups) -> u64 {
    bytes_of_pages(page_bytes, |i| groups.n_pages(i))
}

/// Bytes of the buffer through which pages are copied. A single sequence shares no pages, and copies none.
pub(super) fn copy_bytes(page_bytes: &[Option<[u64; 2]>], n_seq: usize) -> u64 {
    if n_seq > 1 { bytes_of_pages(page_bytes, |_| 1) } else { 0 }
}

/// Bytes of `n_pages(i)` pages of each layer `i` that has memory of its own.
fn bytes_of_pages(page_bytes: &[Option<[u64; 2]>], n_pages: impl Fn(usize) -> usize) -> u64 {
    let of_layer = |(i, page): (usize, &Option<[u64; 2]>)| {
        let [keys, values] = (*page)?;
        Some((keys + values).saturating_mul(n_pages(i) as u64))
    };
    page_bytes.iter().enumerate().filter_map(of_layer).fold(0, u64::saturating_add)
}
