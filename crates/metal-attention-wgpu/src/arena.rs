//! Slices of buffers. Weights of many tensors share one buffer, so that a kernel can read all of them through one
//! binding.

use std::fmt::Debug;

use wgpu::{Buffer, BufferBinding};

use crate::device::WgpuDevice;
use crate::error::WgpuError;

/// A thing that a kernel's binding can be: a buffer, or a slice of one.
pub trait Bind: Debug {
    /// The buffer, the offset and the length of the binding.
    fn binding(&self) -> BufferBinding<'_>;

    /// Bytes of the binding.
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

/// A contiguous range of a buffer.
#[derive(Debug, Clone)]
pub struct Slice {
    /// The buffer.
    buffer: Buffer,
    /// The offset of the first byte.
    offset: u64,
    /// Bytes.
    bytes: u64,
}

impl Slice {
    /// The buffer that it is part of.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// A slice of `bytes` bytes that begins where this one does and may extend over those behind it.
    pub(crate) fn with_those_behind(&self, bytes: u64) -> Self {
        Self { bytes, ..self.clone() }
    }

    /// The `bytes` bytes of this slice from its byte `at` on.
    pub(crate) fn part(&self, at: u64, bytes: u64) -> Self {
        assert!(at + bytes <= self.bytes, "{bytes} bytes at {at} of {}", self.bytes);
        Self { buffer: self.buffer.clone(), offset: self.offset + at, bytes }
    }

    /// The offset of its first byte in the buffer.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Its bytes.
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

/// A buffer from which slices are taken one after the other. The default arena has none, and makes a buffer for each
/// slice.
#[derive(Debug)]
pub struct Arena {
    /// The buffer, if there is one.
    buffer: Option<Buffer>,
    /// Bytes taken.
    used: u64,
    /// The most bytes of a slice.
    max_slice: u64,
}

impl Default for Arena {
    fn default() -> Self {
        Self { buffer: None, used: 0, max_slice: u64::MAX }
    }
}

/// Divides `pieces` (sizes) into runs of at most `most` consecutive ones that add up to at most `limit`. A piece that
/// is larger is a run by itself.
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

/// The alignment of slices: what every device accepts as a binding's offset.
const ALIGNMENT: u64 = 256;

impl Arena {
    /// Bytes of an arena that a slice of `bytes` bytes takes, padding included.
    pub fn padded(bytes: u64) -> u64 {
        bytes.max(16).next_multiple_of(ALIGNMENT)
    }

    /// An arena with one buffer of `bytes` bytes, a sum of [`padded`](Self::padded) sizes. If that is more than one
    /// binding reaches, the default arena. `what` names the buffer in errors.
    pub fn new(gpu: &WgpuDevice, what: &str, bytes: u64) -> Result<Self, WgpuError> {
        if bytes > gpu.summary().max_binding {
            return Ok(Self::default());
        }
        Ok(Self { buffer: Some(gpu.buffer(what, bytes)?), ..Self::default() })
    }

    /// Arenas for `pieces`, whose sizes are sums of [`padded`](Self::padded) sizes: as few as the device's largest
    /// binding allows, each for at most `most` consecutive pieces, with the number of them.
    pub fn in_runs(gpu: &WgpuDevice, what: &str, pieces: &[u64], most: usize) -> Result<Vec<(usize, Self)>, WgpuError> {
        runs(pieces, gpu.summary().max_binding, most)
            .into_iter()
            .map(|run| Ok((run.len(), Self::new(gpu, what, run.iter().fold(0, |sum: u64, &n| sum.saturating_add(n)))?)))
            .collect()
    }

    /// This arena with slices of at most `bytes` bytes. Matrices are then divided into more parts.
    #[must_use]
    pub fn with_max_slice(self, bytes: u64) -> Self {
        Self { max_slice: bytes, ..self }
    }

    /// The most bytes of a slice on `gpu`.
    pub(crate) fn max_slice(&self, gpu: &WgpuDevice) -> u64 {
        gpu.summary().max_binding.min(self.max_slice)
    }

    /// Takes the next `bytes` bytes, which are zero; makes a buffer for them if the arena has fewer left. `what` names
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
