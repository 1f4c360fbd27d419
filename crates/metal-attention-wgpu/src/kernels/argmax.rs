//! Argmax: the id of the largest logit, in two dispatches.

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Logits of a workgroup of the first dispatch, four for each invocation.
const CHUNK: usize = 1024;

/// Bytes of the `scratch` of [`argmax`] for up to `n_rows` rows.
pub fn argmax_scratch_bytes(n_vocab: usize, n_rows: usize) -> u64 {
    (n_vocab.div_ceil(CHUNK) * n_rows * 8) as u64
}

/// `ids[i]` = index of the largest of `logits[i]`, for each output row: the lowest index among equals; NaN is skipped;
/// 0 if all are NaN. Identical to [`metal_attention_model::argmax`]. `logits` is `[n_outputs, n_vocab]`, `ids`
/// `[n_outputs]` u32.
///
/// With `advance`, a batch buffer, the `i`-th output token of the batch, which is text, gets the id `ids[i]` and the next
/// slot and position, so that the batch of a decode step becomes that of the next step.
pub fn argmax(
    gpu: &WgpuDevice,
    n_vocab: usize,
    logits: &wgpu::Buffer,
    scratch: &wgpu::Buffer,
    ids: &wgpu::Buffer,
    advance: Option<&wgpu::Buffer>,
) -> Result<Vec<Dispatch>, WgpuError> {
    let [first, second] = keys(n_vocab, advance.is_some());
    let one = GridExtent::Fixed(1);
    let n_chunks = n_vocab.div_ceil(CHUNK) as u32;
    let row = AccessRange::Outputs(4 * n_vocab as u64);
    let chunks = AccessRange::Outputs(8 * u64::from(n_chunks));
    let mut buffers: Vec<(&dyn Bind, AccessRange)> = vec![(scratch, chunks), (ids, AccessRange::Outputs(4))];
    buffers.extend(advance.map(|b| (b as &dyn Bind, AccessRange::Batch)));
    Ok(vec![
        Dispatch::new(
            gpu,
            &first,
            &[(logits, row), (scratch, chunks)],
            [GridExtent::Fixed(n_chunks), GridExtent::Outputs(1), one],
        )?,
        Dispatch::new(gpu, &second, &buffers, [GridExtent::Outputs(1), one, one])?,
    ])
}

fn keys(n_vocab: usize, advance: bool) -> [PipelineKey; 2] {
    let n_chunks = n_vocab.div_ceil(CHUNK);
    let name = if advance { "argmax_advance" } else { "argmax" };
    [
        PipelineKey::new("argmax_chunks", [("n_vocab", n_vocab.into()), ("chunk", CHUNK.into())]),
        PipelineKey::new("argmax", [("n_chunks", n_chunks.into()), ("advance", advance.into())]).named(name),
    ]
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let [chunks, argmax] = keys(49_152, false);
    let [_, advance] = keys(49_152, true);
    vec![chunks, argmax, advance]
}
