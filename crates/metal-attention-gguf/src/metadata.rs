//! The metadata of a GGUF file: key-value pairs, with getters that convert to the type that the caller needs.

use std::collections::HashMap;

use crate::{Array, GgufError, Result, StringArray, Value};

/// Key-value pairs in file order, with lookup by key in constant time.
///
/// The typed getters return `Ok(None)` when the key is absent. When the value has another type or does not fit, they return an
/// error that names the key and both types, or the value.
///
/// ```
/// use metal_attention_gguf::Metadata;
/// let mut metadata = Metadata::new();
/// metadata.set("general.architecture", "llama");
/// metadata.set("llama.block_count", 5u32);
/// assert_eq!(metadata.usize("llama.block_count")?, Some(5));
/// assert!(metadata.str("llama.block_count").is_err());
/// # Ok::<(), metal_attention_gguf::GgufError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    /// The index in `entries` of each key.
    index: HashMap<String, usize>,
}

impl Metadata {
    /// Metadata without pairs.
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of pairs.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True when there are no pairs.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The pairs in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> + '_ {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of `key`; `None` where the key is absent.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&i| &self.entries[i].1)
    }

    /// Sets the value of `key`: appends the pair, or replaces the value of an existing key at its position.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        let key = key.into();
        if let Some(&i) = self.index.get(&key) {
            self.entries[i].1 = value.into();
        } else {
            self.index.insert(key.clone(), self.entries.len());
            self.entries.push((key, value.into()));
        }
    }

    /// Removes `key` and returns its value. The other pairs keep their order.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        let removed = self.index.remove(key)?;
        for i in self.index.values_mut() {
            *i -= usize::from(*i > removed);
        }
        Some(self.entries.remove(removed).1)
    }

    /// An integer of any type whose value fits `u32`.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        self.integer(key, "u32")
    }

    /// An integer of any type whose value fits `usize`.
    pub fn usize(&self, key: &str) -> Result<Option<usize>> {
        self.integer(key, "usize")
    }

    /// A float of either width, rounded to `f32`.
    pub fn f32(&self, key: &str) -> Result<Option<f32>> {
        self.convert(key, "f32", |value| match value {
            Value::F32(v) => Some(*v),
            Value::F64(v) => Some(*v as f32),
            _ => None,
        })
    }

    /// A boolean.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.convert(key, "bool", |value| match value {
            Value::Bool(v) => Some(*v),
            _ => None,
        })
    }

    /// A string, up to its first zero byte, where C programs end it.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.convert(key, "string", |value| match value {
            Value::String(v) => Some(v.split('\0').next().unwrap_or_default()),
            _ => None,
        })
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Result<Option<&StringArray>> {
        self.convert(key, "array of string", |value| match value {
            Value::Array(Array::String(v)) => Some(v),
            _ => None,
        })
    }

    /// An array of any integer type whose values fit `u32`.
    pub fn u32s(&self, key: &str) -> Result<Option<Vec<u32>>> {
        self.integers(key, "array of u32")
    }

    /// An array of any integer type whose values fit `i32`.
    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>> {
        self.integers(key, "array of i32")
    }

    /// An array of floats of either width, rounded to `f32`.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.convert(key, "array of f32", |value| match value {
            Value::Array(Array::F32(v)) => Some(v.clone()),
            Value::Array(Array::F64(v)) => Some(v.iter().map(|&x| x as f32).collect()),
            _ => None,
        })
    }

    /// The value of `key` through `convert`, whose `None` is a type error.
    fn convert<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(GgufError::MetadataType { key: key.to_owned(), expected, found: value.type_name() }),
        }
    }

    /// An integer of any type as a `T`.
    fn integer<T: TryFrom<i128>>(&self, key: &str, expected: &'static str) -> Result<Option<T>> {
        let Some(value) = self.convert(key, expected, Value::as_integer)? else {
            return Ok(None);
        };
        T::try_from(value).map(Some).map_err(|_| out_of_range(key, expected, value))
    }

    /// An array of any integer type as a vector of `T`.
    fn integers<T: TryFrom<i128>>(&self, key: &str, expected: &'static str) -> Result<Option<Vec<T>>> {
        let values = self.convert(key, expected, |value| match value {
            Value::Array(array) => array.integers(),
            _ => None,
        })?;
        values.transpose().map_err(|value| out_of_range(key, expected, value))
    }
}

/// The error for an integer that does not fit the expected type.
fn out_of_range(key: &str, expected: &'static str, value: i128) -> GgufError {
    GgufError::MetadataRange { key: key.to_owned(), expected, value }
}
