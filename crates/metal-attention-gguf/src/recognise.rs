//! Recognition of files that are not GGUF, so that the error can name their format and what to do.

use crate::GgufError;

/// The magics "ggml", "ggmf", "ggjt" and "ggla", stored as little-endian numbers.
const LEGACY_MAGICS: [&[u8]; 4] = [b"lmgg", b"fmgg", b"tjgg", b"algg"];

/// The error for a file that does not start with the GGUF magic.
pub(crate) fn foreign_format(bytes: &[u8]) -> GgufError {
    match bytes {
        [b'P', b'K', 3, 4, ..] | [0x80, 2, ..] => GgufError::ZipOrPytorch,
        _ if LEGACY_MAGICS.iter().any(|magic| bytes.starts_with(magic)) => {
            GgufError::LegacyGgml { magic: bytes[..4].iter().rev().map(|&byte| char::from(byte)).collect() }
        }
        _ if bytes.starts_with(b"version https://git-lfs.github.com/spec/") => {
            GgufError::GitLfsPointer { size: lfs_size(bytes) }
        }
        _ if is_safetensors(bytes) => GgufError::Safetensors,
        _ if is_html(bytes) => GgufError::Html,
        _ => GgufError::NotGguf { found: bytes[..bytes.len().min(8)].to_vec() },
    }
}

/// The number in the line `size N` of a Git LFS pointer.
fn lfs_size(bytes: &[u8]) -> Option<u64> {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(1024)]);
    text.lines().find_map(|line| line.strip_prefix("size ")?.trim().parse().ok())
}

/// Whether the file is in the safetensors format: the length of a JSON header as a 64-bit number, then the header.
fn is_safetensors(bytes: &[u8]) -> bool {
    // The format limits the header to 100 MB.
    const MAX_HEADER: u64 = 100_000_000;
    match bytes.split_first_chunk() {
        Some((len, rest)) => (2..=MAX_HEADER).contains(&u64::from_le_bytes(*len)) && rest.first() == Some(&b'{'),
        None => false,
    }
}

/// Whether the file begins like an HTML or XML page.
fn is_html(bytes: &[u8]) -> bool {
    let head = bytes[..bytes.len().min(1024)].trim_ascii_start().to_ascii_lowercase();
    let head = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&head);
    [&b"<!doctype html"[..], b"<html", b"<head", b"<?xml", b"<!--"].iter().any(|start| head.starts_with(start))
}
