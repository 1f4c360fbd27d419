#![doc = include_str!("../README.md")]

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
