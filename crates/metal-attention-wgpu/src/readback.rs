//! [`Readback`]: a buffer through which the CPU reads results of the GPU.
//!
//! The life of a result: [`copy`](Readback::copy) is recorded with the kernels, the commands are submitted,
//! [`map`](Readback::map) requests the mapping, and [`read`](Readback::read) waits for it and reads.

use std::ops::Range;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use wgpu::{Buffer, BufferAsyncError, CommandEncoder, SubmissionIndex};

use crate::device::WgpuDevice;
use crate::error::WgpuError;

/// A buffer that the GPU copies results to and the CPU reads.
#[derive(Debug)]
pub struct Readback {
    /// The buffer.
    buffer: Buffer,
    /// Its bytes.
    bytes: u64,
    /// The mapping that was requested since the last read: the submission that it waits for, and the channel that
    /// receives its outcome. If it failed, the buffer is not mapped.
    pending: Option<(SubmissionIndex, Receiver<Result<(), BufferAsyncError>>)>,
    /// Held to unmap the buffer; see [`WgpuDevice`].
    poll_lock: Arc<RwLock<()>>,
}

impl Readback {
    /// Makes a buffer of `bytes` bytes.
    pub fn new(gpu: &WgpuDevice, bytes: u64) -> Result<Self, WgpuError> {
        Ok(Self {
            buffer: gpu.readback_buffer("results to read", bytes)?,
            bytes,
            pending: None,
            poll_lock: gpu.poll_lock(),
        })
    }

    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Records a copy of the first `bytes` bytes of `source` to the start of the buffer. Cancels a mapping that was not
    /// read.
    pub fn copy(&mut self, encoder: &mut CommandEncoder, source: &Buffer, bytes: u64) {
        self.forget();
        encoder.copy_buffer_to_buffer(source, 0, &self.buffer, 0, Some(bytes));
    }

    /// Records a copy of a range of `source` to byte `at` of the buffer, behind what [`copy`](Self::copy) writes.
    pub fn copy_after(&self, encoder: &mut CommandEncoder, source: &Buffer, range: Range<u64>, at: u64) {
        encoder.copy_buffer_to_buffer(source, range.start, &self.buffer, at, Some(range.end - range.start));
    }

    /// Requests the mapping of the buffer, once `submission` is done.
    pub fn map(&mut self, submission: SubmissionIndex) {
        let (sender, mapped) = channel();
        // The receiver may be gone; the outcome is then of no interest.
        self.buffer.map_async(wgpu::MapMode::Read, .., move |result| {
            let _ = sender.send(result);
        });
        self.pending = Some((submission, mapped));
    }

    /// Waits for the mapping and calls `read` with the first `bytes` bytes; then unmaps the buffer. Errors: no mapping
    /// was requested, the work is cancelled, or the device is lost.
    pub fn read<T>(&mut self, gpu: &WgpuDevice, bytes: u64, read: impl FnOnce(&[u8]) -> T) -> Result<T, WgpuError> {
        let lost = |why: String| WgpuError::Lost { why: format!("a result never arrived: {why}") };
        let (submission, mapped) = self.pending.take().ok_or_else(|| lost("nothing was asked for".into()))?;
        let mut answer = mapped.try_recv().ok();
        if answer.is_none() {
            gpu.wait(Some(submission)).inspect_err(|_| self.unmap(&mapped))?;
            // Another thread that polls the device may receive the outcome a moment later.
            answer = mapped.recv_timeout(Duration::from_secs(10)).ok();
        }
        match answer {
            Some(Ok(())) => {
                let value =
                    self.buffer.get_mapped_range(0..bytes).map(|view| read(&view)).map_err(|e| lost(e.to_string()));
                self.unmap(&mapped);
                value
            }
            // The device's error is the cause of the failed mapping.
            Some(Err(e)) => {
                Err(gpu.check().err().unwrap_or_else(|| lost(format!("the buffer could not be mapped ({e})"))))
            }
            None => {
                self.unmap(&mapped);
                Err(lost("the device did not answer".into()))
            }
        }
    }

    /// Unmaps the buffer, unless its mapping failed. Excludes polls by other threads, which could complete the mapping
    /// at the same moment.
    fn unmap(&self, mapped: &Receiver<Result<(), BufferAsyncError>>) {
        let _nobody_looks = self.poll_lock.write().unwrap_or_else(PoisonError::into_inner);
        if !matches!(mapped.try_recv(), Ok(Err(_))) {
            self.buffer.unmap();
        }
    }

    /// Cancels a mapping that was not read, so that the buffer can be used again.
    pub fn forget(&mut self) {
        if let Some((_, mapped)) = self.pending.take() {
            self.unmap(&mapped);
        }
    }
}
