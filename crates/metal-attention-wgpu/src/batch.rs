//! A batch of tokens as the kernels read it.

use metal_attention_model::{BatchToken, PAGE};

use crate::device::WgpuDevice;
use crate::error::WgpuError;

/// The words of the batch buffer, `[1 + n_tokens, 4]`: first (number of tokens, number of wanted tokens, 0, 0), then
/// for each token (id, position, sequence, w), where the `i`-th `w` is the index of the `i`-th token whose logits are
/// wanted. Kernels that use the KV cache need more: see [`BatchBuffer`].
pub fn batch_words(tokens: &[BatchToken]) -> Vec<[u32; 4]> {
    let wanted: Vec<u32> = (0u32..).zip(tokens).filter(|(_, t)| t.logits).map(|(i, _)| i).collect();
    let mut words = vec![[tokens.len() as u32, wanted.len() as u32, 0, 0]];
    words.extend(
        tokens.iter().enumerate().map(|(i, t)| [t.id, t.pos as u32, t.seq as u32, wanted.get(i).copied().unwrap_or(0)]),
    );
    words
}

/// A batch in the GPU's memory: the words of [`batch_words`], and after room for the most tokens the page table of the
/// KV cache, `[n_seq, n_groups, pages a sequence has room for]`. The table's place and the width of a sequence's row are
/// the last words of the first vector. A group is layers that have their pages in common.
#[derive(Debug)]
pub struct BatchBuffer {
    buffer: wgpu::Buffer,
    /// The first vector of the page table.
    table: u32,
    pages_of_a_sequence: u32,
    n_ctx: usize,
    /// Pages of each group.
    n_pages: Vec<usize>,
    /// The pages of each sequence for each group, `[n_seq, n_groups]`, as far as they were written.
    written: Vec<Vec<u32>>,
}

impl BatchBuffer {
    /// Room for `n_tokens` tokens, of `n_seq` sequences of at most `n_ctx` positions; `n_pages`: how many pages the cache has
    /// for each group of layers.
    pub fn new(
        gpu: &WgpuDevice,
        n_tokens: usize,
        n_seq: usize,
        n_ctx: usize,
        n_pages: &[usize],
    ) -> Result<Self, WgpuError> {
        let (table, pages, lists) =
            (1 + n_tokens as u64, n_ctx.div_ceil(PAGE) as u64, n_seq.saturating_mul(n_pages.len()));
        let bytes = pages.saturating_mul(lists as u64).saturating_mul(4).saturating_add(16 * table);
        let buffer = gpu.buffer("a batch and the page table", bytes)?;
        Ok(Self {
            buffer,
            table: table as u32,
            pages_of_a_sequence: pages as u32,
            n_ctx,
            n_pages: n_pages.to_vec(),
            written: vec![Vec::new(); lists],
        })
    }

    /// The buffer, to bind.
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    /// Makes `tokens` the batch of the next submission.
    ///
    /// # Panics
    /// When there are more than there is room for, or one of another sequence or position: shaders take it that there are
    /// none.
    pub fn write_tokens(&self, gpu: &WgpuDevice, tokens: &[BatchToken]) {
        assert!(tokens.len() < self.table as usize, "{} tokens, {} vectors before the table", tokens.len(), self.table);
        let n_seq = self.written.len() / self.n_pages.len();
        let known = |t: &BatchToken| t.seq < n_seq && t.pos < self.n_ctx;
        assert!(tokens.iter().all(known), "a token of no sequence or position: {tokens:?}");
        let mut words = batch_words(tokens);
        words[0][2..].copy_from_slice(&[self.table, self.n_pages.len() as u32 * self.pages_of_a_sequence]);
        gpu.write(&self.buffer, &words);
    }

    /// Makes `pages` the pages of sequence `seq` for a group of layers from the next submission on. Only what has changed is
    /// sent to the GPU.
    ///
    /// # Panics
    /// When there are more than there is room for, or one that the cache has not: shaders take it that there are none.
    pub fn write_pages(&mut self, gpu: &WgpuDevice, group: usize, seq: usize, pages: &[u32]) {
        assert!(pages.len() <= self.pages_of_a_sequence as usize, "{} pages of a sequence", pages.len());
        let (n_pages, list) = (self.n_pages[group], seq * self.n_pages.len() + group);
        let written = &mut self.written[list];
        let same = written.iter().zip(pages).take_while(|(a, b)| a == b).count();
        if same < pages.len() {
            assert!(pages[same..].iter().all(|&page| (page as usize) < n_pages), "pages {pages:?} of {n_pages}");
            let word = 4 * u64::from(self.table) + u64::from(self.pages_of_a_sequence) * list as u64 + same as u64;
            gpu.write_at(&self.buffer, 4 * word, &pages[same..]);
            written.truncate(same);
            written.extend_from_slice(&pages[same..]);
        }
    }
}
