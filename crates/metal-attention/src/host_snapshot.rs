//! Snapshots of sequences in main memory.

use metal_attention_model::{ForwardError, ForwardPass, Snapshot, SnapshotError};

use crate::{SequenceKey, SpanKey};

/// A sequence's tokens with a snapshot of its KV pages and recurrent states in main memory. It can be written to a
/// session file or restored into a KV cache of the same layout at any time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSnapshot {
    /// Ids and spans of the sequence.
    pub(crate) key: SequenceKey,
    /// Header of the snapshot.
    pub(crate) snapshot: Snapshot,
    /// Bytes of the blocks, in the order of the snapshot.
    pub(crate) blocks: Vec<u8>,
}

impl HostSnapshot {
    /// Copies sequence `seq` of `pass`, which is known by `key`: its token ids, and its spans if it has any.
    pub fn copy(pass: &mut dyn ForwardPass, seq: usize, key: impl Into<SequenceKey>) -> Result<Self, SnapshotError> {
        let snapshot = Snapshot::of_sequence(pass.cache(), seq)?;
        let blocks = copy_blocks(&snapshot, pass, seq)?;
        Ok(Self { key: key.into(), snapshot, blocks })
    }

    /// The tokens of the sequence.
    pub fn ids(&self) -> &[u32] {
        &self.key.ids
    }

    /// The spans of embedding rows in the sequence.
    pub fn spans(&self) -> &[SpanKey] {
        &self.key.spans
    }

    /// Restores this snapshot into sequence `seq` of `pass`. After an error the sequence is empty.
    pub fn restore(&self, pass: &mut dyn ForwardPass, seq: usize) -> Result<(), SnapshotError> {
        self.snapshot.restore(pass.cache(), seq, &mut &self.blocks[..])
    }
}

/// Copies the blocks of `snapshot`, a snapshot of sequence `seq` of `pass`. An error if there is not enough main
/// memory.
pub(crate) fn copy_blocks(
    snapshot: &Snapshot,
    pass: &mut dyn ForwardPass,
    seq: usize,
) -> Result<Vec<u8>, SnapshotError> {
    let mut blocks = block_buffer(snapshot)?;
    snapshot.write_blocks(pass.cache(), seq, &mut blocks)?;
    Ok(blocks)
}

/// An empty buffer with capacity for the blocks of `snapshot`; an error if there is not enough main memory.
pub(crate) fn block_buffer(snapshot: &Snapshot) -> Result<Vec<u8>, ForwardError> {
    let bytes = usize::try_from(snapshot.block_bytes()).unwrap_or(usize::MAX);
    let mut blocks = Vec::new();
    let no_memory = |_| ForwardError::OutOfMemory { what: "a copy of a text in the KV cache", bytes };
    blocks.try_reserve_exact(bytes).map_err(no_memory)?;
    Ok(blocks)
}
