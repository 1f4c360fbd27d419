//! Embedding lookup, with dequantisation of the table's rows.

use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::matrix::{WgpuMatrix, type_name};
use crate::pipelines::PipelineKey;

/// Lanes of a workgroup, each with 8 elements of a row.
const THREADS: usize = 64;

/// `x[t] = table[id(t)]` for each token: `table` is `[n_vocab, n_embd]`, `x` `[n_tokens, n_embd]`. The row of an id
/// outside of the vocabulary is not written. `spares_rows`: neither are rows that are given
/// ([`InputPlace::has_row`](crate::InputPlace::has_row)).
pub fn embedding(
    gpu: &WgpuDevice,
    table: &WgpuMatrix,
    x: &wgpu::Buffer,
    spares_rows: bool,
    batch: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, WgpuError> {
    let n_groups = table.n_in().div_ceil(8).div_ceil(THREADS) as u32;
    let parts = table.parts().iter();
    parts
        .map(|part| {
            let key = key(type_name(part.ty), table.n_in(), part.n_rows, part.first_row, part.row_step, spares_rows);
            let grid = [GridExtent::Tokens(1), GridExtent::Fixed(n_groups), GridExtent::Fixed(1)];
            let row = AccessRange::Tokens(4 * table.n_in() as u64);
            let weights = AccessRange::Fixed(part.bytes(table.n_in()));
            Dispatch::new(gpu, &key, &[(&part.buffer, weights), (x, row), (batch, AccessRange::Batch)], grid)
        })
        .collect()
}

fn key(
    ty: &'static str,
    n_in: usize,
    n_rows: usize,
    first_row: usize,
    row_step: usize,
    spares_rows: bool,
) -> PipelineKey {
    let constants = [
        ("type", ty.into()),
        ("n_in", n_in.into()),
        ("n_rows", n_rows.into()),
        ("first_row", first_row.into()),
        ("row_step", row_step.into()),
        ("spares_rows", spares_rows.into()),
        ("threads", THREADS.into()),
    ];
    PipelineKey::new("embedding", constants).named(format!("embedding_{ty}"))
}

/// The scalar twin: the rows of `table`, dequantised `[n_vocab, n_embd]`, for `ids`.
pub fn embedding_twin(table: &[f32], n_embd: usize, ids: &[u32]) -> Vec<f32> {
    ids.iter().flat_map(|&id| &table[id as usize * n_embd..][..n_embd]).copied().collect()
}

/// The keys of all kernels, with the sizes of a small model.
pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let types = metal_attention_gguf::TensorType::ALL.iter();
    types.map(|&ty| key(type_name(ty), 512.max(ty.block_len()), 49_152, 0, 1, true)).collect()
}
