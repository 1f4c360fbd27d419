//! Flags for the device, the context, threads and precision of a model.

use metal_attention::{CacheType, Device, EngineOptions, Model};

use crate::interrupt;

/// Names that other programs have for `--ctx-size`.
pub const CTX_SIZE_ELSEWHERE: [&str; 4] = ["n-ctx", "num-ctx", "context-size", "context-length"];

/// Device, context, threads and precision, for one device.
#[derive(clap::Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// The device of the model: auto (a GPU in which it fits, preferably through CUDA, else the CPU), cpu, cuda, cuda:1,
    /// wgpu, wgpu:1 (by index), wgpu:NAME
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: Device,

    /// The same as --device wgpu
    #[arg(long, visible_alias = "gpu", conflicts_with = "device")]
    wgpu: bool,

    #[command(flatten)]
    setup: SetupArgs,
}

impl EngineArgs {
    /// The options for `model` that the flags give.
    pub fn options(&self, model: &Model) -> EngineOptions {
        let device = if self.wgpu { Device::Wgpu } else { self.device.clone() };
        EngineOptions { device, ..self.setup.options(model) }
    }
}

/// Context, threads and precision, without the device.
#[derive(clap::Args, Clone)]
#[command(next_help_heading = "Engine")]
pub struct SetupArgs {
    /// Length of the context in tokens; 0: as long as the model was trained with [default: the same, at most 4096; serve: as long
    /// as fits into half of the memory that the weights leave]
    #[arg(short = 'c', long, aliases = CTX_SIZE_ELSEWHERE, value_name = "N")]
    ctx_size: Option<usize>,

    /// Threads that compute on the CPU [default: one for each physical core]
    #[arg(short = 't', long, aliases = ["n-threads", "num-threads"], value_name = "N", value_parser = at_least_one)]
    threads: Option<usize>,

    /// NVIDIA GPUs that share the model by tensor parallelism, each with a part of every layer: that of --device cuda (cuda:2) and
    /// those that follow it
    #[arg(long, alias = "tensor-parallel-size", value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    tensor_parallel: usize,

    /// MiB of memory for snapshots of recurrent states, in models that have them (LFM2). One is kept at every 64th token; if memory
    /// is short, fewer of the older ones. A sequence that is cut back, or that begins like an earlier prompt, is evaluated again
    /// from the last snapshot on
    #[arg(long, value_name = "MIB", default_value = "256")]
    state_cache: usize,

    #[command(flatten)]
    compute: ComputeArgs,
}

impl SetupArgs {
    /// These flags, with the context `n_ctx` if it is given.
    pub fn with_n_ctx(self, n_ctx: Option<usize>) -> Self {
        Self { ctx_size: n_ctx.or(self.ctx_size), ..self }
    }

    /// The options for `model`, on the default device.
    pub fn options(&self, model: &Model) -> EngineOptions {
        EngineOptions {
            n_ctx: match self.ctx_size {
                Some(0) => Some(model.spec().n_ctx_train),
                n_ctx => n_ctx,
            },
            n_threads: self.threads,
            n_ranks: self.tensor_parallel,
            state_cache: self.state_cache.saturating_mul(1 << 20),
            ..self.compute.options()
        }
    }
}

/// Precision and batching.
#[derive(clap::Args, Clone)]
#[command(next_help_heading = "Engine")]
pub struct ComputeArgs {
    /// Number format of the KV cache: f16 or f32
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    cache_type: CacheType,

    /// Compute in F32 instead of quantising activations to 8 bits (CPU) or using 16-bit matrix units (GPU): slower,
    /// more exact
    #[arg(long)]
    exact: bool,

    /// Most tokens of a micro-batch, which go through the layers at once [default: 512, on an H100 or H200 through CUDA mostly
    /// 2048]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    ubatch_size: Option<usize>,
}

impl ComputeArgs {
    /// The options, with the default device, context and threads. The forward pass stops at a Ctrl-C that does not end the
    /// process.
    pub fn options(&self) -> EngineOptions {
        EngineOptions {
            cache_type: self.cache_type,
            exact: self.exact,
            n_ubatch: self.ubatch_size,
            watch: interrupt::watch(),
            ..Default::default()
        }
    }
}

/// Parses a number greater than 0.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(n) => Ok(n),
        Err(_) => Err("expected a whole number".into()),
    }
}
