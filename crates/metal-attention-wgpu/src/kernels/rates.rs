//! Kernels that do one thing only, to see how fast a device does it at best.

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

/// Results of a dispatch with `groups` workgroups: the length of its `sums`.
pub fn rate_sums(groups: usize) -> usize {
    THREADS * groups
}

/// Reads the first `n` vectors of 16 bytes of `words`: every thread those that are [`rate_sums`] apart, and `sums`
/// `[rate_sums(groups)]` u32 gets the wrapping sum of their words.
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

/// Multiplies 32-bit floats: every thread `steps` (a multiple of 4) times 32 of them, each with one of the first four
/// `operands` and added to it. `sums` `[rate_sums(groups)]` f32 gets each thread's results, added up: with operands of 1
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

/// Multiplications of [`rate_floats`].
pub fn rate_floats_work(steps: usize, groups: usize) -> u64 {
    (32 * steps * THREADS * groups) as u64
}

/// Multiplies on matrix units: every subgroup `steps` (a multiple of 4) times eight pairs of matrices filled with the
/// first four `operands`. `sums` `[rate_sums(groups)]` f32 gets the elements of the results, added up by lane. `None` on
/// a device without matrix units that kernels use.
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

/// Multiplications of [`rate_matrix`]; `None` where there are no matrix units.
pub fn rate_matrix_work(features: ShaderFeatures, steps: usize, groups: usize) -> Option<u64> {
    matrix_side(features).map(|side| (8 * side.pow(3) * steps * n_subgroups(features) * groups) as u64)
}

/// Rows of the matrices that the device's matrix units multiply.
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
    // The threads are those of the kernel without matrix units, which stands in where its text is shown.
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
