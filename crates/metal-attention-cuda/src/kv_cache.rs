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
    /// Keys and values of each layer, and the group of layers it belongs to.
    layers: Vec<([CudaBuffer; 2], usize)>,
    /// Bytes of a page of each layer's keys and of its values.
    page_bytes: Vec<[u64; 2]>,
    /// `[n_groups, n_seq, most]`: pages of sequences, and what of them the device has.
    table: CudaBuffer,
    sent: Vec<Vec<u32>>,
    most: usize,
    n_seq: usize,
    pub(crate) cache_type: CacheType,
}

impl CudaKvCache {
    /// An empty cache. Rows of latent attention are keys, of which values are a part.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        spec: &ModelSpec,
        groups: &CacheGroups,
        cache_type: CacheType,
    ) -> Result<Self, CudaError> {
        let room = groups.room();
        let most = room.n_positions().div_ceil(PAGE);
        let n_groups = groups.groups().len();
        let table = gpu.zeros("the page table", (4 * n_groups * room.n_seq * most) as u64)?;
        let (mut layers, mut page_bytes) = (Vec::new(), Vec::new());
        for (i, layer) in spec.layers.iter().enumerate() {
            let has_values = layer.mixer.latent_attention().is_none();
            let of = layer.mixer.cached().map_or([0; 2], |c| [c.key_dim, if has_values { c.value_dim } else { 0 }]);
            let n_head = layer.mixer.cached().map_or(0, |c| c.n_head_kv);
            let bytes = of.map(|dim| (PAGE * n_head * dim * cache_type.bytes()) as u64);
            let zeros = |bytes: u64| gpu.zeros("the KV cache", bytes.saturating_mul(groups.n_pages(i) as u64));
            layers.push(([zeros(bytes[0])?, zeros(bytes[1])?], groups.of_layer(i)));
            page_bytes.push(bytes);
        }
        let sent = vec![Vec::new(); n_groups * room.n_seq];
        Ok(Self { pages: PageTable::new(groups), layers, page_bytes, table, sent, most, n_seq: room.n_seq, cache_type })
    }

    /// Keys and values of layer `i`.
    pub(crate) fn of_layer(&self, i: usize) -> [u64; 2] {
        [self.layers[i].0[0].ptr(), self.layers[i].0[1].ptr()]
    }

    /// The pages of layer `i`.
    pub(crate) fn pages_of_layer(&self, i: usize) -> PagesArgs {
        let group = self.layers[i].1;
        PagesArgs {
            pages: self.table.ptr() + (4 * group * self.n_seq * self.most) as u64,
            n_pages: self.most as u32,
            unused: 0,
        }
    }

    /// Finds pages for `batch`, and copies those that are shared.
    pub(crate) fn append(&mut self, batch: &[BatchToken]) -> Result<(), CudaError> {
        for copy in self.pages.append(batch) {
            for ((buffers, group), bytes) in self.layers.iter().zip(&self.page_bytes) {
                if *group == copy.group {
                    for (buffer, &bytes) in buffers.iter().zip(bytes) {
                        buffer.copy_within(u64::from(copy.from) * bytes, u64::from(copy.to) * bytes, bytes)?;
                    }
                }
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

    /// Bytes of keys and values.
    pub(crate) fn bytes(&self) -> u64 {
        self.layers.iter().flat_map(|(buffers, _)| buffers).map(CudaBuffer::bytes).sum()
    }
}
