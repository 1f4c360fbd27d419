//! Kernels that measure a device: each does one thing as fast as possible.

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;
use crate::shader::ShaderFeatures;

/// Threads of a workgroup.
const THREADS: usize = 256;
/// Most subgroups of a workgroup of [`rate_matrix`].
const MAX_SUBGROUPS: usize = 8;

/// Results of a dispatch with `groups` workgroups: the elements of its `sums`.
pub fn rate_sums(groups: usize) -> usize {
    THREADS * groups
}

/// Reads the first `n` vectors of 16 bytes of `words`. Every thread reads those that are [`rate_sums`] apart and writes
/// the wrapping sum of their words to `sums`, `[rate_sums(groups)]` u32.
pub fn rate_read(
    gpu: &WgpuDevice,
    n: usize,
    groups: usize,
    words: &wgpu::Buffer,
    sums: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let key = PipelineKey::new("rate_read", [("n", n.into()), ("threads", THREADS.into()), ("groups", groups.into())]);
    Dispatch::new(
        gpu,
        &key,
        &[(words, AccessRange::Fixed(16 * n as u64)), (sums, AccessRange::floats(rate_sums(groups)))],
        grid(groups),
    )
}

/// Multiplies 32-bit floats: every thread does `steps` (a multiple of 4) times 32 multiply-adds with the first four
/// `operands` and writes the sum of its results to `sums`, `[rate_sums(groups)]` f32. With operands of 1 it is
/// `4 (28 + 8 steps)`.
pub fn rate_floats(
    gpu: &WgpuDevice,
    steps: usize,
    groups: usize,
    operands: &wgpu::Buffer,
    sums: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let key = PipelineKey::new("rate_floats", [("steps", steps.into()), ("threads", THREADS.into())]);
    Dispatch::new(
        gpu,
        &key,
        &[(operands, AccessRange::floats(4)), (sums, AccessRange::floats(rate_sums(groups)))],
        grid(groups),
    )
}

/// Multiply-adds of [`rate_floats`].
pub fn rate_floats_work(steps: usize, groups: usize) -> u64 {
    (32 * steps * THREADS * groups) as u64
}

/// Multiplies on matrix units: every subgroup does `steps` (a multiple of 4) times eight products of matrices filled
/// with the first four `operands`, and every lane writes the sum of its elements of the results to `sums`,
/// `[rate_sums(groups)]` f32. `None`: the device has no matrix units that kernels use.
pub fn rate_matrix(
    gpu: &WgpuDevice,
    steps: usize,
    groups: usize,
    operands: &wgpu::Buffer,
    sums: &wgpu::Buffer,
) -> Result<Option<Dispatch>, WgpuError> {
    if matrix_side(gpu.features()).is_none() {
        return Ok(None);
    }
    let buffers: [(&dyn Bind, AccessRange); 2] =
        [(operands, AccessRange::floats(4)), (sums, AccessRange::floats(rate_sums(groups)))];
    Dispatch::new(gpu, &matrix_key(gpu.features(), steps), &buffers, grid(groups)).map(Some)
}

/// Multiply-adds of [`rate_matrix`]; `None` without matrix units.
pub fn rate_matrix_work(features: ShaderFeatures, steps: usize, groups: usize) -> Option<u64> {
    matrix_side(features).map(|side| (8 * side.pow(3) * steps * n_subgroups(features) * groups) as u64)
}

/// The side of the matrices that the device's matrix units multiply.
fn matrix_side(features: ShaderFeatures) -> Option<usize> {
    match features {
        ShaderFeatures { subgroup_size: 0, .. } => None,
        ShaderFeatures { cooperative_f16: true, .. } => Some(16),
        ShaderFeatures { cooperative_f32: true, .. } => Some(8),
        _ => None,
    }
}

/// Subgroups of a workgroup of [`rate_matrix`].
fn n_subgroups(features: ShaderFeatures) -> usize {
    (THREADS / features.subgroup_size.max(1) as usize).clamp(1, MAX_SUBGROUPS)
}

fn matrix_key(features: ShaderFeatures, steps: usize) -> PipelineKey {
    // Without matrix units a kernel with the usual threads stands in when the source is listed.
    let constants =
        [("steps", steps.into()), ("n_subgroups", n_subgroups(features).into()), ("threads", THREADS.into())];
    PipelineKey::new("rate_matrix", constants)
}

fn grid(groups: usize) -> [GridExtent; 3] {
    [GridExtent::Fixed(groups as u32), GridExtent::Fixed(1), GridExtent::Fixed(1)]
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![
        PipelineKey::new(
            "rate_read",
            [("n", 4096_usize.into()), ("threads", THREADS.into()), ("groups", 4_usize.into())],
        ),
        PipelineKey::new("rate_floats", [("steps", 64_usize.into()), ("threads", THREADS.into())]),
        matrix_key(ShaderFeatures { subgroup_size: 32, ..Default::default() }, 64),
    ]
}
