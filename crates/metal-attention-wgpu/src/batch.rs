//! The batch buffer: the tokens of a batch and the page tables of their sequences, as the kernels read them.

use metal_attention_model::{BatchToken, PAGE};

use crate::device::WgpuDevice;
use crate::error::WgpuError;

/// What RoPE, learned positions and the embedding table read of an input, beside its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InputPlace {
    /// The row of the RoPE tables that rotates it: its position, or in a model with RoPE sections a row behind those of text if
    /// the components of its position differ.
    pub rope_row: u32,
    /// The first component of its position.
    pub position: u32,
    /// Whether its embedding is given, in its row of the residual stream, so that the embedding table is not read.
    pub has_row: bool,
}

impl InputPlace {
    /// A token of text at `position`.
    pub fn of_text(position: u32) -> Self {
        Self { rope_row: position, position, has_row: false }
    }
}

/// The words of the batch buffer without page tables, `[1 + 2 n_tokens, 4]`. The first row is (number of tokens, number
/// of output tokens, 0, 0). Each token has two rows: (id, index in the sequence, sequence, w), where `w` in the row of token `i` is
/// the index of the `i`-th output token, one with [`BatchToken::output`] set; and (row of the RoPE tables, position, whether its
/// embedding is given), as `place(i)` returns, and the index behind the last token of its run: of neighbouring tokens of one
/// sequence whose indices in it follow each other. Kernels that use the KV cache need a [`BatchBuffer`].
pub fn batch_words_at(tokens: &[BatchToken], place: impl Fn(usize) -> InputPlace) -> Vec<[u32; 4]> {
    let outputs: Vec<u32> = (0u32..).zip(tokens).filter(|(_, t)| t.output).map(|(i, _)| i).collect();
    let mut words = Vec::with_capacity(1 + 2 * tokens.len());
    words.push([tokens.len() as u32, outputs.len() as u32, 0, 0]);
    for run in tokens.chunk_by(|a, b| a.seq == b.seq && a.pos + 1 == b.pos) {
        let first = words.len() / 2;
        let end = (first + run.len()) as u32;
        words.extend(run.iter().zip(first..).flat_map(|(t, i)| {
            let InputPlace { rope_row, position, has_row } = place(i);
            let output = outputs.get(i).copied().unwrap_or(0);
            [[t.id, t.pos as u32, t.seq as u32, output], [rope_row, position, has_row.into(), end]]
        }));
    }
    words
}

/// [`batch_words_at`] for text without spans before it.
pub fn batch_words(tokens: &[BatchToken]) -> Vec<[u32; 4]> {
    batch_words_at(tokens, |i| InputPlace::of_text(tokens[i].pos as u32))
}

/// A batch in GPU memory: rows as in [`batch_words_at`], with capacity for the largest batch, and after them the page
/// tables of all sequences, `[n_seq, n_groups, pages of a sequence at most]` words, one for each cache group. The last
/// two words of the first row are the index of the page tables' first vector of four words, and the words of one
/// sequence's tables.
#[derive(Debug)]
pub struct BatchBuffer {
    /// The buffer.
    buffer: wgpu::Buffer,
    /// Index of the first vector of four words of the page tables.
    table: u32,
    /// Most pages of a sequence.
    pages_of_a_sequence: u32,
    /// Most inputs.
    n_tokens: usize,
    /// Most inputs of a sequence, all of whose positions are below.
    n_ctx: usize,
    /// Pages of each cache group.
    n_pages: Vec<usize>,
    /// The page tables on the GPU, `[n_seq, n_groups]`.
    written: Vec<Vec<u32>>,
}

impl BatchBuffer {
    /// Makes the buffer for batches of up to `n_tokens` tokens, and `n_seq` sequences of up to `n_ctx` inputs and positions.
    /// `n_pages`: the pages of each cache group.
    pub fn new(
        gpu: &WgpuDevice,
        n_tokens: usize,
        n_seq: usize,
        n_ctx: usize,
        n_pages: &[usize],
    ) -> Result<Self, WgpuError> {
        let (table, pages, lists) =
            (1 + 2 * n_tokens as u64, n_ctx.div_ceil(PAGE) as u64, n_seq.saturating_mul(n_pages.len()));
        let bytes = pages.saturating_mul(lists as u64).saturating_mul(4).saturating_add(16 * table);
        let buffer = gpu.buffer("a batch and the page table", bytes)?;
        Ok(Self {
            buffer,
            table: table as u32,
            pages_of_a_sequence: pages as u32,
            n_tokens,
            n_ctx,
            n_pages: n_pages.to_vec(),
            written: vec![Vec::new(); lists],
        })
    }

    /// The GPU buffer.
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    /// Writes `tokens`, whose positions are their indices, as the batch of the next submission.
    ///
    /// # Panics
    /// As [`write_tokens_at`](Self::write_tokens_at).
    pub fn write_tokens(&self, gpu: &WgpuDevice, tokens: &[BatchToken]) {
        self.write_tokens_at(gpu, tokens, |i| InputPlace::of_text(tokens[i].pos as u32));
    }

    /// Writes `tokens` as the batch of the next submission. `place`: of each of them.
    ///
    /// # Panics
    /// If there are too many, or one has a sequence, index or position out of range: shaders use most of them as indices without
    /// checks.
    pub fn write_tokens_at(&self, gpu: &WgpuDevice, tokens: &[BatchToken], place: impl Fn(usize) -> InputPlace) {
        assert!(tokens.len() <= self.n_tokens, "{} tokens in a buffer for {}", tokens.len(), self.n_tokens);
        let n_seq = self.written.len() / self.n_pages.len();
        let known = |t: &BatchToken| t.seq < n_seq && t.pos < self.n_ctx;
        assert!(tokens.iter().all(known), "a token of no sequence or index: {tokens:?}");
        let mut words = batch_words_at(tokens, place);
        let rope_rows = self.n_ctx + self.n_tokens;
        let placed = |row: &[u32; 4]| (row[0] as usize) < rope_rows && (row[1] as usize) < self.n_ctx;
        assert!(words[1..].iter().skip(1).step_by(2).all(placed), "a position that no sequence reaches: {words:?}");
        words[0][2..].copy_from_slice(&[self.table, self.n_pages.len() as u32 * self.pages_of_a_sequence]);
        gpu.write(&self.buffer, &words);
    }

    /// Sets the page table of sequence `seq` for a cache group, from the next submission on. Only pages from the
    /// first one that differs from those on the GPU are written.
    ///
    /// # Panics
    /// If there are too many pages, or one is out of range: shaders use them as indices without checks.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_the_sequence_or_its_indices_do_not_go_on() {
        let token = |(seq, pos)| BatchToken { id: 7, seq, pos, output: pos == 5 };
        let tokens: Vec<_> = [(0, 4), (0, 5), (2, 5), (1, 6), (1, 7), (1, 8), (0, 6), (0, 8)].map(token).to_vec();
        let words = batch_words(&tokens);
        assert_eq!(words[0], [8, 2, 0, 0]);
        let ends: Vec<u32> = words[1..].iter().skip(1).step_by(2).map(|row| row[3]).collect();
        assert_eq!(ends, [2, 2, 3, 6, 6, 6, 7, 8]);
        // The second output token is the third token.
        assert_eq!(words[3], [7, 5, 0, 2]);
    }
}
