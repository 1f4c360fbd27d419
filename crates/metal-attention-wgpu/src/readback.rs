//! Results on their way to the CPU.

use std::ops::Range;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use wgpu::{Buffer, BufferAsyncError, CommandEncoder, SubmissionIndex};

use crate::device::WgpuDevice;
use crate::error::WgpuError;

/// A buffer the CPU can read, filled by a copy at the end of a step.
#[derive(Debug)]
pub struct Readback {
    buffer: Buffer,
    bytes: u64,
    /// The map that was asked for since the last read, and the answer when it is there. A buffer whose map was refused is
    /// not mapped.
    pending: Option<(SubmissionIndex, Receiver<Result<(), BufferAsyncError>>)>,
    poll_lock: Arc<RwLock<()>>,
}

impl Readback {
    /// A buffer of `bytes` bytes.
    pub fn new(gpu: &WgpuDevice, bytes: u64) -> Result<Self, WgpuError> {
        Ok(Self {
            buffer: gpu.readback_buffer("results to read", bytes)?,
            bytes,
            pending: None,
            poll_lock: gpu.poll_lock(),
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
            let _ = sender.send(result);
        });
        self.pending = Some((submission, mapped));
    }

    /// Waits for what [`map`](Self::map) asked for and hands `read` its first `bytes` bytes.
    pub fn read<T>(&mut self, gpu: &WgpuDevice, bytes: u64, read: impl FnOnce(&[u8]) -> T) -> Result<T, WgpuError> {
        let lost = |why: String| WgpuError::Lost { why: format!("a result never arrived: {why}") };
        let (submission, mapped) = self.pending.take().ok_or_else(|| lost("nothing was asked for".into()))?;
        let mut answer = mapped.try_recv().ok();
        if answer.is_none() {
            gpu.wait(Some(submission)).inspect_err(|_| self.unmap(&mapped))?;
            // Another thread that polls the device may be the one that hears of it, a moment later.
            answer = mapped.recv_timeout(Duration::from_secs(10)).ok();
        }
        match answer {
            Some(Ok(())) => {
                let value =
                    self.buffer.get_mapped_range(0..bytes).map(|view| read(&view)).map_err(|e| lost(e.to_string()));
                self.unmap(&mapped);
                value
            }
            // What the device said before it refused the map is why.
            Some(Err(e)) => {
                Err(gpu.check().err().unwrap_or_else(|| lost(format!("the buffer could not be mapped ({e})"))))
            }
            None => {
                self.unmap(&mapped);
                Err(lost("the device did not answer".into()))
            }
        }
    }

    /// Takes the buffer back, unless its map was refused, while nobody is just about to hand it over: a step that is
    /// submitted on another thread answers maps too.
    fn unmap(&self, mapped: &Receiver<Result<(), BufferAsyncError>>) {
        let _nobody_looks = self.poll_lock.write().unwrap_or_else(PoisonError::into_inner);
        if !matches!(mapped.try_recv(), Ok(Err(_))) {
            self.buffer.unmap();
        }
    }

    /// Gives up what was asked for, so that the buffer can be used again.
    pub fn forget(&mut self) {
        if let Some((_, mapped)) = self.pending.take() {
            self.unmap(&mapped);
        }
    }
}
