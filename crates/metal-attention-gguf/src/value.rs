//! Metadata values: their types, and values and arrays of these.

use crate::StringArray;

/// The type of a metadata value. The discriminants are GGUF's type numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// The type with this number; `None` for numbers that GGUF does not define.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.get(id as usize).copied()
    }

    /// The type's number in a file.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// The type's name in messages, such as `u32` or `string`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }

    /// Bytes of the shortest value of the type: a string has at least its length, an array its element type and length.
    pub(crate) const fn min_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::String | Self::U64 | Self::I64 | Self::F64 => 8,
            Self::Array => 12,
        }
    }
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// A metadata array: all elements have one type.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(StringArray),
    /// Arrays of arrays; the inner ones may differ in type and length.
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl Value {
    /// The type of the value.
    pub fn value_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// The value of any integer type; `None` for other types.
    pub fn as_integer(&self) -> Option<i128> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::I8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::I16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::I32(v) => Some(v.into()),
            Self::U64(v) => Some(v.into()),
            Self::I64(v) => Some(v.into()),
            Self::F32(_) | Self::F64(_) | Self::Bool(_) | Self::String(_) | Self::Array(_) => None,
        }
    }

    /// The type's name in messages, such as `u32` or `array of string`.
    pub(crate) fn type_name(&self) -> String {
        match self {
            Self::Array(array) => format!("array of {}", array.element_type().name()),
            other => other.value_type().name().to_owned(),
        }
    }
}

impl Array {
    /// The type of the elements.
    pub fn element_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
            Self::Array(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F64(v) => v.len(),
        }
    }

    /// True when there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements of any integer array as `T`. `None` for arrays of other types; the inner error is the first value that does
    /// not fit `T`.
    pub(crate) fn integers<T: TryFrom<i128>>(&self) -> Option<Result<Vec<T>, i128>> {
        fn fit<S: Copy + Into<i128>, T: TryFrom<i128>>(values: &[S]) -> Result<Vec<T>, i128> {
            let fit = |&value: &S| T::try_from(value.into()).map_err(|_| value.into());
            values.iter().map(fit).collect()
        }
        Some(match self {
            Self::U8(v) => fit(v),
            Self::I8(v) => fit(v),
            Self::U16(v) => fit(v),
            Self::I16(v) => fit(v),
            Self::U32(v) => fit(v),
            Self::I32(v) => fit(v),
            Self::U64(v) => fit(v),
            Self::I64(v) => fit(v),
            Self::F32(_) | Self::F64(_) | Self::Bool(_) | Self::String(_) | Self::Array(_) => return None,
        })
    }
}

macro_rules! from_number {
    ($($ty:ty => $variant:ident),*) => {$(
        impl From<$ty> for Value {
            fn from(value: $ty) -> Self {
                Self::$variant(value)
            }
        }
        impl From<Vec<$ty>> for Array {
            fn from(values: Vec<$ty>) -> Self {
                Self::$variant(values)
            }
        }
        impl From<Vec<$ty>> for Value {
            fn from(values: Vec<$ty>) -> Self {
                Self::Array(values.into())
            }
        }
    )*};
}
from_number!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32,
    bool => Bool, u64 => U64, i64 => I64, f64 => F64);

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::String(value.to_owned())
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Self::String(value)
    }
}

impl From<Array> for Value {
    fn from(value: Array) -> Self {
        Self::Array(value)
    }
}

impl From<StringArray> for Value {
    fn from(values: StringArray) -> Self {
        Self::Array(Array::String(values))
    }
}

impl From<Vec<String>> for Value {
    fn from(values: Vec<String>) -> Self {
        values.into_iter().collect::<StringArray>().into()
    }
}

impl From<Vec<&str>> for Value {
    fn from(values: Vec<&str>) -> Self {
        values.into_iter().collect::<StringArray>().into()
    }
}

impl From<Vec<Array>> for Value {
    fn from(values: Vec<Array>) -> Self {
        Self::Array(Array::Array(values))
    }
}
