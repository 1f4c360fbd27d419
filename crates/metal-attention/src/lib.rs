#![doc = include_str!("../README.md")]

pub mod backends;
mod choice;
pub mod compare;
mod constraint;
mod copy_budget;
mod device;
mod embedding;
mod engine;
mod error;
mod generation;
mod generator;
pub mod host_snapshot;
mod logits_processor;
mod memory;
mod model;
mod picture_speed;
mod pictures;
mod prefix_store;
mod prompt;
mod rerank;
pub mod sampling;
pub mod scheduler;
mod sequence;
mod session_file;
pub mod speculation;
mod stop_strings;
mod text_stream;
mod timings;

pub use constraint::Constraint;
pub use device::Device;
pub use embedding::{Pooled, Pooler};
pub use engine::EngineOptions;
pub use error::Error;
pub use generation::{GenerateOptions, GeneratedToken, Generation, StopReason};
pub use generator::Generator;
pub use host_snapshot::HostSnapshot;
pub use logits_processor::LogitsProcessor;
pub use memory::{available_memory, give_back_memory};
pub use metal_attention_cpu::{
    CacheType, CpuCeilings, CpuError, CpuExecutor, CpuForwardPass, CpuOptions, Isa as CpuIsa, MatrixInput,
    physical_cores, simd_name as cpu_simd_name,
};
#[cfg(feature = "cuda")]
pub use metal_attention_cuda::{
    CudaCeilings, CudaDevice, CudaError, CudaExecutor, CudaForwardPass, CudaSummary, CudaTuning,
    TensorParallelExecutor, TensorParallelPass, cuda_summaries,
};
pub use metal_attention_gguf as gguf;
pub use metal_attention_model::vision;
pub use metal_attention_model::{
    ASLEEP_AFTER, AssistantDrafts, AssistantToken, Batch, BatchToken, DEFAULT_UBATCH, DeviceInfo, Executor,
    ForwardError, ForwardPass, HeadUse, HiddenRequest, HiddenRows, HookedExecutor, Hooks, KernelTime, KernelTotal,
    LayerTrace, LoadedAssistant, LoadedModel, Logits, MemoryUse, ModelSpec, NullExecutor, OutputKind, Outputs, PageUse,
    Phase, Pooling, Position, Profile, ProfiledStep, Recipe, SequenceCache, Session, SessionOptions, Snapshot,
    SnapshotError, StateUse, Step, StepLimits, StepResults, TopK, TracedTokens, TypeChoices, Watch, Weights, highest,
};
pub use metal_attention_pictures as picture_files;
pub use metal_attention_tokenizer as tokenizer;
#[cfg(feature = "wgpu")]
pub use metal_attention_wgpu as wgpu;
#[cfg(feature = "wgpu")]
pub use metal_attention_wgpu::{WgpuExecutor, WgpuForwardPass, WgpuKvCache, WgpuTuning};
pub use model::{BUILT_IN_MODEL, Model, ModelOptions, table_digest};
pub use picture_speed::{PictureEncoderBench, PreparedPicture};
pub use pictures::{
    DividedPicture, PICTURE_PLACE, PictureDivider, PictureEncoder, PictureEncoderPass, PicturePart, PicturePrompt,
    PictureRows, PromptBuilder, TokenLimits,
};
pub use prompt::{ContentHash, PromptSpan, SequenceKey, SpanContent, SpanKey};
pub use rerank::{RerankError, Reranker, best_first};
pub use session_file::{SavedSequence, SessionError, SessionFile};
pub use text_stream::TextStream;
pub use timings::Timings;
