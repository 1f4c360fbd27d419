//! Writing GGUF files as a stream: header, metadata and tensor table first, then the data of the tensors in order.

use std::collections::HashSet;
use std::io::Write;

use crate::cursor::MAX_ARRAY_DEPTH;
use crate::parse::{MAGIC, TensorShape, alignment, check_version};
use crate::{Array, GgufError, Metadata, Result, Tensor, TensorType, Value};

/// The declaration of a tensor that will be written: name, shape and type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorDecl {
    /// The name, unique in the file.
    pub name: String,
    /// 1 to 4 dimensions, row length first; none is zero, and the first is whole blocks of `ty`.
    pub shape: Vec<usize>,
    /// The tensor type.
    pub ty: TensorType,
}

impl From<&Tensor> for TensorDecl {
    fn from(tensor: &Tensor) -> Self {
        Self { name: tensor.name().to_owned(), shape: tensor.shape().to_vec(), ty: tensor.ty() }
    }
}

/// Writes a GGUF file as a stream: all tensors are declared first, then their data are written in order.
///
/// Tensors follow each other, each padded with zeros to the alignment. Common tools write files in this way, so a file that is
/// read and written again is the same byte for byte. Without tensors nothing follows the metadata.
///
/// ```
/// use metal_attention_gguf::{GgufFile, GgufWriter, Metadata, TensorDecl, TensorType};
/// let mut metadata = Metadata::new();
/// metadata.set("general.architecture", "llama");
/// let decl = TensorDecl { name: "x".into(), shape: vec![2, 1], ty: TensorType::F32 };
///
/// let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &[decl])?;
/// writer.write(&1.5f32.to_le_bytes())?;
/// writer.write(&2.5f32.to_le_bytes())?;
/// let bytes = writer.finish()?;
///
/// let file = GgufFile::from_bytes(&bytes)?;
/// assert_eq!(file.tensor("x").unwrap().as_f32(), Some(&[1.5, 2.5][..]));
/// # Ok::<(), metal_attention_gguf::GgufError>(())
/// ```
#[derive(Debug)]
pub struct GgufWriter<W: Write> {
    out: W,
    alignment: usize,
    /// Name and size in bytes of the declared tensors.
    tensors: Vec<(String, usize)>,
    /// The index of the tensor that the next bytes belong to.
    current: usize,
    /// Bytes of the current tensor that are written.
    written: usize,
}

impl<W: Write> GgufWriter<W> {
    /// Writes header, metadata and tensor table. `version` is 2 or 3; the alignment is `general.alignment` of the metadata, by
    /// default 32. Metadata or declarations that a reader would refuse are errors.
    pub fn new(out: W, version: u32, metadata: &Metadata, tensors: &[TensorDecl]) -> Result<Self> {
        check_version(version)?;
        let alignment = alignment(metadata)?;
        let mut header = Vec::new();
        header.extend(MAGIC);
        header.extend(version.to_le_bytes());
        put_len(&mut header, tensors.len());
        put_len(&mut header, metadata.len());
        for (key, value) in metadata.iter() {
            put_string(&mut header, key);
            put_value(&mut header, key, value)?;
        }
        let sizes = put_tensors(&mut header, tensors, alignment)?;
        if !tensors.is_empty() {
            header.resize(header.len().next_multiple_of(alignment), 0);
        }
        let mut writer = Self {
            out,
            alignment,
            tensors: tensors.iter().map(|tensor| tensor.name.clone()).zip(sizes).collect(),
            current: 0,
            written: 0,
        };
        writer.put(&header)?;
        Ok(writer)
    }

    /// Writes the next bytes of the tensor data. Calls may divide the data anywhere: a tensor may be written in several
    /// calls, and a call may contain the end of one tensor and the beginning of the next. An error where there are more bytes
    /// than declared.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let Some((_, size)) = self.tensors.get(self.current) else {
                return Err(GgufError::TooMuchData {
                    declared: self.tensors.iter().map(|(_, size)| *size as u64).sum(),
                    excess: bytes.len() as u64,
                });
            };
            let (piece, rest) = bytes.split_at(bytes.len().min(size - self.written));
            let complete = self.written + piece.len() == *size;
            let padding = size.next_multiple_of(self.alignment) - size;
            self.put(piece)?;
            self.written += piece.len();
            bytes = rest;
            if complete {
                self.put(&vec![0; padding])?;
                self.current += 1;
                self.written = 0;
            }
        }
        Ok(())
    }

    /// Checks that every tensor was written completely, flushes the output, and returns it.
    pub fn finish(mut self) -> Result<W> {
        if let Some((tensor, size)) = self.tensors.get(self.current) {
            return Err(GgufError::MissingData {
                tensor: tensor.clone(),
                declared: *size as u64,
                written: self.written as u64,
            });
        }
        self.out.flush().map_err(|source| GgufError::Write { source })?;
        Ok(self.out)
    }

    /// Writes bytes to the output.
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|source| GgufError::Write { source })
    }
}

/// Appends the tensor table to `out`, and returns the size of each tensor in bytes.
fn put_tensors(out: &mut Vec<u8>, tensors: &[TensorDecl], alignment: usize) -> Result<Vec<usize>> {
    let mut names = HashSet::with_capacity(tensors.len());
    let mut sizes = Vec::with_capacity(tensors.len());
    let mut offset = 0;
    for tensor in tensors {
        if !names.insert(&tensor.name) {
            return Err(GgufError::DuplicateTensor { tensor: tensor.name.clone() });
        }
        let dims: Vec<u64> = tensor.shape.iter().map(|&dim| dim as u64).collect();
        let (_, size) = TensorShape::new(&tensor.name, &dims, tensor.ty)?;
        put_string(out, &tensor.name);
        out.extend((dims.len() as u32).to_le_bytes());
        out.extend_from_slice(bytemuck::cast_slice(&dims));
        out.extend(tensor.ty.id().to_le_bytes());
        put_len(out, offset);
        let end = size.checked_next_multiple_of(alignment).and_then(|size| offset.checked_add(size));
        offset = end.ok_or_else(|| GgufError::InvalidShape {
            tensor: tensor.name.clone(),
            shape: dims,
            problem: "makes the file larger than can be addressed",
        })?;
        sizes.push(size);
    }
    Ok(sizes)
}

/// Appends a 64-bit length.
fn put_len(out: &mut Vec<u8>, len: usize) {
    out.extend((len as u64).to_le_bytes());
}

/// Appends a string: its length, then its bytes.
fn put_string(out: &mut Vec<u8>, string: &str) {
    put_len(out, string.len());
    out.extend_from_slice(string.as_bytes());
}

/// Appends a metadata value: its type, then the value.
fn put_value(out: &mut Vec<u8>, key: &str, value: &Value) -> Result<()> {
    out.extend(value.value_type().id().to_le_bytes());
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(v) => put_string(out, v),
        Value::Array(v) => put_array(out, key, v, 1)?,
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
    }
    Ok(())
}

/// Appends an array: its element type, its length, then the elements. An error where arrays are nested too deep.
fn put_array(out: &mut Vec<u8>, key: &str, array: &Array, depth: usize) -> Result<()> {
    if depth > MAX_ARRAY_DEPTH {
        return Err(GgufError::NestedTooDeep {
            item: format!("the value of `{key}`"),
            offset: out.len() as u64,
            limit: MAX_ARRAY_DEPTH,
        });
    }
    out.extend(array.element_type().id().to_le_bytes());
    put_len(out, array.len());
    match array {
        Array::U8(v) => out.extend_from_slice(v),
        Array::I8(v) => out.extend_from_slice(bytemuck::cast_slice(v)),
        Array::U16(v) => out.extend_from_slice(bytemuck::cast_slice(v)),
        Array::I16(v) => out.extend_from_slice(bytemuck::cast_slice(v)),
        Array::U32(v) => out.extend_from_slice(bytemuck::cast_slice(v)),
        Array::I32(v) => out.extend_from_slice(bytemuck::cast_slice(v)),
        Array::F32(v) => out.extend_from_slice(bytemuck::cast_slice(v)),
        Array::Bool(v) => out.extend(v.iter().map(|&v| u8::from(v))),
        Array::String(v) => v.iter().for_each(|v| put_string(out, v)),
        Array::Array(v) => {
            for inner in v {
                put_array(out, key, inner, depth + 1)?;
            }
        }
        Array::U64(v) => out.extend_from_slice(bytemuck::cast_slice(v)),
        Array::I64(v) => out.extend_from_slice(bytemuck::cast_slice(v)),
        Array::F64(v) => out.extend_from_slice(bytemuck::cast_slice(v)),
    }
    Ok(())
}
