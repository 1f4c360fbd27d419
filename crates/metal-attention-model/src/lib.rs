//! What a language model is: its hyperparameters ([`ModelSpec`]), its weights by
//! role ([`Weights`]), and what every backend does with them ([`ForwardPass`]).
//!
//! A model is data: a new architecture is a new way to fill in a [`ModelSpec`].
//! Nobody outside this crate looks at an architecture's name.

mod cache_type;
mod error;
mod forward;
mod pages;
mod profile;
mod recipe;
mod rope;
mod shapes;
mod spec;
mod tensors;
mod top_k;
mod watch;
mod weights;

pub use cache_type::CacheType;
pub use error::{ForwardError, ModelError};
pub use forward::{BatchToken, DeviceInfo, ForwardPass, LayerTrace, Logits, argmax, check_batch};
pub use pages::{MAX_SEQUENCES, PAGE, PageCopy, PageTable, PageUse, check_share};
pub use profile::{KernelTime, KernelTotal, Phase, Profile, ProfiledStep, Profiler};
pub use recipe::{Recipe, TypeChoices};
pub use rope::{Rope, RopeLayout, RopeScaling};
pub use shapes::{ModelShape, RopeFactors};
pub use spec::{Activation, AttentionSpec, FeedForward, LayerSpec, Mixer, ModelSpec};
pub use tensors::TensorSpec;
pub use top_k::{TopK, highest};
pub use watch::Watch;
pub use weights::{AttentionWeights, FeedForwardWeights, LayerWeights, Linear, Weights};
