//! The repacking of weights (`repack.cu`): every element of the records, read as `kernels/formats.cuh` describes them,
//! has to be that of the tensor, and 0 outside of the matrix.

use half::f16;
use metal_attention_gguf::TensorType;

use super::{Expected, assert_close, device, launch, poisoned, read, tensor};
use crate::args::RepackArgs;
use crate::launch::LaunchGrid;
use crate::matrix::{PANEL, Packing, TILE, WeightLayout, packing};

/// A matrix's records in memory.
struct Records<'a> {
    layout: WeightLayout,
    n_panels: usize,
    bytes: &'a [u8],
}

impl Records<'_> {
    fn half(&self, at: usize) -> f64 {
        f64::from(f16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]).to_f32())
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    /// An element, and the sum of the sizes of its terms.
    fn element(&self, row: usize, column: usize) -> (f64, f64) {
        use WeightLayout::{Codes, CodesAndMins, F16, F32, Q4_0, Q4K, Q5K, Q6K, Q8_0};
        let (g, r, b, k) = (row % 8, row % TILE / 8, column % PANEL / 32, column % 32);
        // Of four lanes with the same rows, lane t has these 8 columns: 4 t to 4 t + 3 of each half of a block.
        let (t, p) = (k % 16 / 4, k / 16 * 4 + k % 4);
        let lane = 4 * g + t;
        let panel = row / TILE * self.n_panels + column / PANEL;
        let shape = self.layout.record();
        let (record, i) = (panel / shape.panels * shape.bytes, panel % shape.panels);
        // Bytes of a panel's codes, high bits and scales.
        let (codes, high, scales) = match self.layout {
            F16 => (2048, 0, 0),
            F32 => (4096, 0, 0),
            Q8_0 => (1024, 0, 64),
            Q4_0 | Q4K => (512, 0, 64),
            Q5K => (512, 128, 64),
            Q6K => (512, 256, 64),
            Codes | CodesAndMins => unreachable!("packed by the host"),
        };
        let codes_at = record + i * codes;
        let high_at = record + shape.panels * codes + i * high;
        let scales_at = record + shape.panels * (codes + high) + i * scales;
        let super_at = record + shape.panels * (codes + high + scales);
        // A word for each block and row, in which codes 2 i and 2 i + 1 are nibbles i and i + 4.
        let nibble = |word: usize| self.word(codes_at + 16 * lane + 4 * word) >> (4 * (p / 2 + 4 * (p % 2))) & 15;
        let of_scales = |at: usize| self.bytes[scales_at + 8 * g + 4 * r + at];
        let product = |v: f64| (v, v.abs());
        let with_min = |code: u32| {
            let (d, min) = (self.half(super_at + 8 * g + 4 * r), self.half(super_at + 8 * g + 4 * r + 2));
            let (a, b) = (d * f64::from(of_scales(b)) * f64::from(code), min * f64::from(of_scales(2 + b)));
            (a - b, a.abs() + b.abs())
        };
        match self.layout {
            F16 => product(self.half(codes_at + 16 * (32 * (2 * b + r) + lane) + 2 * p)),
            F32 => {
                let plane = |plane: usize| self.half(codes_at + 16 * (32 * (4 * plane + 2 * b + r) + lane) + 2 * p);
                product(plane(0) + plane(1) / 2048.0)
            }
            Q8_0 => {
                let code = self.bytes[codes_at + 16 * (32 * b + lane) + 8 * r + p].cast_signed();
                product(f64::from(code) * self.half(scales_at + 8 * g + 4 * r + 2 * b))
            }
            Q4_0 => product((f64::from(nibble(2 * b + r)) - 8.0) * self.half(scales_at + 8 * g + 4 * r + 2 * b)),
            Q4K => with_min(nibble(2 * b + r)),
            Q5K => {
                // The fifth bits: bit 4 b + 2 r + (p / 2) % 2 of a byte for each pair of codes.
                let bit = 8 * (p / 4 + 2 * (p % 2)) + 4 * b + 2 * r + p / 2 % 2;
                with_min(nibble(2 * b + r) | (self.word(high_at + 4 * lane) >> bit & 1) << 4)
            }
            Q6K => {
                let bit = 8 * (p / 4 + 2 * (p % 2)) + 4 * r + 2 * (p / 2 % 2);
                let code = nibble(2 * b + r) | (self.word(high_at + 8 * lane + 4 * b) >> bit & 3) << 4;
                let scale = of_scales(2 * b + k / 16).cast_signed();
                product(self.half(super_at + 4 * g + 2 * r) * f64::from(scale) * (f64::from(code) - 32.0))
            }
            Codes | CodesAndMins => unreachable!("packed by the host"),
        }
    }
}

#[test]
fn repacked_weights() {
    use TensorType::{BF16, F16, F32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0};
    let Some(gpu) = device() else { return };
    for ty in [F16, F32, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K] {
        let widths = match ty.block_len() {
            1 => vec![1, 31, 33, 64, 65, 200],
            32 => vec![32, 64, 96, 160],
            n => vec![n, 3 * n],
        };
        for n_in in widths {
            for n_rows in [1, 7, 9, 16, 17, 40] {
                let what = format!("{ty}, {n_rows} rows of {n_in}");
                let source = tensor(ty, n_in, n_rows, (n_in + n_rows) as u64);
                let layout = WeightLayout::of(ty);
                let (n_panels, n_tiles) = (n_in.div_ceil(PANEL), n_rows.div_ceil(TILE));
                let n_bytes = n_tiles * n_panels / layout.record().panels * layout.record().bytes;
                let (raw, records) = (gpu.upload("rows", source.bytes()).unwrap(), poisoned(&gpu, n_bytes / 4));
                let args = RepackArgs {
                    raw: raw.ptr(),
                    records: records.ptr(),
                    n_rows: n_rows as u32,
                    n_in: n_in as u32,
                    n_panels: n_panels as u32,
                    row_bytes: (source.bytes().len() / n_rows) as u32,
                };
                let Packing::OnDevice(_, kernel) = packing(ty) else { panic!("{ty} is repacked by the host") };
                let blocks = [(n_tiles * n_panels).div_ceil(8), 1, 1];
                let grid = LaunchGrid { blocks, threads: 256, shared: 0 };
                launch(&gpu, kernel, grid, &args);
                let bytes: Vec<u8> = read(&gpu, &records, n_bytes);
                let records = Records { layout, n_panels, bytes: &bytes };
                let values = source.to_f32();
                let (mut got, mut expected) = (Vec::new(), Vec::new());
                for row in 0..n_tiles * TILE {
                    for column in 0..n_panels * PANEL {
                        let inside = row < n_rows && column < n_in;
                        let (element, size) = records.element(row, column);
                        got.push(if inside { values[row * n_in + column] } else { 0.0 });
                        // F32 has 22 bits; roundings of the tensor's own values.
                        let error = if inside && ty != F16 && ty != BF16 { 2.5e-7 * size + 2e-11 } else { 0.0 };
                        expected.push(Expected { value: element, error });
                    }
                }
                assert_close(&got, &expected, n_panels * PANEL, &what);
            }
        }
    }
}
