//! [`CudaKvCache`]: the KV cache in device memory, and a copy of its sequences' page tables.
//!
//! Keys and values of each layer are two buffers `[n_pages, n_head_kv, 64, head_dim]` of F16 or F32; a page holds 64
//! consecutive positions of one sequence. Latent attention has one buffer only, whose rows are keys and, in part, values. Which
//! page belongs to which sequence is decided on the host ([`PageTable`], one for each cache group); kernels read a copy of the
//! tables.

use std::sync::Arc;

use metal_attention_model::{BatchToken, CacheGroups, CacheType, ModelSpec, PAGE, PageCopy, PageTable};

use crate::CudaError;
use crate::args::PagesArgs;
use crate::device::{CudaBuffer, CudaDevice};
use crate::slice::DevicePtr;

/// The KV cache of a model, or of one rank's shard of it.
#[derive(Debug)]
pub(crate) struct CudaKvCache {
    /// Keys and values of each layer; `None` for a layer that has none or shares another layer's memory. Of an assistant those of its
    /// target's layers, with which it shares them.
    layers: Vec<Option<Arc<LayerCache>>>,
    /// For each layer, the layer whose memory has its pages ([`CacheGroups::memory_of_layer`]).
    sources: Vec<Option<usize>>,
    /// For each layer, the cache group of what it reads.
    groups: Vec<usize>,
    /// Bytes of keys and values of all layers; 0 if they are a target's.
    bytes: u64,
    /// The page tables on the device, u32 `[n_groups, n_seq, max_pages]`.
    table: CudaBuffer,
    /// The pages in `table`, for each group and sequence: `[n_groups * n_seq]` lists.
    uploaded: Vec<Vec<u32>>,
    /// Pages of the longest possible sequence.
    max_pages: usize,
    /// Sequences that the cache holds.
    n_seq: usize,
    /// Element type of keys and values.
    pub(crate) cache_type: CacheType,
}

/// Keys and values of one layer.
#[derive(Debug)]
struct LayerCache {
    /// Keys, then values; the second is empty for latent attention.
    buffers: [CudaBuffer; 2],
    /// Bytes of a page in each buffer.
    page_bytes: [u64; 2],
}

impl CudaKvCache {
    /// Allocates an empty cache with the pages that `groups` have.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        spec: &ModelSpec,
        groups: &CacheGroups,
        cache_type: CacheType,
    ) -> Result<Self, CudaError> {
        let layers = spec.layers.iter().enumerate().map(|(i, layer)| {
            let own = groups.memory_of_layer(i) == Some(i);
            let Some(cached) = layer.mixer.kv_shape().filter(|_| own) else { return Ok(None) };
            // Rows of latent attention are stored once, as keys; values are a part of them.
            let value_dim = if layer.mixer.latent_attention().is_some() { 0 } else { cached.value_dim };
            let page_bytes =
                [cached.key_dim, value_dim].map(|dim| (PAGE * cached.n_head_kv * dim * cache_type.bytes()) as u64);
            let zeros = |bytes: u64| gpu.zeros("the KV cache", bytes.saturating_mul(groups.n_pages(i) as u64));
            let buffers = [zeros(page_bytes[0])?, zeros(page_bytes[1])?];
            Ok(Some(Arc::new(LayerCache { buffers, page_bytes })))
        });
        let layers = layers.collect::<Result<Vec<Option<Arc<LayerCache>>>, CudaError>>()?;
        let bytes = layers.iter().flatten().flat_map(|layer| &layer.buffers).map(CudaBuffer::bytes).sum();
        Ok(Self { bytes, ..Self::over(gpu, layers, spec, groups, cache_type)? })
    }

    /// The cache of `target`, as an assistant of it reads it. `groups`: those of the assistant.
    pub(crate) fn of_assistant(
        gpu: &Arc<CudaDevice>,
        target: &Self,
        spec: &ModelSpec,
        groups: &CacheGroups,
    ) -> Result<Self, CudaError> {
        Self::over(gpu, target.layers.clone(), spec, groups, target.cache_type)
    }

    /// A cache over the memory of these layers, which `groups` name.
    fn over(
        gpu: &Arc<CudaDevice>,
        layers: Vec<Option<Arc<LayerCache>>>,
        spec: &ModelSpec,
        groups: &CacheGroups,
        cache_type: CacheType,
    ) -> Result<Self, CudaError> {
        let capacity = groups.capacity();
        let max_pages = capacity.n_positions().div_ceil(PAGE);
        let n_groups = groups.groups().len();
        let table = gpu.zeros("the page table", (4 * n_groups * capacity.n_seq * max_pages) as u64)?;
        Ok(Self {
            layers,
            sources: (0..spec.n_layer()).map(|i| groups.memory_of_layer(i)).collect(),
            groups: (0..spec.n_layer()).map(|i| groups.of_layer(i)).collect(),
            bytes: 0,
            table,
            uploaded: vec![Vec::new(); n_groups * capacity.n_seq],
            max_pages,
            n_seq: capacity.n_seq,
            cache_type,
        })
    }

    /// The keys and the values that layer `i` reads, F16 or F32; null for a layer that reads none.
    pub(crate) fn layer_pages(&self, i: usize) -> [DevicePtr<u8>; 2] {
        let cache = self.sources[i].and_then(|source| self.layers[source].as_ref());
        cache.map_or([DevicePtr::NULL; 2], |cache| [cache.buffers[0].ptr(), cache.buffers[1].ptr()])
    }

    /// The page tables of the cache group of layer `i`, `[n_seq, max_pages]`.
    pub(crate) fn page_table_of_layer(&self, i: usize) -> PagesArgs {
        let group = self.groups[i];
        PagesArgs {
            pages: self.table.slice().skip(group * self.n_seq * self.max_pages).ptr(),
            n_pages: self.max_pages as u32,
            unused: 0,
        }
    }

    /// Copies a page of all layers of a cache group, in the order of the stream.
    pub(crate) fn copy_page(&self, copy: PageCopy) -> Result<(), CudaError> {
        for (buffer, from, bytes) in self.page_parts(copy.group, copy.from) {
            buffer.copy_within(from, u64::from(copy.to) * bytes, bytes)?;
        }
        Ok(())
    }

    /// Uploads the page tables of the sequences of `batch`, as far as they have changed.
    pub(crate) fn write_pages(&mut self, batch: &[BatchToken], table: &PageTable) -> Result<(), CudaError> {
        for run in batch.chunk_by(|a, b| a.seq == b.seq) {
            let seq = run[0].seq;
            for group in 0..table.n_groups() {
                let pages = table.pages(group, seq);
                let uploaded = &mut self.uploaded[group * self.n_seq + seq];
                let same = uploaded.iter().zip(pages).take_while(|(a, b)| a == b).count();
                if same < pages.len() {
                    let at = 4 * ((group * self.n_seq + seq) * self.max_pages + same) as u64;
                    self.table.write(at, bytemuck::cast_slice(&pages[same..]))?;
                    uploaded.truncate(same);
                    uploaded.extend_from_slice(&pages[same..]);
                }
            }
        }
        Ok(())
    }

    /// The parts of a page of a group, layer by layer, keys before values: buffer, offset in bytes, and length in bytes.
    pub(crate) fn page_parts(&self, group: usize, page: u32) -> impl Iterator<Item = (&CudaBuffer, u64, u64)> {
        let buffers = self.layers_of_group(group).flat_map(|layer| layer.buffers.iter().zip(layer.page_bytes));
        buffers.map(move |(buffer, bytes)| (buffer, u64::from(page) * bytes, bytes))
    }

    /// Bytes of a page of a group, over all its layers.
    pub(crate) fn page_bytes(&self, group: usize) -> u64 {
        self.layers_of_group(group).flat_map(|layer| layer.page_bytes).sum()
    }

    /// The layers of a cache group that have keys and values of their own.
    fn layers_of_group(&self, group: usize) -> impl Iterator<Item = &LayerCache> {
        let layers = self.layers.iter().zip(&self.groups).filter(move |(_, group_of_layer)| **group_of_layer == group);
        layers.filter_map(|(layer, _)| layer.as_deref())
    }

    /// Bytes of the memory for keys and values of all layers.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}
