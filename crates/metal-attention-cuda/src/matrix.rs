//! Matrices in the device's memory, repacked for the tensor cores: `kernels/formats.cuh` describes the order.

use std::sync::Arc;

use metal_attention_gguf::{Tensor, TensorType};

use crate::CudaError;
use crate::args::{MatrixArgs, RepackArgs};
use crate::device::{CudaBuffer, CudaDevice, Kernels};
use crate::launch::Grid;

/// Rows of a tile.
pub(crate) const TILE: usize = 16;
/// Columns of a panel.
pub(crate) const PANEL: usize = 64;

/// Bytes of rows that are uploaded at once.
const PIECE: usize = 64 << 20;

/// How a matrix is packed: `Format` of `formats.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub(crate) enum Format {
    F16 = 0,
    Q8_0 = 1,
    Q4_0 = 2,
    Q4K = 3,
    Q5K = 4,
    Q6K = 5,
    /// Two F16 for each element.
    F32 = 6,
}

/// Panels that lie in a record side by side, and its bytes: `Record` of `formats.cuh`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Record {
    pub(crate) panels: usize,
    pub(crate) bytes: usize,
}

impl Format {
    /// The format of tensors of type `ty`, and the kernel that packs them.
    fn of(ty: TensorType) -> Result<(Self, &'static str), CudaError> {
        match ty {
            TensorType::F16 => Ok((Self::F16, "repack_f16")),
            TensorType::F32 => Ok((Self::F32, "repack_f32")),
            TensorType::BF16 => Ok((Self::F32, "repack_bf16")),
            TensorType::Q8_0 => Ok((Self::Q8_0, "repack_q8_0")),
            TensorType::Q4_0 => Ok((Self::Q4_0, "repack_q4_0")),
            TensorType::Q4_K => Ok((Self::Q4K, "repack_q4_k")),
            TensorType::Q5_K => Ok((Self::Q5K, "repack_q5_k")),
            TensorType::Q6_K => Ok((Self::Q6K, "repack_q6_k")),
            ty => Err(CudaError::UnsupportedType { ty }),
        }
    }

    /// As it is in the names of kernels.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
            Self::F32 => "f32",
        }
    }

    pub(crate) fn record(self) -> Record {
        let record = |panels, bytes| Record { panels, bytes };
        match self {
            Self::F16 => record(1, 2048),
            Self::F32 => record(1, 4096),
            Self::Q8_0 => record(1, 1024 + 64),
            Self::Q4_0 => record(1, 512 + 64),
            Self::Q4K => record(4, 4 * (512 + 64) + 64),
            Self::Q5K => record(4, 4 * (512 + 128 + 64) + 64),
            Self::Q6K => record(4, 4 * (512 + 256 + 64) + 32),
        }
    }

    /// Bytes of a tile of rows of `n_panels` panels.
    fn tile_bytes(self, n_panels: usize) -> usize {
        let Record { panels, bytes } = self.record();
        n_panels / panels * bytes
    }
}

/// Whether there are kernels for tensors of type `ty`.
pub(crate) fn supports_type(ty: TensorType) -> Result<(), CudaError> {
    Format::of(ty).map(|_| ())
}

/// Bytes that `tensor` takes when it is packed.
pub(crate) fn packed_bytes(tensor: &Tensor) -> Result<u64, CudaError> {
    let of_tile = Format::of(tensor.ty())?.0.tile_bytes(tensor.row_len().div_ceil(PANEL)) as u64;
    Ok(tensor.n_rows().div_ceil(TILE) as u64 * of_tile)
}

/// A matrix, `[n_rows, n_in]`.
#[derive(Debug)]
pub(crate) struct CudaMatrix {
    records: CudaBuffer,
    pub(crate) format: Format,
    pub(crate) n_rows: usize,
    pub(crate) n_in: usize,
}

impl CudaMatrix {
    /// Uploads `tensor` and packs it on the device.
    pub(crate) fn new(gpu: &Arc<CudaDevice>, kernels: &mut Kernels, tensor: &Tensor) -> Result<Self, CudaError> {
        Self::stacked(gpu, kernels, &[tensor])
    }

    /// Uploads `tensors`, all of one type and shape, one below the other; the rows of each begin with a tile.
    pub(crate) fn stacked(
        gpu: &Arc<CudaDevice>,
        kernels: &mut Kernels,
        tensors: &[&Tensor],
    ) -> Result<Self, CudaError> {
        let unsupported = |part| CudaError::UnsupportedPart { part };
        let first = tensors.first().ok_or(unsupported("no matrices"))?;
        let (n_rows, n_in) = (first.n_rows(), first.row_len());
        if n_in % 4 != 0 {
            return Err(unsupported("rows of that many elements"));
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

    /// Room for a matrix of that type, with whatever lies there.
    fn empty(gpu: &Arc<CudaDevice>, ty: TensorType, n_rows: usize, n_in: usize) -> Result<Self, CudaError> {
        let (format, _) = Format::of(ty)?;
        let tile_bytes = format.tile_bytes(n_in.div_ceil(PANEL)) as u64;
        let records = gpu.buffer("weights", n_rows.div_ceil(TILE) as u64 * tile_bytes)?;
        Ok(Self { records, format, n_rows, n_in })
    }

    /// Writes `tensor`, of the type and width that there is room for, to the tiles from `first_tile` on.
    fn write(
        &self,
        gpu: &Arc<CudaDevice>,
        kernels: &mut Kernels,
        tensor: &Tensor,
        first_tile: usize,
    ) -> Result<(), CudaError> {
        let (_, kernel) = Format::of(tensor.ty())?;
        let kernel = kernels.get(gpu, kernel)?;
        let (n_rows, n_in, n_panels) = (tensor.n_rows(), self.n_in, self.n_in.div_ceil(PANEL));
        let tile_bytes = self.tile_bytes() as u64;
        let row_bytes = tensor.bytes().len() / n_rows.max(1);
        let rows_at_once = (PIECE / row_bytes.max(1)).next_multiple_of(TILE).max(TILE);
        let raw = gpu.buffer("weights on their way", (rows_at_once.min(n_rows) * row_bytes) as u64)?;
        for (piece, rows) in tensor.bytes().chunks(rows_at_once * row_bytes).enumerate() {
            gpu.check_watch()?;
            raw.write(0, rows)?;
            let tile = first_tile + piece * rows_at_once / TILE;
            let rows = rows.len() / row_bytes;
            let args = RepackArgs {
                raw: raw.ptr(),
                records: self.records.ptr() + tile as u64 * tile_bytes,
                n_rows: rows as u32,
                n_in: n_in as u32,
                n_panels: n_panels as u32,
                row_bytes: row_bytes as u32,
            };
            let n_warps = rows.div_ceil(TILE) * n_panels;
            gpu.launch(kernel, Grid { blocks: [n_warps.div_ceil(8), 1, 1], threads: 256, shared: 0 }, &args, false)?;
        }
        Ok(())
    }

    /// Bytes of a tile of rows.
    pub(crate) fn tile_bytes(&self) -> usize {
        self.format.tile_bytes(self.n_in.div_ceil(PANEL))
    }

    /// As kernels take it, its rows being those of the product from `first_row` on.
    pub(crate) fn args(&self, first_row: usize) -> MatrixArgs {
        MatrixArgs {
            records: self.records.ptr(),
            format: self.format as u32,
            n_rows: self.n_rows as u32,
            n_panels: self.n_in.div_ceil(PANEL) as u32,
            first_row: first_row as u32,
        }
    }

    /// Tiles of its rows.
    pub(crate) fn n_tiles(&self) -> usize {
        self.n_rows.div_ceil(TILE)
    }
}
