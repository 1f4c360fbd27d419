//! Ids that the device has chosen: it writes them to memory of this process as they come, where they are looked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{self, CUresult};

use crate::CudaError;
use crate::device::{CudaBuffer, CudaDevice, Pinned, check};

/// ModelRunner whose ids have a place: more than there ever are that nobody has read. As `rank.cuh` has it.
const STEPS: u32 = 16;
/// Looks at a word between looks at everything else.
const LOOKS: usize = 200;

/// Words `[n_rows, STEPS]`, each a step's number above an id.
#[derive(Debug)]
pub(crate) struct ChosenIds {
    words: Pinned,
    n_rows: usize,
    /// Of the last step that was submitted.
    number: u32,
    /// Of each row, that of the last step whose id a kernel has chosen that counts itself, which graphs have: in the device's memory, and as it will be when all that
    /// was submitted has run.
    on_device: CudaBuffer,
    counted: Vec<u32>,
}

impl ChosenIds {
    /// Room for the ids of steps of up to `n_rows` rows.
    pub(crate) fn new(device: &Arc<CudaDevice>, n_rows: usize) -> Result<Self, CudaError> {
        let n_words = n_rows * STEPS as usize;
        let words = Pinned::new(device, 8 * n_words)?;
        // SAFETY: there are as many, on pages of their own, and nobody else knows of them yet.
        unsafe { std::ptr::write_bytes(words.ptr().cast::<u64>(), 0, n_words) };
        let on_device = device.zeros("numbers of steps", 4 * n_rows as u64)?;
        Ok(Self { words, n_rows, number: 0, on_device, counted: vec![0; n_rows] })
    }

    /// Where they lie, for the device.
    pub(crate) fn ptr(&self) -> u64 {
        self.words.ptr() as u64
    }

    /// Numbers `n` more steps; the first one's.
    pub(crate) fn number_steps(&mut self, n: usize) -> u32 {
        let first = self.number.wrapping_add(1);
        self.number = self.number.wrapping_add(n as u32);
        first
    }

    /// Where kernels count the steps of rows.
    pub(crate) fn numbers_of_rows(&self) -> u64 {
        self.on_device.ptr()
    }

    /// Numbers one more step, of `n` rows, whose kernel counts. Until it [is submitted](Self::mark_submitted) the device need not have counted it.
    pub(crate) fn begin_counted(&mut self, n: usize) -> Result<(), CudaError> {
        let before = self.number;
        self.number_steps(1);
        if self.counted[..n].iter().any(|counted| *counted != before) {
            self.counted[..n].fill(before);
            self.on_device.write(0, bytemuck::cast_slice(&self.counted[..n]))?;
        }
        Ok(())
    }

    /// The step of `n` rows was.
    pub(crate) fn mark_submitted(&mut self, n: usize) {
        self.counted[..n].fill(self.number);
    }

    /// Those of the last `n` steps that were submitted.
    pub(crate) fn last_numbers(&self, n: usize) -> impl Iterator<Item = u32> + use<> {
        let last = self.number;
        (0..n as u32).rev().map(move |before| last.wrapping_sub(before))
    }

    /// The ids of the last step that was submitted, of `n` rows.
    pub(crate) fn last(&self, n: usize) -> Result<Vec<u32>, CudaError> {
        self.read(self.number, n)
    }

    /// The ids of step `number`, of `n` rows, once they are there. The watch is looked at meanwhile.
    pub(crate) fn read(&self, number: u32, n: usize) -> Result<Vec<u32>, CudaError> {
        assert!(n <= self.n_rows, "{n} ids to read");
        (0..n).map(|row| self.wait_for(row * STEPS as usize + (number % STEPS) as usize, number)).collect()
    }

    fn wait_for(&self, place: usize, number: u32) -> Result<u32, CudaError> {
        // SAFETY: `read` has seen that the word is one of those that there are, which are looked at as atomic ones alone; they live as long as this.
        let word = unsafe { &*self.words.ptr().cast::<AtomicU64>().add(place) };
        let look = || {
            let word = word.load(Ordering::Acquire);
            ((word >> 32) as u32 == number).then_some(word as u32)
        };
        let device = self.words.device();
        device.poll_until(|| {
            for _ in 0..LOOKS {
                if let Some(id) = look() {
                    return Ok(Some(id));
                }
                std::hint::spin_loop();
            }
            // SAFETY: the stream is the device's.
            match unsafe { sys::cuStreamQuery(device.stream()) } {
                CUresult::CUDA_ERROR_NOT_READY => Ok(None),
                outcome => {
                    check("run the kernels", outcome)?;
                    let why = "a step has ended without an id".to_owned();
                    look().map(Some).ok_or(CudaError::Driver { what: "run the kernels", why })
                }
            }
        })
    }
}
