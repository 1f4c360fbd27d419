//! Checksums of files on the hub: SHA-256 of large files, and git's SHA-1 of small ones.

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// The checksum of a file, which is also the name of its blob in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Checksum {
    /// SHA-256, of large files (Git LFS).
    Sha256(String),
    /// Git's hash of a blob (SHA-1), of files that are in the git repository itself.
    GitBlob(String),
}

impl Checksum {
    /// Parses hexadecimal digits, such as an `ETag` with or without quotes; `None` if they are no checksum.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let digits = text.trim_start_matches("W/").trim_matches('"').to_ascii_lowercase();
        match digits.len() {
            _ if !digits.bytes().all(|b| b.is_ascii_hexdigit()) => None,
            64 => Some(Self::Sha256(digits)),
            40 => Some(Self::GitBlob(digits)),
            _ => None,
        }
    }

    /// The hexadecimal digits, in lower case.
    pub(crate) fn digits(&self) -> &str {
        let (Self::Sha256(digits) | Self::GitBlob(digits)) = self;
        digits
    }

    /// Starts to compute a checksum of this kind, for a file of `bytes` bytes.
    pub(crate) fn hasher(&self, bytes: u64) -> Hasher {
        match self {
            Self::Sha256(_) => Hasher::Sha256(Sha256::new()),
            Self::GitBlob(_) => Hasher::GitBlob(Sha1::new_with_prefix(format!("blob {bytes}\0"))),
        }
    }
}

/// A checksum that is being computed.
pub(crate) enum Hasher {
    Sha256(Sha256),
    GitBlob(Sha1),
}

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::GitBlob(hasher) => hasher.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> Checksum {
        match self {
            Self::Sha256(hasher) => Checksum::Sha256(hex(&hasher.finalize())),
            Self::GitBlob(hasher) => Checksum::GitBlob(hex(&hasher.finalize())),
        }
    }
}

fn hex(digest: &[u8]) -> String {
    digest.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_equal_those_of_sha256sum_and_git() {
        for (expected, bytes) in [
            ("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "abc"),
            // git hash-object of a file "hello\n"
            ("ce013625030ba8dba906f756967f9e9ca394464a", "hello\n"),
        ] {
            let expected = Checksum::parse(&format!("\"{expected}\"")).unwrap();
            let mut hasher = expected.hasher(bytes.len() as u64);
            let (start, end) = bytes.as_bytes().split_at(2);
            hasher.update(start);
            hasher.update(end);
            assert_eq!(hasher.finish(), expected);
        }
        for bad in ["", "abc", "../../../../../../../../../../etc/passwd", &"g".repeat(64)] {
            assert_eq!(Checksum::parse(bad), None);
        }
    }
}
