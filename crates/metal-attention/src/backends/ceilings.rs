//! The limits of a device, as each backend measures them.

use std::time::Duration;

use metal_attention_gguf::Tensor;
use serde::Serialize;

use crate::Error;

/// How long a limit is measured, and with how much memory.
#[derive(Debug, Clone, Copy)]
pub struct CeilingEffort {
    /// The time for each limit.
    pub time: Duration,
    /// The size in bytes of a buffer that is read or copied on a CPU.
    pub cpu_bytes: usize,
    /// The same on a GPU.
    pub gpu_bytes: u64,
    /// The same on a GPU that is emulated in software.
    pub software_bytes: u64,
}

/// Measures the limits of a device, each alone. Rates are per second; a multiplication includes an addition.
pub trait DeviceCeilings {
    /// Bytes read.
    fn read_bandwidth(&self) -> Result<f64, Error>;

    /// Bytes read and written by a copy.
    fn copy_bandwidth(&self) -> Result<f64, Error>;

    /// Multiplications of the fast kind for matrices, and the type that they multiply (`int8` or `half`). `None`: the device
    /// has 32-bit floats only.
    fn matrix_rate(&self) -> Result<Option<(f64, &'static str)>, Error>;

    /// Multiplications of 32-bit floats.
    fn f32_rate(&self) -> Result<f64, Error>;

    /// The costs of launches.
    fn launches(&self) -> Result<Launches, Error>;

    /// The seconds that products of all `matrices` take, one after the other, for each number of tokens in `n_tokens`.
    fn products(&mut self, matrices: &[&Tensor], n_tokens: &[usize]) -> Result<Vec<f64>, Error>;
}

/// The costs in microseconds of launches that do no work.
#[derive(Debug, Serialize, Clone, Copy)]
#[serde(untagged)]
pub enum Launches {
    /// The CPU's thread pool.
    Cpu {
        /// A parallel region of all threads.
        region_us: f64,
    },
    /// A GPU through wgpu.
    Wgpu {
        /// A dispatch that depends on the one before it, within a submission.
        dispatch_us: f64,
        /// The same if submissions are queued ahead.
        dispatch_queued_us: f64,
        /// A submission until its result is read back.
        submission_us: f64,
        /// The same if submissions are queued ahead and no result is read.
        submission_queued_us: f64,
    },
    /// A GPU through CUDA.
    Cuda {
        /// A kernel that depends on the one before it, in a CUDA graph.
        kernel_in_graph_us: f64,
        /// The same if each kernel is launched alone.
        kernel_us: f64,
        /// A kernel until its result is read back.
        round_trip_us: f64,
        /// A CUDA graph of one kernel, if many are queued.
        graph_us: f64,
    },
}

impl Launches {
    /// The cost in microseconds of one launch of those that [`BackendPass`](super::BackendPass) counts.
    pub fn each_us(self) -> f64 {
        match self {
            Self::Cpu { region_us } => region_us,
            Self::Wgpu { dispatch_us, .. } => dispatch_us,
            Self::Cuda { kernel_in_graph_us, .. } => kernel_in_graph_us,
        }
    }
}
