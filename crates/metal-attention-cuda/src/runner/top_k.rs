//! The [`TOP_K`] highest logits of each output token, for sampling on the host (`top_k.cu`), in one launch for all rows.
//!
//! Each block selects the highest logits of a part of the vocabulary, and the last block of a row merges them. Logits are
//! compared by a sort key of 8 bytes.

use metal_attention_model::TopK;

use super::ModelRunner;
use crate::CudaError;
use crate::args::TopKArgs;
use crate::kernels;
use crate::launch::LaunchGrid;

/// Highest logits of each row that are computed: `TOP_K` of `kernels/top_k.cu`.
pub(crate) const TOP_K: usize = 128;
/// Threads of a block, which is also the most logits that a block selects.
const THREADS: usize = 256;
/// Logits of a thread.
const ITEMS: usize = 16;

/// Blocks of a row, and logits of each block but the last.
fn chunks(n_vocab: usize) -> (usize, usize) {
    let n = n_vocab.div_ceil(THREADS * ITEMS).max(1);
    (n, n_vocab.div_ceil(n))
}

/// Bytes of the logits that all blocks of a row select.
pub(crate) fn top_k_bytes(n_vocab: usize) -> usize {
    8 * THREADS * chunks(n_vocab).0
}

/// The grid for `n_rows` rows, and the logits of a block.
fn grid(n_vocab: usize, n_rows: usize) -> (LaunchGrid, u32) {
    let (n_chunks, chunk) = chunks(n_vocab);
    (LaunchGrid { blocks: [n_chunks, n_rows, 1], threads: THREADS, shared: 0 }, chunk as u32)
}

/// The ids and logits of a row of sort keys (`argmax_key` of `kernels/argmax.cuh`). A key is a number that rises with the logit in
/// its high half, and one that falls with the id in its low half; key 0 ends the list.
pub(crate) fn top_k_list(keys: &[u64]) -> TopK {
    let logit = |ordered: u32| f32::from_bits(if ordered >> 31 == 1 { ordered & (u32::MAX >> 1) } else { !ordered });
    keys.iter().take_while(|key| **key > 0).map(|key| (!*key as u32, logit((key >> 32) as u32))).collect()
}

impl ModelRunner {
    /// Launches the search for the [`TOP_K`] highest of each of `n_rows` rows of logits.
    pub(crate) fn top_k(&mut self, n_vocab: usize, n_rows: usize) -> Result<(), CudaError> {
        let (grid, chunk) = grid(n_vocab, n_rows);
        let args = TopKArgs {
            logits: self.buffers.logits.ptr(),
            lists: self.buffers.top_k_lists.ptr(),
            tickets: self.buffers.argmax_tickets.ptr(),
            best: self.buffers.top_k.ptr(),
            n_vocab: n_vocab as u32,
            chunk,
        };
        self.launch(kernels::TOP_K, "", grid, &args)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use metal_attention_model::highest;

    use super::*;
    use crate::CudaDevice;
    use crate::device::Readback;
    use crate::launch::LaunchOrder;

    /// A name, and a function from an index and a random number to a logit.
    type Kind = (&'static str, fn(usize, f32) -> f32);

    /// The result of the kernel for `logits` `[n_rows, n_vocab]`, launched twice in a row.
    fn lists(gpu: &Arc<CudaDevice>, logits: &[f32], n_vocab: usize) -> Vec<TopK> {
        let n_rows = logits.len() / n_vocab;
        let (grid, chunk) = grid(n_vocab, n_rows);
        let buffer = gpu.upload("logits", logits).unwrap();
        // Each buffer ends where the kernel should stop writing, and the counters are zero.
        let lists = gpu.buffer("lists", (top_k_bytes(n_vocab) * n_rows) as u64).unwrap();
        let best = gpu.buffer("best", (8 * TOP_K * n_rows) as u64).unwrap();
        let tickets = gpu.zeros("tickets", 4 * n_rows as u64).unwrap();
        let args = TopKArgs {
            logits: buffer.ptr(),
            lists: lists.ptr(),
            tickets: tickets.ptr(),
            best: best.ptr(),
            n_vocab: n_vocab as u32,
            chunk,
        };
        let kernel = gpu.kernel(kernels::TOP_K).unwrap();
        for _ in 0..2 {
            // SAFETY: the buffers have the sizes of the rows, and live until the result is read.
            unsafe { gpu.launch(kernel, grid, &args, LaunchOrder::Overlapped).unwrap() };
        }
        let mut readback = Readback::new(gpu, best.bytes()).unwrap();
        readback.copy(&best, best.bytes()).unwrap();
        let keys: &[u64] = bytemuck::cast_slice(readback.read(best.bytes()).unwrap());
        keys.chunks_exact(TOP_K).map(top_k_list).collect()
    }

    /// Random numbers between -1 and 1.
    fn random(seed: u64) -> impl Iterator<Item = f32> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        std::iter::repeat_with(move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
        })
    }

    #[test]
    fn cuda_lists_are_those_of_all_logits_sorted() {
        let Some(gpu) = CudaDevice::for_tests() else { return };
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        // Like logits; many equal ones; rising and falling, so that one block or one thread has all high ones; no comparable
        // numbers, or few; infinities and zeros of either sign.
        let kinds: [Kind; 11] = [
            ("random", |_, v| 20.0 * v),
            ("steep", |_, v| (9.0 * v).exp()),
            ("few values", |_, v| (4.0 * v).round()),
            ("rising", |i, _| i as f32),
            ("falling", |i, _| -(i as f32)),
            ("every 256th is high", |i, v| if i % 256 == 3 { 100.0 + v } else { v }),
            ("alike", |_, _| -0.25),
            ("NaN", |_, _| f32::NAN),
            ("mostly NaN", |i, v| if i % 97 == 5 { v } else { f32::NAN }),
            ("mostly -inf", |i, v| if i % 211 == 0 { v } else { f32::NEG_INFINITY }),
            ("zeros", |_, v| if v < 0.0 { -0.0 } else { 0.0 }),
        ];
        let check = |what: &str, n_vocab: usize, logits: &[f32]| {
            let got = lists(&gpu, logits, n_vocab);
            assert_eq!(got.len(), logits.len() / n_vocab);
            for (row, (got, logits)) in got.iter().zip(logits.chunks_exact(n_vocab)).enumerate() {
                assert!(*got == highest(logits, TOP_K), "{what}, row {row} of {n_vocab}: {got:?}");
            }
        };
        for n_vocab in [1, 5, 127, 128, 129, 256, 257, 1000, 4095, 4096, 4097, 8192, 32_000, 50_257, 128_256] {
            for (kind, make) in kinds {
                let logits: Vec<_> = (0..n_vocab).zip(random(n_vocab as u64)).map(|(i, v)| make(i, v)).collect();
                check(kind, n_vocab, &logits);
            }
        }
        let logits: Vec<_> = random(7).take(262_144).collect();
        check("the largest vocabulary", 262_144, &logits);
        for (n_rows, n_vocab) in [(256, 256), (64, 5001), (3, 49_152)] {
            let kinds = kinds.iter().cycle();
            let rows = kinds.take(n_rows).zip(0..).flat_map(|((_, make), row)| {
                random(row).take(n_vocab).enumerate().map(|(i, v)| make(i, v)).collect::<Vec<_>>()
            });
            check("many rows", n_vocab, &rows.collect::<Vec<_>>());
        }
        check("infinities", 6, &[inf, nan, -inf, 3.0, inf, -0.0]);
    }
}
