//! GPU kernels of metal-attention: the device, compiled pipelines, WGSL shaders, and one function per kernel that
//! binds buffers to it. Everything goes through wgpu: Vulkan, Metal, DirectX 12.

mod adapter;
mod arena;
mod batch;
mod ceilings;
mod device;
mod disk_cache;
mod dispatch;
mod emit;
mod error;
pub mod kernels;
mod pso;
mod readback;
mod shader;
mod weights;

pub use adapter::{AdapterChoice, AdapterSummary, adapter_summaries, no_hardware};
pub use arena::{Arena, Bind, Slice};
pub use batch::{BatchBuffer, batch_words};
pub use ceilings::{GpuCeilings, LaunchCosts};
pub use device::{GpuDevice, GpuOptions};
pub use dispatch::{Dispatch, ExpertTiles, Extent, Reach, StepSize};
pub use emit::{EmitError, ShaderLanguage, emit};
pub use error::GpuError;
pub use kernels::catalogue;
pub use pso::{PsoCache, PsoKey};
pub use readback::Readback;
pub use shader::{Constant, ShaderFeatures, wgsl};
pub use weights::{GpuMatrix, MatrixPart};
pub use wgpu;
