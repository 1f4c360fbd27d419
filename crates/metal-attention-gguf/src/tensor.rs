//! The tensors of an open file: name, shape, type, and the bytes in the mapping.

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
    /// The offset of the first byte in `storage`.
    start: usize,
    /// The size in bytes.
    len: usize,
    storage: Arc<Storage>,
}

impl Tensor {
    /// The tensor that `info` describes, whose range must lie inside `storage`.
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

    /// The dimensions in GGUF order: `shape()[0]` is the length of a row, whose elements are contiguous, `shape()[1]` the
    /// number of rows. 1 to 4 dimensions, none of them zero.
    pub fn shape(&self) -> &[usize] {
        self.shape.as_slice()
    }

    /// The tensor type: how the numbers are stored.
    pub fn ty(&self) -> TensorType {
        self.ty
    }

    /// The product of all dimensions.
    pub fn n_elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// The elements of a row, `shape()[0]`: a multiple of the type's block length.
    pub fn row_len(&self) -> usize {
        self.shape()[0]
    }

    /// The number of rows, the product of `shape()[1..]`.
    pub fn n_rows(&self) -> usize {
        self.shape()[1..].iter().product()
    }

    /// The bytes in the mapping. Those of a whole tensor are aligned to at least min(file alignment, 64).
    pub fn bytes(&self) -> &[u8] {
        &self.storage.bytes()[self.start..self.start + self.len]
    }

    /// Whether both are the same bytes of the same open file, with the same type and shape.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage)
            && (self.start, self.len, self.ty, self.shape()) == (other.start, other.len, other.ty, other.shape())
    }

    /// The bytes of row `i`.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn row(&self, i: usize) -> &[u8] {
        assert!(i < self.n_rows(), "row {i} of {} in `{}`", self.n_rows(), self.name);
        let bytes = self.ty.row_bytes(self.row_len());
        &self.bytes()[i * bytes..][..bytes]
    }

    /// The matrix `[row_len, rows.len()]` of some of the rows, with the same name.
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

    /// A matrix `[row_len, n_rows]` from a copy of `bytes` instead of a file.
    ///
    /// # Panics
    /// When `bytes` has another length than such a matrix, or a row is not whole blocks.
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

    /// The numbers in place, `None` when the type is not I64.
    pub fn as_i64(&self) -> Option<&[i64]> {
        self.numbers(TensorType::I64)
    }

    /// The numbers in place, `None` when the type is not `ty`. The cast cannot fail: tensors start at multiples of at least 8
    /// bytes, and rows at multiples of a number's size.
    fn numbers<T: bytemuck::Pod>(&self, ty: TensorType) -> Option<&[T]> {
        (self.ty == ty).then(|| bytemuck::cast_slice(self.bytes()))
    }

    /// All elements, dequantised, in a new vector of four bytes per element.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.n_elements()];
        self.ty.dequantize(self.bytes(), &mut values);
        values
    }

    /// Releases the resident pages of the tensor's mapping, as after repacking; nothing for files in memory. The bytes stay
    /// valid and are read from the file again on access.
    pub fn release_pages(&self) {
        self.storage.release(self.start, self.len);
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?} {})", self.name, self.shape(), self.ty)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_is_the_same_as_its_handles_alone() {
        let matrix = |bytes: &[u8]| Tensor::in_memory("m", [2, 3], TensorType::F32, bytes);
        let a = matrix(&[1; 24]);
        assert!(a.is_same(&a.clone()) && a.rows(0..3).is_same(&a) && a.rows(1..2).is_same(&a.rows(1..2)));
        // Equal bytes elsewhere, other rows, another shape of the same bytes.
        let reshaped = Tensor { shape: TensorShape::matrix(3, 2), ..a.clone() };
        for other in [matrix(&[1; 24]), a.rows(0..2), reshaped] {
            assert!(!a.is_same(&other), "{other:?}");
        }
        assert!(!a.rows(0..1).is_same(&a.rows(1..2)));
    }
}
