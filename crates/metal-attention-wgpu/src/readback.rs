//! Results on their way to the CPU.

use std::ops::Range;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use wgpu::{Buffer, CommandEncoder, SubmissionIndex};

use crate::device::GpuDevice;
use crate::error::GpuError;

/// A buffer the CPU can read, filled by a copy at the end of a step.
#[derive(Debug)]
pub struct Readback {
    buffer: Buffer,
    bytes: u64,
    /// The map that was asked for since the last read, and whether it worked.
    pending: Option<(SubmissionIndex, Receiver<bool>)>,
    looking: Arc<RwLock<()>>,
}

impl Readback {
    /// A buffer of `bytes` bytes.
    pub fn new(gpu: &GpuDevice, bytes: u64) -> Result<Self, GpuError> {
        Ok(Self {
            buffer: gpu.readback_buffer("results to read", bytes)?,
            bytes,
            pending: None,
            looking: gpu.looking(),
        })
    }

    /// Bytes it holds.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Records the copy of `source`'s first `bytes` bytes.
    pub fn copy(&mut self, encoder: &mut CommandEncoder, source: &Buffer, bytes: u64) {
        self.forget();
        encoder.copy_buffer_to_buffer(source, 0, &self.buffer, 0, Some(bytes));
    }

    /// Records the copy of a range of `source` behind the `at` bytes that [`copy`](Self::copy) wrote.
    pub fn copy_after(&mut self, encoder: &mut CommandEncoder, source: &Buffer, range: Range<u64>, at: u64) {
        encoder.copy_buffer_to_buffer(source, range.start, &self.buffer, at, Some(range.end - range.start));
    }

    /// Asks for the contents as of `submission`.
    pub fn map(&mut self, submission: SubmissionIndex) {
        let (sender, mapped) = channel();
        // Nobody may be listening any more.
        self.buffer.map_async(wgpu::MapMode::Read, .., move |result| {
            let _ = sender.send(result.is_ok());
        });
        self.pending = Some((submission, mapped));
    }

    /// Waits for what [`map`](Self::map) asked for and hands `read` its first `bytes` bytes.
    pub fn read<T>(&mut self, gpu: &GpuDevice, bytes: u64, read: impl FnOnce(&[u8]) -> T) -> Result<T, GpuError> {
        let lost = |why: &str| GpuError::Lost { why: format!("a result never arrived: {why}") };
        let (submission, mapped) = self.pending.take().ok_or_else(|| lost("nothing was asked for"))?;
        if mapped.try_recv() != Ok(true) {
            gpu.wait(Some(submission)).inspect_err(|_| self.unmap())?;
            // Another thread that polls the device may be the one that hears of it, a moment later.
            if mapped.recv_timeout(Duration::from_secs(10)) != Ok(true) {
                self.unmap();
                return Err(lost("the buffer could not be mapped"));
            }
        }
        let value = self.buffer.get_mapped_range(0..bytes).map(|view| read(&view)).map_err(|e| lost(&e.to_string()));
        self.unmap();
        value
    }

    /// Takes the buffer back, while nobody else is just about to hand it over.
    fn unmap(&self) {
        let _nobody_looks = self.looking.read().unwrap_or_else(PoisonError::into_inner);
        self.buffer.unmap();
    }

    /// Gives up what was asked for, so that the buffer can be used again.
    pub fn forget(&mut self) {
        if self.pending.take().is_some() {
            self.unmap();
        }
    }
}
