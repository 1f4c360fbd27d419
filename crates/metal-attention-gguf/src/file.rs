//! Opening GGUF files: one file, or all parts of a split model, mapped or read into memory. The bytes are parsed by `parse`;
//! the result is a [`GgufFile`] with metadata and tensors.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::parse::{self, GgufHeader};
use crate::split;
use crate::storage::Storage;
use crate::{GgufError, Metadata, Result, Tensor};

/// An open GGUF file, or all parts of a split model: metadata and memory-mapped tensors.
///
/// ```no_run
/// use metal_attention_gguf::GgufFile;
/// // SAFETY: nothing changes the file while this program runs.
/// let file = unsafe { GgufFile::map("model.gguf") }?;
/// println!("{:?}", file.metadata().str("general.architecture")?);
/// for tensor in file.tensors() {
///     println!("{} {:?} {}", tensor.name(), tensor.shape(), tensor.ty());
/// }
/// # Ok::<(), metal_attention_gguf::GgufError>(())
/// ```
#[derive(Debug)]
pub struct GgufFile {
    version: u32,
    /// Bytes.
    alignment: usize,
    metadata: Metadata,
    tensors: Vec<Tensor>,
    /// The index in `tensors` of each name.
    index: HashMap<Arc<str>, usize>,
    /// Bytes of all parts.
    file_size: u64,
    n_parts: usize,
    /// The paths of all parts; empty for a file in memory.
    paths: Vec<PathBuf>,
}

impl GgufFile {
    /// Maps the file at `path`. If its metadata has `split.count`, as in `model-00001-of-00003.gguf`, maps all parts of the
    /// model from the same folder; `path` may name any part. The metadata are then those of the first part without the
    /// `split.*` keys.
    ///
    /// [`read`](Self::read) is the same without a condition.
    ///
    /// # Safety
    /// No process truncates the file or changes it in place, as long as the value or one of its tensors exists. Tensors are slices of the mapping: bytes that change under a slice are undefined behaviour, and on Unix, reading a
    /// page that is no longer in the file raises the signal `SIGBUS` ([`exit_on_lost_pages`](crate::exit_on_lost_pages)). Replacing
    /// the file by another one, as downloads and [`GgufWriter`](crate::GgufWriter)'s callers do, is no change.
    pub unsafe fn map(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_as(path.as_ref(), FileAccess::Map)
    }

    /// [`map`](Self::map), but reads the whole file into memory, so that later changes of the file have no effect.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_as(path.as_ref(), FileAccess::Read)
    }

    fn open_as(path: &Path, access: FileAccess) -> Result<Self> {
        let part = FilePart::open(path, access)?;
        let parts = match split::part_paths(path, &part.header.metadata)? {
            None => vec![part],
            Some(paths) => {
                // It is opened again with the others.
                drop(part);
                split::open_parts(&paths, access)?
            }
        };
        Self::from_parts(parts).map_err(|error| error.in_file(path))
    }

    /// Parses a file in memory, and copies it to an aligned buffer. A part of a split model is treated as a whole file.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let header = parse::parse(bytes)?;
        let storage = Arc::new(Storage::copy(bytes));
        Self::from_parts(vec![FilePart { header, storage, path: None }])
    }

    /// The file with the tensors of all parts and the metadata of the first one; an error where two tensors have the same name.
    fn from_parts(mut parts: Vec<FilePart>) -> Result<Self> {
        let tensors: Vec<Tensor> = parts
            .iter()
            .flat_map(|part| part.header.tensors.iter().map(|info| Tensor::new(info, &part.storage)))
            .collect();
        let mut index = HashMap::with_capacity(tensors.len());
        for (i, tensor) in tensors.iter().enumerate() {
            if index.insert(tensor.shared_name(), i).is_some() {
                return Err(GgufError::DuplicateTensor { tensor: tensor.name().to_owned() });
            }
        }
        let first = &mut parts[0].header;
        let mut metadata = std::mem::take(&mut first.metadata);
        let (version, alignment) = (first.version, first.alignment);
        if parts.len() > 1 {
            split::remove_keys(&mut metadata);
        }
        Ok(Self {
            version,
            alignment,
            metadata,
            tensors,
            index,
            file_size: parts.iter().map(|part| part.storage.bytes().len() as u64).sum(),
            n_parts: parts.len(),
            paths: parts.into_iter().filter_map(|part| part.path).collect(),
        })
    }

    /// The GGUF version, 2 or 3. Version, alignment and metadata of a split model are those of the first part.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The alignment in bytes: tensor offsets are multiples of it.
    pub fn alignment(&self) -> usize {
        self.alignment
    }

    /// The key-value pairs.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors in file order; those of the parts of a split model one part after the other.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensor with this name; `None` where there is none.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.index.get(name).map(|&i| &self.tensors[i])
    }

    /// The number of files that the model consists of.
    pub fn n_parts(&self) -> usize {
        self.n_parts
    }

    /// The path of the file, or of all parts of a split model in order; empty for a file from memory.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Bytes of all parts on disk.
    pub fn file_size(&self) -> u64 {
        self.file_size
    }

    /// Sum of the bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes().len() as u64).sum()
    }
}

/// How a file is made accessible: mapped, with the condition of [`GgufFile::map`], or read into memory.
#[derive(Clone, Copy)]
pub(crate) enum FileAccess {
    Map,
    Read,
}

/// One parsed file: a whole model, or a part of a split one.
pub(crate) struct FilePart {
    pub(crate) header: GgufHeader,
    storage: Arc<Storage>,
    /// `None` for a file from memory.
    path: Option<PathBuf>,
}

impl FilePart {
    /// Maps or reads the file at `path`, and parses its header. Errors in the contents name the file.
    pub(crate) fn open(path: &Path, access: FileAccess) -> Result<Self> {
        let failed = |action| move |source| GgufError::Io { action, path: path.to_owned(), source };
        let found = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(GgufError::NotFound { path: path.to_owned(), suggestions: similar_files(path) });
            }
            found => found.map_err(failed("open"))?,
        };
        if found.is_dir() {
            return Err(GgufError::IsDirectory { path: path.to_owned(), suggestions: gguf_files(path) });
        }
        if !found.is_file() {
            return Err(GgufError::NotRegular { path: path.to_owned() });
        }
        if found.len() == 0 {
            return Err(GgufError::Empty.in_file(path));
        }
        let file = File::open(path).map_err(failed("open"))?;
        let storage = match access {
            // SAFETY: only `GgufFile::map` passes `Map`; its caller promises that the file does not change.
            FileAccess::Map => unsafe { Storage::map(&file, path) }.map_err(failed("map"))?,
            FileAccess::Read => Storage::read(&file, found.len()).map_err(|source| match source.kind() {
                io::ErrorKind::OutOfMemory => GgufError::OutOfMemory { path: path.to_owned(), bytes: found.len() },
                _ => failed("read")(source),
            })?,
        };
        let header = parse::parse(storage.bytes()).map_err(|error| error.in_file(path))?;
        Ok(Self { header, storage: Arc::new(storage), path: Some(path.to_owned()) })
    }
}

/// The most files that an error suggests.
const MAX_SUGGESTIONS: usize = 3;

/// The first `.gguf` files of a folder, in the order of their names.
fn gguf_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = all_gguf_files(folder);
    files.sort();
    files.truncate(MAX_SUGGESTIONS);
    files
}

/// The `.gguf` files in the folder of `missing`, the most similar name first.
fn similar_files(missing: &Path) -> Vec<PathBuf> {
    let folder = match missing.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let missing_name = name(missing);
    let mut files = all_gguf_files(folder);
    files.sort_by_cached_key(|file| (strsim::damerau_levenshtein(&missing_name, &name(file)), file.clone()));
    files.truncate(MAX_SUGGESTIONS);
    files
}

/// All `.gguf` files of a folder, unordered; none where the folder cannot be read.
fn all_gguf_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_gguf = |path: &PathBuf| path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    // Without a leading "./", so that a suggestion looks like what a user types.
    let shown = |path: PathBuf| path.strip_prefix("./").map(Path::to_owned).unwrap_or(path);
    entries.map(|entry| shown(entry.path())).filter(is_gguf).collect()
}
