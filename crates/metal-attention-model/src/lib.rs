#![doc = include_str!("../README.md")]

mod architectures;
mod attention;
mod batch_kind;
mod block_conv;
mod cache_groups;
mod cache_type;
mod capacity;
mod dflash;
mod eagle3;
mod error;
mod feed_forward;
mod forward;
mod inputs;
mod layer_ops;
mod loaded;
mod lookahead;
mod metadata_reader;
mod pages;
mod parts;
mod profile;
mod recipe;
mod recurrent;
mod rope;
mod sequence_runs;
mod session;
mod shapes;
mod snapshot;
mod spec;
mod state_input;
mod tensors;
pub mod timing;
mod top_k;
pub mod vision;
mod wake;
mod watch;
mod weights;

pub use architectures::Eagle3Spec;
pub use attention::{
    AttentionGate, AttentionSpec, GateActivation, GateWidth, KvSource, LatentAttentionSpec, Mask, NormOver, Positions,
    QkNorm, QueryTemperature, alibi_slopes,
};
pub use batch_kind::{BatchKind, FewLimits};
pub use block_conv::{BlockConvSpec, BlockConvWeights};
pub use cache_groups::{CacheGroup, CacheGroups, StateCapacity};
pub use cache_type::CacheType;
pub use capacity::{Capacity, DEFAULT_UBATCH, MemoryUse};
pub use dflash::{BlockChoice, BlockChoiceWeights, DFLASH, DflashSpec, LoadedDflash, SelectorWeights};
pub use eagle3::Eagle3;
pub use error::{ForwardError, ModelError};
pub use feed_forward::{Activation, Dense, ExpertNorms, Experts, Router, RouterGroups, RouterScore, SharedExpert};
pub use forward::{
    AfterLayer, BatchToken, DeviceInfo, ForwardPass, HiddenRequest, HiddenRows, Logits, OutputKind, Outputs, argmax,
    check_batch, check_outputs, micro_batches,
};
pub use inputs::{
    Batch, Position, SequenceSpans, Span, SpanPlace, StepInputs, StepSpan, check_blocks, check_spans, check_states,
};
pub use layer_ops::LayerOps;
pub use loaded::{LoadedAssistant, LoadedModel};
pub use lookahead::{Lookahead, is_decode_step};
pub use pages::{MAX_SEQUENCES, PAGE, PageCopy, PageTable, PageUse, Segment, StateUse, check_share};
pub use parts::{FeedForward, Layer, LayerSpec, Loaded, Mixer, Parts, Prepare, Residual, Specs};
pub use profile::{KernelTime, KernelTotal, Phase, Profile, ProfiledStep, Profiler};
pub use recipe::{Recipe, TypeChoices};
pub use recurrent::{
    ChannelMixSpec, ChannelMixWeights, DeltaGates, DeltaRuleSpec, DeltaRuleWeights, KeySharing, LowRankWeights,
    Mamba2Spec, Mamba2Weights, MambaDecay, MambaNorms, MambaSelection, MambaSpec, MambaWeights, RWKV6_MIXES, Rwkv6Spec,
    Rwkv6Weights, Rwkv7Spec, Rwkv7Weights, ShortConvSpec, ShortConvWeights, StateLayout,
};
pub use rope::{Rope, RopeFactors, RopeLayout, RopeRows, RopeScaling, RopeSections, Rotation};
pub use sequence_runs::one_run_per_sequence;
pub use session::{
    AssistantDrafts, AssistantToken, Executor, HookedExecutor, Hooks, LastSeen, LayerTrace, NullExecutor, Session,
    SessionOptions, Step, StepLimits, StepResults, TracedTokens,
};
pub use shapes::{MetadataValue, ModelShape, RopeStretch};
pub use snapshot::{CacheBlock, CacheLayout, SequenceCache, SequenceExtent, Snapshot, SnapshotError};
pub use spec::{
    AssistantEnds, AttentionAndMamba2Spec, Classifier, ClassifierActivation, HeadMatrix, InputEmbedding, KvShape,
    ModelSpec, Norm, NormKind, OutputHead, OutputScale, OutputSpec, PerLayerEmbedding, PooledProjection, Pooling,
    ResidualStreams,
};
pub use state_input::{AttendedState, HeadUse, JoinedState, ProjectedState, StateInput};
pub use tensors::TensorSpec;
pub use top_k::{TopK, highest};
pub use wake::{ASLEEP_AFTER, WAKING, wake};
pub use watch::Watch;
pub use weights::{
    AssistantWeights, AttentionAndMamba2Weights, AttentionWeights, ClassifierWeights, DenseWeights, ExpertsWeights,
    LatentAttentionWeights, LayerEmbeddingWeights, LayerStreamsWeights, Linear, NormWeights, PerLayerTables,
    StateInputWeights, StreamsWeights, Weights,
};
