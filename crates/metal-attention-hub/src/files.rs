//! Opens and replaces files of the cache for writing. Other users may be able to write to the cache, so links in it are
//! not followed: they could lead to any file of this user.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// Opens a file for reading and writing, and creates it if it is missing. A link, a pipe, or a file with another name
/// as well (hard link) is removed first.
pub(crate) fn open_own(path: &Path) -> io::Result<File> {
    if fs::symlink_metadata(path).is_ok_and(|found| !is_own(&found)) {
        fs::remove_file(path)?;
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let file = without_links(&mut options).open(path)?;
    // It may have been replaced in the meantime.
    if is_own(&file.metadata()?) { Ok(file) } else { Err(io::Error::other("it is a link")) }
}

/// Replaces a file by one with this content.
pub(crate) fn replace(path: &Path, content: &str) -> io::Result<()> {
    let new = path.with_extension(format!("{}.new", std::process::id()));
    let mut file = open_own(&new)?;
    file.set_len(0)?;
    file.write_all(content.as_bytes())?;
    fs::rename(new, path)
}

fn is_own(found: &Metadata) -> bool {
    found.is_file() && has_one_name(found)
}

#[cfg(unix)]
fn has_one_name(found: &Metadata) -> bool {
    std::os::unix::fs::MetadataExt::nlink(found) == 1
}

#[cfg(not(unix))]
fn has_one_name(_: &Metadata) -> bool {
    true
}

#[cfg(unix)]
fn without_links(options: &mut OpenOptions) -> &mut OpenOptions {
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NOFOLLOW | libc::O_NONBLOCK)
}

#[cfg(windows)]
fn without_links(options: &mut OpenOptions) -> &mut OpenOptions {
    const FILE_FLAG_OPEN_REPARSE_POINT: u32 = 0x0020_0000;
    std::os::windows::fs::OpenOptionsExt::custom_flags(options, FILE_FLAG_OPEN_REPARSE_POINT)
}
