//! Everything that can go wrong between a file's name and a token.

use metal_attention_cpu::CpuError;
use metal_attention_gguf::GgufError;
use metal_attention_model::{ForwardError, ModelError};
use metal_attention_tokenizer::TokenizerError;

use crate::sampling::SamplingError;
use crate::{Device, RerankError};

/// What [`Error::NoNumbers`] says; a scheduler says the same.
pub(crate) const NO_NUMBERS: &str = "the model gives NaN or infinity instead of numbers: the file or the device is damaged; \
     metal-attention compare tells which layer it comes from";

/// What [`Error::Constraint`] begins with; a scheduler says the same.
pub(crate) const CONSTRAINT: &str = "the constraint on the text failed";

/// What [`Error::NoText`] says; a scheduler says the same.
pub(crate) const NO_TEXT: &str = "the model writes no text: it is for embeddings (embed, /v1/embeddings) or for ranking documents \
     (rerank, /v1/rerank)";

/// Why a model could not be opened or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file is missing, damaged, or no GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The file describes no model that can run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The file describes no tokenizer that can work.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Sampling options that make no sense.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The model cannot score documents.
    #[error(transparent)]
    Rerank(#[from] RerankError),
    /// A batch was refused or failed.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// The CPU backend could not be set up.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// A GPU cannot be used, or has no room for the model.
    #[cfg(feature = "wgpu")]
    #[error(transparent)]
    Wgpu(#[from] metal_attention_wgpu::WgpuError),
    /// CUDA cannot be used, or the GPU has no room for the model.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] metal_attention_cuda::CudaError),
    /// A GPU was asked for, and this build has none.
    #[error(
        "the device \"{device}\" is not available: this program was built without it (the Cargo features \"wgpu\" and \
         \"cuda\"); use \"auto\" or \"cpu\""
    )]
    DeviceUnavailable {
        /// The device that was asked for.
        device: Device,
    },
    /// No device has a name like this.
    #[error(
        "{device:?} is no device: use \"auto\", \"cpu\", \"cuda\", \"cuda:1\", \"wgpu\", \"wgpu:1\" (by index) or \"wgpu:NAME\" (by a part of the name)"
    )]
    UnknownDevice {
        /// The name.
        device: String,
    },
    /// Several cards, and a device that is none of CUDA's.
    #[error(
        "a model is shared out among {n_ranks} cards through CUDA alone, and not with --device {device}: use --device cuda (the first \
         of the cards), or replicas of the model (serve --replicas)"
    )]
    TensorParallelWithoutCuda {
        /// The device that was named.
        device: Device,
        /// Cards that were asked for.
        n_ranks: usize,
    },
    /// There is nothing to continue: no text, and the vocabulary adds no token of its own.
    #[error("the prompt is empty, and this model adds no token that begins a text: give it at least one token")]
    EmptyPrompt,
    /// A prompt that the context cannot hold.
    #[error(
        "the prompt has {n_prompt} tokens, but the context has room for {n_ctx}: shorten the prompt or ask for a larger context (-c {n_prompt} or more; the model was trained with {n_ctx_train})"
    )]
    PromptTooLong {
        /// Tokens in the prompt.
        n_prompt: usize,
        /// Tokens the context has room for.
        n_ctx: usize,
        /// Context length of the training.
        n_ctx_train: usize,
    },
    /// Text from a model that sees all tokens of a text at once, or that has no output head.
    #[error("{NO_TEXT}")]
    NoText,
    /// The model computes NaN or infinity where a number belongs.
    #[error("{NO_NUMBERS}")]
    NoNumbers,
    /// The caller's [`LogitsProcessor`](crate::LogitsProcessor) failed, or left no token to choose.
    #[error("the logits processor failed: {0}")]
    LogitsProcessor(String),
    /// The [`Constraint`](crate::Constraint) on the text failed, or left no token to choose.
    #[error("{CONSTRAINT}: {0}")]
    Constraint(String),
    /// The caller's progress function asked to stop, or the [`Watch`](crate::Watch) was cancelled. The micro-batches that
    /// were evaluated stay in the KV cache.
    #[error("interrupted after {done} of {total} prompt tokens")]
    Interrupted {
        /// Prompt tokens in the KV cache.
        done: usize,
        /// Prompt tokens in all.
        total: usize,
    },
}

impl Error {
    /// Whether this is no failure: the caller asked for the work to end.
    pub fn is_cancelled(&self) -> bool {
        match self {
            Self::Interrupted { .. } | Self::Forward(ForwardError::Cancelled) | Self::Cpu(CpuError::Cancelled) => true,
            #[cfg(feature = "cuda")]
            Self::Cuda(metal_attention_cuda::CudaError::Cancelled) => true,
            #[cfg(feature = "wgpu")]
            Self::Wgpu(metal_attention_wgpu::WgpuError::Cancelled) => true,
            _ => false,
        }
    }
}
