//! Attention of encoders: each query of a segment to all of its keys. A block takes a tile of queries and a head.

use metal_attention_model::vision::AttentionSegment;

use super::rows::CudaRows;
use crate::CudaError;
use crate::args::{EncoderAttentionArgs, EncoderTileArgs};
use crate::kernels::{self, EntryPoint};
use crate::launch::LaunchGrid;
use crate::slice::{DevicePtr, DeviceSlice};

/// Most queries of a tile.
const TILE_QUERIES: usize = 64;
/// Queries of a block of the kernel in F32, which takes half a tile, and keys that it stages.
const F32_ROWS: usize = 32;
/// Keys that a block of the kernels on the tensor cores stages.
const STAGED_KEYS: usize = 64;
/// Elements of the heads that the kernels on the tensor cores take at most, in the order of their family.
const UNITS_HEADS: [usize; 3] = [64, 80, 128];
/// Most elements of a head.
const MAX_HEAD: usize = 256;

/// How attention is launched.
#[derive(Debug)]
pub(crate) struct AttentionPlan {
    /// The kernel.
    pub(crate) entry: EntryPoint<EncoderAttentionArgs>,
    /// Blocks of a tile and a head.
    blocks: usize,
    /// Threads of a block.
    threads: usize,
    /// Shared memory of a block.
    shared: usize,
}

impl AttentionPlan {
    /// The kernel for heads of `head_dim` elements. `exact`: in F32.
    ///
    /// # Errors
    ///
    /// There is none for heads of an odd number of elements, or of more than 256.
    pub(crate) fn new(head_dim: usize, exact: bool) -> Result<Self, CudaError> {
        if head_dim == 0 || !head_dim.is_multiple_of(2) || head_dim > MAX_HEAD {
            return Err(CudaError::UnsupportedPart { part: "a picture encoder with heads of that many elements" });
        }
        let mut on_units = UNITS_HEADS.into_iter().zip(kernels::ENCODER_ATTENTION_ON_UNITS);
        Ok(if let Some((widest, entry)) = on_units.find(|(widest, _)| !exact && head_dim <= *widest) {
            let shared = 2 * STAGED_KEYS * (widest + 8) * size_of::<u16>();
            Self { entry, blocks: 1, threads: 128, shared }
        } else {
            let shared = F32_ROWS * (2 * (head_dim + 2) + F32_ROWS) * size_of::<f32>();
            Self { entry: kernels::ENCODER_ATTENTION, blocks: TILE_QUERIES / F32_ROWS, threads: 256, shared }
        })
    }

    /// The grid for `n_tiles` tiles.
    pub(crate) fn grid(&self, n_tiles: usize, n_head: usize) -> LaunchGrid {
        LaunchGrid { blocks: [n_tiles, n_head, self.blocks], threads: self.threads, shared: self.shared }
    }
}

/// The tiles of segments.
pub(crate) fn tiles(segments: &[AttentionSegment]) -> Vec<EncoderTileArgs> {
    let tiles = segments.iter().flat_map(|AttentionSegment { queries, keys }| {
        queries.clone().step_by(TILE_QUERIES).map(|query| EncoderTileArgs {
            query: query as u32,
            n: TILE_QUERIES.min(queries.end - query) as u32,
            key: keys.start as u32,
            n_keys: keys.len() as u32,
        })
    });
    tiles.collect()
}

/// The arguments for rows `q`, `k` and `v`. The result has the shape of `q`.
pub(super) fn args(
    [q, k, v]: [&CudaRows; 3],
    out: DeviceSlice<f32>,
    tiles: DevicePtr<EncoderTileArgs>,
    head_dim: usize,
    scale: f32,
) -> EncoderAttentionArgs {
    EncoderAttentionArgs {
        q: q.slice().ptr(),
        k: k.slice().ptr(),
        v: v.slice().ptr(),
        out: out.ptr(),
        tiles,
        n_queries: q.n_rows as u32,
        n_keys: k.n_rows as u32,
        width: q.width as u32,
        kv_width: k.width as u32,
        head_dim: head_dim as u32,
        scale,
    }
}
