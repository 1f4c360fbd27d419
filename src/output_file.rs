//! A file that appears under its name only when it is complete.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::cli_error::CliError;

/// Writes to a temporary file beside `path` and moves it there in the end; dropped before that, nothing stays.
pub struct OutputFile {
    path: PathBuf,
    partial: PathBuf,
    /// `None` once the file is in place.
    out: Option<BufWriter<File>>,
}

impl OutputFile {
    /// Creates the temporary file.
    pub fn create(path: &Path) -> Result<Self, CliError> {
        let mut name =
            path.file_name().ok_or_else(|| not_written(path, io::ErrorKind::IsADirectory.into()))?.to_owned();
        if path.is_dir() {
            return Err(not_written(path, io::ErrorKind::IsADirectory.into()));
        }
        name.push(format!(".{}.partial", std::process::id()));
        let partial = path.with_file_name(name);
        let file = File::create(&partial).map_err(|e| not_written(path, e))?;
        Ok(Self { path: path.to_owned(), partial, out: Some(BufWriter::with_capacity(1 << 20, file)) })
    }

    /// Puts the finished file in its place.
    pub fn commit(mut self) -> Result<(), CliError> {
        let written = match self.out.take() {
            Some(out) => out.into_inner().map(drop).map_err(io::IntoInnerError::into_error),
            None => Ok(()),
        };
        let done = written.and_then(|()| fs::rename(&self.partial, &self.path));
        if done.is_err() {
            // The first error says more than one about tidying up would.
            let _ = fs::remove_file(&self.partial);
        }
        done.map_err(|e| not_written(&self.path, e))
    }
}

fn not_written(path: &Path, source: io::Error) -> CliError {
    CliError::Write { to: path.display().to_string(), source }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.as_mut().map_or(Ok(0), |out| out.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.as_mut().map_or(Ok(()), Write::flush)
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if self.out.take().is_some() {
            // Nobody is left to tell when this fails.
            let _ = fs::remove_file(&self.partial);
        }
    }
}
