//! The errors of reading and writing GGUF files, as one enum, whose messages name the file, the position and a remedy.

use std::io;
use std::path::{Path, PathBuf};

use crate::TensorType;

/// Shorthand for results of this crate.
pub type Result<T, E = GgufError> = std::result::Result<T, E>;

/// The class of a [`GgufError`], for exit codes and HTTP statuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The model file is missing, broken, of another format or not supported.
    Model,
    /// The operating system refused to read or write.
    Io,
    /// This crate was called with invalid arguments.
    Usage,
}

/// An error of reading or writing a GGUF file.
///
/// Offsets are bytes from the start of the file, unless stated otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    // ---- opening -------------------------------------------------------------------------
    /// The file does not exist.
    #[error("no such file: {}{}", path.display(), did_you_mean(suggestions))]
    NotFound {
        /// The path as given.
        path: PathBuf,
        /// Paths of `.gguf` files in the same folder, the most similar name first.
        suggestions: Vec<PathBuf>,
    },
    /// The path is a directory.
    #[error("{} is a directory, not a GGUF file{}", path.display(), did_you_mean(suggestions))]
    IsDirectory {
        /// The path as given.
        path: PathBuf,
        /// Paths of `.gguf` files inside it.
        suggestions: Vec<PathBuf>,
    },
    /// The path is a pipe, a device or a socket.
    #[error("{} is not a regular file: GGUF files are memory-mapped, so save it to disk first", path.display())]
    NotRegular {
        /// The path as given.
        path: PathBuf,
    },
    /// The operating system refused to open, map or read a file.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// "open", "map", ...
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// There is not enough memory to read a file into.
    #[error("out of memory: {} has {bytes} bytes to be read into memory; mapped files need less", path.display())]
    OutOfMemory {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// An error inside the file at `path`.
    #[error("{}: {error}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// The error in the file; see also [`GgufError::root`].
        error: Box<GgufError>,
    },

    // ---- not a GGUF file -----------------------------------------------------------------
    /// The file has no bytes.
    #[error("the file is empty: the download was probably interrupted; fetch it again")]
    Empty,
    /// The file is a Git LFS pointer: a short text in place of the real file.
    #[error(
        "this is a Git LFS pointer, not the model itself{}: run `git lfs pull` in its repository or download the file directly",
        size.map(|n| format!(" (which has {n} bytes)")).unwrap_or_default()
    )]
    GitLfsPointer {
        /// The size of the real file that the pointer states.
        size: Option<u64>,
    },
    /// The file is in the safetensors format.
    #[error(
        "this is a safetensors file, not GGUF: convert the model with llama.cpp's convert_hf_to_gguf.py or download a GGUF version of it"
    )]
    Safetensors,
    /// The file is a web page.
    #[error(
        "this is an HTML page saved under a model's name: the download link led to a web page; use the direct link to the file (log in first when the model is gated)"
    )]
    Html,
    /// The file is a ZIP archive or a pickle, which is how `PyTorch` stores checkpoints.
    #[error(
        "this is a ZIP archive or PyTorch checkpoint, not GGUF: unpack it, or convert the model with llama.cpp's convert_hf_to_gguf.py"
    )]
    ZipOrPytorch,
    /// The file has the magic of a GGML format older than GGUF.
    #[error("this is an old GGML file (magic {magic:?}) from before GGUF: download a GGUF version of the model")]
    LegacyGgml {
        /// The first four bytes.
        magic: String,
    },
    /// The file does not start with `GGUF`, and its format was not recognised either.
    #[error("not a GGUF file: it starts with {}, expected \"GGUF\"", quote_bytes(found))]
    NotGguf {
        /// Up to the first eight bytes.
        found: Vec<u8>,
    },
    /// The version field is byte-swapped: the file was written for a big-endian machine.
    #[error(
        "this is a big-endian GGUF file (version {version} with swapped bytes): only little-endian files are read; convert it with gguf-py's gguf_convert_endian"
    )]
    BigEndian {
        /// The version after swapping.
        version: u32,
    },
    /// A version that is neither 2 nor 3.
    #[error(
        "GGUF version {version} is not supported (versions 2 and 3 are){}",
        if *version == 1 { ": convert the model again with a current converter" } else { "" }
    )]
    UnsupportedVersion {
        /// The version field.
        version: u32,
    },

    // ---- header, metadata and tensor table -----------------------------------------------
    /// The file ends within a field.
    #[error(
        "the file is truncated: {item} at byte {offset} needs {needed} bytes, {available} are left; the download was probably interrupted"
    )]
    Truncated {
        /// The part of the file that was being read.
        item: String,
        /// The offset of the field.
        offset: u64,
        /// Bytes of the field.
        needed: u64,
        /// Bytes from `offset` to the end of the file.
        available: u64,
    },
    /// A count or length that the rest of the file cannot hold.
    #[error(
        "{item} at byte {offset} claims {count} elements, but the {available} bytes that are left hold at most {limit}: the file is damaged"
    )]
    CountBeyondFile {
        /// The part of the file that is counted.
        item: String,
        /// The offset of its first element.
        offset: u64,
        /// The count in the file.
        count: u64,
        /// The most elements that fit.
        limit: u64,
        /// Bytes from `offset` to the end of the file.
        available: u64,
    },
    /// A tensor's name that is not UTF-8.
    #[error("{item} at byte {offset} is not valid UTF-8")]
    InvalidUtf8 {
        /// The part of the file that was being read.
        item: String,
        /// The offset of the string's first byte.
        offset: u64,
    },
    /// A metadata value of a type that GGUF does not define.
    #[error("{item} at byte {offset} has the unknown value type {id} (0 to 12 are defined)")]
    UnknownValueType {
        /// The part of the file that was being read.
        item: String,
        /// The offset of the type field.
        offset: u64,
        /// The type field.
        id: u32,
    },
    /// A boolean that is neither 0 nor 1.
    #[error("{item} at byte {offset} is a boolean with the value {value} (0 and 1 are defined)")]
    InvalidBool {
        /// The part of the file that was being read.
        item: String,
        /// The offset of the byte.
        offset: u64,
        /// The byte.
        value: u8,
    },
    /// Arrays nested deeper than [`crate::MAX_ARRAY_DEPTH`].
    #[error("{item} at byte {offset} nests arrays deeper than {limit} levels")]
    NestedTooDeep {
        /// The part of the file that was being read.
        item: String,
        /// The offset of the innermost array.
        offset: u64,
        /// The deepest nesting that is read and written.
        limit: usize,
    },
    /// A metadata key that occurs twice.
    #[error("the metadata key `{key}` occurs twice, the second time at byte {offset}")]
    DuplicateKey {
        /// The key.
        key: String,
        /// The offset of the second one.
        offset: u64,
    },
    /// A `general.alignment` outside [`crate::MIN_ALIGNMENT`] to [`crate::MAX_ALIGNMENT`] or not a power of two.
    #[error(
        "general.alignment is {value}; it must be a power of two from {} to {}",
        crate::MIN_ALIGNMENT,
        crate::MAX_ALIGNMENT
    )]
    InvalidAlignment {
        /// The value.
        value: u64,
    },

    // ---- tensors -------------------------------------------------------------------------
    /// A tensor name that occurs twice.
    #[error("the tensor name `{tensor}` occurs twice")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// A tensor without dimensions or with more than four.
    #[error("tensor `{tensor}` has {n_dims} dimensions; 1 to 4 are supported")]
    DimensionCount {
        /// The tensor.
        tensor: String,
        /// Its number of dimensions.
        n_dims: usize,
    },
    /// A dimension of zero, or more elements than can be addressed.
    #[error("tensor `{tensor}` has the shape {shape:?}, which {problem}")]
    InvalidShape {
        /// The tensor.
        tensor: String,
        /// Its shape, row length first.
        shape: Vec<u64>,
        /// The problem, as the end of a sentence about the shape.
        problem: &'static str,
    },
    /// A row length that is not a multiple of the type's block length.
    #[error("tensor `{tensor}` has rows of {row_len} elements, but {ty} needs a multiple of {}", ty.block_len())]
    PartialBlock {
        /// The tensor.
        tensor: String,
        /// Its type.
        ty: TensorType,
        /// Its row length.
        row_len: u64,
    },
    /// A tensor of a type that ggml has, but this crate does not.
    #[error(
        "tensor `{tensor}` has the type {name}, which is not supported; use a version of the model in one of {}",
        TensorType::names()
    )]
    UnsupportedTensorType {
        /// The tensor.
        tensor: String,
        /// ggml's name of the type.
        name: &'static str,
    },
    /// A tensor with a type id that ggml does not define.
    #[error("tensor `{tensor}` has the unknown type id {id}: the file is damaged or newer than this program")]
    UnknownTensorType {
        /// The tensor.
        tensor: String,
        /// The type field.
        id: u32,
    },
    /// A tensor offset that is not a multiple of the file's alignment.
    #[error(
        "tensor `{tensor}` starts at offset {offset} of the tensor data, which is not a multiple of the alignment {alignment}"
    )]
    Misaligned {
        /// The tensor.
        tensor: String,
        /// Its offset from the start of the tensor data.
        offset: u64,
        /// The file's alignment.
        alignment: usize,
    },
    /// A tensor that reaches beyond the end of the file.
    #[error(
        "the file is truncated: tensor `{tensor}` needs {size} bytes at offset {offset} of the tensor data (which starts at byte {data_start}), but the file has only {file_size} bytes; the download was probably interrupted"
    )]
    TensorBeyondFile {
        /// The tensor.
        tensor: String,
        /// Its offset from the start of the tensor data.
        offset: u64,
        /// Its size in bytes.
        size: u64,
        /// The offset of the tensor data.
        data_start: u64,
        /// The size of the file.
        file_size: u64,
    },
    /// Two tensors that share bytes.
    #[error("the tensors `{first}` and `{second}` overlap in the file")]
    Overlap {
        /// The tensor that starts first.
        first: String,
        /// The other one.
        second: String,
    },

    // ---- split files ---------------------------------------------------------------------
    /// The metadata says that the file is one part of several, but its name does not.
    #[error(
        "{} is part {} of {count} of a split model; name it like `model-{:05}-of-{count:05}.gguf`, beside the other parts",
        path.display(), no + 1, no + 1
    )]
    SplitName {
        /// The file.
        path: PathBuf,
        /// Its zero-based number, `split.no`.
        no: u32,
        /// The number of parts, `split.count`.
        count: u32,
    },
    /// A part of a split model is missing.
    #[error("part {} of {count} of this split model is missing: {}", no + 1, path.display())]
    MissingPart {
        /// The path of the missing file.
        path: PathBuf,
        /// Its zero-based number.
        no: u32,
        /// The number of parts.
        count: u32,
    },
    /// The parts of a split model contradict each other or their names.
    #[error(
        "{}: {key} is {found}, expected {expected}: the parts do not belong together",
        path.display()
    )]
    SplitMismatch {
        /// The part that does not fit.
        path: PathBuf,
        /// The metadata key, or a phrase for the number that disagrees.
        key: &'static str,
        /// The number according to the other parts or the file name.
        expected: u64,
        /// The number according to this part; "missing" when it has none.
        found: String,
    },

    // ---- importance files ----------------------------------------------------------------
    /// An importance matrix file that is damaged or inconsistent.
    #[error("importance of columns: {entry} {problem}")]
    Imatrix {
        /// The matrix, or another part of the file that was being read.
        entry: String,
        /// The problem, as the end of a sentence about the entry.
        problem: &'static str,
    },

    // ---- metadata access -----------------------------------------------------------------
    /// A metadata value of another type than the caller needs.
    #[error("the metadata key `{key}` is of type {found}, expected {expected}")]
    MetadataType {
        /// The key.
        key: String,
        /// The type that the caller needs.
        expected: &'static str,
        /// The type in the file.
        found: String,
    },
    /// A metadata integer that does not fit the type that the caller needs.
    #[error("the metadata key `{key}` is {value}, which does not fit {expected}")]
    MetadataRange {
        /// The key.
        key: String,
        /// The type that the caller needs.
        expected: &'static str,
        /// The integer in the file.
        value: i128,
    },

    // ---- types and quantisation ----------------------------------------------------------
    /// A name that is not that of a tensor type.
    #[error("unknown tensor type `{name}`; known are {}", TensorType::names())]
    UnknownTypeName {
        /// The name.
        name: String,
    },
    /// The number of values is not a multiple of the block length.
    #[error("cannot quantise {len} values to {ty}: it needs a multiple of {}", ty.block_len())]
    NotWholeBlocks {
        /// The target type.
        ty: TensorType,
        /// The number of values.
        len: usize,
    },

    // ---- writing -------------------------------------------------------------------------
    /// The system refused to write.
    #[error("cannot write the GGUF file: {source}")]
    Write {
        /// The system's reason.
        source: io::Error,
    },
    /// More data than the declared tensors hold.
    #[error("{excess} bytes were written beyond the {declared} that the declared tensors hold")]
    TooMuchData {
        /// Bytes of all declared tensors.
        declared: u64,
        /// Bytes that do not fit.
        excess: u64,
    },
    /// The writer was finished before every tensor was written.
    #[error("tensor `{tensor}` got {written} of its {declared} bytes")]
    MissingData {
        /// The first incomplete tensor.
        tensor: String,
        /// Bytes of the tensor.
        declared: u64,
        /// Bytes that were written.
        written: u64,
    },
}

impl GgufError {
    /// The error without the [`InFile`](Self::InFile) wrapper that names the file.
    pub fn root(&self) -> &Self {
        match self {
            Self::InFile { error, .. } => error.root(),
            other => other,
        }
    }

    /// Wraps the error with the path of its file.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        Self::InFile { path: path.to_owned(), error: Box::new(self) }
    }

    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Io { .. } | Self::OutOfMemory { .. } | Self::Write { .. } => ErrorKind::Io,
            Self::UnknownTypeName { .. }
            | Self::NotWholeBlocks { .. }
            | Self::TooMuchData { .. }
            | Self::MissingData { .. } => ErrorKind::Usage,
            Self::NotFound { .. }
            | Self::IsDirectory { .. }
            | Self::NotRegular { .. }
            | Self::Empty
            | Self::GitLfsPointer { .. }
            | Self::Safetensors
            | Self::Html
            | Self::ZipOrPytorch
            | Self::LegacyGgml { .. }
            | Self::NotGguf { .. }
            | Self::BigEndian { .. }
            | Self::UnsupportedVersion { .. }
            | Self::Truncated { .. }
            | Self::CountBeyondFile { .. }
            | Self::InvalidUtf8 { .. }
            | Self::UnknownValueType { .. }
            | Self::InvalidBool { .. }
            | Self::NestedTooDeep { .. }
            | Self::DuplicateKey { .. }
            | Self::InvalidAlignment { .. }
            | Self::DuplicateTensor { .. }
            | Self::DimensionCount { .. }
            | Self::InvalidShape { .. }
            | Self::PartialBlock { .. }
            | Self::UnsupportedTensorType { .. }
            | Self::UnknownTensorType { .. }
            | Self::Misaligned { .. }
            | Self::TensorBeyondFile { .. }
            | Self::Overlap { .. }
            | Self::SplitName { .. }
            | Self::MissingPart { .. }
            | Self::SplitMismatch { .. }
            | Self::Imatrix { .. }
            | Self::MetadataType { .. }
            | Self::MetadataRange { .. } => ErrorKind::Model,
            Self::InFile { error, .. } => error.kind(),
        }
    }
}

/// The end of a message that suggests files; empty without suggestions.
fn did_you_mean(suggestions: &[PathBuf]) -> String {
    let names: Vec<_> = suggestions.iter().map(|p| p.display().to_string()).collect();
    match names.as_slice() {
        [] => String::new(),
        names => format!("; did you mean {}?", names.join(" or ")),
    }
}

/// Bytes as an escaped string in quotes.
fn quote_bytes(bytes: &[u8]) -> String {
    format!("\"{}\"", bytes.escape_ascii())
}
