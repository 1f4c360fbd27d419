//! [`WgpuError`]: the errors of the wgpu backend.

/// The reason why a GPU cannot be used, or stopped working.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum WgpuError {
    /// There is no adapter at all.
    #[error(
        "no GPU found: no Vulkan, Metal or DirectX 12 driver answered. On Linux install your GPU's Vulkan driver \
         (Debian, Ubuntu: mesa-vulkan-drivers for AMD and Intel, nvidia-driver-libs for NVIDIA, and libvulkan1); \
         on Windows update the graphics driver; or run on the CPU with --device cpu"
    )]
    NoAdapter,
    /// No adapter matches the requested one.
    #[error("no GPU matches {wanted:?}; there are: {}", available.join("; "))]
    NoMatch {
        /// The request: an index or a part of a name.
        wanted: String,
        /// The adapters that there are, as `index: name`.
        available: Vec<String>,
    },
    /// The [`Watch`](metal_attention_model::Watch) was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// No adapter is hardware with enough memory.
    #[error("no GPU suits: {}", why.join("; "))]
    NoneSuits {
        /// The reason for each adapter.
        why: Vec<String>,
    },
    /// The driver refused to open the device.
    #[error("the GPU {name} could not be opened: {why}")]
    Open {
        /// The adapter's name.
        name: String,
        /// The driver's message.
        why: String,
    },
    /// The device lacks something that the kernels require.
    #[error("the GPU {name} cannot run the kernels: {why}")]
    Unsuitable {
        /// The adapter's name.
        name: String,
        /// The missing feature or limit.
        why: String,
    },
    /// The device has no timestamps, so that kernels cannot be timed.
    #[error("the GPU {name} has no timestamps, so its kernels cannot be timed: profile another device (--device cpu)")]
    NoClock {
        /// The adapter's name.
        name: String,
    },
    /// There is no memory for a buffer, or for a submission.
    #[error(
        "the GPU has no room for {what}{}: use a smaller context (-c) or a smaller model, or run on the CPU with --device \
         cpu", bytes.map(|bytes| format!(" ({:.1} MiB)", mib(bytes))).unwrap_or_default()
    )]
    OutOfMemory {
        /// The purpose of the memory.
        what: String,
        /// Its bytes; `None` for a submission, whose memory the driver does not report.
        bytes: Option<u64>,
    },
    /// An option is out of range.
    #[error("{option} must be at least 1{}", if *max == usize::MAX { String::new() } else { format!(" and at most {max}") })]
    Option {
        /// The option in words, e.g. "the context length".
        option: &'static str,
        /// The largest value that can work; `usize::MAX`: there is no limit.
        max: usize,
    },
    /// Weights, KV cache and scratch buffers are larger than the GPU's memory.
    #[error(
        "the model needs {:.1} MiB and the GPU {name} has {:.1} MiB: use a smaller context (-c) or a smaller model, or \
         run on the CPU with --device cpu", mib(*needed), mib(*available)
    )]
    ModelTooLarge {
        /// The adapter's name.
        name: String,
        /// Bytes of weights, KV cache and scratch buffers.
        needed: u64,
        /// Bytes of the GPU's memory.
        available: u64,
    },
    /// The model has a part without kernels.
    #[error("the GPU cannot run {part} yet: run the model on the CPU with --device cpu")]
    UnsupportedPart {
        /// The part, as a noun phrase.
        part: &'static str,
    },
    /// A buffer would be larger than one binding of a shader.
    #[error(
        "{what} would take {bytes} bytes in one buffer, and this GPU allows {max}: use a smaller context (-c) or a smaller \
         model, or run on the CPU with --device cpu"
    )]
    TooLarge {
        /// The purpose of the memory.
        what: String,
        /// Its bytes.
        bytes: u64,
        /// Bytes of the device's largest binding.
        max: u64,
    },
    /// Tensors or buffers have sizes that do not match, or a kernel does not support a shape.
    #[error("{what} cannot be put together: {why}")]
    Mismatch {
        /// The matrix or the operation.
        what: String,
        /// The sizes that do not match.
        why: String,
    },
    /// The driver rejected a shader or a call: a defect of this program or of the driver.
    #[error("the GPU driver rejected {what}: {why}")]
    Rejected {
        /// The pipeline or the operation.
        what: String,
        /// The driver's message.
        why: String,
    },
    /// The device is gone: reset by the driver, unplugged, or stopped by a fault.
    #[error("the GPU was lost: {why}. Start again, or run on the CPU with --device cpu")]
    Lost {
        /// The driver's message.
        why: String,
    },
}

impl WgpuError {
    /// The reason why `--device auto` uses the CPU, without the advice for users who requested a GPU.
    pub fn why_the_cpu(&self) -> String {
        match self {
            Self::NoAdapter => "no GPU found".into(),
            error => error.to_string(),
        }
    }
}

/// `bytes` in MiB.
pub(crate) fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

impl From<WgpuError> for metal_attention_model::ForwardError {
    fn from(e: WgpuError) -> Self {
        match e {
            WgpuError::Cancelled => Self::Cancelled,
            e => Self::Device { why: e.to_string() },
        }
    }
}
