//! Session files: a text with what the KV cache has of it, so that it goes on in another process without being read again.
//!
//! ```text
//! magic, version (u32), bytes of the head (u64)
//! head: the model's fingerprint, a note (u64 bytes, bytes), tokens (u64, u32 each), where there are any: the header of a snapshot
//! CRC-32 of all before
//! where there are tokens: the blocks of the snapshot, CRC-32 of them
//! ```
//!
//! All numbers are little-endian. A file is written beside its place and renamed, so that there is a whole one at any time; only
//! its owner may read it. On reading the head is checked before anything is made of it, and the file's length against it; the
//! blocks go straight to the cache, and where their sum is wrong the sequence is emptied again.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;

use metal_attention_model::{ForwardError, ForwardPass, Snapshot, SnapshotError};

use crate::Model;
use crate::host_snapshot::{HostSnapshot, room_for_blocks};
use crate::scheduler::CacheCapacity;

const MAGIC: [u8; 8] = *b"MtlAttnS";
const VERSION: u32 = 1;

/// The most bytes of a note.
const MAX_NOTE: usize = 64 << 20;

/// The most tokens: more than any context has.
const MAX_TOKENS: usize = 1 << 24;

/// The most bytes of a head.
const MAX_HEAD: u64 = (MAX_NOTE + 4 * MAX_TOKENS + (8 << 20)) as u64;

/// Bytes that go to the file, or come from it, at once.
const BUFFER: usize = 1 << 20;

/// Bytes of a CRC-32.
const SUM: u64 = 4;

/// Why a session file could not be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The system could not write the file.
    #[error("the session cannot be written: {0}")]
    Write(#[source] io::Error),
    /// The system could not read the file.
    #[error("the session cannot be read: {0}")]
    Read(#[source] io::Error),
    /// The file is something else.
    #[error("this is no session file")]
    Foreign,
    /// The file is of a version that this program does not know.
    #[error("the session file has version {version}, and this program reads version {VERSION}: begin a new one")]
    Version {
        /// The version.
        version: u32,
    },
    /// The file ends too early.
    #[error("the session file is cut off: it was not written or copied to its end")]
    Cut,
    /// The file is not what was written.
    #[error("the session file is damaged: {why}")]
    Damaged {
        /// What is wrong with it.
        why: &'static str,
    },
    /// The session is of another model, or of another file of it.
    #[error("the session is of another model: its metadata or its tensors differ")]
    OtherModel,
    /// The session is longer than the context.
    #[error("the session has {n_tokens} tokens, and the context has room for {n_ctx}: use a larger context (-c)")]
    TooLong {
        /// Tokens of the session.
        n_tokens: usize,
        /// Tokens that the context has room for.
        n_ctx: usize,
    },
    /// The session has messages and no tokens.
    #[error("the session file has nothing of a KV cache")]
    NoText,
    /// The session takes more than the whole KV cache has.
    #[error("the session takes {bytes} bytes, and the whole KV cache has {capacity}: it is of another KV cache")]
    TooLarge {
        /// Bytes of the session.
        bytes: u64,
        /// Those of the KV cache.
        capacity: u64,
    },
    /// There is more to write than is read again.
    #[error("a session file holds {max} {what} at most, and this one would have {n}")]
    TooMuch {
        /// What there is too much of.
        what: &'static str,
        /// How much.
        n: usize,
        /// How much there may be.
        max: usize,
    },
    /// The KV cache does not take it: it has another layout, or no room.
    #[error(transparent)]
    Snapshot(SnapshotError),
}

impl From<SnapshotError> for SessionError {
    fn from(error: SnapshotError) -> Self {
        match error {
            SnapshotError::Read(source) => Self::from_read(source),
            SnapshotError::Write(source) => Self::Write(source),
            SnapshotError::Damaged { why } => Self::Damaged { why },
            SnapshotError::Forward(ForwardError::ContextFull { n_new, n_ctx, .. }) => {
                Self::TooLong { n_tokens: n_new, n_ctx }
            }
            error => Self::Snapshot(error),
        }
    }
}

impl SessionError {
    fn from_read(source: io::Error) -> Self {
        if source.kind() == io::ErrorKind::UnexpectedEof { Self::Cut } else { Self::Read(source) }
    }

    /// Whether the file is sound, and only the model or its KV cache is another: its note can be used.
    pub fn is_of_other_cache(&self) -> bool {
        match self {
            Self::OtherModel | Self::TooLong { .. } | Self::NoText | Self::TooLarge { .. } | Self::Snapshot(_) => true,
            Self::Write(_)
            | Self::Read(_)
            | Self::Foreign
            | Self::Version { .. }
            | Self::Cut
            | Self::Damaged { .. }
            | Self::TooMuch { .. } => false,
        }
    }
}

fn damaged<T>(why: &'static str) -> Result<T, SessionError> {
    Err(SessionError::Damaged { why })
}

/// A text in a KV cache.
pub struct SavedSequence<'a> {
    /// The forward pass.
    pub pass: &'a mut dyn ForwardPass,
    /// Its sequence.
    pub seq: usize,
    /// All tokens of the sequence.
    pub ids: &'a [u32],
}

/// A session file, open to be read: its head is there, the rest is read by [`restore`](Self::restore).
#[derive(Debug)]
pub struct SessionFile {
    input: BufReader<File>,
    /// Bytes of the file.
    bytes: u64,
    fingerprint: [u8; 32],
    note: Vec<u8>,
    ids: Vec<u32>,
    /// None where there are no tokens.
    snapshot: Option<Snapshot>,
}

impl SessionFile {
    /// Writes a session of `model`, with a `note` of the program's own and, where it is given, what a KV cache has of a text.
    /// A file that was there stays as it is until the new one is whole.
    pub fn write(
        path: &Path,
        model: &Model,
        note: &[u8],
        sequence: Option<SavedSequence<'_>>,
    ) -> Result<(), SessionError> {
        let Some(sequence) = sequence.filter(|sequence| !sequence.ids.is_empty()) else {
            return write_file(path, model, note, &[], None, |_| Ok(())).map(drop);
        };
        let SavedSequence { pass, seq, ids } = sequence;
        let snapshot = Snapshot::of_sequence(pass.cache(), seq)?;
        let write_blocks = |out: &mut dyn Write| snapshot.write_blocks(pass.cache(), seq, out);
        write_file(path, model, note, ids, Some(&snapshot), write_blocks).map(drop)
    }

    /// Writes a session of `model` with a text of which there is a copy. Returns the file's bytes. A file that was there stays as it
    /// is until the new one is whole.
    pub fn write_copy(path: &Path, model: &Model, snapshot: &HostSnapshot) -> Result<u64, SessionError> {
        let write_blocks = |out: &mut dyn Write| out.write_all(&snapshot.blocks).map_err(SnapshotError::Write);
        write_file(path, model, &[], &snapshot.ids, Some(&snapshot.snapshot), write_blocks)
    }

    /// Opens a session file and checks its head and its length.
    pub fn open(path: &Path) -> Result<Self, SessionError> {
        let file = File::open(path).map_err(SessionError::Read)?;
        let metadata = file.metadata().map_err(SessionError::Read)?;
        if !metadata.is_file() {
            return Err(SessionError::Foreign);
        }
        let mut input = Summed::new(BufReader::with_capacity(BUFFER, file));
        if read_array(&mut input).ok() != Some(MAGIC) {
            return Err(SessionError::Foreign);
        }
        let version = u32::from_le_bytes(read_array(&mut input)?);
        if version != VERSION {
            return Err(SessionError::Version { version });
        }
        let n_head = u64::from_le_bytes(read_array(&mut input)?);
        if n_head > MAX_HEAD {
            return damaged("its head is too long");
        }
        // Takes memory for what is there, whatever the length says.
        let mut head = Vec::new();
        (&mut input).take(n_head).read_to_end(&mut head).map_err(SessionError::Read)?;
        if (head.len() as u64) < n_head {
            return Err(SessionError::Cut);
        }
        input.check_sum()?;
        let (fingerprint, note, ids, snapshot) = parse(&mut &head[..])?;
        let n_before = (MAGIC.len() + size_of_val(&VERSION) + size_of_val(&n_head)) as u64 + n_head + SUM;
        let n_blocks = snapshot.as_ref().map_or(0, |snapshot| snapshot.block_bytes().saturating_add(SUM));
        let expected = n_before.saturating_add(n_blocks);
        if metadata.len() < expected {
            return Err(SessionError::Cut);
        }
        if metadata.len() > expected {
            return damaged("it is longer than what is in it");
        }
        Ok(Self { input: input.of, bytes: expected, fingerprint, note, ids, snapshot })
    }

    /// The program's note.
    pub fn note(&self) -> &[u8] {
        &self.note
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The tokens whose keys, values and states are in the file.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Reads the text of this session into main memory, for a KV cache of this `capacity` of `model`. What takes more than the KV
    /// cache does is not read.
    pub fn read(self, model: &Model, capacity: CacheCapacity) -> Result<HostSnapshot, SessionError> {
        self.check_model(model)?;
        let Some(snapshot) = self.snapshot else { return Err(SessionError::NoText) };
        let (n_tokens, bytes) = (self.ids.len(), snapshot.block_bytes());
        if n_tokens > capacity.n_tokens {
            return Err(SessionError::TooLong { n_tokens, n_ctx: capacity.n_tokens });
        }
        if bytes > capacity.bytes {
            return Err(SessionError::TooLarge { bytes, capacity: capacity.bytes });
        }
        let mut blocks = room_for_blocks(&snapshot).map_err(SnapshotError::from)?;
        let mut input = Summed::new(self.input);
        (&mut input).take(bytes).read_to_end(&mut blocks).map_err(SessionError::Read)?;
        if (blocks.len() as u64) < bytes {
            return Err(SessionError::Cut);
        }
        input.check_sum()?;
        Ok(HostSnapshot { ids: self.ids, snapshot, blocks })
    }

    /// An error where the session is of another model than `model`.
    fn check_model(&self, model: &Model) -> Result<(), SessionError> {
        if self.fingerprint != model.fingerprint() {
            return Err(SessionError::OtherModel);
        }
        if self.ids.iter().any(|&id| id as usize >= model.spec().n_vocab) {
            return damaged("it has tokens that are not in the vocabulary");
        }
        Ok(())
    }

    /// Makes sequence `seq` of `pass`, which runs `model`, the text of this session. On an error the sequence is empty, or as
    /// it was.
    pub fn restore(self, model: &Model, pass: &mut dyn ForwardPass, seq: usize) -> Result<Vec<u32>, SessionError> {
        self.check_model(model)?;
        let Some(snapshot) = self.snapshot else {
            pass.rewind(seq, 0);
            return Ok(Vec::new());
        };
        let mut input = Summed::new(self.input);
        snapshot.restore(pass.cache(), seq, &mut input)?;
        if let Err(error) = input.check_sum() {
            pass.rewind(seq, 0);
            return Err(error);
        }
        Ok(self.ids)
    }
}

/// Writes a session file; `write_blocks` writes the blocks of `snapshot`, that of all of `ids`. Returns the file's bytes.
fn write_file(
    path: &Path,
    model: &Model,
    note: &[u8],
    ids: &[u32],
    snapshot: Option<&Snapshot>,
    write_blocks: impl FnOnce(&mut dyn Write) -> Result<(), SnapshotError>,
) -> Result<u64, SessionError> {
    for (what, n, max) in [("bytes of messages", note.len(), MAX_NOTE), ("tokens", ids.len(), MAX_TOKENS)] {
        if n > max {
            return Err(SessionError::TooMuch { what, n, max });
        }
    }
    let mut head = model.fingerprint().to_vec();
    head.extend((note.len() as u64).to_le_bytes());
    head.extend(note);
    head.extend((ids.len() as u64).to_le_bytes());
    head.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
    if let Some(snapshot) = snapshot {
        assert_eq!(snapshot.n_tokens(), ids.len(), "all tokens of the sequence");
        snapshot.write_header(&mut head)?;
    }

    // A link stays a link.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Readable for its owner alone; gone where an error comes between.
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(SessionError::Write)?;
    let mut out = Summed::new(BufWriter::with_capacity(BUFFER, file.as_file_mut()));
    let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(SessionError::Write);
    put(&MAGIC)?;
    put(&VERSION.to_le_bytes())?;
    put(&(head.len() as u64).to_le_bytes())?;
    put(&head)?;
    out.write_sum().map_err(SessionError::Write)?;
    if snapshot.is_some() {
        write_blocks(&mut out)?;
        out.write_sum().map_err(SessionError::Write)?;
    }
    out.of.flush().map_err(SessionError::Write)?;
    drop(out);
    let bytes = file.as_file().metadata().map_err(SessionError::Write)?.len();
    file.persist(&path).map_err(|error| SessionError::Write(error.error))?;
    Ok(bytes)
}

type SessionHeader = ([u8; 32], Vec<u8>, Vec<u32>, Option<Snapshot>);

/// What a head says.
fn parse(head: &mut &[u8]) -> Result<SessionHeader, SessionError> {
    let fingerprint = read_array(head).or_else(|_| damaged("its head is too short"))?;
    let note = take(head, 1, MAX_NOTE)?.to_vec();
    let ids = take(head, size_of::<u32>(), MAX_TOKENS)?;
    let ids: Vec<u32> = ids.as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect();
    let mut snapshot = None;
    if !ids.is_empty() {
        let of_ids = Snapshot::read_header(head, ids.len()).map_err(|error| match SessionError::from(error) {
            SessionError::Cut => SessionError::Damaged { why: "its head is too short" },
            error => error,
        })?;
        if of_ids.n_tokens() != ids.len() {
            return damaged("its KV cache is not that of its tokens");
        }
        snapshot = Some(of_ids);
    }
    if head.is_empty() { Ok((fingerprint, note, ids, snapshot)) } else { damaged("its head is too long") }
}

/// A number, and so many elements of `size` bytes, `most` at most.
fn take<'h>(head: &mut &'h [u8], size: usize, most: usize) -> Result<&'h [u8], SessionError> {
    let n = read_array(head).map(u64::from_le_bytes).ok();
    let bytes = n.and_then(|n| usize::try_from(n).ok()).filter(|&n| n <= most).and_then(|n| head.split_off(..n * size));
    bytes.map_or_else(|| damaged("its head is too short"), Ok)
}

fn read_array<const N: usize>(input: &mut impl Read) -> Result<[u8; N], SessionError> {
    let mut bytes = [0; N];
    input.read_exact(&mut bytes).map_err(SessionError::from_read)?;
    Ok(bytes)
}

/// A reader or a writer that sums up what passes through it.
struct Summed<T> {
    of: T,
    sum: crc32fast::Hasher,
}

impl<T> Summed<T> {
    fn new(of: T) -> Self {
        Self { of, sum: crc32fast::Hasher::new() }
    }

    /// The sum of what passed since the last one.
    fn take_sum(&mut self) -> [u8; 4] {
        std::mem::take(&mut self.sum).finalize().to_le_bytes()
    }
}

impl<T: Write> Summed<T> {
    fn write_sum(&mut self) -> io::Result<()> {
        let sum = self.take_sum();
        self.of.write_all(&sum)
    }
}

impl<T: Read> Summed<T> {
    fn check_sum(&mut self) -> Result<(), SessionError> {
        let sum = self.take_sum();
        if read_array(&mut self.of)? == sum { Ok(()) } else { damaged("its checksum is wrong") }
    }
}

impl<T: Read> Read for Summed<T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n = self.of.read(bytes)?;
        self.sum.update(&bytes[..n]);
        Ok(n)
    }
}

impl<T: Write> Write for Summed<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.of.write(bytes)?;
        self.sum.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.of.flush()
    }
}
