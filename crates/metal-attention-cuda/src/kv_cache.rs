//! The KV cache in the device's memory: keys and values of each layer, `[n_pages, n_head_kv, 64, head_dim]` each, and the page
//! table as kernels read it.

use std::sync::Arc;

use metal_attention_model::{BatchToken, CacheGroups, CacheType, ModelSpec, PAGE, PageTable};

use crate::CudaError;
use crate::args::PagesArgs;
use crate::device::{CudaBuffer, CudaDevice};

#[derive(Debug)]
pub(crate) struct CudaKvCache {
    pub(crate) pages: PageTable,
    /// Keys and values of each layer that has its own.
    layers: Vec<Option<LayerCache>>,
    /// The layer whose keys and values each layer reads: itself or an earlier one.
    sources: Vec<usize>,
    /// The group of layers that each belongs to with what it reads.
    groups: Vec<usize>,
    /// `[n_groups, n_seq, most]`: pages of sequences, and what of them the device has.
    table: CudaBuffer,
    sent: Vec<Vec<u32>>,
    most: usize,
    n_seq: usize,
    pub(crate) cache_type: CacheType,
}

/// A layer's keys and its values, and bytes of a page of each.
#[derive(Debug)]
struct LayerCache {
    halves: [CudaBuffer; 2],
    page_bytes: [u64; 2],
}

impl CudaKvCache {
    /// An empty cache.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        spec: &ModelSpec,
        groups: &CacheGroups,
        cache_type: CacheType,
    ) -> Result<Self, CudaError> {
        let room = groups.capacity();
        let most = room.n_positions().div_ceil(PAGE);
        let n_groups = groups.groups().len();
        let table = gpu.zeros("the page table", (4 * n_groups * room.n_seq * most) as u64)?;
        let layers = spec.layers.iter().enumerate().map(|(i, layer)| {
            let Some(of) = layer.mixer.kv_shape() else { return Ok(None) };
            // Rows of latent attention are keys, of which values are a part.
            let value_dim = if layer.mixer.latent_attention().is_some() { 0 } else { of.value_dim };
            let page_bytes = [of.key_dim, value_dim].map(|dim| (PAGE * of.n_head_kv * dim * cache_type.bytes()) as u64);
            let zeros = |bytes: u64| gpu.zeros("the KV cache", bytes.saturating_mul(groups.n_pages(i) as u64));
            let halves = [zeros(page_bytes[0])?, zeros(page_bytes[1])?];
            Ok(Some(LayerCache { halves, page_bytes }))
        });
        let layers = layers.collect::<Result<_, CudaError>>()?;
        let sources = spec.layers.iter().enumerate().map(|(i, layer)| layer.mixer.cache_of(i).unwrap_or(i)).collect();
        Ok(Self {
            pages: PageTable::new(groups),
            layers,
            sources,
            groups: (0..spec.n_layer()).map(|i| groups.of_layer(i)).collect(),
            table,
            sent: vec![Vec::new(); n_groups * room.n_seq],
            most,
            n_seq: room.n_seq,
            cache_type,
        })
    }

    /// Keys and values that layer `i` reads; nowhere for one that reads none.
    pub(crate) fn of_layer(&self, i: usize) -> [u64; 2] {
        let cache = self.layers[self.sources[i]].as_ref();
        cache.map_or([0; 2], |cache| [cache.halves[0].ptr(), cache.halves[1].ptr()])
    }

    /// The pages of layer `i`.
    pub(crate) fn pages_of_layer(&self, i: usize) -> PagesArgs {
        let group = self.groups[i];
        PagesArgs {
            pages: self.table.ptr() + (4 * group * self.n_seq * self.most) as u64,
            n_pages: self.most as u32,
            unused: 0,
        }
    }

    /// Finds pages for `batch`, and copies those that are shared.
    pub(crate) fn append(&mut self, batch: &[BatchToken]) -> Result<(), CudaError> {
        for copy in self.pages.append(batch) {
            for (half, from, bytes) in self.of_page(copy.group, copy.from) {
                half.copy_within(from, u64::from(copy.to) * bytes, bytes)?;
            }
        }
        Ok(())
    }

    /// Sends the pages of the sequences of `batch`, as far as they have changed.
    pub(crate) fn write_pages(&mut self, batch: &[BatchToken]) -> Result<(), CudaError> {
        for run in batch.chunk_by(|a, b| a.seq == b.seq) {
            let seq = run[0].seq;
            for group in 0..self.pages.n_groups() {
                let pages = self.pages.pages(group, seq);
                let sent = &mut self.sent[group * self.n_seq + seq];
                let same = sent.iter().zip(pages).take_while(|(a, b)| a == b).count();
                if same < pages.len() {
                    let at = 4 * ((group * self.n_seq + seq) * self.most + same) as u64;
                    self.table.write(at, bytemuck::cast_slice(&pages[same..]))?;
                    sent.truncate(same);
                    sent.extend_from_slice(&pages[same..]);
                }
            }
        }
        Ok(())
    }

    /// Where a page of a group lies, layer by layer, its keys and then its values: buffers, bytes before it, and its bytes.
    pub(crate) fn of_page(&self, group: usize, page: u32) -> impl Iterator<Item = (&CudaBuffer, u64, u64)> {
        let halves = self.of_group(group).flat_map(|layer| layer.halves.iter().zip(layer.page_bytes));
        halves.map(move |(half, bytes)| (half, u64::from(page) * bytes, bytes))
    }

    /// Bytes of a page of a group, over all its layers.
    pub(crate) fn page_bytes(&self, group: usize) -> u64 {
        self.of_group(group).flat_map(|layer| layer.page_bytes).sum()
    }

    fn of_group(&self, group: usize) -> impl Iterator<Item = &LayerCache> {
        let layers = self.layers.iter().zip(&self.groups).filter(move |(_, of)| **of == group);
        layers.filter_map(|(layer, _)| layer.as_ref())
    }

    /// Bytes of keys and values.
    pub(crate) fn bytes(&self) -> u64 {
        self.layers.iter().flatten().flat_map(|layer| &layer.halves).map(CudaBuffer::bytes).sum()
    }
}
