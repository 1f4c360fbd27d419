//! Files with the predictions of a reference model, in llama.cpp's format (`--kl-divergence-base`).
//!
//! The layout, all little-endian: the magic `_logits_`; three u32: `n_ctx` (tokens of a chunk), `n_vocab`, and the number of
//! chunks; the tokens of all chunks, u32 each; then a row for each scored token, chunk by chunk. A row is two F32, the step
//! and the smallest log-probability, and a u16 code for each token of the vocabulary (padded to an even number):
//! log-probability = smallest + code * step. Values more than 16 below the largest have the code 0.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use crate::chunks;
use crate::cli_error::CliError;
use crate::output_file::OutputFile;

/// The first bytes of a file.
const MAGIC: [u8; 8] = *b"_logits_";

/// The u16 words of a row before its codes: step and smallest value.
const HEADER: usize = 4;

/// The largest vocabulary that is read, which is also that of a model.
const MAX_VOCAB: usize = 1 << 28;

/// The u16 words of a row.
fn row_words(n_vocab: usize) -> usize {
    HEADER + n_vocab.next_multiple_of(2)
}

/// Writes a file.
pub struct LogitsWriter {
    /// The output.
    out: OutputFile,
    /// Its path, for errors.
    path: PathBuf,
}

impl LogitsWriter {
    /// Begins a file of `n_chunks` chunks of `n_ctx` tokens each. `ids` begins with the tokens of these chunks.
    pub fn create(path: &Path, ids: &[u32], n_ctx: usize, n_vocab: usize, n_chunks: usize) -> Result<Self, CliError> {
        let mut header = MAGIC.to_vec();
        for n in [n_ctx, n_vocab, n_chunks] {
            let n = u32::try_from(n).map_err(|_| CliError::Usage(format!("{n} is too much for a file of logits")))?;
            header.extend(n.to_le_bytes());
        }
        header.extend(ids[..n_chunks * n_ctx].iter().flat_map(|id| id.to_le_bytes()));
        let mut file = Self { out: OutputFile::create(path)?, path: path.to_owned() };
        file.write(&header)?;
        Ok(file)
    }

    /// Appends the row of a token's logits, `[n_vocab]`.
    pub fn row(&mut self, logits: &[f32]) -> Result<(), CliError> {
        self.write(&pack(logits))
    }

    /// Completes the file and puts it in its place.
    pub fn finish(self) -> Result<(), CliError> {
        self.out.commit()
    }

    /// Writes bytes; errors name the path.
    fn write(&mut self, bytes: &[u8]) -> Result<(), CliError> {
        let failed = |source| CliError::Write { to: self.path.display().to_string(), source };
        self.out.write_all(bytes).map_err(failed)
    }
}

/// The row of a token's logits, as bytes.
fn pack(logits: &[f32]) -> Vec<u8> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let min = logits.iter().copied().fold(f32::INFINITY, f32::min).max(max - 16.0);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
    let step = (max - min) / 65_535.0;
    let mut row = Vec::with_capacity(2 * row_words(logits.len()));
    row.extend(step.to_le_bytes());
    row.extend(((f64::from(min - max) - sum.ln()) as f32).to_le_bytes());
    let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
    row.extend(logits.iter().flat_map(|&x| (((x - min) * inverse).round_ties_even() as u16).to_le_bytes()));
    row.resize(2 * row_words(logits.len()), 0);
    row
}

/// Reads a file.
pub struct LogitsReader {
    /// The input, at the next row.
    input: BufReader<File>,
    /// Its path, for errors.
    path: PathBuf,
    /// The number of tokens of a chunk.
    pub n_ctx: usize,
    /// The size of the vocabulary.
    pub n_vocab: usize,
    /// The tokens of all chunks, `[n_chunks * n_ctx]`.
    pub ids: Vec<u32>,
}

impl LogitsReader {
    /// Opens a file, checks its sizes, and reads its tokens.
    pub fn open(path: &Path) -> Result<Self, CliError> {
        let failed = |e: io::Error| CliError::General(format!("cannot read {}: {e}", path.display()));
        let damaged = |why: &str| CliError::Usage(format!("{} is no file of logits: {why}", path.display()));
        let file = File::open(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        let mut input = BufReader::with_capacity(1 << 20, file);
        let mut header = [0; 20];
        let cut = |e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof => damaged("it ends early; write one with --kl-divergence-base"),
            _ => failed(e),
        };
        input.read_exact(&mut header).map_err(cut)?;
        if header[..8] != MAGIC {
            return Err(damaged("it begins otherwise; write one with --kl-divergence-base"));
        }
        let number = |i: usize| u32::from_le_bytes(std::array::from_fn(|k| header[8 + 4 * i + k])) as usize;
        let (n_ctx, n_vocab, n_chunks) = (number(0), number(1), number(2));
        if n_ctx < 4 || n_vocab == 0 || n_vocab > MAX_VOCAB || n_chunks == 0 {
            return Err(damaged("its sizes make no sense"));
        }
        let n_scored = n_ctx - 1 - chunks::first_scored(n_ctx);
        let chunk_bytes = 4 * n_ctx as u128 + 2 * n_scored as u128 * row_words(n_vocab) as u128;
        if 20 + n_chunks as u128 * chunk_bytes > u128::from(len) {
            return Err(damaged("it is cut short"));
        }
        let mut bytes = vec![0; 4 * n_ctx * n_chunks];
        input.read_exact(&mut bytes).map_err(cut)?;
        let ids = bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect();
        Ok(Self { input, path: path.to_owned(), n_ctx, n_vocab, ids })
    }

    /// Reads the next `n` rows.
    pub fn rows(&mut self, n: usize) -> Result<PackedRows, CliError> {
        let len = 2 * row_words(self.n_vocab);
        let mut bytes = vec![0; n * len];
        let failed = |e: io::Error| CliError::General(format!("cannot read {}: {e}", self.path.display()));
        self.input.read_exact(&mut bytes).map_err(failed)?;
        Ok(PackedRows { bytes, len, n_vocab: self.n_vocab })
    }
}

/// Some rows of a file, still in their codes.
pub struct PackedRows {
    /// The rows.
    bytes: Vec<u8>,
    /// The size of a row in bytes.
    len: usize,
    /// The size of the vocabulary.
    n_vocab: usize,
}

impl PackedRows {
    /// The log-probabilities of row `i`, `[n_vocab]`.
    pub fn log_probabilities(&self, i: usize) -> Vec<f32> {
        let row = &self.bytes[i * self.len..][..self.len];
        let number = |i: usize| f32::from_le_bytes(std::array::from_fn(|k| row[4 * i + k]));
        let (step, min) = (number(0), number(1));
        let codes = row[2 * HEADER..].as_chunks::<2>().0;
        codes[..self.n_vocab].iter().map(|&code| step * f32::from(u16::from_le_bytes(code)) + min).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::divergence::log_softmax;

    #[test]
    fn rows_keep_log_probabilities_to_a_step() {
        let logits: Vec<f32> = (0..7).map(|i| [3.0, -20.0, 0.5, 2.9, 1.0, -1.0, 0.0][i]).collect();
        let bytes = pack(&logits);
        assert_eq!(bytes.len(), 2 * (4 + 8));
        let rows = PackedRows { len: bytes.len(), bytes, n_vocab: 7 };
        for (i, (found, expected)) in rows.log_probabilities(0).iter().zip(log_softmax(&logits)).enumerate() {
            // Values 16 or more below the largest are stored as 16 below.
            let expected = if i == 1 { expected + 7.0 } else { expected };
            assert!((found - expected).abs() < 16.0 / 65_535.0, "{i}: {found} {expected}");
        }
        assert_eq!(PackedRows { bytes: pack(&[1.0; 2]), len: 12, n_vocab: 2 }.log_probabilities(0), [-(2f32.ln()); 2]);
    }
}
