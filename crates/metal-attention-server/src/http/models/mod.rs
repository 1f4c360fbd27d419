//! The models that are served: which there are ([`registry`]), which are loaded ([`residency`]), and what requests use
//! ([`lease`]).

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
pub use registry::{Models, ServedModel};
pub use residency::StartFailure;
pub use source::{
    MemoryNeed, ModelConfig, ModelDefaults, ModelSource, ModelStore, ModelsOptions, Placement, PullProgress,
    SourceError, StoredModel,
};
