//! Maps GGUF files for commands.

use std::path::Path;

use metal_attention::gguf::{GgufError, GgufFile};

/// Maps the file at `path`. The user must not truncate or change it in place while the command runs: on Unix the program then ends with
/// a message (`exit_on_lost_pages`), or computes with what it reads. Flags such as `--no-mmap` read the file instead.
pub fn map_gguf(path: impl AsRef<Path>) -> Result<GgufFile, GgufError> {
    // SAFETY: as `Model::open`: the user of a command does not change the file while it runs.
    unsafe { GgufFile::map(path) }
}
