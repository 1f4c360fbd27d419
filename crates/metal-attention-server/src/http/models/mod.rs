//! The models that are served: their names ([`registry`]), which ones are loaded ([`residency`]), and their use by
//! requests ([`lease`]).

mod card;
mod keep_alive;
mod lease;
mod loaded;
mod names;
mod registry;
mod residency;
mod source;

pub use card::{Capabilities, ModelCard};
pub use keep_alive::{KeepAlive, NoTime};
pub use lease::ModelLease;
pub use loaded::{LoadError, LoadedModel};
pub use registry::{Models, RegisteredModel};
pub use residency::{ModelMemory, ModelPhase, StartFailure};
pub use source::{
    MemoryNeed, ModelConfig, ModelDefaults, ModelSource, ModelStore, ModelsOptions, Placement, PullProgress,
    SourceError, StoredModel,
};
