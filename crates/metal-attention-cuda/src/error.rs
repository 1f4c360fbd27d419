//! [`CudaError`]: the errors of the CUDA backend, with what the user can do about them.

/// Why CUDA cannot be used, or a forward pass failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver library on this machine.
    #[error("there is no NVIDIA driver here (libcuda was not found): install it, or use --device gpu, cpu or auto")]
    NoDriver,
    /// The driver is older than the CUDA version that the kernels are compiled with.
    #[error(
        "the NVIDIA driver is too old: it knows CUDA {}.{}, and the kernels need {}.{} (driver {} or later): update it, or use \
         --device gpu", found / 1000, found % 1000 / 10, wanted / 1000, wanted % 1000 / 10, driver
    )]
    OldDriver {
        /// The CUDA version of the driver: 1000 times the major number plus 10 times the minor one.
        found: i32,
        /// The CUDA version that the kernels need, likewise.
        wanted: i32,
        /// The first driver release with that version.
        driver: &'static str,
    },
    /// The driver has no GPU of that ordinal.
    #[error("there is no CUDA device {ordinal}: the driver finds {n_devices}")]
    NoDevice {
        /// The ordinal that was requested.
        ordinal: usize,
        /// The number of devices.
        n_devices: usize,
    },
    /// The GPU is older than the kernels support.
    #[error("the kernels need compute capability 8.0 or later, and {name} has {major}.{minor}: use --device gpu")]
    OldDevice {
        /// The GPU's name.
        name: String,
        /// The major number of its compute capability.
        major: i32,
        /// The minor number.
        minor: i32,
    },
    /// An option is out of its range.
    #[error("{option} must be at least 1{}", if *max == usize::MAX { String::new() } else { format!(" and at most {max}") })]
    Option {
        /// The option, as a noun phrase such as "the context length".
        option: &'static str,
        /// The largest valid value.
        max: usize,
    },
    /// The model has a part without kernels.
    #[error("the CUDA kernels do not support {part} yet: use --device gpu, cpu or auto")]
    UnsupportedPart {
        /// The part.
        part: &'static str,
    },
    /// The weights, the caches and the scratch buffers need more than the GPU's free memory.
    #[error(
        "the model needs {:.1} MiB and {:.1} MiB of the GPU's memory are free: use a smaller context (-c) or a smaller model, or \
         run it on the CPU with --device cpu", mib(*needed), mib(*available)
    )]
    ModelTooLarge {
        /// Bytes of weights, caches and scratch buffers.
        needed: u64,
        /// Free bytes.
        available: u64,
    },
    /// The driver has no memory for a buffer.
    #[error("the GPU has no room for {what} ({:.1} MiB): use a smaller context (-c) or a smaller model", mib(*bytes))]
    OutOfMemory {
        /// The use of the buffer, as a noun phrase.
        what: &'static str,
        /// The buffer's size in bytes.
        bytes: u64,
    },
    /// Two GPUs have no peer access to each other's memory.
    #[error(
        "cuda:{from} has no access to the memory of cuda:{to}, which tensor parallelism needs: choose other GPUs, or give each \
         a replica (serve --device cuda:{from},cuda:{to})"
    )]
    NoPeerAccess {
        /// The ordinal of the GPU that reads and writes.
        from: usize,
        /// The ordinal of the GPU whose memory it is.
        to: usize,
    },
    /// There are more ranks than kernels exchange data between.
    #[error("tensor parallelism takes {max} GPUs at most, not {n_ranks}: use fewer, or replicas (serve --replicas)")]
    TooManyRanks {
        /// The number of ranks that was requested.
        n_ranks: usize,
        /// The largest number of ranks.
        max: usize,
    },
    /// Neither attention nor a feed-forward of the model can be sharded by that many ranks.
    #[error(
        "neither the attention nor the feed-forwards of this model can be divided among {n_ranks} GPUs (their heads or widths, in \
         blocks of their types, are too few, or they have parts that need whole rows): use fewer GPUs, or replicas (serve --replicas)"
    )]
    Indivisible {
        /// The number of ranks that was requested.
        n_ranks: usize,
    },
    /// A rank failed or did not arrive at an exchange in time, so the ranks are not at the same step any more.
    #[error(
        "the GPUs that share the model are no longer at the same step: one of them failed, or did not arrive in time"
    )]
    RanksDiverged,
    /// A call of the driver, or a kernel, failed.
    #[error("CUDA could not {what}: {why}")]
    Driver {
        /// The operation, as an infinitive after "could not".
        what: &'static str,
        /// The driver's message.
        why: String,
    },
    /// A launch could reach beyond a buffer, so it was refused. Only debug builds check this.
    #[error("the kernel {kernel} would touch {needed} bytes at `{field}`, which has {available}: please report this")]
    OutOfBounds {
        /// The kernel.
        kernel: &'static str,
        /// The argument that is the address.
        field: &'static str,
        /// Bytes from the address on that the kernel may touch.
        needed: u64,
        /// Bytes from the address to the end of its buffer; 0: it is of no buffer.
        available: u64,
    },
    /// A matrix of a launch has a weight layout that there is not, so the launch was refused. Only debug builds check this.
    #[error("the kernel {kernel} would read `{field}` in the unknown weight layout {format}: please report this")]
    UnknownFormat {
        /// The kernel.
        kernel: &'static str,
        /// The argument that is the matrix.
        field: &'static str,
        /// The number of the layout.
        format: u32,
    },
    /// The [`Watch`](metal_attention_model::Watch) was cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl CudaError {
    /// The reason in short, without advice, for the log of `--device auto`.
    pub fn why_not(&self) -> String {
        match self {
            Self::NoDriver => "there is no NVIDIA driver here".into(),
            Self::NoDevice { .. } => "the NVIDIA driver finds no GPU".into(),
            Self::ModelTooLarge { needed, available } => {
                format!("the model needs {:.1} MiB, and there are {:.1} MiB for it", mib(*needed), mib(*available))
            }
            Self::OldDriver { .. }
            | Self::OldDevice { .. }
            | Self::Option { .. }
            | Self::UnsupportedPart { .. }
            | Self::OutOfMemory { .. }
            | Self::Driver { .. }
            | Self::NoPeerAccess { .. }
            | Self::TooManyRanks { .. }
            | Self::Indivisible { .. }
            | Self::RanksDiverged
            | Self::OutOfBounds { .. }
            | Self::UnknownFormat { .. }
            | Self::Cancelled => self.to_string(),
        }
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

impl From<CudaError> for metal_attention_model::ForwardError {
    fn from(e: CudaError) -> Self {
        match e {
            CudaError::Cancelled => Self::Cancelled,
            e => Self::Device { why: e.to_string() },
        }
    }
}
