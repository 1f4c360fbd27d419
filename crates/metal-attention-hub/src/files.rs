//! Files of the cache that are written to. Others may write to the cache, too, so links in it are not followed: they could
//! lead to any file of the user.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// Opens a file to read and write what is in it, made where there is none. What is there under another name as well, or
/// is no file but a link or a pipe, is removed first.
pub(crate) fn open_own(path: &Path) -> io::Result<File> {
    if fs::symlink_metadata(path).is_ok_and(|found| !is_own(&found)) {
        fs::remove_file(path)?;
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let file = without_links(&mut options).open(path)?;
    // In between somebody may have put something else there.
    if is_own(&file.metadata()?) { Ok(file) } else { Err(io::Error::other("it is a link")) }
}

/// Puts a file with this content in the place of what is there.
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
