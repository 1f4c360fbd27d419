//! [`CudaMatrix`]: a matrix in device memory, repacked in the order in which the kernels' warps read it (described in
//! `kernels/formats.cuh`).
//!
//! A tile is 16 rows, a panel 64 columns. The codes and scales of one tile's panel, or of four neighbouring panels, are one
//! record; records are stored tile by tile. Tensor types that are common have a layout of their own and are repacked by a
//! kernel; all others become 8-bit codes with scales, which the host computes (`codes.rs`).

use std::sync::Arc;

use metal_attention_gguf::{Tensor, TensorType};

use crate::CudaError;
use crate::args::{MatrixArgs, RepackArgs};
use crate::codes::{self, ScaleGroupsFn};
use crate::device::{CudaBuffer, CudaDevice};
use crate::kernels::{self, EntryPoint, Kernel, Kernels};
use crate::launch::{LaunchGrid, LaunchOrder};

/// Rows of a tile.
pub(crate) const TILE: usize = 16;
/// Columns of a panel.
pub(crate) const PANEL: usize = 64;

/// Bytes of rows that are uploaded and repacked at a time.
const UPLOAD_BYTES: usize = 64 << 20;

/// The layout of a matrix in device memory: `Format` of `formats.cuh`. The names are those of tensor types whose codes and
/// scales are kept as they are, in another order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub(crate) enum WeightLayout {
    F16 = 0,
    Q8_0 = 1,
    Q4_0 = 2,
    Q4K = 3,
    Q5K = 4,
    Q6K = 5,
    /// Two F16 for each element, whose sum it is.
    F32 = 6,
    /// 8-bit codes, with an F32 scale for every 16 columns.
    Codes = 7,
    /// 8-bit codes, with an F32 scale and an F32 minimum for every 16 columns.
    CodesAndMins = 8,
}

/// Where and how tensors of a type are repacked.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Packing {
    /// By this kernel, to this layout.
    OnDevice(WeightLayout, EntryPoint<RepackArgs>),
    /// By the host, to 8-bit codes and scales; the function gives the scales of a row.
    Codes(ScaleGroupsFn),
    /// By the host, with minimums, too.
    CodesAndMins(ScaleGroupsFn),
}

/// How tensors of type `ty` are repacked.
pub(crate) fn packing(ty: TensorType) -> Packing {
    match ty {
        TensorType::F16 => Packing::OnDevice(WeightLayout::F16, kernels::REPACK_F16),
        TensorType::F32 => Packing::OnDevice(WeightLayout::F32, kernels::REPACK_F32),
        TensorType::BF16 => Packing::OnDevice(WeightLayout::F32, kernels::REPACK_BF16),
        TensorType::Q8_0 => Packing::OnDevice(WeightLayout::Q8_0, kernels::REPACK_Q8_0),
        TensorType::Q4_0 => Packing::OnDevice(WeightLayout::Q4_0, kernels::REPACK_Q4_0),
        TensorType::Q4_K => Packing::OnDevice(WeightLayout::Q4K, kernels::REPACK_Q4_K),
        TensorType::Q5_K => Packing::OnDevice(WeightLayout::Q5K, kernels::REPACK_Q5_K),
        TensorType::Q6_K => Packing::OnDevice(WeightLayout::Q6K, kernels::REPACK_Q6_K),
        TensorType::Q4_1 => Packing::CodesAndMins(codes::q4_1),
        TensorType::Q5_0 => Packing::Codes(codes::q5_0),
        TensorType::Q5_1 => Packing::CodesAndMins(codes::q5_1),
        TensorType::Q2_K => Packing::CodesAndMins(codes::q2_k),
        TensorType::Q3_K => Packing::Codes(codes::q3_k),
        TensorType::IQ4_NL => Packing::Codes(codes::iq4_nl),
        TensorType::IQ4_XS => Packing::Codes(codes::iq4_xs),
        TensorType::IQ3_S => Packing::Codes(codes::iq3_s),
        TensorType::IQ3_XXS => Packing::Codes(codes::iq3_xxs),
        TensorType::IQ2_S => Packing::Codes(codes::iq2_s),
        TensorType::IQ2_XS => Packing::Codes(codes::iq2_xs),
        TensorType::IQ2_XXS => Packing::Codes(codes::iq2_xxs),
        TensorType::IQ1_M => Packing::Codes(codes::iq1_m),
        TensorType::IQ1_S => Packing::Codes(codes::iq1_s),
        TensorType::MXFP4 => Packing::Codes(codes::mxfp4),
        TensorType::NVFP4 => Packing::Codes(codes::nvfp4),
        TensorType::TQ2_0 => Packing::Codes(codes::tq2_0),
        TensorType::TQ1_0 => Packing::Codes(codes::tq1_0),
        TensorType::Q2_0 => Packing::Codes(codes::q2_0),
        TensorType::Q1_0 => Packing::Codes(codes::q1_0),
        TensorType::I64 => unreachable!("weights are no whole numbers, which loading checks"),
    }
}

/// A record: what is contiguous in memory of one tile (`Record` of `formats.cuh`).
#[derive(Debug, Clone, Copy)]
pub(crate) struct RecordShape {
    /// Neighbouring panels of the record.
    pub(crate) panels: usize,
    /// Its bytes.
    pub(crate) bytes: usize,
}

impl WeightLayout {
    /// The layout of tensors of type `ty`.
    pub(crate) fn of(ty: TensorType) -> Self {
        match packing(ty) {
            Packing::OnDevice(format, _) => format,
            Packing::Codes(_) => Self::Codes,
            Packing::CodesAndMins(_) => Self::CodesAndMins,
        }
    }

    /// Whether the GEMV multiplies integer codes and applies scales to the sums; else it multiplies floats.
    pub(crate) fn has_codes(self) -> bool {
        match self {
            Self::Q8_0 | Self::Q4_0 | Self::Q4K | Self::Q5K | Self::Q6K | Self::Codes | Self::CodesAndMins => true,
            Self::F16 | Self::F32 => false,
        }
    }

    /// Whether there is an offset (minimum) beside each scale.
    pub(crate) fn has_mins(self) -> bool {
        match self {
            Self::Q4K | Self::Q5K | Self::CodesAndMins => true,
            Self::Q8_0 | Self::Q4_0 | Self::Q6K | Self::Codes | Self::F16 | Self::F32 => false,
        }
    }

    /// Whether there is a scale for every 16 columns, and not for every 32.
    pub(crate) fn has_halves(self) -> bool {
        match self {
            Self::Q6K | Self::Codes | Self::CodesAndMins => true,
            Self::Q8_0 | Self::Q4_0 | Self::Q4K | Self::Q5K | Self::F16 | Self::F32 => false,
        }
    }

    /// All layouts, in the order of their numbers.
    pub(crate) const ALL: [Self; 9] = [
        Self::F16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::F32,
        Self::Codes,
        Self::CodesAndMins,
    ];

    /// The layout with this number in `MatrixArgs::format`.
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|layout| *layout as u32 == code)
    }

    /// The layout with this name.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|layout| layout.name() == name)
    }

    /// The layout's name in kernel names.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
            Self::F32 => "f32",
            Self::Codes => "codes",
            Self::CodesAndMins => "codes_and_mins",
        }
    }

    /// The record of this layout.
    pub(crate) fn record(self) -> RecordShape {
        let record = |panels, bytes| RecordShape { panels, bytes };
        match self {
            Self::F16 => record(1, 2048),
            Self::F32 => record(1, 4096),
            Self::Q8_0 => record(1, 1024 + 64),
            Self::Q4_0 => record(1, 512 + 64),
            Self::Q4K => record(4, 4 * (512 + 64) + 64),
            Self::Q5K => record(4, 4 * (512 + 128 + 64) + 64),
            Self::Q6K => record(4, 4 * (512 + 256 + 64) + 32),
            Self::Codes => record(1, codes::PANEL_BYTES),
            Self::CodesAndMins => record(1, codes::PANEL_BYTES_WITH_MINS),
        }
    }

    /// Bytes of a tile of `n_panels` panels. These fill whole records: rows of K-quants are multiples of 256 elements, four
    /// panels.
    pub(crate) fn tile_bytes(self, n_panels: usize) -> usize {
        let RecordShape { panels, bytes } = self.record();
        n_panels / panels * bytes
    }
}

/// Bytes of `tensor` in device memory.
pub(crate) fn packed_bytes(tensor: &Tensor) -> u64 {
    let tile_bytes = WeightLayout::of(tensor.ty()).tile_bytes(tensor.row_len().div_ceil(PANEL)) as u64;
    tensor.n_rows().div_ceil(TILE) as u64 * tile_bytes
}

/// A matrix `[n_rows, n_in]` in device memory, repacked.
#[derive(Debug)]
pub(crate) struct CudaMatrix {
    /// Records `[n_tiles, n_panels / panels of a record]`.
    records: CudaBuffer,
    /// The layout of a record.
    pub(crate) layout: WeightLayout,
    /// Rows.
    pub(crate) n_rows: usize,
    /// Columns.
    pub(crate) n_in: usize,
}

impl CudaMatrix {
    /// Uploads `tensor` and repacks it.
    pub(crate) fn new(gpu: &Arc<CudaDevice>, kernels: &mut Kernels, tensor: &Tensor) -> Result<Self, CudaError> {
        Self::stacked(gpu, kernels, &[tensor])
    }

    /// Uploads `tensors`, all of one type and shape, one below the other; the rows of each are padded to whole tiles. An error
    /// for shapes that grouped products do not support.
    pub(crate) fn stacked(
        gpu: &Arc<CudaDevice>,
        kernels: &mut Kernels,
        tensors: &[&Tensor],
    ) -> Result<Self, CudaError> {
        let unsupported = |part| CudaError::UnsupportedPart { part };
        let first = tensors.first().ok_or(unsupported("no matrices"))?;
        let (n_rows, n_in) = (first.n_rows(), first.row_len());
        if tensors.len() > 1 && n_in % 4 != 0 {
            return Err(unsupported("experts or heads with rows of that many elements"));
        }
        let same = |tensor: &&Tensor| (tensor.ty(), tensor.n_rows(), tensor.row_len()) == (first.ty(), n_rows, n_in);
        if !tensors.iter().all(same) {
            return Err(unsupported("experts or heads of unlike types"));
        }
        let tiles = n_rows.div_ceil(TILE);
        let n_rows = if tensors.len() == 1 { n_rows } else { tensors.len() * tiles * TILE };
        let matrix = Self::empty(gpu, first.ty(), n_rows, n_in)?;
        for (i, tensor) in tensors.iter().enumerate() {
            matrix.write(gpu, kernels, tensor, i * tiles)?;
        }
        Ok(matrix)
    }

    /// Uploads `tensors`, of one type and width, one below the other without padding. All but the last have to fill whole
    /// tiles.
    ///
    /// # Panics
    /// If types or widths differ.
    pub(crate) fn joined(gpu: &Arc<CudaDevice>, kernels: &mut Kernels, tensors: &[&Tensor]) -> Result<Self, CudaError> {
        let first = tensors.first().ok_or(CudaError::UnsupportedPart { part: "no matrices" })?;
        let n_rows = tensors.iter().map(|tensor| tensor.n_rows()).sum();
        let matrix = Self::empty(gpu, first.ty(), n_rows, first.row_len())?;
        let mut tile = 0;
        for tensor in tensors {
            assert_eq!((tensor.ty(), tensor.row_len()), (first.ty(), first.row_len()), "matrices that join");
            matrix.write(gpu, kernels, tensor, tile)?;
            tile += tensor.n_rows() / TILE;
        }
        Ok(matrix)
    }

    /// Bytes of a tile.
    pub(crate) fn tile_bytes(&self) -> usize {
        self.layout.tile_bytes(self.n_in.div_ceil(PANEL))
    }

    /// Allocates a matrix with undefined contents.
    fn empty(gpu: &Arc<CudaDevice>, ty: TensorType, n_rows: usize, n_in: usize) -> Result<Self, CudaError> {
        let layout = WeightLayout::of(ty);
        let tile_bytes = layout.tile_bytes(n_in.div_ceil(PANEL)) as u64;
        let records = gpu.buffer("weights", n_rows.div_ceil(TILE) as u64 * tile_bytes)?;
        Ok(Self { records, layout, n_rows, n_in })
    }

    /// Uploads `tensor`, of the matrix's type and width, to the tiles from `first_tile` on.
    fn write(
        &self,
        gpu: &Arc<CudaDevice>,
        kernels: &mut Kernels,
        tensor: &Tensor,
        first_tile: usize,
    ) -> Result<(), CudaError> {
        let at = first_tile as u64 * self.layout.tile_bytes(self.n_in.div_ceil(PANEL)) as u64;
        match packing(tensor.ty()) {
            Packing::OnDevice(_, entry) => self.repack_on_device(gpu, kernels.get(gpu, entry)?, tensor, at),
            Packing::Codes(groups_of) => self.repack_on_host(gpu, tensor, groups_of, false, at),
            Packing::CodesAndMins(groups_of) => self.repack_on_host(gpu, tensor, groups_of, true, at),
        }
    }

    /// Uploads the rows of `tensor` and repacks them with `kernel`, to byte `at` and on.
    fn repack_on_device(
        &self,
        gpu: &Arc<CudaDevice>,
        kernel: Kernel<RepackArgs>,
        tensor: &Tensor,
        at: u64,
    ) -> Result<(), CudaError> {
        let (n_rows, n_panels) = (tensor.n_rows(), self.n_in.div_ceil(PANEL));
        let tile_bytes = self.layout.tile_bytes(n_panels);
        let row_bytes = tensor.bytes().len() / n_rows.max(1);
        let rows_at_once = (UPLOAD_BYTES / row_bytes.max(1)).next_multiple_of(TILE).max(TILE);
        let raw = gpu.buffer("weights to repack", (rows_at_once.min(n_rows) * row_bytes) as u64)?;
        for (chunk, rows) in tensor.bytes().chunks(rows_at_once * row_bytes).enumerate() {
            gpu.check_watch()?;
            raw.write(0, rows)?;
            let tile = chunk * rows_at_once / TILE;
            let rows = rows.len() / row_bytes;
            let args = RepackArgs {
                raw: raw.ptr(),
                records: self.records.slice().skip(at as usize + tile * tile_bytes).ptr(),
                n_rows: rows as u32,
                n_in: self.n_in as u32,
                n_panels: n_panels as u32,
                row_bytes: row_bytes as u32,
            };
            let n_warps = rows.div_ceil(TILE) * n_panels;
            let grid = LaunchGrid { blocks: [n_warps.div_ceil(8), 1, 1], threads: 256, shared: 0 };
            // SAFETY: `raw` has the rows, and `records` from there on their tiles; `raw` is freed after the stream is awaited.
            unsafe { gpu.launch(kernel, grid, &args, LaunchOrder::AfterPrevious)? };
        }
        Ok(())
    }

    /// Repacks the rows of `tensor` on the host and uploads them, to byte `at` and on.
    fn repack_on_host(
        &self,
        gpu: &Arc<CudaDevice>,
        tensor: &Tensor,
        groups_of: ScaleGroupsFn,
        with_mins: bool,
        mut at: u64,
    ) -> Result<(), CudaError> {
        let tile_bytes = self.layout.tile_bytes(self.n_in.div_ceil(PANEL));
        let rows_of_tile = TILE * tensor.ty().row_bytes(self.n_in);
        let tiles_at_once = (UPLOAD_BYTES / tile_bytes).max(1);
        let mut packed = Vec::new();
        for rows in tensor.bytes().chunks(tiles_at_once * rows_of_tile) {
            gpu.check_watch()?;
            packed.clear();
            packed.resize(rows.len().div_ceil(rows_of_tile) * tile_bytes, 0);
            codes::pack_tiles(tensor.ty(), groups_of, with_mins, self.n_in, rows, &mut packed);
            self.records.write(at, &packed)?;
            at += packed.len() as u64;
        }
        Ok(())
    }

    /// The kernels' argument for the matrix. `first_row`: the row of the product's result at which its rows begin.
    pub(crate) fn args(&self, first_row: usize) -> MatrixArgs {
        MatrixArgs {
            records: self.records.ptr(),
            format: self.layout as u32,
            n_rows: self.n_rows as u32,
            n_panels: self.n_in.div_ceil(PANEL) as u32,
            first_row: first_row as u32,
        }
    }

    /// The number of tiles.
    pub(crate) fn n_tiles(&self) -> usize {
        self.n_rows.div_ceil(TILE)
    }
}
