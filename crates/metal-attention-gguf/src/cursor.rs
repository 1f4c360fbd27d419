//! A reader of little-endian fields from a byte slice: numbers, strings, and metadata values. Errors state what was being read
//! and the byte offset. Counts are checked against the rest of the file before memory is allocated for them.

use std::borrow::Cow;
use std::fmt;

use crate::strings::escaped;
use crate::value::ValueType;
use crate::{Array, GgufError, Result, StringArray, Value};

/// The deepest nesting of metadata arrays that is read and written; an array of arrays is two deep.
pub const MAX_ARRAY_DEPTH: usize = 4;

/// The part of the file that is being read, for error messages.
#[derive(Clone, Copy)]
pub(crate) enum ReadContext<'a> {
    /// A field of the header, by its name.
    Header(&'static str),
    /// The key of a metadata entry, by the entry's index.
    Key(u64),
    /// The value of a metadata entry, by its key.
    Value(&'a str),
    /// The name of a tensor, by its index.
    TensorName(u64),
    /// The description of a tensor, by its name.
    Tensor(&'a str),
}

impl fmt::Display for ReadContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(field) => write!(f, "the {field} in the header"),
            Self::Key(i) => write!(f, "the key of metadata entry {i}"),
            Self::Value(key) => write!(f, "the value of `{key}`"),
            Self::TensorName(i) => write!(f, "the name of tensor {i}"),
            Self::Tensor(name) => write!(f, "the description of tensor `{name}`"),
        }
    }
}

/// A reader with a position in the bytes of a file. Every read advances it; after an error it stays before what could not be
/// read.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    /// The offset of the next byte, at most `bytes.len()`.
    position: usize,
}

impl<'a> Cursor<'a> {
    /// A reader at the beginning of `bytes`.
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    /// The offset of the next byte.
    pub(crate) fn position(&self) -> u64 {
        self.position as u64
    }

    /// Bytes after the position.
    fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// Reads the next `n` bytes.
    fn take(&mut self, context: ReadContext, n: usize) -> Result<&'a [u8]> {
        match self.bytes[self.position..].get(..n) {
            Some(taken) => {
                self.position += n;
                Ok(taken)
            }
            None => Err(self.truncated(context, n as u64)),
        }
    }

    /// The error for a file that ends before `needed` more bytes.
    fn truncated(&self, context: ReadContext, needed: u64) -> GgufError {
        GgufError::Truncated {
            item: context.to_string(),
            offset: self.position(),
            needed,
            available: self.remaining() as u64,
        }
    }

    /// Reads the next `N` bytes as an array.
    fn array<const N: usize>(&mut self, context: ReadContext) -> Result<[u8; N]> {
        match self.bytes[self.position..].first_chunk() {
            Some(&taken) => {
                self.position += N;
                Ok(taken)
            }
            None => Err(self.truncated(context, N as u64)),
        }
    }

    pub(crate) fn u32(&mut self, context: ReadContext) -> Result<u32> {
        self.array(context).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, context: ReadContext) -> Result<u64> {
        self.array(context).map(u64::from_le_bytes)
    }

    /// Reads a 64-bit count of elements that need at least `min_bytes` each; an error where the rest of the file is too short
    /// for them.
    pub(crate) fn count(&mut self, context: ReadContext, min_bytes: u64) -> Result<usize> {
        let count = self.u64(context)?;
        let available = self.remaining() as u64;
        let limit = available / min_bytes;
        if count > limit {
            return Err(GgufError::CountBeyondFile {
                item: context.to_string(),
                offset: self.position(),
                count,
                limit,
                available,
            });
        }
        Ok(count as usize)
    }

    /// Reads a string: a 64-bit length, then its bytes. Bytes that are not UTF-8 are escaped.
    pub(crate) fn escaped_string(&mut self, context: ReadContext) -> Result<Cow<'a, str>> {
        let len = self.count(context, 1)?;
        Ok(escaped(self.take(context, len)?))
    }

    /// Reads a string that has to be UTF-8: a 64-bit length, then its bytes.
    pub(crate) fn string(&mut self, context: ReadContext) -> Result<&'a str> {
        let len = self.count(context, 1)?;
        let offset = self.position();
        let bytes = self.take(context, len)?;
        std::str::from_utf8(bytes).map_err(|_| GgufError::InvalidUtf8 { item: context.to_string(), offset })
    }

    /// Reads the value of the metadata entry `key`: a value type, then a value of that type.
    pub(crate) fn value(&mut self, key: &str) -> Result<Value> {
        let context = ReadContext::Value(key);
        Ok(match self.value_type(context)? {
            ValueType::U8 => Value::U8(u8::from_le_bytes(self.array(context)?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(self.array(context)?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(self.array(context)?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(self.array(context)?)),
            ValueType::U32 => Value::U32(self.u32(context)?),
            ValueType::I32 => Value::I32(i32::from_le_bytes(self.array(context)?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(self.array(context)?)),
            ValueType::Bool => Value::Bool(self.bools(context, 1)?[0]),
            ValueType::String => Value::String(self.escaped_string(context)?.into_owned()),
            ValueType::Array => Value::Array(self.values(context, 1)?),
            ValueType::U64 => Value::U64(self.u64(context)?),
            ValueType::I64 => Value::I64(i64::from_le_bytes(self.array(context)?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(self.array(context)?)),
        })
    }

    fn value_type(&mut self, context: ReadContext) -> Result<ValueType> {
        let offset = self.position();
        let id = self.u32(context)?;
        ValueType::from_id(id).ok_or_else(|| GgufError::UnknownValueType { item: context.to_string(), offset, id })
    }

    /// Reads an array: element type, 64-bit length, elements. `depth` is 1 for an array that is not inside another.
    fn values(&mut self, context: ReadContext, depth: usize) -> Result<Array> {
        if depth > MAX_ARRAY_DEPTH {
            return Err(GgufError::NestedTooDeep {
                item: context.to_string(),
                offset: self.position(),
                limit: MAX_ARRAY_DEPTH,
            });
        }
        let ty = self.value_type(context)?;
        let count = self.count(context, ty.min_bytes())?;
        Ok(match ty {
            ValueType::U8 => Array::U8(self.numbers(context, count)?),
            ValueType::I8 => Array::I8(self.numbers(context, count)?),
            ValueType::U16 => Array::U16(self.numbers(context, count)?),
            ValueType::I16 => Array::I16(self.numbers(context, count)?),
            ValueType::U32 => Array::U32(self.numbers(context, count)?),
            ValueType::I32 => Array::I32(self.numbers(context, count)?),
            ValueType::F32 => Array::F32(self.numbers(context, count)?),
            ValueType::Bool => Array::Bool(self.bools(context, count)?),
            ValueType::String => Array::String(self.strings(context, count)?),
            ValueType::Array => {
                Array::Array((0..count).map(|_| self.values(context, depth + 1)).collect::<Result<_>>()?)
            }
            ValueType::U64 => Array::U64(self.numbers(context, count)?),
            ValueType::I64 => Array::I64(self.numbers(context, count)?),
            ValueType::F64 => Array::F64(self.numbers(context, count)?),
        })
    }

    /// Reads `count` numbers with one copy: they are stored as in memory.
    fn numbers<T: bytemuck::Pod>(&mut self, context: ReadContext, count: usize) -> Result<Vec<T>> {
        Ok(bytemuck::pod_collect_to_vec(self.take(context, count * size_of::<T>())?))
    }

    fn bools(&mut self, context: ReadContext, count: usize) -> Result<Vec<bool>> {
        let offset = self.position();
        let bytes = self.take(context, count)?;
        match bytes.iter().position(|&byte| byte > 1) {
            None => Ok(bytes.iter().map(|&byte| byte == 1).collect()),
            Some(i) => {
                Err(GgufError::InvalidBool { item: context.to_string(), offset: offset + i as u64, value: bytes[i] })
            }
        }
    }

    /// Reads `count` strings to one growing buffer.
    fn strings(&mut self, context: ReadContext, count: usize) -> Result<StringArray> {
        let mut text = Vec::new();
        let mut ends = Vec::with_capacity(count);
        for _ in 0..count {
            let len = self.count(context, 1)?;
            text.extend_from_slice(self.take(context, len)?);
            ends.push(text.len());
        }
        Ok(StringArray::from_bytes(text, ends))
    }
}
