//! An open model: the GGUF file, its spec, its weights and its tokenizer.

use std::fmt::{self, Write};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use metal_attention_gguf::GgufFile;
use metal_attention_model::{ForwardPass, LoadedModel, ModelSpec, Weights};
use metal_attention_tokenizer::{Tokenizer, TokenizerOptions};
use sha2::{Digest, Sha256};

use crate::backends::BackendPass;
use crate::sampling::SamplerOptions;
use crate::{EngineOptions, Error};

/// The GGUF file of the built-in model: `TinyStories` 260K by Andrej Karpathy, MIT licence.
pub const BUILT_IN_MODEL: &[u8] = include_bytes!(env!("METAL_ATTENTION_BUILT_IN_MODEL"));

/// Options of opening a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelOptions {
    /// Pre-tokenizer to use instead of the one that the file names in `tokenizer.ggml.pre`.
    pub pre: Option<String>,
    /// Read the whole file into memory instead of mapping it. Slower and larger, but the file may then change or be
    /// deleted.
    pub in_memory: bool,
}

/// An open model; clones share the weights.
#[derive(Clone)]
pub struct Model {
    data: Arc<ModelData>,
}

/// The shared contents of a [`Model`].
struct ModelData {
    /// The file.
    gguf: GgufFile,
    /// Its specification, and handles to its weights.
    loaded: LoadedModel,
    /// How it was opened.
    options: ModelOptions,
    /// Built at its first use: a program that works with token ids needs none.
    tokenizer: OnceLock<Arc<Tokenizer>>,
    /// Computed at its first use.
    fingerprint: OnceLock<[u8; 32]>,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("spec", self.spec()).finish_non_exhaustive()
    }
}

impl Model {
    /// Opens a GGUF file (any part of a split one) without reading its weights yet.
    ///
    /// The file is mapped. It must not be truncated or changed in place while the model exists, in this process or another one: the
    /// weights would change under their readers, and on Unix a missing page ends the process with `SIGBUS`. This cannot be
    /// checked. [`ModelOptions::in_memory`] reads the file instead, and has no such condition.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::open_with(path, &ModelOptions::default())
    }

    /// [`open`](Self::open) with options.
    pub fn open_with(path: impl AsRef<Path>, options: &ModelOptions) -> Result<Self, Error> {
        Self::from_gguf(Self::read_gguf(path, options)?, options)
    }

    /// Opens the file alone.
    pub(crate) fn read_gguf(path: impl AsRef<Path>, options: &ModelOptions) -> Result<GgufFile, Error> {
        Ok(if options.in_memory {
            GgufFile::read(path)?
        } else {
            // SAFETY: the documentation of `open` passes the condition on to the caller. The function is safe all the same, as in
            // other programs that map large files: a model file that changes is of no use.
            unsafe { GgufFile::map(path)? }
        })
    }

    /// The built-in model: `stories260K`, which writes short children's stories.
    pub fn built_in() -> Result<Self, Error> {
        Self::from_gguf(GgufFile::from_bytes(BUILT_IN_MODEL)?, &ModelOptions::default())
    }

    /// The model of an open file.
    pub fn from_gguf(gguf: GgufFile, options: &ModelOptions) -> Result<Self, Error> {
        let loaded = LoadedModel::load(&gguf)?;
        let (options, tokenizer, fingerprint) = (options.clone(), OnceLock::new(), OnceLock::new());
        Ok(Self { data: Arc::new(ModelData { gguf, loaded, options, tokenizer, fingerprint }) })
    }

    /// The model's structure and sizes.
    pub fn spec(&self) -> &ModelSpec {
        self.data.loaded.spec()
    }

    /// Weights by role.
    pub fn weights(&self) -> &Weights {
        self.data.loaded.weights()
    }

    /// The specification with the weights, from which executors are set up.
    pub fn loaded(&self) -> &LoadedModel {
        &self.data.loaded
    }

    /// The prediction heads (multi-token prediction) in the file, each a model of its own: see [`LoadedModel::load_heads`]. Empty
    /// if it has none.
    pub fn prediction_heads(&self) -> Result<Vec<LoadedModel>, Error> {
        Ok(LoadedModel::load_heads(self.gguf())?)
    }

    /// The tokenizer, built at the first call. An error if the file has no vocabulary or an unsupported one; the model
    /// can then still be used with token ids.
    pub fn tokenizer(&self) -> Result<Arc<Tokenizer>, Error> {
        let ModelData { gguf, options, tokenizer, .. } = &*self.data;
        if let Some(tokenizer) = tokenizer.get() {
            return Ok(Arc::clone(tokenizer));
        }
        let built = Tokenizer::from_metadata(gguf.metadata(), &TokenizerOptions { pre: options.pre.clone() })?;
        Ok(Arc::clone(tokenizer.get_or_init(|| Arc::new(built))))
    }

    /// The sampling options that the file recommends, otherwise [`SamplerOptions::default`].
    pub fn sampling(&self) -> SamplerOptions {
        SamplerOptions::recommended(self.data.gguf.metadata())
    }

    /// A hash that identifies the file: of its metadata, its tensors' names, shapes and types, and each tensor's first
    /// and last 4096 bytes.
    pub fn fingerprint(&self) -> [u8; 32] {
        *self.data.fingerprint.get_or_init(|| fingerprint(&self.data.gguf))
    }

    /// The file.
    pub fn gguf(&self) -> &GgufFile {
        &self.data.gguf
    }

    /// Sets up a forward pass. This allocates the KV cache and may repack the weights, which can take a while for large
    /// models.
    pub fn forward_pass(&self, options: &EngineOptions) -> Result<Box<dyn ForwardPass>, Error> {
        Ok(self.backend(options)?)
    }

    /// [`forward_pass`](Self::forward_pass), with what only its backend offers.
    pub fn backend(&self, options: &EngineOptions) -> Result<Box<dyn BackendPass>, Error> {
        options.open(self)
    }
}

/// Bytes that are hashed at each end of a tensor.
const HASHED: usize = 4096;

/// SHA-256 of a file's metadata and of its tensors' names, shapes and types.
pub fn table_digest(file: &GgufFile) -> [u8; 32] {
    table_hash(file).finalize().into()
}

/// The state of a SHA-256 of a file's metadata and of its tensors' names, shapes and types.
fn table_hash(file: &GgufFile) -> Sha256 {
    let mut hash = HashWriter(Sha256::new());
    let mut write = |line: fmt::Arguments<'_>| hash.write_fmt(line).expect("hashing cannot fail");
    for (key, value) in file.metadata().iter() {
        write(format_args!("{key:?}: {value:?}\n"));
    }
    for tensor in file.tensors() {
        write(format_args!("{:?} {:?} {}\n", tensor.name(), tensor.shape(), tensor.ty().name()));
    }
    hash.0
}

/// See [`Model::fingerprint`].
pub(crate) fn fingerprint(file: &GgufFile) -> [u8; 32] {
    let mut hash = table_hash(file);
    for tensor in file.tensors() {
        let bytes = tensor.bytes();
        let n = bytes.len().min(HASHED);
        hash.update(&bytes[..n]);
        hash.update(&bytes[bytes.len() - n..]);
    }
    hash.finalize().into()
}

/// A writer that hashes its input.
struct HashWriter(Sha256);

impl Write for HashWriter {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.update(text);
        Ok(())
    }
}
