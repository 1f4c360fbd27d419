//! Parsing of everything before the tensor data of one file: header, metadata and tensor table, with all checks, so that the
//! ranges of the tensors are valid.

use std::collections::HashSet;

use crate::cursor::{Cursor, ReadContext};
use crate::recognise::foreign_format;
use crate::{GgufError, Metadata, Result, TensorType};

/// The alignment of tensor data, in bytes, in files without `general.alignment`.
pub const DEFAULT_ALIGNMENT: usize = 32;
/// The smallest `general.alignment` that is accepted: the GGUF specification requires a multiple of 8.
pub const MIN_ALIGNMENT: usize = 8;
/// The largest `general.alignment` that is accepted.
pub const MAX_ALIGNMENT: usize = 1 << 20;
/// The largest number of dimensions of a tensor.
pub const MAX_DIMS: usize = 4;
/// The metadata key that holds the alignment.
const ALIGNMENT_KEY: &str = "general.alignment";
/// The first four bytes of every GGUF file.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";

/// Bytes of the shortest metadata entry: an empty key, a type, a one-byte value.
const MIN_ENTRY_BYTES: u64 = 8 + 4 + 1;
/// Bytes of the shortest tensor description: an empty name, one dimension, type and offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

/// The parsed contents of a file up to the tensor data.
#[derive(Debug)]
pub(crate) struct GgufHeader {
    /// 2 or 3.
    pub(crate) version: u32,
    /// Bytes.
    pub(crate) alignment: usize,
    pub(crate) metadata: Metadata,
    /// The tensors in file order; every range lies inside the file, and no two overlap.
    pub(crate) tensors: Vec<TensorInfo>,
}

/// A checked entry of the tensor table.
#[derive(Debug)]
pub(crate) struct TensorInfo {
    pub(crate) name: String,
    pub(crate) shape: TensorShape,
    pub(crate) ty: TensorType,
    /// The offset of the first byte in the file.
    pub(crate) start: usize,
    /// The size in bytes.
    pub(crate) bytes: usize,
}

/// The shape of a tensor: one to four dimensions, the row length first, none of them zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TensorShape {
    dims: [usize; MAX_DIMS],
    n_dims: usize,
}

impl TensorShape {
    /// The shape `[row_len, n_rows]` of a matrix.
    pub(crate) fn matrix(row_len: usize, n_rows: usize) -> Self {
        let mut dims = [1; MAX_DIMS];
        (dims[0], dims[1]) = (row_len, n_rows);
        Self { dims, n_dims: 2 }
    }

    /// Checks the shape of a tensor of type `ty`, and returns it with the tensor's size in bytes. `tensor` names the tensor in
    /// errors.
    pub(crate) fn new(tensor: &str, shape: &[u64], ty: TensorType) -> Result<(Self, usize)> {
        if shape.is_empty() || shape.len() > MAX_DIMS {
            return Err(GgufError::DimensionCount { tensor: tensor.to_owned(), n_dims: shape.len() });
        }
        let invalid = |problem| GgufError::InvalidShape { tensor: tensor.to_owned(), shape: shape.to_vec(), problem };
        if shape.contains(&0) {
            return Err(invalid("has no elements"));
        }
        if !shape[0].is_multiple_of(ty.block_len() as u64) {
            return Err(GgufError::PartialBlock { tensor: tensor.to_owned(), ty, row_len: shape[0] });
        }
        // A caller may allocate four bytes per element; i64 is ggml's limit.
        let elements = shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim));
        let elements = elements
            .filter(|&n| n <= i64::MAX as u64 / 4)
            .and_then(|n| usize::try_from(n).ok())
            .ok_or_else(|| invalid("has more elements than can be addressed"))?;
        let mut dims = [1; MAX_DIMS];
        for (dim, &n) in dims.iter_mut().zip(shape) {
            *dim = n as usize;
        }
        let n_dims = shape.len();
        Ok((Self { dims, n_dims }, ty.row_bytes(elements)))
    }

    /// The dimensions.
    pub(crate) fn as_slice(&self) -> &[usize] {
        &self.dims[..self.n_dims]
    }
}

/// Parses everything before the tensor data of the file `bytes`, and checks that the tensors lie in the file and do not
/// overlap.
pub(crate) fn parse(bytes: &[u8]) -> Result<GgufHeader> {
    if bytes.is_empty() {
        return Err(GgufError::Empty);
    }
    if !bytes.starts_with(&MAGIC) {
        return Err(foreign_format(bytes));
    }
    let mut cursor = Cursor::new(bytes);
    cursor.u32(ReadContext::Header("magic"))?;
    let version = cursor.u32(ReadContext::Header("version"))?;
    check_version(version)?;
    let n_tensors = cursor.count(ReadContext::Header("number of tensors"), MIN_TENSOR_BYTES)?;
    let n_entries = cursor.count(ReadContext::Header("number of metadata entries"), MIN_ENTRY_BYTES)?;
    let metadata = read_metadata(&mut cursor, n_entries)?;
    let alignment = alignment(&metadata)?;
    let tensors = read_tensors(&mut cursor, n_tensors, alignment, bytes.len())?;
    Ok(GgufHeader { version, alignment, metadata, tensors })
}

/// Accepts versions 2 and 3, which differ in the number only, and reports a big-endian file as such.
pub(crate) fn check_version(version: u32) -> Result<()> {
    match (version, version.swap_bytes()) {
        (2 | 3, _) => Ok(()),
        (_, version @ 1..=3) => Err(GgufError::BigEndian { version }),
        _ => Err(GgufError::UnsupportedVersion { version }),
    }
}

/// The alignment of tensor data according to the metadata.
pub(crate) fn alignment(metadata: &Metadata) -> Result<usize> {
    match metadata.usize(ALIGNMENT_KEY)? {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(n) if n.is_power_of_two() && (MIN_ALIGNMENT..=MAX_ALIGNMENT).contains(&n) => Ok(n),
        Some(n) => Err(GgufError::InvalidAlignment { value: n as u64 }),
    }
}

/// Reads `n_entries` key-value pairs; an error where a key occurs twice.
fn read_metadata(cursor: &mut Cursor, n_entries: usize) -> Result<Metadata> {
    let mut metadata = Metadata::new();
    for i in 0..n_entries {
        let offset = cursor.position();
        let key = cursor.escaped_string(ReadContext::Key(i as u64))?;
        if metadata.get(&key).is_some() {
            return Err(GgufError::DuplicateKey { key: key.into_owned(), offset });
        }
        let value = cursor.value(&key)?;
        metadata.set(key, value);
    }
    Ok(metadata)
}

/// An entry of the tensor table, before the beginning of the tensor data is known.
struct TensorEntry<'a> {
    name: &'a str,
    shape: TensorShape,
    ty: TensorType,
    /// The size in bytes.
    bytes: usize,
    /// The offset in bytes from the start of the tensor data.
    offset: u64,
}

/// Reads the tensor table, and computes and checks the range of each tensor in a file of `file_size` bytes.
fn read_tensors(cursor: &mut Cursor, n_tensors: usize, alignment: usize, file_size: usize) -> Result<Vec<TensorInfo>> {
    let entries: Vec<_> = (0..n_tensors).map(|i| read_tensor(cursor, i, alignment)).collect::<Result<_>>()?;
    let data_start = cursor.position().next_multiple_of(alignment as u64);

    let mut seen = HashSet::with_capacity(n_tensors);
    let mut tensors = Vec::with_capacity(n_tensors);
    for entry in &entries {
        let tensor = || entry.name.to_owned();
        if !seen.insert(entry.name) {
            return Err(GgufError::DuplicateTensor { tensor: tensor() });
        }
        let start = data_start
            .checked_add(entry.offset)
            .filter(|start| start.checked_add(entry.bytes as u64).is_some_and(|end| end <= file_size as u64));
        let Some(start) = start else {
            return Err(GgufError::TensorBeyondFile {
                tensor: tensor(),
                offset: entry.offset,
                size: entry.bytes as u64,
                data_start,
                file_size: file_size as u64,
            });
        };
        tensors.push(TensorInfo {
            name: tensor(),
            shape: entry.shape,
            ty: entry.ty,
            start: start as usize,
            bytes: entry.bytes,
        });
    }
    check_overlap(&tensors)?;
    Ok(tensors)
}

/// Reads entry `index` of the tensor table.
fn read_tensor<'a>(cursor: &mut Cursor<'a>, index: usize, alignment: usize) -> Result<TensorEntry<'a>> {
    let name = cursor.string(ReadContext::TensorName(index as u64))?;
    let context = ReadContext::Tensor(name);
    let n_dims = cursor.u32(context)? as usize;
    if n_dims > MAX_DIMS {
        return Err(GgufError::DimensionCount { tensor: name.to_owned(), n_dims });
    }
    let mut dims = [0; MAX_DIMS];
    for dim in &mut dims[..n_dims] {
        *dim = cursor.u64(context)?;
    }
    let id = cursor.u32(context)?;
    let ty = TensorType::from_id(id).ok_or_else(|| TensorType::unsupported(name, id))?;
    let offset = cursor.u64(context)?;
    if !offset.is_multiple_of(alignment as u64) {
        return Err(GgufError::Misaligned { tensor: name.to_owned(), offset, alignment });
    }
    let (shape, bytes) = TensorShape::new(name, &dims[..n_dims], ty)?;
    Ok(TensorEntry { name, shape, ty, bytes, offset })
}

/// An error where two tensors share bytes.
fn check_overlap(tensors: &[TensorInfo]) -> Result<()> {
    let mut by_start: Vec<_> = tensors.iter().collect();
    by_start.sort_by_key(|tensor| tensor.start);
    match by_start.windows(2).find(|pair| pair[0].start + pair[0].bytes > pair[1].start) {
        None => Ok(()),
        Some(pair) => Err(GgufError::Overlap { first: pair[0].name.clone(), second: pair[1].name.clone() }),
    }
}
