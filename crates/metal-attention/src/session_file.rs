//! Session files: a sequence's tokens with a snapshot of its KV pages and states, so that another process can continue
//! it without evaluating it again.
//!
//! ```text
//! magic, version (u32), bytes of the header (u64)
//! header: fingerprint of the model, note (u64 length, bytes), tokens (u64 count, u32 each),
//!     spans (u64 count; start, end: u64, hash: 32 bytes), if there are tokens: header of a snapshot
//! CRC-32 of everything before
//! if there are tokens: blocks of the snapshot, CRC-32 of them
//! ```
//!
//! All numbers are little-endian. A file is written beside its final path and renamed, so that a complete one exists at
//! any time; only its owner may read it. When it is read, the header is checked before it is used, and the file's
//! length against it. The blocks go straight to the cache; if their checksum is wrong, the sequence is emptied again.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;

use metal_attention_model::{ForwardError, ForwardPass, Snapshot, SnapshotError};

use crate::host_snapshot::{HostSnapshot, block_buffer};
use crate::prompt::PrefixKey;
use crate::scheduler::CacheCapacity;
use crate::{ContentHash, Model, SequenceKey, SpanKey};

const MAGIC: [u8; 8] = *b"MtlAttnS";
const VERSION: u32 = 3;

/// Maximum bytes of a note.
const MAX_NOTE: usize = 64 << 20;

/// Maximum tokens: more than any context has.
const MAX_TOKENS: usize = 1 << 24;

/// Maximum spans of embedding rows.
const MAX_SPANS: usize = 1 << 16;

/// Bytes of a span: start, end, hash.
const SPAN: usize = 8 + 8 + 32;

/// Maximum bytes of a header.
const MAX_HEADER: u64 = (MAX_NOTE + 4 * MAX_TOKENS + (8 << 20)) as u64;

/// Bytes of the buffer for reading and writing.
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
    /// The file is not a session file.
    #[error("this is no session file")]
    Foreign,
    /// The file has another version.
    #[error("the session file has version {version}, and this program reads version {VERSION}: begin a new one")]
    Version {
        /// The version.
        version: u32,
    },
    /// The file is truncated.
    #[error("the session file is cut off: it was not written or copied to its end")]
    Cut,
    /// The file's contents are inconsistent.
    #[error("the session file is damaged: {why}")]
    Damaged {
        /// The reason.
        why: &'static str,
    },
    /// The session is of another model, or of another file of the model.
    #[error("the session is of another model: its metadata or its tensors differ")]
    OtherModel,
    /// The session has more tokens than the context.
    #[error("the session has {n_tokens} tokens, and the context has room for {n_ctx}: use a larger context (-c)")]
    TooLong {
        /// Tokens of the session.
        n_tokens: usize,
        /// Tokens of the context.
        n_ctx: usize,
    },
    /// The session has a note and no tokens.
    #[error("the session file has nothing of a KV cache")]
    NoText,
    /// The session's snapshot is larger than the whole KV cache.
    #[error("the session takes {bytes} bytes, and the whole KV cache has {capacity}: it is of another KV cache")]
    TooLarge {
        /// Bytes of the session.
        bytes: u64,
        /// Bytes of the KV cache.
        capacity: u64,
    },
    /// The session exceeds a limit that a reader would refuse.
    #[error("a session file holds {max} {what} at most, and this one would have {n}")]
    TooMuch {
        /// Name of what exceeds the limit.
        what: &'static str,
        /// Its number.
        n: usize,
        /// The limit.
        max: usize,
    },
    /// The KV cache refused the snapshot: it has another layout, or too little free capacity.
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
    /// The error of reading: `Cut` at an unexpected end of the file.
    fn from_read(source: io::Error) -> Self {
        if source.kind() == io::ErrorKind::UnexpectedEof { Self::Cut } else { Self::Read(source) }
    }

    /// Whether the file itself is intact and only belongs to another model or KV cache: its note can be used.
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

/// A sequence in a KV cache that is to be saved.
pub struct SavedSequence<'a> {
    /// The forward pass that evaluated it.
    pub pass: &'a mut dyn ForwardPass,
    /// Index of the cache sequence.
    pub seq: usize,
    /// All its evaluated tokens.
    pub ids: &'a [u32],
    /// The spans of embedding rows among them.
    pub spans: &'a [SpanKey],
}

impl<'a> SavedSequence<'a> {
    /// What the sequence is known by.
    fn key(&self) -> PrefixKey<'a> {
        PrefixKey { ids: self.ids, spans: self.spans }
    }
}

/// An open session file. Its header has been read; [`restore`](Self::restore) or [`read`](Self::read) read the blocks.
#[derive(Debug)]
pub struct SessionFile {
    /// The file, at the start of the blocks.
    input: BufReader<File>,
    /// Bytes of the file.
    bytes: u64,
    /// Fingerprint of the model.
    fingerprint: [u8; 32],
    /// Data of the program.
    note: Vec<u8>,
    /// Ids and spans of the snapshot.
    key: SequenceKey,
    /// Header of the snapshot; `None` if there are no tokens.
    snapshot: Option<Snapshot>,
}

impl SessionFile {
    /// Writes a session of `model` with a `note` of the program and, if given, a snapshot of `sequence`. An existing
    /// file stays unchanged until the new one is complete.
    pub fn write(
        path: &Path,
        model: &Model,
        note: &[u8],
        sequence: Option<SavedSequence<'_>>,
    ) -> Result<(), SessionError> {
        let Some(sequence) = sequence.filter(|sequence| !sequence.ids.is_empty()) else {
            let nothing = PrefixKey { ids: &[], spans: &[] };
            return write_file(path, model, note, nothing, None, |_| Ok(())).map(drop);
        };
        let key = sequence.key();
        let SavedSequence { pass, seq, .. } = sequence;
        let snapshot = Snapshot::of_sequence(pass.cache(), seq)?;
        let write_blocks = |out: &mut dyn Write| snapshot.write_blocks(pass.cache(), seq, out);
        write_file(path, model, note, key, Some(&snapshot), write_blocks).map(drop)
    }

    /// Writes a session of `model` with a snapshot from main memory. Returns the file's size in bytes. An existing file
    /// stays unchanged until the new one is complete.
    pub fn write_copy(path: &Path, model: &Model, snapshot: &HostSnapshot) -> Result<u64, SessionError> {
        let write_blocks = |out: &mut dyn Write| out.write_all(&snapshot.blocks).map_err(SnapshotError::Write);
        write_file(path, model, &[], snapshot.key.as_prefix(), Some(&snapshot.snapshot), write_blocks)
    }

    /// Opens a session file and checks its header and its length.
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
        let n_header = u64::from_le_bytes(read_array(&mut input)?);
        if n_header > MAX_HEADER {
            return damaged("its head is too long");
        }
        // Reads as much as there is: the length field is not trusted for an allocation.
        let mut header = Vec::new();
        (&mut input).take(n_header).read_to_end(&mut header).map_err(SessionError::Read)?;
        if (header.len() as u64) < n_header {
            return Err(SessionError::Cut);
        }
        input.check_sum()?;
        let (fingerprint, note, key, snapshot) = parse(&mut &header[..])?;
        let n_before = (MAGIC.len() + size_of_val(&VERSION) + size_of_val(&n_header)) as u64 + n_header + SUM;
        let n_blocks = snapshot.as_ref().map_or(0, |snapshot| snapshot.block_bytes().saturating_add(SUM));
        let expected = n_before.saturating_add(n_blocks);
        if metadata.len() < expected {
            return Err(SessionError::Cut);
        }
        if metadata.len() > expected {
            return damaged("it is longer than what is in it");
        }
        Ok(Self { input: input.inner, bytes: expected, fingerprint, note, key, snapshot })
    }

    /// The program's note.
    pub fn note(&self) -> &[u8] {
        &self.note
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The tokens of the snapshot.
    pub fn ids(&self) -> &[u32] {
        &self.key.ids
    }

    /// The spans of embedding rows in the snapshot.
    pub fn spans(&self) -> &[SpanKey] {
        &self.key.spans
    }

    /// Reads the snapshot into main memory, for a KV cache of `capacity` of `model`. A snapshot larger than that is an
    /// error and not read.
    pub fn read(self, model: &Model, capacity: CacheCapacity) -> Result<HostSnapshot, SessionError> {
        self.check_model(model)?;
        let Some(snapshot) = self.snapshot else { return Err(SessionError::NoText) };
        let (n_tokens, bytes) = (self.key.ids.len(), snapshot.block_bytes());
        if n_tokens > capacity.n_tokens {
            return Err(SessionError::TooLong { n_tokens, n_ctx: capacity.n_tokens });
        }
        if bytes > capacity.bytes {
            return Err(SessionError::TooLarge { bytes, capacity: capacity.bytes });
        }
        let mut blocks = block_buffer(&snapshot).map_err(SnapshotError::from)?;
        let mut input = Summed::new(self.input);
        (&mut input).take(bytes).read_to_end(&mut blocks).map_err(SessionError::Read)?;
        if (blocks.len() as u64) < bytes {
            return Err(SessionError::Cut);
        }
        input.check_sum()?;
        Ok(HostSnapshot { key: self.key, snapshot, blocks })
    }

    /// An error if the session is of another model.
    fn check_model(&self, model: &Model) -> Result<(), SessionError> {
        if self.fingerprint != model.fingerprint() {
            return Err(SessionError::OtherModel);
        }
        if self.key.ids.iter().any(|&id| id as usize >= model.spec().n_vocab) {
            return damaged("it has tokens that are not in the vocabulary");
        }
        Ok(())
    }

    /// Restores the session into sequence `seq` of `pass`, which runs `model`, and returns its tokens. After an error
    /// the sequence is empty, or unchanged if nothing was read.
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
        Ok(self.key.ids)
    }
}

/// Writes a session file. `write_blocks` writes the blocks of `snapshot`, which covers all of `key`. Returns the file's
/// size in bytes.
fn write_file(
    path: &Path,
    model: &Model,
    note: &[u8],
    key: PrefixKey<'_>,
    snapshot: Option<&Snapshot>,
    write_blocks: impl FnOnce(&mut dyn Write) -> Result<(), SnapshotError>,
) -> Result<u64, SessionError> {
    let PrefixKey { ids, spans } = key;
    for (what, n, max) in [
        ("bytes of messages", note.len(), MAX_NOTE),
        ("tokens", ids.len(), MAX_TOKENS),
        ("spans of embedding rows", spans.len(), MAX_SPANS),
    ] {
        if n > max {
            return Err(SessionError::TooMuch { what, n, max });
        }
    }
    let mut header = model.fingerprint().to_vec();
    header.extend((note.len() as u64).to_le_bytes());
    header.extend(note);
    header.extend((ids.len() as u64).to_le_bytes());
    header.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
    header.extend((spans.len() as u64).to_le_bytes());
    for &SpanKey { start, end, hash } in spans {
        header.extend([start, end].into_iter().flat_map(|n| (n as u64).to_le_bytes()));
        header.extend(hash.0);
    }
    if let Some(snapshot) = snapshot {
        assert_eq!(snapshot.n_tokens(), ids.len(), "all tokens of the sequence");
        assert!(is_of(snapshot, spans), "all spans of the sequence");
        snapshot.write_header(&mut header)?;
    }

    // Through a symbolic link, so that the link is not replaced by a file.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // A temporary file is readable only by its owner, and removed after an error.
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(SessionError::Write)?;
    let mut out = Summed::new(BufWriter::with_capacity(BUFFER, file.as_file_mut()));
    let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(SessionError::Write);
    put(&MAGIC)?;
    put(&VERSION.to_le_bytes())?;
    put(&(header.len() as u64).to_le_bytes())?;
    put(&header)?;
    out.write_sum().map_err(SessionError::Write)?;
    if snapshot.is_some() {
        write_blocks(&mut out)?;
        out.write_sum().map_err(SessionError::Write)?;
    }
    out.inner.flush().map_err(SessionError::Write)?;
    drop(out);
    let bytes = file.as_file().metadata().map_err(SessionError::Write)?.len();
    file.persist(&path).map_err(|error| SessionError::Write(error.error))?;
    Ok(bytes)
}

/// Whether these are the spans of a snapshot.
fn is_of(snapshot: &Snapshot, spans: &[SpanKey]) -> bool {
    let places = snapshot.spans().as_slice().iter().map(|span| (span.start, span.end));
    places.eq(spans.iter().map(|span| (span.start, span.end)))
}

/// Fingerprint, note, ids with spans, and snapshot header.
type SessionHeader = ([u8; 32], Vec<u8>, SequenceKey, Option<Snapshot>);

/// Parses a header.
fn parse(header: &mut &[u8]) -> Result<SessionHeader, SessionError> {
    let fingerprint = read_array(header).or_else(|_| damaged("its head is too short"))?;
    let note = take(header, 1, MAX_NOTE)?.to_vec();
    let ids = take(header, size_of::<u32>(), MAX_TOKENS)?;
    let ids: Vec<u32> = ids.as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect();
    let spans = take(header, SPAN, MAX_SPANS)?.as_chunks().0.iter().map(parse_span).collect::<Result<Vec<_>, _>>()?;
    let mut snapshot = None;
    if ids.is_empty() && !spans.is_empty() {
        return damaged("it has spans of embedding rows and no tokens");
    }
    if !ids.is_empty() {
        let of_ids = Snapshot::read_header(header, ids.len()).map_err(|error| match SessionError::from(error) {
            SessionError::Cut => SessionError::Damaged { why: "its head is too short" },
            error => error,
        })?;
        if of_ids.n_tokens() != ids.len() {
            return damaged("its KV cache is not that of its tokens");
        }
        if !is_of(&of_ids, &spans) {
            return damaged("its KV cache is not that of its spans of embedding rows");
        }
        snapshot = Some(of_ids);
    }
    let key = SequenceKey { ids, spans };
    if header.is_empty() { Ok((fingerprint, note, key, snapshot)) } else { damaged("its head is too long") }
}

/// Parses a span.
fn parse_span(bytes: &[u8; SPAN]) -> Result<SpanKey, SessionError> {
    let mut bytes = &bytes[..];
    let mut index = || {
        let n = u64::from_le_bytes(read_array(&mut bytes)?);
        usize::try_from(n).or_else(|_| damaged("a span of embedding rows is longer than its tokens"))
    };
    let (start, end) = (index()?, index()?);
    Ok(SpanKey { start, end, hash: ContentHash(read_array(&mut bytes)?) })
}

/// Splits off an array: a count (u64) and as many elements of `size` bytes, at most `max`.
fn take<'h>(header: &mut &'h [u8], size: usize, max: usize) -> Result<&'h [u8], SessionError> {
    let n = read_array(header).map(u64::from_le_bytes).ok();
    let bytes =
        n.and_then(|n| usize::try_from(n).ok()).filter(|&n| n <= max).and_then(|n| header.split_off(..n * size));
    bytes.map_or_else(|| damaged("its head is too short"), Ok)
}

/// Reads `N` bytes.
fn read_array<const N: usize>(input: &mut impl Read) -> Result<[u8; N], SessionError> {
    let mut bytes = [0; N];
    input.read_exact(&mut bytes).map_err(SessionError::from_read)?;
    Ok(bytes)
}

/// A reader or writer that computes the CRC-32 of what passes through it.
struct Summed<T> {
    /// The reader or writer.
    inner: T,
    /// CRC-32 since the last checksum.
    sum: crc32fast::Hasher,
}

impl<T> Summed<T> {
    fn new(inner: T) -> Self {
        Self { inner, sum: crc32fast::Hasher::new() }
    }

    /// The checksum since the last call.
    fn take_sum(&mut self) -> [u8; 4] {
        std::mem::take(&mut self.sum).finalize().to_le_bytes()
    }
}

impl<T: Write> Summed<T> {
    /// Writes the checksum.
    fn write_sum(&mut self) -> io::Result<()> {
        let sum = self.take_sum();
        self.inner.write_all(&sum)
    }
}

impl<T: Read> Summed<T> {
    /// Reads a checksum; an error if it differs.
    fn check_sum(&mut self) -> Result<(), SessionError> {
        let sum = self.take_sum();
        if read_array(&mut self.inner)? == sum { Ok(()) } else { damaged("its checksum is wrong") }
    }
}

impl<T: Read> Read for Summed<T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(bytes)?;
        self.sum.update(&bytes[..n]);
        Ok(n)
    }
}

impl<T: Write> Write for Summed<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.sum.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use metal_attention_model::{Batch, BatchToken, NullExecutor, OutputKind, SessionOptions, Span, Watch};

    use super::*;

    #[test]
    fn spans_are_those_of_the_kv_cache() {
        let model = Model::built_in().unwrap();
        let options = SessionOptions { n_ctx: 256, n_seq: 1, ..Default::default() };
        let mut pass = NullExecutor::session(model.spec().clone(), &options, Watch::default());
        let tokens: Vec<_> = (0..30).map(|pos| BatchToken { id: 7, seq: 0, pos, output: false }).collect();
        let rows = vec![0.5; 9 * model.spec().n_embd];
        let span = Span { first: 4, rows: &rows, deepstack: &[], positions: &[], bidirectional_in: &[] };
        let batch = Batch { tokens: &tokens, spans: &[span, Span { first: 13, ..span }], states: &[] };
        pass.forward_outputs(batch, OutputKind::Logits, &[]).unwrap();
        let span = |start, hash| SpanKey { start, end: start + 9, hash: ContentHash([hash; 32]) };
        let (ids, spans) = ([7; 30], [span(4, 1), span(13, 2)]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a session");
        let sequence = SavedSequence { pass: &mut pass, seq: 0, ids: &ids, spans: &spans };
        SessionFile::write(&path, &model, &[], Some(sequence)).unwrap();
        let file = SessionFile::open(&path).unwrap();
        assert_eq!((file.ids(), file.spans()), (&ids[..], &spans[..]));

        let bytes = fs::read(&path).unwrap();
        let n = u64::from_le_bytes(bytes[12..20].try_into().unwrap()) as usize;
        let header = &bytes[20..20 + n];
        let first = 32 + 8 + 8 + 30 * size_of::<u32>();
        assert_eq!(header[first..first + 8], 2u64.to_le_bytes());
        // The number of spans, and the place of the first one.
        for at in first..first + 8 + 16 {
            let mut header = header.to_vec();
            header[at] ^= 1;
            let error = parse(&mut &header[..]).unwrap_err();
            assert!(matches!(error, SessionError::Damaged { .. }), "byte {at}: {error:?}");
        }
        for n in 0..header.len() {
            let error = parse(&mut &header[..n]).unwrap_err();
            assert!(matches!(error, SessionError::Damaged { .. }), "{n} bytes: {error:?}");
        }
        let mut without_tokens = header[..32 + 8].to_vec();
        without_tokens.extend([0; 8]);
        without_tokens.extend(&header[first..first + 8 + 2 * SPAN]);
        let error = parse(&mut &without_tokens[..]).unwrap_err();
        assert!(matches!(error, SessionError::Damaged { .. }), "{error:?}");
    }
}
