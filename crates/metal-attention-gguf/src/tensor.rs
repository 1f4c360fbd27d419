//! Tensors of an open file.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::TensorType;
use crate::parse::{TensorInfo, TensorShape};
use crate::storage::Storage;

/// A tensor of an open file: a cheap handle that keeps the mapping alive.
#[derive(Clone)]
pub struct Tensor {
    name: Arc<str>,
    shape: TensorShape,
    ty: TensorType,
    start: usize,
    len: usize,
    storage: Arc<Storage>,
}

impl Tensor {
    /// `info` must lie inside `storage`.
    pub(crate) fn new(info: &TensorInfo, storage: &Arc<Storage>) -> Self {
        Self {
            name: info.name.as_str().into(),
            shape: info.shape,
            ty: info.ty,
            start: info.start,
            len: info.bytes,
            storage: Arc::clone(storage),
        }
    }

    /// The name, such as `blk.0.attn_q.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name, shared.
    pub(crate) fn shared_name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    /// GGUF order: `shape()[0]` is the row length (contiguous), `shape()[1]` the number of rows.
    /// 1 to 4 dimensions, none of them zero.
    pub fn shape(&self) -> &[usize] {
        self.shape.as_slice()
    }

    /// How the numbers are stored.
    pub fn ty(&self) -> TensorType {
        self.ty
    }

    /// The product of all dimensions.
    pub fn n_elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// `shape()[0]`, a multiple of the type's block length.
    pub fn row_len(&self) -> usize {
        self.shape()[0]
    }

    /// The product of `shape()[1..]`.
    pub fn n_rows(&self) -> usize {
        self.shape()[1..].iter().product()
    }

    /// The raw bytes in the mapping; of a whole tensor aligned to at least min(file alignment, 64).
    pub fn bytes(&self) -> &[u8] {
        &self.storage.bytes()[self.start..self.start + self.len]
    }

    /// The raw bytes of row `i`.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn row(&self, i: usize) -> &[u8] {
        assert!(i < self.n_rows(), "row {i} of {} in `{}`", self.n_rows(), self.name);
        let bytes = self.ty.row_bytes(self.row_len());
        &self.bytes()[i * bytes..][..bytes]
    }

    /// Some of the rows as a matrix of its own, `[row_len, n]`, of the same name.
    ///
    /// # Panics
    /// When there are no such rows.
    #[must_use]
    pub fn rows(&self, rows: Range<usize>) -> Self {
        assert!(rows.start < rows.end && rows.end <= self.n_rows(), "rows {rows:?} of {}", self.n_rows());
        let bytes = self.ty.row_bytes(self.row_len());
        Self {
            shape: TensorShape::matrix(self.row_len(), rows.len()),
            start: self.start + rows.start * bytes,
            len: rows.len() * bytes,
            ..self.clone()
        }
    }

    /// A matrix `[row_len, n_rows]` of no file.
    ///
    /// # Panics
    /// When `bytes` are not as many as such a matrix has, or a row is not whole blocks.
    pub fn in_memory(name: &str, [row_len, n_rows]: [usize; 2], ty: TensorType, bytes: &[u8]) -> Self {
        assert!(row_len.is_multiple_of(ty.block_len()), "rows of whole blocks");
        assert_eq!(bytes.len(), n_rows * ty.row_bytes(row_len), "bytes of a matrix");
        let (name, shape, storage) =
            (name.into(), TensorShape::matrix(row_len, n_rows), Arc::new(Storage::copy(bytes)));
        Self { name, shape, ty, start: 0, len: bytes.len(), storage }
    }

    /// The numbers in place, `None` when the type is not F32.
    pub fn as_f32(&self) -> Option<&[f32]> {
        self.numbers(TensorType::F32)
    }

    /// The numbers in place, `None` when the type is not F16.
    pub fn as_f16(&self) -> Option<&[half::f16]> {
        self.numbers(TensorType::F16)
    }

    /// The numbers in place, `None` when the type is not BF16.
    pub fn as_bf16(&self) -> Option<&[half::bf16]> {
        self.numbers(TensorType::BF16)
    }

    /// The cast cannot fail: tensors start at multiples of at least 8, rows at whole numbers, and all hold whole numbers.
    fn numbers<T: bytemuck::Pod>(&self, ty: TensorType) -> Option<&[T]> {
        (self.ty == ty).then(|| bytemuck::cast_slice(self.bytes()))
    }

    /// All elements, dequantised: four bytes each, however small the file is.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.n_elements()];
        self.ty.dequantize(self.bytes(), &mut values);
        values
    }

    /// Tells the kernel that the mapped pages will not be read soon; nothing for files in memory.
    /// The bytes stay valid and are read again from the file when touched.
    pub fn release_pages(&self) {
        self.storage.release(self.start, self.len);
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?} {})", self.name, self.shape(), self.ty)
    }
}
