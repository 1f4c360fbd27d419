//! The options of a forward pass, on whichever device it runs.

use metal_attention_cpu::CacheType;
use metal_attention_model::{SessionOptions, Watch};

use crate::speculation::DrafterMemory;
use crate::{Device, Model};

/// Context length if neither the caller nor the model's training is shorter.
pub(crate) const DEFAULT_N_CTX: usize = 4096;

/// Default of [`EngineOptions::state_cache`], in bytes.
const DEFAULT_STATE_CACHE: usize = 256 << 20;

/// Options of a [`ForwardPass`](crate::ForwardPass).
#[derive(Debug, Clone, PartialEq)]
pub struct EngineOptions {
    /// The device that runs the model.
    pub device: Device,
    /// Ranks of tensor parallelism: NVIDIA GPUs that share the model. `device` is the first one, through CUDA; the
    /// others follow it.
    pub n_ranks: usize,
    /// Maximum tokens of a sequence. `None`: the context length of the model's training, at max 4096 unless
    /// [`long_context`](Self::long_context) is set.
    pub n_ctx: Option<usize>,
    /// If `n_ctx` is `None`, `Some(n)` selects the context length of the training, as far as one such sequence fits in
    /// half of the memory that the weights leave, when `n` forward passes share the device. `n_cache` is then raised to
    /// at least that, within the same memory. If the device does not report its memory, the context is as with `None`:
    /// at most 4096 tokens.
    pub long_context: Option<usize>,
    /// Number of sequences in the KV cache.
    pub n_seq: usize,
    /// Capacity of the KV cache in tokens, all sequences together. `None`: `n_ctx` for each sequence.
    pub n_cache: Option<usize>,
    /// Number of sequences whose sliding windows fit, in layers that keep only a window. A batch may be refused for
    /// want of a window ([`ForwardError::OutOfPages`](crate::ForwardError::OutOfPages)). `None`: all sequences.
    pub n_windows: Option<usize>,
    /// Bytes for checkpoints of recurrent states, to which sequences can be cut back, in addition to the state that
    /// each sequence continues from. Only in models with recurrent layers.
    pub state_cache: usize,
    /// CPU threads that compute. `None`: one for each physical core.
    pub n_threads: Option<usize>,
    /// Element type of the KV cache.
    pub cache_type: CacheType,
    /// Compute in F32 instead of quantising activations to 8 bits (CPU) or rounding them to the 16 bits of matrix units
    /// (GPU). Slower, and as exact as the weights.
    pub exact: bool,
    /// Tokens of a micro-batch: prompts go through the layers in pieces of at most this many tokens. `None`: the
    /// device's default, which [`ForwardPass::n_ubatch`](crate::ForwardPass::n_ubatch) returns: 512, or 2048 on an H100
    /// or H200 through CUDA if no layer has a window.
    pub n_ubatch: Option<usize>,
    /// The memory of a drafter that will be loaded beside the model: [`long_context`](Self::long_context) and the device
    /// [`auto`](Device::Auto) leave room for it. [`SpeculativePass`](crate::speculation::SpeculativePass) sets it.
    pub drafter: DrafterMemory,
    /// Cancels the set-up and each forward pass from another thread, and reports their progress.
    pub watch: Watch,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            device: Device::Auto,
            n_ranks: 1,
            n_ctx: None,
            long_context: None,
            n_seq: 1,
            n_cache: None,
            n_windows: None,
            state_cache: DEFAULT_STATE_CACHE,
            n_threads: None,
            cache_type: CacheType::F16,
            exact: false,
            n_ubatch: None,
            drafter: DrafterMemory::default(),
            watch: Watch::default(),
        }
    }
}

impl EngineOptions {
    /// The context length of `model` with these options, before any adjustment to a device's memory.
    pub fn n_ctx_of(&self, model: &Model) -> usize {
        self.n_ctx.unwrap_or(model.spec().n_ctx_train.min(DEFAULT_N_CTX))
    }

    /// The options of a session with a context of `n_ctx` tokens and micro-batches of `n_ubatch`, for any backend.
    pub fn session_options(&self, n_ctx: usize, n_ubatch: usize) -> SessionOptions {
        SessionOptions {
            n_ctx,
            n_seq: self.n_seq,
            n_cache: self.n_cache,
            n_windows: self.n_windows,
            state_cache: self.state_cache,
            n_ubatch,
            cache_type: self.cache_type,
            exact: self.exact,
        }
    }
}

#[cfg(test)]
mod tests {
    use metal_attention_cpu::CpuError;

    use super::*;
    use crate::Error;

    #[test]
    fn zero_is_refused_where_it_cannot_work() {
        let model = Model::built_in().unwrap();
        let cpu = EngineOptions { device: Device::Cpu, ..Default::default() };
        for options in [
            EngineOptions { n_ctx: Some(0), ..cpu.clone() },
            EngineOptions { n_seq: 0, ..cpu.clone() },
            EngineOptions { n_cache: Some(0), ..cpu.clone() },
            EngineOptions { n_threads: Some(0), ..cpu.clone() },
            EngineOptions { n_ubatch: Some(0), ..cpu.clone() },
        ] {
            let error = model.forward_pass(&options).err().unwrap();
            assert!(matches!(error, Error::Cpu(CpuError::Option { .. })), "{error}");
        }
    }

    #[test]
    fn the_context_defaults_to_the_training_context() {
        let pass = Model::built_in().unwrap().forward_pass(&EngineOptions::default()).unwrap();
        assert_eq!(pass.n_ctx(), 512);
    }
}
