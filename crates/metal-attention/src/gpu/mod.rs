//! The forward pass on a GPU.

mod activations;
mod at_once;
mod forward_pass;
mod kv_cache;
mod lookahead;
mod options;
mod parts;
mod plan;
mod profile;
mod weights;

pub use forward_pass::GpuForwardPass;
pub use kv_cache::GpuKvCache;
pub use options::{GpuForwardPassOptions, GpuMemory};
