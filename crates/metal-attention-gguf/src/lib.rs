//! GGUF files: metadata, memory-mapped tensors, block formats, and a writer.
//!
//! [`GgufFile`] opens a model without reading its weights: tensors are views into the mapped file,
//! in the [`blocks`] that the file holds. [`GgufWriter`] streams files out. Every damaged or
//! foreign file is a [`GgufError`] that says what is wrong and where; none makes the reader panic
//! or allocate more than a small multiple of the file's size.
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
