//! Models that are split into several files by llama.cpp's `gguf-split`.
//!
//! The parts are named `NAME-00001-of-00003.gguf` and so on. The metadata of each contain its index, `split.no` (from zero),
//! the number of parts, `split.count`, and the number of tensors in all parts, `split.tensors.count`. The first part contains
//! the metadata of the model.

use std::path::{Path, PathBuf};

use crate::file::{FileAccess, FilePart};
use crate::{GgufError, Metadata, Result};

const NO: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// Removes the `split.*` keys.
pub(crate) fn remove_keys(metadata: &mut Metadata) {
    for key in [NO, COUNT, TENSORS] {
        metadata.remove(key);
    }
}

/// The paths of all parts of the model that the file at `path`, with this metadata, is a part of; `None` when the file is a
/// whole model. An error where the metadata contradict the file name.
pub(crate) fn part_paths(path: &Path, metadata: &Metadata) -> Result<Option<PartPaths>> {
    let count = match number(path, metadata, COUNT)? {
        None | Some(0 | 1) => return Ok(None),
        Some(count) => count,
    };
    let no = number(path, metadata, NO)?.unwrap_or(0);
    match PartPaths::from_path(path) {
        Some((paths, number)) => {
            expect(path, "the number of parts in the file name", count, Some(paths.count))?;
            expect(path, "the part number in the file name", no.saturating_add(1), Some(number))?;
            Ok(Some(paths))
        }
        None => Err(GgufError::SplitName { path: path.to_owned(), no, count }),
    }
}

/// Opens all parts and checks that they belong together.
pub(crate) fn open_parts(paths: &PartPaths, access: FileAccess) -> Result<Vec<FilePart>> {
    // Capacity for all parts is not reserved: the count may be wrong.
    let mut parts = Vec::new();
    for no in 0..paths.count {
        let path = paths.part(no);
        let part = FilePart::open(&path, access).map_err(|error| match error {
            GgufError::NotFound { path, .. } => GgufError::MissingPart { path, no, count: paths.count },
            other => other,
        })?;
        let metadata = &part.header.metadata;
        expect(&path, NO, no, number(&path, metadata, NO)?)?;
        expect(&path, COUNT, paths.count, number(&path, metadata, COUNT)?)?;
        parts.push(part);
    }
    let n_tensors: usize = parts.iter().map(|part| part.header.tensors.len()).sum();
    for (no, part) in (0..).zip(&parts) {
        let path = paths.part(no);
        if let Some(declared) = number(&path, &part.header.metadata, TENSORS)? {
            expect(&path, TENSORS, n_tensors as u32, Some(declared))?;
        }
    }
    Ok(parts)
}

/// The integer at `key`; an error names the file.
fn number(path: &Path, metadata: &Metadata, key: &str) -> Result<Option<u32>> {
    metadata.u32(key).map_err(|error| error.in_file(path))
}

/// An error where `found` is not the expected number.
fn expect(path: &Path, key: &'static str, expected: u32, found: Option<u32>) -> Result<()> {
    if found == Some(expected) {
        return Ok(());
    }
    Err(GgufError::SplitMismatch {
        path: path.to_owned(),
        key,
        expected: expected.into(),
        found: found.map_or("missing".to_owned(), |found| found.to_string()),
    })
}

/// The paths of all parts of a split model.
pub(crate) struct PartPaths {
    folder: PathBuf,
    /// `NAME` of `NAME-00001-of-00003.gguf`.
    name: String,
    /// The number of parts.
    count: u32,
}

impl PartPaths {
    /// Parses `NAME-00001-of-00003.gguf`; the second result is the number of the part, from one. `None` for other names.
    fn from_path(path: &Path) -> Option<(Self, u32)> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (name, number) = rest.rsplit_once('-')?;
        let five_digits = |text: &str| {
            let digits = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| text.parse().ok()).flatten()
        };
        let paths = Self { folder: path.parent()?.to_owned(), name: name.to_owned(), count: five_digits(count)? };
        Some((paths, five_digits(number)?))
    }

    /// The path of part `no`, counted from zero.
    fn part(&self, no: u32) -> PathBuf {
        let Self { folder, name, count } = self;
        folder.join(format!("{name}-{:05}-of-{count:05}.gguf", no + 1))
    }
}
