//! The hash that identifies a model in reports.

use std::fs::File;
use std::io;

use metal_attention::gguf::GgufFile;
use sha2::{Digest, Sha256};

use crate::cli_error::CliError;
use crate::interrupt;
use crate::progress::ProgressLine;

/// The number of bytes that are read at a time.
const CHUNK: usize = 1 << 20;

/// The SHA-256 of the model's files, concatenated, in hexadecimal digits. For a single file it is that of `sha256sum`.
pub fn sha256(gguf: &GgufFile) -> Result<String, CliError> {
    let mut hash = Sha256::new();
    if gguf.paths().is_empty() {
        hash.update(metal_attention::BUILT_IN_MODEL);
    }
    let progress = ProgressLine::steps("hashing the model", gguf.file_size());
    let mut done = 0;
    let mut chunk = vec![0; CHUNK];
    for path in gguf.paths() {
        let failed = |e: io::Error| CliError::General(format!("cannot read {}: {e}", path.display()));
        let mut file = File::open(path).map_err(failed)?;
        loop {
            if interrupt::requested() {
                return Err(CliError::Interrupted);
            }
            let n = io::Read::read(&mut file, &mut chunk).map_err(failed)?;
            if n == 0 {
                break;
            }
            hash.update(&chunk[..n]);
            done += n as u64;
            progress.set(done);
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_and_the_same_in_memory_have_one_hash() {
        // sha256sum models/stories260K.gguf
        let expected = "e10e90d4e58761087890a30bcc3d2857618a53375cfaf1955b19961e5d2d02b0";
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/models/stories260K.gguf");
        assert_eq!(sha256(&GgufFile::read(path).unwrap()).unwrap(), expected);
        assert_eq!(sha256(&GgufFile::from_bytes(metal_attention::BUILT_IN_MODEL).unwrap()).unwrap(), expected);
    }
}
