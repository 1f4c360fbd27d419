//! The properties of a model that are known without loading it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::SystemTime;

use metal_attention::gguf::{GgufFile, Value as GgufValue};
use metal_attention::table_digest;
use metal_attention_chat::ChatTemplate;
use serde_json::{Map, Value, json};

/// The properties of a model that are known without loading it.
#[derive(Debug, Clone)]
pub struct ModelCard {
    /// The file, or the first one of a split model; `None`: the built-in model.
    pub path: Option<PathBuf>,
    /// The time of its last change.
    pub modified: Option<SystemTime>,
    /// Bytes of all files of the model.
    pub size: u64,
    /// The architecture, such as `llama`.
    pub architecture: String,
    /// The number of its weights.
    pub n_params: u64,
    /// The tensor type of most weights, such as `Q4_K`.
    pub quantization: String,
    /// The file's metadata without chat templates; lists are null.
    pub metadata: Map<String, Value>,
    /// The source of its chat template; `None`: the file has none.
    pub template: Option<String>,
    /// Its capabilities.
    pub capabilities: Capabilities,
    /// A hash of the metadata and the tensor table: 64 hexadecimal digits.
    pub digest: String,
}

/// The capabilities of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(clippy::struct_excessive_bools, reason = "a model has any of them")]
pub struct Capabilities {
    /// It generates text.
    pub completion: bool,
    /// Its chat template describes tools.
    pub tools: bool,
    /// Its chat template has reasoning.
    pub thinking: bool,
    /// It has an `mmproj` file, so that it sees pictures. [`ModelCard::of`] does not know it.
    pub vision: bool,
    /// It has tokens for fill in the middle.
    pub insert: bool,
    /// It computes embeddings or ranks documents, and generates no text.
    pub embedding: bool,
}

impl ModelCard {
    /// Reads the properties of the model in `gguf`: metadata, tensor table and vocabulary, but no weights.
    pub fn of(gguf: &GgufFile) -> Self {
        let metadata = gguf.metadata();
        let text = |key: &str| metadata.str(key).ok().flatten();
        let architecture = text("general.architecture").unwrap_or_default().to_owned();
        let path = gguf.paths().first().cloned();
        let modified = path.as_ref().and_then(|path| path.metadata().ok()?.modified().ok());
        let mut bytes_of_types = BTreeMap::<&str, u64>::new();
        for tensor in gguf.tensors() {
            *bytes_of_types.entry(tensor.ty().name()).or_default() += tensor.n_elements() as u64;
        }
        let main_type = bytes_of_types.into_iter().max_by_key(|(_, n)| *n);
        Self {
            modified,
            size: gguf.file_size(),
            n_params: gguf.tensors().iter().map(|tensor| tensor.n_elements() as u64).sum(),
            quantization: main_type.map_or_else(|| "unknown".to_owned(), |(name, _)| name.to_owned()),
            metadata: scalars(gguf),
            template: text("tokenizer.chat_template").map(str::to_owned),
            capabilities: Capabilities::of(gguf, &architecture),
            digest: table_digest(gguf).map(|byte| format!("{byte:02x}")).concat(),
            architecture,
            path,
        }
    }
}

/// The metadata without chat templates; lists are null.
fn scalars(gguf: &GgufFile) -> Map<String, Value> {
    let value = |value: &GgufValue| match value {
        GgufValue::U8(v) => json!(v),
        GgufValue::I8(v) => json!(v),
        GgufValue::U16(v) => json!(v),
        GgufValue::I16(v) => json!(v),
        GgufValue::U32(v) => json!(v),
        GgufValue::I32(v) => json!(v),
        GgufValue::U64(v) => json!(v),
        GgufValue::I64(v) => json!(v),
        GgufValue::F32(v) => json!(v),
        GgufValue::F64(v) => json!(v),
        GgufValue::Bool(v) => json!(v),
        GgufValue::String(v) => json!(v),
        GgufValue::Array(_) => Value::Null,
    };
    let is_template = |key: &str| key.starts_with("tokenizer.chat_template");
    gguf.metadata().iter().filter(|(key, _)| !is_template(key)).map(|(key, v)| (key.to_owned(), value(v))).collect()
}

impl Capabilities {
    /// Derives the capabilities from the metadata: a pooling type means embeddings, and the template shows tools and
    /// reasoning.
    fn of(gguf: &GgufFile, architecture: &str) -> Self {
        let metadata = gguf.metadata();
        let pools = metadata.get(&format!("{architecture}.pooling_type")).and_then(GgufValue::as_integer);
        let embedding = pools.is_some_and(|kind| kind != 0);
        let source = metadata.str("tokenizer.chat_template").ok().flatten();
        let template = source.and_then(|source| ChatTemplate::new(source).ok());
        let has = |key: &str| metadata.get(&format!("tokenizer.ggml.{key}")).is_some();
        Self {
            completion: !embedding,
            tools: !embedding && template.as_ref().is_some_and(|template| template.reads("tools")),
            thinking: template.as_ref().is_some_and(ChatTemplate::can_reason),
            vision: false,
            insert: has("fim_pre_token_id") || has("prefix_token_id"),
            embedding,
        }
    }
}
