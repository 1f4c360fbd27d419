//! Copying a buffer with a kernel.

use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

const THREADS: usize = 256;

/// Copies the first `n` words of `source` to `destination`.
pub fn buffer_copy(
    gpu: &WgpuDevice,
    n: usize,
    source: &wgpu::Buffer,
    destination: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let words = AccessRange::Fixed(4 * n as u64);
    let grid = [GridExtent::Fixed(groups(n) as u32), GridExtent::Fixed(1), GridExtent::Fixed(1)];
    Dispatch::new(gpu, &key(n), &[(source, words), (destination, words)], grid)
}

fn groups(n: usize) -> usize {
    n.div_ceil(THREADS).clamp(1, 4096)
}

fn key(n: usize) -> PipelineKey {
    PipelineKey::new("buffer_copy", [("n", n.into()), ("threads", THREADS.into()), ("groups", groups(n).into())])
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    vec![key(576)]
}
