//! The wgpu backend of metal-attention: the forward pass of a language model on a GPU through Vulkan, Metal or
//! DirectX 12.
//!
//! From the bottom up: [`WgpuDevice`] opens a GPU; [`wgsl`] fills in the WGSL templates of `shaders/`;
//! [`PipelineCache`] compiles them; the functions of [`kernels`] bind buffers to a pipeline and return a [`Dispatch`];
//! [`WgpuForwardPass`] uploads the weights, builds a list of dispatches for each kind of batch, and submits them for
//! every batch of tokens.

mod activations;
mod adapter;
mod arena;
mod batch;
mod ceilings;
mod device;
mod disk_cache;
mod dispatch;
mod emit;
mod error;
mod executor;
pub mod kernels;
mod kv_cache;
mod lookahead;
mod mamba;
mod matrix;
mod options;
mod parts;
mod persistent_layers;
mod pipelines;
mod plan;
mod profile;
mod readback;
mod segments;
mod shader;
mod state;
mod waker;
mod weights;

pub use adapter::{AdapterChoice, AdapterSummary, adapter_summaries, no_hardware};
pub use arena::{Arena, Bind, Slice};
pub use batch::{BatchBuffer, batch_words};
pub use ceilings::{LaunchCosts, WgpuCeilings};
pub use device::{WgpuDevice, WgpuOptions};
pub use dispatch::{AccessRange, BatchDims, Dispatch, ExpertTiles, GridExtent};
pub use emit::{EmitError, ShaderLanguage, emit};
pub use error::WgpuError;
pub use executor::{WgpuExecutor, WgpuForwardPass};
pub use kernels::catalogue;
pub use kv_cache::WgpuKvCache;
pub use matrix::{MatrixPart, WgpuMatrix};
pub use options::WgpuTuning;
pub use pipelines::{PipelineCache, PipelineKey};
pub use readback::Readback;
pub use shader::{Constant, ShaderFeatures, wgsl};
pub use wgpu;
