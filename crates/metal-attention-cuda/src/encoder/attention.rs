//! Attention of encoders: each query of a segment to all of its keys. A block takes a tile of queries and a head.

use metal_attention_model::vision::AttentionSegment;

use super::ops::{CudaEncoderOps, row_grid};
use super::rows::CudaRows;
use crate::CudaError;
use crate::args::{EncoderAttentionArgs, EncoderHeadsArgs, EncoderTileArgs, EncoderUnitsArgs};
use crate::kernels::{self, EntryPoint};
use crate::launch::LaunchGrid;
use crate::slice::{DevicePtr, F16};

/// The kernels of attention.
#[derive(Debug, Clone, Copy)]
pub(crate) enum AttentionPlan {
    /// In F32.
    F32 {
        /// Elements of a head.
        head_dim: usize,
    },
    /// On the tensor cores, with F16 inputs.
    OnUnits(UnitsPlan),
}

/// Kernels on the tensor cores.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UnitsPlan {
    /// Attention.
    pub(crate) entry: EntryPoint<EncoderUnitsArgs>,
    /// The conversion of keys and values to F16.
    pub(crate) heads: EntryPoint<EncoderHeadsArgs>,
    /// Elements of a head of keys or values, with the zeros behind it.
    pub(crate) padded: usize,
    /// Most queries of a tile.
    queries: usize,
    /// Whether these are the kernels with warpgroup instructions.
    is_wide: bool,
}

/// Queries of a block of the kernel in F32.
const F32_QUERIES: usize = 32;
/// Keys of a stage of the kernels on the tensor cores, and their stages.
const STAGED_KEYS: usize = 64;
const STAGES: usize = 2;
/// The same of the kernels with warpgroup instructions.
const WIDE_STAGED_KEYS: usize = 128;
const WIDE_STAGES: usize = 4;
/// Keys of a panel of these kernels, and elements of a panel of a key.
const WIDE_PANEL: usize = 64;
/// Queries of a segment, on average, from which on kernels with warpgroup instructions are faster.
const WIDE_QUERIES: usize = 128;
/// Most elements of a head.
const MAX_HEAD: usize = 256;

impl AttentionPlan {
    /// The kernels for heads of `head_dim` elements. `exact`: in F32. `has_wgmma`: whether there are warpgroup instructions for segments
    /// of many queries.
    ///
    /// # Errors
    ///
    /// There is none for heads of an odd number of elements, or of more than 256.
    pub(crate) fn new(
        head_dim: usize,
        exact: bool,
        has_wgmma: bool,
        segments: &[AttentionSegment],
    ) -> Result<Self, CudaError> {
        if head_dim == 0 || !head_dim.is_multiple_of(2) || head_dim > MAX_HEAD {
            return Err(CudaError::UnsupportedPart { part: "a picture encoder with heads of that many elements" });
        }
        let n_queries: usize = segments.iter().map(|segment| segment.queries.len()).sum();
        let is_wide = has_wgmma && n_queries >= WIDE_QUERIES * segments.len();
        let [of_64, of_80, of_128] = kernels::ENCODER_ATTENTION_ON_UNITS;
        let [wide_64, wide_80] = kernels::ENCODER_ATTENTION_WIDE;
        let [heads_64, heads_80] = kernels::ENCODER_HEADS_WIDE;
        let on_units = |entry, padded, queries| {
            Self::OnUnits(UnitsPlan { entry, heads: kernels::ENCODER_HEADS, padded, queries, is_wide: false })
        };
        let wide =
            |entry, heads, padded| Self::OnUnits(UnitsPlan { entry, heads, padded, queries: 192, is_wide: true });
        Ok(match head_dim {
            _ if exact => Self::F32 { head_dim },
            1..=64 if is_wide => wide(wide_64, heads_64, 64),
            1..=64 => on_units(of_64, 64, 128),
            65..=80 if is_wide => wide(wide_80, heads_80, 80),
            65..=80 => on_units(of_80, 80, 128),
            81..=128 => on_units(of_128, 128, 64),
            _ => Self::F32 { head_dim },
        })
    }

    /// The tiles of segments.
    pub(crate) fn tiles(self, segments: &[AttentionSegment]) -> Vec<EncoderTileArgs> {
        let most = match self {
            Self::F32 { .. } => F32_QUERIES,
            Self::OnUnits(UnitsPlan { queries, .. }) => queries,
        };
        let tiles = segments.iter().flat_map(|AttentionSegment { queries, keys }| {
            queries.clone().step_by(most).map(move |query| EncoderTileArgs {
                query: query as u32,
                n: most.min(queries.end - query) as u32,
                key: keys.start as u32,
                n_keys: keys.len() as u32,
            })
        });
        tiles.collect()
    }
}

/// The kernel in F32.
pub(crate) const IN_F32: EntryPoint<EncoderAttentionArgs> = kernels::ENCODER_ATTENTION;

/// The grid of the kernel in F32.
pub(crate) fn f32_grid(head_dim: usize, n_tiles: usize, n_head: usize) -> LaunchGrid {
    let shared = F32_QUERIES * (2 * (head_dim + 2) + F32_QUERIES) * size_of::<f32>();
    LaunchGrid { blocks: [n_tiles, n_head, 1], threads: 256, shared }
}

impl UnitsPlan {
    /// Keys in memory: wide stages begin at a panel and may reach behind the last key.
    fn padded_keys(self, n_keys: usize) -> usize {
        if self.is_wide { (n_keys + WIDE_STAGED_KEYS).next_multiple_of(WIDE_PANEL) } else { n_keys }
    }

    /// F16 numbers of all converted keys, and of all values.
    pub(crate) fn heads_len(self, n_keys: usize, n_head_kv: usize) -> [usize; 2] {
        let of_key = if self.is_wide { self.padded.next_multiple_of(WIDE_PANEL) } else { self.padded };
        [of_key, self.padded].map(|elements| n_head_kv * elements * self.padded_keys(n_keys))
    }

    /// The grid of the conversion.
    pub(crate) fn heads_grid(self, n_sm: usize, n_keys: usize, n_head_kv: usize) -> LaunchGrid {
        if self.is_wide {
            let blocks = [self.padded_keys(n_keys) / WIDE_PANEL, n_head_kv, 1];
            return LaunchGrid { blocks, threads: 256, shared: 0 };
        }
        row_grid(n_sm, n_keys, n_head_kv * self.padded / 2)
    }

    /// The grid of attention.
    pub(crate) fn grid(self, n_tiles: usize, n_head: usize) -> LaunchGrid {
        let (stage, threads) = if self.is_wide {
            let of_key = self.padded.next_multiple_of(WIDE_PANEL) + self.padded;
            (1024 / WIDE_STAGES + WIDE_STAGED_KEYS * of_key * size_of::<u16>(), 512)
        } else {
            (2 * STAGED_KEYS * (self.padded + 8) * size_of::<u16>(), 128)
        };
        let stages = if self.is_wide { WIDE_STAGES } else { STAGES };
        LaunchGrid { blocks: [n_tiles, n_head, 1], threads, shared: stages * stage }
    }
}

impl CudaEncoderOps {
    /// Launches attention on the tensor cores.
    pub(super) fn attention_on_units(
        &mut self,
        plan: UnitsPlan,
        [q, k, v]: [&CudaRows; 3],
        (head_dim, scale): (usize, f32),
        tiles: &[EncoderTileArgs],
    ) -> Result<CudaRows, CudaError> {
        let n_head_kv = k.width / head_dim;
        let [of_keys, of_values] = plan.heads_len(k.n_rows, n_head_kv);
        let [k_heads, v_heads] = [self.memory.buffer::<F16>(of_keys)?, self.memory.buffer::<F16>(of_values)?];
        let args = EncoderHeadsArgs {
            k: k.slice().ptr(),
            v: v.slice().ptr(),
            k_heads: k_heads.ptr(),
            v_heads: v_heads.ptr(),
            n_keys: k.n_rows as u32,
            width: k.width as u32,
            head_dim: head_dim as u32,
            padded: plan.padded as u32,
        };
        let grid = plan.heads_grid(self.gpu.summary().n_sm, k.n_rows, n_head_kv);
        self.launcher(k.width).launch(plan.heads, "", grid, &args)?;
        let out = self.memory.rows(q.n_rows, q.width)?;
        // The output projection follows.
        let packed = if self.packs(q.n_rows) { Some(self.packed_rows(q.n_rows, q.width)?) } else { None };
        let grid = plan.grid(tiles.len(), q.width / head_dim);
        let tiles = self.memory.upload(tiles)?;
        let args = EncoderUnitsArgs {
            q: q.slice().ptr(),
            k_heads: k_heads.ptr(),
            v_heads: v_heads.ptr(),
            out: out.slice().ptr(),
            packed: packed.as_ref().map_or(DevicePtr::NULL, |packed| packed.ptr()),
            tiles: tiles.ptr(),
            n_queries: q.n_rows as u32,
            n_keys: k.n_rows as u32,
            width: q.width as u32,
            kv_width: k.width as u32,
            head_dim: head_dim as u32,
            n_token_tiles: self.packed_order(q.n_rows, q.width),
            scale,
            unused: 0,
        };
        self.launcher(q.width).launch(plan.entry, "", grid, &args)?;
        Ok(match packed {
            Some(packed) => out.with_packed(packed),
            None => out,
        })
    }

    /// Launches attention in F32.
    pub(super) fn attention_in_f32(
        &mut self,
        [q, k, v]: [&CudaRows; 3],
        (head_dim, scale): (usize, f32),
        tiles: &[EncoderTileArgs],
    ) -> Result<CudaRows, CudaError> {
        let out = self.memory.rows(q.n_rows, q.width)?;
        let grid = f32_grid(head_dim, tiles.len(), q.width / head_dim);
        let tiles = self.memory.upload(tiles)?;
        let args = EncoderAttentionArgs {
            q: q.slice().ptr(),
            k: k.slice().ptr(),
            v: v.slice().ptr(),
            out: out.slice().ptr(),
            tiles: tiles.ptr(),
            n_queries: q.n_rows as u32,
            n_keys: k.n_rows as u32,
            width: q.width as u32,
            kv_width: k.width as u32,
            head_dim: head_dim as u32,
            scale,
        };
        self.launcher(q.width).launch(IN_F32, "", grid, &args)?;
        Ok(out)
    }
}
