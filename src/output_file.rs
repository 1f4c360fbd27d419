//! A file that appears under its name only when it is complete.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::cli_error::CliError;

/// Writes to a temporary file beside `path`, which [`commit`](Self::commit) renames. Until then, and after an error, an existing
/// file is unchanged. A device or a pipe is written directly.
pub struct OutputFile {
    /// The path of the finished file, without symbolic links.
    path: PathBuf,
    /// The temporary file. `None`: `path` is written directly.
    partial: Option<PathBuf>,
    /// The buffered file. `None` after `commit`.
    out: Option<BufWriter<File>>,
}

impl OutputFile {
    /// Opens the output, with the permissions of an existing file.
    pub fn create(path: &Path) -> Result<Self, CliError> {
        Self::open(path).map_err(|e| not_written(path, e))
    }

    /// [`create`](Self::create) with the system's errors.
    fn open(path: &Path) -> io::Result<Self> {
        let (path, existing) = match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            // A symbolic link is kept; its target is replaced.
            Ok(metadata) if metadata.is_file() => (fs::canonicalize(path)?, Some(metadata)),
            Ok(_) => {
                let out = File::options().write(true).open(path)?;
                return Ok(Self { path: path.to_owned(), partial: None, out: Some(BufWriter::new(out)) });
            }
            Err(_) => (path.to_owned(), None),
        };
        let mut name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?.to_owned();
        name.push(format!(".{}.partial", std::process::id()));
        let partial = path.with_file_name(name);
        let file = File::create(&partial)?;
        let out = Self { path, partial: Some(partial), out: Some(BufWriter::with_capacity(1 << 20, file)) };
        if let (Some(metadata), Some(partial)) = (existing, &out.partial) {
            fs::set_permissions(partial, metadata.permissions())?;
        }
        Ok(out)
    }

    /// Flushes the file and renames it to its name. After an error the temporary file is removed.
    pub fn commit(mut self) -> Result<(), CliError> {
        let written = match self.out.take() {
            Some(out) => out.into_inner().map(drop).map_err(io::IntoInnerError::into_error),
            None => Ok(()),
        };
        let done = match &self.partial {
            Some(partial) => written.and_then(|()| fs::rename(partial, &self.path)),
            None => written,
        };
        if done.is_err() {
            self.remove();
        }
        done.map_err(|e| not_written(&self.path, e))
    }

    /// Removes the temporary file.
    fn remove(&self) {
        if let Some(partial) = &self.partial {
            // The first error is the one to report.
            let _ = fs::remove_file(partial);
        }
    }
}

/// An error of writing `path`.
fn not_written(path: &Path, source: io::Error) -> CliError {
    CliError::Write { to: path.display().to_string(), source: explained(source) }
}

/// `error`, with advice if the disk is full.
fn explained(error: io::Error) -> io::Error {
    let full = matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
    if full {
        io::Error::new(error.kind(), "no space is left on the disk; free some, or write to another one")
    } else {
        error
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.as_mut().map_or(Ok(0), |out| out.write(bytes).map_err(explained))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.as_mut().map_or(Ok(()), |out| out.flush().map_err(explained))
    }
}

impl Seek for OutputFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.out.as_mut().map_or(Ok(0), |out| out.seek(to).map_err(explained))
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if self.out.take().is_some() {
            self.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_appears_when_it_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        fs::write(&path, "before").unwrap();
        let mut file = OutputFile::create(&path).unwrap();
        file.write_all(b"not complete").unwrap();
        drop(file);
        assert_eq!(fs::read_to_string(&path).unwrap(), "before");
        let mut file = OutputFile::create(&path).unwrap();
        file.write_all(b"after").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "before");
        file.commit().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "after");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(OutputFile::create(folder.path()).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn links_permissions_and_devices_stay() {
        use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};

        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("a.txt"), folder.path().join("link"));
        fs::write(&path, "before").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        symlink(&path, &link).unwrap();
        let mut file = OutputFile::create(&link).unwrap();
        file.write_all(b"after").unwrap();
        file.commit().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "after");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);

        let null = Path::new("/dev/null");
        let mut file = OutputFile::create(null).unwrap();
        file.write_all(b"x").unwrap();
        file.commit().unwrap();
        assert!(fs::metadata(null).unwrap().file_type().is_char_device());
    }

    /// A device that is always full.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_explained() {
        let mut file = OutputFile::create(Path::new("/dev/full")).unwrap();
        file.write_all(b"x").unwrap();
        let error = file.commit().unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert_eq!(
            error.to_string(),
            "cannot write /dev/full: no space is left on the disk; free some, or write to another one"
        );
    }
}
