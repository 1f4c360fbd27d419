//! Copies of buffers.

use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, Extent, Reach};
use crate::error::WgpuError;
use crate::pso::PsoKey;

const THREADS: usize = 256;

/// Copies the first `n` words of `source` to `destination`.
pub fn buffer_copy(
    gpu: &WgpuDevice,
    n: usize,
    source: &wgpu::Buffer,
    destination: &wgpu::Buffer,
) -> Result<Dispatch, WgpuError> {
    let words = Reach::Fixed(4 * n as u64);
    let grid = [Extent::Fixed(groups(n) as u32), Extent::Fixed(1), Extent::Fixed(1)];
    Dispatch::new(gpu, &key(n), &[(source, words), (destination, words)], grid)
}

fn groups(n: usize) -> usize {
    n.div_ceil(THREADS).clamp(1, 4096)
}

fn key(n: usize) -> PsoKey {
    PsoKey::new("buffer_copy", [("n", n.into()), ("threads", THREADS.into()), ("groups", groups(n).into())])
}

pub(crate) fn catalogue() -> Vec<PsoKey> {
    vec![key(576)]
}
