//! Top-k: the largest logits with their ids. Workgroups sort chunks of candidates; further stages sort the best of each
//! chunk until one list is left.

use metal_attention_model::TopK;

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// The largest `k` of [`top_k`].
pub const MAX_TOP_K: usize = 128;

/// Candidates that a workgroup sorts, 8 bytes each in its memory.
const CHUNK: usize = 2048;

/// The number of lists of `k` candidates after each stage, down to one.
fn lists(n_vocab: usize, k: usize) -> Vec<usize> {
    let mut lists = vec![n_vocab.div_ceil(CHUNK)];
    while let Some(&n) = lists.last().filter(|&&n| n > 1) {
        lists.push(n.div_ceil(CHUNK / k));
    }
    lists
}

/// Candidates of a row in `scratch`: those after all stages but the last.
fn row_items(lists: &[usize], k: usize) -> usize {
    k * lists[..lists.len() - 1].iter().sum::<usize>()
}

/// Bytes of the `scratch` of [`top_k`] for up to `n_rows` rows.
pub fn top_k_scratch_bytes(n_vocab: usize, k: usize, n_rows: usize) -> u64 {
    (row_items(&lists(n_vocab, k), k) * n_rows * 8) as u64
}

/// The `k` largest of `logits[i]` for each output row, the highest first, the lowest id first among equals, without
/// NaN. `k` is a power of two from 2 to [`MAX_TOP_K`]. `logits` is `[n_outputs, n_vocab]`; `best` receives
/// `[n_outputs, k, 2]` u32, which [`top_k_list`] reads.
///
/// # Panics
/// If `k` is not such a power of two.
pub fn top_k(
    gpu: &WgpuDevice,
    n_vocab: usize,
    k: usize,
    logits: &wgpu::Buffer,
    scratch: &wgpu::Buffer,
    best: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, WgpuError> {
    let lists = lists(n_vocab, k);
    keys(n_vocab, k)
        .iter()
        .enumerate()
        .map(|(stage, key)| {
            let last = stage + 1 == lists.len();
            let scratch = (scratch as &dyn Bind, AccessRange::Outputs(8 * row_items(&lists, k) as u64));
            let best = (best as &dyn Bind, AccessRange::Outputs(8 * k as u64));
            let logits = (logits as &dyn Bind, AccessRange::Outputs(4 * n_vocab as u64));
            let buffers: &[(&dyn Bind, AccessRange)] = match stage {
                0 => &[logits, if last { best } else { scratch }],
                _ if last => &[scratch, best],
                _ => &[scratch],
            };
            Dispatch::new(
                gpu,
                key,
                buffers,
                [GridExtent::Fixed(lists[stage] as u32), GridExtent::Outputs(1), GridExtent::Fixed(1)],
            )
        })
        .collect()
}

/// The list in one row of `best`, written by [`top_k`]: pairs of (sort key, id). Shorter than `k` if fewer logits are
/// numbers.
pub fn top_k_list(row: &[[u32; 2]]) -> TopK {
    let bits = |key: u32| if key >> 31 == 1 { key & 0x7fff_ffff } else { !key };
    row.iter().take_while(|[key, _]| *key > 0).map(|&[key, id]| (id, f32::from_bits(bits(key)))).collect()
}

fn keys(n_vocab: usize, k: usize) -> Vec<PipelineKey> {
    assert!(k.is_power_of_two() && (2..=MAX_TOP_K).contains(&k), "top_k finds 2, 4, ... {MAX_TOP_K} logits, not {k}");
    let lists = lists(n_vocab, k);
    // Without further stages the first one writes to `best`, with one list for each row.
    let row_items = if lists.len() == 1 { k } else { row_items(&lists, k) };
    let mut from = 0;
    let mut keys = vec![PipelineKey::new(
        "top_k_chunks",
        [("k", k.into()), ("n_items", CHUNK.into()), ("n_vocab", n_vocab.into()), ("row_items", row_items.into())],
    )];
    for stage in 1..lists.len() {
        let n_lists = lists[stage - 1];
        let last = stage + 1 == lists.len();
        let key = PipelineKey::new(
            "top_k",
            [
                ("k", k.into()),
                ("n_items", (n_lists.next_power_of_two() * k).min(CHUNK).into()),
                ("row_items", row_items.into()),
                ("n_lists", n_lists.into()),
                ("from", from.into()),
                ("last", last.into()),
            ],
        );
        keys.push(if last { key } else { key.named("top_k_merge") });
        from += n_lists * k;
    }
    keys
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    // Enough logits to need every stage.
    keys(151_936, MAX_TOP_K)
}
