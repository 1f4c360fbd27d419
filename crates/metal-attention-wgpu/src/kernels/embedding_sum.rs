//! The sum of a token's embedding with those of its type and position.

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// `x[t] = scale * x[t] + token_type + positions[position(t)]` for each token, in place: `x` is `[n_tokens, n]`,
/// `token_type` `[n]`, `positions` `[n_positions, n]`, given with `n_positions`. Absent ones are not added. Rows that are
/// given ([`InputPlace::has_row`](crate::InputPlace::has_row)) are not multiplied by `scale`.
pub fn embedding_sum(
    gpu: &WgpuDevice,
    n: usize,
    scale: f32,
    x: &wgpu::Buffer,
    token_type: Option<&wgpu::Buffer>,
    positions: Option<(&wgpu::Buffer, usize)>,
    batch: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let mut buffers: Vec<(&dyn Bind, AccessRange)> = vec![(x, AccessRange::Tokens(4 * n as u64))];
    buffers.extend(token_type.map(|row| (row as &dyn Bind, AccessRange::floats(n))));
    buffers.push((batch, AccessRange::Batch));
    buffers.extend(positions.map(|(table, n_positions)| (table as &dyn Bind, AccessRange::floats(n_positions * n))));
    let grid = [GridExtent::Fixed(n.div_ceil(256) as u32), GridExtent::Tokens(1), GridExtent::Fixed(1)];
    Dispatch::new(gpu, &key(n, scale, token_type.is_some(), positions.map_or(0, |(_, n)| n)), &buffers, grid)
}

fn key(n: usize, scale: f32, types: bool, n_positions: usize) -> PipelineKey {
    let constants =
        [("n", n.into()), ("scale", scale.into()), ("types", types.into()), ("n_positions", n_positions.into())];
    PipelineKey::new("embedding_sum", constants)
}

/// The scalar twin for one row, with the row of its position.
pub fn embedding_sum_twin(scale: f32, x: &[f32], token_type: &[f32], position: &[f32]) -> Vec<f32> {
    let at = |row: &[f32], i: usize| row.get(i).map_or(0.0, |&v| f64::from(v));
    let sum = |(i, &v): (usize, &f32)| (f64::from(v) * f64::from(scale) + at(token_type, i) + at(position, i)) as f32;
    x.iter().enumerate().map(sum).collect()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![key(768, 1.0, true, 512)]
}
