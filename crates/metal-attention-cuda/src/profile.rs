//! [`Timers`]: times each kernel of a micro-batch with CUDA events, for a profile.

use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUevent, CUstream};
use metal_attention_model::{KernelTime, Phase, ProfiledStep};

use crate::CudaError;
use crate::device::{CudaDevice, check};

/// A note in profiles: how timed steps differ from others.
pub(crate) const NOTE: &str = "timed by the GPU's clock, each kernel on its own, with a microsecond or two that its launch takes; \
without a profile kernels are sent together and overlap";

/// Kernels with the events before and after each, in launch order.
#[derive(Debug)]
pub(crate) struct Timers {
    /// The stream of the kernels.
    stream: CUstream,
    /// When the timers were made, before the first launch.
    pub(crate) begin: Instant,
    /// Each kernel's name with its label, and the events before and after it.
    runs: Vec<(String, [CUevent; 2])>,
}

// SAFETY: the handles are used through this value only.
unsafe impl Send for Timers {}

impl Drop for Timers {
    fn drop(&mut self) {
        for event in self.runs.iter().flat_map(|(_, events)| events) {
            // SAFETY: nothing else has the event; the driver keeps it until it has completed.
            let _ = unsafe { sys::cuEventDestroy_v2(*event) };
        }
    }
}

impl Timers {
    /// Timers without any kernels yet.
    pub(crate) fn new(gpu: &CudaDevice) -> Self {
        Self { stream: gpu.stream(), begin: Instant::now(), runs: Vec::new() }
    }

    /// Creates an event and records it in the stream.
    fn event(&self) -> Result<CUevent, CudaError> {
        let mut event = std::ptr::null_mut();
        // SAFETY: the driver returns an event, which is recorded in the device's stream.
        unsafe {
            check("create an event", sys::cuEventCreate(&raw mut event, 0))?;
            check("record an event", sys::cuEventRecord(event, self.stream))?;
        }
        Ok(event)
    }

    /// Calls `launch`, which launches `kernel`, between two events.
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

    /// The times of all kernels of the micro-batch. All launches have to have completed.
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
            // SAFETY: both events were recorded and have completed.
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
