//! GGUF files: metadata, memory-mapped tensors, block formats, and a writer.
//!
//! [`GgufFile`] opens a model without reading its weights: tensors are views of the mapped file, in the block formats of
//! [`blocks`]. [`GgufWriter`] writes files as a stream. A damaged file, or one of another format, is a [`GgufError`] that
//! describes the problem and its position; none makes the reader panic or allocate more than a small multiple of the file's
//! size. [`TensorType`] lists the tensor types, with dequantisation and quantisation of each; [`Imatrix`] contains the
//! importance of columns, for quantisation.
//!
//! The format is described in `docs/gguf.md` of the repository and in ggml's `docs/gguf.md`.

#[cfg(target_endian = "big")]
compile_error!("GGUF tensors are little-endian and used in place, so big-endian machines are not supported");

pub mod blocks;
pub mod codes;
mod cursor;
mod error;
mod file;
mod imatrix;
mod lost_pages;
mod metadata;
mod parse;
mod quantize;
mod recognise;
mod split;
mod storage;
mod strings;
mod tensor;
mod tensor_type;
mod value;
mod writer;

pub use cursor::MAX_ARRAY_DEPTH;
pub use error::{ErrorKind, GgufError, Result};
pub use file::GgufFile;
pub use imatrix::Imatrix;
pub use lost_pages::exit_on_lost_pages;
pub use metadata::Metadata;
pub use parse::{DEFAULT_ALIGNMENT, MAX_ALIGNMENT, MAX_DIMS, MIN_ALIGNMENT};
pub use strings::StringArray;
pub use tensor::Tensor;
pub use tensor_type::TensorType;
pub use value::{Array, Value, ValueType};
pub use writer::{GgufWriter, TensorDecl};
