//! Where the time of a step goes, by the device's clock.

use std::time::Duration;

use cudarc::driver::sys::{self, CUevent, CUstream};
use metal_attention_model::{KernelTime, Phase, ProfiledStep};

use crate::CudaError;
use crate::device::{CudaDevice, check};

/// How steps run without timers.
pub(crate) const NOTE: &str = "timed by the GPU's clock, each kernel on its own, with a microsecond or two that its launch takes; \
without a profile kernels are sent together and overlap";

/// Kernels and the events around them.
#[derive(Debug)]
pub(crate) struct Timers {
    stream: CUstream,
    runs: Vec<(String, [CUevent; 2])>,
}

// SAFETY: handles that are used through this alone.
unsafe impl Send for Timers {}

impl Drop for Timers {
    fn drop(&mut self) {
        for event in self.runs.iter().flat_map(|(_, events)| events) {
            // SAFETY: nobody has the event any more; the driver keeps it until it is done.
            let _ = unsafe { sys::cuEventDestroy_v2(*event) };
        }
    }
}

impl Timers {
    pub(crate) fn new(gpu: &CudaDevice) -> Self {
        Self { stream: gpu.stream(), runs: Vec::new() }
    }

    fn event(&self) -> Result<CUevent, CudaError> {
        let mut event = std::ptr::null_mut();
        // SAFETY: the driver gives an event, which is recorded in the device's stream.
        unsafe {
            check("make an event", sys::cuEventCreate(&raw mut event, 0))?;
            check("note the time", sys::cuEventRecord(event, self.stream))?;
        }
        Ok(event)
    }

    /// Times what `launch` launches.
    pub(crate) fn around(
        &mut self,
        kernel: &str,
        launch: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let start = self.event()?;
        launch()?;
        let end = self.event()?;
        self.runs.push((kernel.to_owned(), [start, end]));
        Ok(())
    }

    /// The step that was timed, which is over.
    pub(crate) fn step(&self, phase: Phase, n_tokens: usize) -> Result<ProfiledStep, CudaError> {
        let Some(&(_, [first, _])) = self.runs.first() else {
            return Ok(ProfiledStep {
                phase,
                n_tokens,
                start: Duration::ZERO,
                time: Duration::ZERO,
                kernels: Vec::new(),
            });
        };
        let between = |from: CUevent, to: CUevent| {
            let mut milliseconds = 0.0;
            // SAFETY: both were recorded, and what was between them is done.
            check("read the time", unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, from, to) })?;
            Ok::<_, CudaError>(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) * 1e-3))
        };
        let kernels = self.runs.iter().map(|(kernel, [start, end])| {
            Ok(KernelTime {
                kernel: kernel.clone().into(),
                start: between(first, *start)?,
                time: between(*start, *end)?,
                part: 0,
            })
        });
        let kernels: Vec<_> = kernels.collect::<Result<_, CudaError>>()?;
        let time = kernels.iter().map(|run| run.time).sum();
        Ok(ProfiledStep { phase, n_tokens, start: Duration::ZERO, time, kernels })
    }
}
