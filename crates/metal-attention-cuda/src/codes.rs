//! Repacking on the host, for the quantised tensor types without a weight layout of their own: as 8-bit codes, with an F32
//! scale and for some types an F32 minimum for every 16 columns. Every quantised type can be written so without loss. The order
//! in memory is that of the layouts `Codes` and `CodesAndMins` (`kernels/formats.cuh`).

use std::sync::{Mutex, PoisonError};

use metal_attention_gguf::TensorType;
use metal_attention_gguf::blocks::{
    BlockFormat, BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs, BlockIq4Nl,
    BlockIq4Xs, BlockMxfp4, BlockNvfp4, BlockQ1_0, BlockQ2_0, BlockQ2K, BlockQ3K, BlockQ4_1, BlockQ5_0, BlockQ5_1,
    BlockTq1_0, BlockTq2_0, IQ1_DELTA, cast, e8m0_half, ue4m3_half,
};

use crate::matrix::{PANEL, TILE};

/// Columns that share a scale.
const GROUP_COLUMNS: usize = 16;
/// Groups of a row of a panel.
const GROUPS_PER_PANEL: usize = PANEL / GROUP_COLUMNS;
/// Bytes of the codes of a tile's panel.
const CODE_BYTES: usize = TILE * PANEL;
/// Bytes of its scales, and of its minimums.
const SCALE_BYTES: usize = 4 * TILE * GROUPS_PER_PANEL;
/// Bytes of a record of codes and scales.
pub(crate) const PANEL_BYTES: usize = CODE_BYTES + SCALE_BYTES;
/// Bytes of a record that has minimums, too.
pub(crate) const PANEL_BYTES_WITH_MINS: usize = PANEL_BYTES + SCALE_BYTES;

/// The scale and minimum of a group of 16 columns of a row. Its elements are `scale * code - min`, with integer codes from -128
/// to 127.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ScaleGroup {
    /// The factor on a code.
    scale: f32,
    /// Subtracted from the product.
    min: f32,
}

/// A function that appends the groups of a row, given as its blocks' bytes, in the order of the columns.
pub(crate) type ScaleGroupsFn = fn(&[u8], &mut Vec<ScaleGroup>);

/// A group without a minimum.
fn scaled(scale: f32) -> ScaleGroup {
    ScaleGroup { scale, min: 0.0 }
}

/// Appends `n` equal groups for each block of a type with one scale.
fn one_scale<B: BlockFormat>(row: &[u8], groups: &mut Vec<ScaleGroup>, n: usize, group_of: impl Fn(&B) -> ScaleGroup) {
    for block in cast::<B>(row) {
        groups.extend(std::iter::repeat_n(group_of(block), n));
    }
}

/// Appends `each` equal groups for each of the `n` scales of each block.
fn scales<B: BlockFormat>(
    row: &[u8],
    groups: &mut Vec<ScaleGroup>,
    n: usize,
    each: usize,
    group_of: impl Fn(&B, usize) -> ScaleGroup,
) {
    for block in cast::<B>(row) {
        for i in 0..n {
            groups.extend(std::iter::repeat_n(group_of(block, i), each));
        }
    }
}

pub(crate) fn q4_1(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    one_scale(row, groups, 2, |b: &BlockQ4_1| ScaleGroup { scale: b.d.to_f32(), min: -b.m.to_f32() });
}

pub(crate) fn q5_0(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    one_scale(row, groups, 2, |b: &BlockQ5_0| scaled(b.d.to_f32()));
}

pub(crate) fn q5_1(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    one_scale(row, groups, 2, |b: &BlockQ5_1| ScaleGroup { scale: b.d.to_f32(), min: -b.m.to_f32() });
}

pub(crate) fn q2_k(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    scales(row, groups, 16, 1, |b: &BlockQ2K, i| ScaleGroup {
        scale: b.d.to_f32() * f32::from(b.scales[i] & 15),
        min: b.dmin.to_f32() * f32::from(b.scales[i] >> 4),
    });
}

pub(crate) fn q3_k(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    scales(row, groups, 16, 1, |b: &BlockQ3K, i| scaled(b.d.to_f32() * b.scale(i) as f32));
}

pub(crate) fn iq4_nl(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    one_scale(row, groups, 2, |b: &BlockIq4Nl| scaled(b.d.to_f32()));
}

pub(crate) fn iq4_xs(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    scales(row, groups, 8, 2, |b: &BlockIq4Xs, i| scaled(b.d.to_f32() * b.scale(i) as f32));
}

pub(crate) fn iq3_s(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    scales(row, groups, 8, 2, |b: &BlockIq3S, i| scaled(b.d.to_f32() * f32::from(1 + 2 * nibble(&b.scales, i))));
}

pub(crate) fn iq3_xxs(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    scales(row, groups, 8, 2, |b: &BlockIq3Xxs, i| {
        scaled(b.d.to_f32() * (0.5 + (b.signs_and_scale(i) >> 28) as f32) * 0.5)
    });
}

pub(crate) fn iq2_s(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    scales(row, groups, 16, 1, |b: &BlockIq2S, i| {
        scaled(b.d.to_f32() * (0.5 + f32::from(nibble(&b.scales, i))) * 0.25)
    });
}

pub(crate) fn iq2_xs(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    scales(row, groups, 16, 1, |b: &BlockIq2Xs, i| {
        scaled(b.d.to_f32() * (0.5 + f32::from(nibble(&b.scales, i))) * 0.25)
    });
}

pub(crate) fn iq2_xxs(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    scales(row, groups, 8, 2, |b: &BlockIq2Xxs, i| {
        scaled(b.d.to_f32() * (0.5 + (b.signs_and_scale(i) >> 28) as f32) * 0.25)
    });
}

/// The grid's values are shifted by an eighth, so codes count eighths.
pub(crate) fn iq1_s(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    scales(row, groups, 8, 2, |b: &BlockIq1S, i| {
        scaled(b.d.to_f32() * f32::from(2 * (b.high(i) >> 12 & 7) + 1) * IQ1_DELTA)
    });
}

pub(crate) fn iq1_m(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    scales(row, groups, 16, 1, |b: &BlockIq1M, i| scaled(b.d().to_f32() * f32::from(2 * b.scale(i) + 1) * IQ1_DELTA));
}

pub(crate) fn mxfp4(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    one_scale(row, groups, 2, |b: &BlockMxfp4| scaled(e8m0_half(b.e)));
}

pub(crate) fn nvfp4(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    scales(row, groups, 4, 1, |b: &BlockNvfp4, i| scaled(ue4m3_half(b.d[i])));
}

pub(crate) fn tq2_0(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    one_scale(row, groups, 16, |b: &BlockTq2_0| scaled(b.d.to_f32()));
}

pub(crate) fn tq1_0(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    one_scale(row, groups, 16, |b: &BlockTq1_0| scaled(b.d.to_f32()));
}

pub(crate) fn q2_0(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    one_scale(row, groups, 4, |b: &BlockQ2_0| scaled(b.d.to_f32()));
}

pub(crate) fn q1_0(row: &[u8], groups: &mut Vec<ScaleGroup>) {
    one_scale(row, groups, 8, |b: &BlockQ1_0| scaled(b.d.to_f32()));
}

/// Nibble `i` of `bytes`, the low one of each byte first.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (4 * (i % 2)) & 15
}

/// Repacks whole rows of type `ty` with `n_in` elements to tiles in `out`, which has to be zero. `groups_of` gives their
/// scales; `with_mins`: the layout has minimums. Uses all cores.
pub(crate) fn pack_tiles(
    ty: TensorType,
    groups_of: ScaleGroupsFn,
    with_mins: bool,
    n_in: usize,
    rows: &[u8],
    out: &mut [u8],
) {
    let row_bytes = ty.row_bytes(n_in);
    let panel_bytes = if with_mins { PANEL_BYTES_WITH_MINS } else { PANEL_BYTES };
    let tile_bytes = n_in.div_ceil(PANEL) * panel_bytes;
    let n_tiles = out.len() / tile_bytes;
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from).min(n_tiles).max(1);
    let tiles_each = n_tiles.div_ceil(n_threads);
    let parts = rows.chunks(tiles_each * TILE * row_bytes).zip(out.chunks_mut(tiles_each * tile_bytes));
    let parts = Mutex::new(parts);
    let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
    let pack = || {
        let (mut elements, mut groups) = (vec![0.0; n_in], Vec::new());
        while let Some((rows, out)) = next() {
            for (rows, tile) in rows.chunks(TILE * row_bytes).zip(out.chunks_exact_mut(tile_bytes)) {
                for (r, row) in rows.chunks_exact(row_bytes).enumerate() {
                    ty.dequantize(row, &mut elements);
                    groups.clear();
                    groups_of(row, &mut groups);
                    pack_row(&elements, &groups, r, with_mins, panel_bytes, tile);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        // If the system starts fewer threads, those that run do all tiles.
        let threads = (1..n_threads).map_while(|_| std::thread::Builder::new().spawn_scoped(scope, pack).ok());
        threads.for_each(drop);
        pack();
    });
}

/// Writes row `r` of a tile, from its dequantised elements and its groups: the codes are recomputed from these.
fn pack_row(elements: &[f32], groups: &[ScaleGroup], r: usize, with_mins: bool, panel_bytes: usize, tile: &mut [u8]) {
    for (g, (elements, &ScaleGroup { scale, min })) in elements.chunks(GROUP_COLUMNS).zip(groups).enumerate() {
        let panel = &mut tile[g / GROUPS_PER_PANEL * panel_bytes..][..panel_bytes];
        let (block, sub) = (g % GROUPS_PER_PANEL / 2, g % 2);
        for (i, &x) in elements.iter().enumerate() {
            // With a scale of 0 or NaN the quotient is NaN, which becomes code 0.
            let code = ((x + min) / scale).round() as i8;
            let lane = r % 8 * 4 + i / 4;
            panel[512 * block + 16 * lane + 8 * (r / 8) + 4 * sub + i % 4] = code as u8;
        }
        let at = 4 * (r * GROUPS_PER_PANEL + g % GROUPS_PER_PANEL);
        panel[CODE_BYTES + at..][..4].copy_from_slice(&scale.to_le_bytes());
        if with_mins {
            panel[PANEL_BYTES + at..][..4].copy_from_slice(&min.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use metal_attention_gguf::blocks::random_blocks;

    use super::{CODE_BYTES, GROUP_COLUMNS, GROUPS_PER_PANEL, PANEL_BYTES, ScaleGroupsFn, pack_tiles};
    use crate::matrix::{PANEL, Packing, TILE, packing};
    use metal_attention_gguf::TensorType;

    /// The element `k` of row `r` of a tile, as kernels decode it.
    fn element(tile: &[u8], panel_bytes: usize, with_mins: bool, r: usize, k: usize) -> f32 {
        let panel = &tile[k / PANEL * panel_bytes..][..panel_bytes];
        let (block, sub, i) = (k % PANEL / 32, k % 32 / GROUP_COLUMNS, k % GROUP_COLUMNS);
        let code = panel[512 * block + 16 * (r % 8 * 4 + i / 4) + 8 * (r / 8) + 4 * sub + i % 4] as i8;
        let at = 4 * (r * GROUPS_PER_PANEL + k % PANEL / GROUP_COLUMNS);
        let float = |at: usize| f32::from_le_bytes(panel[at..][..4].try_into().unwrap());
        let min = if with_mins { float(PANEL_BYTES + at) } else { 0.0 };
        float(CODE_BYTES + at) * f32::from(code) - min
    }

    #[test]
    fn repacked_codes_decode_to_the_dequantised_values() {
        let n_in = 512;
        for &ty in TensorType::ALL {
            let (groups_of, with_mins): (ScaleGroupsFn, bool) = match packing(ty) {
                Packing::OnDevice(..) => continue,
                Packing::Codes(groups_of) => (groups_of, false),
                Packing::CodesAndMins(groups_of) => (groups_of, true),
            };
            let n_rows = 19;
            let rows = random_blocks(ty, n_rows * n_in, 7, 0.5);
            let panel_bytes = if with_mins { super::PANEL_BYTES_WITH_MINS } else { PANEL_BYTES };
            let tile_bytes = n_in / PANEL * panel_bytes;
            let mut out = vec![0; 2 * tile_bytes];
            pack_tiles(ty, groups_of, with_mins, n_in, &rows, &mut out);
            let mut expected = vec![0.0; n_rows * n_in];
            ty.dequantize(&rows, &mut expected);
            for (i, &x) in expected.iter().enumerate() {
                let (row, k) = (i / n_in, i % n_in);
                let tile = &out[row / TILE * tile_bytes..][..tile_bytes];
                let y = element(tile, panel_bytes, with_mins, row % TILE, k);
                assert!((x - y).abs() <= 1e-6 * x.abs().max(1.0), "{ty}: row {row}, element {k}: {x} became {y}");
            }
        }
    }
}
