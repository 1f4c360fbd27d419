//! The prefix store: snapshots of sequences that were evicted from the KV cache, in main memory and on disk.
//!
//! Prompts that begin like a stored sequence restore its KV pages and states instead of evaluating the tokens. A client
//! with a key finds only its own sequences; all clients without one share theirs. The sequences used least recently
//! move from memory to disk, if there is a folder for that, and are then dropped. Files on disk have no names: the
//! system deletes them when the process ends, however it ends.

use std::fs::File;
use std::io::{BufReader, BufWriter, Cursor, Seek, Write};
use std::path::PathBuf;
use std::time::Instant;

use metal_attention_model::{ForwardPass, Snapshot, SnapshotError};

use crate::SequenceKey;
use crate::copy_budget::CopyBudget;
use crate::host_snapshot::copy_blocks;
use crate::prompt::PrefixKey;
use crate::scheduler::Client;

/// Bytes of the buffer for reading and writing files.
const BUFFER: usize = 1 << 20;

/// Disk space for sequences that do not fit in main memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheDisk {
    /// The folder; created if it is missing.
    pub folder: PathBuf,
    /// Maximum bytes of all files.
    pub bytes: u64,
}

/// Contents and hits of the prefix store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreUse {
    /// Sequences in main memory.
    pub ram_sequences: usize,
    /// Their bytes.
    pub ram_bytes: u64,
    /// Sequences on disk.
    pub disk_sequences: usize,
    /// Their bytes.
    pub disk_bytes: u64,
    /// Prompts whose prefix was restored.
    pub hits: u64,
    /// Tokens of these prefixes.
    pub tokens: u64,
}

impl StoreUse {
    /// Adds the use of another scheduler's store.
    pub(crate) fn add(&mut self, other: &Self) {
        let Self { ram_sequences, ram_bytes, disk_sequences, disk_bytes, hits, tokens } = other;
        self.ram_sequences += ram_sequences;
        self.ram_bytes += ram_bytes;
        self.disk_sequences += disk_sequences;
        self.disk_bytes += disk_bytes;
        self.hits += hits;
        self.tokens += tokens;
    }
}

/// The clients that may restore a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PrefixOwner {
    /// The client with this key.
    Key(usize),
    /// All clients without a key.
    Keyless,
}

impl From<Client> for PrefixOwner {
    fn from(client: Client) -> Self {
        match client {
            Client::Key(key) => Self::Key(key),
            Client::Unknown | Client::Address(_) => Self::Keyless,
        }
    }
}

/// The blocks of a sequence's snapshot.
enum BlockStorage {
    /// In main memory.
    Ram(Vec<u8>),
    /// In a file without a name.
    Disk(File),
}

/// A sequence in the store.
struct StoredSequence {
    /// Unique number.
    number: u64,
    /// The clients that may restore it.
    owner: PrefixOwner,
    /// Its ids and spans.
    key: SequenceKey,
    /// Header of its snapshot.
    snapshot: Snapshot,
    /// Blocks of its snapshot.
    blocks: BlockStorage,
    /// The store's `now` at its last use.
    last_used: u64,
}

impl StoredSequence {
    /// Bytes that it takes.
    fn bytes(&self) -> u64 {
        bytes_of(&self.snapshot, self.key.as_prefix())
    }
}

/// Bytes of a sequence in the store: its blocks, its ids and the keys of its spans.
fn bytes_of(snapshot: &Snapshot, key: PrefixKey<'_>) -> u64 {
    snapshot.block_bytes().saturating_add((size_of_val(key.ids) + size_of_val(key.spans)) as u64)
}

/// A prefix of a prompt, found in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoredPrefix {
    /// Number of the stored sequence.
    number: u64,
    /// Length of the prefix in tokens.
    pub n_tokens: usize,
}

/// The stored sequences.
pub(crate) struct PrefixStore {
    /// Maximum bytes in main memory.
    ram: u64,
    /// Maximum bytes on disk, and where.
    disk: Option<CacheDisk>,
    /// All sequences.
    sequences: Vec<StoredSequence>,
    /// Counts uses and sequences, in place of a clock.
    now: u64,
    /// Prompts whose prefix was restored.
    hits: u64,
    /// Tokens of these prefixes.
    tokens: u64,
    /// Time for copies while other sequences run.
    budget: CopyBudget,
}

impl PrefixStore {
    /// An empty store with `ram` bytes of main memory and the given disk space.
    pub fn new(ram: u64, disk: Option<CacheDisk>) -> Self {
        Self { ram, disk, sequences: Vec::new(), now: 0, hits: 0, tokens: 0, budget: CopyBudget::new() }
    }

    /// Whether the store has no capacity at all.
    fn is_off(&self) -> bool {
        self.ram == 0 && self.disk.is_none()
    }

    /// Copies the first `prompt.len()` tokens of sequence `seq`, which is decoding, before layers with a sliding window
    /// lose them. A later prompt of the conversation returns to this point if its template drops the reasoning of
    /// earlier answers.
    ///
    /// Returns whether this is settled: false means that it is too early. Until half a micro-batch has been decoded the
    /// sequence can be cut back by itself, so no copy is needed. Models without windows never need one.
    pub fn keep_prompt_end(
        &mut self,
        pass: &mut dyn ForwardPass,
        seq: usize,
        client: Client,
        prompt: PrefixKey<'_>,
        others_wait: bool,
    ) -> bool {
        if self.is_off() || pass.cache().pages().n_groups() == 1 {
            return true;
        }
        let (n, half) = (prompt.len(), pass.n_ubatch().max(pass.cache_pages().page_len) / 2);
        let is_time = pass.n_past(seq) >= n + half;
        if is_time && pass.reachable(seq, n) == n {
            self.keep(pass, seq, client, prompt, others_wait);
        }
        is_time
    }

    /// Stores the prefix `key` of sequence `seq` of `pass`, to which it can be cut back, for prompts of `client`, as far
    /// as there is capacity. `others_wait`: other sequences wait for the copy, so that it is limited by the time budget
    /// as well.
    pub fn keep(
        &mut self,
        pass: &mut dyn ForwardPass,
        seq: usize,
        client: Client,
        key: PrefixKey<'_>,
        others_wait: bool,
    ) {
        let owner = PrefixOwner::from(client);
        // Less than a page is faster to evaluate than to restore.
        if self.is_off() || key.len() < pass.cache_pages().page_len {
            return;
        }
        self.now += 1;
        let now = self.now;
        let cache = pass.cache();
        let covers = |sequence: &StoredSequence| {
            let n = key.len();
            sequence.owner == owner
                && sequence.key.as_prefix().starts_with(key)
                && sequence.snapshot.reachable(cache, n) == n
        };
        if let Some(i) = self.sequences.iter().position(covers) {
            self.sequences[i].last_used = now;
            return;
        }
        let start = Instant::now();
        let max_bytes = if others_wait { self.budget.bytes(start) } else { u64::MAX };
        match self.add(pass, seq, owner, key, max_bytes) {
            Ok(bytes) => self.budget.record_copy(bytes, start.elapsed()),
            Err(error) => tracing::warn!("a sequence that gives its place up is not kept: {error}"),
        }
    }

    /// Stores the prefix `key` of sequence `seq`, or as much of it as fits in `max_bytes` bytes. Returns the bytes that
    /// were copied.
    fn add(
        &mut self,
        pass: &mut dyn ForwardPass,
        seq: usize,
        owner: PrefixOwner,
        key: PrefixKey<'_>,
        max_bytes: u64,
    ) -> Result<u64, SnapshotError> {
        let snapshot = Snapshot::of_prefix(pass.cache(), seq, key.len())?;
        let bytes = bytes_of(&snapshot, key);
        if bytes > max_bytes {
            // The longest prefix that there is time for. Layers with windows or states may have none that short.
            let page_len = pass.cache_pages().page_len;
            let n = (key.len() as u128 * u128::from(max_bytes) / u128::from(bytes)) as usize / page_len * page_len;
            let n = key.reachable(n, |n| pass.reachable(seq, n));
            return if n < page_len { Ok(0) } else { self.add(pass, seq, owner, key.first(n), u64::MAX) };
        }
        if bytes > self.ram && self.disk.as_ref().is_none_or(|disk| bytes > disk.bytes) {
            return Ok(0);
        }
        // Sequences that are prefixes of this one, and to which it can be cut back, are superseded.
        self.sequences.retain(|sequence| {
            let prefix = sequence.key.as_prefix();
            let n = prefix.len();
            sequence.owner != owner || !key.starts_with(prefix) || snapshot.reachable(pass.cache(), n) < n
        });
        let blocks = if bytes <= self.ram {
            self.free_ram(bytes);
            BlockStorage::Ram(copy_blocks(&snapshot, pass, seq)?)
        } else {
            let Some(file) = self.file_for(bytes)? else { return Ok(0) };
            let mut out = BufWriter::with_capacity(BUFFER, file);
            snapshot.write_blocks(pass.cache(), seq, &mut out)?;
            BlockStorage::Disk(out.into_inner().map_err(|error| SnapshotError::Write(error.into_error()))?)
        };
        let (number, last_used) = (self.now, self.now);
        self.sequences.push(StoredSequence { number, owner, key: key.to_owned(), snapshot, blocks, last_used });
        Ok(bytes)
    }

    /// Moves the sequences in main memory that were used least recently to disk, or drops them, until `bytes` more
    /// bytes fit.
    fn free_ram(&mut self, bytes: u64) {
        while self.usage().ram_bytes + bytes > self.ram {
            let in_ram = |sequence: &StoredSequence| matches!(sequence.blocks, BlockStorage::Ram(_));
            let Some(i) = self.oldest(in_ram) else { return };
            let sequence = self.sequences.swap_remove(i);
            match self.move_to_disk(sequence) {
                Ok(Some(sequence)) => self.sequences.push(sequence),
                Ok(None) => {}
                Err(error) => tracing::warn!("a sequence is not kept on disk: {error}"),
            }
        }
    }

    /// Moves a sequence to disk; `None` if it does not fit there.
    fn move_to_disk(&mut self, sequence: StoredSequence) -> Result<Option<StoredSequence>, SnapshotError> {
        let Some(mut file) = self.file_for(sequence.bytes())? else { return Ok(None) };
        if let BlockStorage::Ram(blocks) = &sequence.blocks {
            file.write_all(blocks).map_err(SnapshotError::Write)?;
        }
        Ok(Some(StoredSequence { blocks: BlockStorage::Disk(file), ..sequence }))
    }

    /// A file for a sequence of `bytes` bytes, for which others are dropped; `None` if it can never fit.
    fn file_for(&mut self, bytes: u64) -> Result<Option<File>, SnapshotError> {
        let Some(disk) = self.disk.clone().filter(|disk| bytes <= disk.bytes) else { return Ok(None) };
        while self.usage().disk_bytes + bytes > disk.bytes {
            let Some(i) = self.oldest(|sequence| matches!(sequence.blocks, BlockStorage::Disk(_))) else {
                return Ok(None);
            };
            self.sequences.swap_remove(i);
        }
        disk.file().map(Some).map_err(SnapshotError::Write)
    }

    /// Index of the least recently used sequence for which `filter` is true.
    fn oldest(&self, filter: impl Fn(&StoredSequence) -> bool) -> Option<usize> {
        let sequences = self.sequences.iter().enumerate().filter(|(_, sequence)| filter(sequence));
        sequences.min_by_key(|(_, sequence)| sequence.last_used).map(|(i, _)| i)
    }

    /// Drops the sequences of `client` that are a prefix of `key` or begin with all of it.
    pub fn forget(&mut self, client: Client, key: PrefixKey<'_>) {
        let owner = PrefixOwner::from(client);
        self.sequences.retain(|sequence| {
            let stored = sequence.key.as_prefix();
            sequence.owner != owner || !(stored.starts_with(key) || key.starts_with(stored))
        });
    }

    /// The longest prefix of `key` in the store that `client` may restore and that a sequence can continue.
    pub fn find(&mut self, pass: &mut dyn ForwardPass, client: Client, key: PrefixKey<'_>) -> Option<StoredPrefix> {
        let owner = PrefixOwner::from(client);
        let of_owner = self.sequences.iter().filter(|sequence| sequence.owner == owner);
        let cache = &*pass.cache();
        let stored = of_owner.map(|sequence| {
            let n = key.n_common(sequence.key.as_prefix());
            let n = key.reachable(n, |n| sequence.snapshot.reachable(cache, n));
            StoredPrefix { number: sequence.number, n_tokens: n }
        });
        stored.filter(|stored| stored.n_tokens > 0).max_by_key(|stored| stored.n_tokens)
    }

    /// Marks a sequence as just used, so that others are dropped before it.
    pub fn touch(&mut self, stored: StoredPrefix) {
        self.now += 1;
        if let Some(sequence) = self.sequences.iter_mut().find(|sequence| sequence.number == stored.number) {
            sequence.last_used = self.now;
        }
    }

    /// Restores a prefix into sequence `seq`. False, with the sequence unchanged, if it is no longer in the store.
    /// After an error the sequence is empty.
    pub fn restore(
        &mut self,
        pass: &mut dyn ForwardPass,
        seq: usize,
        stored: StoredPrefix,
    ) -> Result<bool, SnapshotError> {
        self.touch(stored);
        let Some(i) = self.sequences.iter().position(|sequence| sequence.number == stored.number) else {
            return Ok(false);
        };
        let StoredSequence { snapshot, blocks, .. } = &mut self.sequences[i];
        match blocks {
            BlockStorage::Ram(blocks) => {
                snapshot.restore_prefix(stored.n_tokens, pass.cache(), seq, &mut Cursor::new(&blocks[..]))?;
            }
            BlockStorage::Disk(file) => {
                file.rewind().map_err(SnapshotError::Read)?;
                let mut input = BufReader::with_capacity(BUFFER, file);
                snapshot.restore_prefix(stored.n_tokens, pass.cache(), seq, &mut input)?;
            }
        }
        self.hits += 1;
        self.tokens += stored.n_tokens as u64;
        Ok(true)
    }

    /// The contents and hits of the store.
    pub fn usage(&self) -> StoreUse {
        let mut usage = StoreUse { hits: self.hits, tokens: self.tokens, ..StoreUse::default() };
        for sequence in &self.sequences {
            let (n_sequences, bytes) = match sequence.blocks {
                BlockStorage::Ram(_) => (&mut usage.ram_sequences, &mut usage.ram_bytes),
                BlockStorage::Disk(_) => (&mut usage.disk_sequences, &mut usage.disk_bytes),
            };
            *n_sequences += 1;
            *bytes += sequence.bytes();
        }
        usage
    }
}

impl CacheDisk {
    /// A new file in the folder, without a name or deleted with the process.
    pub(crate) fn file(&self) -> std::io::Result<File> {
        std::fs::create_dir_all(&self.folder)?;
        tempfile::tempfile_in(&self.folder)
    }
}

#[cfg(test)]
mod tests {
    use metal_attention_model::BatchToken;

    use super::*;
    use crate::{Device, EngineOptions, Model};

    #[test]
    fn a_sequence_is_stored_as_far_as_there_is_time() {
        let model = Model::built_in().unwrap();
        let options = EngineOptions { device: Device::Cpu, n_seq: 2, ..Default::default() };
        let mut pass = model.forward_pass(&options).unwrap();
        let ids: Vec<u32> = (0..300).map(|i| (i * 7) % 500 + 3).collect();
        let batch = |seq, from: usize| {
            let token = |pos| BatchToken { id: ids[pos], seq, pos, output: pos == 299 };
            (from..300).map(token).collect::<Vec<_>>()
        };
        let want = pass.forward(&batch(0, 0)).unwrap().as_slice().to_vec();
        let mut store = PrefixStore::new(1 << 30, None);
        let key = PrefixKey { ids: &ids, spans: &[] };
        let whole = bytes_of(&Snapshot::of_sequence(pass.cache(), 0).unwrap(), key);
        for (max_bytes, n) in [(whole / 7, 0), (whole / 2, 128), (whole - 1, 256), (whole, 300)] {
            let bytes = store.add(&mut *pass, 0, PrefixOwner::Keyless, key, max_bytes).unwrap();
            assert!(bytes <= max_bytes && (bytes > 0) == (n > 0), "{bytes} of {max_bytes}");
            let stored = store.find(&mut *pass, Client::Unknown, key);
            assert_eq!(stored.map_or(0, |stored| stored.n_tokens), n);
            let Some(stored) = stored.filter(|stored| stored.n_tokens < 300) else { continue };
            assert!(store.restore(&mut *pass, 1, stored).unwrap());
            assert_eq!(pass.forward(&batch(1, n)).unwrap().as_slice(), want);
        }
    }
}
