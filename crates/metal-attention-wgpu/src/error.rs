//! What can go wrong on a GPU.

/// Why a GPU cannot be used, or stopped working.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum WgpuError {
    /// No adapter at all.
    #[error(
        "no GPU found: no Vulkan, Metal or DirectX 12 driver answered. On Linux install your GPU's Vulkan driver \
         (Debian, Ubuntu: mesa-vulkan-drivers for AMD and Intel, nvidia-driver-libs for NVIDIA, and libvulkan1); \
         on Windows update the graphics driver; or run on the CPU with --device cpu"
    )]
    NoAdapter,
    /// No adapter fits what was asked for.
    #[error("no GPU matches {wanted:?}; there are: {}", available.join("; "))]
    NoMatch {
        /// What was asked for: an index or part of a name.
        wanted: String,
        /// The adapters there are, as `index: name`.
        available: Vec<String>,
    },
    /// The [`Watch`](metal_attention_model::Watch) was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// No adapter is hardware and has enough memory.
    #[error("no GPU suits: {}", why.join("; "))]
    NoneSuits {
        /// Why each does not.
        why: Vec<String>,
    },
    /// The driver refused to open the device.
    #[error("the GPU {name} could not be opened: {why}")]
    Open {
        /// The adapter's name.
        name: String,
        /// The driver's words.
        why: String,
    },
    /// The device lacks something that the kernels cannot do without.
    #[error("the GPU {name} cannot run the kernels: {why}")]
    Unsuitable {
        /// The adapter's name.
        name: String,
        /// What is missing.
        why: String,
    },
    /// The device cannot tell how long a kernel runs.
    #[error("the GPU {name} has no timestamps, so its kernels cannot be timed: profile another device (--device cpu)")]
    NoClock {
        /// The adapter's name.
        name: String,
    },
    /// No memory for a buffer, or for a step.
    #[error(
        "the GPU has no room for {what}{}: use a smaller context (-c) or a smaller model, or run on the CPU with --device \
         cpu", bytes.map(|bytes| format!(" ({:.1} MiB)", mib(bytes))).unwrap_or_default()
    )]
    OutOfMemory {
        /// What the memory was for.
        what: String,
        /// Its size; the driver does not tell what a step took.
        bytes: Option<u64>,
    },
    /// An option outside its range.
    #[error("{option} must be at least 1{}", if *max == usize::MAX { String::new() } else { format!(" and at most {max}") })]
    Option {
        /// The option, as in "the context length".
        option: &'static str,
        /// The largest value that can work.
        max: usize,
    },
    /// The model, its KV cache and its activations are larger than the GPU's memory.
    #[error(
        "the model needs {:.1} MiB and the GPU {name} has {:.1} MiB: use a smaller context (-c) or a smaller model, or \
         run on the CPU with --device cpu", mib(*needed), mib(*available)
    )]
    ModelTooLarge {
        /// The adapter's name.
        name: String,
        /// Bytes of weights, KV cache and activations.
        needed: u64,
        /// Bytes of the GPU's memory.
        available: u64,
    },
    /// A model has a part for which there are no kernels.
    #[error("the GPU cannot run {part} yet: run the model on the CPU with --device cpu")]
    UnsupportedPart {
        /// The part.
        part: &'static str,
    },
    /// A buffer is larger than one binding of a shader can be.
    #[error(
        "{what} would take {bytes} bytes in one buffer, and this GPU allows {max}: use a smaller context (-c) or a smaller \
         model, or run on the CPU with --device cpu"
    )]
    TooLarge {
        /// What the memory was for.
        what: String,
        /// Its size.
        bytes: u64,
        /// The device's limit.
        max: u64,
    },
    /// Tensors or buffers whose sizes do not fit each other.
    #[error("{what} cannot be put together: {why}")]
    Mismatch {
        /// The matrix or step.
        what: String,
        /// The sizes that disagree.
        why: String,
    },
    /// A shader or a call that the driver rejects: a defect of this program or of the driver.
    #[error("the GPU driver rejected {what}: {why}")]
    Rejected {
        /// Which pipeline or step.
        what: String,
        /// The driver's words.
        why: String,
    },
    /// The device is gone: reset by the driver, unplugged, or taken down by a fault.
    #[error("the GPU was lost: {why}. Start again, or run on the CPU with --device cpu")]
    Lost {
        /// The driver's words.
        why: String,
    },
}

impl WgpuError {
    /// Why `--device auto` takes the CPU: without the advice for those who asked for a GPU.
    pub fn why_the_cpu(&self) -> String {
        match self {
            Self::NoAdapter => "no GPU found".into(),
            error => error.to_string(),
        }
    }
}

/// Bytes in MiB.
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
