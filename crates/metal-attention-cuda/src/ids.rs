//! [`ChosenIds`]: the token ids that greedy decode steps have chosen, in pinned host memory.
//!
//! The last kernel of a step writes each id there together with the step's number, as one 8-byte word (number in the high
//! half), and the host polls the word until it has the number it waits for. So an id is read without a copy or an event, while
//! later steps are already running.
//!
//! Steps are numbered in launch order. The persistent kernel gets its number as an argument. A CUDA graph has the same
//! arguments at each launch, so its argmax kernel counts steps itself, in device memory, one counter for each row (that is,
//! each sequence of the step).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{self, CUresult};

use crate::CudaError;
use crate::device::{CudaBuffer, CudaDevice, Pinned, check};
use crate::slice::DevicePtr;

/// Words of each row, used in turn by step number; more than the steps whose ids have not been read yet. `STEPS` of `argmax.cuh`.
pub(crate) const STEPS: u32 = 16;
/// Polls of a word between two checks of the stream and of cancellation.
const POLLS: usize = 200;

/// Ids of recent steps, `[n_rows, STEPS]` words.
#[derive(Debug)]
pub(crate) struct ChosenIds {
    /// The words, in pinned host memory.
    words: Pinned,
    /// Rows: the most sequences of a decode step.
    n_rows: usize,
    /// Number of the last step that was submitted; wraps around.
    number: u32,
    /// The counters of the argmax kernel, `[n_rows]`: the number of the last step that it has counted.
    on_device: CudaBuffer,
    /// The values that `on_device` will have once all submitted launches have run.
    counted: Vec<u32>,
}

impl ChosenIds {
    /// Allocates words for steps of up to `n_rows` rows.
    pub(crate) fn new(device: &Arc<CudaDevice>, n_rows: usize) -> Result<Self, CudaError> {
        let n_words = n_rows * STEPS as usize;
        let words = Pinned::new(device, 8 * n_words)?;
        // SAFETY: the allocation has that many words, and nothing else has its address yet.
        unsafe { std::ptr::write_bytes(words.ptr().cast::<u64>(), 0, n_words) };
        let on_device = device.zeros("numbers of steps", 4 * n_rows as u64)?;
        Ok(Self { words, n_rows, number: 0, on_device, counted: vec![0; n_rows] })
    }

    /// The words, as kernels take them.
    pub(crate) fn ptr(&self) -> DevicePtr<u64> {
        DevicePtr::from_address(self.words.ptr() as u64)
    }

    /// Assigns numbers to `n` further steps, of the persistent kernel, and returns the first.
    pub(crate) fn number_steps(&mut self, n: usize) -> u32 {
        let first = self.number.wrapping_add(1);
        self.number = self.number.wrapping_add(n as u32);
        first
    }

    /// The counters.
    pub(crate) fn numbers_of_rows(&self) -> DevicePtr<u32> {
        self.on_device.ptr()
    }

    /// Assigns a number to one further step, of `n` rows, whose argmax kernel counts. Sets the counters on the device where
    /// other steps have been numbered in between. Once the step's kernels are launched,
    /// [`mark_submitted`](Self::mark_submitted) has to be called.
    pub(crate) fn begin_counted(&mut self, n: usize) -> Result<(), CudaError> {
        let previous = self.number;
        self.number_steps(1);
        if self.counted[..n].iter().any(|counted| *counted != previous) {
            self.counted[..n].fill(previous);
            self.on_device.write(0, bytemuck::cast_slice(&self.counted[..n]))?;
        }
        Ok(())
    }

    /// Records that the step that [`begin_counted`](Self::begin_counted) has numbered, of `n` rows, was launched.
    pub(crate) fn mark_submitted(&mut self, n: usize) {
        self.counted[..n].fill(self.number);
    }

    /// The numbers of the last `n` steps that were submitted, the oldest first.
    pub(crate) fn last_numbers(&self, n: usize) -> impl Iterator<Item = u32> + use<> {
        let last = self.number;
        (0..n as u32).rev().map(move |age| last.wrapping_sub(age))
    }

    /// The ids of the last step that was submitted, of `n` rows.
    pub(crate) fn last(&self, n: usize) -> Result<Vec<u32>, CudaError> {
        self.read(self.number, n)
    }

    /// Waits until the ids of step `number` are there and returns those of its first `n` rows. An error if the step's kernels
    /// have failed, or if the watch is cancelled. Only the last [`STEPS`] steps can be read.
    pub(crate) fn read(&self, number: u32, n: usize) -> Result<Vec<u32>, CudaError> {
        assert!(n <= self.n_rows, "{n} ids to read");
        (0..n).map(|row| self.wait_for(row * STEPS as usize + (number % STEPS) as usize, number)).collect()
    }

    /// Polls word `index` until it has step number `number`, and returns its id.
    fn wait_for(&self, index: usize, number: u32) -> Result<u32, CudaError> {
        // SAFETY: `read` has checked that `index` is within the words; the host accesses them only as atomics, and they live as
        // long as `self`.
        let word = unsafe { &*self.words.ptr().cast::<AtomicU64>().add(index) };
        let poll = || {
            let word = word.load(Ordering::Acquire);
            ((word >> 32) as u32 == number).then_some(word as u32)
        };
        let device = self.words.device();
        device.poll_until(|| {
            for _ in 0..POLLS {
                if let Some(id) = poll() {
                    return Ok(Some(id));
                }
                std::hint::spin_loop();
            }
            // SAFETY: the stream belongs to the device.
            match unsafe { sys::cuStreamQuery(device.stream()) } {
                CUresult::CUDA_ERROR_NOT_READY => Ok(None),
                outcome => {
                    check("run the kernels", outcome)?;
                    let why = "a step has ended without an id".to_owned();
                    poll().map(Some).ok_or(CudaError::Driver { what: "run the kernels", why })
                }
            }
        })
    }
}
