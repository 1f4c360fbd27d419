//! A text with a copy of what a KV cache has of it.

use metal_attention_model::{ForwardError, ForwardPass, Snapshot, SnapshotError};

/// A text with a copy of its blocks in main memory, which can be written to a file or put into a KV cache at any time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSnapshot {
    pub(crate) ids: Vec<u32>,
    pub(crate) snapshot: Snapshot,
    pub(crate) blocks: Vec<u8>,
}

impl HostSnapshot {
    /// Copies sequence `seq` of `pass`, whose tokens are `ids`.
    pub fn copy(pass: &mut dyn ForwardPass, seq: usize, ids: Vec<u32>) -> Result<Self, SnapshotError> {
        let snapshot = Snapshot::of_sequence(pass.cache(), seq)?;
        let blocks = copy_blocks(&snapshot, pass, seq)?;
        Ok(Self { ids, snapshot, blocks })
    }

    /// The tokens.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Makes sequence `seq` of `pass` this text. On an error the sequence is empty.
    pub fn restore(&self, pass: &mut dyn ForwardPass, seq: usize) -> Result<(), SnapshotError> {
        self.snapshot.restore(pass.cache(), seq, &mut &self.blocks[..])
    }
}

/// The blocks of `snapshot`, which is of sequence `seq` of `pass`. An error where memory has no room for them.
pub(crate) fn copy_blocks(
    snapshot: &Snapshot,
    pass: &mut dyn ForwardPass,
    seq: usize,
) -> Result<Vec<u8>, SnapshotError> {
    let mut blocks = room_for_blocks(snapshot)?;
    snapshot.write_blocks(pass.cache(), seq, &mut blocks)?;
    Ok(blocks)
}

/// An empty list with room for the blocks of `snapshot`.
pub(crate) fn room_for_blocks(snapshot: &Snapshot) -> Result<Vec<u8>, ForwardError> {
    let bytes = usize::try_from(snapshot.block_bytes()).unwrap_or(usize::MAX);
    let mut blocks = Vec::new();
    let no_memory = |_| ForwardError::OutOfMemory { what: "a copy of a text in the KV cache", bytes };
    blocks.try_reserve_exact(bytes).map_err(no_memory)?;
    Ok(blocks)
}
