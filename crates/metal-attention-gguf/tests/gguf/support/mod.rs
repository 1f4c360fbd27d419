//! Helpers of the GGUF tests: files with every value and tensor type, and files built byte by byte.
#![allow(dead_code)] // Each test file uses a part of it.

use std::path::PathBuf;

use metal_attention_gguf::{Array, GgufFile, GgufWriter, Metadata, Result, StringArray, TensorDecl, TensorType, Value};

/// The path of a file in the repository.
pub fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Writes the metadata and tensors of `file` as a new file.
pub fn rewrite(file: &GgufFile) -> Result<Vec<u8>> {
    let tensors: Vec<TensorDecl> = file.tensors().iter().map(Into::into).collect();
    let mut writer = GgufWriter::new(Vec::new(), file.version(), file.metadata(), &tensors)?;
    for tensor in file.tensors() {
        writer.write(tensor.bytes())?;
    }
    writer.finish()
}

/// A value of every type; arrays and nested arrays of every type, also empty ones.
pub fn every_value() -> Metadata {
    let mut metadata = Metadata::new();
    metadata.set("u8", u8::MAX);
    metadata.set("i8", i8::MIN);
    metadata.set("u16", u16::MAX);
    metadata.set("i16", i16::MIN);
    metadata.set("u32", u32::MAX);
    metadata.set("i32", i32::MIN);
    metadata.set("f32", -1.5f32);
    metadata.set("bool", true);
    metadata.set("string", "grüße, 世界");
    metadata.set("u64", u64::MAX);
    metadata.set("i64", i64::MIN);
    metadata.set("f64", 1e300f64);
    metadata.set("", "an empty key");
    let strings: StringArray = ["", "a", "", "\u{10ffff}"].into_iter().collect();
    let arrays = vec![
        Array::U8(vec![1, 2, 3]),
        Array::I8(vec![-1]),
        Array::U16(vec![1, 65535]),
        Array::I16(vec![-2]),
        Array::U32(vec![7; 5]),
        Array::I32(vec![-7]),
        Array::F32(vec![0.0, -0.0, f32::INFINITY]),
        Array::Bool(vec![true, false, true]),
        Array::String(strings),
        Array::U64(vec![1 << 60]),
        Array::I64(vec![-1]),
        Array::F64(vec![f64::MIN_POSITIVE]),
        Array::String(StringArray::default()),
        Array::Array(vec![]),
        Array::Array(vec![Array::U32(vec![1]), Array::Array(vec![Array::U8(vec![9])])]),
    ];
    for (i, array) in arrays.iter().enumerate() {
        metadata.set(format!("array.{i}"), array.clone());
    }
    metadata.set("arrays", Value::Array(Array::Array(arrays[..14].to_vec())));
    metadata
}

/// A valid file with every value type and a tensor of every type.
pub fn every_kind(version: u32) -> Vec<u8> {
    let mut metadata = every_value();
    metadata.set("general.alignment", 64u32);
    let types = TensorType::ALL;
    let tensors: Vec<TensorDecl> = (1..)
        .zip(types)
        .map(|(rows, &ty)| TensorDecl { name: format!("tensor {ty}"), shape: vec![ty.block_len(), rows, 1], ty })
        .collect();
    let mut writer = GgufWriter::new(Vec::new(), version, &metadata, &tensors).unwrap();
    for tensor in &tensors {
        let bytes = tensor.ty.row_bytes(tensor.shape.iter().product());
        writer.write(&(0..bytes).map(|i| (i * 7) as u8).collect::<Vec<_>>()).unwrap();
    }
    writer.finish().unwrap()
}

/// A file built byte by byte, which may be invalid.
#[derive(Clone)]
pub struct Raw(pub Vec<u8>);

impl Raw {
    /// A header of GGUF version 3.
    pub fn new(n_tensors: u64, n_entries: u64) -> Self {
        Self(b"GGUF".to_vec()).u32(3).u64(n_tensors).u64(n_entries)
    }
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }
    pub fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }
    pub fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }
    pub fn string(self, string: &[u8]) -> Self {
        self.u64(string.len() as u64).bytes(string)
    }
    /// A tensor's entry after the metadata.
    pub fn tensor(self, name: &str, dims: &[u64], ty: u32, offset: u64) -> Self {
        let start = self.string(name.as_bytes()).u32(dims.len() as u32);
        dims.iter().fold(start, |raw, &dim| raw.u64(dim)).u32(ty).u64(offset)
    }
    /// Pads to the default alignment and appends `n` zero bytes.
    pub fn data(mut self, n: usize) -> Self {
        let padded = self.0.len().next_multiple_of(32);
        self.0.resize(padded + n, 0);
        self
    }
}
