//! What can go wrong on an NVIDIA GPU.

/// Why CUDA cannot be used, or stopped working.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No driver on this machine.
    #[error("there is no NVIDIA driver here (libcuda was not found): install it, or use --device gpu, cpu or auto")]
    NoDriver,
    /// A driver older than the kernels.
    #[error(
        "the NVIDIA driver is too old: it knows CUDA {}.{}, and the kernels need {}.{} (driver {} or later): update it, or use \
         --device gpu", found / 1000, found % 1000 / 10, wanted / 1000, wanted % 1000 / 10, driver
    )]
    OldDriver {
        /// The version it knows, 1000 times the major number and 10 times the minor one.
        found: i32,
        /// The version the kernels need.
        wanted: i32,
        /// The first driver that knows that.
        driver: &'static str,
    },
    /// A driver, but no GPU of that number.
    #[error("there is no CUDA device {ordinal}: the driver knows of {n_devices}")]
    NoDevice {
        /// The number that was asked for.
        ordinal: usize,
        /// Devices there are.
        n_devices: usize,
    },
    /// A GPU older than the kernels.
    #[error("the kernels need compute capability 8.0 or later, and {name} has {major}.{minor}: use --device gpu")]
    OldDevice {
        /// The GPU's name.
        name: String,
        /// Its compute capability.
        major: i32,
        /// After the point.
        minor: i32,
    },
    /// An option outside its range.
    #[error("{option} must be at least 1{}", if *max == usize::MAX { String::new() } else { format!(" and at most {max}") })]
    Option {
        /// The option, as in "the context length".
        option: &'static str,
        /// The largest value that can work.
        max: usize,
    },
    /// A part of a model without kernels.
    #[error("the CUDA kernels do not know {part} yet: use --device gpu, cpu or auto")]
    UnsupportedPart {
        /// The part.
        part: &'static str,
    },
    /// The model, its KV cache and its work space are larger than what of the GPU's memory is free.
    #[error(
        "the model needs {:.1} MiB and {:.1} MiB of the GPU's memory are free: use a smaller context (-c) or a smaller model, or \
         run it on the CPU with --device cpu", mib(*needed), mib(*available)
    )]
    ModelTooLarge {
        /// Bytes of weights, KV cache and work space.
        needed: u64,
        /// Bytes that are free.
        available: u64,
    },
    /// No memory for a buffer.
    #[error("the GPU has no room for {what} ({:.1} MiB): use a smaller context (-c) or a smaller model", mib(*bytes))]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// Its size.
        bytes: u64,
    },
    /// Cards that cannot see each other's memory.
    #[error(
        "cuda:{from} has no access to the memory of cuda:{to}, which cards need to share a model out: choose others, or give each \
         a replica (serve --device cuda:{from},cuda:{to})"
    )]
    NoPeerAccess {
        /// The number of the card that looks.
        from: usize,
        /// The number of the other one.
        to: usize,
    },
    /// More cards than exchange sums.
    #[error(
        "a model can be shared out among {most} cards at most, not {n_ranks}: use fewer, or replicas (serve --replicas)"
    )]
    TooManyRanks {
        /// Cards that were asked for.
        n_ranks: usize,
        /// Cards that can be.
        most: usize,
    },
    /// A model whose layers cannot be cut.
    #[error(
        "neither the attention nor the feed-forwards of this model can be shared out among {n_ranks} cards (their heads or widths, in \
         blocks of their types, are too few, or they have parts that need whole rows): use fewer cards, or replicas (serve --replicas)"
    )]
    Indivisible {
        /// Cards that were asked for.
        n_ranks: usize,
    },
    /// A card that shares the model failed, or did not answer.
    #[error(
        "the cards that share the model lost each other: one of them failed, or did not come to the same step in time"
    )]
    RanksDiverged,
    /// The driver refused a call, or a kernel failed.
    #[error("CUDA could not {what}: {why}")]
    Driver {
        /// What was tried.
        what: &'static str,
        /// The driver's words.
        why: String,
    },
    /// The [`Watch`](metal_attention_model::Watch) was cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl CudaError {
    /// Why `--device auto` takes something else: without the advice for those who asked for CUDA.
    pub fn why_not(&self) -> String {
        match self {
            Self::NoDriver => "there is no NVIDIA driver here".into(),
            Self::NoDevice { .. } => "the NVIDIA driver knows of no card".into(),
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
