//! Buffers that several tensors share, so that one kernel reaches them all through one binding.

use std::fmt::Debug;

use wgpu::{Buffer, BufferBinding};

use crate::device::WgpuDevice;
use crate::error::WgpuError;

/// What a kernel can be bound to: a buffer, or a piece of one.
pub trait Bind: Debug {
    /// The piece of a buffer that is bound.
    fn binding(&self) -> BufferBinding<'_>;

    /// Its length in bytes.
    fn bytes(&self) -> u64;
}

impl Bind for Buffer {
    fn binding(&self) -> BufferBinding<'_> {
        self.as_entire_buffer_binding()
    }

    fn bytes(&self) -> u64 {
        self.size()
    }
}

/// A piece of a buffer.
#[derive(Debug, Clone)]
pub struct Slice {
    buffer: Buffer,
    offset: u64,
    bytes: u64,
}

impl Slice {
    /// The buffer it lies in.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// The `bytes` from where it begins, of this slice and those behind it.
    pub(crate) fn with_those_behind(&self, bytes: u64) -> Self {
        Self { bytes, ..self.clone() }
    }

    /// The `bytes` of it from byte `at` on.
    pub(crate) fn part(&self, at: u64, bytes: u64) -> Self {
        assert!(at + bytes <= self.bytes, "{bytes} bytes at {at} of {}", self.bytes);
        Self { buffer: self.buffer.clone(), offset: self.offset + at, bytes }
    }

    /// Bytes of the buffer before it.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Its length in bytes.
    pub fn size(&self) -> u64 {
        self.bytes
    }
}

impl Bind for Slice {
    fn binding(&self) -> BufferBinding<'_> {
        BufferBinding { buffer: &self.buffer, offset: self.offset, size: wgpu::BufferSize::new(self.bytes) }
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl From<Buffer> for Slice {
    fn from(buffer: Buffer) -> Self {
        let bytes = buffer.size();
        Self { buffer, offset: 0, bytes }
    }
}

/// A buffer that slices are taken from, one after the other. The default arena has none, and gives each slice a buffer of
/// its own.
#[derive(Debug)]
pub struct Arena {
    buffer: Option<Buffer>,
    used: u64,
    max_slice: u64,
}

impl Default for Arena {
    fn default() -> Self {
        Self { buffer: None, used: 0, max_slice: u64::MAX }
    }
}

/// `pieces` in runs of at most `most` that are at most `limit` together; one that is larger is a run of its own.
pub(crate) fn runs(pieces: &[u64], limit: u64, most: usize) -> Vec<&[u64]> {
    let mut runs = Vec::new();
    let mut left = pieces;
    while !left.is_empty() {
        let mut sum = 0_u64;
        let fits = |&&n: &&u64| {
            sum = sum.saturating_add(n);
            sum <= limit
        };
        let n = left.iter().take_while(fits).count().clamp(1, most.max(1));
        let (run, rest) = left.split_at(n);
        runs.push(run);
        left = rest;
    }
    runs
}

/// Where slices may begin: what every device allows.
const ALIGNMENT: u64 = 256;

impl Arena {
    /// Bytes that a slice of `bytes` bytes takes up.
    pub fn padded(bytes: u64) -> u64 {
        bytes.max(16).next_multiple_of(ALIGNMENT)
    }

    /// One buffer for `bytes` bytes (the sum of [`padded`](Self::padded) sizes), or the default arena where the device
    /// cannot bind that much at once.
    pub fn new(gpu: &WgpuDevice, what: &str, bytes: u64) -> Result<Self, WgpuError> {
        if bytes > gpu.summary().max_binding {
            return Ok(Self::default());
        }
        Ok(Self { buffer: Some(gpu.buffer(what, bytes)?), ..Self::default() })
    }

    /// Arenas for `pieces`, each so many bytes (sums of [`padded`](Self::padded) sizes) that are to lie in one buffer, with the
    /// number of pieces that each is for: as few as the device's largest binding allows, and of at most `most` pieces.
    pub fn in_runs(gpu: &WgpuDevice, what: &str, pieces: &[u64], most: usize) -> Result<Vec<(usize, Self)>, WgpuError> {
        runs(pieces, gpu.summary().max_binding, most)
            .into_iter()
            .map(|run| Ok((run.len(), Self::new(gpu, what, run.iter().fold(0, |sum: u64, &n| sum.saturating_add(n)))?)))
            .collect()
    }

    /// This arena, for slices of at most `bytes` bytes: matrices come in more parts then.
    #[must_use]
    pub fn with_max_slice(self, bytes: u64) -> Self {
        Self { max_slice: bytes, ..self }
    }

    /// The most bytes of a slice that one binding of `gpu` reaches.
    pub(crate) fn max_slice(&self, gpu: &WgpuDevice) -> u64 {
        gpu.summary().max_binding.min(self.max_slice)
    }

    /// The next `bytes` bytes, zero so far; a buffer of their own where the arena has not so many left. `what` names
    /// them in errors.
    pub fn take(&mut self, gpu: &WgpuDevice, what: &str, bytes: u64) -> Result<Slice, WgpuError> {
        // Bindings are whole vectors of four words.
        let size = bytes.max(16).next_multiple_of(16);
        match &self.buffer {
            Some(buffer) if buffer.size() - self.used >= size => {
                let slice = Slice { buffer: buffer.clone(), offset: self.used, bytes: size };
                self.used = (self.used + Self::padded(bytes)).min(buffer.size());
                Ok(slice)
            }
            _ => Ok(gpu.buffer(what, bytes)?.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_hold_as_many_pieces_as_fit() {
        let lens =
            |pieces: &[u64], limit, most| runs(pieces, limit, most).iter().map(|run| run.len()).collect::<Vec<_>>();
        assert_eq!(lens(&[], 10, 9), Vec::<usize>::new());
        assert_eq!(lens(&[3, 3, 3, 3], 12, 9), [4]);
        assert_eq!(lens(&[3, 3, 3, 3], 11, 9), [3, 1]);
        assert_eq!(lens(&[3, 3, 3, 3], 12, 3), [3, 1]);
        assert_eq!(lens(&[5, 20, 5, 5], 10, 9), [1, 1, 2]);
        assert_eq!(lens(&[u64::MAX, u64::MAX], 10, 9), [1, 1]);
        assert_eq!(lens(&[1, 1], 10, 0), [1, 1]);
    }
}
