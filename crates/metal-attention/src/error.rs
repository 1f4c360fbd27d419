//! Errors of opening and running a model.

use metal_attention_cpu::CpuError;
use metal_attention_gguf::GgufError;
use metal_attention_model::{ForwardError, ModelError};
use metal_attention_pictures::PictureError;
use metal_attention_tokenizer::TokenizerError;

use crate::backends::{GpuError, GpuErrorKind};
use crate::sampling::SamplingError;
use crate::speculation::{DraftFileError, DraftModelError};
use crate::{Device, RerankError};

/// Message of [`Error::NoNumbers`], and of the scheduler's error of that name.
pub(crate) const NO_NUMBERS: &str = "the model gives NaN or infinity instead of numbers: the file or the device is damaged; \
     metal-attention compare tells which layer it comes from";

/// Start of the message of [`Error::Constraint`], and of the scheduler's.
pub(crate) const CONSTRAINT: &str = "the constraint on the text failed";

/// Message of [`Error::NoText`], and of the scheduler's.
pub(crate) const NO_TEXT: &str = "the model writes no text: it is for embeddings (embed, /v1/embeddings) or for ranking documents \
     (rerank, /v1/rerank)";

/// Why a model could not be opened or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file is missing, damaged, or not a GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The file does not describe a model that can run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The file does not describe a supported tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A sampling option is out of range.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The model cannot score documents.
    #[error(transparent)]
    Rerank(#[from] RerankError),
    /// A model cannot draft for another one.
    #[error(transparent)]
    DraftModel(#[from] DraftModelError),
    /// A draft file cannot be used.
    #[error(transparent)]
    DraftFile(#[from] DraftFileError),
    /// The model has no prediction heads.
    #[error(
        "the model's file has no prediction heads (multi-token prediction), so that they cannot propose tokens: use another \
         drafter, such as ngram"
    )]
    NoHeads,
    /// A batch was refused or failed.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// A picture cannot be decoded, or not be divided as the model wants it.
    #[error(transparent)]
    Picture(#[from] PictureError),
    /// The rows of a picture encoder do not fit the text model.
    #[error(
        "the mmproj file makes rows of {found} values, and the model reads rows of {expected}: use the mmproj file of this model"
    )]
    OtherPictureWidth {
        /// The encoder's width.
        found: usize,
        /// The model's width.
        expected: usize,
    },
    /// A text has more places for pictures than there are pictures.
    #[error("the text has {n_places} places for pictures (<image>), and there are {n_pictures} pictures")]
    PicturePlaces {
        /// Places in the text.
        n_places: usize,
        /// Pictures.
        n_pictures: usize,
    },
    /// The CPU backend could not be set up.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// A GPU cannot be used, or has too little memory for the model.
    #[error(transparent)]
    Gpu(GpuError),
    /// The device's backend is not part of this build.
    #[error(
        "the device \"{device}\" is not available: this program was built without it (the Cargo features \"wgpu\" and \
         \"cuda\"); use \"auto\" or \"cpu\""
    )]
    DeviceUnavailable {
        /// The requested device.
        device: Device,
    },
    /// The text is not the name of a device.
    #[error(
        "{device:?} is no device: use \"auto\", \"cpu\", \"cuda\", \"cuda:1\", \"wgpu\", \"wgpu:1\" (by index) or \"wgpu:NAME\" (by a part of the name)"
    )]
    UnknownDevice {
        /// The text.
        device: String,
    },
    /// Several ranks were requested on a device that is not CUDA's.
    #[error(
        "a model is shared out among {n_ranks} cards through CUDA alone, and not with --device {device}: use --device cuda (the first \
         of the cards), or replicas of the model (serve --replicas)"
    )]
    TensorParallelWithoutCuda {
        /// The requested device.
        device: Device,
        /// The requested number of ranks.
        n_ranks: usize,
    },
    /// A second model, such as a drafter, beside one that several cards share.
    #[error(
        "a drafter cannot run beside a model that several cards share (--tensor-parallel): run one of them without the other"
    )]
    BesideTensorParallelism,
    /// The prompt has no tokens, and the vocabulary adds none.
    #[error("the prompt is empty, and this model adds no token that begins a text: give it at least one token")]
    EmptyPrompt,
    /// The prompt is longer than the context.
    #[error(
        "the prompt has {n_prompt} tokens, but the context has room for {n_ctx}: shorten the prompt or ask for a larger context (-c {n_prompt} or more; the model was trained with {n_ctx_train})"
    )]
    PromptTooLong {
        /// Tokens in the prompt.
        n_prompt: usize,
        /// Capacity of the context.
        n_ctx: usize,
        /// Context length of the training.
        n_ctx_train: usize,
    },
    /// A generation with a model that has no causal mask, or no output head.
    #[error("{NO_TEXT}")]
    NoText,
    /// The model computed NaN or infinity.
    #[error("{NO_NUMBERS}")]
    NoNumbers,
    /// The caller's [`LogitsProcessor`](crate::LogitsProcessor) failed, or leaves no token.
    #[error("the logits processor failed: {0}")]
    LogitsProcessor(String),
    /// The [`Constraint`](crate::Constraint) failed, or allows no token.
    #[error("{CONSTRAINT}: {0}")]
    Constraint(String),
    /// The caller's progress function returned `Break`, or the [`Watch`](crate::Watch) was cancelled. Evaluated
    /// micro-batches stay in the KV cache.
    #[error("interrupted after {done} of {total} prompt tokens")]
    Interrupted {
        /// Prompt tokens in the KV cache.
        done: usize,
        /// Prompt tokens in all.
        total: usize,
    },
}

impl Error {
    /// Whether the caller cancelled the work, so that this is not a failure.
    pub fn is_cancelled(&self) -> bool {
        match self {
            Self::Interrupted { .. } | Self::Forward(ForwardError::Cancelled) | Self::Cpu(CpuError::Cancelled) => true,
            Self::Gpu(error) => error.kind() == GpuErrorKind::Cancelled,
            _ => false,
        }
    }
}
