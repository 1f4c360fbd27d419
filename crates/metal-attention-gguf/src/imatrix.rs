//! Importance matrices ("imatrix"): the mean square of the inputs of each matrix over a text, column by column.
//!
//! The error of a product `W x` is a sum over columns of (error of `W`) times (element of `x`), so a quantiser that is given
//! the mean square of each column's input can weigh the errors of the columns. The files are those of llama.cpp: a GGUF file
//! with two F32 tensors per matrix, `NAME.in_sum2`, `[n_matrices, n_in]`, and `NAME.counts`, `[n_matrices, 1]`, where
//! `n_matrices` is the number of matrices in one tensor, as of experts. The older binary format can be read, but not written.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use crate::parse::MAGIC;
use crate::{Array, GgufError, GgufFile, GgufWriter, Metadata, Result, StringArray, TensorDecl, TensorType, Value};

const DATASETS: &str = "imatrix.datasets";
const CHUNK_COUNT: &str = "imatrix.chunk_count";
const CHUNK_SIZE: &str = "imatrix.chunk_size";
const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";

/// The sums of squared inputs of all matrices of a model.
///
/// ```
/// use metal_attention_gguf::Imatrix;
/// let mut imatrix = Imatrix::default();
/// imatrix.add("blk.0.attn_q.weight", 1, 0, 2, &[1.0, 2.0, 3.0, 0.0]);
/// assert_eq!(imatrix.mean_squares("blk.0.attn_q.weight"), Some(vec![5.0, 2.0]));
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Imatrix {
    /// The names of the texts that were evaluated.
    pub datasets: Vec<String>,
    /// The number of chunks of text that were evaluated.
    pub n_chunks: usize,
    /// Tokens of a chunk; 0: unknown.
    pub chunk_size: usize,
    /// The sums by tensor name.
    entries: BTreeMap<String, InputSums>,
}

/// The summed inputs of one tensor.
#[derive(Debug, Clone, PartialEq)]
struct InputSums {
    /// The sums of squares, `[n_matrices, n_in]`.
    sums: Vec<f64>,
    /// The number of input rows of each matrix, `[n_matrices]`.
    counts: Vec<u64>,
}

impl Imatrix {
    /// Reads a file in the GGUF or the binary format.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |action| move |source| GgufError::Io { action, path: path.to_owned(), source };
        // A path that does not exist or is not a file gets the error of the GGUF reader.
        let is_legacy = path.is_file() && {
            let mut magic = [0; 4];
            let read = File::open(path).map_err(failed("open"))?.read(&mut magic).map_err(failed("read"))?;
            read == 4 && magic != MAGIC
        };
        if is_legacy {
            return Self::from_legacy(&std::fs::read(path).map_err(failed("read"))?).map_err(|e| e.in_file(path));
        }
        Self::from_gguf(&GgufFile::read(path)?).map_err(|e| e.in_file(path))
    }

    /// Reads the GGUF format.
    fn from_gguf(file: &GgufFile) -> Result<Self> {
        let metadata = file.metadata();
        let strings = metadata.strings(DATASETS)?;
        let mut imatrix = Self {
            datasets: strings.map_or_else(Vec::new, |names| names.iter().map(str::to_owned).collect()),
            n_chunks: metadata.usize(CHUNK_COUNT)?.unwrap_or(0),
            chunk_size: metadata.usize(CHUNK_SIZE)?.unwrap_or(0),
            entries: BTreeMap::new(),
        };
        for tensor in file.tensors() {
            let Some(name) = tensor.name().strip_suffix(SUMS) else { continue };
            let damaged = |problem| GgufError::Imatrix { entry: name.to_owned(), problem };
            let sums = tensor.as_f32().ok_or_else(|| damaged("has sums that are not F32"))?;
            let counts = file.tensor(&format!("{name}{COUNTS}")).ok_or_else(|| damaged("has no counts"))?;
            let counts = counts.as_f32().ok_or_else(|| damaged("has counts that are not F32"))?;
            let counts = counts.iter().map(|n| n.round() as u64).collect();
            imatrix.insert(name, sums.iter().map(|&x| f64::from(x)).collect(), counts)?;
        }
        imatrix.not_empty()
    }

    /// Reads the binary format: entries of a name, the number of calls, and the mean squares times the calls; then, optionally,
    /// the number of chunks and the text's name.
    fn from_legacy(bytes: &[u8]) -> Result<Self> {
        let mut rest = bytes;
        let mut imatrix = Self::default();
        for i in 0..legacy_length(&mut rest, "the number of entries")? {
            let name = legacy_string(&mut rest, &format!("the name of entry {i}"))?;
            let n_calls = legacy_length(&mut rest, &name)?;
            let n = legacy_length(&mut rest, &name)?;
            let Some((values, after)) = n.checked_mul(4).and_then(|n| rest.split_at_checked(n)) else {
                return Err(GgufError::Imatrix { entry: name, problem: "claims more values than the file has" });
            };
            rest = after;
            let values = values.as_chunks::<4>().0.iter().map(|&b| f64::from(f32::from_le_bytes(b))).collect();
            imatrix.insert(&name, values, vec![n_calls.max(1) as u64])?;
        }
        if !rest.is_empty() {
            imatrix.n_chunks = legacy_length(&mut rest, "the number of chunks")?;
            imatrix.datasets.extend(legacy_string(&mut rest, "the text's name").ok().filter(|name| !name.is_empty()));
        }
        imatrix.not_empty()
    }

    /// Adds an entry; an error where the sizes do not match or a sum is not a finite number of at least 0.
    fn insert(&mut self, name: &str, sums: Vec<f64>, counts: Vec<u64>) -> Result<()> {
        let damaged = |problem| GgufError::Imatrix { entry: name.to_owned(), problem };
        if counts.is_empty() || !sums.len().is_multiple_of(counts.len()) {
            return Err(damaged("has sums and counts that do not go together"));
        }
        if !sums.iter().all(|x| x.is_finite() && *x >= 0.0) {
            return Err(damaged("has a sum of squares that is no number of at least 0"));
        }
        self.entries.insert(name.to_owned(), InputSums { sums, counts });
        Ok(())
    }

    /// An error where there are no entries.
    fn not_empty(self) -> Result<Self> {
        if self.entries.is_empty() {
            return Err(GgufError::Imatrix { entry: "the file".into(), problem: "has no entries" });
        }
        Ok(self)
    }

    /// Writes the GGUF format to `out`, and returns `out`.
    pub fn write<W: Write>(&self, out: W) -> Result<W> {
        let mut metadata = Metadata::new();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        metadata.set("general.type", "imatrix");
        let datasets: StringArray = self.datasets.iter().map(String::as_str).collect();
        metadata.set(DATASETS, Value::Array(Array::String(datasets)));
        metadata.set(CHUNK_COUNT, count(self.n_chunks));
        metadata.set(CHUNK_SIZE, count(self.chunk_size));
        let tensor =
            |name: &str, suffix, shape| TensorDecl { name: format!("{name}{suffix}"), shape, ty: TensorType::F32 };
        let declare = |(name, e): (&String, &InputSums)| {
            let n = e.counts.len();
            // Trailing dimensions of 1 are omitted, as in llama.cpp's files.
            let shape = |n_in| if n == 1 { vec![n_in] } else { vec![n_in, n] };
            [tensor(name, SUMS, shape(e.sums.len() / n)), tensor(name, COUNTS, shape(1))]
        };
        let tensors: Vec<_> = self.entries.iter().flat_map(declare).collect();
        let mut writer = GgufWriter::new(out, 3, &metadata, &tensors)?;
        for entry in self.entries.values() {
            let sums = entry.sums.iter().map(|&x| x as f32);
            let counts = entry.counts.iter().map(|&n| n as f32);
            writer.write(&sums.flat_map(f32::to_le_bytes).collect::<Vec<_>>())?;
            writer.write(&counts.flat_map(f32::to_le_bytes).collect::<Vec<_>>())?;
        }
        writer.finish()
    }

    /// Adds the input rows `x`, `[n, n_in]`, of matrix `i` of the `n_matrices` in tensor `name`.
    ///
    /// # Panics
    /// When `x` is not whole rows, or an earlier call for `name` had other sizes.
    pub fn add(&mut self, name: &str, n_matrices: usize, i: usize, n_in: usize, x: &[f32]) {
        assert!(i < n_matrices && x.len().is_multiple_of(n_in), "{} inputs of {n_in} for {name}", x.len());
        let empty = || InputSums { sums: vec![0.0; n_matrices * n_in], counts: vec![0; n_matrices] };
        let entry = self.entries.entry(name.to_owned()).or_insert_with(empty);
        assert!(entry.sums.len() == n_matrices * n_in && entry.counts.len() == n_matrices, "{name} has other sizes");
        for row in x.chunks_exact(n_in) {
            for (sum, x) in entry.sums[i * n_in..][..n_in].iter_mut().zip(row) {
                *sum += f64::from(x * x);
            }
        }
        entry.counts[i] += (x.len() / n_in) as u64;
    }

    /// Adds the sums of another file; an error where a matrix has another size there, after which some entries may have been
    /// added.
    pub fn merge(&mut self, other: Self) -> Result<()> {
        for (name, theirs) in other.entries {
            match self.entries.get_mut(&name) {
                None => {
                    self.entries.insert(name, theirs);
                }
                Some(ours) if ours.sums.len() == theirs.sums.len() && ours.counts.len() == theirs.counts.len() => {
                    ours.sums.iter_mut().zip(theirs.sums).for_each(|(a, b)| *a += b);
                    ours.counts.iter_mut().zip(theirs.counts).for_each(|(a, b)| *a += b);
                }
                Some(_) => {
                    return Err(GgufError::Imatrix { entry: name, problem: "has another size in another file" });
                }
            }
        }
        self.n_chunks += other.n_chunks;
        self.datasets.extend(other.datasets);
        if self.chunk_size == 0 {
            self.chunk_size = other.chunk_size;
        }
        Ok(())
    }

    /// The mean squares of the inputs of tensor `name`, `[n_matrices, n_in]`; 1 for the columns of a matrix without input.
    /// `None` where the tensor is absent.
    pub fn mean_squares(&self, name: &str) -> Option<Vec<f32>> {
        let InputSums { sums, counts } = self.entries.get(name)?;
        let n_in = sums.len() / counts.len();
        let mean = |(i, sum): (usize, &f64)| match counts[i / n_in] {
            0 => 1.0,
            n => (sum / n as f64) as f32,
        };
        Some(sums.iter().enumerate().map(mean).collect())
    }

    /// The names of all tensors with an entry.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The number of input rows of each matrix of tensor `name`; `None` where the tensor is absent.
    pub fn counts(&self, name: &str) -> Option<&[u64]> {
        self.entries.get(name).map(|entry| entry.counts.as_slice())
    }
}

/// Reads a length of the binary format, a signed 32-bit integer. `entry` names in errors what is being read.
fn legacy_length(rest: &mut &[u8], entry: &str) -> Result<usize> {
    let damaged = |problem| GgufError::Imatrix { entry: entry.to_owned(), problem };
    let (bytes, after) =
        rest.split_first_chunk().ok_or_else(|| damaged("ends early: the file is cut short, or no importance file"))?;
    *rest = after;
    usize::try_from(i32::from_le_bytes(*bytes)).map_err(|_| damaged("has a length below 0: this is no importance file"))
}

/// Reads a string of the binary format: its length, then UTF-8.
fn legacy_string(rest: &mut &[u8], entry: &str) -> Result<String> {
    let damaged = |problem| GgufError::Imatrix { entry: entry.to_owned(), problem };
    let n = legacy_length(rest, entry)?;
    let (bytes, after) =
        rest.split_at_checked(n).ok_or_else(|| damaged("is longer than the file: this is no importance file"))?;
    *rest = after;
    String::from_utf8(bytes.to_vec()).map_err(|_| damaged("is not UTF-8: this is no importance file"))
}
